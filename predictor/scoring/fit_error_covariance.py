"""Fits of the covariance of errors to pairs of out-of-fold errors."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.error_covariance import DIFFERENCES, ErrorCovariance, PairPlan, SetupComparison
from precision_time.predictor.learning.regimes import COVARIANCES
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.cross_validation import CrossValidation
from precision_time.storage.errors import InputError

__all__ = ["estimate_covariances", "fit_covariance"]

Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]

#: Errors are clipped at this quantile, so that a few outliers do not determine the fit.
_CLIPPED = 0.97
#: With fewer groups of rows, or fewer pairs, no covariance is fitted.
_FEWEST_GROUPS, _FEWEST_PAIRS = 4, 200
#: The finest step of the search, in logs of a rate; a rate is -log of a correlation.
_FINEST, _LARGEST_LOG, _SMALLEST_LOG = 0.06, 2.0, -7.0


def _choose_pairs(
    comparison: SetupComparison, folds: Positions, plan: PairPlan, rng: np.random.Generator
) -> tuple[Positions, Positions, Floats]:
    """Pairs of one fold in a shared group, and their weights: those of a group of n rows sum to the root of n."""
    left, right, weights = [], [], []
    for name, most in plan.groups.items():
        # Two rows of different folds were predicted by fits that were trained on the other row.
        together = comparison.group(name) * (int(folds.max(initial=0)) + 1) + folds
        order = np.argsort(together, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(together[order])) + 1):
            if len(rows) < 2:
                continue
            sample = rng.choice(rows, most, replace=False) if len(rows) > most else rows
            first, second = np.triu_indices(len(sample), 1)
            left.append(sample[first])
            right.append(sample[second])
            weights.append(np.full(len(first), math.sqrt(len(sample)) / len(first)))
    if not left:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    return np.concatenate(left), np.concatenate(right), np.concatenate(weights)


def fit_covariance(
    queries: Sequence[Query],
    errors: Floats,
    folds: Positions | None = None,
    *,
    plan: PairPlan,
    seed: int = 0,
) -> ErrorCovariance | None:
    """The covariance under which pairs of log ``errors`` (shape (queries,)) are likeliest; None with too few pairs.

    Each pair of ``plan`` in one fold is taken as bivariate normal with mean 0, independent of the other pairs (a
    pairwise composite likelihood: Cox and Reid 2004; Varin, Reid and Firth 2011). Errors are clipped first. Raises
    ``InputError`` unless there is one error a query.
    """
    if len(errors) != len(queries):
        raise InputError("errors do not match the queries", got=len(errors), expected=f"{len(queries)} of them")
    comparison = SetupComparison(queries)
    folds = np.zeros(len(errors), dtype=np.int64) if folds is None else folds
    left, right, weights = _choose_pairs(comparison, folds, plan, np.random.default_rng(seed))
    groups = np.unique(comparison.group(next(iter(plan.groups)))[left])
    if len(left) < _FEWEST_PAIRS or len(groups) < _FEWEST_GROUPS:
        return None
    most = np.quantile(np.abs(errors), _CLIPPED)
    clipped = np.clip(errors, -most, most)
    differences = comparison.compare(left, right)
    # A difference that no pair has gets no factor. Pairs beyond ``apart`` are unrelated.
    names = [
        name for place, name in enumerate(DIFFERENCES) if name != plan.apart and bool((differences[place] > 0).any())
    ]
    fitted = differences[[DIFFERENCES.index(name) for name in names]]
    if plan.apart is not None:
        near = differences[DIFFERENCES.index(plan.apart)] == 0
        left, right, weights, fitted = left[near], right[near], weights[near], fitted[:, near]
    variance, repeat, factors = _search(clipped[left], clipped[right], fitted, weights / weights.sum())
    correlations = dict(zip(names, factors, strict=True))
    if plan.apart is not None:
        correlations[plan.apart] = 0.0
    return ErrorCovariance(variance=variance, repeat=repeat, correlations=correlations)


def _search(first: Floats, second: Floats, differences: Floats, weights: Floats) -> tuple[float, float, list[float]]:
    """Variance, correlation of repeats and the factor of each difference, by a pattern search (Hooke, Jeeves 1961)."""
    # Pairs that differ in the same ways have the same correlation, so only their sums matter.
    patterns, same = np.unique(differences.round(3).T, axis=0, return_inverse=True)
    differences, same = np.ascontiguousarray(patterns.T), same.reshape(-1)

    def add_up(values: Floats) -> Floats:
        sums: Floats = np.bincount(same, weights=values, minlength=len(patterns)).astype(np.float64)
        return sums

    count, squares = add_up(weights), add_up(weights * (first**2 + second**2))
    product = add_up(weights * 2 * first * second)

    def cost(point: Floats) -> float:
        rates = np.exp(point[1:])
        correlation = np.exp(-rates[0] - rates[1:] @ differences)
        rest = 1.0 - correlation**2
        spread = (squares - correlation * product) / (rest * math.exp(point[0]))
        return float(count @ np.log(rest) + spread.sum()) / 2 + float(point[0])

    start = math.log(max(float(squares.sum()) / 2, 1e-8))
    point = np.concatenate([[start, -3.0], np.full(len(differences), -2.0)])
    low = np.concatenate([[start - 7.0], np.full(len(point) - 1, _SMALLEST_LOG)])
    high = np.concatenate([[start + 7.0], np.full(len(point) - 1, _LARGEST_LOG)])
    steps, best = np.ones(len(point)), cost(point)
    while steps.max() > _FINEST:
        for place in range(len(point)):
            for step in (steps[place], -steps[place]):
                moved = point.copy()
                moved[place] = min(max(point[place] + step, low[place]), high[place])
                moved_cost = cost(moved)
                if moved_cost < best - 1e-9:
                    point, best = moved, moved_cost
                    steps[place] = min(2.0, 1.3 * steps[place])
                    break
            else:
                steps[place] /= 2
    return math.exp(point[0]), math.exp(-math.exp(point[1])), [math.exp(-math.exp(value)) for value in point[2:]]


def estimate_covariances(
    results: Mapping[str, CrossValidation], observations: Sequence[Observation], *, seed: int = 0
) -> dict[str, ErrorCovariance]:
    """The covariances that are fitted to the out-of-fold errors of these splits, by name (``regimes.COVARIANCES``).

    ``observations`` are those that were cross-validated. A covariance without its split, or with too few pairs, is left
    out. That of the closed forms is fitted to their errors on all observations.
    """
    covariances: dict[str, ErrorCovariance] = {}
    for name, lesson in COVARIANCES.items():
        if lesson.pairs is None or (lesson.split is not None and lesson.split not in results):
            continue
        if lesson.split is None:
            queries, folds = [observation.query for observation in observations], None
            measured_s = np.array([observation.measurement.iteration_time_s for observation in observations])
            errors = np.log(measured_s / [query.closed.iteration_time_s for query in queries])
        else:
            result = results[lesson.split]
            queries = [observations[row].query for row in result.rows]
            errors, folds = result.log_errors(), result.folds
        covariance = fit_covariance(queries, errors, folds, plan=lesson.pairs, seed=seed)
        if covariance is not None:
            covariances[name] = covariance
    return covariances
