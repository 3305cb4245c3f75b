"""TrainingSetup: one question, as everything below the answer reads it."""

from dataclasses import dataclass, field

from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism
from precision_time.predictor.setup.precision import Precision
from precision_time.predictor.workloads.workload import WorkloadFeatures

__all__ = ["TrainingSetup", "fill_pipeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """One question: this workload, on this hardware, at this precision, on so many ranks, with this batch."""

    workload: WorkloadFeatures
    hardware: HardwareSpec
    precision: Precision
    world_size: int
    nodes: int
    batch_size: int
    gradient_accumulation_steps: int = 1
    strategy: str = "ddp"
    #: None: plain data parallelism over all ranks
    parallelism: Parallelism | None = None
    implementation: Implementation = field(default_factory=Implementation)

    @property
    def layout(self) -> Parallelism:
        """The degrees of parallelism; without any said, every rank is a replica."""
        return self.parallelism or Parallelism(data=self.world_size)

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share one host."""
        return self.world_size // self.nodes


def fill_pipeline(*, stages: int, batch_size: int, micro_steps: int) -> tuple[int, int]:
    """Samples of a micro-step and number of micro-steps, for what was told as one batch of a step.

    Without accumulation the batch is what a pipeline divides, and one sample a micro-step fills it best.
    """
    return (1, batch_size) if stages > 1 and micro_steps == 1 else (batch_size, micro_steps)
