"""How good a predictor is: cross-validation over every split, with the baselines and ablations on the same folds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.intervals import FEWEST_IN_REGIME, conformal_radius, fewest_rows, radii_by_regime
from precision_time.predictor.learning.splits import SPLITS, Fold, feasible_splits, same_but_precision
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.metrics import Metrics, score
from precision_time.predictor.scoring.trials import LEARNERS, Outcome, Trial, run_trials
from precision_time.predictor.setup.precision import FORMAT_BYTES, parse_precision
from precision_time.storage.errors import InputError

__all__ = [
    "METHODS",
    "SPEED_UP",
    "WITHOUT_CONTESTS",
    "CrossValidation",
    "cross_validate",
    "cross_validate_all",
    "cross_validation_table",
    "measure_speed_up",
    "score_holdout",
]

#: What follows a split's name where rows of benchmark contests are not scored (they teach all the same).
WITHOUT_CONTESTS = " without MLPerf"
#: The key under which errors of speed-ups stand beside those of times.
SPEED_UP = "speed-up"

#: The closed forms times one factor, the median of measured over closed form in the teaching rows; and without it,
#: which is what answers where nothing is published.
_CLOSED_METHODS = ("roofline", "closed_form")
#: The methods that every split is predicted by; those of ``ABLATIONS`` can be asked for beside them.
METHODS = ("predictor", "precision_blind", *_CLOSED_METHODS)
#: The number of the fold that sets the intervals of a split with a single fold.
_INTERVAL_FOLD = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossValidation:
    """One split: rows predicted by models that saw nothing of their group. Arrays have one entry a predicted row.

    ``rows`` are positions in the observations, in rising order; ``predicted_s`` is by method, ``folds`` the fold of
    each row and ``regimes`` how far it was from the rows that taught its fold. ``covered`` tells whether the
    predictor's interval at ``level`` held it, None where too few errors calibrate one: the radius is the regime's
    from the errors of the other folds, or, in a split with a single fold, from the errors of a nearer division inside
    the teaching rows (see ``OneWaySplit``).
    """

    split: str
    rows: npt.NDArray[np.int64]
    measured_s: npt.NDArray[np.float64]
    predicted_s: dict[str, npt.NDArray[np.float64]]
    folds: npt.NDArray[np.int64]
    regimes: tuple[str, ...]
    covered: npt.NDArray[np.bool_] | None
    level: float

    def log_errors(self, method: str = "predictor") -> npt.NDArray[np.float64]:
        """log(measured / predicted) of a method, shape (rows,); the predictor's calibrate the intervals."""
        return np.log(self.measured_s / self.predicted_s[method])

    def radius(self) -> float | None:
        """The interval radius that all rows together support at ``level``; None with too few rows."""
        if len(self.measured_s) < fewest_rows(self.level):
            return None
        return conformal_radius(self.log_errors(), level=self.level)

    def radius_of(self, regime: str) -> float | None:
        """The radius of the rows of one regime; of all rows where it has too few."""
        own = np.array([one == regime for one in self.regimes])
        if own.sum() < max(FEWEST_IN_REGIME, fewest_rows(self.level)):
            return self.radius()
        return conformal_radius(self.log_errors()[own], level=self.level)

    def metrics(self) -> dict[str, Metrics]:
        """Metrics by method; only the predictor gives intervals, so only it has a coverage."""
        return {
            method: score(values, self.measured_s, covered=self.covered if method == "predictor" else None)
            for method, values in self.predicted_s.items()
        }

    def restrict(self, chosen: npt.NDArray[np.bool_], *, split: str) -> "CrossValidation":
        """The same predictions, scored on the ``chosen`` rows only, under another name."""
        return replace(
            self,
            split=split,
            rows=self.rows[chosen],
            measured_s=self.measured_s[chosen],
            predicted_s={method: values[chosen] for method, values in self.predicted_s.items()},
            folds=self.folds[chosen],
            regimes=tuple(regime for regime, keep in zip(self.regimes, chosen, strict=True) if keep),
            covered=None if self.covered is None else self.covered[chosen],
        )


def _closed_times(rows: Iterable[Observation]) -> npt.NDArray[np.float64]:
    return np.array([seen.closed.iteration_time_s for seen in rows])


def _measured_times(rows: Iterable[Observation]) -> npt.NDArray[np.float64]:
    return np.array([seen.measurement.iteration_time_s for seen in rows])


