"""The result of a campaign's run: its counts, one row per cell, and the report as markdown."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, computed_field

from precision_time.flows.planning.plan import CampaignPlan
from precision_time.predictor.answering.estimate import format_duration
from precision_time.storage.schema import CellOutcome, GridCell, Measurement
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.publishing.plots import show_plots

__all__ = [
    "CampaignResult", "FailedCell", "GridRow", "RetrainingOutcome", "describe_options", "fill_rows", "grid_rows",
    "markdown_report", "read_grid", "summarise", "table_rows",
]  # fmt: skip

#: More rows, or failed cells, are left out of the report.
MARKDOWN_ROWS = 200


class FailedCell(BaseModel):
    """A cell whose attempts in this run all failed, with the cause of the last one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cell_id: str
    label: str
    attempt: int
    status: str
    cause: str
    message: str


class RetrainingOutcome(BaseModel):
    """The outcome of the retraining after a campaign.

    ``status`` is that of ``RetrainResult``, or ``not tried``, for instance with too few cells, or ``failed``.
    ``artifact_id`` is the artifact in use now, where it is known.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    status: str
    artifact_id: str | None = None
    reasons: tuple[str, ...]


class CampaignResult(BaseModel):
    """The result of one run of a campaign.

    ``cells_planned`` are to be recorded in the end, ``cells_in_grid`` are those that an adaptive budget chooses from.
    ``ended_by`` names the limit that ended the run early, or is ``interrupted``; ``cells_left`` were then not tried.
    ``rows`` counts the dataset's rows of the campaign's cells (one per iteration and rank), ``rows_added`` those of
    this run.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    data: str
    gpu: str
    cells_planned: int
    cells_in_grid: int = 0
    cells_recorded: int
    cells_measured: int
    cells_left: int = 0
    rows: int
    rows_added: int
    failed: tuple[FailedCell, ...]
    duration_s: float
    ended_by: str = ""
    retraining: RetrainingOutcome | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def status(self) -> Literal["complete", "partial", "failed"]:
        """``complete`` with every cell recorded, ``failed`` if cells were tried and none is, else ``partial``."""
        if not self.cells_recorded and (self.failed or not self.ended_by):
            return "failed"
        return "complete" if self.cells_recorded >= self.cells_planned else "partial"

    @property
    def end(self) -> str:
        """In words, what ended the run early and what is left, or that nothing is left; empty when all is well."""
        if self.ended_by and self.cells_left:
            return f"ended by {self.ended_by}; {self.cells_left} cells were not tried: run the campaign again for them"
        if self.ended_by:
            return f"ended by {self.ended_by}; no cell was left to try"
        if self.failed and not self.cells_left and all(cell.status == "refused" for cell in self.failed):
            return (
                "nothing is left to measure: the cells without timings were refused and are not tried again "
                f"(cells: {len(self.failed)})"
            )
        return ""


def summarise(
    plan: CampaignPlan,
    outcomes: Mapping[str, CellOutcome],
    *,
    rows: Mapping[str, int],
    duration_s: float,
    ended_by: str = "",
) -> CampaignResult:
    """The result of a run: cells recorded before it count as recorded; ``rows`` counts the dataset's rows by cell id.

    Cells that an earlier run refused are listed as failed with that cause.
    """
    labels = {planned.cell_id: planned.cell.label for planned in plan.cells}
    recorded = [outcome for outcome in outcomes.values() if outcome.status == "recorded"]
    refused = [planned.refusal for planned in plan.cells if planned.state == "refused" and planned.refusal is not None]
    failed = [*(outcome for outcome in outcomes.values() if outcome.status != "recorded"), *refused]
    in_dataset = sum(planned.is_recorded for planned in plan.cells) + len(recorded)
    return CampaignResult(
        name=plan.spec.name,
        data=plan.spec.data,
        gpu=plan.device.environment.gpu,
        cells_planned=plan.goal,
        cells_in_grid=len(plan.cells),
        cells_recorded=in_dataset,
        # A recorded cell without rows was recorded by another campaign.
        cells_measured=sum(outcome.rows > 0 for outcome in recorded),
        cells_left=max(0, plan.goal - in_dataset - len(failed)),
        rows=sum(rows.get(planned.cell_id, 0) for planned in plan.cells),
        rows_added=sum(outcome.rows for outcome in recorded),
        failed=tuple(
            FailedCell(
                cell_id=outcome.cell_id,
                label=labels[outcome.cell_id],
                attempt=outcome.attempt,
                status=outcome.status,
                cause=outcome.cause,
                message=outcome.message,
            )
            for outcome in failed
        ),
        duration_s=duration_s,
        ended_by=ended_by,
    )


class GridRow(BaseModel):
    """One cell in a table: its state, its time, and its speed-up over the same cell in fp32."""

    model_config = ConfigDict(frozen=True)

    model: str
    precision: str
    gpus: int
    batch_size: int
    gradient_accumulation_steps: int
    options: str = ""
    state: str
    iteration_time_s: float | None
    speedup_over_fp32: float | None
    cause: str


def read_grid(plan: CampaignPlan, failed: Iterable[FailedCell], *, dataset: TimingsDataset) -> list[GridRow]:
    """``grid_rows`` with the present content of the dataset."""
    return grid_rows(plan, failed, measurements=dataset.measurements(), recorded=dataset.recorded_cells())


