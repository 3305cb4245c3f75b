"""Boosted trees: the one place that trains XGBoost, with the tuned parameters of ``data/parameters.toml``."""

import functools
import tomllib
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.folds import split_by_group
from precision_time.predictor.learning.trees import flatten_xgboost
from precision_time.predictor.shipped import shipped_text

__all__ = ["FEWEST_FOR_MANY", "STACK_FOLDS", "boost", "boost_out_of_fold", "choose_parameters"]

Parameters = dict[str, float | int | str]

#: From this many rows on, the parameters for large tables are used.
FEWEST_FOR_MANY = 1000
STACK_FOLDS = 5

#: One thread: results do not depend on the machine, and small fits are faster.
_FIXED: Parameters = {"objective": "reg:pseudohubererror", "tree_method": "hist", "nthread": 1}


@functools.cache
def _tuned() -> dict[str, Parameters]:
    return tomllib.loads(shipped_text("parameters.toml"))


def choose_parameters(rows: int) -> Parameters:
    """The parameters, ``rounds`` among them, for a table of this many rows."""
    return _FIXED | _tuned()["many" if rows >= FEWEST_FOR_MANY else "few"]


def boost(
    matrix: npt.NDArray[np.float32],
    targets: npt.NDArray[np.float64],
    *,
    parameters: Parameters,
    seed: int,
    rounds: int | None = None,
    weights: npt.NDArray[np.float64] | None = None,
) -> bytes:
    """Fit trees on rows of shape (n, features); returns XGBoost's JSON. Missing values are NaN."""
    import xgboost  # heavy, and needed for training only

    options = {name: value for name, value in parameters.items() if name != "rounds"}
    options |= {"seed": seed, "base_score": float(np.median(targets))}
    data = xgboost.DMatrix(matrix, targets, weight=weights)
    number = int(parameters["rounds"]) if rounds is None else rounds
    return bytes(xgboost.train(options, data, num_boost_round=number).save_raw("json"))


def boost_out_of_fold(
    matrix: npt.NDArray[np.float32],
    targets: npt.NDArray[np.float64],
    *,
    groups: Sequence[Hashable],
    parameters: Parameters,
    seed: int,
) -> tuple[bytes, npt.NDArray[np.float64]]:
    """Fit boosted trees; returns XGBoost's JSON and each row's correction by trees that were not trained on its group.

    The number of rounds is the best for rows left out of inner folds (mean absolute error), so that the answer for a
    few noisy rows ends near their median instead of fitting the noise.
    """
    after_round = np.empty((len(targets), int(parameters["rounds"])))
    folds = split_by_group(groups, folds=STACK_FOLDS, seed=seed)
    for fold in np.unique(folds):
        is_train = folds != fold
        forest = flatten_xgboost(boost(matrix[is_train], targets[is_train], parameters=parameters, seed=seed))
        after_round[~is_train] = forest.base_score[0] + forest.leaf_values(matrix[~is_train]).cumsum(axis=1)
    rounds = int(np.abs(after_round - targets[:, None]).mean(axis=0).argmin()) + 1
    return boost(matrix, targets, parameters=parameters, seed=seed, rounds=rounds), after_round[:, rounds - 1]
