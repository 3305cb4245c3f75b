"""What tests of faults share: a campaign whose processes are marked, and Prefect servers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from precision_time.tests.faults.marked_processes import Campaign
from precision_time.tests.faults.prefect_server import PrefectServer


@pytest.fixture(scope="session")
def standing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """One Prefect server for all commands of tests that are about something else: it saves each a server of its own."""
    server = PrefectServer(tmp_path_factory.mktemp("standing-server"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrefectServer]:
    """A Prefect server that the test may stop, start again and lock."""
    server = PrefectServer(tmp_path / "server")
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the temporary servers of the commands keep their database."""
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture
def campaign(tmp_path: Path, prefect_home: Path) -> Iterator[Campaign]:
    """A campaign in the test's folder; what is left of its processes is killed at the end."""
    campaign = Campaign(tmp_path, prefect_home)
    yield campaign
    campaign.kill_all()
