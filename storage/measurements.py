"""From iterations to measurements: one row per cell, by the slowest rank of each step and the median over steps."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from precision_time.storage.schema import Measurement

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MAX_ITERATION_TIME_S", "measure_cells"]

#: a longer iteration is a fault of the clock or of the unit, not a time
MAX_ITERATION_TIME_S = 86_400.0

_PARTS = (
    "forward_time_s",
    "backward_time_s",
    "optimizer_time_s",
    "compute_time_s",
    "communication_time_s",
    "exposed_communication_s",
)
_DESCRIPTION = (
    "model",
    "task_input",
    "gpu",
    "nodes",
    "world_size",
    "effective_precision",
    "strategy",
    "per_gpu_batch_size",
    "gradient_accumulation_steps",
    "framework",
    "model_params",
)
_STEP = ["cell_id", "step"]


def measure_cells(
    timings: pa.Table, *, forward_flops: Mapping[str, float]
) -> tuple[list[Measurement], list[tuple[str, str]]]:
    """One measurement per cell of ``timings``, sorted by cell, and (cell id, reason) of what was left out.

    Of each measured step (not warm-up, not skipped by loss scaling on any rank) the rank with the longest iteration
    counts, with all its parts, so that they still add up; then the median over steps is taken, part by part. Exposed
    communication is a difference of two noisy times and may be negative in a row; its median is not let below 0.
    A step is left out whole when a rank is missing or has no usable time. ``forward_flops`` maps models to FLOPs of
    the forward pass of one sample.
    """
    columns = [*_STEP, "rank", "is_warmup", "step_skipped", "iteration_time_s", "peak_memory_bytes"]
    rows = timings.select([*columns, *_PARTS, *_DESCRIPTION]).to_pandas()
    cells = sorted(rows["cell_id"].unique())
    rows = rows[~rows["is_warmup"]]
    rows = rows[~_anywhere_in_step(rows, rows["step_skipped"])]
    usable = rows["iteration_time_s"].gt(0) & rows["iteration_time_s"].le(MAX_ITERATION_TIME_S)
    bad_step = _anywhere_in_step(rows, ~usable)
    partial = rows.groupby(_STEP, observed=True)["rank"].transform("nunique").ne(rows["world_size"]) & ~bad_step
    problems = [
        *_reasons(rows[bad_step], "no usable iteration time"),
        *_reasons(rows[partial], "not all ranks"),
    ]
    rows = rows[~bad_step & ~partial]
    order = [*_STEP, "iteration_time_s", "rank"]
    slowest = rows.sort_values(order, ascending=[True, True, False, True]).drop_duplicates(_STEP)
    by_cell = slowest.groupby("cell_id", observed=True)
    medians = by_cell[["iteration_time_s", *_PARTS]].median()
    quartiles = by_cell["iteration_time_s"].quantile([0.25, 0.75]).unstack()
    counts = by_cell.size()
    memory = rows.groupby("cell_id", observed=True)["peak_memory_bytes"].max()
    described = by_cell[list(_DESCRIPTION)].first()
    problems += [(cell, "no measured step") for cell in cells if cell not in counts.index]
    measurements = []
    for cell in sorted(counts.index):
        what, median = described.loc[cell], medians.loc[cell]
        exposed = _number(median["exposed_communication_s"])
        time_s = float(median["iteration_time_s"])
        measurements.append(
            Measurement(
                source="campaign",
                model=str(what["model"]),
                task_input=str(what["task_input"]),
                gpu=str(what["gpu"]),
                nodes=int(what["nodes"]),
                world_size=int(what["world_size"]),
                precision=str(what["effective_precision"]),
                strategy=str(what["strategy"]),
                per_gpu_batch_size=int(what["per_gpu_batch_size"]),
                gradient_accumulation_steps=int(what["gradient_accumulation_steps"]),
                framework=str(what["framework"]),
                iteration_time_s=time_s,
                forward_time_s=_number(median["forward_time_s"]),
                backward_time_s=_number(median["backward_time_s"]),
                optimizer_time_s=_number(median["optimizer_time_s"]),
                compute_time_s=_number(median["compute_time_s"]),
                communication_time_s=_number(median["communication_time_s"]),
                exposed_communication_s=None if exposed is None else max(0.0, exposed),
                relative_iqr=float(quartiles.loc[cell, 0.75] - quartiles.loc[cell, 0.25]) / time_s,
                iterations=int(counts[cell]),
                peak_memory_bytes=int(memory[cell]),
                model_params=int(what["model_params"]),
                forward_flops_per_sample=forward_flops.get(str(what["model"])),
                cell_id=str(cell),
            )
        )
    return measurements, sorted(problems)


def _anywhere_in_step(rows: "pd.DataFrame", marked: "pd.Series[bool]") -> "pd.Series[bool]":
    """``marked``, spread to all ranks of the steps it hits."""
    return marked.groupby([rows[name] for name in _STEP], observed=True).transform("any").astype(bool)


def _reasons(rows: "pd.DataFrame", reason: str) -> list[tuple[str, str]]:
    steps = rows.drop_duplicates(_STEP).groupby("cell_id", observed=True).size()
    return [(str(cell), f"{count} steps left out: {reason}") for cell, count in steps.items()]


def _number(value: float) -> float | None:
    return None if value != value else float(value)  # NaN: no row of the cell has this part
