"""Boosting: complete parameters, repeatable fits, and corrections of rows that the trees were not trained on."""

import json
import warnings

import numpy as np
import pytest

from precision_time.predictor.learning import boosting as learner
from precision_time.predictor.learning.boosting import FEWEST_FOR_MANY, boost, boost_out_of_fold, choose_parameters
from precision_time.predictor.learning.trees import FlatForest, flatten_xgboost

SMALL: learner.Parameters = {
    "objective": "reg:squarederror", "tree_method": "hist", "nthread": 1, "rounds": 40, "max_depth": 3, "eta": 0.3,
    "min_child_weight": 1.0, "lambda": 1.0, "subsample": 0.8,
}  # fmt: skip


def made_up(rows: int = 200, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of three columns, of which the first alone matters, and their targets."""
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(-1, 1, size=(rows, 3)).astype(np.float32)
    return matrix, np.where(matrix[:, 0] > 0, 1.0, -1.0)


def count_trees(model: bytes) -> int:
    return len(json.loads(model)["learner"]["gradient_booster"]["model"]["trees"])


def predict(model: bytes, matrix: np.ndarray) -> np.ndarray:
    forest: FlatForest = flatten_xgboost(model)
    return forest.predict(matrix)


@pytest.mark.parametrize("rows", [FEWEST_FOR_MANY - 1, FEWEST_FOR_MANY])
def test_the_parameters_hold_all_that_a_fit_needs(rows: int) -> None:
    parameters = choose_parameters(rows)
    needed = {"objective", "tree_method", "nthread", "rounds", "max_depth", "eta", "min_child_weight", "lambda",
              "subsample", "colsample_bytree"}  # fmt: skip
    assert needed <= parameters.keys()
    # the same trees on any machine
    assert parameters["nthread"] == 1
    assert int(parameters["rounds"]) == parameters["rounds"] > 0
    assert 0 < float(parameters["eta"]) <= 1
    assert 0 < float(parameters["subsample"]) <= 1
    assert 0 < float(parameters["colsample_bytree"]) <= 1


def test_xgboost_knows_every_parameter() -> None:
    matrix, targets = made_up(40)
    with warnings.catch_warnings(record=True) as caught:  # xgboost only warns of an unused parameter
        warnings.simplefilter("always")
        for rows in (1, FEWEST_FOR_MANY):
            boost(matrix, targets, parameters=choose_parameters(rows), seed=0, rounds=1)
    assert not [warning for warning in caught if "not used" in str(warning.message)]


def test_a_large_table_has_parameters_of_its_own() -> None:
    few, many = choose_parameters(FEWEST_FOR_MANY - 1), choose_parameters(FEWEST_FOR_MANY)
    assert few == choose_parameters(4)
    assert many == choose_parameters(10**6)
    assert many != few


def test_changing_chosen_parameters_does_not_change_the_next_choice() -> None:
    choose_parameters(1)["rounds"] = 0
    assert choose_parameters(1)["rounds"] != 0


def test_the_same_rows_and_seed_give_the_same_bytes_and_another_seed_others() -> None:
    matrix, targets = made_up()
    first = boost(matrix, targets, parameters=SMALL, seed=3)
    assert boost(matrix, targets, parameters=SMALL, seed=3) == first
    assert boost(matrix, targets, parameters=SMALL, seed=4) != first


def test_trees_learn_what_decides_the_target() -> None:
    matrix, targets = made_up()
    unseen, truth = made_up(seed=1)
    assert np.abs(predict(boost(matrix, targets, parameters=SMALL, seed=0), unseen) - truth).mean() < 0.1


def test_a_missing_value_can_decide_a_split() -> None:
    matrix, targets = made_up()
    matrix[targets < 0, 0] = np.nan
    model = boost(matrix, targets, parameters=SMALL, seed=0)
    assert predict(model, np.array([[np.nan, 0, 0]], np.float32))[0] < -0.8


def test_rounds_come_from_the_argument_or_the_parameters() -> None:
    matrix, targets = made_up()
    assert count_trees(boost(matrix, targets, parameters=SMALL, seed=0)) == 40
    assert count_trees(boost(matrix, targets, parameters=SMALL, seed=0, rounds=7)) == 7


def test_trees_start_from_the_median() -> None:
    matrix, _ = made_up(5)
    model = boost(matrix, np.array([1.0, 2.0, 3.0, 4.0, 1e6]), parameters=SMALL, seed=0, rounds=1)
    assert flatten_xgboost(model).base_score[0] == 3.0


def test_a_row_of_more_weight_is_fitted_more_closely() -> None:
    matrix = np.zeros((4, 1), np.float32)
    targets = np.array([0.0, 0.0, 0.0, 1.0])
    plain = SMALL | {"subsample": 1.0}
    even = predict(boost(matrix, targets, parameters=plain, seed=0), matrix)[0]
    leaning = boost(matrix, targets, parameters=plain, seed=0, weights=np.array([1.0, 1.0, 1.0, 9.0]))
    assert even == pytest.approx(0.25, abs=0.02)
    assert predict(leaning, matrix)[0] == pytest.approx(0.75, abs=0.02)


def test_a_correction_does_not_depend_on_the_targets_of_its_own_group() -> None:
    matrix, targets = made_up(60)
    groups = [number // 6 for number in range(60)]
    one_round = SMALL | {"rounds": 1}  # so that the number of rounds, which all rows choose, cannot change
    _, before = boost_out_of_fold(matrix, targets, groups=groups, parameters=one_round, seed=0)
    changed = targets.copy()
    changed[:6] += 50.0
    _, after = boost_out_of_fold(matrix, changed, groups=groups, parameters=one_round, seed=0)
    np.testing.assert_array_equal(after[:6], before[:6])
    assert (after[6:] != before[6:]).any()


def test_a_group_is_corrected_by_trees_that_were_not_trained_on_it() -> None:
    # each group has a column value of its own and the opposite target of its neighbours: trees trained on it are exact
    groups = [number // 10 for number in range(100)]
    targets = np.repeat([1.0, -1.0] * 5, 10)
    matrix = np.array(groups, np.float32)[:, None]
    model, corrections = boost_out_of_fold(matrix, targets, groups=groups, parameters=SMALL, seed=0)
    assert np.abs(corrections - targets).mean() > 0.5
    trained_on_all = boost(matrix, targets, parameters=SMALL, seed=0)
    assert np.abs(predict(trained_on_all, matrix) - targets).mean() < 0.1
    assert count_trees(model) < 40


def test_rounds_are_many_where_there_is_something_to_learn_and_few_in_noise() -> None:
    matrix, targets = made_up()
    groups = list(range(200))
    slow = SMALL | {"eta": 0.1}
    learned, corrections = boost_out_of_fold(matrix, targets, groups=groups, parameters=slow, seed=0)
    assert count_trees(learned) > 20
    assert np.abs(corrections - targets).mean() < 0.2
    noise = np.random.default_rng(5).normal(size=200)
    noisy, _ = boost_out_of_fold(matrix, noise, groups=groups, parameters=slow, seed=0)
    assert count_trees(noisy) < 10
