"""Data with too many columns to judge before training: the guard judges the weights of the first epochs instead."""

import math
import warnings
from typing import Any

import numpy as np
import pytest

from precision_time.casgd.communicator import OneProcess
from precision_time.casgd.errors import InputError, PrecisionWarning
from precision_time.casgd.estimators import CASGDClassifier, CASGDRegressor
from precision_time.casgd.guard import choose_policy
from precision_time.casgd.guarded_training import GuardSettings, train_guarded
from precision_time.casgd.objectives import SQUARED
from precision_time.casgd.problem import Options, Problem, Schedule
from precision_time.casgd.training import Start


def wide(noise: float, *, m: int = 3000, n: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """Linear data of signal power about 25, of which no sample of 768 rows shows how small the noise is."""
    random = np.random.default_rng(0)
    x = random.standard_normal((m, n))
    return x, x @ (random.standard_normal(n) * math.sqrt(25 / n)) + noise * random.standard_normal(m)


def fit(x: np.ndarray, y: np.ndarray, **changed: Any) -> tuple[Any, list[str]]:
    """A fitted regressor, and the precision warnings on the way."""
    settings: dict[str, Any] = {"max_iter": 30, "tol": None, "random_state": 0, "alpha": 0.0, **changed}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted = CASGDRegressor(**settings).fit(x, y)
    return fitted, [str(warning.message) for warning in caught if issubclass(warning.category, PrecisionWarning)]


def loss(fitted: Any, x: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean(np.square(fitted.predict(x) - y))) / 2


def test_wide_data_that_nearly_interpolate_fall_back_and_lose_nothing() -> None:
    x, y = wide(0.01)
    exact, _ = fit(x, y, precision="fp32")
    guarded, texts = fit(x, y)
    assert guarded.precision_.name in ("fp16", "fp32")
    assert abs(loss(guarded, x, y) / loss(exact, x, y) - 1) < 0.005
    assert "near interpolation: rounding to recipe" in texts[0]
    assert "on the rounded features" in texts[0]
    assert guarded.verdict_.requested_excess > 0.005 > guarded.verdict_.predicted_excess
    assert guarded.verdict_.requested.name == "recipe"
    # Training starts anew, so all figures are those of the policy in use.
    assert (guarded.n_iter_, len(guarded.loss_curve_), guarded.t_) == (30, 30, 30 * math.ceil(3000 / 32))
    if guarded.precision_.name == "fp32":
        np.testing.assert_array_equal(guarded.coef_, exact.coef_)
    warned, texts = fit(x, y, precision="recipe")
    assert loss(warned, x, y) / loss(exact, x, y) - 1 > 0.01  # which the fall-back avoids
    assert warned.precision_.name == "recipe"
    assert len(texts) == 1
    assert "near interpolation: rounding to recipe" in texts[0]


def test_wide_data_of_low_risk_keep_the_recipe_without_a_word() -> None:
    x, y = wide(3.0)
    guarded, texts = fit(x, y)
    assert guarded.precision_.name == "recipe"
    assert texts == []
    assert 0 < guarded.verdict_.predicted_excess < 0.005
    assert guarded.verdict_.warnings == ()
    exact, _ = fit(x, y, precision="fp32")
    assert abs(loss(guarded, x, y) / loss(exact, x, y) - 1) < 0.005


@pytest.mark.parametrize("asked", [{"on_risk": "raise"}, {"on_risk": "raise", "precision": "recipe"}])
def test_a_risk_found_during_training_is_raised(asked: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="near interpolation"):
        fit(*wide(0.01), **asked)


def test_auto_can_warn_only_and_its_limit_can_be_raised() -> None:
    x, y = wide(0.01)
    warned, texts = fit(x, y, on_risk="warn", max_iter=10)
    assert (warned.precision_.name, len(texts)) == ("recipe", 1)
    assert fit(x, y, largest_excess=1e3)[0].precision_.name == "recipe"


def test_judging_on_the_way_changes_no_iterate_and_no_end() -> None:
    x, y = wide(3.0, m=1000)
    problem = Problem(features=x, targets=y, objective=SQUARED, l2=1e-2)
    schedule = Schedule("optimal", 2e-3, alpha=10.0)
    for tol in (None, 0.05):
        options = Options(s=4, epochs=37, schedule=schedule, policy="recipe", tol=tol, n_iter_no_change=3)
        settings = GuardSettings(on_risk="fallback", largest_excess=0.005, own_steps=True, epochs=37)
        verdict = choose_policy(problem, options)
        assert verdict.unjudged_warning
        undivided, parts = (
            train_guarded(
                [problem], [options], starts=[Start()], verdict=judgement, settings=settings, comm=OneProcess()
            )
            for judgement in (None, verdict)
        )
        (first,), (second,) = undivided.solutions, parts.solutions
        np.testing.assert_array_equal(first.weights, second.weights)
        assert first.loss_curve == second.loss_curve
        assert (first.epochs, first.steps, first.converged) == (second.epochs, second.steps, second.converged)
        assert first.converged == (tol is not None)
        assert first.reductions == second.reductions
        assert undivided.verdict is None
        assert parts.verdict is not None
        assert parts.verdict.predicted_excess < 0.005


def test_two_ranks_fall_back_together(ranks: Any) -> None:
    x, y = wide(0.01, m=1500, n=400)
    alone, _ = fit(x, y, max_iter=12)

    def work(comm: Any) -> Any:
        return CASGDRegressor(max_iter=12, tol=None, random_state=0, alpha=0.0, comm=comm, s=4).fit(x, y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both ranks warn, and threads share one list of warnings
        first, second = ranks(work, 2)
    assert first.precision_ == second.precision_ == alone.precision_
    assert first.precision_.name != "recipe"
    np.testing.assert_array_equal(first.coef_, second.coef_)
    assert loss(first, x, y) == pytest.approx(loss(alone, x, y), rel=1e-3)


def test_epochs_one_by_one_are_judged_as_well() -> None:
    x, y = wide(0.01, m=1500, n=400)
    fitted = CASGDRegressor(random_state=0, alpha=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = [fitted.partial_fit(x, y).precision_.name for _ in range(20)]
    assert names[0] == "recipe"
    assert names[-1] != "recipe"
    assert fitted.n_iter_ == 20
    assert fitted.verdict_.policy == fitted.precision_


def test_several_classes_share_the_policy_that_one_of_them_needs() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((600, 400))
    labels = random.integers(0, 3, 600)
    fitted = CASGDClassifier(random_state=0, max_iter=5, tol=None).fit(x, labels)
    assert fitted.precision_.name == "recipe"
    assert fitted.verdict_.unjudged_warning == ""
    assert fitted.verdict_.rows > 0
