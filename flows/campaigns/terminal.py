"""What the commands campaign, retrain and probe print: data on stdout, progress on stderr."""

import logging
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from precision_time.flows.campaigns.summary import CampaignResult, describe_options, read_grid, table_rows
from precision_time.flows.planning.plan import CampaignPlan
from precision_time.flows.retraining.result import RetrainResult
from precision_time.predictor.answering.estimate import format_duration
from precision_time.storage.errors import printable
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tasks.probing.probe_model import ModelProbe
from precision_time.tasks.publishing.report import readable_accuracy

__all__ = [
    "describe_plan", "describe_result", "log_of_run", "open_console", "print_model_probe", "print_plan", "print_probe",
    "print_result", "print_retraining", "say",
]  # fmt: skip

#: Further rows of a table are left out; --json prints all of them.
MAX_ROWS = 500
#: Characters of a line when the output is no terminal, so that nothing is cut or wrapped.
FILE_WIDTH = 160


def say(text: str) -> None:
    """One line of progress on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def log_of_run() -> "logging.Logger | logging.LoggerAdapter[Any]":
    """The log that Prefect shows on the page of this run; outside a run an ordinary logger."""
    from prefect.exceptions import MissingContextError
    from prefect.logging import get_run_logger

    try:
        return get_run_logger()
    except MissingContextError:
        return logging.getLogger("precision_time.run")


def open_console(*, to_stderr: bool = False) -> Console:
    """A console for stdout or stderr, wide enough that nothing is cut when the output goes to a file."""
    console = Console(stderr=to_stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=to_stderr, highlight=False, width=FILE_WIDTH)


def describe_plan(plan: CampaignPlan) -> str:
    """One line: the device, the number of cells in each state, and the expected duration."""
    states = Counter(planned.state for planned in plan.cells)
    return (
        f"{plan.spec.name} on {plan.device.environment.gpu}: {len(plan.cells)} cells, {states['recorded']} recorded, "
        + (f"{states['refused']} refused, " if states["refused"] else "")
        + (f"{states['will be refused']} will be refused, " if states["will be refused"] else "")
        + f"{plan.cells_to_measure} to measure"
        + (f", about {format_duration(plan.estimated_s)} by the closed forms" if plan.cells_to_measure else "")
    )


def describe_result(result: CampaignResult) -> str:
    """One line: the status of the run, with its counts."""
    return (
        f"{result.name}: {result.status}; {result.cells_recorded} of {result.cells_planned} cells are recorded, "
        f"{result.cells_measured} by this run ({result.rows_added} rows) in {format_duration(result.duration_s)}"
    )


def print_plan(plan: CampaignPlan, *, console: Console) -> None:
    """The whole grid with the state and expected duration of each cell, and the limits of the run."""
    with_options = any(describe_options(planned.cell) for planned in plan.cells)
    rows = [
        {
            "model": planned.cell.model,
            "precision": planned.cell.precision,
            "GPUs": planned.cell.world_size,
            "batch": planned.cell.per_gpu_batch_size,
            "accumulation": planned.cell.gradient_accumulation_steps,
            **({"options": describe_options(planned.cell)} if with_options else {}),
            "state": planned.state,
            "expected": format_duration(planned.estimated_s) if planned.state == "missing" else "",
        }
        for planned in plan.cells
    ]
    _print_table(console, rows)
    console.print(describe_plan(plan), markup=False)
    if plan.goal < len(plan.cells):
        console.print(f"adaptive: a predictor chooses {plan.goal} cells of the grid", markup=False)
    limits = {
        "max_hours": plan.spec.max_hours,
        "max_cells": plan.spec.max_cells,
        "max_failures": plan.spec.max_failures,
    }
    stated = [f"{name} {value:g}" for name, value in limits.items() if value is not None]
    if stated:
        console.print(f"limits of this run: {', '.join(stated)}", markup=False)


def print_result(plan: CampaignPlan, result: CampaignResult, *, console: Console) -> None:
    """The grid with its times and speed-ups, and the counts of the run."""
    rows = read_grid(plan, result.failed, dataset=TimingsDataset(plan.spec.data))
    _print_table(console, table_rows(rows))
    console.print(f"{describe_result(result)}; data: {result.data}", markup=False)
    if result.end:
        console.print(result.end, markup=False)
    if result.retraining is not None:
        console.print(f"retraining: {result.retraining.status}", markup=False)
        for reason in result.retraining.reasons:
            console.print(f"- {printable(reason)}", markup=False)


def print_retraining(result: RetrainResult, *, console: Console) -> None:
    """Errors by split and method, the decision and its reasons."""
    _print_table(console, readable_accuracy(result.accuracy))
    for reason in result.reasons:
        console.print(f"- {reason}", markup=False)
    console.print(f"{result.status}; in use: {result.artifact_id or 'nothing yet'}", markup=False)


def print_probe(report: ProbeReport, *, console: Console) -> None:
    """The device, its speeds, and the precisions that it cannot run."""
    hardware = report.hardware
    peaks = hardware.peak_flops_per_s.items()
    rows = [{"precision format": name, "peak": f"{rate / 1e9:,.0f} GFLOP/s"} for name, rate in peaks]
    console.print(f"{hardware.name}: {report.device_count} x {report.environment.device_type}", markup=False)
    _print_table(console, rows)
    console.print(
        f"memory {hardware.memory_bytes / 2**30:.1f} GiB at {hardware.memory_bytes_per_s / 1e9:.1f} GB/s; "
        f"one eager operation {format_duration(hardware.launch_overhead_s)}",
        markup=False,
    )
    for name, reason in report.unsupported.items():
        console.print(f"not supported: {name} ({printable(reason)})", markup=False)


def print_model_probe(probe: ModelProbe, *, console: Console) -> None:
    """The measured and predicted time of each setting, and the predictor that answered."""
    hardware = probe.device.hardware
    # All rows have the model and device that stand above the table.
    subject = re.compile(rf" of \S+ on {re.escape(hardware.name)}(?=:)")
    rows = [
        {
            "precision": line.precision,
            "batch": line.batch_size,
            "GPUs": line.gpus,
            "GPU": line.gpu,
            "measured": "" if line.measured_s is None else format_duration(line.measured_s),
            "predicted": format_duration(line.predicted_s),
            "error": "" if line.error is None else f"{line.error:+.1%}",
            f"{probe.level:.0%} interval": f"{format_duration(line.low_s)} .. {format_duration(line.high_s)}",
            "how known": ("measured; without it " if line.is_calibrating else "") + subject.sub("", line.known_by),
        }
        for line in probe.times
    ]
    steps = sum(line.steps for line in probe.times)
    console.print(f"{probe.model} on {hardware.name}: {steps} iterations timed", markup=False)
    _print_table(console, rows)
    count = len(probe.calibration.rows)
    console.print(
        f"answered by {probe.calibration.artifact_id or 'the closed forms'}, calibrated by {count} measured "
        f"row{'s' if count > 1 else ''}; load of the machine {probe.load_average:.1f} on "
        f"{probe.device.environment.cpu_cores} cores",
        markup=False,
    )
    for text in probe.left_out:
        console.print(f"left out: {printable(text)}", markup=False)


def _print_table(console: Console, rows: Sequence[Mapping[str, object]]) -> None:
    if not rows:
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading, value in rows[0].items():
        table.add_column(heading, justify="right" if isinstance(value, int) else "left", no_wrap=True)
    for row in rows[:MAX_ROWS]:
        table.add_row(*(Text(printable(str(value))) for value in row.values()))
    console.print(table)
    if len(rows) > MAX_ROWS:
        console.print(f"... and {len(rows) - MAX_ROWS} more; --json prints all of them", markup=False)
