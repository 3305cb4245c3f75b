"""What tests of faults share."""

from collections.abc import Iterator

import pytest

from precision_time.tests.faults.prefect_server import PrefectServer


@pytest.fixture(scope="session")
def standing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """A Prefect server for commands of which the test is not about that: each would start one of its own for itself."""
    server = PrefectServer(tmp_path_factory.mktemp("standing-server"))
    server.start()
    yield server
    server.stop()
