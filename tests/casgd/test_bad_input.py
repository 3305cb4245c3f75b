"""Unusable and borderline data: each kind raises a named error or has a documented result."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy.sparse import csr_array

from precision_time.casgd.communicator import OneProcess, agree
from precision_time.casgd.errors import InputError, NotConvergedWarning, PrecisionWarning
from precision_time.casgd.estimators import CASGDClassifier, CASGDPoissonRegressor, CASGDRegressor
from precision_time.casgd.validation import DtypeError, check_dtype, share_columns

# FP32, because after so few epochs the steps are still long, and the guard would warn of them.
QUICK: dict[str, Any] = {"max_iter": 5, "tol": None, "random_state": 0, "precision": "fp32"}
DOUBLE = {**QUICK, "precision": "fp64"}


@pytest.fixture
def features() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(60, 6))


@pytest.fixture
def labels(features: np.ndarray) -> np.ndarray:
    return (features[:, 0] + np.random.default_rng(1).normal(size=60) > 0).astype(int)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_row_that_is_not_finite_is_named(
    wrong: float, sparse: bool, features: np.ndarray, labels: np.ndarray
) -> None:
    fitted = CASGDClassifier(**QUICK).fit(features, labels)
    features[7, 2] = features[9, 1] = wrong
    matrix = csr_array(features) if sparse else features
    expected = rf"{'NaN' if np.isnan(wrong) else 'inf'} in row 7, column 2; 2 row\(s\)"
    with pytest.raises(InputError, match=expected):
        CASGDClassifier(**QUICK).fit(matrix, labels)
    with pytest.raises(InputError, match=expected):
        fitted.predict(matrix)


def test_features_whose_sum_overflows_are_finite_still(features: np.ndarray) -> None:
    features[:, 0] = 1.7e308 * np.sign(features[:, 0])
    with pytest.raises(InputError, match="too large to choose a step size"):
        CASGDRegressor(**QUICK).fit(features, features[:, 1])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_target_that_is_not_finite_is_named(wrong: float, features: np.ndarray) -> None:
    targets = features[:, 0].copy()
    targets[3] = wrong
    with pytest.raises(ValueError, match="Input y contains"):
        CASGDRegressor(**QUICK).fit(features, targets)


def test_a_column_of_zeros_gets_the_weight_zero(features: np.ndarray, labels: np.ndarray) -> None:
    features[:, 3] = 0
    fitted = CASGDClassifier(**QUICK).fit(features, labels)
    assert fitted.coef_[0, 3] == 0
    assert np.isfinite(fitted.coef_).all()


def test_features_that_are_all_zero_give_the_best_constant(labels: np.ndarray) -> None:
    fitted = CASGDClassifier(**QUICK).fit(np.zeros((60, 4)), labels)
    assert fitted.predict_proba(np.zeros((1, 4)))[0, 1] == pytest.approx(labels.mean(), abs=0.01)
    assert not fitted.coef_.any()


def test_one_class_is_refused(features: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"at least two classes.*1 class"):
        CASGDClassifier(**QUICK).fit(features, np.ones(60))


def test_a_constant_target_is_the_intercept(features: np.ndarray) -> None:
    fitted = CASGDRegressor(random_state=0, precision="fp32").fit(features, np.full(60, 7.5))
    assert fitted.intercept_ == pytest.approx(7.5, rel=1e-6)
    np.testing.assert_allclose(fitted.coef_, 0, atol=1e-6)


def test_counts_that_are_all_zero_give_a_small_mean(features: np.ndarray) -> None:
    fitted = CASGDPoissonRegressor(**QUICK).fit(features, np.zeros(60))
    assert 0 < fitted.predict(features).mean() < 0.01


def test_separable_data_ends_with_finite_weights_and_no_error_in_training(features: np.ndarray) -> None:
    labels = features[:, 0] > 0
    with pytest.warns(NotConvergedWarning):
        fitted = CASGDClassifier(alpha=0, max_iter=100, tol=1e-6, random_state=0).fit(features, labels)
    assert np.isfinite(fitted.coef_).all()
    assert fitted.score(features, labels) == 1
    assert fitted.loss_curve_[-1] < fitted.loss_curve_[0] / 3


def test_more_ranks_than_columns_are_refused() -> None:
    with pytest.raises(InputError, match="4 ranks for 3 columns"):
        share_columns(np.zeros((5, 3)), 4)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_rank_owns_a_column_even_where_all_values_are_in_one(size: int) -> None:
    values = np.zeros((20, 7))
    values[:, 2] = 1
    for matrix in (values, csr_array(values), csr_array((20, 7))):
        shares = share_columns(matrix, size)
        assert [first for first, _ in shares[1:]] == [past for _, past in shares[:-1]]
        assert (shares[0][0], shares[-1][1], len(shares)) == (0, 7, size)
        assert all(first < past for first, past in shares)


def test_sparse_columns_are_shared_out_by_stored_values() -> None:
    values = np.zeros((100, 10))
    values[:, 0] = 1
    values[:10, 1:] = 1
    assert share_columns(csr_array(values), 2)[0][1] <= 2


@pytest.mark.parametrize(("s", "batch_size"), [(64, 32), (8, 1000), (1, 10**9)])
def test_s_times_b_above_the_rows_is_cut_to_the_epoch(
    s: int, batch_size: int, features: np.ndarray, labels: np.ndarray
) -> None:
    long = CASGDClassifier(**DOUBLE, s=s, batch_size=batch_size).fit(features, labels)
    plain = CASGDClassifier(**DOUBLE, s=1, batch_size=min(batch_size, 60)).fit(features, labels)
    np.testing.assert_allclose(long.coef_, plain.coef_, rtol=1e-11)


def test_values_that_fp16_cannot_hold_are_refused_or_fall_back(features: np.ndarray, labels: np.ndarray) -> None:
    features[5, 0] = 70_000
    with pytest.raises(InputError, match="65504"), pytest.warns(PrecisionWarning, match="65504"):
        CASGDClassifier(**{**QUICK, "precision": "fp16"}).fit(features, labels)
    with pytest.warns(PrecisionWarning, match="standardise"):
        guarded = CASGDClassifier(**{**QUICK, "precision": "auto"}).fit(features, labels)
    assert guarded.precision_.name in ("recipe", "fp32")
    assert np.isfinite(guarded.coef_).all()


def test_low_precision_accumulators_are_refused(features: np.ndarray, labels: np.ndarray) -> None:
    from precision_time.casgd.precision import find_policy

    policy = find_policy("recipe").replace(name="mine", gram_accumulate="fp16")
    with pytest.raises(InputError, match="gram_accumulate"):
        CASGDClassifier(**{**QUICK, "precision": policy}).fit(features, labels)


def test_sums_of_many_ones_stored_in_bf16_stay_exact() -> None:
    """A BF16 accumulator stops at 256, an FP16 one at 2048."""
    fitted = CASGDRegressor(
        precision="recipe", alpha=0, fit_intercept=False, eta0=2.0**-12, learning_rate="constant", max_iter=1, tol=None
    ).fit(np.ones((1, 4096)), [1.0])
    np.testing.assert_array_equal(fitted.coef_, 2.0**-12)
    assert fitted.predict(np.ones((1, 4096)))[0] == 1


def test_poisson_margins_beyond_the_clip_stay_finite(features: np.ndarray) -> None:
    counts = np.random.default_rng(2).poisson(3, size=60)
    fitted = CASGDPoissonRegressor(**QUICK).fit(features, counts)
    far = fitted.predict(features * 1e6)
    assert np.isfinite(far).all()
    assert far.max() == pytest.approx(np.exp(30))


def test_poisson_steps_that_are_far_too_long_do_not_give_infinite_weights(features: np.ndarray) -> None:
    """The clip bounds the derivative by e^30, so even this training ends, with a useless model."""
    counts = np.random.default_rng(2).poisson(3, size=60)
    long: dict[str, Any] = {"eta0": 10.0, "learning_rate": "constant"}
    assert np.isfinite(CASGDPoissonRegressor(**QUICK, **long).fit(features, counts).coef_).all()


def test_steps_that_are_too_long_are_a_named_error(features: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"diverged.*eta0"):
        CASGDRegressor(
            eta0=100.0, learning_rate="constant", precision="fp32", max_iter=50, tol=None, random_state=0
        ).fit(features, features[:, 0])


def test_negative_counts_are_named(features: np.ndarray) -> None:
    counts = np.ones(60)
    counts[[4, 8]] = -2
    with pytest.raises(InputError, match=r"-2 in row 4; 2 row\(s\)"):
        CASGDPoissonRegressor(**QUICK).fit(features, counts)


def test_labels_that_are_no_classes_are_refused(features: np.ndarray) -> None:
    with pytest.raises(ValueError, match="Unknown label type"):
        CASGDClassifier(**QUICK).fit(features, features[:, 0])


@pytest.mark.parametrize("kind", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4])
def test_narrow_element_types_are_refused_by_name_before_a_look_at_the_values(
    kind: Any, features: np.ndarray, labels: np.ndarray
) -> None:
    narrow = features.astype(kind)
    for call in (
        lambda: CASGDClassifier(**QUICK).fit(narrow, labels),
        lambda: CASGDRegressor(**QUICK).fit(features, narrow[:, 0]),
    ):
        with pytest.raises(DtypeError, match=rf"{np.dtype(kind).name}.*expected: float64, float32") as caught:
            call()
        assert isinstance(caught.value, TypeError)
        assert caught.value.exit_code == 2


def test_a_tensor_of_another_library_is_judged_by_the_name_of_its_type() -> None:
    class Tensor:
        dtype = "torch.bfloat16"

        def __array__(self) -> None:
            pytest.fail("it was looked into")

        __dlpack__ = __array__

    with pytest.raises(DtypeError, match="bfloat16"):
        check_dtype(Tensor(), name="X")
    for fine in (np.zeros(2, np.float16), np.zeros(2, int), np.zeros(2, bool), [1.0], np.array(["a"])):
        check_dtype(fine, name="X")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("s", 0),
        ("s", 2.5),
        ("s", "many"),
        ("batch_size", 0),
        ("max_iter", 0),
        ("alpha", -1),
        ("alpha", np.nan),
        ("alpha", "0.1"),
        ("eta0", 0),
        ("tol", np.nan),
        ("learning_rate", "fast"),
        ("precision", "fp8"),
        ("device", "tpu"),
        ("on_risk", "shout"),
        ("largest_excess", -0.1),
        ("largest_excess", None),
        ("prefetch", "yes"),
        ("comm", "sockets"),
        ("n_iter_no_change", -1),
    ],
)
def test_a_parameter_that_cannot_be_is_named(
    name: str, value: object, features: np.ndarray, labels: np.ndarray
) -> None:
    with pytest.raises(InputError) as caught:
        CASGDClassifier(**{**QUICK, name: value}).fit(features, labels)
    assert str(value) in str(caught.value)


def test_sample_weights_that_cannot_be_are_named(features: np.ndarray, labels: np.ndarray) -> None:
    weights = np.ones(60)
    for wrong, message in ((-1.0, "negative"), (np.nan, "NaN")):
        weights[3] = wrong
        with pytest.raises(ValueError, match=message):
            CASGDClassifier(**QUICK).fit(features, labels, sample_weight=weights)
    with pytest.raises(InputError, match="all sample weights are zero"):
        CASGDClassifier(**QUICK).fit(features, labels, sample_weight=np.zeros(60))


def test_a_failure_on_one_rank_is_raised_on_the_others() -> None:
    class OneOfTwo(OneProcess):
        size = 2

        def gather(self, value: object) -> list[Any]:
            return [value, "column 3 of the file is not a number"]

    with pytest.raises(InputError, match=r"rank 1 cannot go on.*column 3"):
        agree(OneOfTwo(), lambda: 1)
