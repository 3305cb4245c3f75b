"""Scheduled runs that were missed while nothing could run them: which one does the work, and which are skipped."""

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

#: ``latest``: one run does the work of all that are due. ``all``: each of them runs, one after another. ``none``: what
#: could not start in time is not made up for.
CatchUpPolicy = Literal["latest", "all", "none"]

#: A run that starts later than this after its time counts as missed.
GRACE = timedelta(hours=1)
#: What a schedule gives in one go, and so what is listed; a log lists fewer.
MOST_TIMES = 1000
_LOGGED_TIMES = 30
_TIME = "%Y-%m-%d %H:%M:%S %Z"


class SkippedRun(BaseModel):
    """A scheduled run that was set to Cancelled (name ``Skipped``), and the time it was to start."""

    model_config = ConfigDict(frozen=True)

    name: str
    scheduled_for: datetime


class CatchUp(BaseModel):
    """What came of missed runs: ``skipped`` will not run, and this run does the work only if ``proceed``.

    ``without_run`` are times of the schedule for which the server, which was off, never made a run.
    """

    model_config = ConfigDict(frozen=True)

    skipped: list[SkippedRun] = []
    without_run: list[datetime] = []
    proceed: bool = True
    reason: str = "no run was missed"


def apply_catch_up(policy: CatchUpPolicy, *, grace: timedelta = GRACE) -> CatchUp:
    """Apply ``policy`` to the runs of this run's schedule that are due and still wait; call it first in a flow.

    Under ``latest`` they are skipped, and this run does the work once. Under ``none`` they are skipped too, and this
    run proceeds only if it began within ``grace`` of its own time. Under ``all`` nothing is skipped. Runs that a person
    started, and runs of the future, are never touched. Outside a run of a deployment nothing was missed.

    Prefect makes the next few runs of a schedule only, so a server that was off for long has none for most of what was
    missed; those times have no run of their own under any policy. What is skipped and what has no run is written to the
    run's log, and to the table ``missed-runs`` on its page.
    """
    from prefect.client.orchestration import get_client
    from prefect.context import FlowRunContext

    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.deployment_id is None:
        return CatchUp(reason="every missed run is made up for" if policy == "all" else "no run was missed")
    now = datetime.now(UTC)
    with get_client(sync_client=True) as client:
        due = [one for one in _due_runs(client, run.deployment_id, now) if one.id != run.id]
        # Under `all` each of them will look again, and the last one lists.
        without_run = _find_times_without_run(client, run, due, now) if policy != "all" or not due else []
        skipped = [
            SkippedRun(name=one.name, scheduled_for=one.expected_start_time)
            for one in due
            if policy != "all" and one.expected_start_time is not None and _skip(client, one, by=run.name)
        ]
    caught_up = _decide(policy, skipped, without_run, late=_lateness(run, now), grace=grace)
    _tell(caught_up, by=run.name)
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
        reason = "; ".join([f"this run was missed {late} ago and is not made up for", *counts])
    elif policy == "all":
        reason = "; ".join(["every missed run is made up for", *counts])
    else:
        reason = f"{'; '.join(counts)}: this run does their work" if counts else "no run was missed"
    return CatchUp(skipped=skipped, without_run=without_run, proceed=not is_too_late, reason=reason)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _tell(caught_up: CatchUp, *, by: str) -> None:
    """List what was missed, in the log of the run and on its page; nothing where nothing was."""
    from prefect import get_run_logger

    log = get_run_logger()
    rows = [
        {"was to run": f"{one.scheduled_for:{_TIME}}", "run": one.name, "became": "skipped"}
        for one in caught_up.skipped
    ]
    for one in caught_up.skipped:
        log.info("skipped %s, which was to run at %s", one.name, f"{one.scheduled_for:{_TIME}}")
    times = [f"{time:{_TIME}}" for time in caught_up.without_run]
    for time in times[:_LOGGED_TIMES]:
        log.info("no run was made for %s: the server was off", time)
    if len(times) > _LOGGED_TIMES:
        log.info("nor for %d more times up to %s", len(times) - _LOGGED_TIMES, times[-1])
    rows += [{"was to run": time, "run": "none", "became": "the server was off"} for time in times]
    if rows:
        table = LiveTable("missed-runs", description=f"Missed before {by}: {caught_up.reason}")
        table.write_rows(sorted(rows, key=lambda row: row["was to run"]))