def cross_validate(
    observations: Sequence[Observation],
    *,
    split: str,
    level: float = 0.9,
    seed: int = 0,
    methods: Sequence[str] = METHODS,
) -> CrossValidation:
    """Predict the rows of one split by the predictor and the other ``methods``, in this process.

    Raises ``InputError`` when the rows hold fewer than two groups of the split, or too few rows to train on.
    """
    return _cross_validate(
        observations, splits=[split], level=level, seed=seed, methods=methods, processes=1, progress=None
    )[split]


def cross_validate_all(
    observations: Sequence[Observation],
    *,
    splits: Sequence[str] | None = None,
    methods: Sequence[str] = METHODS,
    level: float = 0.9,
    seed: int = 0,
    processes: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, CrossValidation]:
    """Every split in ``splits`` (default: all that the rows allow), and what follows from the same predictions.

    Beside the splits the result holds ``"<split> without MLPerf"`` where some but not all predicted rows are of a
    contest, and ``"speed-up"`` (see ``measure_speed_up``) with ``leave-model-out`` where rows differ in nothing but
    precision. Fits run in ``processes`` spawned processes, so the caller's main module must be importable; the result
    does not depend on how many. ``progress`` is called with the fits done and all there are.

    Raises ``InputError`` for an unknown method or split, and as ``cross_validate``.
    """
    chosen = feasible_splits(observations) if splits is None else tuple(splits)
    done = _cross_validate(
        observations, splits=chosen, level=level, seed=seed, methods=methods, processes=processes, progress=progress
    )
    results: dict[str, CrossValidation] = {}
    for split, result in done.items():
        results[split] = result
        ordinary = np.array([not observations[row].is_contest for row in result.rows], dtype=np.bool_)
        if ordinary.any() and not ordinary.all():
            results[split + WITHOUT_CONTESTS] = result.restrict(ordinary, split=split + WITHOUT_CONTESTS)
    if "leave-model-out" in done:
        speed_up = measure_speed_up(done["leave-model-out"], observations)
        if speed_up is not None:
            results[SPEED_UP] = speed_up
    return results


def _cross_validate(
    observations: Sequence[Observation],
    *,
    splits: Sequence[str],
    level: float,
    seed: int,
    methods: Sequence[str],
    processes: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, CrossValidation]:
    for what, asked, known in (("split", splits, SPLITS), ("method", methods, (*LEARNERS, *_CLOSED_METHODS))):
        unknown = [name for name in asked if name not in known]
        if unknown:
            raise InputError(f"unknown {what}", got=", ".join(unknown), expected=", ".join(known))
    if "predictor" not in methods:
        raise InputError("nothing to compare with", got=", ".join(methods), expected="predictor among the methods")
    folds = {split: SPLITS[split].divide(observations, seed=seed) for split in splits}
    jobs = [
        Trial(split=split, fold=number, method=method, rows=fold)
        for split in splits
        for number, fold in enumerate(folds[split])
        for method in methods
        if method in LEARNERS
    ]
    inner = {split: SPLITS[split].find_interval_fold(observations) for split in splits}
    jobs += [
        Trial(split=split, fold=_INTERVAL_FOLD, method="predictor", rows=fold)
        for split, fold in inner.items()
        if fold is not None and len(fold.test) >= fewest_rows(level)
    ]
    answers = run_trials(jobs, observations, seed=seed, processes=processes, progress=progress)
    answered = {(job.split, job.fold, job.method): answer for job, answer in zip(jobs, answers, strict=True)}
    return {
        split: _gather(
            split, folds[split], inner[split], answered, observations=observations, methods=methods, level=level
        )
        for split in splits
    }


def _gather(
    split: str,
    folds: Sequence[Fold],
    inner: Fold | None,
    answered: Mapping[tuple[str, int, str], Outcome],
    *,
    observations: Sequence[Observation],
    methods: Sequence[str],
    level: float,
) -> CrossValidation:
    measured, closed = _measured_times(observations), _closed_times(observations)
    predicted = {method: np.full(len(observations), np.nan) for method in methods}
    fold_of = np.full(len(observations), -1, dtype=np.int64)
    regimes = np.full(len(observations), "", dtype=object)
    for number, fold in enumerate(folds):
        fold_of[fold.test] = number
        regimes[fold.test] = answered[split, number, "predictor"][1]
        factor = np.exp(np.median(np.log(measured[fold.train] / closed[fold.train])))
        for method in methods:
            if method in LEARNERS:
                predicted[method][fold.test] = answered[split, number, method][0]
            else:
                predicted[method][fold.test] = closed[fold.test] * (factor if method == "roofline" else 1.0)
    rows = np.flatnonzero(fold_of >= 0)
    result = CrossValidation(
        split=split,
        rows=rows,
        measured_s=measured[rows],
        predicted_s={method: values[rows] for method, values in predicted.items()},
        folds=fold_of[rows],
        regimes=tuple(regimes[rows]),
        covered=None,
        level=level,
    )
    calibration = answered.get((split, _INTERVAL_FOLD, "predictor"))
    if calibration is None or inner is None:
        return replace(result, covered=_cover_across_folds(result) if len(folds) > 1 else None)
    radii = radii_by_regime(np.log(measured[inner.test] / calibration[0]), calibration[1], level=level)
    return replace(result, covered=_cover(result, radii, np.ones(len(rows), dtype=np.bool_)))


