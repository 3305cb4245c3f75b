"""Scheduled runs that were missed while nothing could run them: which one does their work, and which are skipped."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import UUID

from pydantic import BaseModel, ConfigDict

from precision_time.flows.ground.prefect_artifacts import LiveTable

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.filters import FlowRunFilterState
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.schedules import SCHEDULE_TYPES

__all__ = ["CatchUp", "CatchUpPolicy", "SkippedRun", "apply_catch_up", "list_missed_times"]

#: ``latest``: one run makes up for all runs that are due. ``all``: each of them runs, one after another. ``none``: runs
#: that could not start in time are not made up for.
CatchUpPolicy = Literal["latest", "all", "none"]

#: A run that starts later than this after its time counts as missed.
GRACE = timedelta(hours=1)
#: The most times that Prefect lists for a schedule, and so the most that are listed here; a log lists fewer.
MOST_TIMES = 1000
_LOGGED_TIMES = 30
_TIME = "%Y-%m-%d %H:%M:%S %Z"


class SkippedRun(BaseModel):
    """A scheduled run that was set to Cancelled (name ``Skipped``), and the time it should have started."""

    model_config = ConfigDict(frozen=True)

    name: str
    scheduled_for: datetime


class CatchUp(BaseModel):
    """The decision about missed runs: ``skipped`` will not run, and this run does the work only if ``proceed``.

    ``without_run`` are times of the schedule for which the server made no run, because it was off.
    """

    model_config = ConfigDict(frozen=True)

    skipped: list[SkippedRun] = []
    without_run: list[datetime] = []
    proceed: bool = True
    reason: str = "no run was missed"


def apply_catch_up(policy: CatchUpPolicy, *, grace: timedelta = GRACE) -> CatchUp:
    """Apply ``policy`` to the waiting runs of this run's schedule that are due; call it first in a flow.

    Under ``latest`` they are skipped, and this run does their work once. Under ``none`` they are skipped as well, and
    this run proceeds only if it began within ``grace`` of its own time. Under ``all`` nothing is skipped. Runs that a
    person started and future runs are never touched. Outside a run of a deployment nothing counts as missed.

    Prefect makes only the next few runs of a schedule, so a server that was off for long has no runs for most of the
    missed times, under any policy. Skipped runs and times without a run are listed in the run's log and in the table
    ``missed-runs`` on its page.
    """
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.deployment_id is None:
        return CatchUp(reason="every missed run is made up for" if policy == "all" else "no run was missed")
    now = datetime.now(UTC)
    with get_client(sync_client=True) as client:
        due = [due_run for due_run in _due_runs(client, run.deployment_id, now) if due_run.id != run.id]
        # Under `all` each due run comes here in turn, and the last one lists the times.
        without_run = _find_times_without_run(client, run, due, now) if policy != "all" or not due else []
        skipped = [
            SkippedRun(name=due_run.name, scheduled_for=due_run.expected_start_time)
            for due_run in due
            if policy != "all" and due_run.expected_start_time is not None and _skip(client, due_run, by=run.name)
        ]
    caught_up = _decide(policy, skipped, without_run, late=_lateness(run, now), grace=grace)
    _list_missed(caught_up, by=run.name)
    return caught_up


def _decide(
    policy: CatchUpPolicy,
    skipped: list[SkippedRun],
    without_run: list[datetime],
    *,
    late: timedelta,
    grace: timedelta,
) -> CatchUp:
    counts = [_count(len(skipped), "missed run") + " skipped"] if skipped else []
    counts += [_count(len(without_run), "missed time") + " without a run"] if without_run else []
    is_too_late = policy == "none" and late > grace
    if is_too_late:
        reason = "; ".join([f"this run was missed {late} ago and does nothing", *counts])
    elif policy == "all":
        reason = "; ".join(["every missed run is made up for", *counts])
    else:
        reason = f"{'; '.join(counts)}: this run does their work" if counts else "no run was missed"
    return CatchUp(skipped=skipped, without_run=without_run, proceed=not is_too_late, reason=reason)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _list_missed(caught_up: CatchUp, *, by: str) -> None:
    """List missed runs and times in the run's log and on its page, if there are any."""
    from prefect import get_run_logger

    log = get_run_logger()
    rows = []
    for run in caught_up.skipped:
        scheduled = f"{run.scheduled_for:{_TIME}}"
        log.info("skipped %s, which was scheduled for %s", run.name, scheduled)
        rows.append({"scheduled for": scheduled, "run": run.name, "outcome": "skipped"})
    times = [f"{time:{_TIME}}" for time in caught_up.without_run]
    for time in times[:_LOGGED_TIMES]:
        log.info("no run was made for %s: the server was off", time)
    if len(times) > _LOGGED_TIMES:
        log.info("nor for %d more times up to %s", len(times) - _LOGGED_TIMES, times[-1])
    rows += [{"scheduled for": time, "run": "none", "outcome": "the server was off"} for time in times]
    if rows:
        table = LiveTable("missed-runs", description=f"Missed before {by}: {caught_up.reason}")
        table.write_rows(sorted(rows, key=lambda row: row["scheduled for"]))


