"""Tests of the step sizes."""

import numpy as np
import pytest

from precision_time.casgd.errors import InputError
from precision_time.casgd.problem import Schedule


def test_formulas_are_those_of_scikit_learn_with_the_step_counted_from_one():
    assert Schedule("constant", 0.3).rates(5, 3).tolist() == [0.3] * 3
    np.testing.assert_allclose(Schedule("invscaling", 0.3, power_t=0.25).rates(1, 3), 0.3 / np.arange(1, 4) ** 0.25)
    np.testing.assert_allclose(Schedule("optimal", alpha=0.01, t0=50.0).rates(2, 2), [1 / 0.51, 1 / 0.52])


def test_the_first_step_of_optimal_is_eta0_unless_t0_is_given():
    rates = Schedule("optimal", 0.2, alpha=0.1).rates(1, 1000)
    assert rates[0] == pytest.approx(0.2)
    assert rates[-1] == pytest.approx(1 / (0.1 * (50 + 999)))


@pytest.mark.parametrize("kind", ["constant", "invscaling", "optimal"])
def test_a_part_of_the_schedule_is_the_schedule_of_the_part(kind):
    schedule = Schedule(kind, 0.1)
    np.testing.assert_array_equal(schedule.rates(1, 40)[17:], schedule.rates(18, 23))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "adaptive"},
        {"eta0": 0.0},
        {"eta0": float("nan")},
        {"kind": "optimal", "alpha": 0.0},
        {"kind": "optimal", "t0": -1.0},
        {"kind": "invscaling", "power_t": float("inf")},
    ],
)
def test_an_invalid_schedule_is_refused(wrong):
    with pytest.raises(InputError):
        Schedule(**wrong)
    with pytest.raises(InputError):
        Schedule().rates(0, 3)
