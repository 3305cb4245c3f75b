"""The flow ``profiling_campaign``: measure the missing cells of a grid, each as a task of Prefect, and record them."""

import contextvars
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, cast

from prefect import State, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console

from precision_time.flows.campaigns.adaptive import choose_adaptively
from precision_time.flows.campaigns.cell_loop import (
    INTERRUPTED,
    CellNotStartedError,
    MeasuredCells,
    measure_missing,
    watch_wait,
)
from precision_time.flows.campaigns.final_report import CampaignPages, retrain_after
from precision_time.flows.campaigns.interrupts import catch_interrupts
from precision_time.flows.campaigns.live_grid import LiveGrid
from precision_time.flows.campaigns.measure_cell import announce, measure_cell
from precision_time.flows.campaigns.progress import CampaignProgress
from precision_time.flows.campaigns.summary import CampaignResult, summarise
from precision_time.flows.campaigns.terminal import (
    describe_plan,
    describe_result,
    log_of_run,
    print_plan,
    print_result,
    say,
)
from precision_time.flows.clusters.cluster import check_scratch, open_cluster
from precision_time.flows.clusters.scratch import open_scratch
from precision_time.flows.clusters.settings import is_local
from precision_time.flows.ground.plain_failures import fail_plainly
from precision_time.flows.planning.budget import Budget
from precision_time.flows.planning.changed_settings import note_settings
from precision_time.flows.planning.plan import CampaignPlan, PlannedCell, plan_campaign
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.predictor.answering.estimate import format_duration
from precision_time.storage.errors import printable
from precision_time.storage.schema import CellOutcome
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.gangs.record_cell import record_cell
from precision_time.tasks.ranks.job import Attempt
from precision_time.tasks.work_kinds import refuse_unstarted

__all__ = ["profiling_campaign", "run_campaign"]

#: Threads that Prefect may run cells in; the plan's ``at_once`` limits how many are used.
MOST_AT_ONCE = 256

#: The result of a run, for the case that Prefect's API is gone when it ends.
_finished: contextvars.ContextVar[list[CampaignResult] | None] = contextvars.ContextVar("finished", default=None)


#: Most models in the name of a run.
_NAMED = 3


def _name_run() -> str:
    """A name that says what the run measures; Prefect asks for it before there is a plan."""
    spec: CampaignSpec = flow_run.parameters["spec"]
    more = f" and {len(spec.models) - _NAMED} more" if len(spec.models) > _NAMED else ""
    widest = max(spec.gpus)
    return (
        f"{spec.name}: {len(spec.cells())} cells of {', '.join(spec.models[:_NAMED])}{more}, "
        f"up to {widest} rank{'s' if widest > 1 else ''}"
    )


@flow(
    name="profiling-campaign",
    flow_run_name=_name_run,
    result_serializer="json",
    persist_result=False,
    task_runner=cast(Any, ThreadPoolTaskRunner(max_workers=MOST_AT_ONCE)),
)
@fail_plainly
def profiling_campaign(spec: CampaignSpec) -> CampaignResult | State[CampaignResult]:
    """Measure the cells of the campaign that the dataset does not have yet, and record each of them whole.

    Running it again resumes it. Cells that fail are recorded with their cause and never stop the others. A limit of the
    campaign, or one Ctrl-C, ends it after the running cells; a second Ctrl-C or a cancelled run stops these at once.
    With ``retrain_after`` a retraining on all of the data follows, as a run inside this one.
    """
    log = log_of_run()
    started = time.monotonic()
    log.info("planning: looking at the data folder and the device")
    plan = plan_campaign(spec)
    dataset = TimingsDataset(spec.data)
    if _set_damaged_aside(dataset) + _refuse_unstarted(plan, dataset):
        plan = plan_campaign(spec)
    dataset.write_card("hardware", plan.device.hardware.name, plan.device.hardware.to_dict())
    log.info("%s; data: %s", describe_plan(plan), spec.data)
    pages = CampaignPages(plan)
    measured = MeasuredCells()
    if plan.cells_to_measure:
        note_settings(spec)
        measured = _measure_on_cluster(plan, dataset, pages=pages, started=started)
    rows = Counter(dataset.read()["cell_id"].to_pylist())
    result = summarise(
        plan, measured.outcomes, rows=rows, duration_s=time.monotonic() - started, ended_by=measured.ended_by
    )
    _keep_result(result)
    pages.write_report(result, dataset=dataset)
    log.info("%s", describe_result(result))
    if (retraining := retrain_after(spec, result)) is not None:
        log.info("retraining: %s; %s", retraining.status, "; ".join(retraining.reasons))
        result = result.model_copy(update={"retraining": retraining})
        _keep_result(result)
        pages.rewrite_report(result)
    if result.status == "complete":
        if result.retraining is not None and result.retraining.status == "failed":
            return Completed(name="Retraining failed", message="all cells are recorded", data=result)
        return result
    message = f"{result.cells_recorded} of {result.cells_planned} cells are recorded"
    if result.status == "partial":
        name = "Ended early" if result.ended_by else "Completed with failures"
        return Completed(name=name, message=f"{message}; {result.end}" if result.end else message, data=result)
    return Failed(message=message, data=result)


def _keep_result(result: CampaignResult) -> None:
    if (finished := _finished.get()) is not None:
        finished[:] = [result]


