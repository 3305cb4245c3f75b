"""Calibration: a few measured rows correct the answers to similar questions."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from precision_time.predictor.answering.answers import Answers, answer_queries
from precision_time.predictor.answering.artifact import (
    PublishedPredictor,
    load_artifact,
    split_reference,
    standing_artifact,
)
from precision_time.predictor.learning.error_covariance import (
    ErrorCovariance,
    ErrorPrediction,
    covariances_from_dict,
    predict_errors,
)
from precision_time.predictor.learning.regimes import (
    CLOSED_FORMS,
    CLOSED_FORMS_ON_CPU,
    ErrorSource,
    covariances_of,
    find_error_source,
)
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.measured_rows import name_row, read_measured_rows
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.predictor.workloads.workload import WorkloadFeatures
from precision_time.storage.errors import InputError, IntegrityError, PrecisionTimeError
from precision_time.storage.filesystem import open_store

__all__ = ["Calibration", "GivenRows", "MeasuredRow", "calibrate", "interpret_measured", "load_calibration"]

#: A measured time further than this factor from the predicted one is refused. Milliseconds in place of seconds are a
#: factor of 1,000; the batch of all GPUs in place of that of one is a factor of their number.
LARGEST_FACTOR = 20.0
#: The narrowest half width of a corrected interval, for artifacts without an interval of known configurations: 90 % of
#: the rows of the shipped table, predicted from its other configurations, lie within 21 %.
_NARROWEST = 0.19
#: Below this sum of weights no row is named; below this share of the largest weight a row is not named.
_SMALLEST_WEIGHT, _SMALLEST_SHARE = 0.02, 0.1
_MOST_NAMED = 3
_FORM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """A measured time, the predicted time, and why that prediction may be wrong."""

    query: Query
    measured_s: float
    predicted_s: float
    source: ErrorSource

    @property
    def log_error(self) -> float:
        """log(measured / predicted)."""
        return math.log(self.measured_s / self.predicted_s)


def _find_sources(answers: Answers, queries: Sequence[Query]) -> list[ErrorSource]:
    """Why each answer may be wrong: its regime, or the closed forms where they answered."""
    return [
        regime if by_artifact else (CLOSED_FORMS_ON_CPU if query.setup.hardware.kind == "cpu" else CLOSED_FORMS)
        for regime, by_artifact, query in zip(answers.regimes, answers.by_artifact, queries, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Calibration:
    """Measured rows that correct the answers of one artifact, by the covariances of its errors.

    ``artifact_id`` is None where the closed forms answered. ``covariances`` are the artifact's own; shipped ones fill
    the gaps. No corrected interval is narrower than ``narrowest``, a half width in log seconds.

    Example:
        >>> from precision_time import calibrate, predict_time
        >>> row = {"model": "resnet50", "gpu": "A100-SXM4-80GB", "precision": "fp32", "batch_size": 64}
        >>> calibration = calibrate([row | {"iteration_time_s": 0.2}])
        >>> estimate = predict_time("resnet50", "fp32", batch_size=64, gpu="A100-SXM4-80GB", measured=calibration)
        >>> any(reason.startswith("calibrated by 1 measured row") for reason in estimate.reasons)
        True
    """

    rows: tuple[MeasuredRow, ...]
    artifact_id: str | None
    covariances: Mapping[str, ErrorCovariance]
    narrowest: float = _NARROWEST

    def __repr__(self) -> str:
        named = ", ".join(
            f"{row.query.setup.workload.name} on {row.query.setup.hardware.name}: x{math.exp(row.log_error):.2f}"
            for row in self.rows[:_MOST_NAMED]
        )
        more = f", and {len(self.rows) - _MOST_NAMED} more" if len(self.rows) > _MOST_NAMED else ""
        return f"Calibration({len(self.rows)} rows against {self.artifact_id or 'the closed forms'}: {named}{more})"

    @property
    def hardware(self) -> tuple[HardwareSpec, ...]:
        """The devices of its rows, each once; a question may name them even if they are not shipped."""
        return tuple({row.query.setup.hardware.name: row.query.setup.hardware for row in self.rows}.values())

    @property
    def workloads(self) -> tuple[WorkloadFeatures, ...]:
        """The models of its rows, each once."""
        return tuple({row.query.setup.workload.name: row.query.setup.workload for row in self.rows}.values())

    def correct(self, queries: Sequence[Query], answers: Answers) -> Answers:
        """``answers`` to ``queries``, moved by the errors of the measured rows, with new intervals.

        The shares of the parts in an iteration stay. The interval narrows as the standard deviation of the error does
        (or widens, where the measured errors are larger than expected), but never below that of a known configuration.
        ``corrections`` name the rows.
        """
        sources = _find_sources(answers, queries)
        shift, narrowing, corrections = np.zeros(len(queries)), np.ones(len(queries)), [""] * len(queries)
        for name in dict.fromkeys(source.name for source in sources):
            places = [place for place, source in enumerate(sources) if source.name == name]
            source = sources[places[0]]
            rows = [row for row in self.rows if row.source.by_closed_forms == source.by_closed_forms]
            prediction = self._predict_errors(rows, [queries[place] for place in places], source)
            shift[places], narrowing[places] = prediction.shift, prediction.narrowing
            for place, place_shift, weights in zip(places, prediction.shift, prediction.weights, strict=True):
                corrections[place] = _describe_correction(rows, weights, float(place_shift))
        predicted_s = answers.parts.iteration_time_s
        half = np.log(answers.high_s / predicted_s)
        half = np.maximum(half * narrowing, np.minimum(half, self.narrowest))
        corrected_s = predicted_s * np.exp(shift)
        return dataclasses.replace(
            answers,
            parts=answers.parts.rescale(corrected_s),
            low_s=corrected_s * np.exp(-half),
            high_s=corrected_s * np.exp(half),
            corrections=tuple(corrections),
        )

    def _predict_errors(
        self, rows: Sequence[MeasuredRow], queries: Sequence[Query], source: ErrorSource
    ) -> ErrorPrediction:
        of_network, of_chip = covariances_of(source, self.covariances)
        covariances = [of_network] if of_chip is None else [of_network, of_chip]
        by_row = [covariances_of(row.source, self.covariances) for row in rows]
        deviations = [[math.sqrt(network.variance) for network, _ in by_row]]
        if of_chip is not None:
            deviations.append([math.sqrt(chip.variance) if chip is not None else 0.0 for _, chip in by_row])
        return predict_errors(
            [(row.query, row.log_error) for row in rows],
            queries,
            covariances=covariances,
            row_deviations=np.array(deviations).reshape(len(covariances), len(rows)),
        )

    def against(self, published: PublishedPredictor | None, **_: object) -> "Calibration":
        """The same measurements compared with another artifact or the closed forms; itself for the same artifact.

        Raises ``InputError`` as ``calibrate`` does for a time that is not believable for this artifact.
        """
        if self.artifact_id == (published.manifest.artifact_id if published is not None else None):
            return self
        return _compare([(row.query.setup, row.measured_s) for row in self.rows], published)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "form": _FORM,
            "artifact_id": self.artifact_id,
            "narrowest": self.narrowest,
            "effects": {name: covariance.to_dict() for name, covariance in self.covariances.items()},
            "rows": [
                {
                    "setup": row.query.setup.to_dict(),
                    "measured_s": row.measured_s,
                    "predicted_s": row.predicted_s,
                    "regime": row.source.name,
                }
                for row in self.rows
            ],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Calibration":
        """The inverse of ``to_dict``; raises ``IntegrityError`` for anything else."""
        try:
            if values["form"] != _FORM:
                raise ValueError(f"form {values['form']}")
            return cls(
                rows=tuple(
                    MeasuredRow(
                        query=Query.of(TrainingSetup.from_dict(row["setup"])),
                        measured_s=_positive(row["measured_s"]),
                        predicted_s=_positive(row["predicted_s"]),
                        source=find_error_source(str(row["regime"])),
                    )
                    for row in values["rows"]
                ),
                artifact_id=None if values["artifact_id"] is None else str(values["artifact_id"]),
                covariances=covariances_from_dict(values["effects"]),
                narrowest=_positive(values["narrowest"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(
                "this is no calibration of this version",
                got=str(error) if isinstance(error, PrecisionTimeError) else repr(error),
                expected="what Calibration.to_dict gives",
                fix="calibrate again from the measured rows",
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON; raises the errors of the store."""
        store, name = _locate(path)
        store.write_bytes(name, (json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n").encode())


def _locate(path: str | Path) -> tuple[Any, str]:
    folder, name = split_reference(str(path))
    return open_store(folder or "."), name


def load_calibration(path: str | Path) -> Calibration:
    """The calibration that ``save`` wrote; raises ``NotFoundError``, and ``IntegrityError`` for any other file."""
    store, name = _locate(path)
    data = store.read_bytes(name)
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError("this calibration cannot be read", got=repr(error), expected="JSON") from error
    if not isinstance(values, dict):
        raise IntegrityError("this is no calibration", got=type(values).__name__, expected="a JSON object")
    return Calibration.from_dict(values)


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Measured rows as the user passed them: a path, a data frame or a sequence of rows, not yet read."""

    measurements: object
    hardware: ClassVar[tuple[HardwareSpec, ...]] = ()
    workloads: ClassVar[tuple[WorkloadFeatures, ...]] = ()

    def against(
        self,
        published: PublishedPredictor | None,
        *,
        workloads: Sequence[WorkloadFeatures] = (),
        hardware: Sequence[HardwareSpec] = (),
        asked: WorkloadFeatures | None = None,
    ) -> Calibration:
        """The rows compared with an artifact or the closed forms; see ``calibrate``."""
        rows = read_measured_rows(
            self.measurements,
            workloads=(*(published.workloads if published is not None else ()), *workloads),
            hardware=(*(published.hardware if published is not None else ()), *hardware),
            default=asked,
        )
        return _compare(rows, published)


def interpret_measured(measured: object) -> Calibration | GivenRows:
    """Measurements in any form a user may pass: a calibration, the JSON file of a saved one, or rows."""
    if isinstance(measured, Calibration):
        return measured
    if isinstance(measured, str | Path) and str(measured).casefold().endswith(".json"):
        return load_calibration(measured)
    return GivenRows(measured)


def calibrate(
    measurements: object,
    *,
    artifact: str | PublishedPredictor | None = None,
    workloads: Sequence[WorkloadFeatures] = (),
    hardware: Sequence[HardwareSpec] = (),
    asked: WorkloadFeatures | None = None,
) -> Calibration:
    """Turn measured iterations, one or more, into a correction of other answers.

    A row corrects an answer by more the more alike the two are (network, chip, framework and code, precision, input,
    batch, GPUs) and the further the question is from the training data: the answer for a network of a new family moves
    nearly all the way to the measurement, that for a known network hardly moves. On a GPU that the training data lacks,
    rows of any network correct all answers.

    Args:
        measurements: the rows, as the path of a CSV or Parquet file, a pandas DataFrame (columns as below, or those of
            the public table), or a sequence of mappings or ``storage.schema.Measurement``; or the path of a saved
            calibration (``.json``). A row needs ``model``, ``gpu``, ``precision``, ``batch_size`` (samples of one GPU
            in one micro-step) and ``iteration_time_s`` (seconds of one optimizer step) or ``samples_per_s`` (of the
            whole job). It may have ``gpus``, ``nodes``, ``strategy``, ``gradient_accumulation_steps``,
            ``task_input``, ``framework``, ``compiled``, ``activation_checkpointing`` and ``network_bandwidth``, as in
            ``predict_time``, and ``workload`` (a ``WorkloadFeatures``) in place of ``model``.
        artifact: the artifact whose answers are corrected, as a reference or loaded; by default that of
            ``predict_time``.
        workloads: descriptions of models that are not shipped; none by default.
        hardware: descriptions of devices that are not shipped; none by default.
        asked: the model of rows without a model; None by default, and such rows are refused.

    Returns:
        A ``Calibration``; pass it to ``predict_time`` as ``measured``, or save it.

    Raises:
        InputError: a row that cannot be used, by its number: no positive time, a missing value, or a time more than 20
            times off the predicted one (probably in another unit).
        UnknownNameError: a row with a model, GPU or precision that is not known.
        NotFoundError, IntegrityError: a file that is missing or damaged.

    Example:
        >>> from precision_time import calibrate
        >>> row = {"model": "resnet50", "gpu": "A100-SXM4-80GB", "precision": "amp_fp16", "batch_size": 256}
        >>> calibrate([row | {"iteration_time_s": 0.125}]).rows[0].measured_s
        0.125
    """
    if isinstance(artifact, PublishedPredictor):
        published: PublishedPredictor | None = artifact
    else:
        published = standing_artifact().published if artifact is None else load_artifact(artifact)
    return interpret_measured(measurements).against(published, workloads=workloads, hardware=hardware, asked=asked)


def _compare(rows: Sequence[tuple[TrainingSetup, float]], published: PublishedPredictor | None) -> Calibration:
    """The measured seconds of each setup beside those that ``published``, or the closed forms, predict."""
    queries = []
    for number, (setup, _) in enumerate(rows, start=1):
        try:
            queries.append(Query.of(setup))
        except PrecisionTimeError as error:
            name_row(error, number)
            raise
    answers = answer_queries(queries, published=published)
    measured = []
    predicted_s = answers.parts.iteration_time_s
    sources = _find_sources(answers, queries)
    for number, (query, (_, seconds), source) in enumerate(zip(queries, rows, sources, strict=True)):
        row = MeasuredRow(query=query, measured_s=seconds, predicted_s=float(predicted_s[number]), source=source)
        _check_believable(row, number + 1)
        measured.append(row)
    known_radius = published.predictor.radii.get("known") if published is not None else None
    return Calibration(
        rows=tuple(measured),
        artifact_id=published.manifest.artifact_id if published is not None else None,
        covariances=dict(published.predictor.covariances) if published is not None else {},
        narrowest=known_radius or _NARROWEST,
    )


def _check_believable(row: MeasuredRow, number: int) -> None:
    factor = row.measured_s / row.predicted_s
    if not 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR:
        setup = row.query.setup
        raise InputError(
            f"measured row {number}: the time is not believable for {setup.workload.name} at batch {setup.batch_size} "
            f"on {setup.world_size} x {setup.hardware.name}",
            got=f"{row.measured_s:g} s, {factor:.3g} times the predicted {row.predicted_s:g} s",
            expected=f"within a factor of {LARGEST_FACTOR:g} of it",
            fix="give seconds (not milliseconds) of one optimizer step, and the batch of one GPU in one micro-step",
        )


def _describe_correction(rows: Sequence[MeasuredRow], weights: Any, shift: float) -> str:
    """Which rows corrected an answer, and by what factor."""
    sizes = [abs(float(weight)) for weight in weights]
    named_rows = [row for row, size in zip(rows, sizes, strict=True) if size >= _SMALLEST_SHARE * max(sizes)]
    if sum(sizes) < _SMALLEST_WEIGHT:
        return "no measured row is like this question: the answer is the same as without them"
    counts = Counter(
        f"{row.query.setup.network.removeprefix('own:')} on {row.query.setup.hardware.name}" for row in named_rows
    )
    subject = f"{len(named_rows)} measured row{'s' if len(named_rows) > 1 else ''}"
    if len(counts) == 1:
        subject += f" of {next(iter(counts))}"
    else:
        largest = [f"{count} of {name}" for name, count in counts.most_common(_MOST_NAMED)]
        subject += f" ({', '.join(largest)}{', and others' if len(counts) > len(largest) else ''})"
    return f"calibrated by {subject}: x{math.exp(shift):.2f}"


def _positive(value: object) -> float:
    number = float(value)  # type: ignore[arg-type]
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{value!r} is not positive")
    return number
