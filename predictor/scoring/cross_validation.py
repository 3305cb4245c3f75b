"""Cross-validation of the predictor over every split, with its baselines and ablations on the same folds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.intervals import FEWEST_IN_REGIME, conformal_radius, fewest_rows, radii_by_regime
from precision_time.predictor.learning.splits import SPLITS, Fold, feasible_splits, same_but_precision
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.metrics import Metrics, score
from precision_time.predictor.scoring.trials import LEARNERS, Trial, run_trials
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

#: Follows the name of a split where rows of benchmark contests are not scored; the predictor is trained on them.
WITHOUT_CONTESTS = " without MLPerf"
#: The key of the errors of speed-ups, beside those of times.
SPEED_UP = "speed-up"

#: The closed forms times the median of measured over closed form in the training rows, and without that factor: the
#: answers where no artifact is published.
_CLOSED_METHODS = ("roofline", "closed_form")
#: The methods that predict every split by default; those of ``ABLATIONS`` can be added.
METHODS = ("predictor", "precision_blind", *_CLOSED_METHODS)
#: The number of the fold that sets the intervals of a split with a single fold.
_INTERVAL_FOLD = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossValidation:
    """One split: rows predicted by models that were not trained on their group. Arrays have one entry a predicted row.

    ``rows`` are positions in the observations, in rising order; ``predicted_s`` is by method. ``folds`` is the fold of
    each row, and ``regimes`` its distance from the training rows of that fold. ``covered`` says whether the interval of
    the predictor at ``level`` holds the row; it is None where too few errors set an interval. The errors of the other
    folds set it by regime, or, in a split with a single fold, those of a nearer division inside the training rows (see
    ``OneWaySplit``).
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
        """log(measured / predicted) of a method, shape (rows,); those of the predictor set the intervals."""
        return np.log(self.measured_s / self.predicted_s[method])

    def radius(self) -> float | None:
        """The radius of the interval at ``level`` from all rows together; None with too few rows."""
        if len(self.measured_s) < fewest_rows(self.level):
            return None
        return conformal_radius(self.log_errors(), level=self.level)

    def radius_of(self, regime: str) -> float | None:
        """The radius of the rows of one regime; of all rows where it has too few."""
        inside = np.array(self.regimes) == regime
        if inside.sum() < max(FEWEST_IN_REGIME, fewest_rows(self.level)):
            return self.radius()
        return conformal_radius(self.log_errors()[inside], level=self.level)

    def metrics(self) -> dict[str, Metrics]:
        """Metrics by method; only the predictor has intervals, so only it has a coverage."""
        return {
            method: score(values, self.measured_s, covered=self.covered if method == "predictor" else None)
            for method, values in self.predicted_s.items()
        }

    def restrict(self, mask: npt.NDArray[np.bool_], *, split: str) -> "CrossValidation":
        """The predictions of the rows in ``mask`` alone, under another name."""
        return replace(
            self,
            split=split,
            rows=self.rows[mask],
            measured_s=self.measured_s[mask],
            predicted_s={method: values[mask] for method, values in self.predicted_s.items()},
            folds=self.folds[mask],
            regimes=tuple(regime for regime, is_kept in zip(self.regimes, mask, strict=True) if is_kept),
            covered=None if self.covered is None else self.covered[mask],
        )


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
    return cross_validate_all(observations, splits=[split], methods=methods, level=level, seed=seed, processes=1)[split]


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
    """Predict every split in ``splits`` (default: all that the rows allow).

    Beside the splits the result holds ``"<split> without MLPerf"`` where some but not all predicted rows are of a
    contest, and ``"speed-up"`` (see ``measure_speed_up``) with ``leave-model-out`` where rows differ in nothing but
    precision. Fits run in ``processes`` spawned processes, so the caller's main module must be importable; the result
    does not depend on their number. ``progress`` is called with the number of finished and of all fits.

    Raises ``InputError`` for an unknown method or split, and as ``cross_validate``.
    """
    if splits is None:
        splits = feasible_splits(observations)
    for kind, names, known in (("split", splits, SPLITS), ("method", methods, (*LEARNERS, *_CLOSED_METHODS))):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise InputError(f"unknown {kind}", got=", ".join(unknown), expected=", ".join(known))
    if "predictor" not in methods:
        raise InputError("nothing to compare with", got=", ".join(methods), expected="predictor among the methods")
    inner = {split: SPLITS[split].find_interval_fold(observations) for split in splits}
    predicted = _predict_folds(
        observations,
        {split: SPLITS[split].divide(observations, seed=seed) for split in splits},
        interval_folds={
            split: fold for split, fold in inner.items() if fold is not None and len(fold.test) >= fewest_rows(level)
        },
        level=level,
        seed=seed,
        methods=methods,
        processes=processes,
        progress=progress,
    )
    results: dict[str, CrossValidation] = {}
    for split, result in predicted.items():
        results[split] = result
        ordinary = np.array([not observations[row].is_contest for row in result.rows], dtype=np.bool_)
        if ordinary.any() and not ordinary.all():
            results[split + WITHOUT_CONTESTS] = result.restrict(ordinary, split=split + WITHOUT_CONTESTS)
    if "leave-model-out" in predicted:
        speed_up = measure_speed_up(predicted["leave-model-out"], observations)
        if speed_up is not None:
            results[SPEED_UP] = speed_up
    return results


