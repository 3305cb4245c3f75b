"""The plan of a campaign: what can be refused before measuring is refused, and the grid gets its expected duration."""

import functools
import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from precision_time.flows.spec import CampaignSpec
from precision_time.predictor.closed_form import TrainingSetup, solve_closed_form
from precision_time.predictor.hardware import HardwareSpec
from precision_time.predictor.precision import PRECISIONS, parse_precision
from precision_time.predictor.workload import WorkloadFeatures, find_workload
from precision_time.storage.errors import InputError, PrecisionUnsupportedError
from precision_time.storage.schema import GridCell
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.probe import ProbeReport, probe_device

__all__ = ["CampaignPlan", "PlannedCell", "plan_campaign"]

#: Bytes of one cell's files and of one of their rows: measured on written files, rounded up.
CELL_BYTES = 32_000
ROW_BYTES = 100
IMPORT_SECONDS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCell:
    """A cell, its identity on this machine, whether the dataset has it, and the seconds it is expected to take."""

    cell: GridCell
    cell_id: str
    is_recorded: bool
    estimated_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPlan:
    """A checked campaign on this machine: its device and all of its cells in the order in which they run."""

    spec: CampaignSpec
    device: ProbeReport
    cells: tuple[PlannedCell, ...]

    @property
    def missing(self) -> list[PlannedCell]:
        """The cells that the dataset does not have for this environment."""
        return [planned for planned in self.cells if not planned.is_recorded]

    @property
    def estimated_s(self) -> float:
        """Seconds that the missing cells are expected to take together."""
        return sum(planned.estimated_s for planned in self.missing)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.spec.name,
            "data": self.spec.data,
            "gpu": self.device.environment.gpu,
            "cells_planned": len(self.cells),
            "cells_recorded": len(self.cells) - len(self.missing),
            "cells_missing": len(self.missing),
            "estimated_s": round(self.estimated_s, 1),
            "cells": [
                asdict(planned.cell)
                | {
                    "cell_id": planned.cell_id,
                    "state": "recorded" if planned.is_recorded else "missing",
                    "estimated_s": round(planned.estimated_s, 1),
                }
                for planned in self.cells
            ],
        }


@functools.cache
def _probe_once(device: str) -> ProbeReport:
    """One probe a process: the command plans, and then the flow plans again."""
    return probe_device(device)


def plan_campaign(spec: CampaignSpec, *, probe: Callable[[str], ProbeReport] | None = None) -> CampaignPlan:
    """The grid of ``spec`` on this machine, after every check that needs no measuring.

    In this order: the data folder takes files; the device has the GPUs and the precisions; models of the user's own
    import. Raises ``StorageError`` and its kin, ``InputError`` or ``PrecisionUnsupportedError``.
    """
    cells = spec.cells()
    dataset = TimingsDataset(spec.data)
    dataset.check_writable(required_bytes=_required_bytes(spec, cells))
    device = (probe or _probe_once)(spec.device)
    _check_device(cells, device)
    for model in sorted({cell.model for cell in cells if ":" in cell.model}):
        _check_factory(model)
    recorded = dataset.recorded_cells()
    estimate = _CellEstimate(spec, device, dataset.read_cards("workloads"))
    planned = []
    for cell in cells:
        cell_id = cell.cell_id(device.environment)
        planned.append(
            PlannedCell(cell=cell, cell_id=cell_id, is_recorded=cell_id in recorded, estimated_s=estimate.seconds(cell))
        )
    return CampaignPlan(spec=spec, device=device, cells=tuple(planned))


def _required_bytes(spec: CampaignSpec, cells: Iterable[GridCell]) -> int:
    steps = spec.warmup_steps + spec.measured_steps
    return sum(CELL_BYTES + ROW_BYTES * steps * cell.world_size for cell in cells)


def _check_device(cells: list[GridCell], device: ProbeReport) -> None:
    gpu = device.environment.gpu
    too_wide = sorted({cell.world_size for cell in cells if cell.world_size > device.device_count})
    if too_wide:
        kind = "GPUs" if device.environment.device_type == "cuda" else "CPU cores"
        raise InputError(
            f"gpus asks for more ranks than {gpu} has {kind}",
            got=", ".join(str(ranks) for ranks in too_wide),
            expected=f"at most {device.device_count}",
            fix="take them out of gpus, or exclude them",
        )
    lacking = sorted({cell.precision for cell in cells} & set(device.unsupported))
    if lacking:
        raise PrecisionUnsupportedError(
            f"{gpu} cannot run {'a precision' if len(lacking) == 1 else f'{len(lacking)} precisions'} of the campaign",
            got="; ".join(f"{name} ({device.unsupported[name]})" for name in lacking),
            expected=f"one that the device has: {', '.join(_supported(device))}",
            fix="take it out of precisions, or exclude it; nothing is replaced silently",
        )


def _supported(device: ProbeReport) -> list[str]:
    return [name for name in PRECISIONS if name not in device.unsupported]


_IMPORT_FACTORY = """
import importlib, sys
module, name = sys.argv[1].split(":")
found = getattr(importlib.import_module(module), name)
if not callable(found):
    raise TypeError(f"{name} is not callable")
"""


@functools.cache
def _check_factory(model: str) -> None:
    """Import one of the user's own models in a process of its own: it may bring torch, and may fail in any way."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT_FACTORY, model],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"model {model} does not import", got=f"nothing within {IMPORT_SECONDS} s") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise InputError(
            f"model {model} does not import",
            got=lines[-1],
            expected="module:factory, a callable that returns a Workload",
            fix="run from the folder that holds the module, or install it",
        )


class _CellEstimate:
    """Seconds of a cell: starting the ranks, then the planned iterations by the closed forms, or the cap."""

    #: On an idle machine of 2 cores, all but the iterations took 3.3 to 4.0 s with one rank and 3.6 to 4.9 s with two,
    #: nearly all of it imports: a fixed part, and a part for which ranks on one core wait in turn.
    START_S = 2.5
    START_CORE_S = 2.0

    def __init__(self, spec: CampaignSpec, device: ProbeReport, cards: list[dict[str, Any]]) -> None:
        self.spec = spec
        self.hardware: HardwareSpec = device.hardware
        self.cores = max(1, device.environment.cpu_cores)
        self.cards = [WorkloadFeatures.from_dict(card) for card in cards]

    def seconds(self, cell: GridCell) -> float:
        start_s = self.START_S + self.START_CORE_S * max(0.5, cell.world_size / self.cores)
        return start_s + min(self.spec.seconds_per_cell, self._iterations(cell) * self._iteration_s(cell))

    def _iterations(self, cell: GridCell) -> int:
        # With peers every measured iteration has a twin without communication.
        twins = 2 if cell.world_size > 1 else 1
        return self.spec.warmup_steps + self.spec.measured_steps * twins

    def _iteration_s(self, cell: GridCell) -> float:
        workload = self._workload(cell.model)
        if workload is None:
            return math.inf
        setup = TrainingSetup(
            workload=workload,
            hardware=self.hardware,
            precision=parse_precision(cell.precision),
            world_size=cell.world_size,
            nodes=cell.nodes,
            batch_size=cell.per_gpu_batch_size,
            gradient_accumulation_steps=cell.gradient_accumulation_steps,
            strategy=cell.strategy,
        )
        return solve_closed_form(setup).iteration_time_s

    def _workload(self, model: str) -> WorkloadFeatures | None:
        """The card of ``model``; None for one of the user's own that was never measured here: it gets the cap."""
        if ":" in model and all(card.name != model for card in self.cards):
            return None
        return find_workload(model, measured=self.cards)
