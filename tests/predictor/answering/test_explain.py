"""An explanation adds up: parts to the closed form, and factors, like XGBoost's contributions, to the answer."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xgboost

from precision_time.predictor.answering.explain import (
    Explanation,
    expected_value,
    explain_query,
    feature_importances,
    gain_importances,
    path_contributions,
)
from precision_time.predictor.learning.blending import CLOSED_FORM_ONLY, Blend
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.learning.trees import FlatForest, flatten_xgboost
from precision_time.predictor.rows.features import FEATURE_GROUPS, SETUP_FEATURES, Query
from precision_time.predictor.rows.observations import Observation, observe
from precision_time.predictor.setup.hardware import find_hardware
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism
from precision_time.predictor.workloads.workload import find_workload
from precision_time.storage.errors import InputError

FEATURES = 5
UNUSED = 4
NAMES = ["wide", "narrow", "noise", "step", "unused"]


def explain(query: Query, predictor: HierarchicalPredictor | None) -> Explanation:
    """The explanation with the blend that the query's regime has."""
    if predictor is None:
        return explain_query(query, predictor=None, blend=CLOSED_FORM_ONLY)
    blend = predictor.blend_of(query.setup, predictor.domain.regime_of(query.setup))
    return explain_query(query, predictor=predictor, blend=blend)


def ask(rows: list[Observation], **changes: Any) -> Query:
    return Query.of(dataclasses.replace(rows[0].setup, **changes))


def predicted_over_closed(predictor: HierarchicalPredictor, query: Query) -> float:
    return float(predictor.predict([query]).iteration_time_s[0] / query.closed.iteration_time_s)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch_size": 500},
        {"world_size": 8, "gradient_accumulation_steps": 4},
        {"implementation": Implementation(checkpointing="full", host_copy=True)},
        {"workload": find_workload("gnmt")},
        {"hardware": find_hardware("RTX4090-24GB")},
    ],
    ids=["known", "batch", "ranks", "implementation", "new family", "new gpu"],
)
def test_the_factors_multiply_to_the_answer_over_the_closed_form(large_predictor, many_rows, changes) -> None:
    query = ask(many_rows, **changes)
    factors = explain(query, large_predictor).factors
    assert math.prod(factors.values()) == pytest.approx(predicted_over_closed(large_predictor, query), rel=1e-5)
    assert set(factors) == {"overall", *FEATURE_GROUPS}


@pytest.mark.parametrize("blend", [Blend(0.3, 1.7), Blend(0.0, 1.7), Blend(1.0, 1.7)])
def test_the_factors_multiply_to_the_answer_in_any_blend(large_predictor, many_rows, blend: Blend) -> None:
    blended = dataclasses.replace(large_predictor, blend={"known": blend})
    query = many_rows[0].query
    factors = explain(query, blended).factors
    assert math.prod(factors.values()) == pytest.approx(predicted_over_closed(blended, query), rel=1e-5)
    if blend.weight == 0:
        assert factors.pop("overall") == pytest.approx(1.7)
        assert set(factors.values()) == {1.0}


def test_in_a_regime_without_a_blend_all_factors_are_1(large_predictor, many_rows) -> None:
    without_blend = dataclasses.replace(large_predictor, blend={})
    assert set(explain(many_rows[0].query, without_blend).factors.values()) == {1.0}


def test_the_deciding_group_has_the_largest_factor(large_predictor, many_rows) -> None:
    # fp32 takes 1.5 and amp_fp16 2.5 times the closed form, and nothing else matters
    by_precision = {}
    for observation in many_rows[:200]:
        factors = explain(observation.query, large_predictor).factors
        by_precision[observation.measurement.precision] = factors
        others = [abs(math.log(factors[group])) for group in ("network", "batch", "ranks and links", "implementation")]
        assert max(others) < abs(math.log(factors["precision"]))
    assert by_precision["fp32"]["precision"] < 1 < by_precision["amp_fp16"]["precision"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"world_size": 32, "nodes": 4},
        {
            "workload": find_workload("llama2_7b"),
            "world_size": 8,
            "parallelism": Parallelism(pipeline=4, tensor=2),
            "gradient_accumulation_steps": 8,
            "implementation": Implementation(checkpointing="full", host_copy=True),
        },
    ],
    ids=["one gpu", "ranks", "pipeline"],
)
def test_the_parts_add_up_to_the_closed_form(many_rows, changes) -> None:
    query = ask(many_rows, **changes)
    parts = explain(query, None).closed_form_s
    assert sum(parts.values()) == pytest.approx(query.closed.iteration_time_s)
    assert min(parts.values()) > 0


def test_parts_that_take_no_time_are_left_out(many_rows) -> None:
    assert set(explain(many_rows[0].query, None).closed_form_s) == {"forward", "backward", "optimizer"}
    copied = ask(many_rows, implementation=Implementation(host_copy=True, checkpointing="full"))
    assert {"host copy", "recomputation"} < set(explain(copied, None).closed_form_s)


def test_without_a_predictor_there_are_no_factors(many_rows) -> None:
    assert explain(many_rows[0].query, None).factors == {}


def test_without_a_total_stage_the_factors_are_those_of_compute(measure) -> None:
    rows = observe(measure())
    predictor = HierarchicalPredictor.fit(rows)
    query = rows[0].query
    factors = explain(query, predictor).factors
    compute_s = predictor.predict([query]).compute_time_s[0]
    assert math.prod(factors.values()) == pytest.approx(compute_s / query.closed.compute_time_s, rel=1e-5)


def test_a_predictor_read_from_files_explains_the_same(large_predictor, many_rows) -> None:
    files = large_predictor.to_files()
    loaded = HierarchicalPredictor.from_files({name: files[name] for name in ("predictor.json", "trees.npz")})
    query = many_rows[7].query
    assert explain(query, loaded) == explain(query, large_predictor)
    # importances need the XGBoost files, which answers do not
    assert feature_importances(loaded) == {}


def test_importances_are_shares_of_the_gain_with_the_largest_first(large_predictor) -> None:
    shares = feature_importances(large_predictor)
    assert set(shares) == set(SETUP_FEATURES)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert next(iter(shares)) in FEATURE_GROUPS["precision"]


def test_an_explanation_is_plain_values(large_predictor, many_rows) -> None:
    values = explain(many_rows[0].query, large_predictor).to_dict()
    assert set(values) == {"closed_form_s", "factors"}
    assert all(type(value) is float for part in values.values() for value in part.values())


# Contributions and gains of single forests, against XGBoost.


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


def test_no_rows_give_no_contributions_and_rows_of_another_shape_are_refused(forest: FlatForest) -> None:
    assert path_contributions(forest, np.empty((0, FEATURES))).shape == (0, FEATURES)
    with pytest.raises(InputError, match="rows do not fit the trees"):
        path_contributions(forest, np.zeros((3, 2)))
    with pytest.raises(InputError, match="rows do not fit the trees"):
        path_contributions(forest, np.zeros(FEATURES))


def test_a_forest_without_covers_is_refused_with_the_fix(booster: xgboost.Booster) -> None:
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
