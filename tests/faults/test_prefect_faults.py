"""A Prefect server whose database is locked, and a server that is off for a while: campaigns go on, nights catch up."""

import contextlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from precision_time.tests.faults.marked_processes import WAIT_S, Campaign, assert_whole
from precision_time.tests.faults.prefect_server import PrefectServer
from precision_time.tests.processes import wait_for

pytestmark = pytest.mark.faults

LOCKED_S = 10.0
#: A night of the test, and as many of them as the server is off.
NIGHT_S, OFF_NIGHTS = 5, 8


@pytest.fixture
def campaign(campaign: Campaign, server: PrefectServer) -> Campaign:
    campaign.environment["PREFECT_API_URL"] = server.url
    return campaign


@contextlib.contextmanager
def lock_database(home: Path) -> Iterator[None]:
    """Hold the database's write lock, so that no statement of the server can write."""
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
    server.assert_caught_up(cells=4)
    campaign.assert_nothing_is_left()


@pytest.mark.long
def test_times_for_which_a_server_that_was_off_made_no_run_are_listed_by_the_run_that_makes_up_for_them(
    tmp_path: Path, measure: Callable[..., Any], record: Callable[..., None]
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.flow_engine import run_flow
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from precision_time.flows.retraining.nightly import nightly_retrain
    from precision_time.flows.retraining.spec import NightlySpec

    record(str(tmp_path / "timings"), measure(models=("mlp",))[:2])
    spec = NightlySpec(data=str(tmp_path / "timings"), registry=str(tmp_path / "registry"))
    server = PrefectServer(tmp_path / "server")
    # The next three runs are made ahead, as of a real night.
    for setting, value in {"LOOP_SECONDS": "1", "MIN_SCHEDULED_TIME": "PT1S"}.items():
        server.environment[f"PREFECT_SERVER_SERVICES_SCHEDULER_{setting}"] = value

    def wait_for_runs(client: Any, *, after: datetime) -> list[Any]:
        def read_runs() -> list[Any]:
            runs = sorted(client.read_flow_runs(), key=lambda run: run.expected_start_time)
            return runs if runs and runs[-1].expected_start_time > after else []

        return wait_for(read_runs, seconds=WAIT_S, what="the runs of the scheduler")

    with temporary_settings({PREFECT_API_URL: server.url}), contextlib.ExitStack() as last:
        last.callback(server.stop)
        server.start()
        with get_client(sync_client=True) as client:
            deployment = client.create_deployment(client.create_flow(nightly_retrain), "nightly-retrain")
            cron = CronSchedule(cron=f"* * * * * */{NIGHT_S}", timezone="Europe/Berlin")
            client.create_deployment_schedules(deployment, [(cron, True)])
            wait_for_runs(client, after=datetime.now(UTC) + timedelta(seconds=NIGHT_S))
        server.stop()
        time.sleep(OFF_NIGHTS * NIGHT_S)
        server.start()
        with get_client(sync_client=True) as client:
            first = wait_for_runs(client, after=datetime.now(UTC))[0]
            night = run_flow(nightly_retrain, flow_run=first, parameters={"spec": spec})
            pages = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["missed-runs"])))
    caught_up = night.catch_up
    assert night.retraining.status == "too little data"
    assert len(caught_up.without_run) >= OFF_NIGHTS - 4
    listed = sorted([*caught_up.without_run, *(skipped.scheduled_for for skipped in caught_up.skipped)])
    assert listed == [first.expected_start_time + timedelta(seconds=NIGHT_S * (1 + n)) for n in range(len(listed))]
    assert len(json.loads(str(pages[0].data))) == len(listed)
