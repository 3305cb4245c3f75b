"""New measurements are compared with the champion's intervals, by GPU and by model; a few are not enough."""

import dataclasses
import json
import math

import pytest

from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.rows.observations import observe
from precision_time.tasks.publishing.drift import watch_drift
from precision_time.tests.tasks.publishing.made_up import as_champion


@pytest.fixture(scope="module")
def champion(measure) -> PublishedPredictor:
    radius = {"known": math.log(1.3)}
    return as_champion(HierarchicalPredictor.fit(observe(measure())).with_intervals(radius, level=0.9))


def remeasure(measure, *, slower: dict[str, float], **what: object):
    """New measurements in which models are ``slower`` by a factor."""
    return observe(
        dataclasses.replace(row, iteration_time_s=row.iteration_time_s * slower.get(row.model, 1.0))
        for row in measure(seed=1, **what)
    )


def test_the_same_world_holds(champion, measure) -> None:
    report = watch_drift(remeasure(measure, slower={}), champion=champion)
    assert report.verdict == "holds"
    assert [(row.by, row.group, row.rows) for row in report.rows] == [
        ("all", "all", 36), ("gpu", "A100-SXM4-80GB", 36),
        ("model", "bert_mini", 12), ("model", "mlp", 12), ("model", "vit_tiny", 12),
    ]  # fmt: skip
    assert all(row.inside == row.judged == row.rows and 0.9 < row.bias < 1.1 for row in report.rows)


def test_one_model_that_became_slower_is_named_with_how_much(champion, measure) -> None:
    report = watch_drift(remeasure(measure, slower={"mlp": 2.0}), champion=champion)
    assert report.verdict == "drifting"
    by_group = {row.group: row for row in report.rows}
    assert by_group["mlp"].verdict == "drifting"
    assert by_group["mlp"].bias == pytest.approx(2.0, rel=0.1)
    assert by_group["mlp"].inside == 0
    assert by_group["vit_tiny"].verdict == "holds"
    assert "drifting: " in report.summary
    assert "model mlp" in report.summary
    assert json.loads(json.dumps(report.to_dict()))["verdict"] == "drifting"
    assert len(report.table()) == 5


def test_few_rows_and_rows_without_an_interval_say_nothing(champion, measure) -> None:
    few = remeasure(measure, slower={"mlp": 9.0}, models=("mlp",))[:7]
    assert watch_drift(few, champion=champion).verdict == "too few"
    unknown = remeasure(measure, slower={"gpt2_mini": 9.0}, models=("gpt2_mini",))
    report = watch_drift(unknown, champion=champion)
    assert report.verdict == "too few"
    assert report.rows[0].judged == 0
    assert report.rows[0].bias > 5
    nothing = watch_drift([], champion=champion)
    assert (nothing.verdict, nothing.rows) == ("too few", ())
    assert "no measurement is new" in nothing.summary
