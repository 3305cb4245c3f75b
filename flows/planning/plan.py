"""The plan of a campaign: every check that needs no measuring, the grid, and its expected duration."""

import functools
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from precision_time.flows.clusters.settings import SlurmOptions, is_local
from precision_time.flows.planning.changed_settings import check_unchanged, limits_of
from precision_time.flows.planning.order import order_cells
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.predictor.closed_form.solve import solve_closed_form
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.parallelism import parse_parallelism
from precision_time.predictor.setup.precision import PRECISIONS, parse_precision
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.predictor.workloads.workload import WorkloadFeatures, find_workload
from precision_time.storage.errors import InputError, PrecisionUnsupportedError
from precision_time.storage.schema import CellOutcome, GridCell
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.probing.probe_device import ProbeReport, probe_device
from precision_time.tasks.work_kinds import WORK_KINDS, check_grid, kind_of

__all__ = ["CampaignPlan", "CellEstimate", "PlannedCell", "plan_campaign"]

#: Bytes of a cell's files without rows, and of one row: measured on written files, rounded up.
CELL_BYTES = 32_000
ROW_BYTES = 100
IMPORT_SECONDS = 300
#: The limit of ``cells_at_once``: each cell has a thread and a task in Prefect.
MOST_AT_ONCE = 256


