"""The estimators: scikit-learn's own checks, defaults that converge, and ranks and s that change no result."""

import ast
import doctest
import inspect
import os
import pickle
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from precision_time.casgd.communicator import OneProcess
from precision_time.casgd.errors import InputError, NotConvergedWarning, PrecisionWarning
from precision_time.casgd.estimators import CASGDClassifier, CASGDPoissonRegressor, CASGDRegressor
from precision_time.casgd.plan import plan

# scikit-learn's own SGD estimators fail these two as well.
WEIGHTS_ARE_NOT_COPIES = "a weighted row and repeated rows fall into other batches, so the iterates differ"


def expected_failures(estimator: Any) -> dict[str, str]:
    return {
        "check_sample_weight_equivalence_on_dense_data": WEIGHTS_ARE_NOT_COPIES,
        "check_sample_weight_equivalence_on_sparse_data": WEIGHTS_ARE_NOT_COPIES,
    }


@parametrize_with_checks(
    [CASGDClassifier(), CASGDRegressor(), CASGDPoissonRegressor()], expected_failed_checks=expected_failures
)
def test_it_is_a_scikit_learn_estimator(estimator: Any, check: Any) -> None:
    if check.func.__name__.startswith("check_array_api") and "SCIPY_ARRAY_API" not in os.environ:
        check_in_a_process_with_array_api(estimator, check)
    else:
        check(estimator)


@pytest.mark.parametrize("estimator", [CASGDClassifier, CASGDRegressor, CASGDPoissonRegressor])
def test_every_parameter_of_an_estimator_is_documented_and_its_example_runs(estimator: Any) -> None:
    for name, parameter in inspect.signature(estimator).parameters.items():
        line = re.search(rf"^    {name} : .+, default=(.+)$", estimator.__doc__, re.MULTILINE)
        assert line, name
        assert ast.literal_eval(line[1]) == parameter.default
    (example,) = doctest.DocTestFinder(recurse=False).find(estimator)
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