def list_missed_times(
    schedules: "Iterable[SCHEDULE_TYPES]", *, since: datetime, until: datetime, taken: Iterable[datetime]
) -> list[datetime]:
    """The times of ``schedules`` from ``since`` to ``until`` that are not ``taken``, in UTC, at most ``MOST_TIMES``.

    Cron lines count in their own time zone, as the server counts them.
    """
    from prefect.server.schemas import schedules as served
    from prefect.utilities.asyncutils import run_coro_as_sync

    left = {_in_seconds(time) for time in taken}
    found: set[datetime] = set()
    for schedule in schedules:
        dates = getattr(served, type(schedule).__name__).model_validate(schedule.model_dump())
        times: list[datetime] = cast(Any, run_coro_as_sync(dates.get_dates(n=MOST_TIMES, start=since, end=until)))
        found |= {_in_seconds(time) for time in times}
    return sorted(found - left)[:MOST_TIMES]


def _in_seconds(time: datetime) -> datetime:
    # A schedule's times are whole seconds; a database may keep less than the microseconds of the others.
    return datetime.fromtimestamp(round(time.timestamp()), UTC)


def _find_times_without_run(
    client: "SyncPrefectClient", run: "FlowRun", due: "Sequence[FlowRun]", now: datetime
) -> list[datetime]:
    """The times since the first run that was missed for which there is no run, whatever became of it.

    Only what is due tells since when: a schedule that was switched off meanwhile has lost its runs to come.
    """
    missed = [one.expected_start_time for one in (*due, run) if one.auto_scheduled and one.expected_start_time]
    if not missed or run.deployment_id is None:
        return []
    schedules = [one.schedule for one in client.read_deployment(run.deployment_id).schedules if one.active]
    since = min(missed)
    if not list_missed_times(schedules, since=since, until=now, taken=missed):
        return []
    taken = [one.expected_start_time for one in _read_runs(client, run.deployment_id, since, now)]
    return list_missed_times(schedules, since=since, until=now, taken=[time for time in taken if time is not None])


def _lateness(run: "FlowRun", now: datetime) -> timedelta:
    """How long after its time a scheduled run began; nothing for one that a person started."""
    if not run.auto_scheduled or run.expected_start_time is None:
        return timedelta(0)
    return timedelta(seconds=round(max(0.0, (now - run.expected_start_time).total_seconds())))


def _due_runs(client: "SyncPrefectClient", deployment: UUID, now: datetime) -> "list[FlowRun]":
    """The runs of the deployment's schedule whose time has come and that have not started, oldest first."""
    from prefect.client.schemas.filters import FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType

    waiting = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.SCHEDULED]))
    return [one for one in _read_runs(client, deployment, None, now, state=waiting) if one.auto_scheduled]


def _read_runs(
    client: "SyncPrefectClient",
    deployment: UUID,
    since: datetime | None,
    until: datetime,
    *,
    state: "FlowRunFilterState | None" = None,
) -> "list[FlowRun]":
    """The runs of the deployment that were to start in that time, in ``state`` or in any, oldest first."""
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterDeploymentId,
        FlowRunFilterExpectedStartTime,
    )
    from prefect.client.schemas.sorting import FlowRunSort

    span = {"before_": until} | ({} if since is None else {"after_": since})
    asked = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[deployment]),
        state=state,
        expected_start_time=FlowRunFilterExpectedStartTime.model_validate(span),
    )
    found: list[FlowRun] = []
    while True:  # the server answers with 200 at most
        page = client.read_flow_runs(flow_run_filter=asked, sort=FlowRunSort.EXPECTED_START_TIME_ASC, offset=len(found))
        found += page
        if not page:
            return found


def _skip(client: "SyncPrefectClient", run: "FlowRun", *, by: str) -> bool:
    """Whether ``run`` is cancelled now; not when a worker has taken it meanwhile."""
    from prefect.client.schemas.objects import State
    from prefect.client.schemas.responses import SetStateStatus
    from prefect.states import Cancelled

    state: State[Any] = Cancelled(name="Skipped", message=f"Missed; {by} did the work that was due.")
    return client.set_flow_run_state(run.id, state).status == SetStateStatus.ACCEPT