CellState = Literal["recorded", "refused", "will be refused", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCell:
    """A cell, its identity on this machine, whether the dataset has it, and the seconds it is expected to take.

    ``place`` is its turn in the order of measuring. ``refusal`` is the outcome by which the same environment refused it
    before; it would do so again, so the cell is not tried again. ``is_refusable`` says that the cell is refused without
    a try; it then takes no time and comes after all others.
    """

    cell: GridCell
    cell_id: str
    is_recorded: bool
    estimated_s: float
    place: int = 0
    refusal: CellOutcome | None = None
    is_refusable: bool = False

    @property
    def state(self) -> CellState:
        """Whether the cell is recorded, refused, refused without a try, or still to measure."""
        if self.is_recorded:
            return "recorded"
        if self.refusal is not None:
            return "refused"
        return "will be refused" if self.is_refusable else "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignPlan:
    """A checked campaign on this machine: its device, and all of its cells as the campaign file lists them."""

    spec: CampaignSpec
    device: ProbeReport
    cells: tuple[PlannedCell, ...]

    @property
    def missing(self) -> list[PlannedCell]:
        """The cells still to measure in this environment, in the order of measuring."""
        missing = (planned for planned in self.cells if planned.state == "missing")
        return sorted(missing, key=lambda planned: planned.place)

    @property
    def goal(self) -> int:
        """How many cells are to be recorded in all: the whole grid, or the adaptive budget."""
        return min(len(self.cells), self.spec.budget_cells or len(self.cells))

    @property
    def cells_to_measure(self) -> int:
        """How many of the missing cells this run is to measure, apart from the limits of a run."""
        missing, recorded = 0, 0
        for planned in self.cells:
            missing += planned.state == "missing"
            recorded += planned.is_recorded
        return min(missing, max(0, self.goal - recorded))

    @property
    def estimated_s(self) -> float:
        """Seconds that this run is expected to take; an adaptive budget counts as so many average missing cells."""
        missing = self.missing
        if not missing:
            return 0.0
        return sum(self.occupied_s(missing).values()) * self.cells_to_measure / len(missing)

    def occupied_s(self, cells: Sequence[PlannedCell]) -> dict[str, float]:
        """By cell id, the seconds of each of ``cells`` times its share of the cluster."""
        at_once = self.at_once

        def share(cell: GridCell) -> float:
            if self.is_one_per_host:
                return cell.nodes / self.device.host_count
            return cell.world_size / self.device.most_ranks

        return {
            planned.cell_id: planned.estimated_s * max(1 / at_once, min(1.0, share(planned.cell))) for planned in cells
        }

    @property
    def is_one_per_host(self) -> bool:
        """Whether a cell has its hosts to itself, as on CPUs, where two cells would slow each other down."""
        return self.device.environment.device_type == "cpu" and self.spec.cells_at_once is None

    @property
    def at_once(self) -> int:
        """Cells that run side by side: one per host on CPUs, on GPUs as many as fit."""
        if self.spec.cells_at_once is not None:
            return self.spec.cells_at_once
        if self.is_one_per_host:
            return min(MOST_AT_ONCE, max(1, self.device.host_count))
        narrowest = min((planned.cell.world_size for planned in self.cells if planned.state == "missing"), default=1)
        return min(MOST_AT_ONCE, max(1, self.device.most_ranks // narrowest))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``place`` is a cell's turn, from 0 on, unless a predictor chooses."""
        states = Counter(planned.state for planned in self.cells)
        return {
            "name": self.spec.name,
            "data": self.spec.data,
            "gpu": self.device.environment.gpu,
            "cells_planned": len(self.cells),
            "cells_recorded": states["recorded"],
            "cells_refused": states["refused"],
            "cells_to_refuse": states["will be refused"],
            "cells_missing": states["missing"],
            "cells_to_measure": self.cells_to_measure,
            "estimated_s": round(self.estimated_s, 1),
            "cells": [
                asdict(planned.cell)
                | {
                    "cell_id": planned.cell_id,
                    "state": planned.state,
                    "place": planned.place,
                    "estimated_s": round(planned.estimated_s, 1),
                }
                for planned in self.cells
            ],
        }


@functools.cache
def _probe_once(cluster: str, device: str, settings: str) -> ProbeReport:
    """Probe once in a process, because the command plans first and then the flow plans again."""
    if is_local(cluster):
        return probe_device({"local": "cpu", "local-cuda": "cuda"}.get(cluster, device))
    from precision_time.flows.clusters.cluster import probe_cluster

    return probe_cluster(device, cluster=cluster, **json.loads(settings))


def _describe_cluster(spec: CampaignSpec) -> str:
    """The arguments of ``probe_cluster`` for a campaign, as text that a cache can hold."""
    workers = max(cell.world_size for cell in spec.cells())
    slurm = None if spec.slurm is None else spec.slurm.model_dump()
    return json.dumps({"workers": workers, "slurm": slurm, "wait_s": spec.workers_timeout})


def plan_campaign(spec: CampaignSpec, *, probe: Callable[[str], ProbeReport] | None = None) -> CampaignPlan:
    """The grid of ``spec`` on this machine, after every check that needs no measuring.

    The checks, in this order: models and strategies fit each other, and cells fit the jobs of Slurm; the data folder is
    writable; the device has the GPUs and the precisions; the user's own models import; CA-SGD has a CPU and MPI; the
    settings are those of the recorded cells. Raises ``StorageError`` and its subclasses, ``InputError`` or
    ``PrecisionUnsupportedError``.
    """
    cells = spec.cells()
    check_grid(cells)
    _check_jobs(spec, cells)
    dataset = TimingsDataset(spec.data)
    dataset.check_writable(required_bytes=_required_bytes(spec, cells))
    device = probe(spec.device) if probe else _probe_once(spec.cluster, spec.device, _describe_cluster(spec))
    _check_device(cells, device, cluster=spec.cluster)
    for model in sorted({cell.model for cell in cells if ":" in cell.model}):
        _check_factory(model)
    for kind in WORK_KINDS:
        if of_kind := [cell for cell in cells if kind_of(cell.model) is kind]:
            kind.check_device(of_kind, device.environment)
    recorded = dataset.recorded_cells()
    estimate = CellEstimate(spec, device, cards=dataset.read_cards("workloads"))
    ids = {cell: cell.cell_id(kind_of(cell.model).environment(device.environment)) for cell in cells}
    refusable = {cell for cell in cells if kind_of(cell.model).refuse(cell) is not None}
    ordered = order_cells([cell for cell in cells if cell not in refusable])
    places = {cell: place for place, cell in enumerate([*ordered, *(cell for cell in cells if cell in refusable)])}
    refusals = _find_refusals(dataset, missing=set(ids.values()) - recorded)
    planned = tuple(
        PlannedCell(
            cell=cell,
            cell_id=cell_id,
            is_recorded=cell_id in recorded,
            estimated_s=0.0 if cell in refusable else estimate.seconds(cell),
            place=places[cell],
            refusal=refusals.get(cell_id),
            is_refusable=cell in refusable,
        )
        for cell, cell_id in ids.items()
    )
    plan = CampaignPlan(spec=spec, device=device, cells=planned)
    if plan.cells_to_measure:
        check_unchanged(spec, cells=recorded.intersection(ids.values()))
    return plan


def _find_refusals(dataset: TimingsDataset, *, missing: set[str]) -> dict[str, CellOutcome]:
    """Earlier refusals of missing cells; a cell's id includes its environment, so they still apply."""
    return {outcome.cell_id: outcome for outcome in dataset.outcomes(cells=missing) if outcome.status == "refused"}


def _required_bytes(spec: CampaignSpec, cells: Iterable[GridCell]) -> int:
    steps = spec.warmup_steps + spec.measured_steps
    return sum(CELL_BYTES + ROW_BYTES * steps * cell.world_size for cell in cells)


def _check_jobs(spec: CampaignSpec, cells: list[GridCell]) -> None:
    """Refuse cells with more ranks on a host than a job has workers: Slurm may place each job on another host."""
    if spec.cluster != "slurm":
        return
    per_job = (spec.slurm or SlurmOptions.model_validate({})).workers_per_job
    ranks_on_host = {cell.world_size: cell.world_size // cell.nodes for cell in cells}
    too_wide = sorted(world_size for world_size, ranks in ranks_on_host.items() if ranks > per_job)
    if too_wide:
        most = max(ranks_on_host.values())
        raise InputError(
            "a cell has more ranks on a host than a job of Slurm has workers",
            got=f"gpus: {', '.join(map(str, too_wide))}; slurm.workers_per_job: {per_job}",
            expected="the ranks of a host in one job, because Slurm may place each job on another host",
            fix=f"slurm: {{workers_per_job: {most}}}, or gpus_per_node: {per_job} to spread over hosts",
        )


def _check_device(cells: list[GridCell], device: ProbeReport, *, cluster: str) -> None:
    gpu = device.environment.gpu
    spread = sorted({cell.world_size for cell in cells if cell.nodes > 1})
    if spread and is_local(cluster):
        raise InputError(
            "gpus_per_node spreads ranks over several hosts, but the cluster is this machine",
            got=f"gpus: {', '.join(str(ranks) for ranks in spread)}; cluster: {cluster}",
            expected="a cluster of several hosts",
            fix="name one (cluster: tcp://host:port), or leave gpus_per_node out",
        )
    scattered = sorted({cell.nodes for cell in cells if cell.nodes > device.host_count})
    if scattered:
        raise InputError(
            "gpus_per_node spreads ranks over more hosts than the cluster has",
            got=", ".join(str(nodes) for nodes in scattered),
            expected=f"at most {device.host_count}",
            fix="start workers on more hosts, or take the largest numbers out of gpus",
        )
    too_wide = sorted({cell.world_size for cell in cells if cell.world_size // cell.nodes > device.device_count})
    if too_wide:
        kind = "GPUs" if device.environment.device_type == "cuda" else "CPU cores (or workers)"
        raise InputError(
            f"gpus asks for more ranks than {gpu} has {kind}",
            got=", ".join(str(ranks) for ranks in too_wide),
            expected=f"at most {device.device_count}",
            fix="take them out of gpus, exclude them, or spread them over hosts with gpus_per_node",
        )
    precisions = {cell.precision for cell in cells if kind_of(cell.model).needs_precisions}
    lacking = sorted(precisions & set(device.unsupported))
    if lacking:
        raise PrecisionUnsupportedError(
            f"{gpu} cannot run {'a precision' if len(lacking) == 1 else f'{len(lacking)} precisions'} of the campaign",
            got="; ".join(f"{name} ({device.unsupported[name]})" for name in lacking),
            expected=f"one that the device has: {', '.join(_supported(device))}",
            fix="take it out of precisions, or exclude it; no precision is replaced silently",
        )


def _supported(device: ProbeReport) -> list[str]:
    return [name for name in PRECISIONS if name not in device.unsupported]


_IMPORT_FACTORY = """
import importlib, sys
module, name = sys.argv[1].split(":")
factory = getattr(importlib.import_module(module), name)
if not callable(factory):
    raise TypeError(f"{name} is not callable")
"""


@functools.cache
def _check_factory(model: str) -> None:
    """Import one of the user's own models in a separate process: it may load torch, and may fail in any way."""
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


class CellEstimate:
    """Seconds of a cell: the start of its ranks, and its iterations by the closed forms, up to ``seconds_per_cell``."""

    def __init__(self, spec: CampaignSpec, device: ProbeReport, *, cards: list[dict[str, Any]]) -> None:
        self.spec = spec
        self.hardware: HardwareSpec = device.hardware
        self.cores = max(1, device.environment.cpu_cores)
        self.cards = [WorkloadFeatures.from_dict(card) for card in cards]
        self.workload_of = functools.cache(self._workload)

    def seconds(self, cell: GridCell) -> float:
        """Expected seconds of ``cell``, start-up included."""
        return kind_of(cell.model).expected_s(
            cell,
            hardware=self.hardware,
            cores=self.cores,
            limits=limits_of(self.spec),
            iteration_s=self._iteration_s,
        )

    def _iteration_s(self, cell: GridCell) -> float:
        setup = self.setup(cell)
        return math.inf if setup is None else solve_closed_form(setup).iteration_time_s

    def setup(self, cell: GridCell) -> TrainingSetup | None:
        """The predictor's setup of ``cell``; None for a model without a card."""
        workload = self.workload_of(cell.model)
        if workload is None:
            return None
        return TrainingSetup(
            workload=workload,
            hardware=self.hardware,
            precision=parse_precision(cell.precision),
            world_size=cell.world_size,
            nodes=cell.nodes,
            batch_size=cell.per_gpu_batch_size,
            gradient_accumulation_steps=cell.gradient_accumulation_steps,
            parallelism=parse_parallelism(cell.strategy, world_size=cell.world_size),
        )

    def _workload(self, model: str) -> WorkloadFeatures | None:
        """The card of ``model``; None for CA-SGD, and for a model of the user's own that was never measured."""
        if kind_of(model).unlearnable or (":" in model and all(card.name != model for card in self.cards)):
            return None
        return find_workload(model, measured=self.cards)