def check_in_a_process_with_array_api(estimator: Any, check: Any) -> None:
    """SciPy reads the variable when it is imported, so in this process the check would skip itself."""
    kind = type(estimator).__name__
    code = f"""
from sklearn.utils.estimator_checks import {check.func.__name__} as check
from precision_time.casgd.estimators import {kind}
check({check.args[0]!r}, {kind}(), **{check.keywords!r})
print("checked")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SCIPY_ARRAY_API": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "checked\n", done.stderr


@pytest.fixture(scope="module")
def cancer() -> tuple[np.ndarray, np.ndarray]:
    features, labels = load_breast_cancer(return_X_y=True)
    return StandardScaler().fit_transform(features), labels


@pytest.fixture(scope="module")
def diabetes() -> tuple[np.ndarray, np.ndarray]:
    features, targets = load_diabetes(return_X_y=True)
    return StandardScaler().fit_transform(features), targets


def penalised_loss(estimator: Any, kind: str, features: np.ndarray, targets: np.ndarray, alpha: float) -> float:
    margins = features @ np.ravel(estimator.coef_) + float(np.ravel(estimator.intercept_)[0])
    loss = {
        "logistic": lambda: np.logaddexp(0, -(2 * targets - 1) * margins),
        "squared": lambda: (margins - targets) ** 2 / 2,
        "poisson": lambda: np.exp(margins) - targets * margins,
    }[kind]()
    return float(loss.mean() + alpha / 2 * np.square(estimator.coef_).sum())


def share_left(fitted: Any, optimum: Any, kind: str, features: np.ndarray, targets: np.ndarray, alpha: float) -> float:
    """The share of the explainable loss, from the best constant to the optimum, that a fit has not explained."""
    reached, least = (penalised_loss(model, kind, features, targets, alpha) for model in (fitted, optimum))
    constant = clone(fitted)
    constant.coef_, share = np.zeros_like(fitted.coef_), targets.mean()
    if kind == "squared":
        constant.intercept_ = share
    else:
        constant.intercept_ = np.log(share / (1 - share) if kind == "logistic" else share)
    return (reached - least) / (penalised_loss(constant, kind, features, targets, alpha) - least)


OPTIMA = [
    (CASGDClassifier, lambda c: LogisticRegression(C=1 / c, max_iter=10_000), "logistic"),
    (CASGDRegressor, lambda c: Ridge(alpha=c), "squared"),
    (CASGDPoissonRegressor, lambda c: PoissonRegressor(alpha=c / 442, max_iter=10_000), "poisson"),
]


@pytest.mark.parametrize(("ours", "best", "kind"), OPTIMA)
def test_defaults_converge_within_4_percent_of_the_optimum_on_standardised_data(
    ours: Any, best: Any, kind: str, cancer: Any, diabetes: Any
) -> None:
    features, targets = cancer if kind == "logistic" else diabetes
    targets = np.round(targets / 10) if kind == "poisson" else targets
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NotConvergedWarning
        fitted = ours(random_state=0).fit(features, targets)
    assert fitted.n_iter_ < 200
    optimum = best(len(targets) * 1e-4).fit(features, targets)
    assert share_left(fitted, optimum, kind, features, targets, 1e-4) < 0.04


@pytest.mark.parametrize("batch_size", [8, 32, 128])
@pytest.mark.parametrize(("ours", "best", "kind"), OPTIMA)
def test_a_stronger_penalty_converges_within_3_percent_at_any_batch_size(
    ours: Any, best: Any, kind: str, batch_size: int, cancer: Any, diabetes: Any
) -> None:
    features, targets = cancer if kind == "logistic" else diabetes
    targets = np.round(targets / 10) if kind == "poisson" else targets
    fitted = ours(alpha=1e-2, batch_size=batch_size, random_state=0).fit(features, targets)
    assert fitted.n_iter_ < 200
    optimum = best(len(targets) * 1e-2).fit(features, targets)
    assert share_left(fitted, optimum, kind, features, targets, 1e-2) < 0.03


def test_s_changes_no_result(cancer: Any) -> None:
    plain, unrolled = (
        CASGDClassifier(s=s, precision="fp64", max_iter=3, tol=None, random_state=1).fit(*cancer) for s in (1, 8)
    )
    np.testing.assert_allclose(unrolled.coef_, plain.coef_, rtol=1e-11, atol=1e-13)
    assert unrolled.reductions_ < plain.reductions_ / 5
    assert (unrolled.s_, plain.s_) == (8, 1)


def test_auto_is_plain_sgd_on_one_process_without_asking_the_planner(cancer: Any) -> None:
    fitted = CASGDClassifier(precision="fp32", max_iter=2, tol=None, random_state=0).fit(*cancer)
    assert fitted.s_ == 1
    assert fitted.plan_ is None


def test_partial_fits_are_the_epochs_of_one_fit(diabetes: Any) -> None:
    whole = CASGDRegressor(precision="fp64", max_iter=3, tol=None, random_state=2).fit(*diabetes)
    parts = CASGDRegressor(precision="fp64", random_state=2)
    for _ in range(3):
        parts.partial_fit(*diabetes)
    np.testing.assert_allclose(parts.coef_, whole.coef_, rtol=1e-12)
    assert parts.loss_curve_ == pytest.approx(whole.loss_curve_, rel=1e-12)
    assert (parts.n_iter_, parts.t_) == (whole.n_iter_, whole.t_) == (3, 42)


def test_partial_fit_wants_all_classes_at_first(cancer: Any) -> None:
    features, labels = cancer
    with pytest.raises(InputError, match="classes must be passed on the first call"):
        CASGDClassifier().partial_fit(features, labels)
    fitted = CASGDClassifier(random_state=0).partial_fit(features, labels, classes=[0, 1])
    with pytest.raises(InputError, match="class that the first call did not name"):
        fitted.partial_fit(features, labels + 1)


def test_a_warm_start_goes_on_from_the_last_result(diabetes: Any) -> None:
    warm = CASGDRegressor(warm_start=True, precision="fp32", max_iter=5, tol=None, random_state=0).fit(*diabetes)
    first = warm.loss_curve_[0]
    assert warm.fit(*diabetes).loss_curve_[0] < first
    cold = clone(warm).set_params(warm_start=False)
    assert cold.fit(*diabetes).fit(*diabetes).loss_curve_[0] == first


def test_several_classes_are_each_against_the_rest() -> None:
    features, labels = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[labels]
    model = make_pipeline(StandardScaler(), CASGDClassifier(random_state=0, max_iter=400)).fit(features, names)
    fitted = model[-1]
    assert fitted.coef_.shape == (3, 4)
    assert len(fitted.loss_curve_) == 3
    assert model.score(features, names) > 0.9
    probability = model.predict_proba(features)
    np.testing.assert_allclose(probability.sum(axis=1), 1)
    assert (fitted.classes_[probability.argmax(axis=1)] == model.predict(features)).all()


def test_sparse_and_dense_features_give_the_same_model(cancer: Any) -> None:
    features, labels = cancer
    features = np.where(np.abs(features) > 1, features, 0)
    dense, sparse = (
        CASGDClassifier(precision="fp64", max_iter=3, tol=None, random_state=0).fit(matrix, labels)
        for matrix in (features, csr_array(features))
    )
    np.testing.assert_allclose(sparse.coef_, dense.coef_, rtol=1e-11)
    np.testing.assert_allclose(sparse.predict_proba(csr_array(features)), dense.predict_proba(features), rtol=1e-11)


def test_double_data_is_rounded_once(diabetes: Any) -> None:
    """1 + 2^-8 + 2^-30 is just above the middle of two BF16 numbers; rounded through float32 it would be the middle."""
    features = np.array([[1 + 2.0**-8 + 2.0**-30], [0.0]] * 8)
    steps: dict[str, Any] = {"eta0": 0.5, "learning_rate": "constant", "max_iter": 1, "tol": None, "batch_size": 16}
    fitted = CASGDRegressor(precision="recipe", alpha=0, fit_intercept=False, **steps)
    with pytest.warns(PrecisionWarning):  # one column that fits exactly
        fitted.fit(features, np.array([1.0, 0.0] * 8))
    assert fitted.coef_[0] == 0.25 * (1 + 2.0**-7)


@pytest.mark.parametrize("column_block", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_two_ranks_reach_the_model_of_one_and_both_hold_all_of_it(
    column_block: bool, sparse: bool, cancer: Any, ranks: Any
) -> None:
    features, labels = cancer
    settings: dict[str, Any] = {"precision": "fp64", "s": 4, "max_iter": 3, "tol": None, "random_state": 0}
    alone = CASGDClassifier(**settings).fit(features, labels)

    def work(comm: Any) -> Any:
        columns = features[:, slice(0, 11) if comm.rank == 0 else slice(11, 30)] if column_block else features
        matrix = csr_array(columns) if sparse else columns
        fitted = CASGDClassifier(**settings, comm=comm, column_block=column_block).fit(matrix, labels)
        return fitted, fitted.predict_proba(matrix)

    for fitted, probability in ranks(work, 2):
        np.testing.assert_allclose(fitted.coef_, alone.coef_, rtol=1e-10)
        np.testing.assert_allclose(probability, alone.predict_proba(features), rtol=1e-10)
        assert fitted.reductions_ == alone.reductions_
        assert fitted.eta0_ == pytest.approx(alone.eta0_, rel=1e-12)


def test_the_guard_chooses_the_same_on_every_rank(cancer: Any, ranks: Any) -> None:
    alone = CASGDClassifier(random_state=0).fit(*cancer)
    for fitted in ranks(lambda comm: CASGDClassifier(random_state=0, s=2, comm=comm).fit(*cancer), 2):
        assert fitted.precision_ == alone.precision_
        assert fitted.verdict_.predicted_excess == pytest.approx(alone.verdict_.predicted_excess, rel=1e-6)


def test_prefetch_changes_the_messages_and_not_the_result(diabetes: Any, ranks: Any) -> None:
    def work(comm: Any, prefetch: bool) -> Any:
        settings: dict[str, Any] = {"precision": "fp64", "s": 4, "max_iter": 2, "tol": None, "random_state": 0}
        return CASGDRegressor(**settings, prefetch=prefetch, comm=comm).fit(*diabetes)

    plain, ahead = (ranks(lambda comm, prefetch=prefetch: work(comm, prefetch), 2)[0] for prefetch in (False, True))
    np.testing.assert_array_equal(ahead.coef_, plain.coef_)
    assert (plain.reductions_, ahead.reductions_) == (2 * 4, 2 * 8)  # 14 batches: three blocks of four, one of two


def test_planning_stays_within_its_share_of_a_short_training(diabetes: Any, ranks: Any) -> None:
    def work(comm: Any) -> Any:
        return CASGDRegressor(precision="fp32", max_iter=20, tol=None, random_state=0, comm=comm).fit(*diabetes)

    for fitted in ranks(work, 2):
        assert fitted.s_ == 1
        assert len(fitted.plan_.samples) == 1
        assert "planning takes" in fitted.plan_.reasons[-1]


def test_unusable_probes_are_warned_of(diabetes: Any, ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*arguments: Any, **named: Any) -> Any:
        return replace(plan(*arguments, **named), warning="costs miss the probes by 40%")

    monkeypatch.setattr("precision_time.casgd.training.plan", busy)
    with pytest.warns(UserWarning, match="s=1: costs miss the probes by 40%"):
        ranks(lambda comm: CASGDRegressor(precision="fp32", tol=None, max_iter=2, comm=comm).fit(*diabetes), 2)


def test_several_ranks_ask_the_planner_for_s(diabetes: Any, ranks: Any) -> None:
    def work(comm: Any) -> Any:
        return CASGDRegressor(precision="fp32", max_iter=2, tol=None, random_state=0, comm=comm).fit(*diabetes)

    first, second = ranks(work, 2)
    assert first.s_ == first.plan_.s == second.s_
    assert first.plan_.seconds_per_epoch > 0


def test_ranks_without_a_seed_share_rank_0s(diabetes: Any, ranks: Any) -> None:
    def work(comm: Any) -> Any:
        return CASGDRegressor(comm=comm, s=1, precision="fp32", max_iter=2, tol=None).fit(*diabetes)

    first, second = ranks(work, 2)
    np.testing.assert_array_equal(first.coef_, second.coef_)


def test_a_rank_called_differently_is_named(diabetes: Any, ranks: Any) -> None:
    with pytest.raises(InputError, match="rank 1 has batch_size"):
        ranks(lambda comm: CASGDRegressor(comm=comm, batch_size=16 + comm.rank).fit(*diabetes), 2)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda x: x.astype(np.float32), "rank 1 has type of X="),
        (csr_array, "rank 1 has library of X="),
    ],
)
def test_a_rank_with_another_kind_of_features_is_named(other: Any, told: str, diabetes: Any, ranks: Any) -> None:
    features, targets = diabetes
    with pytest.raises(InputError, match=told):
        ranks(lambda comm: CASGDRegressor(comm=comm).fit(other(features) if comm.rank else features, targets), 2)


def test_on_risk_decides_the_consequence_of_a_risk() -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(2000, 32))
    targets = features @ np.ones(32) + 0.1 * random.normal(size=2000)
    short: dict[str, Any] = {"max_iter": 3, "tol": None, "random_state": 0}
    for precision in ("auto", "recipe"):
        with pytest.raises(InputError, match="near interpolation"):
            CASGDRegressor(precision=precision, on_risk="raise", **short).fit(features, targets)
        for risk, name in (("warn", "recipe"), ("fallback", "fp16")):
            with pytest.warns(PrecisionWarning, match="near interpolation"):
                fitted = CASGDRegressor(precision=precision, on_risk=risk, **short).fit(features, targets)
            assert fitted.precision_.name == name
        allowed = CASGDRegressor(precision=precision, on_risk="raise", largest_excess=0.5, **short)
        assert allowed.fit(features, targets).precision_.name == "recipe"


def test_bad_data_on_one_rank_end_the_others_at_once(diabetes: Any, ranks: Any) -> None:
    features, targets = diabetes

    def work(comm: Any) -> Any:
        columns = features[:, :5].copy() if comm.rank == 0 else features[:, 5:]
        columns[3, 0] = np.nan if comm.rank == 0 else columns[3, 0]
        with pytest.raises(InputError, match="NaN in row 3, column 0") as caught:
            CASGDRegressor(comm=comm, column_block=True).fit(columns, targets)
        return str(caught.value)

    first, second = ranks(work, 2)
    assert second.startswith("rank 0 cannot go on")
    assert not first.startswith("rank")


def test_a_copy_works_with_the_same_ranks() -> None:
    comm = OneProcess()
    assert clone(CASGDRegressor(comm=comm, alpha=0.5)).get_params() == CASGDRegressor(comm=comm, alpha=0.5).get_params()


def test_the_guard_leaves_easy_data_in_bf16_and_falls_back_on_nearly_exact_data(cancer: Any) -> None:
    easy = CASGDClassifier(random_state=0).fit(*cancer)
    assert easy.precision_.name == "recipe"
    features = np.random.default_rng(0).normal(size=(2000, 32))
    targets = features @ np.ones(32) + 1e-3 * np.random.default_rng(1).normal(size=2000)
    with pytest.warns(PrecisionWarning):
        hard = CASGDRegressor(random_state=0, max_iter=20, tol=None).fit(features, targets)
    assert hard.precision_.name in ("fp16", "fp32")
    with pytest.warns(PrecisionWarning):
        warned = CASGDRegressor(random_state=0, max_iter=2, tol=None, precision="recipe").fit(features, targets)
    assert warned.precision_.name == "recipe"


def test_too_few_epochs_are_warned_of(diabetes: Any) -> None:
    with pytest.warns(NotConvergedWarning, match="max_iter=2"):
        CASGDRegressor(max_iter=2, random_state=0).fit(*diabetes)


def test_a_fitted_estimator_survives_pickling_and_tells_its_times(cancer: Any) -> None:
    features, labels = cancer
    fitted = CASGDClassifier(precision="fp32", max_iter=2, tol=None, random_state=0).fit(features, labels)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(again.predict(features), fitted.predict(features))
    assert set(fitted.timings_) == {"gather", "gram", "communicate", "recurrence", "update"}
    assert sum(fitted.timings_.values()) > 0


def test_verbose_prints_a_line(diabetes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    CASGDRegressor(precision="fp32", max_iter=2, tol=None, random_state=0, verbose=1).fit(*diabetes)
    assert "2 epochs, loss" in capsys.readouterr().out
