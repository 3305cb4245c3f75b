"""Turn iterations into measurements: one per cell, by the slowest rank of each step and the median over steps."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from precision_time.storage.run_options import RUN_OPTIONS
from precision_time.storage.schema import Measurement

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["MAX_ITERATION_TIME_S", "derive_measurements"]

#: A longer iteration is an error of the clock or of the unit.
MAX_ITERATION_TIME_S = 86_400.0

_EXPOSED = ("exposed_communication_s", "exposed_after_backward_s")
_PARTS = (
    "forward_time_s",
    "backward_time_s",
    "optimizer_time_s",
    "compute_time_s",
    "communication_time_s",
    "isolated_communication_s",
    *_EXPOSED,
)
_CONDITIONS = ("gpu_clock_hz", "power_w", "temperature_c")
#: The columns that are the same in all rows of a cell, with their types: those of a frame are NumPy's own.
_DESCRIPTION: dict[str, type] = {
    "model": str,
    "task_input": str,
    "gpu": str,
    "nodes": int,
    "world_size": int,
    "effective_precision": str,
    "strategy": str,
    "per_gpu_batch_size": int,
    "gradient_accumulation_steps": int,
    "framework": str,
    "model_params": int,
    **{option.name: type(option.default) for option in RUN_OPTIONS},
}
_MARKS = ("is_cold", "is_settled", "throttled", "contended", "energy_j")
_STEP = ["cell_id", "step"]


def derive_measurements(
    timings: pa.Table, *, forward_flops: Mapping[str, float]
) -> tuple[list[Measurement], list[tuple[str, str]]]:
    """One measurement per cell of ``timings``, sorted by cell, and (cell id, reason) of what was left out.

    Of each measured step (not warm-up, not skipped by loss scaling on any rank) the rank with the longest iteration
    counts, with all its parts, so that they still add up; then the median over steps is taken, part by part. Exposed
    communication is a difference of two noisy times and may be negative in a row; its medians are at least 0. A step
    counts on no rank when one is missing or has no usable time. After a change of level while a cell was measured
    (``is_cold``) only the steps after it count; the median before it is a field of its own. Conditions are medians over
    ranks and steps, energy is summed over ranks. ``forward_flops`` maps models to FLOPs of the forward pass of one
    sample.
    """
    columns = [*_STEP, "rank", "is_warmup", "step_skipped", "iteration_time_s", "peak_memory_bytes", *_MARKS]
    rows = timings.select([*columns, *_PARTS, *_CONDITIONS, *_DESCRIPTION]).to_pandas()
    for mark in ("is_cold", "is_settled", "throttled", "contended"):
        rows[mark] = rows[mark].astype("boolean")
    cells = sorted(rows["cell_id"].unique())
    cold_times = _cold_times(rows)
    rows = rows[~rows["is_warmup"]]
    skipped = _anywhere_in_step(rows, rows["step_skipped"])
    skipped_steps = rows[skipped].groupby("cell_id", observed=True)["step"].nunique()
    rows = rows[~skipped & ~rows["is_cold"].fillna(False).astype(bool)]
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
    side_figures = _SideFigures(rows)
    medians = by_cell[["iteration_time_s", *_PARTS]].median()
    quartiles = by_cell["iteration_time_s"].quantile([0.25, 0.75]).unstack()
    counts = by_cell.size()
    memory = rows.groupby("cell_id", observed=True)["peak_memory_bytes"].max()
    described = by_cell[list(_DESCRIPTION)].first()
    problems += [(cell, "no measured step") for cell in cells if cell not in counts.index]
    measurements = []
    for cell in sorted(counts.index):
        description = {name: kind(described.at[cell, name]) for name, kind in _DESCRIPTION.items()}
        precision = description.pop("effective_precision")
        median = medians.loc[cell]
        time_s = float(median["iteration_time_s"])
        parts_s: dict[str, Any] = {name: _number(median[name]) for name in _PARTS}
        exposed_s = {name: max(0.0, part_s) for name in _EXPOSED if (part_s := parts_s[name]) is not None}
        measurements.append(
            Measurement(
                source="campaign",
                cell_id=str(cell),
                precision=precision,
                **description,
                iteration_time_s=time_s,
                **parts_s | exposed_s,
                relative_iqr=float(quartiles.loc[cell, 0.75] - quartiles.loc[cell, 0.25]) / time_s,
                iterations=int(counts[cell]),
                peak_memory_bytes=int(memory[cell]),
                forward_flops_per_sample=forward_flops.get(description["model"]),
                cold_iteration_time_s=cold_times.get(str(cell)),
                skipped_steps=int(skipped_steps.get(cell, 0)),
                **side_figures.of(cell),
            )
        )
    return measurements, sorted(problems)


class _SideFigures:
    """Skew, energy and conditions of cells, from the rows of all ranks in the steps that count."""

    def __init__(self, rows: "pd.DataFrame") -> None:
        self._cells = rows.groupby("cell_id", observed=True)
        waits = rows.groupby(_STEP, observed=True)["communication_time_s"]
        # Without the times of all ranks neither the difference nor the shortest has a meaning.
        complete = waits.count() == waits.size()
        spread, shortest = (waits.max() - waits.min()).where(complete), waits.min().where(complete)
        self._skew = spread.groupby("cell_id", observed=True).median()
        self._transfer = shortest.groupby("cell_id", observed=True).median()
        self._conditions = self._cells[list(_CONDITIONS)].median()
        # A rank has the same figure in all its rows; the sum over ranks is unknown where one of them is.
        energy = rows.groupby(["cell_id", "rank"], observed=True)["energy_j"].median()
        self._energy = energy.groupby("cell_id", observed=True).sum(min_count=1)
        self._energy_known = energy.notna().groupby("cell_id", observed=True).all()
        self._shares = self._cells[["throttled", "contended", "is_settled"]].mean()

    def of(self, cell: str) -> dict[str, Any]:
        """Fields of the ``Measurement`` of ``cell``."""
        conditions, shares = self._conditions.loc[cell], self._shares.loc[cell]
        settled = _number(shares["is_settled"])
        return {
            "skew_s": _number(self._skew.loc[cell]),
            "transfer_time_s": _number(self._transfer.loc[cell]),
            "energy_j": _number(self._energy.loc[cell]) if self._energy_known.loc[cell] else None,
            **{name: _number(conditions[name]) for name in _CONDITIONS},
            "throttled_share": _number(shares["throttled"]),
            "contended_share": _number(shares["contended"]),
            "settled": None if settled is None else settled == 1.0,
        }


def _cold_times(rows: "pd.DataFrame") -> dict[str, float]:
    """By cell, the median over its cold steps (warm-up included) of the slowest rank; without cells that have none."""
    cold = rows[rows["is_cold"].fillna(False).astype(bool) & ~rows["step_skipped"]]
    slowest = cold.groupby(_STEP, observed=True)["iteration_time_s"].max()
    return {str(cell): float(value) for cell, value in slowest.groupby("cell_id", observed=True).median().items()}


def _anywhere_in_step(rows: "pd.DataFrame", marked: "pd.Series[bool]") -> "pd.Series[bool]":
    """``marked`` on all ranks of every step in which it marks one."""
    return marked.groupby([rows[name] for name in _STEP], observed=True).transform("any").astype(bool)


def _reasons(rows: "pd.DataFrame", reason: str) -> list[tuple[str, str]]:
    steps = rows.drop_duplicates(_STEP).groupby("cell_id", observed=True).size()
    return [(str(cell), f"{count} steps left out: {reason}") for cell, count in steps.items()]


def _number(value: Any) -> float | None:
    import pandas as pd

    return None if pd.isna(value) else float(value)  # no row of the cell has this part
