"""profiling_campaign: the missing cells of a grid, each a task of Prefect, profiled and recorded whole."""

import contextlib
import contextvars
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

from prefect import State, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console

from precision_time.flows.adaptive import choose_adaptively
from precision_time.flows.artifacts import ProgressArtifact, publish_pages
from precision_time.flows.budget import Budget
from precision_time.flows.changes import limits_of, note_settings
from precision_time.flows.cluster import Client, check_scratch, open_cluster, open_scratch
from precision_time.flows.cluster_settings import is_local
from precision_time.flows.interrupts import catch_interrupts
from precision_time.flows.measuring import INTERRUPTED, MeasuredCells, measure_missing
from precision_time.flows.plan import CampaignPlan, PlannedCell, plan_campaign
from precision_time.flows.progress import CampaignProgress
from precision_time.flows.spec import CampaignSpec
from precision_time.flows.summary import CampaignResult, markdown_report, read_grid, summarise, table_rows
from precision_time.flows.terminal import print_plan, print_result, say
from precision_time.storage.errors import ClusterLostError, NoWorkersError, StorageError, printable
from precision_time.storage.schema import CellOutcome
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.job import CellReceipt
from precision_time.tasks.profile import profile_cell
from precision_time.tasks.record import record_cell

__all__ = ["measure_cell", "profiling_campaign", "run_campaign"]

#: Threads that Prefect may run cells in; how many do is the campaign's ``cells_at_once``.
MOST_AT_ONCE = 256

#: Where the result of a run goes that nobody can ask Prefect for, because its API has gone away meanwhile.
_finished: contextvars.ContextVar[list[CampaignResult] | None] = contextvars.ContextVar("finished", default=None)


@flow(
    name="profiling-campaign",
    result_serializer="json",
    persist_result=False,
    task_runner=cast(Any, ThreadPoolTaskRunner(max_workers=MOST_AT_ONCE)),
)
def profiling_campaign(spec: CampaignSpec) -> CampaignResult | State[CampaignResult]:
    """Measure the cells of the campaign that the dataset does not have yet, and record each of them whole.

    Running it again resumes it. Cells that fail are recorded with their cause and never stop their neighbours. A limit
    of the campaign, or one Ctrl-C, ends it after the cells under way; a second Ctrl-C or a cancelled run stops them.
    """
    plan = plan_campaign(spec)
    dataset = TimingsDataset(spec.data)
    if _set_damaged_aside(dataset):
        plan = plan_campaign(spec)
    dataset.write_card("hardware", plan.device.hardware.name, plan.device.hardware.to_dict())
    started = time.monotonic()
    measured = MeasuredCells()
    if plan.cells_to_measure:
        note_settings(spec)
        measured = _measure_on_cluster(plan, dataset)
    rows = Counter(dataset.read()["cell_id"].to_pylist())
    result = summarise(
        plan, measured.outcomes, rows=rows, duration_s=time.monotonic() - started, ended_by=measured.ended_by
    )
    if (finished := _finished.get()) is not None:
        finished.append(result)
    grid = read_grid(plan, result.failed, dataset=dataset)
    publish_pages(
        table=table_rows(grid),
        report=markdown_report(result, grid),
        key=f"campaign-{result.name}",
        description=f"Campaign {result.name} on {result.gpu}: {result.status}",
    )
    if result.status == "complete":
        return result
    message = f"{result.cells_recorded} of {result.cells_planned} cells are recorded"
    if result.status == "partial":
        name = "Ended early" if result.ended_by else "Completed with failures"
        return Completed(name=name, message=f"{message}; {result.end}" if result.end else message, data=result)
    return Failed(message=message, data=result)


def _set_damaged_aside(dataset: TimingsDataset) -> int:
    """Move damaged timings out of the way, so that their cells count as missing; returns how many there were."""
    dataset.read()
    damaged = dataset.unsound_files
    for path, reason in damaged:
        say(f"{path} is damaged and was moved to {dataset.set_aside(path, reason)}; its cell is measured again")
    return len(damaged)


def _measure_on_cluster(plan: CampaignPlan, dataset: TimingsDataset) -> MeasuredCells:
    spec, name = plan.spec, plan.spec.name
    artifact = ProgressArtifact(
        f"campaign-{name}-progress", description=f"Cells of campaign {name} measured by this run"
    )
    widest = max(planned.cell.world_size for planned in plan.missing)
    workers = max(widest, min(plan.device.device_count, widest * plan.at_once)) if is_local(spec.cluster) else widest
    with (
        CampaignProgress(plan) as progress,
        open_scratch(cluster=spec.cluster, data=spec.data, scratch=spec.scratch) as scratch,
        open_cluster(
            plan.device.environment.device_type, workers, cluster=spec.cluster, slurm=spec.slurm,
            wait_s=spec.workers_timeout,
        ) as client,
        _in_background(lambda: artifact.update(progress.fraction)) as show_progress,
        catch_interrupts() as interrupts,
    ):  # fmt: skip
        check_scratch(client, scratch)

        def measure(planned: PlannedCell) -> CellOutcome:
            return measure_cell(planned, plan=plan, dataset=dataset, client=client, scratch=scratch)

        return measure_missing(
            plan,
            measure=measure,
            progress=progress,
            after_cell=show_progress,
            choose=choose_adaptively(plan, dataset) if spec.budget_cells else None,
            budget=Budget.of(spec),
            at_once=plan.at_once,
            submit=_submit_task,
            interrupts=interrupts,
        )