def list_missed_times(
    schedules: "Iterable[SCHEDULE_TYPES]", *, since: datetime, until: datetime, taken: Iterable[datetime]
) -> list[datetime]:
    """The times of ``schedules`` from ``since`` to ``until`` that are not ``taken``, in UTC, at most ``MOST_TIMES``.

    Cron lines are in their own time zone, as on the server.
    """
    from prefect.server.schemas import schedules as server_schedules
    from prefect.utilities.asyncutils import run_coro_as_sync

    scheduled: set[datetime] = set()
    for schedule in schedules:
        dates = getattr(server_schedules, type(schedule).__name__).model_validate(schedule.model_dump())
        times: list[datetime] = cast(Any, run_coro_as_sync(dates.get_dates(n=MOST_TIMES, start=since, end=until)))
        scheduled |= {_in_seconds(time) for time in times}
    return sorted(scheduled - {_in_seconds(time) for time in taken})[:MOST_TIMES]


def _in_seconds(time: datetime) -> datetime:
    # A schedule's times are whole seconds, while runs have microseconds, which a database may round.
    return datetime.fromtimestamp(round(time.timestamp()), UTC)


def _find_times_without_run(
    client: "SyncPrefectClient", run: "FlowRun", due: "Sequence[FlowRun]", now: datetime
) -> list[datetime]:
    """The scheduled times since the first missed run for which there is no run in any state.

    They count from the first run that is due: a schedule that was switched off meanwhile has lost its future runs.
    """
    missed = [
        missed_run.expected_start_time
        for missed_run in (*due, run)
        if missed_run.auto_scheduled and missed_run.expected_start_time
    ]
    if not missed or run.deployment_id is None:
        return []
    schedules = [entry.schedule for entry in client.read_deployment(run.deployment_id).schedules if entry.active]
    since = min(missed)
    if not list_missed_times(schedules, since=since, until=now, taken=missed):
        return []
    taken = [existing.expected_start_time for existing in _read_runs(client, run.deployment_id, since, now)]
    return list_missed_times(schedules, since=since, until=now, taken=[time for time in taken if time is not None])


def _lateness(run: "FlowRun", now: datetime) -> timedelta:
    """How long after its time a scheduled run began; zero for a run that a person started."""
    if not run.auto_scheduled or run.expected_start_time is None:
        return timedelta(0)
    return timedelta(seconds=round(max(0.0, (now - run.expected_start_time).total_seconds())))


def _due_runs(client: "SyncPrefectClient", deployment: UUID, now: datetime) -> "list[FlowRun]":
    """The runs of the deployment's schedule that are due and have not started, oldest first."""
    from prefect.client.schemas.filters import FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType

    waiting = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED]))
    return [run for run in _read_runs(client, deployment, None, now, state=waiting) if run.auto_scheduled]


def _read_runs(
    client: "SyncPrefectClient",
    deployment: UUID,
    since: datetime | None,
    until: datetime,
    *,
    state: "FlowRunFilterState | None" = None,
) -> "list[FlowRun]":
    """The runs of the deployment with a start time in that span, in ``state`` or in any state, oldest first."""
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterDeploymentId,
        FlowRunFilterExpectedStartTime,
    )
    from prefect.client.schemas.sorting import FlowRunSort

    span = {"before_": until} | ({} if since is None else {"after_": since})
    in_span = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[deployment]),
        state=state,
        expected_start_time=FlowRunFilterExpectedStartTime.model_validate(span),
    )
    runs: list[FlowRun] = []
    while True:  # the server returns 200 runs at most
        page = client.read_flow_runs(
            flow_run_filter=in_span, sort=FlowRunSort.EXPECTED_START_TIME_ASC, offset=len(runs)
        )
        runs += page
        if not page:
            return runs


def _skip(client: "SyncPrefectClient", run: "FlowRun", *, by: str) -> bool:
    """Cancel ``run``; False when a worker has started it meanwhile."""
    from prefect.client.schemas.objects import State
    from prefect.client.schemas.responses import SetStateStatus
    from prefect.states import Cancelled

    state: State[Any] = Cancelled(name="Skipped", message=f"Missed; {by} did its work.")
    return client.set_flow_run_state(run.id, state).status == SetStateStatus.ACCEPT
