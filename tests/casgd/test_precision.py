"""Tests of the precision policies and of rounding to a format."""

import ml_dtypes
import numpy as np
import pytest

from precision_time.casgd.errors import InputError
from precision_time.casgd.precision import CHOICES, POLICIES, ROUNDOFF, carrier, find_policy, round_to


@pytest.fixture
def numbers() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=5000) * np.exp(rng.normal(size=5000) * 5)


def test_float32_rounds_to_bf16_and_fp16_as_the_types_of_ml_dtypes_and_numpy(numbers):
    values = numbers.astype(np.float32)
    np.testing.assert_array_equal(round_to(values, "bf16"), values.astype(ml_dtypes.bfloat16).astype(np.float32))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(round_to(values, "fp16"), values.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("fmt", ["fp32", "tf32", "bf16", "fp64"])
def test_the_error_of_a_rounding_stays_below_the_unit_roundoff_and_comes_near_it(fmt, numbers):
    error = np.abs(round_to(numbers, fmt) - numbers) / np.abs(numbers)
    assert error.max() <= ROUNDOFF[fmt]
    assert fmt == "fp64" or error.max() > 0.9 * ROUNDOFF[fmt] / (1 + ROUNDOFF[fmt]) * 0.9


def test_float64_is_rounded_once():
    above_a_tie = 1 + 2.0**-8 + 2.0**-40  # through float32 it would be the tie, and round to 1
    assert round_to([above_a_tie, -above_a_tie], "bf16").tolist() == [1 + 2.0**-7, -1 - 2.0**-7]
    assert round_to(1 + 2.0**-8 - 2.0**-40, "bf16") == 1
    assert round_to(1 + 2.0**-11 + 2.0**-40, "tf32") == 1 + 2.0**-10


def test_ties_go_to_even_and_what_is_not_finite_stays():
    assert round_to([1 + 2.0**-8, 1 + 3 * 2.0**-8], "bf16").tolist() == [1.0, 1 + 4 * 2.0**-8]
    kept = round_to([np.inf, -np.inf, np.nan, 0.0, -0.0], "bf16")
    assert np.isposinf(kept[0])
    assert np.isneginf(kept[1])
    assert np.isnan(kept[2])
    assert np.signbit(kept[4])
    assert np.isinf(round_to([7e4], "fp16")[0])


def test_the_carrier_is_float64_for_fp64_only():
    assert carrier("fp64") == np.float64
    assert {carrier(fmt) for fmt in ROUNDOFF if fmt != "fp64"} == {np.dtype(np.float32)}
    assert round_to(np.arange(3), "bf16").dtype == np.float32


def test_named_policies_are_what_the_documents_say():
    assert set(POLICIES) == {"fp64", "fp32", "recipe", "paper", "fp16", "bf16-gram"}
    assert set(POLICIES["fp64"].formats) == set(CHOICES)

    def low(name: str) -> dict[str, str]:
        return {choice: fmt for choice, fmt in POLICIES[name].formats.items() if fmt != "fp32"}

    assert low("fp32") == {}
    assert low("recipe") == {"x_storage": "bf16"}
    assert low("paper") == {"x_storage": "bf16", "margin_storage": "bf16"}
    assert low("fp16") == {"x_storage": "fp16"}
    assert low("bf16-gram") == {"x_storage": "bf16", "gram_storage": "bf16"}


def test_unknown_names_and_formats_are_refused_with_the_nearest():
    assert find_policy(POLICIES["paper"]) is POLICIES["paper"]
    with pytest.raises(InputError, match="did you mean 'recipe'"):
        find_policy("recipee")
    with pytest.raises(InputError, match="x_storage"):
        POLICIES["fp32"].replace(name="mine", x_storage="fp8")
    with pytest.raises(InputError, match="unknown format"):
        round_to([1.0], "int8")


@pytest.mark.parametrize("choice", ["margin_accumulate", "gram_accumulate", "recurrence", "link", "increment"])
def test_arithmetic_below_fp32_is_left_to_the_emulator(choice):
    POLICIES["bf16-gram"].check_executable()
    with pytest.raises(InputError, match=choice):
        POLICIES["fp32"].replace(name="mine", **{choice: "bf16"}).check_executable()
