"""TrainingDomain: what the training data covered, and in which regime a query lies."""

from collections.abc import Sequence
from dataclasses import dataclass

from precision_time.predictor.closed_form import TrainingSetup
from precision_time.predictor.observations import Observation

__all__ = ["REGIMES", "TrainingDomain"]

REGIMES = ("known", "new gpu", "new model", "new model and gpu", "beyond scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDomain:
    """What the training data covered."""

    models: tuple[str, ...]
    gpus: tuple[str, ...]
    precisions: tuple[str, ...]
    max_world_size: int
    max_accumulation_steps: int
    batch_sizes: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, observations: Sequence[Observation]) -> "TrainingDomain":
        """The domain spanned by ``observations``."""
        batches: dict[str, tuple[int, int]] = {}
        for seen in observations:
            name, size = seen.measurement.model, seen.setup.batch_size
            low, high = batches.get(name, (size, size))
            batches[name] = (min(low, size), max(high, size))
        return cls(
            models=tuple(sorted({seen.measurement.model for seen in observations})),
            gpus=tuple(sorted({seen.setup.hardware.name for seen in observations})),
            precisions=tuple(sorted({seen.setup.precision.name for seen in observations})),
            max_world_size=max(seen.setup.world_size for seen in observations),
            max_accumulation_steps=max(seen.setup.gradient_accumulation_steps for seen in observations),
            batch_sizes=batches,
        )

    def list_gaps(self, setup: TrainingSetup) -> list[str]:
        """In words, what of ``setup`` the training data never held; empty inside the domain."""
        gaps = []
        if setup.workload.name not in self.models:
            gaps.append(f"{setup.workload.name} was never seen, only {', '.join(self.models)}")
        elif (
            not self.batch_sizes[setup.workload.name][0] <= setup.batch_size <= self.batch_sizes[setup.workload.name][1]
        ):
            low, high = self.batch_sizes[setup.workload.name]
            gaps.append(f"batch {setup.batch_size} is outside the measured {low} to {high}")
        if setup.world_size > self.max_world_size:
            gaps.append(f"at most {self.max_world_size} ranks were measured")
        if setup.precision.name not in self.precisions:
            gaps.append(f"{setup.precision.name} was never measured, only {', '.join(self.precisions)}")
        if setup.gradient_accumulation_steps > self.max_accumulation_steps:
            gaps.append(f"at most {self.max_accumulation_steps} micro-steps in an iteration were measured")
        return gaps

    def regime_of(self, setup: TrainingSetup) -> str:
        """How far ``setup`` is from the training data: one of ``REGIMES``."""
        known_model = setup.workload.name in self.models
        known_gpu = setup.hardware.name in self.gpus
        if known_model and known_gpu:
            return "beyond scale" if setup.world_size > self.max_world_size else "known"
        if known_model:
            return "new gpu"
        return "new model" if known_gpu else "new model and gpu"
