"""profiling_campaign: the missing cells of a grid, one after the other, profiled and recorded whole."""

import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import State, flow, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed, Failed
from rich.console import Console

from precision_time.flows.artifacts import ProgressArtifact, publish_pages
from precision_time.flows.cluster import Client, open_cluster
from precision_time.flows.plan import CampaignPlan, PlannedCell, plan_campaign
from precision_time.flows.progress import CampaignProgress
from precision_time.flows.spec import CampaignSpec
from precision_time.flows.summary import CampaignResult, markdown_report, read_grid, summarise, table_rows
from precision_time.flows.terminal import print_plan, print_result, say
from precision_time.storage.errors import StorageError, printable
from precision_time.storage.schema import CellOutcome
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.job import CellReceipt, MeasurementLimits
from precision_time.tasks.profile import profile_cell
from precision_time.tasks.record import record_cell

__all__ = ["measure_cell", "measure_missing", "profiling_campaign", "run_campaign"]

Measure = Callable[[PlannedCell], CellOutcome]


@flow(name="profiling-campaign", result_serializer="json", persist_result=False)
def profiling_campaign(spec: CampaignSpec) -> CampaignResult | State[CampaignResult]:
    """Measure the cells of the campaign that the dataset does not have yet, and record each of them whole.

    Running it again resumes it. Cells that fail are recorded with their cause and never stop their neighbours.
    """
    plan = plan_campaign(spec)
    dataset = TimingsDataset(spec.data)
    if _set_damaged_aside(dataset):
        plan = plan_campaign(spec)
    dataset.write_card("hardware", plan.device.hardware.name, plan.device.hardware.to_dict())
    started = time.monotonic()
    outcomes = _measure_on_cluster(plan, dataset) if plan.missing else {}
    rows = Counter(dataset.read()["cell_id"].to_pylist())
    result = summarise(plan, outcomes, rows=rows, duration_s=time.monotonic() - started)
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
        return Completed(name="Completed with failures", message=message, data=result)
    return Failed(message=message, data=result)


def _set_damaged_aside(dataset: TimingsDataset) -> int:
    """Move damaged timings out of the way, so that their cells count as missing; returns how many there were."""
    dataset.read()
    damaged = dataset.unsound_files
    for path, reason in damaged:
        say(f"{path} is damaged and was moved to {dataset.set_aside(path, reason)}; its cell is measured again")
    return len(damaged)


def _measure_on_cluster(plan: CampaignPlan, dataset: TimingsDataset) -> dict[str, CellOutcome]:
    name = plan.spec.name
    artifact = ProgressArtifact(
        f"campaign-{name}-progress", description=f"Cells of campaign {name} measured by this run"
    )
    workers = max(planned.cell.world_size for planned in plan.missing)
    with (
        CampaignProgress(plan) as progress,
        tempfile.TemporaryDirectory(prefix="precision-time-", ignore_cleanup_errors=True) as scratch,
        open_cluster(plan.device.environment.device_type, workers) as client,
    ):

        def measure(planned: PlannedCell) -> CellOutcome:
            return measure_cell(planned, plan=plan, dataset=dataset, client=client, scratch=Path(scratch))

        return measure_missing(
            plan,
            measure=lambda planned: _run_as_task(planned, measure),
            progress=progress,
            after_cell=lambda: artifact.update(progress.fraction),
        )


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


def _run_as_task(planned: PlannedCell, measure: Measure) -> CellOutcome:
    state: State[Any] = profile_cell_task(planned.cell.label, lambda: measure(planned), return_state=True)
    outcome = state.result(raise_on_failure=False)
    if isinstance(outcome, BaseException):
        raise outcome
    if not isinstance(outcome, CellOutcome):
        raise TypeError(f"the task of {planned.cell.label} ended as {state.name} without an outcome")
    return outcome


def run_campaign(spec: CampaignSpec, *, console: Console | None = None) -> CampaignResult:
    """Run the flow here and return its result, whatever its status; what stops a whole campaign is raised.

    With ``console`` the plan is printed before and the result after.
    """
    plan = plan_campaign(spec)
    if console is not None:
        print_plan(plan, console=console)
    state: State[Any] = profiling_campaign(spec, return_state=True)
    result = state.result(raise_on_failure=False)
    if isinstance(result, BaseException):
        raise result
    checked = CampaignResult.model_validate(result)
    if console is not None:
        print_result(plan, checked, console=console)
    return checked


def measure_missing(
    plan: CampaignPlan,
    *,
    measure: Measure,
    progress: CampaignProgress,
    after_cell: Callable[[], None] = lambda: None,
) -> dict[str, CellOutcome]:
    """Measure the missing cells of ``plan`` in order and return the last outcome of each by cell id.

    Cells that failed are tried again after the others, up to ``max_attempts`` in all; what the device refuses is not.
    """
    outcomes: dict[str, CellOutcome] = {}
    waiting = plan.missing
    for attempt in range(1, plan.spec.max_attempts + 1):
        failed = []
        for planned in waiting:
            progress.start_cell(planned)
            outcome = outcomes[planned.cell_id] = measure(planned)
            again = outcome.status == "failed" and attempt < plan.spec.max_attempts
            if again:
                failed.append(planned)
            progress.finish_cell(planned, outcome, is_last_attempt=not again)
            after_cell()
        waiting = failed
    return outcomes


def measure_cell(
    planned: PlannedCell, *, plan: CampaignPlan, dataset: TimingsDataset, client: Client, scratch: Path
) -> CellOutcome:
    """One attempt at one cell, recorded whether it went well or not.

    Raises ``StorageError`` only: a full disk concerns every cell that follows.
    """
    attempt = dataset.next_attempt(planned.cell_id)
    started_at, started = time.time(), time.monotonic()
    try:
        receipt = profile_cell(
            planned.cell,
            attempt=attempt,
            environment=plan.device.environment,
            limits=_limits(plan.spec),
            client=client,
            scratch=scratch,
        )
        return record_cell(dataset, receipt)
    except StorageError:
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


def _limits(spec: CampaignSpec) -> MeasurementLimits:
    return MeasurementLimits(
        warmup_steps=spec.warmup_steps,
        measured_steps=spec.measured_steps,
        seconds_per_cell=spec.seconds_per_cell,
        timeout_s=spec.timeout_per_cell,
        memory_limit_bytes=spec.memory_limit_bytes,
    )
