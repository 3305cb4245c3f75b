"""Blending: how far to trust the trees, and how far the closed forms, by a query's distance from the training data."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.boosting import boost, choose_parameters
from precision_time.predictor.learning.folds import split_by_group
from precision_time.predictor.learning.trees import flatten_xgboost
from precision_time.predictor.rows.features import SETUP_FEATURES, feature_matrix
from precision_time.predictor.rows.observations import Observation, weigh_rows

__all__ = ["CLOSED_FORM_ONLY", "Blend", "apply_blend", "learn_blend"]

Times = npt.NDArray[np.float64]

#: Rows are left out this way to learn the blend of a regime.
_LEFT_OUT: dict[str, Callable[[Observation], Hashable]] = {
    "new model": lambda seen: seen.network,
    "new family": lambda seen: seen.setup.workload.family,
    "new gpu": lambda seen: seen.chip,
}
#: With few folds too much is missing at once, and the trees look worse than they are where one family or chip is new.
_FOLDS = 8
_FEWEST_GROUPS = 3
#: Fewer rounds than the published forest: enough to tell trees from closed forms.
_ROUNDS = 60
_ETA = 0.2
_STEPS = np.linspace(0.0, 1.0, 21)
#: The largest world of which a split by scale teaches.
_SMALL_WORLD = 8
_FEWEST_ROWS = 100


class Blend(NamedTuple):
    """T = trees ^ weight x (closed form x factor) ^ (1 - weight)."""

    weight: float
    factor: float


CLOSED_FORM_ONLY = Blend(0.0, 1.0)


def apply_blend(chosen: Sequence[Blend], *, trees_s: Times, closed_s: Times) -> Times:
    """Blended seconds of each row by its own blend."""
    weight = np.array([one.weight for one in chosen])
    factor = np.array([one.factor for one in chosen])
    blended: Times = trees_s**weight * (closed_s * factor) ** (1.0 - weight)
    return blended


def learn_blend(observations: Sequence[Observation], *, seed: int) -> dict[str, Blend]:
    """The blend of each regime, from rows left out as such queries would be: by network, family, chip and scale.

    The weight has the smallest mean absolute log error on the rows left out; the factor is the median of measured
    over closed form in the rows that teach. What is new in two ways leans as the more cautious of the two does.
    """
    matrix = feature_matrix([seen.query.row for seen in observations], SETUP_FEATURES)
    residual = np.log([seen.measurement.iteration_time_s / seen.closed.iteration_time_s for seen in observations])
    factor = float(np.exp(np.median(residual)))
    row_weights = weigh_rows(observations)
    parameters = choose_parameters(len(observations)) | {"eta": _ETA}

    def predict(train: npt.NDArray[np.bool_]) -> Times:
        model = boost(
            matrix[train], residual[train], parameters=parameters, seed=seed, rounds=_ROUNDS, weights=row_weights[train]
        )
        return flatten_xgboost(model, keep_cover=False).predict(matrix[~train]).astype(np.float64)

    def choose(corrections: Times, rows: npt.NDArray[np.intp]) -> float:
        measured, closed = residual[rows], np.log(factor)
        errors = [np.abs(measured - step * corrections - (1 - step) * closed).mean() for step in _STEPS]
        return float(_STEPS[int(np.argmin(errors))])

    weights = {"known": 1.0, "new pair": 1.0}
    for regime, group in _LEFT_OUT.items():
        groups = [group(seen) for seen in observations]
        if len(set(groups)) < _FEWEST_GROUPS:
            continue
        folds = split_by_group(groups, folds=min(_FOLDS, len(set(groups))), seed=seed)
        corrections = np.empty(len(observations))
        for fold in np.unique(folds):
            corrections[folds == fold] = predict(folds != fold)
        weights[regime] = choose(corrections, np.arange(len(observations)))
    small = np.array([seen.setup.world_size <= _SMALL_WORLD for seen in observations])
    if min(small.sum(), (~small).sum()) >= _FEWEST_ROWS:
        weights["beyond scale"] = choose(predict(small), np.flatnonzero(~small))
    elif "new gpu" in weights:
        weights["beyond scale"] = weights["new gpu"]
    if {"new family", "new gpu"} <= weights.keys():
        weights["new model and gpu"] = min(weights["new family"], weights["new gpu"])
    return {regime: Blend(weight, factor) for regime, weight in weights.items()}
