"""A cell of the grid, the environment that it runs in, and the identity that both make together."""

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any

from precision_time.storage.errors import InputError
from precision_time.storage.run_options import RUN_OPTIONS, RunOptions

__all__ = ["Environment", "GridCell"]


def _positive_integer(name: str, value: object, *, at_least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise InputError(f"{name} is not usable", got=repr(value), expected=f"an integer of at least {at_least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and software of a cell, as far as they may change its times.

    ``gpu`` is the hardware name (``predictor/data/gpus.toml``); on a CPU it is ``cpu-<model>-<cores>c``.
    """

    device_type: str
    gpu: str
    cpu_model: str
    cpu_cores: int
    driver_version: str = ""
    cuda_version: str = ""
    framework: str = "pytorch"
    framework_version: str = ""
    backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CellFields:
    """Fields of a cell before those of the run options."""

    model: str
    precision: str
    world_size: int
    per_gpu_batch_size: int
    gradient_accumulation_steps: int = 1
    strategy: str = "ddp"
    nodes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCell(RunOptions, _CellFields):
    """One point of the grid: model x precision x world size x batch x run options, on one kind of machine.

    ``precision`` is a canonical name; ``per_gpu_batch_size`` counts the samples of one rank in one micro-step.
    Raises ``InputError`` for a number that is not a positive integer, an empty name, or a value that is no choice of
    its run option.
    """

    def __post_init__(self) -> None:
        for name in ("world_size", "per_gpu_batch_size", "gradient_accumulation_steps", "nodes"):
            _positive_integer(name, getattr(self, name))
        for name in ("model", "precision", "strategy"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InputError(f"{name} is not usable", got=repr(value), expected="a name")
        for option in RUN_OPTIONS:
            value = getattr(self, option.name)
            # 1 and 0 equal True and False.
            if value not in option.choices or type(value) is not type(option.default):
                raise InputError(
                    f"{option.name} is not usable",
                    got=repr(value),
                    expected=f"one of {', '.join(map(str, option.choices))}",
                )
        if self.world_size % self.nodes:
            raise InputError(
                "the ranks do not divide over the nodes",
                got=f"world_size {self.world_size} / nodes {self.nodes}",
                expected="a whole number of ranks per node",
            )

    @property
    def global_batch_size(self) -> int:
        """Samples in one iteration over all ranks."""
        return self.per_gpu_batch_size * self.world_size * self.gradient_accumulation_steps

    @property
    def label(self) -> str:
        """Short text for logs and tables, e.g. ``resnet50 amp_bf16 x8 b32``, followed by what is not the default."""
        words = [self.model, self.precision, f"x{self.world_size}", f"b{self.per_gpu_batch_size}"]
        words += [f"a{self.gradient_accumulation_steps}"] if self.gradient_accumulation_steps > 1 else []
        words += [self.strategy] if self.strategy != "ddp" else []
        words += [word for option in RUN_OPTIONS if (word := option.label(getattr(self, option.name)))]
        return " ".join(words)

    def cell_id(self, environment: Environment) -> str:
        """The identity of the cell in ``environment``: 16 hex digits, a hash of the fields of both.

        Fields at their default are left out of the hash, so that recorded cells keep their identity when a later schema
        adds a field.
        """
        content = {"cell": _stated(self), "environment": _stated(environment)}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stated(record: GridCell | Environment) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record) if getattr(record, f.name) != f.default}
