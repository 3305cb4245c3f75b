"""CA-SGD as a workload: its cells among those of campaigns.

What the columns of a table mean for it. An iteration is one outer step: s steps of SGD and one AllReduce. ``s`` is in
gradient_accumulation_steps, since both count micro-steps between two synchronisations. The batch is in
per_gpu_batch_size, but all ranks share its rows (each holds columns of them), so an iteration sees s times b samples
whatever the world size. The strategy is ``columns``, followed by the policy where several policies share a precision.
The parts: forward is gather and Gram, backward is AllReduce and recurrence, optimizer is the update of the weights.

Campaigns have no fp64, so ``run_casgd_cells`` alone times its cells.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from precision_time.casgd.objectives import OBJECTIVES
from precision_time.casgd.precision import POLICIES
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.storage.errors import InputError
from precision_time.storage.schema import Environment, GridCell
from precision_time.tasks.ranks.job import MeasurementLimits

__all__ = [
    "CASGD_STRATEGIES",
    "NO_CARD",
    "REPEAT_S",
    "SOURCE",
    "CasgdCell",
    "Misfit",
    "casgd_environment",
    "check_model_name",
    "claims_model",
    "estimate_casgd_s",
    "list_misfits",
]

SOURCE = "casgd"
#: Why a predictor of networks does not learn from these rows; retraining counts them under this reason.
NO_CARD = "CA-SGD: a linear model has no workload card"
#: Policies as precisions of the tables: autocast calls BF16 or FP16 features under FP32 sums mixed.
PRECISION_OF = MappingProxyType(
    {
        "fp64": "fp64",
        "fp32": "fp32",
        "recipe": "amp_bf16",
        "paper": "amp_bf16",
        "bf16-gram": "amp_bf16",
        "fp16": "amp_fp16",
    }
)
_PLAIN = ("fp64", "fp32", "recipe", "fp16")
_MODEL = re.compile(rf"{SOURCE}-({'|'.join(OBJECTIVES)})-n([1-9]\d{{0,8}})", re.ASCII)
_MODEL_EXPECTED = f"{SOURCE}-OBJECTIVE-nCOLUMNS, OBJECTIVE one of {', '.join(OBJECTIVES)}"

#: Each row is a mean over at least this many seconds: an outer step lasts microseconds, a time slice milliseconds.
REPEAT_S = 0.03
#: Outer steps of an epoch.
_OUTER_STEPS = 100
_MOST_ROWS = 2**16
#: Most bytes of the features of all ranks; wide blocks get fewer outer steps.
_MOST_BYTES = 2**27

#: For the plan alone, from 2 nearly idle cores: seconds of the start, those that mpiexec adds, and those of the NumPy
#: calls in an outer and in an inner step.
_START_S, _MPI_START_S = 0.6, 0.1
_OUTER_S, _INNER_S = 5e-6, 3e-6
#: Share of a core's peak rate that products of tall blocks reach, and how often an outer step reads a block.
_EFFICIENCY, _PASSES = 0.5, 4
#: Standard-normal numbers that a core draws in a second.
_DRAWS_PER_S = 1e8


def _strategy(policy: str) -> str:
    return "columns" if policy in _PLAIN else f"columns-{policy}"


#: A pattern of a campaign's ``exclude``.
Pattern = dict[str, str | int | bool]
#: What is wrong with a cell, and the pattern that leaves out all cells with this fault.
Misfit = tuple[str, Pattern]

#: (precision, strategy) of the tables -> policy of the solver.
_POLICY_OF = MappingProxyType({(precision, _strategy(policy)): policy for policy, precision in PRECISION_OF.items()})
CASGD_STRATEGIES = tuple(dict.fromkeys(strategy for _, strategy in _POLICY_OF))


@dataclass(frozen=True, slots=True, kw_only=True)
class CasgdCell:
    """One point of the grid: objective x columns x s x batch x policy x ranks, on synthetic standard-normal features.

    Raises ``InputError`` for an unknown objective or policy, and for more ranks than columns.
    """

    objective: str
    columns: int
    s: int
    batch_size: int
    policy: str = "fp32"
    ranks: int = 1

    def __post_init__(self) -> None:
        for name, known in (("objective", OBJECTIVES), ("policy", POLICIES)):
            if getattr(self, name) not in known:
                raise InputError(f"{name} is not usable", got=repr(getattr(self, name)), expected=", ".join(known))
        if self.ranks > self.columns:
            raise InputError("a rank would own no column", got=f"{self.ranks} ranks", expected=f"<= {self.columns}")

    @property
    def grid_cell(self) -> GridCell:
        """The cell in the tables; its columns are in the model's name, since a cell has no input shape."""
        return GridCell(
            model=_model_name(self.objective, self.columns),
            precision=PRECISION_OF[self.policy],
            world_size=self.ranks,
            per_gpu_batch_size=self.batch_size,
            gradient_accumulation_steps=self.s,
            strategy=_strategy(self.policy),
        )

    @classmethod
    def of(cls, cell: GridCell) -> "CasgdCell":
        """The inverse of ``grid_cell``; raises ``InputError`` for a cell of another kind."""
        name = _MODEL.fullmatch(cell.model)
        policy = _POLICY_OF.get((cell.precision, cell.strategy))
        if name is None or policy is None:
            raise InputError(
                "not a cell of CA-SGD",
                got=cell.label,
                expected=f"model {_MODEL_EXPECTED}; strategy columns or columns-POLICY",
            )
        return cls(
            objective=name[1],
            columns=int(name[2]),
            s=cell.gradient_accumulation_steps,
            batch_size=cell.per_gpu_batch_size,
            policy=policy,
            ranks=cell.world_size,
        )

    @property
    def outer_steps(self) -> int:
        """Outer steps of one epoch: as many as there is memory for their rows, at most 100."""
        block = self.s * self.batch_size
        fitting = min(_MOST_ROWS, _MOST_BYTES // (self.columns * (8 if self.policy == "fp64" else 4))) // block
        return max(1, min(_OUTER_STEPS, fitting))


def _model_name(objective: str, columns: int) -> str:
    return f"{SOURCE}-{objective}-n{columns}"


def claims_model(model: str) -> bool:
    """Whether a model of this name is meant to be one of CA-SGD."""
    return model.startswith(f"{SOURCE}-")


def check_model_name(model: str) -> None:
    """Raise ``InputError`` unless ``model`` names an objective and a number of columns."""
    if _MODEL.fullmatch(model) is None:
        raise InputError(
            "not a model of CA-SGD", got=repr(model), expected=f"{_MODEL_EXPECTED}, such as casgd-logistic-n2000"
        )


def list_misfits(cell: GridCell) -> Iterable[Misfit]:
    """Why ``cell``, of a CA-SGD model, cannot be run; nothing for a cell that can."""
    if cell.strategy not in CASGD_STRATEGIES:
        yield f"{cell.model} with {cell.strategy}", {"model": cell.model, "strategy": cell.strategy}
        return
    if (cell.precision, cell.strategy) not in _POLICY_OF:
        yield (
            f"{cell.model} in {cell.precision} with {cell.strategy}",
            {"model": cell.model, "precision": cell.precision, "strategy": cell.strategy},
        )
    parsed = _MODEL.fullmatch(cell.model)
    if parsed is not None and cell.world_size > int(parsed[2]):
        yield (
            f"{cell.model} on {cell.world_size} ranks, of which some would own no column",
            {"model": cell.model, "gpus": cell.world_size},
        )
    for name, value in cell.changed_options.items():
        yield f"{cell.model} with {name}", {"model": cell.model, name: value}
    if cell.nodes > 1:
        yield (
            f"{cell.model} on {cell.nodes} hosts: its ranks stand on one",
            {"model": cell.model, "gpus": cell.world_size},
        )


def casgd_environment(machine: Environment) -> Environment:
    """``machine`` (of ``probe_device("cpu")``) with the software of CA-SGD in place of PyTorch's."""
    return replace(machine, framework=SOURCE, framework_version=f"numpy {np.__version__}", backend="mpi")


def estimate_casgd_s(cell: CasgdCell, *, hardware: HardwareSpec, cores: int, limits: MeasurementLimits) -> float:
    """Expected seconds of ``cell``, start-up included, by the closed forms of its parts.

    The parts of an outer step: its FLOPs and bytes over the rates of one core, the calls of NumPy, and one AllReduce by
    the probe's latency and bandwidth (of gloo; MPI is faster). At most ``limits.seconds_per_cell`` plus the start.
    """
    columns, words = math.ceil(cell.columns / cell.ranks), cell.s * cell.batch_size
    below = cell.batch_size**2 * cell.s * (cell.s - 1)
    word_bytes = 8 if cell.policy == "fp64" else 4
    peak = hardware.peak_flops_per_s.get("fp32", 0.0) / cores * _EFFICIENCY * 4 / word_bytes
    flops = 4 * words * columns + below * (columns + 1)
    outer_s = _OUTER_S + cell.s * _INNER_S + (flops / peak if peak else 0.0)
    outer_s += _PASSES * word_bytes * words * columns * cell.ranks / hardware.memory_bytes_per_s
    if cell.ranks > 1:
        outer_s += hardware.all_reduce_latency_s + word_bytes * (below / 2 + words) / hardware.link_bytes_per_s
    start_s = _START_S + (_MPI_START_S if cell.ranks > 1 else 0.0)
    start_s += cell.outer_steps * words * columns / _DRAWS_PER_S
    repeats = limits.warmup_steps + limits.measured_steps
    return start_s + min(limits.seconds_per_cell, repeats * max(REPEAT_S, cell.outer_steps * outer_s))