@contextlib.contextmanager
def _in_background(update: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """A function that has ``update`` run soon in another thread: an API that does not answer must not hold up cells."""
    wanted, ended = threading.Event(), threading.Event()

    def run() -> None:
        while wanted.wait() and not ended.is_set():
            wanted.clear()
            update()

    threading.Thread(target=run, name="campaign pages", daemon=True).start()
    try:
        yield wanted.set
    finally:
        ended.set()
        wanted.set()


# The cell's own identity decides what is measured again, so Prefect must neither cache nor retry; rows never pass
# through it, only this small outcome.
@task(
    name="profile-cell",
    task_run_name="{label}",
    cache_policy=NO_CACHE,
    retries=0,
    persist_result=False,
    result_serializer="json",
)
def profile_cell_task(label: str, measure: Callable[[], CellOutcome]) -> CellOutcome | State[CellOutcome]:
    """One attempt at the cell ``label``; the run is shown as failed when the cell failed."""
    outcome = measure()
    if outcome.status == "recorded":
        return outcome
    return Failed(message=printable(f"{outcome.cause}: {outcome.message}"), data=outcome)


def _submit_task(planned: PlannedCell, run: Callable[[], CellOutcome]) -> "Future[Any]":
    """Start ``run`` as a task of the flow in a thread of its runner."""
    future: Any = profile_cell_task.submit(planned.cell.label, run)
    wrapped: Future[Any] = future.wrapped_future
    return wrapped


def run_campaign(
    spec: CampaignSpec, *, console: Console | None = None, report: Callable[[CampaignResult], None] | None = None
) -> CampaignResult:
    """Run the flow here and return its result, whatever its status; what stops a whole campaign is raised.

    With ``console`` the plan is printed before and the result after; ``report`` gets the result as well. Raises
    ``KeyboardInterrupt`` after a Ctrl-C, when the cells under way were finished and everything was written.
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
        say(f"Prefect does not know how the run ended: {type(error).__name__}: {error}")
        return finished[0]
    finally:
        _finished.reset(token)
    if isinstance(result, BaseException):
        raise result
    return CampaignResult.model_validate(result)


def measure_cell(
    planned: PlannedCell, *, plan: CampaignPlan, dataset: TimingsDataset, client: Client, scratch: Path
) -> CellOutcome:
    """One attempt at one cell, recorded whether it went well or not; none where another campaign has recorded it.

    Raises only what concerns every cell that follows: ``StorageError`` (a full disk), ``ClusterLostError`` and
    ``NoWorkersError``.
    """
    earlier = _recorded_meanwhile(planned, dataset)
    if earlier is not None:
        return earlier
    attempt = dataset.next_attempt(planned.cell_id)
    started_at, started = time.time(), time.monotonic()
    try:
        receipt = profile_cell(
            planned.cell,
            attempt=attempt,
            environment=plan.device.environment,
            limits=limits_of(plan.spec),
            client=client,
            scratch=scratch,
        )
        return record_cell(dataset, receipt)
    except (StorageError, ClusterLostError, NoWorkersError):
        raise
    except Exception as error:
        # A cluster or a fragment can break in ways nobody listed; the cell pays, not the campaign.
        receipt = CellReceipt(
            cell=planned.cell,
            cell_id=planned.cell_id,
            attempt=attempt,
            environment=plan.device.environment,
            status="failed",
            cause="exception",
            message=f"{type(error).__name__}: {error}",
            started_at=started_at,
            duration_s=time.monotonic() - started,
            host=platform.node(),
        )
        return record_cell(dataset, receipt)


def _recorded_meanwhile(planned: PlannedCell, dataset: TimingsDataset) -> CellOutcome | None:
    """What another campaign on the same data came to since the plan was made; it is not measured a second time."""
    if planned.cell_id not in dataset.recorded_cells():
        return None
    outcomes = [seen for seen in dataset.outcomes(cells={planned.cell_id}) if seen.status == "recorded"]
    if not outcomes:
        return None
    say(f"{planned.cell.label} was recorded by another campaign meanwhile")
    return outcomes[-1]
