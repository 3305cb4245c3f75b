"""Calibration by measurement: a few measured rows correct the answers to questions that are like them."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from precision_time.predictor.answering.answers import Answers, answer_queries
from precision_time.predictor.answering.artifact import PublishedPredictor, load_artifact, standing_artifact
from precision_time.predictor.learning.domain import network_of
from precision_time.predictor.learning.error_covariance import Effect, Pooled, effects_from_dict, effects_of, pool
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.measured_rows import name_row, read_measured_rows
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism
from precision_time.predictor.setup.precision import Precision
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.predictor.workloads.workload import WorkloadFeatures
from precision_time.storage.errors import InputError, IntegrityError, PrecisionTimeError
from precision_time.storage.filesystem import open_store

__all__ = ["Calibration", "MeasuredRow", "calibrate", "load_calibration"]

#: Measured times beyond this factor of the predicted ones are refused: milliseconds for seconds are a factor of 1,000,
#: a batch of all GPUs for that of one a factor of their number.
LARGEST_FACTOR = 20.0
#: The narrowest half width of a corrected interval where no artifact says how wide that of a known configuration is:
#: 90 % of the shipped table's rows, predicted from its other configurations, lie within 21 %.
_NARROWEST = 0.19
#: Rows with less weight in all leave an answer as it is; one with a smaller share of the largest is not worth naming.
_SMALLEST_WEIGHT, _SMALLEST_SHARE = 0.02, 0.1
_MOST_NAMED = 3
_FORM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """A measured time beside what was predicted for it, and by which regime's rules (``closed forms``: by them)."""

    query: Query
    measured_s: float
    predicted_s: float
    regime: str

    @property
    def log_error(self) -> float:
        """log(measured / predicted)."""
        return math.log(self.measured_s / self.predicted_s)


