"""Cross-validate on the training rows, score the held-out models, and calibrate the intervals that hold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from precision_time.predictor.learning.boosting import FEWEST_FOR_MANY
from precision_time.predictor.learning.error_covariance import ErrorCovariance
from precision_time.predictor.learning.regimes import REGIMES
from precision_time.predictor.learning.splits import SPLITS, feasible_splits
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.cross_validation import (
    SPEED_UP,
    CrossValidation,
    cross_validate_all,
    score_holdout,
)
from precision_time.predictor.scoring.fit_error_covariance import estimate_covariances
from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.tasks.publishing.snapshot import Snapshot

__all__ = ["Accuracy", "Validation", "chance_of_coverage", "coverage_holds", "validate_predictor"]

#: The split whose errors are also reported by precision.
_BY_PRECISION = "configuration"
_IMPOSSIBLE = "the rows do not have both rows to train on and rows to leave out"
_TOO_SIMILAR = "with few rows only repeats distinguish it from 5-fold by configuration"
#: A coverage this close to the level holds; a lower one must be explained by chance.
COVERAGE_BAND = 0.05
#: A coverage whose chance is below this stops the publication.
COVERAGE_SIGNIFICANCE = 0.01
#: Metrics by split and method, as the manifest stores them.
Accuracy = dict[str, dict[str, dict[str, float | None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Accuracy by split and method, out-of-fold predictions by split, and the interval radii they support.

    ``covariances`` describe how the errors are correlated, by which measured rows correct other answers.
    ``by_precision`` is the accuracy of the 5-fold cross-validation by configuration on the rows of each policy, by
    method; ``left_out`` maps the splits that were not scored to the reason.
    """

    accuracy: Accuracy
    cross_validations: dict[str, CrossValidation]
    radii: dict[str, float]
    level: float
    covariances: Mapping[str, ErrorCovariance] = field(default_factory=dict)
    by_precision: Accuracy = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def validate_predictor(snapshot: Snapshot, *, level: float, seed: int) -> Validation:
    """Every split that the training rows allow, and the held-out models, each with its baselines.

    With few rows, as of a single campaign, 5-fold by row is left out.
    """
    rows = snapshot.training
    possible = feasible_splits(rows)
    left_out = {split: _IMPOSSIBLE for split in SPLITS if split not in possible}
    if len(rows) < FEWEST_FOR_MANY:
        left_out["row"] = _TOO_SIMILAR
    splits = tuple(split for split in possible if split not in left_out)
    done = cross_validate_all(
        rows, splits=splits, level=level, seed=seed, processes=1 if len(rows) < FEWEST_FOR_MANY else 2
    )
    if SPEED_UP not in done:
        left_out[SPEED_UP] = _IMPOSSIBLE
    accuracy: Accuracy = {split: result.metrics() for split, result in done.items()}
    if snapshot.holdout:
        accuracy["holdout"] = score_holdout(rows, snapshot.holdout, seed=seed)
    # A regime whose interval does not hold on its own split gets none; its queries then get the widest interval.
    radii = {
        name: done[split].radius_of(name)
        for name, regime in REGIMES.items()
        for split in [next((split for split in regime.interval_splits if split in done), None)]
        if split is not None and coverage_holds(accuracy[split], level=level)
    }
    return Validation(
        accuracy=accuracy,
        cross_validations=done,
        radii={regime: radius for regime, radius in radii.items() if radius is not None},
        level=level,
        covariances=estimate_covariances(done, rows, seed=seed),
        by_precision=_score_by_precision(done[_BY_PRECISION], rows) if _BY_PRECISION in done else {},
        left_out=left_out,
    )


def _score_by_precision(result: CrossValidation, rows: Sequence[Observation]) -> Accuracy:
    """By policy, the metrics of each method on the rows of the policy."""
    policies = np.array([rows[row].setup.precision.name for row in result.rows])
    return {
        policy: result.restrict(policies == policy, split=result.split).metrics()
        for policy in PRECISIONS
        if (policies == policy).any()
    }


def chance_of_coverage(covered: int, rows: int, level: float) -> float:
    """The probability that at most ``covered`` of ``rows`` intervals contain their row, if each does at ``level``."""
    log_hit, log_miss = math.log(level), math.log1p(-level)

    def log_choose(k: int) -> float:
        return math.lgamma(rows + 1) - math.lgamma(k + 1) - math.lgamma(rows - k + 1)

    return math.fsum(math.exp(log_choose(k) + k * log_hit + (rows - k) * log_miss) for k in range(covered + 1))


def coverage_holds(metrics: dict[str, dict[str, float | None]], *, level: float) -> bool:
    """Whether chance can explain the coverage of a split's intervals at ``level``; False where it is not known."""
    coverage, rows = metrics["predictor"]["coverage"], metrics["predictor"]["n"]
    if coverage is None or rows is None:
        return False
    if abs(coverage - level) <= COVERAGE_BAND:
        return True
    return chance_of_coverage(round(coverage * rows), round(rows), level) >= COVERAGE_SIGNIFICANCE
