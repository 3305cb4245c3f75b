"""Trials have the same outcome in one process and in several, and describe rows as their method needs."""

from dataclasses import replace

import numpy as np
import pytest

from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.learning.splits import Fold
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.observations import observe
from precision_time.predictor.scoring import trials
from precision_time.predictor.scoring.cross_validation import cross_validate, cross_validate_all
from precision_time.predictor.scoring.trials import ABLATIONS, Trial, run_trials
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.storage.errors import InputError


def half_and_half(rows: int, method: str = "predictor") -> Trial:
    positions = np.arange(rows)
    fold = Fold(train=positions[::2], test=positions[1::2])
    return Trial(split="row", fold=0, method=method, rows=fold)


def test_two_processes_give_the_same_as_one(measure) -> None:
    rows = observe(measure(models=("mlp", "vit_tiny")))
    reports: list[tuple[int, int]] = []
    alone = cross_validate_all(rows, splits=["leave-model-out"], processes=1)
    shared = cross_validate_all(
        rows, splits=["leave-model-out"], processes=2, progress=lambda done, total: reports.append((done, total))
    )
    assert list(shared) == list(alone)
    for split, result in shared.items():
        assert result.regimes == alone[split].regimes
        for method, values in result.predicted_s.items():
            np.testing.assert_array_equal(values, alone[split].predicted_s[method])
    assert reports == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_an_error_in_a_process_reaches_the_caller_in_its_words(measure) -> None:
    rows = observe(measure(models=("mlp",), batches=(8,), world_sizes=(1,), precisions=("fp32", "tf32")))
    with pytest.raises(InputError, match="too few measurements to train on"):
        run_trials([half_and_half(2)] * 2, rows, seed=0, processes=2, progress=None)


def test_no_process_at_all_is_refused(measure) -> None:
    with pytest.raises(InputError, match="number of processes"):
        run_trials([], observe(measure()), seed=0, processes=0, progress=None)


def test_the_precision_blind_method_describes_every_row_as_fp32(measure, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = observe(measure())
    described: list[set[str]] = []
    fit = HierarchicalPredictor.fit

    def spy(observations, *, seed=0):
        described.append({observation.setup.precision.name for observation in observations})
        return fit(observations, seed=seed)

    monkeypatch.setattr(HierarchicalPredictor, "fit", spy)
    run_trials(
        [half_and_half(len(rows)), half_and_half(len(rows), "precision_blind")],
        rows,
        seed=0,
        processes=1,
        progress=None,
    )
    assert described == [{"fp32", "amp_bf16"}, {"fp32"}]


def test_a_row_that_cannot_be_described_as_fp32_stays_as_it_is(measure, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = observe(measure())
    describe = Query.of

    def refuse(setup: TrainingSetup) -> Query:
        if setup.precision.name == "fp32" and setup.workload.name == "mlp":
            raise InputError("too wide for this device")
        return describe(setup)

    monkeypatch.setattr(trials.Query, "of", refuse)
    result = cross_validate(rows, split="configuration")
    assert np.isfinite(result.predicted_s["precision_blind"]).all()


@pytest.mark.parametrize("method", ABLATIONS)
def test_an_ablation_is_another_class_of_the_same_fit(measure, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    rows = observe(measure())
    fit, fitted = HierarchicalPredictor.fit.__func__, []

    def spy(kind, observations, *, seed=0):
        fitted.append(kind)
        return fit(kind, observations, seed=seed)

    monkeypatch.setattr(HierarchicalPredictor, "fit", classmethod(spy))
    result = cross_validate(rows, split="leave-model-out", methods=("predictor", method))
    assert set(result.predicted_s) == {"predictor", method}
    assert fitted == [HierarchicalPredictor, ABLATIONS[method]] * 3


def test_regimes_are_distances_from_the_training_rows(measure) -> None:
    rows = observe(measure(models=("mlp", "vit_tiny")))
    train = [number for number, observation in enumerate(rows) if observation.setup.workload.name == "mlp"]
    test = [number for number in range(len(rows)) if number not in train]
    trial = Trial(
        split="leave-model-out", fold=0, method="predictor", rows=Fold(train=np.array(train), test=np.array(test))
    )
    ((times, regimes),) = run_trials([trial], rows, seed=0, processes=1, progress=None)
    assert set(regimes) == {"new family"}
    assert times.shape == (len(test),)
    known = replace(trial, rows=Fold(train=np.arange(len(rows)), test=np.array(test)))
    assert set(run_trials([known], rows, seed=0, processes=1, progress=None)[0][1]) == {"known"}
