"""TrainingSetup: one training job in full, the input of closed forms and features."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism
from precision_time.predictor.setup.precision import Precision
from precision_time.predictor.workloads.workload import WorkloadFeatures

__all__ = ["TrainingSetup", "fill_pipeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """One training job: a workload on hardware, at a precision, on a number of ranks, with a batch.

    ``batch_size`` counts the samples of one replica in one micro-step. ``parallelism`` says how the ranks divide the
    work; plain data parallelism over all ranks is stored as None, so that equal setups compare equal.
    """

    workload: WorkloadFeatures
    hardware: HardwareSpec
    precision: Precision
    world_size: int
    nodes: int
    batch_size: int
    gradient_accumulation_steps: int = 1
    parallelism: Parallelism | None = None
    implementation: Implementation = field(default_factory=Implementation)

    def __post_init__(self) -> None:
        if self.parallelism == Parallelism(data=self.world_size):
            object.__setattr__(self, "parallelism", None)

    @property
    def layout(self) -> Parallelism:
        """The degrees of parallelism; every rank is a replica by default."""
        return self.parallelism or Parallelism(data=self.world_size)

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share one host."""
        return self.world_size // self.nodes

    @property
    def network(self) -> str:
        """One name for all names of the network."""
        return self.workload.network or self.workload.name

    @property
    def chip(self) -> str:
        """The silicon, which sister parts share; a CPU counts as its own chip."""
        return self.hardware.chip or self.hardware.name

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        # Field by field: the deep copy of dataclasses.asdict would also convert the walk inside the workload.
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {
            "workload": self.workload.to_dict(),
            "hardware": self.hardware.to_dict(),
            "precision": dataclasses.asdict(self.precision),
            "parallelism": None if self.parallelism is None else dataclasses.asdict(self.parallelism),
            "implementation": dataclasses.asdict(self.implementation),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainingSetup":
        """The inverse of ``to_dict``; raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
        layout = values["parallelism"]
        converted = {
            "workload": WorkloadFeatures.from_dict(values["workload"]),
            "hardware": HardwareSpec.from_dict(values["hardware"]),
            "precision": Precision(**values["precision"]),
            "parallelism": None if layout is None else Parallelism(**layout),
            "implementation": Implementation(**values["implementation"]),
        }
        # Earlier versions also wrote the spelling of the parallelism.
        return cls(**{name: value for name, value in values.items() if name != "strategy"} | converted)


def fill_pipeline(*, stages: int, batch_size: int, micro_steps: int) -> tuple[int, int]:
    """The samples of a micro-step and the number of micro-steps of one optimizer step.

    A pipeline without accumulation divides its batch into micro-steps of one sample, which fill it best.
    """
    return (1, batch_size) if stages > 1 and micro_steps == 1 else (batch_size, micro_steps)
