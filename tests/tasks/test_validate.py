"""The gate lets a first artifact through on its merits and a challenger only when it is not worse on new rows."""

import dataclasses

import numpy as np
import pytest

from precision_time.predictor.artifact import PublishedPredictor
from precision_time.predictor.hierarchy import HierarchicalPredictor
from precision_time.predictor.observations import observe
from precision_time.tasks import validate
from precision_time.tasks.report import write_report
from precision_time.tasks.train import Snapshot
from precision_time.tasks.validate import (
    chance_of_coverage,
    coverage_holds,
    is_worse,
    judge_challenger,
    validate_predictor,
)


class Manifest:
    artifact_id = "default@7"


def snapshot_of(measurements, holdout=()) -> Snapshot:
    return Snapshot(
        training=tuple(observe(measurements)),
        holdout=tuple(observe(holdout)),
        workloads=(),
        hardware=(),
        sha256="0" * 64,
        problems=(),
    )


def publish(measurements) -> PublishedPredictor:
    predictor = HierarchicalPredictor.fit(observe(measurements))
    return PublishedPredictor(manifest=Manifest(), predictor=predictor, workloads=(), hardware=())  # type: ignore[arg-type]


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


def test_a_first_artifact_passes_on_coverage_and_a_win_over_the_closed_forms(snapshot, validation) -> None:
    decision = judge_challenger(snapshot, validation, champion=None)
    assert decision.passed
    assert "beats the closed forms" in " ".join(decision.reasons)


def test_a_loss_to_the_closed_forms_or_broken_coverage_stops_it(snapshot, validation) -> None:
    worse = {
        split: {name: dict(values) for name, values in methods.items()}
        for split, methods in validation.accuracy.items()
    }
    worse["configuration"]["predictor"]["mape"] = 9.0
    decision = judge_challenger(snapshot, dataclasses.replace(validation, accuracy=worse), champion=None)
    assert not decision.passed
    assert "does not beat" in " ".join(decision.reasons)
    worse["configuration"]["predictor"].update(mape=0.001, coverage=0.3)
    decision = judge_challenger(snapshot, dataclasses.replace(validation, accuracy=worse), champion=None)
    assert not decision.passed
    assert "does not hold" in " ".join(decision.reasons)


def test_a_challenger_that_knows_the_new_rows_replaces_a_champion_that_does_not(snapshot, validation, measure) -> None:
    old = measure(models=("mlp",))
    decision = judge_challenger(
        snapshot, validation, champion=publish(old), champion_cells=frozenset(row.cell_id for row in old)
    )
    assert decision.passed
    assert "new since default@7" in " ".join(decision.reasons)


def test_a_challenger_that_is_worse_on_new_rows_is_stopped(measure) -> None:
    # The new rows contradict each other by a factor of 3, while the champion happens to know them.
    new = measure(batches=(8, 16, 32))
    champion = publish(new)
    confused = [
        dataclasses.replace(
            row,
            iteration_time_s=row.iteration_time_s * (3.0 if number % 2 else 1.0),
            compute_time_s=(row.compute_time_s or 0) * (3.0 if number % 2 else 1.0),
        )
        for number, row in enumerate(new)
    ]
    validation = validate_predictor(snapshot_of(confused), level=0.9, seed=0)
    decision = judge_challenger(snapshot_of(new), validation, champion=champion, champion_cells=frozenset())
    assert not decision.passed


def test_no_new_row_means_nothing_to_publish(snapshot, validation, measure) -> None:
    cells = frozenset(seen.measurement.cell_id for seen in snapshot.training)
    decision = judge_challenger(snapshot, validation, champion=publish(measure()), champion_cells=cells)
    assert not decision.passed
    assert "no row is new since default@7" in decision.reasons


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


def test_worse_by_more_than_chance_is_worse() -> None:
    rng = np.random.default_rng(0)
    small, large = rng.normal(0, 0.1, 50), rng.normal(0, 0.3, 50)
    assert is_worse(large, than=small)
    assert not is_worse(small, than=large)
    assert not is_worse(small, than=rng.permutation(small))


def test_chance_of_coverage_is_the_binomial_tail() -> None:
    assert chance_of_coverage(10, 10, 0.9) == pytest.approx(1.0)
    assert chance_of_coverage(0, 10, 0.9) == pytest.approx(0.1**10)
    assert chance_of_coverage(8, 10, 0.9) == pytest.approx(1 - 0.9**10 - 10 * 0.9**9 * 0.1)


def test_the_report_shows_no_figure_without_its_baselines(snapshot, validation) -> None:
    decision = judge_challenger(snapshot, validation, champion=None)
    text = write_report(snapshot, validation, decision, holdout_models=("gpt2_mini",))
    assert "Never trained on: gpt2_mini" in text
    for row in (
        "5-fold by configuration | predictor",
        "5-fold by configuration | precision-blind",
        "5-fold by configuration | roofline x factor",
        "leave model out | predictor",
        "held-out models | predictor",
    ):
        assert f"| {row} |" in text
    assert "Gate: passed" in text
