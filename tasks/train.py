"""Take one snapshot of the recorded timings and fit the predictor on it."""

from collections.abc import Sequence
from dataclasses import dataclass

from precision_time.predictor.hardware import HardwareSpec
from precision_time.predictor.hierarchy import HierarchicalPredictor
from precision_time.predictor.observations import Observation, observe
from precision_time.predictor.workload import WorkloadFeatures
from precision_time.storage.errors import InputError, IntegrityError, UnknownNameError
from precision_time.storage.timings import TimingsDataset

#: Four of five folds must leave the 9 rows from which an interval at 0.9 can be calibrated.
FEWEST_CELLS = 12

__all__ = ["FEWEST_CELLS", "Snapshot", "fit_predictor", "take_snapshot"]


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
    problems = tuple(dataset.problems)
    try:
        observations = observe(measurements, workloads=workloads, hardware=hardware)
    except UnknownNameError as error:
        if not problems:
            raise
        path, reason = problems[0]
        raise IntegrityError(
            "a card that the measurements need is damaged",
            got=f"{path}: {reason}",
            expected=error.expected,
            fix="`precision-time data verify --set-aside`, then run the campaign again: it writes its cards anew",
        ) from error
    training = tuple(seen for seen in observations if seen.measurement.model not in holdout_models)
    if len(training) < FEWEST_CELLS:
        raise InputError(
            "too few measured cells to train and validate on",
            got=f"{len(training)} cells in {data}",
            expected=f"at least {FEWEST_CELLS}, held-out models not counted",
            fix="add cells to the campaign",
        )
    return Snapshot(
        training=training,
        holdout=tuple(seen for seen in observations if seen.measurement.model in holdout_models),
        workloads=workloads,
        hardware=hardware,
        sha256=dataset.snapshot_sha256(),
        problems=problems,
    )


def fit_predictor(snapshot: Snapshot, *, seed: int) -> HierarchicalPredictor:
    """Fit on the training rows of ``snapshot``; the same snapshot and seed give the same trees."""
    return HierarchicalPredictor.fit(snapshot.training, seed=seed)