def grid_rows(
    plan: CampaignPlan,
    failed: Iterable[FailedCell],
    *,
    measurements: Iterable[Measurement],
    recorded: Set[str] = frozenset(),
) -> list[GridRow]:
    """The whole grid in its order, with the cells of earlier runs.

    A cell without a measurement has failed in this run, is ``unusable`` (recorded, but its rows give no time), or is
    missing.
    """
    failures = {cell.cell_id: cell for cell in failed}
    times = {row.cell_id: row.iteration_time_s for row in measurements}
    states = dict.fromkeys(recorded, "unusable") | {cell_id: cell.status for cell_id, cell in failures.items()}
    return fill_rows(
        plan,
        states=states | dict.fromkeys(times, "recorded"),
        times=times,
        causes={cell_id: cell.cause for cell_id, cell in failures.items() if cell_id not in times},
    )


def fill_rows(
    plan: CampaignPlan, *, states: Mapping[str, str], times: Mapping[str, float], causes: Mapping[str, str]
) -> list[GridRow]:
    """The whole grid in its order, with each cell's state (``missing`` by default), seconds and cause by its id."""
    by_cell = {planned.cell: times[planned.cell_id] for planned in plan.cells if planned.cell_id in times}
    rows = []
    for planned in plan.cells:
        cell = planned.cell
        time_s, fp32_s = by_cell.get(cell), by_cell.get(replace(cell, precision="fp32"))
        rows.append(
            GridRow(
                model=cell.model,
                precision=cell.precision,
                gpus=cell.world_size,
                batch_size=cell.per_gpu_batch_size,
                gradient_accumulation_steps=cell.gradient_accumulation_steps,
                options=describe_options(cell),
                state=states.get(planned.cell_id, "missing"),
                iteration_time_s=time_s,
                speedup_over_fp32=None if time_s is None or fp32_s is None else fp32_s / time_s,
                cause=causes.get(planned.cell_id, ""),
            )
        )
    return rows


def describe_options(cell: GridCell) -> str:
    """In words, how ``cell`` differs from plain eager data parallelism."""
    return ", ".join(([cell.strategy] if cell.strategy != "ddp" else []) + cell.option_words)


def table_rows(rows: Sequence[GridRow]) -> list[dict[str, Any]]:
    """``rows`` as short texts by heading; there is a column of options if a row has some."""
    with_options = any(row.options for row in rows)
    return [
        {
            "model": row.model,
            "precision": row.precision,
            "GPUs": row.gpus,
            "batch": row.batch_size,
            "accumulation": row.gradient_accumulation_steps,
            **({"options": row.options} if with_options else {}),
            "state": row.state,
            "iteration": "" if row.iteration_time_s is None else format_duration(row.iteration_time_s),
            "over fp32": "" if row.speedup_over_fp32 is None else f"{row.speedup_over_fp32:.2f}x",
            "cause": row.cause,
        }
        for row in rows
    ]


def markdown_report(
    result: CampaignResult, rows: Sequence[GridRow], *, plots: Iterable[str] = (), remarks: Sequence[str] = ()
) -> str:
    """The report of one run: counts, pictures, the grid, every failed cell with its cause, and the retraining.

    ``plots`` are names of files in the folder ``plots`` beside the report, ``remarks`` are sentences about them.
    """
    lines = [
        f"# Campaign {result.name}: {result.status}",
        "",
        f"{result.cells_recorded} of {result.cells_planned} cells{_chosen_from(result)} are recorded on "
        f"`{result.gpu}`; "
        f"this run measured {result.cells_measured} ({result.rows_added} rows) "
        f"in {format_duration(result.duration_s)}.",
        "",
        *([f"This run: {_escaped(result.end)}.", ""] if result.end else []),
        *show_plots(plots),
        *(line for remark in remarks for line in (_escaped(remark), "")),
        "`iteration` is the median over the measured steps of the slowest rank; `over fp32` is the speed-up over the "
        "same cell in fp32.",
        "",
    ]
    shown = table_rows(rows[:MARKDOWN_ROWS])
    if shown:
        lines += [f"| {' | '.join(shown[0])} |", f"|{'---|' * len(shown[0])}"]
        lines += [f"| {' | '.join(_escaped(str(value)) for value in row.values())} |" for row in shown]
    if len(rows) > MARKDOWN_ROWS:
        lines += ["", f"{len(rows) - MARKDOWN_ROWS} more cells are in the dataset."]
    if result.failed:
        lines += ["", "## Failed cells", ""]
        lines += [
            f"- {_escaped(cell.label)}, attempt {cell.attempt}: {_escaped(cell.cause)}. {_escaped(cell.message)}"
            for cell in result.failed[:MARKDOWN_ROWS]
        ]
    if result.retraining is not None:
        in_use = result.retraining.artifact_id
        lines += ["", f"## Retraining: {result.retraining.status}", ""]
        lines += [f"- {_escaped(reason)}" for reason in result.retraining.reasons]
        lines += [f"- in use: {_escaped(in_use)}"] if in_use else []
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """``text`` of models and exceptions so that it neither breaks the table nor becomes markup."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    for mark in ("\\", "|", "`", "*", "_", "<", "[", "#"):
        printable = printable.replace(mark, f"\\{mark}" if mark != "<" else "&lt;")
    return printable


def _chosen_from(result: CampaignResult) -> str:
    if result.cells_in_grid <= result.cells_planned:
        return ""
    return f" (chosen by a predictor from a grid of {result.cells_in_grid})"
