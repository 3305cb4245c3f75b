"""TrainingDomain: what the training data covers, what it lacks for a query, and in which regime the query lies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from precision_time.predictor.learning.regimes import REGIMES, Distance, Regime
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.setup.training_setup import TrainingSetup

__all__ = ["TrainingDomain"]

_MOST_NAMES = 6
#: A sample may take this many times more or fewer FLOPs than the measured ones before its input counts as new.
_SAME_INPUT = 1.5


def _list_names(names: Sequence[str], *, near: str) -> str:
    """All names, or the nearest few and how many there are."""
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    close = get_close_matches(near, names, n=3, cutoff=0.3)
    return f"{len(names)} others" + (f", among them {', '.join(close)}" if close else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDomain:
    """What the training data covers; a network goes by one name, whatever it was called.

    ``batch_sizes`` and ``sample_flops`` are the least and the most of each network, the latter in FLOPs of one sample's
    forward pass.
    """

    networks: tuple[str, ...]
    families: tuple[str, ...]
    gpus: tuple[str, ...]
    precisions: tuple[str, ...]
    max_world_size: int
    max_accumulation_steps: int
    batch_sizes: dict[str, tuple[int, int]]
    sample_flops: dict[str, tuple[float, float]]
    #: the networks that were measured on each GPU
    networks_of: dict[str, tuple[str, ...]]

    @classmethod
    def of(cls, observations: Iterable[Observation]) -> "TrainingDomain":
        """The domain spanned by ``observations``."""
        batches: dict[str, tuple[int, int]] = {}
        flops: dict[str, tuple[float, float]] = {}
        networks_of: dict[str, set[str]] = {}
        setups = [observation.setup for observation in observations]
        for setup in setups:
            name, size = setup.network, setup.batch_size
            low, high = batches.get(name, (size, size))
            batches[name] = (min(low, size), max(high, size))
            sample = setup.workload.forward_flops_per_sample
            least, most = flops.get(name, (sample, sample))
            flops[name] = (min(least, sample), max(most, sample))
            networks_of.setdefault(setup.hardware.name, set()).add(name)
        return cls(
            networks=tuple(sorted(batches)),
            families=tuple(sorted({setup.workload.family for setup in setups if setup.workload.family})),
            gpus=tuple(sorted({setup.hardware.name for setup in setups})),
            precisions=tuple(sorted({setup.precision.name for setup in setups})),
            max_world_size=max(setup.world_size for setup in setups),
            max_accumulation_steps=max(setup.gradient_accumulation_steps for setup in setups),
            batch_sizes=batches,
            sample_flops=flops,
            networks_of={gpu: tuple(sorted(networks)) for gpu, networks in sorted(networks_of.items())},
        )

    def list_gaps(self, setup: TrainingSetup) -> list[str]:
        """What the training data lacks for ``setup``, in words; empty inside the domain."""
        gaps = []
        network = setup.network
        if network not in self.batch_sizes:
            gaps.append(f"{setup.workload.name} was never measured, only {_list_names(self.networks, near=network)}")
        else:
            low, high = self.batch_sizes[network]
            if not low <= setup.batch_size <= high:
                gaps.append(f"batch {setup.batch_size} is outside the measured {low} to {high}")
            gaps.extend(self._list_input_gap(setup))
        if setup.hardware.name not in self.gpus:
            gaps.append(
                f"{setup.hardware.name} was never measured, only {_list_names(self.gpus, near=setup.hardware.name)}"
            )
        elif network in self.batch_sizes and network not in self.networks_of[setup.hardware.name]:
            gaps.append(f"{setup.workload.name} was never measured on {setup.hardware.name}, only on other devices")
        if setup.world_size > self.max_world_size:
            gaps.append(f"{setup.world_size} ranks were never measured, at most {self.max_world_size}")
        if setup.precision.name not in self.precisions:
            gaps.append(f"{setup.precision.name} was never measured, only {', '.join(self.precisions)}")
        micro_steps = setup.gradient_accumulation_steps
        if micro_steps > self.max_accumulation_steps:
            gaps.append(f"{micro_steps} micro-steps were never measured, at most {self.max_accumulation_steps}")
        return gaps

    def _list_input_gap(self, setup: TrainingSetup) -> list[str]:
        """That the input of a measured network differs from the measured inputs, if it does."""
        sample = setup.workload.forward_flops_per_sample
        least, most = self.sample_flops.get(setup.network, (sample, sample))
        if least / _SAME_INPUT <= sample <= most * _SAME_INPUT:
            return []
        subject = f"input {setup.workload.task_input}" if setup.workload.task_input else "the input"
        measured = f"{least / 1e9:.3g}" + (f" to {most / 1e9:.3g}" if most > least else "")
        return [f"{subject} takes {sample / 1e9:.3g} GFLOP a sample, outside the measured {measured}"]

    def covers_kind(self, setup: TrainingSetup) -> bool:
        """Whether any device of its kind, CPU or GPU, was measured; names of CPUs begin with ``cpu``."""
        is_cpu = setup.hardware.kind == "cpu"
        return any(name.startswith("cpu") == is_cpu for name in self.gpus)

    def regime_of(self, setup: TrainingSetup) -> Regime:
        """How far ``setup`` is from the training data."""
        network, gpu = setup.network, setup.hardware.name
        distance = Distance(
            has_network=network in self.batch_sizes,
            has_family=setup.workload.family in self.families,
            has_gpu=gpu in self.gpus,
            has_pair=network in self.networks_of.get(gpu, ()),
            has_scale=setup.world_size <= self.max_world_size,
        )
        return next(regime for regime in REGIMES.values() if regime.holds(distance))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainingDomain":
        """The inverse of ``to_dict``; raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
        return cls(
            **{name: tuple(map(str, values[name])) for name in ("networks", "families", "gpus", "precisions")},
            max_world_size=int(values["max_world_size"]),
            max_accumulation_steps=int(values["max_accumulation_steps"]),
            batch_sizes={str(name): (int(low), int(high)) for name, (low, high) in values["batch_sizes"].items()},
            sample_flops={
                str(name): (float(least), float(most)) for name, (least, most) in values["sample_flops"].items()
            },
            networks_of={str(gpu): tuple(map(str, networks)) for gpu, networks in values["networks_of"].items()},
        )
