"""Time real cells of four models on one GPU; after each, write all rows to one Parquet file and a page beside it.

Run by check.sh: python tests/gpu/measure_cells.py OUT [SECONDS]. Needs torch and pyarrow, and no Dask.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from precision_time.storage.schema import CellOutcome, GridCell
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.gangs.record_cell import record_cell
from precision_time.tasks.probing.probe_device import ProbeReport, probe_device
from precision_time.tasks.processes.rank_process import profile_here
from precision_time.tasks.ranks.job import MeasurementLimits

MODELS = {"resnet50": (32, 64, 128), "bert_base": (8, 16, 32), "gpt2": (2, 4, 8), "vit_b16": (16, 32, 64)}
PRECISIONS = ("fp32", "tf32", "amp_fp16", "amp_bf16")
#: A cell starts in some seconds and takes at most 4 of steps; after 40 it hangs.
LIMITS = MeasurementLimits(warmup_steps=5, measured_steps=15, seconds_per_cell=4.0, timeout_s=40.0)


def list_cells() -> list[GridCell]:
    """All cells, first the middle batch of every model and precision, so that a run cut short is useful."""
    order = (1, 2, 0)
    return [
        GridCell(model=model, precision=precision, world_size=1, per_gpu_batch_size=batches[place])
        for place, (model, batches), precision in itertools.product(order, MODELS.items(), PRECISIONS)
    ]


def measure_cell(cell: GridCell, *, report: ProbeReport, dataset: TimingsDataset, scratch: Path) -> CellOutcome:
    """Measure one cell in a process of its own, and record it as a campaign does."""
    receipt = profile_here(cell, environment=report.environment, limits=LIMITS, scratch=scratch)
    return record_cell(dataset, receipt)


def write_results(out: Path, rows: pa.Table, *, page: str) -> None:
    """``timings.parquet`` and ``results.md`` in ``out``, replaced whole: the script may be killed at any time."""
    written = out / ".timings.parquet"
    pq.write_table(rows, written, compression="zstd")
    written.replace(out / "timings.parquet")
    written = out / ".results.md"
    written.write_text(page, encoding="utf-8")
    written.replace(out / "results.md")


def make_page(
    outcomes: list[CellOutcome], rows: list[dict[str, Any]], *, report: ProbeReport, planned: int, took_s: float
) -> str:
    """The results as Markdown: one line per cell, with medians of the measured iterations among ``rows``."""
    rows = [row for row in rows if not row["is_warmup"]]
    environment = report.environment
    lines = [
        f"# {environment.gpu}",
        "",
        f"torch {environment.framework_version}, CUDA {environment.cuda_version}, driver {environment.driver_version}; "
        f"{sum(cell.status == 'recorded' for cell in outcomes)} of {planned} cells in {took_s:.0f} s, one device, "
        f"{LIMITS.measured_steps} measured iterations at most. Medians in milliseconds.",
        "",
        "| model | precision | batch | iteration | forward | backward | optimizer | samples/s | steady |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    in_order = sorted(
        outcomes, key=lambda cell: (cell.model, cell.per_gpu_batch_size, PRECISIONS.index(cell.precision))
    )
    for outcome in in_order:
        measured = [row for row in rows if row["cell_id"] == outcome.cell_id]
        cell = f"| {outcome.model} | {outcome.precision} | {outcome.per_gpu_batch_size} | "
        if not measured:
            lines.append(cell + f"{outcome.cause} | | | | | |")
            continue
        names = ("iteration_time_s", "forward_time_s", "backward_time_s", "optimizer_time_s")
        medians = [statistics.median(row[name] for row in measured) for name in names]
        times = " | ".join(f"{1e3 * seconds:.2f}" for seconds in medians)
        steady = "yes" if measured[0]["is_steady"] else "no"
        lines.append(cell + f"{times} | {outcome.per_gpu_batch_size / medians[0]:,.0f} | {steady} |")
    return "\n".join([*lines, ""])


def main(out: Path, *, seconds: float, device: str = "cuda", cells: list[GridCell] | None = None) -> int:
    """Measure what fits into ``seconds``; 0 only when every cell was measured.

    No cell begins that could end after ``seconds``. Results are in ``out`` after each cell, so that a kill from outside
    costs only the running cell.
    """
    began = time.monotonic()
    report = probe_device(device)
    print(f"{report.environment.gpu}, torch {report.environment.framework_version}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    cells = list_cells() if cells is None else cells
    outcomes: list[CellOutcome] = []
    tables: list[pa.Table] = []
    page = ""
    with tempfile.TemporaryDirectory() as scratch:
        dataset = TimingsDataset(str(Path(scratch) / "data"))
        for cell in cells:
            if time.monotonic() - began > seconds - LIMITS.timeout_s:
                print(f"{len(cells) - len(outcomes)} cells do not fit into {seconds:g} s")
                break
            outcome = measure_cell(cell, report=report, dataset=dataset, scratch=Path(scratch))
            outcomes.append(outcome)
            print(f"{cell.label}: {outcome.status} {outcome.cause} in {outcome.duration_s:.1f} s", flush=True)
            tables.append(dataset.read(cells={outcome.cell_id}))
            rows = pa.concat_tables(tables).unify_dictionaries()
            page = make_page(
                outcomes, rows.to_pylist(), report=report, planned=len(cells), took_s=time.monotonic() - began
            )
            write_results(out, rows, page=page)
    print(page)
    return 0 if len(outcomes) == len(cells) and all(outcome.status == "recorded" for outcome in outcomes) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for timings.parquet and results.md")
    parser.add_argument("seconds", type=float, nargs="?", default=380.0)
    arguments = parser.parse_args()
    sys.exit(main(arguments.out, seconds=arguments.seconds))
