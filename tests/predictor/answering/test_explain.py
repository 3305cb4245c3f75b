"""An explanation adds up: parts to the closed form, factors to what the trees made of it."""

import dataclasses
import math
from typing import Any

import pytest

from precision_time.predictor.answering.explain import Explanation, explain_query, feature_importances
from precision_time.predictor.learning.blending import CLOSED_FORM_ONLY, Blend
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.rows.features import FEATURE_GROUPS, SETUP_FEATURES, Query
from precision_time.predictor.rows.observations import Observation, observe
from precision_time.predictor.setup.hardware import find_hardware
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism
from precision_time.predictor.workloads.workload import find_workload


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
def test_they_do_so_in_a_blend_too(large_predictor, many_rows, blend: Blend) -> None:
    blended = dataclasses.replace(large_predictor, blend={"known": blend})
    query = many_rows[0].query
    factors = explain(query, blended).factors
    assert math.prod(factors.values()) == pytest.approx(predicted_over_closed(blended, query), rel=1e-5)
    if blend.weight == 0:
        assert factors.pop("overall") == pytest.approx(1.7)
        assert set(factors.values()) == {1.0}


def test_in_a_regime_that_the_artifact_does_not_speak_of_nothing_is_learned(large_predictor, many_rows) -> None:
    silent = dataclasses.replace(large_predictor, blend={})
    assert set(explain(many_rows[0].query, silent).factors.values()) == {1.0}


def test_what_decides_is_named(large_predictor, many_rows) -> None:
    # fp32 takes 1.5 and amp_fp16 2.5 times the closed form, and nothing else matters
    told = {}
    for seen in many_rows[:200]:
        factors = explain(seen.query, large_predictor).factors
        told[seen.measurement.precision] = factors
        others = [abs(math.log(factors[group])) for group in ("network", "batch", "ranks and links", "implementation")]
        assert max(others) < abs(math.log(factors["precision"]))
    assert told["fp32"]["precision"] < 1 < told["amp_fp16"]["precision"]


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


def test_without_a_predictor_nothing_is_learned(many_rows) -> None:
    assert explain(many_rows[0].query, None).factors == {}


def test_without_a_model_of_the_whole_the_factors_are_those_of_compute(measure) -> None:
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
    # importances need the training library's own files, which an answer does without
    assert feature_importances(loaded) == {}


def test_importances_are_shares_of_the_gain_with_what_decides_first(large_predictor) -> None:
    shares = feature_importances(large_predictor)
    assert set(shares) == set(SETUP_FEATURES)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert list(shares.values()) == sorted(shares.values(), reverse=True)
    assert next(iter(shares)) in FEATURE_GROUPS["precision"]


def test_an_explanation_is_plain_values(large_predictor, many_rows) -> None:
    told = explain(many_rows[0].query, large_predictor).to_dict()
    assert set(told) == {"closed_form_s", "factors"}
    assert all(type(value) is float for part in told.values() for value in part.values())
