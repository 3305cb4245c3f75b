"""Every split is scored beside its baselines, and only intervals that hold on their split are given out."""

import pytest

from precision_time.predictor.observations import observe
from precision_time.tasks import validate
from precision_time.tasks.train import Snapshot
from precision_time.tasks.validate import (
    chance_of_coverage,
    coverage_holds,
    validate_predictor,
)


def snapshot_of(measurements, holdout=()) -> Snapshot:
    return Snapshot(
        training=tuple(observe(measurements)),
        holdout=tuple(observe(holdout)),
        workloads=(),
        hardware=(),
        sha256="0" * 64,
        problems=(),
    )


@pytest.fixture(scope="module")
def snapshot(measure) -> Snapshot:
    return snapshot_of(measure(), measure(models=("gpt2_mini",)))


@pytest.fixture(scope="module")
def validation(snapshot):
    return validate_predictor(snapshot, level=0.9, seed=0)


def test_every_split_stands_beside_both_baselines(validation) -> None:
    assert set(validation.accuracy) == {"configuration", "leave-model-out", "speed-up", "holdout"}
    for methods in validation.accuracy.values():
        assert set(methods) == {"predictor", "precision_blind", "roofline", "closed_form"}
    assert set(validation.radii) == {"known", "new model", "new family"}


@pytest.mark.parametrize(("covered", "holds"), [(36, True), (30, True), (20, False), (0, False)])
def test_coverage_holds_within_what_chance_allows(covered: int, holds: bool) -> None:
    metrics = {"predictor": {"n": 36.0, "coverage": covered / 36}}
    assert coverage_holds(metrics, level=0.9) is holds


def test_an_interval_that_does_not_hold_on_its_split_is_not_given_out(snapshot, monkeypatch) -> None:
    monkeypatch.setattr(validate, "coverage_holds", lambda metrics, level: metrics["predictor"]["coverage"] > 0.999)
    radii = validate_predictor(snapshot, level=0.9, seed=0)
    held = {split for split, methods in radii.accuracy.items() if (methods["predictor"]["coverage"] or 0) > 0.999}
    assert set(radii.radii) == {{"configuration": "known", "leave-model-out": "new model"}[split] for split in held}
    assert len(radii.radii) < 2


def test_chance_of_coverage_is_the_binomial_tail() -> None:
    assert chance_of_coverage(10, 10, 0.9) == pytest.approx(1.0)
    assert chance_of_coverage(0, 10, 0.9) == pytest.approx(0.1**10)
    assert chance_of_coverage(8, 10, 0.9) == pytest.approx(1 - 0.9**10 - 10 * 0.9**9 * 0.1)
