"""Take one snapshot of the recorded timings and fit the predictor on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from precision_time.predictor.hardware import HardwareSpec
from precision_time.predictor.hierarchy import HierarchicalPredictor, Observation, observe
from precision_time.predictor.workload import WorkloadFeatures
from precision_time.storage.errors import InputError, UnknownNameError
from precision_time.storage.timings import TimingsDataset

__all__ = ["Snapshot", "fit_predictor", "take_snapshot"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The measurements of one moment, joined with their cards: what one retraining reads, once.

    ``training`` rows may be learned from, ``holdout`` rows never; ``sha256`` is the digest of the data behind both.
    """

    training: tuple[Observation, ...]
    holdout: tuple[Observation, ...]
    workloads: tuple[WorkloadFeatures, ...]
    hardware: tuple[HardwareSpec, ...]
    sha256: str
    problems: tuple[tuple[str, str], ...]


def take_snapshot(data: str, *, holdout_models: Sequence[str] = ()) -> Snapshot:
    """Read the dataset at ``data`` and set the rows of ``holdout_models`` aside.

    Damaged files are left out and listed in ``problems``. Raises ``InputError`` when nothing is recorded and
    ``UnknownNameError`` when a model to hold out was never measured.
    """
    dataset = TimingsDataset(data)
    measurements = dataset.measurements()
    if not measurements:
        raise InputError(
            "no measurements to train on",
            got=data,
            expected="a dataset with recorded cells",
            fix="run `precision-time campaign FILE` first",
        )
    measured_models = sorted({measured.model for measured in measurements})
    for model in holdout_models:
        if model not in measured_models:
            raise UnknownNameError(
                "model to hold out", model, measured_models, fix="hold out a model that was measured"
            )
    workloads = tuple(WorkloadFeatures.from_dict(card) for card in dataset.read_cards("workloads"))
    hardware = tuple(HardwareSpec.from_dict(card) for card in dataset.read_cards("hardware"))
    observations = observe(measurements, workloads=workloads, hardware=hardware)
    return Snapshot(
        training=tuple(seen for seen in observations if seen.measurement.model not in holdout_models),
        holdout=tuple(seen for seen in observations if seen.measurement.model in holdout_models),
        workloads=workloads,
        hardware=hardware,
        sha256=dataset.snapshot_sha256(),
        problems=tuple(dataset.problems),
    )


def fit_predictor(snapshot: Snapshot, *, seed: int) -> HierarchicalPredictor:
    """Fit on the training rows of ``snapshot``; the same snapshot and seed give the same trees."""
    return HierarchicalPredictor.fit(snapshot.training, seed=seed)
