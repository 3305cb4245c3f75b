"""Blending: how much the trees count, and how much the closed forms, by a query's distance from the training data."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.boosting import boost, choose_parameters
from precision_time.predictor.learning.folds import split_by_group
from precision_time.predictor.learning.regimes import (
    REGIMES,
    AlwaysTrees,
    LeaveGroupsOut,
    LeaveLargeWorldsOut,
    SmallestOf,
)
from precision_time.predictor.learning.trees import flatten_xgboost
from precision_time.predictor.rows.features import SETUP_FEATURES, feature_matrix
from precision_time.predictor.rows.observations import Observation, weigh_rows

__all__ = ["CLOSED_FORM_ONLY", "Blend", "apply_blend", "learn_blend"]

Times = npt.NDArray[np.float64]

#: With fewer folds, too many groups are left out at once, and the trees look worse than with one group left out.
_FOLDS = 8
_FEWEST_GROUPS = 3
#: Fewer rounds than the published forest: enough to tell trees from closed forms.
_ROUNDS = 60
_ETA = 0.2
_STEPS = np.linspace(0.0, 1.0, 21)
#: Rows of larger worlds are predicted from worlds up to this size.
_SMALL_WORLD = 8
_FEWEST_ROWS = 100


class Blend(NamedTuple):
    """T = trees ^ weight x (closed form x factor) ^ (1 - weight)."""

    weight: float
    factor: float


CLOSED_FORM_ONLY = Blend(0.0, 1.0)


def apply_blend(blends: Sequence[Blend], *, trees_s: Times, closed_s: Times) -> Times:
    """Blended seconds of each row by its own blend."""
    weight = np.array([blend.weight for blend in blends])
    factor = np.array([blend.factor for blend in blends])
    blended: Times = trees_s**weight * (closed_s * factor) ** (1.0 - weight)
    return blended


def learn_blend(observations: Sequence[Observation], *, seed: int) -> dict[str, Blend]:
    """The blend of each regime, learned from rows that are left out as the ``blend`` of its record says.

    The weight has the smallest mean absolute log error on the rows left out; the factor is the median of measured
    over closed form in all rows. A regime for which the rows are too few has no blend.
    """
    matrix = feature_matrix([observation.query.row for observation in observations], SETUP_FEATURES)
    residual = np.log(
        [observation.measurement.iteration_time_s / observation.closed.iteration_time_s for observation in observations]
    )
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

    def leave_groups_out(group: Callable[[Observation], Hashable]) -> float | None:
        groups = [group(observation) for observation in observations]
        if len(set(groups)) < _FEWEST_GROUPS:
            return None
        folds = split_by_group(groups, folds=min(_FOLDS, len(set(groups))), seed=seed)
        corrections = np.empty(len(observations))
        for fold in np.unique(folds):
            corrections[folds == fold] = predict(folds != fold)
        return choose(corrections, np.arange(len(observations)))

    def leave_large_worlds_out() -> float | None:
        small = np.array([observation.setup.world_size <= _SMALL_WORLD for observation in observations])
        if min(small.sum(), (~small).sum()) < _FEWEST_ROWS:
            return None
        return choose(predict(small), np.flatnonzero(~small))

    @functools.cache
    def weigh(name: str) -> float | None:
        match REGIMES[name].blend:
            case AlwaysTrees():
                return 1.0
            case LeaveGroupsOut(group):
                return leave_groups_out(group)
            case LeaveLargeWorldsOut(otherwise):
                weight = leave_large_worlds_out()
                return weigh(otherwise) if weight is None else weight
            case SmallestOf(regimes):
                weights = [weight for regime in regimes if (weight := weigh(regime)) is not None]
                return min(weights) if len(weights) == len(regimes) else None

    return {name: Blend(weight, factor) for name in REGIMES if (weight := weigh(name)) is not None}
