"""Contributions add up to the prediction, agree with XGBoost's own, and importances name what the trees use."""

import dataclasses
import json

import numpy as np
import numpy.typing as npt
import pytest
import xgboost

from precision_time.predictor.learning.contributions import (
    expected_value,
    gain_importances,
    path_contributions,
)
from precision_time.predictor.learning.trees import FlatForest, flatten_xgboost
from precision_time.storage.errors import InputError

FEATURES = 5
UNUSED = 4
NAMES = ["wide", "narrow", "noise", "step", "unused"]


def draw_rows(*, rows: int, seed: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    matrix[:, 3] = np.round(matrix[:, 3])
    matrix[rng.random(matrix.shape) < 0.1] = np.nan
    return matrix


def train(*, depth: int, seed: int = 0, trees: int = 30) -> xgboost.Booster:
    matrix = draw_rows(rows=600, seed=seed)
    clean = np.nan_to_num(matrix)
    target = 3 * clean[:, 0] + clean[:, 1] * clean[:, 3] + np.where(np.isnan(matrix[:, 3]), 2.0, 0.0)
    matrix[:, UNUSED] = 1.0  # a constant column offers no split
    parameters = {"max_depth": depth, "seed": seed, "nthread": 1, "eta": 0.2, "subsample": 0.8, "base_score": 0.5}
    return xgboost.train(parameters, xgboost.DMatrix(matrix, target), num_boost_round=trees)


@pytest.fixture(scope="module")
def booster() -> xgboost.Booster:
    return train(depth=5)


@pytest.fixture(scope="module")
def forest(booster: xgboost.Booster) -> FlatForest:
    return flatten_xgboost(bytes(booster.save_raw("json")))


@pytest.mark.parametrize("depth", [1, 3, 6, 8])
def test_contributions_equal_those_of_xgboost(depth: int) -> None:
    booster = train(depth=depth, seed=depth)
    forest = flatten_xgboost(bytes(booster.save_raw("json")))
    rows = draw_rows(rows=150, seed=100)
    theirs = booster.predict(xgboost.DMatrix(rows), pred_contribs=True, approx_contribs=True)
    np.testing.assert_allclose(path_contributions(forest, rows), theirs[:, :-1], atol=1e-4)
    assert expected_value(forest) == pytest.approx(theirs[0, -1], abs=1e-4)


def test_contributions_and_the_expected_value_sum_to_the_prediction(forest: FlatForest) -> None:
    rows = draw_rows(rows=1500, seed=7)  # more than one chunk of a walk
    rows[0] = 1e30
    rows[1] = np.nan
    rows[2] = np.inf
    rows[3] = -np.inf
    summed = path_contributions(forest, rows).sum(axis=1) + expected_value(forest)
    np.testing.assert_allclose(summed, forest.predict(rows), atol=1e-4)


def test_coarse_covers_still_sum_to_the_prediction(forest: FlatForest) -> None:
    rng = np.random.default_rng(0)
    coarse = dataclasses.replace(forest, cover=rng.uniform(1e-7, 6e4, len(forest.cover)).astype(np.float16))
    rows = draw_rows(rows=20, seed=8)
    summed = path_contributions(coarse, rows).sum(axis=1) + expected_value(coarse)
    np.testing.assert_allclose(summed, coarse.predict(rows), atol=1e-4)


def test_a_feature_no_tree_splits_on_adds_nothing(forest: FlatForest) -> None:
    added = path_contributions(forest, draw_rows(rows=50, seed=9))
    assert (added[:, UNUSED] == 0).all()
    assert (added[:, 0] != 0).all()


def test_trees_without_a_split_leave_all_to_the_expected_value() -> None:
    rows = draw_rows(rows=30, seed=1)
    booster = xgboost.train({"base_score": 2.0}, xgboost.DMatrix(rows, np.full(30, 4.0)), num_boost_round=3)
    forest = flatten_xgboost(bytes(booster.save_raw("json")))
    assert (path_contributions(forest, rows) == 0).all()
    assert expected_value(forest) == pytest.approx(float(forest.predict(rows)[0]))


def test_no_rows_give_no_contributions_and_odd_rows_are_refused(forest: FlatForest) -> None:
    assert path_contributions(forest, np.empty((0, FEATURES))).shape == (0, FEATURES)
    with pytest.raises(InputError, match="rows do not fit the trees"):
        path_contributions(forest, np.zeros((3, 2)))
    with pytest.raises(InputError, match="rows do not fit the trees"):
        path_contributions(forest, np.zeros(FEATURES))


def test_a_forest_without_covers_is_refused_with_the_way_out(booster: xgboost.Booster) -> None:
    bare = flatten_xgboost(bytes(booster.save_raw("json")), keep_cover=False)
    with pytest.raises(InputError, match="keep_cover"):
        path_contributions(bare, draw_rows(rows=2, seed=0))


def test_gain_importances_are_the_normalised_total_gain_of_xgboost(booster: xgboost.Booster) -> None:
    gains = gain_importances(bytes(booster.save_raw("json")), NAMES)
    theirs = booster.get_score(importance_type="total_gain")
    total = sum(theirs.values())
    for number, name in enumerate(NAMES):
        assert gains[name] == pytest.approx(theirs.get(f"f{number}", 0.0) / total, abs=1e-6)
    assert sum(gains.values()) == pytest.approx(1)
    assert next(iter(gains)) == "wide"


def test_gain_of_pruned_splits_does_not_count() -> None:
    rows = draw_rows(rows=200, seed=5)
    data = xgboost.DMatrix(rows, np.nan_to_num(rows[:, 0]))
    booster = xgboost.train(
        {"tree_method": "exact", "max_depth": 4, "gamma": 5.0, "nthread": 1}, data, num_boost_round=5
    )
    gains = gain_importances(bytes(booster.save_raw("json")), NAMES)
    theirs = booster.get_score(importance_type="total_gain")
    assert gains["wide"] == pytest.approx(theirs["f0"] / sum(theirs.values()), abs=1e-6)


def test_gain_importances_refuse_missing_names_and_allow_no_split(booster: xgboost.Booster) -> None:
    with pytest.raises(InputError, match="without a name"):
        gain_importances(bytes(booster.save_raw("json")), NAMES[:2])
    model = json.loads(bytes(booster.save_raw("json")))
    model["learner"]["gradient_booster"]["model"]["trees"] = []
    assert gain_importances(json.dumps(model).encode(), ["a", "b"]) == {"a": 0.0, "b": 0.0}
