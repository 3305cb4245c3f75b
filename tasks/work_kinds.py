"""The kinds of work that campaigns measure, one record for each: networks, and the CA-SGD solver."""

import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.workloads.workload import known_workloads
from precision_time.storage.errors import InputError, UnknownNameError
from precision_time.storage.schema import Environment, GridCell
from precision_time.tasks.casgd_cells import cells as casgd
from precision_time.tasks.ranks.job import Attempt, CellReceipt, MeasurementLimits, RankJob
from precision_time.tasks.ranks.refusals import refuse_cell

if TYPE_CHECKING:
    from precision_time.tasks.gangs.leases import GangLease

__all__ = ["WORK_KINDS", "WorkKind", "check_grid", "kind_of", "refuse_unstarted"]

_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)

#: On an idle machine of 2 cores, all but the iterations took 3.3 to 4.0 s with one rank and 3.6 to 4.9 s with two,
#: nearly all of it imports: a fixed part, and a part for which ranks on one core wait in turn.
_START_S = 2.5
_START_CORE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkKind:
    """One kind of work.

    ``claims(model)``: whether a model of this name is of this kind.
    ``check_model(model)`` raises ``InputError`` for a name of this kind without such a model.
    ``strategies``: those that it is measured with.
    ``list_misfits(cell)``: why one of its cells cannot be run; ``fitting_cells`` describes the cells that can.
    ``check_device(cells, machine)`` raises ``InputError`` where its cells cannot run on a machine.
    ``needs_precisions``: whether PyTorch on the device must have the precisions of its cells.
    ``takes_traces``: whether its steps can be traced.
    ``environment(machine)``: the machine with the software that its ranks run.
    ``expected_s(cell, hardware=, cores=, limits=, iteration_s=)``: the expected seconds of a cell, start-up included;
    ``iteration_s(cell)`` are those of one iteration of a network by the closed forms.
    ``refuse(cell)``: (cause, message) of a cell that is refused before anything starts, else None.
    ``profile(job, lease)`` measures a job on leased workers.
    ``unlearnable``: the reason why the predictor cannot learn from its measurements, or empty.
    """

    name: str
    claims: Callable[[str], bool]
    check_model: Callable[[str], None]
    strategies: tuple[str, ...]
    list_misfits: Callable[[GridCell], Iterable[casgd.Misfit]]
    fitting_cells: str
    check_device: Callable[[Sequence[GridCell], Environment], None] = lambda cells, environment: None
    needs_precisions: bool = True
    takes_traces: bool = True
    environment: Callable[[Environment], Environment] = lambda machine: machine
    expected_s: Callable[..., float]
    refuse: Callable[[GridCell], tuple[str, str] | None] = lambda cell: None
    profile: "Callable[[RankJob, GangLease], CellReceipt]"
    unlearnable: str = ""


def _check_network_name(model: str) -> None:
    if ":" in model:
        if not _FACTORY.fullmatch(model):
            raise InputError("not a model of your own", got=repr(model), expected="package.module:factory")
    elif model not in known_workloads():
        raise UnknownNameError("model", model, known_workloads())


def _list_network_misfits(cell: GridCell) -> Iterable[casgd.Misfit]:
    if cell.strategy in casgd.CASGD_STRATEGIES:
        yield f"{cell.model} with {cell.strategy}", {"model": cell.model, "strategy": cell.strategy}


def _expect_network_s(
    cell: GridCell,
    *,
    hardware: HardwareSpec,
    cores: int,
    limits: MeasurementLimits,
    iteration_s: Callable[[GridCell], float],
) -> float:
    """Starting the ranks, then the planned iterations by the closed forms, or the cap."""
    # With peers every measured iteration has a twin without communication.
    twins = 2 if cell.world_size > 1 else 1
    iterations = limits.warmup_steps + limits.measured_steps * twins
    start_s = _START_S + _START_CORE_S * max(0.5, cell.world_size / cores)
    return start_s + min(limits.seconds_per_cell, iterations * iteration_s(cell))


def _profile_network(job: RankJob, lease: "GangLease") -> CellReceipt:
    from precision_time.tasks.gangs.profile_cell import profile_cell

    return profile_cell(job, lease=lease)


def _check_casgd_device(cells: Sequence[GridCell], environment: Environment) -> None:
    from precision_time.tasks.casgd_cells.launch import check_mpi

    if environment.device_type != "cpu":
        raise InputError(
            "campaigns measure CA-SGD on CPUs only",
            got=f"{cells[0].model} on {environment.gpu}",
            expected="device: cpu",
            fix="give these models a campaign file of their own with device: cpu",
        )
    check_mpi(cells)


def _profile_casgd(job: RankJob, lease: "GangLease") -> CellReceipt:
    from precision_time.tasks.casgd_cells.profile import profile_casgd_cell

    return profile_casgd_cell(job, lease=lease)


#: The first that claims a model has it; networks have every other name.
WORK_KINDS = (
    WorkKind(
        name="CA-SGD",
        claims=casgd.claims_model,
        check_model=casgd.check_model_name,
        strategies=casgd.CASGD_STRATEGIES,
        list_misfits=casgd.list_misfits,
        fitting_cells=f"models {casgd.SOURCE}-* with strategies {', '.join(casgd.CASGD_STRATEGIES)}",
        check_device=_check_casgd_device,
        needs_precisions=False,  # it brings its own arithmetic, whatever the kernels of PyTorch lack
        takes_traces=False,
        environment=casgd.casgd_environment,
        expected_s=lambda cell, *, iteration_s, **plan: casgd.estimate_casgd_s(casgd.CasgdCell.of(cell), **plan),
        profile=_profile_casgd,
        unlearnable=casgd.NO_CARD,
    ),
    WorkKind(
        name="networks",
        claims=lambda model: True,
        check_model=_check_network_name,
        strategies=("ddp",),
        list_misfits=_list_network_misfits,
        fitting_cells="every other model without",
        expected_s=_expect_network_s,
        refuse=refuse_cell,
        profile=_profile_network,
    ),
)


def kind_of(model: str) -> WorkKind:
    """The kind of work of a model with this name."""
    return next(kind for kind in WORK_KINDS if kind.claims(model))


def refuse_unstarted(attempt: Attempt) -> CellReceipt | None:
    """The receipt of an attempt at a cell that can be refused before anything starts; None for any other cell."""
    refusal = kind_of(attempt.cell.model).refuse(attempt.cell)
    if refusal is None:
        return None
    cause, message = refusal
    return attempt.receipt(
        cause=cause, message=message, started_at=time.time(), duration_s=0.0, host=socket.gethostname()
    )


def check_grid(cells: Iterable[GridCell]) -> None:
    """Raise ``InputError`` when a grid pairs a kind of work with what it cannot be run with.

    The error says what to exclude, as a campaign file writes it.
    """
    problems: dict[str, casgd.Pattern] = {}
    for cell in cells:
        for problem, pattern in kind_of(cell.model).list_misfits(cell):
            problems.setdefault(problem, pattern)
    if not problems:
        return
    shown = list(problems)[:5]
    left = len(problems) - len(shown)
    patterns = ", ".join(map(_to_yaml, problems.values()))
    raise InputError(
        "the grid holds cells that cannot be run",
        got="; ".join(shown) + (f"; and {left} more" if left else ""),
        expected=", and ".join(kind.fitting_cells for kind in WORK_KINDS),
        fix=f"exclude: [{patterns}], or a campaign file for each kind of work",
    )


def _to_yaml(pattern: casgd.Pattern) -> str:
    texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in pattern.items()}
    return "{" + ", ".join(f"{key}: {text}" for key, text in texts.items()) + "}"
