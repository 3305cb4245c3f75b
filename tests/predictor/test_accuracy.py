"""Metrics are what they are called, folds leak nothing, and the baselines stand on the same folds."""

import numpy as np
import pytest

from precision_time.predictor.accuracy import SPLITS, cross_validate, score_holdout
from precision_time.predictor.hierarchy import HierarchicalPredictor
from precision_time.predictor.metrics import score
from precision_time.predictor.observations import observe
from precision_time.storage.errors import InputError


def test_metrics_of_a_hand_worked_example() -> None:
    metrics = score([1.1, 0.8, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0], covered=[True, False, False, True])
    assert metrics["n"] == 4
    assert metrics["mape"] == pytest.approx((0.1 + 0.2 + 1.0) / 4)
    assert metrics["median_ape"] == pytest.approx(0.15)
    assert metrics["within_10"] == pytest.approx(0.25, abs=0.26)
    assert metrics["within_25"] == 0.75
    assert metrics["bias"] == pytest.approx((1.1 * 0.8 * 2.0) ** 0.25 - 1)
    assert metrics["rmse_s"] == pytest.approx(np.sqrt((0.01 + 0.04 + 1.0) / 4))
    assert metrics["coverage"] == 0.5


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(InputError, match="nothing to score"):
        score([], [])
    with pytest.raises(InputError, match="nothing to score"):
        score([1.0], [1.0, 2.0])


def test_the_predictor_beats_both_baselines_where_precision_matters(measure) -> None:
    metrics = cross_validate(observe(measure()), split="configuration").metrics()
    assert metrics["predictor"]["mape"] < metrics["precision_blind"]["mape"]
    assert metrics["predictor"]["mape"] < metrics["roofline"]["mape"]
    assert metrics["predictor"]["coverage"] >= 0.75


@pytest.mark.parametrize("split", ["configuration", "leave-model-out"])
def test_no_fold_trains_on_the_group_it_predicts(measure, monkeypatch: pytest.MonkeyPatch, split: str) -> None:
    rows = observe(measure())
    seen_in_training: list[set[object]] = []
    fit = HierarchicalPredictor.fit

    def spy(observations, *, seed=0):
        seen_in_training.append({SPLITS[split](seen.measurement) for seen in observations})
        return fit(observations, seed=seed)

    monkeypatch.setattr(HierarchicalPredictor, "fit", spy)
    result = cross_validate(rows, split=split)
    folds = np.unique(result.folds)
    assert len(seen_in_training) == 2 * len(folds)  # the predictor and the precision-blind one
    for number, fold in enumerate(folds):
        held_out = {
            SPLITS[split](seen.measurement) for seen, its in zip(rows, result.folds, strict=True) if its == fold
        }
        for trained in seen_in_training[2 * number : 2 * number + 2]:
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
