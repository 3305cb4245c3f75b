"""Answers to many queries at once: their intervals, regimes and gaps, and which of them the closed forms give."""

import dataclasses

import numpy as np
import pytest

from precision_time.predictor.answering.answers import CLOSED_FORM_LEVEL, CLOSED_FORM_RADIUS, Answers, answer_queries
from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.learning.blending import Blend
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.setup.hardware import find_hardware
from precision_time.predictor.setup.precision import parse_precision
from precision_time.predictor.workloads.workload import find_workload

RADII = {"known": 0.1, "new gpu": 0.3, "new model": 0.4, "new family": 0.5, "beyond scale": 1.2}


@pytest.fixture(scope="module")
def published(large_predictor: HierarchicalPredictor, as_published) -> PublishedPredictor:
    return as_published(large_predictor.with_intervals(RADII, level=0.8))


@pytest.fixture(scope="module")
def known(many_rows: list[Observation]) -> Query:
    """ResNet-50 on one A100 in fp32."""
    return many_rows[0].query


def change(query: Query, **changes: object) -> Query:
    return Query.of(dataclasses.replace(query.setup, **changes))


@pytest.fixture(scope="module")
def questions(known: Query) -> dict[str, Query]:
    """A query of each regime, and queries with a further gap that no regime names."""
    model, other_family = find_workload("resnet18"), find_workload("gnmt")
    gpu = find_hardware("RTX4090-24GB")
    return {
        "known": known,
        "new gpu": change(known, hardware=gpu),
        "new model": change(known, workload=model),
        "new family": change(known, workload=other_family),
        "new model and gpu": change(known, workload=model, hardware=gpu),
        "beyond scale": change(known, world_size=64, nodes=8),
        "new batch": change(known, batch_size=1000),
        "new precision": change(known, precision=parse_precision("tf32")),
        "new gpu and batch": change(known, hardware=gpu, batch_size=1000),
    }


@pytest.fixture(scope="module")
def answers(questions: dict[str, Query], published: PublishedPredictor) -> Answers:
    """All questions answered in one call, in their order."""
    return answer_queries(list(questions.values()), published=published)


def radii(answers: Answers) -> np.ndarray:
    return np.log(answers.high_s / answers.parts.iteration_time_s)


def test_each_query_has_its_regime(answers, questions) -> None:
    named = dict(zip(questions, (regime.name for regime in answers.regimes), strict=True))
    assert named == {name: name for name in list(questions)[:6]} | {
        "new batch": "known", "new precision": "known", "new gpu and batch": "new gpu"
    }  # fmt: skip


@pytest.mark.parametrize("regime", RADII)
def test_a_regime_with_a_radius_has_its_own_interval(answers, questions, regime: str) -> None:
    number = list(questions).index(regime)
    assert answers.has_own_interval[number]
    assert radii(answers)[number] == pytest.approx(RADII[regime])


@pytest.mark.parametrize("name", ["new batch", "new precision", "new gpu and batch", "new model and gpu"])
def test_a_further_gap_or_a_regime_without_a_radius_gets_the_widest_interval(answers, questions, name: str) -> None:
    number = list(questions).index(name)
    assert not answers.has_own_interval[number]
    assert radii(answers)[number] == pytest.approx(max(RADII.values()))
    assert max(RADII.values()) > CLOSED_FORM_RADIUS


def test_intervals_are_symmetric_in_logs_at_the_level_of_the_artifact(answers) -> None:
    np.testing.assert_allclose(answers.low_s * answers.high_s, answers.parts.iteration_time_s**2)
    assert answers.level == 0.8


def test_gaps_list_what_the_training_data_lacks(answers, questions) -> None:
    gaps = dict(zip(questions, answers.gaps, strict=True))
    assert gaps["known"] == ()
    assert "RTX4090-24GB was never measured" in gaps["new gpu"][0]
    assert len(gaps["new model and gpu"]) == 2
    assert "batch 1000" in gaps["new gpu and batch"][0]


def test_the_answers_are_those_of_the_predictor_in_order(answers, questions, published) -> None:
    for number, query in enumerate(questions.values()):
        alone = published.predictor.predict([query])
        assert answers.parts.iteration_time_s[number] == pytest.approx(alone.iteration_time_s[0])
    assert answers.by_artifact.all()


def test_where_the_trees_have_no_weight_the_closed_forms_answer(questions, published, as_published) -> None:
    blended = dataclasses.replace(published.predictor, blend={"known": Blend(1.0, 1.0), "new gpu": Blend(0.0, 1.0)})
    answered = answer_queries(list(questions.values()), published=as_published(blended))
    by_artifact = dict(zip(questions, answered.by_artifact, strict=True))
    assert {name for name, answers_it in by_artifact.items() if answers_it} == {"known", "new batch", "new precision"}
    for number, (name, query) in enumerate(questions.items()):
        if not by_artifact[name]:
            assert answered.parts.iteration_time_s[number] == pytest.approx(query.closed.iteration_time_s)
            assert not answered.has_own_interval[number]


def test_the_widest_interval_is_at_least_the_rule_of_thumb(questions, published, as_published) -> None:
    narrow = as_published(published.predictor.with_intervals({"known": 0.1}, level=0.8))
    answered = answer_queries([questions["known"], questions["new gpu"]], published=narrow)
    np.testing.assert_allclose(radii(answered), [0.1, CLOSED_FORM_RADIUS])


def test_without_an_artifact_the_closed_forms_answer_by_a_rule_of_thumb(questions) -> None:
    queries = list(questions.values())
    answered = answer_queries(queries, published=None)
    np.testing.assert_array_equal(answered.parts.iteration_time_s, [query.closed.iteration_time_s for query in queries])
    np.testing.assert_allclose(radii(answered), CLOSED_FORM_RADIUS)
    assert answered.level == CLOSED_FORM_LEVEL
    assert not answered.by_artifact.any()
    assert not answered.has_own_interval.any()
    assert {regime.name for regime in answered.regimes} == {"new model and gpu"}
    assert set(answered.gaps) == {()}


@pytest.mark.parametrize("by_whom", ["artifact", "closed forms"])
def test_no_queries_give_no_answers(published, by_whom: str) -> None:
    answered = answer_queries([], published=published if by_whom == "artifact" else None)
    assert answered.low_s.shape == answered.by_artifact.shape == answered.parts.iteration_time_s.shape == (0,)
    assert answered.regimes == answered.gaps == ()
