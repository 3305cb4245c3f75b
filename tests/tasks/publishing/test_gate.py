"""The gate lets a first artifact through on its merits and a challenger only when it is not worse on the same rows."""

import dataclasses
import json
import math

import numpy as np
import pytest

from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.rows.observations import observe
from precision_time.tasks.publishing.drift import watch_drift
from precision_time.tasks.publishing.gate import chance_of_mean, correct_for_many, judge_challenger
from precision_time.tasks.publishing.report import write_report
from precision_time.tasks.publishing.snapshot import Snapshot
from precision_time.tasks.publishing.validate import validate_predictor
from precision_time.tests.tasks.publishing.made_up import as_champion, make_snapshot


def publish(measurements, radii=None) -> PublishedPredictor:
    return as_champion(HierarchicalPredictor.fit(observe(measurements)).with_intervals(radii or {}, level=0.9))


def scale(measurements, factor):
    """The same rows, each slower by ``factor(number, row)``."""
    return [
        dataclasses.replace(
            row,
            iteration_time_s=row.iteration_time_s * factor(number, row),
            compute_time_s=(row.compute_time_s or 0) * factor(number, row),
            exposed_communication_s=(row.exposed_communication_s or 0) * factor(number, row),
        )
        for number, row in enumerate(measurements)
    ]


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
        snapshot, validation, champion=publish(old), trained=dict.fromkeys(row.cell_id for row in old)
    )
    assert decision.passed
    assert "new since default@7" in " ".join(decision.reasons)


def test_a_challenger_that_is_worse_on_new_rows_is_stopped(measure) -> None:
    # The rows for training contradict each other by a factor of 3, and the champion was trained on the true ones.
    new = measure(batches=(8, 16, 32))
    champion = publish(new)
    confused = scale(new, lambda number, row: 3.0 if number % 2 else 1.0)
    validation = validate_predictor(make_snapshot(observe(confused)), level=0.9, seed=0)
    decision = judge_challenger(make_snapshot(observe(new)), validation, champion=champion, trained={})
    assert not decision.passed


def test_no_new_row_means_nothing_to_publish(snapshot, validation, measure) -> None:
    cells = dict.fromkeys(row.measurement.cell_id for row in snapshot.training)
    decision = judge_challenger(snapshot, validation, champion=publish(measure()), trained=cells)
    assert not decision.passed
    assert "no row is new since default@7" in decision.reasons


def out_of_fold(snapshot: Snapshot, factor) -> dict[str, float | None]:
    """Out-of-fold predictions of a champion that is off by ``factor(measurement)``."""
    rows = [observation.measurement for observation in snapshot.training]
    return {row.cell_id: row.iteration_time_s * factor(row) for row in rows}


def test_a_night_with_few_new_rows_is_judged_on_the_older_ones(snapshot, validation, measure) -> None:
    champion = publish(measure())
    exact, far = out_of_fold(snapshot, lambda row: 1.001), out_of_fold(snapshot, lambda row: 1.5)
    newest = [observation.measurement.cell_id for observation in snapshot.training[:2]]
    held = judge_challenger(
        snapshot, validation, champion=champion, trained={cell: exact[cell] for cell in exact if cell not in newest}
    )
    assert not held.passed
    assert [(comparison.what, comparison.rows, comparison.worse) for comparison in held.comparisons[:2]] == [
        ("new rows", 2, False), ("all rows", 36, True),
    ]  # fmt: skip
    assert held.comparisons[0].chance is None
    passed = judge_challenger(snapshot, validation, champion=champion, trained=far)
    assert passed.passed
    assert [comparison.what for comparison in passed.comparisons] == ["all rows", "amp_bf16", "fp32"]


def test_a_precision_that_gets_worse_holds_a_challenger_back_that_is_better_overall(
    snapshot, validation, measure
) -> None:
    trained = out_of_fold(snapshot, lambda row: 1.001 if row.precision == "amp_bf16" else 2.0)
    decision = judge_challenger(snapshot, validation, champion=publish(measure()), trained=trained)
    judged = {comparison.what: comparison for comparison in decision.comparisons}
    assert judged["all rows"].challenger < judged["all rows"].champion
    assert {name for name, comparison in judged.items() if comparison.worse} == {"amp_bf16"}
    assert not decision.passed
    assert any("18 rows of amp_bf16" in reason for reason in decision.reasons)
    assert json.loads(json.dumps(decision.to_dict()))["comparisons"][1]["what"] == "amp_bf16"


def test_where_no_test_can_tell_the_mean_decides(snapshot, validation, measure) -> None:
    trained: dict[str, float | None] = dict.fromkeys(out_of_fold(snapshot, lambda row: 1.0))
    four = [observation.measurement.cell_id for observation in snapshot.training[:4]]
    for factor, passes in ((1.001, False), (2.0, True)):
        predicted = {
            cell: time_s for cell, time_s in out_of_fold(snapshot, lambda row, by=factor: by).items() if cell in four
        }
        decision = judge_challenger(snapshot, validation, champion=publish(measure()), trained=trained | predicted)
        assert [comparison.chance for comparison in decision.comparisons if comparison.what == "all rows"] == [None]
        assert decision.passed is passes


def test_the_chance_of_a_mean_counts_signs_of_configurations_not_of_replicates() -> None:
    assert chance_of_mean(np.ones(5), range(5)) == pytest.approx(1 / 32)
    assert chance_of_mean(np.ones(20), [number // 4 for number in range(20)]) == pytest.approx(1 / 32)
    assert chance_of_mean(-np.ones(5), range(5)) == 1.0
    assert chance_of_mean(np.array([3.0, -1.0, 1.0]), "abc") == pytest.approx(3 / 8)
    rng = np.random.default_rng(0)
    differences = rng.normal(0.1, 1.0, 16)
    more = np.append(differences, 0.0)
    assert chance_of_mean(more, range(17)) == pytest.approx(chance_of_mean(differences, range(16)), abs=0.03)
    assert chance_of_mean(np.zeros(20), range(20)) == 1.0


def test_of_equal_methods_few_are_held_back() -> None:
    rng = np.random.default_rng(1)
    worse = [chance_of_mean(rng.laplace(size=40), range(40)) < 0.05 for _ in range(2000)]
    assert 0.03 < np.mean(worse) < 0.07


def test_chances_of_several_tests_are_raised_as_holm_says() -> None:
    assert correct_for_many([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert correct_for_many([0.9, 0.8]) == [1.0, 1.0]
    assert correct_for_many([]) == []


def test_the_report_has_the_numbers_of_the_gate_and_of_the_drift_watch(snapshot, validation, measure) -> None:
    champion = publish(measure(models=("mlp",)), {"known": math.log(1.2), "new family": math.log(1.2)})
    trained = dict.fromkeys(row.cell_id for row in measure(models=("mlp",)))
    decision = judge_challenger(snapshot, validation, champion=champion, trained=trained)
    new = [observation for observation in snapshot.training if observation.measurement.cell_id not in trained]
    drift = watch_drift(new, champion=champion)
    text = write_report(snapshot, validation, decision, holdout_models=(), drift=drift)
    assert "| rows of | rows |" in text
    assert f"| new rows | {len(new)} |" in text
    assert "| model | vit_tiny |" in text
    written = text.partition("```json")[2].partition("```")[0]
    assert json.loads(written) == json.loads(json.dumps(decision.to_dict()))


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