def _cover(result: CrossValidation, radii: Mapping[str, float], chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether the interval of its regime holds each of the ``chosen`` rows; False for the others."""
    radius = np.array([radii[regime] for regime in result.regimes])
    held: npt.NDArray[np.bool_] = chosen & (np.abs(result.log_errors()) <= radius)
    return held


def _cover_across_folds(result: CrossValidation) -> npt.NDArray[np.bool_] | None:
    errors, regimes = result.log_errors(), np.asarray(result.regimes)
    covered = np.zeros(len(errors), dtype=np.bool_)
    for fold in np.unique(result.folds):
        inside = result.folds == fold
        radii = radii_by_regime(errors[~inside], list(regimes[~inside]), level=result.level)
        if not radii:
            return None
        covered |= _cover(result, radii, inside)
    return covered


def measure_speed_up(result: CrossValidation, observations: Sequence[Observation]) -> CrossValidation | None:
    """Speed-ups of a 16-bit policy over fp32 or tf32, predicted and measured, from the predictions of ``result``.

    A pair is two policies at which one source ran the same thing (``same_but_precision``); repeats of either count by
    their median. In place of seconds stands the ratio of the wider policy's time to the narrower one's, above 1 where
    fewer bits are faster; ``rows`` is the first row of the narrower policy. No interval is scored. None without a pair.
    """
    runs: dict[tuple[Any, ...], dict[str, list[int]]] = {}
    for position, row in enumerate(result.rows):
        seen = observations[row]
        runs.setdefault(same_but_precision(seen), {}).setdefault(seen.setup.precision.name, []).append(position)
    pairs = [
        (policies[wide], policies[narrow])
        for policies in runs.values()
        for wide in ("fp32", "tf32")
        if wide in policies
        for narrow in policies
        if FORMAT_BYTES[parse_precision(narrow).compute] == 2
    ]
    if not pairs:
        return None

    def speed_up(times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.array([np.median(times[wide]) / np.median(times[narrow]) for wide, narrow in pairs])

    first = np.array([narrow[0] for _, narrow in pairs], dtype=np.int64)
    return CrossValidation(
        split=SPEED_UP,
        rows=result.rows[first],
        measured_s=speed_up(result.measured_s),
        predicted_s={method: speed_up(values) for method, values in result.predicted_s.items()},
        folds=result.folds[first],
        regimes=tuple(result.regimes[position] for position in first),
        covered=None,
        level=result.level,
    )


def cross_validation_table(
    results: Mapping[str, CrossValidation],
) -> dict[str, dict[str, dict[str, float | None]]]:
    """``{SPLIT: {METHOD: {n, mape, median_ape, p90_ape, coverage_90}}}``: fractions, None where a figure is not had.

    Under ``speed-up`` the errors are of ratios of two times, not of times. ``coverage_90`` is None for methods that
    give no intervals, and where the intervals are of another level than 0.9.
    """
    return {
        split: {
            method: {
                **{name: metrics[name] for name in ("n", "mape", "median_ape", "p90_ape")},
                "coverage_90": metrics["coverage"] if result.level == 0.9 else None,
            }
            for method, metrics in result.metrics().items()
        }
        for split, result in results.items()
    }


def score_holdout(train: Sequence[Observation], holdout: Sequence[Observation], *, seed: int = 0) -> dict[str, Metrics]:
    """Metrics by method on ``holdout`` after training on ``train`` alone."""
    together = [*train, *holdout]
    positions = np.arange(len(together))
    fold = Fold(train=positions[: len(train)], test=positions[len(train) :])
    jobs = [Trial(split="holdout", fold=0, method=method, rows=fold) for method in METHODS if method in LEARNERS]
    answers = run_trials(jobs, together, seed=seed, processes=1, progress=None)
    answered = {(job.split, job.fold, job.method): answer for job, answer in zip(jobs, answers, strict=True)}
    return _gather("holdout", [fold], None, answered, observations=together, methods=METHODS, level=0.9).metrics()
