"""Missed runs: one run does the work of all, each its own, or none; people's runs and those to come are left alone."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.schedules import IntervalSchedule
from prefect.flow_engine import run_flow

from precision_time.flows.catch_up import CatchUp, CatchUpPolicy, apply_catch_up

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
    """Runs that no worker took: three of a schedule that are due, its next one, and one that a person started."""
    deployment = client.create_deployment(client.create_flow_from_name("night"), f"night-{time.monotonic_ns()}")
    client.create_deployment_schedules(deployment, [(IntervalSchedule(interval=timedelta(hours=1)), True)])
    now = datetime.now(UTC)
    span = {"start_time": now - timedelta(hours=MISSED), "end_time": now + timedelta(hours=1)}
    asked = {name: value.isoformat() for name, value in span.items()} | {"min_runs": MISSED + 1}
    client.request("POST", "/deployments/{id}/schedule", path_params={"id": deployment}, json=asked)
    by_hand = client.create_flow_run_from_deployment(deployment)
    found = [run for run in client.read_flow_runs() if run.deployment_id == deployment]
    scheduled = sorted((run for run in found if run.auto_scheduled), key=lambda run: run.expected_start_time)
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
    assert [one.name for one in caught_up.skipped] == [run.name for run in missed[1:MISSED]]
    assert [one.scheduled_for for one in caught_up.skipped] == [run.expected_start_time for run in missed[1:MISSED]]
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
