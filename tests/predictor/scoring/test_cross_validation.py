"""Cross-validation: folds leak nothing, baselines use the same folds, and intervals and speed-ups follow from them."""

from dataclasses import replace

import numpy as np
import pytest

from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.learning.intervals import radii_by_regime
from precision_time.predictor.learning.splits import SPLITS
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.observations import Observation, observe
from precision_time.predictor.scoring.cross_validation import (
    METHODS,
    CrossValidation,
    cross_validate,
    cross_validate_all,
    cross_validation_table,
    measure_speed_up,
    score_holdout,
)
from precision_time.storage.errors import InputError


def make_contest_row(observation: Observation) -> Observation:
    """The same row as a submission to a benchmark contest."""
    tuned = replace(observation.setup, implementation=replace(observation.setup.implementation, tuned=True))
    return replace(observation, query=Query.of(tuned))


def enlarge(observation: Observation, *, world_size: int) -> Observation:
    """The same row on more GPUs, with the same time."""
    nodes = max(1, world_size // 8)
    measured = replace(observation.measurement, world_size=world_size, nodes=nodes, communication_time_s=None)
    setup = replace(observation.setup, world_size=world_size, nodes=nodes)
    return replace(observation, measurement=measured, query=Query.of(setup))


def make_result(measured_s: list[float], predicted_s: list[float]) -> CrossValidation:
    """A cross-validation with the given seconds, in one fold."""
    return CrossValidation(
        split="row",
        rows=np.arange(len(measured_s)),
        measured_s=np.array(measured_s),
        predicted_s={"predictor": np.array(predicted_s)},
        folds=np.zeros(len(measured_s), dtype=np.int64),
        regimes=("known",) * len(measured_s),
        covered=None,
        level=0.9,
    )


def test_the_predictor_beats_both_baselines_where_precision_matters(measure) -> None:
    metrics = cross_validate(observe(measure()), split="configuration").metrics()
    assert metrics["predictor"]["mape"] < metrics["precision_blind"]["mape"]
    assert metrics["predictor"]["mape"] < metrics["roofline"]["mape"]
    assert metrics["predictor"]["coverage"] >= 0.75


@pytest.mark.parametrize("split", ["configuration", "leave-model-out"])
def test_no_fold_trains_on_the_group_it_predicts(measure, monkeypatch: pytest.MonkeyPatch, split: str) -> None:
    rows = observe(measure())
    group = SPLITS[split].group
    trained_groups: list[set[object]] = []
    fit = HierarchicalPredictor.fit

    def spy(observations, *, seed=0):
        trained_groups.append({group(observation) for observation in observations})
        return fit(observations, seed=seed)

    monkeypatch.setattr(HierarchicalPredictor, "fit", spy)
    result = cross_validate(rows, split=split)
    folds = np.unique(result.folds)
    assert len(trained_groups) == 2 * len(folds)  # the predictor and the precision-blind one
    for number, fold in enumerate(folds):
        held_out = {group(rows[row]) for row in result.rows[result.folds == fold]}
        for trained in trained_groups[2 * number : 2 * number + 2]:
            assert not trained & held_out


def test_replicates_share_a_fold(measure) -> None:
    rows = observe(measure(seed=1) + measure(seed=2))
    folds = cross_validate(rows, split="configuration").folds
    half = len(rows) // 2
    np.testing.assert_array_equal(folds[:half], folds[half:])


def test_an_unseen_model_gets_a_wider_radius_than_a_known_one(measure) -> None:
    rows = observe(measure(models=("mlp", "vit_tiny", "bert_mini", "gpt2_mini")))
    known = cross_validate(rows, split="configuration").radius()
    unseen = cross_validate(rows, split="leave-model-out").radius()
    assert known is not None
    assert unseen is not None
    assert unseen > known


def test_too_few_rows_give_no_radius_and_no_coverage(measure) -> None:
    rows = observe(measure(models=("mlp", "vit_tiny"), batches=(8, 16), world_sizes=(1,)))
    result = cross_validate(rows, split="configuration")
    assert result.radius() is None
    assert result.metrics()["predictor"]["coverage"] is None


def test_a_held_out_model_is_scored_by_all_methods(measure) -> None:
    train, holdout = observe(measure()), observe(measure(models=("gpt2_mini",)))
    metrics = score_holdout(train, holdout)
    assert set(metrics) == {"predictor", "precision_blind", "roofline", "closed_form"}
    assert all(values["n"] == len(holdout) for values in metrics.values())
    # gpt2_mini's own factor is 1.05, within what the other models' factors span
    assert metrics["predictor"]["mape"] < 0.35


def test_large_jobs_are_predicted_from_small_ones_whose_own_division_sets_the_intervals(measure) -> None:
    small = observe(measure(world_sizes=(1, 2)))
    middle = [enlarge(observation, world_size=4) for observation in small]
    large = [enlarge(observation, world_size=16) for observation in small]
    rows = [*small, *middle, *large]
    result = cross_validate(rows, split="scale")
    np.testing.assert_array_equal(result.rows, np.arange(len(rows))[-len(large) :])
    inner = HierarchicalPredictor.fit(small)
    predicted = inner.predict([observation.query for observation in middle]).iteration_time_s
    errors = np.log([observation.measurement.iteration_time_s for observation in middle] / predicted)
    regimes = [inner.domain.regime_of(observation.setup).name for observation in middle]
    radii = radii_by_regime(errors, regimes, level=0.9)
    radius = [radii[regime] for regime in result.regimes]
    assert result.covered is not None
    np.testing.assert_array_equal(result.covered, np.abs(result.log_errors()) <= radius)
    # without middle-sized jobs nothing sets the interval
    assert cross_validate([*small, *large], split="scale").metrics()["predictor"]["coverage"] is None


def test_the_roofline_is_the_closed_form_times_the_factor_of_the_training_rows(measure) -> None:
    rows = observe(measure())
    result = cross_validate(rows, split="leave-model-out")
    for fold in np.unique(result.folds):
        train, test = result.folds != fold, result.folds == fold
        factor = np.exp(np.median(np.log(result.measured_s / result.predicted_s["closed_form"])[train]))
        np.testing.assert_allclose(
            result.predicted_s["roofline"][test], factor * result.predicted_s["closed_form"][test]
        )


def test_contest_rows_are_trained_on_but_scored_apart(measure) -> None:
    rows = observe(measure())
    rows = [make_contest_row(row) if number % 3 == 0 else row for number, row in enumerate(rows)]
    results = cross_validate_all(rows, splits=["leave-model-out"], processes=1)
    whole, without = results["leave-model-out"], results["leave-model-out without MLPerf"]
    ordinary = [number for number in range(len(rows)) if number % 3]
    np.testing.assert_array_equal(without.rows, ordinary)
    np.testing.assert_array_equal(without.predicted_s["predictor"], whole.predicted_s["predictor"][ordinary])
    np.testing.assert_array_equal(without.covered, whole.covered[ordinary])
    assert len(without.regimes) == len(ordinary)


def test_without_contest_rows_there_is_nothing_to_score_apart(measure) -> None:
    results = cross_validate_all(observe(measure()), splits=["configuration"], processes=1)
    assert list(results) == ["configuration"]


def test_speed_up_compares_times_that_differ_in_nothing_but_precision(measure) -> None:
    rows = observe(measure(models=("mlp", "vit_tiny"), precisions=("fp32", "tf32", "amp_fp16"), noise=0.0))
    results = cross_validate_all(rows, splits=["leave-model-out"], processes=1)
    speed_up = results["speed-up"]
    assert len(speed_up.rows) == 2 * len(rows) / 3  # over fp32 and over tf32
    for row, ratio in zip(speed_up.rows, speed_up.measured_s, strict=True):
        narrow = rows[row]
        assert narrow.setup.precision.name == "amp_fp16"
        ratios = [
            observation.measurement.iteration_time_s / narrow.measurement.iteration_time_s
            for observation in rows
            if replace(observation.measurement, precision="").configuration
            == replace(narrow.measurement, precision="").configuration
        ]
        assert any(ratio == pytest.approx(expected) for expected in ratios)
    np.testing.assert_allclose(speed_up.predicted_s["precision_blind"], 1.0)
    assert speed_up.metrics()["predictor"]["median_ape"] < speed_up.metrics()["precision_blind"]["median_ape"]


def test_repeats_of_a_pair_count_by_their_median(measure) -> None:
    rows = observe(measure(models=("mlp",), world_sizes=(1,), batches=(8,)))
    fp32, half = rows
    repeated = [fp32, half, fp32, fp32]
    result = make_result([2.0, 1.0, 4.0, 30.0], [6.0, 2.0, 6.0, 6.0])
    speed_up = measure_speed_up(result, repeated)
    assert speed_up is not None
    np.testing.assert_array_equal(speed_up.measured_s, [4.0])
    np.testing.assert_array_equal(speed_up.predicted_s["predictor"], [3.0])
    np.testing.assert_array_equal(speed_up.rows, [1])
    assert measure_speed_up(make_result([1.0], [1.0]), [fp32]) is None


def test_the_table_has_five_figures_a_method_and_nothing_else(measure) -> None:
    rows = observe(measure())
    table = cross_validation_table(cross_validate_all(rows, splits=["row", "leave-model-out"], processes=1))
    assert set(table) == {"row", "leave-model-out", "speed-up"}
    for methods in table.values():
        assert list(methods) == list(METHODS)
        for figures in methods.values():
            assert set(figures) == {"n", "mape", "median_ape", "p90_ape", "coverage_90"}
            assert all(value is None or isinstance(value, float) for value in figures.values())
    assert table["row"]["predictor"]["n"] == len(rows)
    assert table["row"]["roofline"]["coverage_90"] is None
    assert table["speed-up"]["predictor"]["coverage_90"] is None


def test_a_coverage_at_another_level_is_not_called_that_of_ninety_percent(measure) -> None:
    result = cross_validate(observe(measure()), split="configuration", level=0.8)
    assert result.metrics()["predictor"]["coverage"] is not None
    assert cross_validation_table({"configuration": result})["configuration"]["predictor"]["coverage_90"] is None


def test_unknown_splits_and_methods_are_refused(measure) -> None:
    rows = observe(measure())
    with pytest.raises(InputError, match="unknown split"):
        cross_validate(rows, split="by moon")
    with pytest.raises(InputError, match="unknown method"):
        cross_validate(rows, split="row", methods=("predictor", "oracle"))
    with pytest.raises(InputError, match="nothing to compare with"):
        cross_validate(rows, split="row", methods=("roofline",))
