"""Scheduled runs that were missed while nothing could run them: which one does the work, and which are skipped."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

__all__ = ["CatchUp", "CatchUpPolicy", "SkippedRun", "apply_catch_up"]

#: ``latest``: one run does the work of all that are due. ``all``: each of them runs, one after another. ``none``: what
#: could not start in time is not made up for.
CatchUpPolicy = Literal["latest", "all", "none"]

#: A run that starts later than this after its time counts as missed.
GRACE = timedelta(hours=1)


class SkippedRun(BaseModel):
    """A scheduled run that was set to Cancelled (name ``Skipped``), and the time it was to start."""

    model_config = ConfigDict(frozen=True)

    name: str
    scheduled_for: datetime


class CatchUp(BaseModel):
    """What came of missed runs: ``skipped`` will not run, and this run does the work only if ``proceed``."""

    model_config = ConfigDict(frozen=True)

    skipped: list[SkippedRun] = []
    proceed: bool = True
    reason: str = "no run was missed"


def apply_catch_up(policy: CatchUpPolicy, *, grace: timedelta = GRACE) -> CatchUp:
    """Apply ``policy`` to the runs of this run's schedule that are due and still wait; call it first in a flow.

    Under ``latest`` they are skipped, and this run does the work once. Under ``none`` they are skipped too, and this
    run proceeds only if it began within ``grace`` of its own time. Under ``all`` nothing is skipped. Runs that a person
    started, and runs of the future, are never touched. What is skipped is written to the run's log. Outside a run of a
    deployment nothing was missed.
    """
    from prefect import get_run_logger
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.deployment_id is None or policy == "all":
        return CatchUp(reason="every missed run is made up for" if policy == "all" else "no run was missed")
    now = datetime.now(UTC)
    late = _lateness(run, now)
    with get_client(sync_client=True) as client:
        skipped = [
            SkippedRun(name=due.name, scheduled_for=due.expected_start_time)
            for due in _due_runs(client, run.deployment_id, now)
            if due.id != run.id and due.expected_start_time is not None and _skip(client, due, by=run.name)
        ]
    for one in skipped:
        get_run_logger().info("skipped %s, which was to run at %s", one.name, f"{one.scheduled_for:%Y-%m-%d %H:%M %Z}")
    count = f"{len(skipped)} missed run{'s' if len(skipped) != 1 else ''} skipped"
    if policy == "none" and late > grace:
        return CatchUp(
            skipped=skipped, proceed=False, reason=f"this run was missed {late} ago and is not made up for; {count}"
        )
    return CatchUp(skipped=skipped, reason=f"{count}: this run does their work" if skipped else "no run was missed")


def _lateness(run: "FlowRun", now: datetime) -> timedelta:
    """How long after its time a scheduled run began; nothing for one that a person started."""
    if not run.auto_scheduled or run.expected_start_time is None:
        return timedelta(0)
    return timedelta(seconds=round(max(0.0, (now - run.expected_start_time).total_seconds())))


def _due_runs(client: "SyncPrefectClient", deployment: UUID, now: datetime) -> "list[FlowRun]":
    """The runs of the deployment's schedule whose time has come and that have not started, oldest first."""
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterDeploymentId,
        FlowRunFilterExpectedStartTime,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.client.schemas.sorting import FlowRunSort

    due: list[FlowRun] = []
    while True:  # the server answers with 200 at most
        page = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                deployment_id=FlowRunFilterDeploymentId(any_=[deployment]),
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED])),
                expected_start_time=FlowRunFilterExpectedStartTime.model_validate({"before_": now}),
            ),
            sort=FlowRunSort.EXPECTED_START_TIME_ASC,
            offset=len(due),
        )
        due += page
        if not page:
            return [one for one in due if one.auto_scheduled]


def _skip(client: "SyncPrefectClient", run: "FlowRun", *, by: str) -> bool:
    """Whether ``run`` is cancelled now; not when a worker has taken it meanwhile."""
    from prefect.client.schemas.objects import State
    from prefect.client.schemas.responses import SetStateStatus
    from prefect.states import Cancelled

    state: State[Any] = Cancelled(name="Skipped", message=f"Missed; {by} did the work that was due.")
    return client.set_flow_run_state(run.id, state).status == SetStateStatus.ACCEPT