def _predict_folds(
    observations: Sequence[Observation],
    folds: Mapping[str, Sequence[Fold]],
    *,
    interval_folds: Mapping[str, Fold],
    level: float,
    seed: int,
    methods: Sequence[str],
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, CrossValidation]:
    """Train and predict the folds of each split, and the fold that sets its intervals where it has one."""
    trials = [
        Trial(split=split, fold=number, method=method, rows=fold)
        for split in folds
        for number, fold in enumerate(folds[split])
        for method in methods
        if method in LEARNERS
    ]
    trials += [
        Trial(split=split, fold=_INTERVAL_FOLD, method="predictor", rows=fold) for split, fold in interval_folds.items()
    ]
    outcomes = run_trials(trials, observations, seed=seed, processes=processes, progress=progress)
    outcome_of = {
        (trial.split, trial.fold, trial.method): outcome for trial, outcome in zip(trials, outcomes, strict=True)
    }
    measured = np.array([observation.measurement.iteration_time_s for observation in observations])
    closed = np.array([observation.closed.iteration_time_s for observation in observations])
    results = {}
    for split in folds:
        predicted = {method: np.full(len(observations), np.nan) for method in methods}
        fold_of = np.full(len(observations), -1, dtype=np.int64)
        regimes = np.full(len(observations), "", dtype=object)
        for number, fold in enumerate(folds[split]):
            fold_of[fold.test] = number
            regimes[fold.test] = outcome_of[split, number, "predictor"][1]
            factor = np.exp(np.median(np.log(measured[fold.train] / closed[fold.train])))
            for method in methods:
                if method in LEARNERS:
                    predicted[method][fold.test] = outcome_of[split, number, method][0]
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
        covered = None
        if split in interval_folds:
            predicted_s, inner_regimes = outcome_of[split, _INTERVAL_FOLD, "predictor"]
            errors = np.log(measured[interval_folds[split].test] / predicted_s)
            covered = _cover(result, radii_by_regime(errors, inner_regimes, level=level))
        elif len(folds[split]) > 1:
            covered = _cover_across_folds(result)
        results[split] = replace(result, covered=covered)
    return results


def _cover(result: CrossValidation, radii: Mapping[str, float]) -> npt.NDArray[np.bool_]:
    """Whether the interval of its regime holds each row."""
    covered: npt.NDArray[np.bool_] = np.abs(result.log_errors()) <= [radii[regime] for regime in result.regimes]
    return covered


def _cover_across_folds(result: CrossValidation) -> npt.NDArray[np.bool_] | None:
    """The same with radii from the errors of all other folds; None where these are too few for a radius."""
    errors, regimes = result.log_errors(), np.asarray(result.regimes)
    covered = np.zeros(len(errors), dtype=np.bool_)
    for fold in np.unique(result.folds):
        inside = result.folds == fold
        radii = radii_by_regime(errors[~inside], list(regimes[~inside]), level=result.level)
        if not radii:
            return None
        covered |= inside & _cover(result, radii)
    return covered


def measure_speed_up(result: CrossValidation, observations: Sequence[Observation]) -> CrossValidation | None:
    """Speed-ups of a 16-bit policy over fp32 or tf32, predicted and measured, from the predictions of ``result``.

    A pair is two policies at which one source ran the same thing (``same_but_precision``); repeats of a policy count by
    their median. The result holds ratios in place of seconds: the wider policy's time over the narrower one's, above 1
    where fewer bits are faster. ``rows`` is the first row of the narrower policy. No interval is scored. None without a
    pair.
    """
    runs: dict[tuple[Any, ...], dict[str, list[int]]] = {}
    for position, row in enumerate(result.rows):
        observation = observations[row]
        policies = runs.setdefault(same_but_precision(observation), {})
        policies.setdefault(observation.setup.precision.name, []).append(position)
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
    """``{SPLIT: {METHOD: {n, mape, median_ape, p90_ape, coverage_90}}}``: fractions, None for a figure that is unknown.

    Under ``speed-up`` the errors are of ratios of two times, not of times. ``coverage_90`` is None for methods without
    intervals, and where the level of the intervals is not 0.9.
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
    positions = np.arange(len(train) + len(holdout))
    fold = Fold(train=positions[: len(train)], test=positions[len(train) :])
    results = _predict_folds(
        [*train, *holdout], {"holdout": [fold]}, interval_folds={}, level=0.9, seed=seed, methods=METHODS
    )
    return results["holdout"].metrics()