def _rules(answers: Answers, queries: Sequence[Query]) -> list[str]:
    """Whose errors each answer has: its regime's, or those of the closed forms."""
    return [
        regime if by_artifact else ("closed forms on a CPU" if query.setup.hardware.kind == "cpu" else "closed forms")
        for regime, by_artifact, query in zip(answers.regimes, answers.by_artifact, queries, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Calibration:
    """Measured rows and how errors hang together: corrects the answers of the artifact it was made with.

    ``artifact_id`` is None where the closed forms answered; ``effects`` are the artifact's own (what they lack is
    taken from ``SHIPPED_EFFECTS``), and ``narrowest`` the half width, in log seconds, that no correction goes below.
    """

    rows: tuple[MeasuredRow, ...]
    artifact_id: str | None
    effects: Mapping[str, Effect]
    narrowest: float = _NARROWEST

    def __repr__(self) -> str:
        asked = ", ".join(
            f"{row.query.setup.workload.name} on {row.query.setup.hardware.name}: x{math.exp(row.log_error):.2f}"
            for row in self.rows[:_MOST_NAMED]
        )
        more = f", and {len(self.rows) - _MOST_NAMED} more" if len(self.rows) > _MOST_NAMED else ""
        return f"Calibration({len(self.rows)} rows against {self.artifact_id or 'the closed forms'}: {asked}{more})"

    @property
    def hardware(self) -> tuple[HardwareSpec, ...]:
        """The devices of its rows, each once: what a question may name that is shipped nowhere."""
        return tuple({row.query.setup.hardware.name: row.query.setup.hardware for row in self.rows}.values())

    @property
    def workloads(self) -> tuple[WorkloadFeatures, ...]:
        """The models of its rows, each once."""
        return tuple({row.query.setup.workload.name: row.query.setup.workload for row in self.rows}.values())

    def correct(self, queries: Sequence[Query], answers: Answers) -> Answers:
        """``answers`` to ``queries`` moved by what the measured rows tell of them, with new intervals.

        The shares of an iteration stay; the interval shrinks (or, where the rows surprise, grows) as the deviation of
        the error does, and never below that of a known configuration. ``corrections`` say by which rows.
        """
        rules = _rules(answers, queries)
        shift, narrowing, words = np.zeros(len(queries)), np.ones(len(queries)), [""] * len(queries)
        for rule in dict.fromkeys(rules):
            asked = [place for place, name in enumerate(rules) if name == rule]
            rows = [row for row in self.rows if _is_closed(row.regime) == _is_closed(rule)]
            found = self._pool(rows, [queries[place] for place in asked], rule)
            shift[asked], narrowing[asked] = found.shift, found.narrowing
            for place, moved, weights in zip(asked, found.shift, found.weights, strict=True):
                words[place] = _tell(rows, weights, float(moved))
        predicted_s = answers.parts.iteration_time_s
        old = np.log(answers.high_s / predicted_s)
        half = np.maximum(old * narrowing, np.minimum(old, self.narrowest))
        corrected_s = predicted_s * np.exp(shift)
        return dataclasses.replace(
            answers,
            parts=answers.parts.rescale(corrected_s),
            low_s=corrected_s * np.exp(-half),
            high_s=corrected_s * np.exp(half),
            corrections=tuple(words),
        )

    def _pool(self, rows: Sequence[MeasuredRow], queries: Sequence[Query], rule: str) -> Pooled:
        of_network, of_chip = effects_of(rule, self.effects)
        effects = [of_network] if of_chip is None else [of_network, of_chip]
        parts = [effects_of(row.regime, self.effects) for row in rows]
        deviations = [[math.sqrt(network.variance) for network, _ in parts]]
        if of_chip is not None:
            deviations.append([math.sqrt(chip.variance) if chip is not None else 0.0 for _, chip in parts])
        return pool(
            [(row.query, row.log_error) for row in rows],
            queries,
            effects=effects,
            row_deviations=np.array(deviations).reshape(len(effects), len(rows)),
        )

    def rebase(self, published: PublishedPredictor | None) -> "Calibration":
        """The same measurements held against another artifact, or the closed forms; itself where it is the same.

        Raises ``InputError`` as ``calibrate`` does for a time that this one cannot believe.
        """
        if self.artifact_id == (published.manifest.artifact_id if published is not None else None):
            return self
        return _hold_against([(row.query.setup, row.measured_s) for row in self.rows], published)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "form": _FORM,
            "artifact_id": self.artifact_id,
            "narrowest": self.narrowest,
            "effects": {name: effect.to_dict() for name, effect in self.effects.items()},
            "rows": [
                {
                    "setup": _setup_to_dict(row.query.setup),
                    "measured_s": row.measured_s,
                    "predicted_s": row.predicted_s,
                    "regime": row.regime,
                }
                for row in self.rows
            ],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Calibration":
        """The inverse of ``to_dict``; raises ``IntegrityError`` for what does not fit."""
        try:
            if values["form"] != _FORM:
                raise ValueError(f"form {values['form']}")
            made = cls(
                rows=tuple(
                    MeasuredRow(
                        query=Query.of(_setup_from_dict(row["setup"])),
                        measured_s=_positive(row["measured_s"]),
                        predicted_s=_positive(row["predicted_s"]),
                        regime=str(row["regime"]),
                    )
                    for row in values["rows"]
                ),
                artifact_id=None if values["artifact_id"] is None else str(values["artifact_id"]),
                effects=effects_from_dict(values["effects"]),
                narrowest=_positive(values["narrowest"]),
            )
            for row in made.rows:
                effects_of(row.regime, made.effects)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(
                "this is no calibration of this version",
                got=str(error) if isinstance(error, PrecisionTimeError) else repr(error),
                expected="what Calibration.to_dict gives",
                fix="calibrate again from the measured rows",
            ) from error
        return made

    def save(self, path: str | Path) -> None:
        """Write it as JSON; raises what the store raises."""
        store, name = _locate(path)
        store.write_bytes(name, (json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n").encode())


def _locate(path: str | Path) -> tuple[Any, str]:
    folder, slash, name = str(path).rpartition("/")
    return open_store((folder or "/") if slash else "."), name


def load_calibration(path: str | Path) -> Calibration:
    """What ``Calibration.save`` wrote; raises ``NotFoundError``, and ``IntegrityError`` for anything else."""
    store, name = _locate(path)
    data = store.read_bytes(name)
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError("this calibration cannot be read", got=repr(error), expected="JSON") from error
    if not isinstance(values, dict):
        raise IntegrityError("this is no calibration", got=type(values).__name__, expected="a JSON object")
    return Calibration.from_dict(values)


def calibrate(
    measurements: object,
    *,
    artifact: str | PublishedPredictor | None = None,
    workloads: Sequence[WorkloadFeatures] = (),
    hardware: Sequence[HardwareSpec] = (),
    asked: WorkloadFeatures | None = None,
) -> Calibration:
    """What measured iterations tell of other questions: a correction by how alike they are, from one row on.

    ``measurements`` is a path to a CSV or Parquet file or a pandas DataFrame (with the names below or the columns of
    the public table), or a sequence of mappings or ``storage.schema.Measurement``. A row says ``model`` (or a ready
    ``workload``), ``gpu``, ``precision``, ``batch_size`` and ``iteration_time_s`` (or ``samples_per_s`` of the whole
    job), and may say ``gpus``, ``nodes``, ``strategy``, ``gradient_accumulation_steps``, ``task_input``, ``framework``,
    ``compiled``, ``activation_checkpointing`` and ``network_bandwidth``, as ``predict_time`` does. A path to JSON is
    taken as a calibration that was saved. ``artifact`` is what the answers to be corrected come from, as in
    ``predict_time``; ``workloads`` and ``hardware`` describe what is not shipped; ``asked`` is the model of rows that
    name none.

    How far a row reaches depends on its likeness (network, chip, framework and code, precision, input, batch, GPUs)
    and on how far the question is from the training data: the answer for a network of a new family moves nearly as
    far as the measurement says, that for a known one hardly. Rows of any network on a GPU that was never measured
    correct all answers for it.

    Raises ``InputError`` (also ``UnknownNameError``), naming the row, for what cannot be used: no or no positive time,
    unknown names, a time more than 20 times off the predicted one (another unit); for a file what the store raises.
    """
    if isinstance(artifact, PublishedPredictor):
        published: PublishedPredictor | None = artifact
    else:
        published = standing_artifact()[0] if artifact is None else load_artifact(artifact)
    if isinstance(measurements, Calibration):
        return measurements.rebase(published)
    if isinstance(measurements, str | Path) and str(measurements).casefold().endswith(".json"):
        return load_calibration(measurements).rebase(published)
    carried = (published.workloads, published.hardware) if published is not None else ((), ())
    rows = read_measured_rows(
        measurements, workloads=(*carried[0], *workloads), hardware=(*carried[1], *hardware), asked=asked
    )
    return _hold_against(rows, published)


def _hold_against(rows: Sequence[tuple[TrainingSetup, float]], published: PublishedPredictor | None) -> Calibration:
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
    for number, (query, (_, seconds), rule) in enumerate(zip(queries, rows, _rules(answers, queries), strict=True)):
        row = MeasuredRow(query=query, measured_s=seconds, predicted_s=float(predicted_s[number]), regime=rule)
        _check_believable(row, number + 1)
        measured.append(row)
    known = published.predictor.radii.get("known") if published is not None else None
    return Calibration(
        rows=tuple(measured),
        artifact_id=published.manifest.artifact_id if published is not None else None,
        effects=dict(published.predictor.effects) if published is not None else {},
        narrowest=known or _NARROWEST,
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


def _is_closed(rule: str) -> bool:
    return rule.startswith("closed forms")


def _tell(rows: Sequence[MeasuredRow], weights: Any, shift: float) -> str:
    """By which rows an answer was corrected, and by how much."""
    sizes = [abs(float(weight)) for weight in weights]
    told = [row for row, size in zip(rows, sizes, strict=True) if size >= _SMALLEST_SHARE * max(sizes)]
    if sum(sizes) < _SMALLEST_WEIGHT:
        return "no measured row is like this question: it is answered as without them"
    counts = Counter(
        f"{network_of(row.query.setup).removeprefix('own:')} on {row.query.setup.hardware.name}" for row in told
    )
    subject = f"{len(told)} measured row{'s' if len(told) > 1 else ''}"
    if len(counts) == 1:
        subject += f" of {next(iter(counts))}"
    else:
        named = [f"{count} of {name}" for name, count in counts.most_common(_MOST_NAMED)]
        subject += f" ({', '.join(named)}{', and others' if len(counts) > len(named) else ''})"
    return f"calibrated by {subject}: x{math.exp(shift):.2f}"


def _positive(value: object) -> float:
    number = float(value)  # type: ignore[arg-type]
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{value!r} is not positive")
    return number


def _setup_to_dict(setup: TrainingSetup) -> dict[str, Any]:
    # field by field: the deep copy of dataclasses.asdict would take the workload's profile apart
    values = {item.name: getattr(setup, item.name) for item in dataclasses.fields(setup)}
    return values | {
        "workload": setup.workload.to_dict(),
        "hardware": setup.hardware.to_dict(),
        "precision": dataclasses.asdict(setup.precision),
        "parallelism": None if setup.parallelism is None else dataclasses.asdict(setup.parallelism),
        "implementation": dataclasses.asdict(setup.implementation),
    }


def _setup_from_dict(values: Mapping[str, Any]) -> TrainingSetup:
    layout = values["parallelism"]
    return TrainingSetup(
        **{
            **values,
            "workload": WorkloadFeatures.from_dict(values["workload"]),
            "hardware": HardwareSpec.from_dict(values["hardware"]),
            "precision": Precision(**values["precision"]),
            "parallelism": None if layout is None else Parallelism(**layout),
            "implementation": Implementation(**values["implementation"]),
        }
    )
