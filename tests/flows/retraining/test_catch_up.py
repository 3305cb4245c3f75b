"""Missed runs: one run makes up for all, each for itself, or none; runs of people and future runs stay as they are."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, LogFilter, LogFilterFlowRunId
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect.flow_engine import run_flow

from precision_time.flows.retraining.catch_up import CatchUp, CatchUpPolicy, apply_catch_up, list_missed_times

pytestmark = pytest.mark.usefixtures("prefect_server")

MISSED = 3


@flow(name="night")
def night(policy: CatchUpPolicy, grace_s: float) -> CatchUp:
    return apply_catch_up(policy, grace=timedelta(seconds=grace_s))


@pytest.fixture
def client(prefect_server: None) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


@pytest.fixture
def missed(client: SyncPrefectClient) -> Iterator[list[Any]]:
    """Runs without a worker: three of a schedule that are due, its next run, and a run that a person started."""
    deployment = client.create_deployment(client.create_flow_from_name("night"), f"night-{time.monotonic_ns()}")
    client.create_deployment_schedules(deployment, [(IntervalSchedule(interval=timedelta(hours=1)), True)])
    now = datetime.now(UTC)
    span = {"start_time": now - timedelta(hours=MISSED), "end_time": now + timedelta(hours=1)}
    body = {name: value.isoformat() for name, value in span.items()} | {"min_runs": MISSED + 1}
    client.request("POST", "/deployments/{id}/schedule", path_params={"id": deployment}, json=body)
    by_hand = client.create_flow_run_from_deployment(deployment)
    runs = [run for run in client.read_flow_runs() if run.deployment_id == deployment]
    scheduled = sorted((run for run in runs if run.auto_scheduled), key=lambda run: run.expected_start_time)
    assert len(scheduled) == MISSED + 1
    yield [*scheduled, by_hand]
    client.delete_deployment(deployment)


@pytest.fixture
def states(client: SyncPrefectClient, missed: list[Any]) -> Callable[[], list[str]]:
    return lambda: [client.read_flow_run(run.id).state.name for run in missed]


def start(run: Any, policy: CatchUpPolicy, *, grace_s: float = 3600.0) -> CatchUp:
    return run_flow(night, flow_run=run, parameters={"policy": policy, "grace_s": grace_s})


def test_the_first_run_does_the_work_of_all_that_are_due(missed: list[Any], states: Callable[[], list[str]]) -> None:
    caught_up = start(missed[0], "latest")
    assert caught_up.proceed
    assert [(skipped.name, skipped.scheduled_for) for skipped in caught_up.skipped] == [
        (run.name, run.expected_start_time) for run in missed[1:MISSED]
    ]
    assert states() == ["Completed", "Skipped", "Skipped", "Scheduled", "Scheduled"]
    assert start(missed[-1], "latest") == CatchUp()


def test_a_run_that_a_person_starts_does_the_work_of_those_that_are_due(
    missed: list[Any], states: Callable[[], list[str]]
) -> None:
    caught_up = start(missed[-1], "none", grace_s=0.0)
    assert caught_up.proceed
    assert states() == ["Skipped"] * MISSED + ["Scheduled", "Completed"]


def test_under_none_a_run_that_is_too_late_does_not_do_its_work(
    missed: list[Any], states: Callable[[], list[str]]
) -> None:
    caught_up = start(missed[0], "none", grace_s=0.5)
    assert not caught_up.proceed
    assert "was missed" in caught_up.reason
    assert len(caught_up.skipped) == MISSED - 1


def test_under_all_every_run_does_its_work(missed: list[Any], states: Callable[[], list[str]]) -> None:
    assert start(missed[0], "all").proceed
    assert states()[1:MISSED] == ["Scheduled"] * (MISSED - 1)


def test_outside_of_a_deployment_nothing_was_missed() -> None:
    assert night("latest", 3600.0) == CatchUp()


@pytest.fixture
def off(client: SyncPrefectClient) -> Iterator[tuple[list[Any], list[datetime]]]:
    """The runs of a server that was off for twelve nights, which are those of the first three, and all twelve times."""
    schedule = CronSchedule(cron="15 2 * * *", timezone="Europe/Berlin")
    deployment = client.create_deployment(client.create_flow_from_name("night"), f"off-{time.monotonic_ns()}")
    client.create_deployment_schedules(deployment, [(schedule, True)])
    now = datetime.now(UTC)
    local = now.astimezone(ZoneInfo("Europe/Berlin"))
    tonight = local.replace(hour=2, minute=15, second=0, microsecond=0)
    last = tonight if tonight <= local else tonight - timedelta(days=1)
    nights = [(last - timedelta(days=11 - night)).astimezone(UTC) for night in range(12)]
    span = {"start_time": nights[0].isoformat(), "end_time": nights[2].isoformat(), "min_runs": 3, "max_runs": 3}
    client.request("POST", "/deployments/{id}/schedule", path_params={"id": deployment}, json=span)
    due = [run for run in client.read_flow_runs() if run.deployment_id == deployment and run.auto_scheduled]
    due = [run for run in due if run.expected_start_time <= now]
    runs = sorted(due, key=lambda run: run.expected_start_time)
    assert [run.expected_start_time for run in runs] == nights[:3]
    yield runs, nights
    client.delete_deployment(deployment)


def said_by(client: SyncPrefectClient, run: Any) -> tuple[str, list[dict[str, Any]]]:
    """The whole log of ``run``, which arrives in bundles, and the table of missed runs on its page."""
    deadline = time.monotonic() + 60
    while True:
        logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])))
        if any(log.message.startswith("Finished in state") for log in logs):
            break
        assert time.monotonic() < deadline, logs
        time.sleep(0.2)
    pages = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["missed-runs"])))
    rows = [json.loads(str(page.data)) for page in pages if page.flow_run_id == run.id]
    return "\n".join(log.message for log in logs), rows[0] if rows else []


def test_nights_for_which_a_server_that_was_off_made_no_run_are_listed_as_well(client: SyncPrefectClient, off) -> None:
    runs, nights = off
    caught_up = start(runs[0], "latest")
    assert caught_up.proceed
    assert [skipped.name for skipped in caught_up.skipped] == [run.name for run in runs[1:]]
    assert caught_up.without_run == nights[3:]
    assert caught_up.reason == "2 missed runs skipped; 9 missed times without a run: this run does their work"
    log, rows = said_by(client, runs[0])
    assert all(f"no run was made for {night:%Y-%m-%d %H:%M}" in log for night in nights[3:])
    assert [(row["scheduled for"][:16], row["run"]) for row in rows] == [
        (f"{night:%Y-%m-%d %H:%M}", name)
        for night, name in zip(nights[1:], [*(run.name for run in runs[1:]), *["none"] * 9], strict=True)
    ]
    # A later run has nothing to make up for.
    by_hand = client.create_flow_run_from_deployment(runs[0].deployment_id)
    assert start(by_hand, "latest") == CatchUp()
    assert said_by(client, by_hand)[1] == []


@pytest.mark.parametrize(("policy", "proceed"), [("none", False), ("latest", True)])
def test_nights_without_a_run_are_listed_whoever_comes_first_and_under_none_too(
    client: SyncPrefectClient, off, policy: CatchUpPolicy, proceed: bool
) -> None:
    runs, nights = off
    caught_up = start(runs[2], policy, grace_s=3600.0)
    assert caught_up.proceed is proceed
    assert (len(caught_up.skipped), caught_up.without_run) == (2, nights[3:])


def test_under_all_nights_without_a_run_are_listed_once_by_the_last(client: SyncPrefectClient, off) -> None:
    runs, nights = off
    listed = [start(run, "all").without_run for run in runs]
    assert listed == [[], [], nights[3:]]


def test_a_schedule_that_was_switched_off_meanwhile_missed_nothing(client: SyncPrefectClient, off) -> None:
    runs, _ = off
    (schedule,) = client.read_deployment_schedules(runs[0].deployment_id)
    client.update_deployment_schedule(runs[0].deployment_id, schedule.id, active=False)
    by_hand = client.create_flow_run_from_deployment(runs[0].deployment_id)
    assert start(by_hand, "latest").without_run == []


def test_missed_times_are_those_of_the_clock_of_the_time_zone() -> None:
    nightly = [CronSchedule(cron="15 4 * * *", timezone="Europe/Berlin")]
    since = datetime(2026, 3, 27, 3, 15, tzinfo=UTC)
    until = datetime(2026, 3, 31, 2, 14, tzinfo=UTC)
    # The clocks go forward on the 29th.
    assert list_missed_times(nightly, since=since, until=until, taken=[since]) == [
        datetime(2026, 3, 28, 3, 15, tzinfo=UTC),
        datetime(2026, 3, 29, 2, 15, tzinfo=UTC),
        datetime(2026, 3, 30, 2, 15, tzinfo=UTC),
    ]
    twice = [*nightly, IntervalSchedule(interval=timedelta(days=1), anchor_date=since)]
    assert len(list_missed_times(twice, since=since, until=until, taken=[since])) == 5
    minutes = [CronSchedule(cron="* * * * *", timezone="UTC")]
    assert len(list_missed_times(minutes, since=since, until=until, taken=[])) == 1000
    assert list_missed_times([], since=since, until=until, taken=[]) == []