def _set_damaged_aside(dataset: TimingsDataset) -> int:
    """Set damaged timings aside, so that their cells count as missing; returns how many there were."""
    dataset.read()
    damaged = dataset.unsound_files
    for path, reason in damaged:
        announce(f"{path} is damaged and was moved to {dataset.set_aside(path, reason)}; its cell is measured again")
    return len(damaged)


def _refuse_unstarted(plan: CampaignPlan, dataset: TimingsDataset) -> int:
    """Record the cells that are refused without an attempt, before there is a cluster; returns how many there were."""
    refused = 0
    for planned in plan.cells:
        if planned.state == "will be refused":
            attempt = Attempt(
                cell=planned.cell,
                attempt=dataset.next_attempt(planned.cell_id),
                environment=plan.device.environment,
            )
            if (receipt := refuse_unstarted(attempt)) is not None:
                record_cell(dataset, receipt)
                refused += 1
    return refused


def _measure_on_cluster(
    plan: CampaignPlan, dataset: TimingsDataset, *, pages: CampaignPages, started: float
) -> MeasuredCells:
    spec = plan.spec
    widest = max(planned.cell.world_size for planned in plan.missing)
    workers = max(widest, min(plan.device.device_count, widest * plan.at_once)) if is_local(spec.cluster) else widest
    with (
        CampaignProgress(plan) as progress,
        open_scratch(cluster=spec.cluster, data=spec.data, scratch=spec.scratch) as scratch,
        open_cluster(
            plan.device.environment.device_type, workers, cluster=spec.cluster, slurm=spec.slurm,
            wait_s=spec.workers_timeout,
        ) as client,
        LiveGrid(
            plan, dataset=dataset, table=pages.table, bar=pages.bar, fraction=lambda: progress.fraction
        ) as live,
        catch_interrupts() as interrupts,
    ):  # fmt: skip
        check_scratch(client, scratch)

        def measure(planned: PlannedCell) -> CellOutcome:
            watch = watch_wait(planned, progress=progress, interrupts=interrupts)
            with live.show_cell(planned) as show_outcome:
                return show_outcome(
                    measure_cell(planned, plan=plan, dataset=dataset, client=client, scratch=scratch, watch=watch)
                )

        measured = measure_missing(
            plan,
            measure=measure,
            progress=progress,
            after_cell=live.wake,
            choose=choose_adaptively(plan, dataset) if spec.budget_cells else None,
            budget=Budget.of(spec),
            at_once=plan.at_once,
            submit=_submit_task,
            interrupts=interrupts,
            started=started,
        )
    # Written here once more, since the last cell may have ended after the grid was last written.
    pages.bar.update(progress.fraction)
    return measured


# The cell's identity decides what is measured again, so Prefect must neither cache nor retry; it gets only this small
# outcome and never the rows.
@task(
    name="profile-cell",
    task_run_name="{label}",
    cache_policy=NO_CACHE,
    retries=0,
    persist_result=False,
    result_serializer="json",
)
@fail_plainly
def profile_cell_task(label: str, measure: Callable[[], CellOutcome]) -> CellOutcome | State[CellOutcome]:
    """One attempt at the cell ``label``; the run is shown as failed when the cell failed."""
    try:
        outcome = measure()
    except CellNotStartedError as error:
        return Cancelled(message=str(error))
    log, taken = log_of_run(), format_duration(outcome.duration_s)
    if outcome.status == "recorded":
        # An outcome without rows is of another campaign, and has been announced.
        if outcome.rows:
            log.info("%s: recorded, %d rows in %s", label, outcome.rows, taken)
        return outcome
    cause = printable(f"{outcome.cause}: {outcome.message}")
    log.warning("%s: %s after %s, %s", label, outcome.status, taken, cause)
    # Without the outcome, which Prefect would print in the log; the campaign has it from ``measure``.
    return Failed(message=cause)


def _submit_task(planned: PlannedCell, run: Callable[[], CellOutcome]) -> "Future[Any]":
    """Start ``run`` as a task of the flow in a thread of its runner."""
    future: Any = profile_cell_task.submit(planned.cell.label, run)
    wrapped: Future[Any] = future.wrapped_future
    return wrapped


def run_campaign(
    spec: CampaignSpec, *, console: Console | None = None, report: Callable[[CampaignResult], None] | None = None
) -> CampaignResult:
    """Run the flow here and return its result, whatever its status; errors of the whole campaign are raised.

    With ``console`` the plan is printed before and the result after; ``report`` is called with the result. Raises
    ``KeyboardInterrupt`` after a Ctrl-C, when the running cells have ended and everything is written.
    """
    plan = plan_campaign(spec) if console is not None else None
    if plan is not None and console is not None:
        print_plan(plan, console=console)
    result = _run_flow(spec)
    if plan is not None and console is not None:
        print_result(plan, result, console=console)
    if report is not None:
        report(result)
    if result.ended_by == INTERRUPTED:
        raise KeyboardInterrupt
    return result


def _run_flow(spec: CampaignSpec) -> CampaignResult:
    finished: list[CampaignResult] = []
    token = _finished.set(finished)
    try:
        state: State[Any] = profiling_campaign(spec, return_state=True)
        result = state.result(raise_on_failure=False)
    except Exception as error:
        if not finished:
            raise
        say(f"Prefect has no result of the run: {type(error).__name__}: {error}")
        return finished[0]
    finally:
        _finished.reset(token)
    if isinstance(result, BaseException):
        raise result
    return CampaignResult.model_validate(result)
