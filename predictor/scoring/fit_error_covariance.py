"""How alike the errors of two runs are, found from pairs of errors that no fit has seen."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.error_covariance import DIFFERENCES, Effect, Traits
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.cross_validation import CrossValidation
from precision_time.storage.errors import InputError

__all__ = ["CHIP", "CLOSED_FORMS", "NETWORK", "PairPlan", "estimate_effects", "fit_effect"]

Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """Which pairs teach an effect: two rows that share a group, from at most so many rows of each.

    ``apart`` names the difference beyond which errors are taken as unrelated (a correlation of 0).
    """

    groups: Mapping[str, int]
    apart: str | None


#: Effects of networks: pairs in one network, and in one family.
NETWORK = PairPlan(groups={"network": 50, "family": 40}, apart="family")
#: Effects of a chip: pairs on one chip, and on one part of it.
CHIP = PairPlan(groups={"gpu": 120, "chip": 120}, apart="chip")
#: Errors of the closed forms, which nothing was fitted to.
CLOSED_FORMS = PairPlan(groups={"network": 50, "family": 40, "chip": 120}, apart=None)

#: Errors beyond this quantile count as much as it: a few rows that nothing explains must not decide.
_CLIPPED = 0.97
#: Groups of rows, and pairs, below which nothing general can be said.
_FEWEST_GROUPS, _FEWEST_PAIRS = 4, 200
#: The finest step of the search, in logs of a rate; a rate is -log of a correlation.
_FINEST, _LARGEST_LOG, _SMALLEST_LOG = 0.06, 2.0, -7.0

#: The split whose errors tell of each effect, and which pairs of them.
_TAUGHT_BY: dict[str, tuple[str, PairPlan]] = {
    "known": ("configuration", NETWORK),
    "new pair": ("source-model-gpu", NETWORK),
    "new model": ("leave-model-out", NETWORK),
    "new family": ("leave-family-out", NETWORK),
    "new gpu": ("leave-gpu-out", CHIP),
    "beyond scale": ("scale", NETWORK),
}


def _choose_pairs(
    traits: Traits, folds: Positions, plan: PairPlan, rng: np.random.Generator
) -> tuple[Positions, Positions, Floats]:
    """Pairs of one fold in a shared group, and a weight each: a group of n rows weighs as the root of n."""
    left, right, weights = [], [], []
    for name, most in plan.groups.items():
        # Two rows of different folds were predicted by fits that had seen the other one.
        together = traits.group(name) * (int(folds.max(initial=0)) + 1) + folds
        order = np.argsort(together, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(together[order])) + 1):
            if len(rows) < 2:
                continue
            some = rng.choice(rows, most, replace=False) if len(rows) > most else rows
            first, second = np.triu_indices(len(some), 1)
            left.append(some[first])
            right.append(some[second])
            weights.append(np.full(len(first), math.sqrt(len(some)) / len(first)))
    if not left:
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0)
    return np.concatenate(left), np.concatenate(right), np.concatenate(weights)


def fit_effect(
    queries: Sequence[Query],
    errors: Floats,
    folds: Positions | None = None,
    *,
    plan: PairPlan,
    seed: int = 0,
) -> Effect | None:
    """The effect under which pairs of log ``errors`` (shape (queries,)) are likeliest; None with too few of them.

    Pairs of ``plan`` in one fold are taken as bivariate normal of mean 0, each on its own (a pairwise composite
    likelihood: Cox and Reid 2004; Varin, Reid and Firth 2011), after errors are clipped.
    Raises ``InputError`` for errors that are not as many as queries.
    """
    if len(errors) != len(queries):
        raise InputError("errors do not match the queries", got=len(errors), expected=f"{len(queries)} of them")
    traits = Traits(queries)
    folds = np.zeros(len(errors), dtype=np.int64) if folds is None else folds
    left, right, weights = _choose_pairs(traits, folds, plan, np.random.default_rng(seed))
    groups = np.unique(traits.group(next(iter(plan.groups)))[left])
    if len(left) < _FEWEST_PAIRS or len(groups) < _FEWEST_GROUPS:
        return None
    most = np.quantile(np.abs(errors), _CLIPPED)
    clipped = np.clip(errors, -most, most)
    differences = traits.compare(left, right)
    # What no pair differs in has no factor; what lies farther apart is unrelated.
    names = [
        name for place, name in enumerate(DIFFERENCES) if name != plan.apart and bool((differences[place] > 0).any())
    ]
    kept = differences[[DIFFERENCES.index(name) for name in names]]
    if plan.apart is not None:
        near = differences[DIFFERENCES.index(plan.apart)] == 0
        left, right, weights, kept = left[near], right[near], weights[near], kept[:, near]
    variance, repeat, factors = _search(clipped[left], clipped[right], kept, weights / weights.sum())
    correlations = dict(zip(names, factors, strict=True))
    if plan.apart is not None:
        correlations[plan.apart] = 0.0
    return Effect(variance=variance, repeat=repeat, correlations=correlations)


def _search(first: Floats, second: Floats, differences: Floats, weights: Floats) -> tuple[float, float, list[float]]:
    """Variance, correlation of repeats and a factor for each difference, by a pattern search (Hooke, Jeeves 1961)."""
    # Pairs that differ in the same ways have one correlation, so their sums are all that counts.
    ways, same = np.unique(differences.round(3).T, axis=0, return_inverse=True)
    differences, same = np.ascontiguousarray(ways.T), same.reshape(-1)

    def add_up(values: Floats) -> Floats:
        sums: Floats = np.bincount(same, weights=values, minlength=len(ways)).astype(np.float64)
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
                found = cost(moved)
                if found < best - 1e-9:
                    point, best = moved, found
                    steps[place] = min(2.0, 1.3 * steps[place])
                    break
            else:
                steps[place] /= 2
    return math.exp(point[0]), math.exp(-math.exp(point[1])), [math.exp(-math.exp(value)) for value in point[2:]]


def estimate_effects(
    results: Mapping[str, CrossValidation], observations: Sequence[Observation], *, seed: int = 0
) -> dict[str, Effect]:
    """The effects that the out-of-fold errors of these splits support, by the name a predictor keeps them under.

    ``observations`` are those that were cross-validated. Effects without a split, or with too few pairs, are left out;
    ``closed forms`` is had from the observations themselves.
    """
    found: dict[str, Effect | None] = {}
    for name, (split, plan) in _TAUGHT_BY.items():
        if split not in results:
            continue
        result = results[split]
        queries = [observations[row].query for row in result.rows]
        found[name] = fit_effect(queries, result.log_errors(), result.folds, plan=plan, seed=seed)
    queries = [seen.query for seen in observations]
    errors = np.log([seen.measurement.iteration_time_s / seen.closed.iteration_time_s for seen in observations])
    found["closed forms"] = fit_effect(queries, errors, plan=CLOSED_FORMS, seed=seed)
    return {name: effect for name, effect in found.items() if effect is not None}
