"""A Prefect server whose database is locked for a while: the campaign goes on, and its pages catch up."""

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from precision_time.tests.faults.test_campaign_faults import MARK, WAIT_S, Campaign, assert_whole
from precision_time.tests.faults.test_campaign_limits import PrefectServer

pytestmark = pytest.mark.faults

LOCKED_S = 10.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PrefectServer]:
    server = PrefectServer(tmp_path / "server")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def campaign(tmp_path: Path, server: PrefectServer) -> Iterator[Campaign]:
    campaign = Campaign(tmp_path, tmp_path / "server")
    campaign.environment["PREFECT_API_URL"] = server.url
    yield campaign
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == campaign.mark:
                process.kill()


@contextlib.contextmanager
def lock_database(home: Path) -> Iterator[None]:
    """Nobody else may write, and none of the server's statements that would gets through."""
    connection = sqlite3.connect(home / "prefect.db", timeout=30, isolation_level=None)
    try:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")
    finally:
        connection.close()


def test_a_database_that_is_locked_for_a_while_costs_no_cell_and_its_pages_catch_up(
    campaign: Campaign, server: PrefectServer, tmp_path: Path
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
    from prefect.settings import PREFECT_API_URL, temporary_settings

    campaign.write()
    process = campaign.start()
    campaign.wait_for_cells(process, 1)
    with lock_database(tmp_path / "server"):
        time.sleep(LOCKED_S)
        assert process.poll() is None, "the campaign did not outlive the lock"
    out, err = process.communicate(timeout=3 * WAIT_S)
    assert process.returncode == 0, err
    assert json.loads(out)["cells_measured"] == 4
    assert_whole(campaign.data, cells=4)
    with temporary_settings({PREFECT_API_URL: server.url}), get_client(sync_client=True) as client:
        (run,) = client.read_flow_runs()
        assert run.state_type is not None
        assert run.state_type.value == "COMPLETED"
        tasks = client.read_task_runs()
        assert [task.state_type and task.state_type.value for task in tasks] == ["COMPLETED"] * 4

        def read_page(key: str) -> object:
            (page,) = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
            return page.data

        assert read_page("campaign-faults-progress") == 100.0
        assert len(json.loads(str(read_page("campaign-faults")))) == 4
    campaign.assert_nothing_is_left()
