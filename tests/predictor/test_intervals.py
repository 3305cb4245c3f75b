"""Conformal radii cover what they promise, and say when there are too few rows."""

import numpy as np
import pytest

from precision_time.predictor.intervals import conformal_radius, fewest_rows
from precision_time.storage.errors import InputError


def test_the_radius_is_the_order_statistic_of_the_absolute_errors() -> None:
    errors = [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9]
    assert conformal_radius(errors, level=0.9) == 0.9
    assert conformal_radius(errors, level=0.5) == 0.5


def test_nine_rows_are_the_fewest_for_ninety_percent() -> None:
    assert fewest_rows(0.9) == 9
    conformal_radius([0.1] * 9, level=0.9)
    with pytest.raises(InputError, match="too few calibration rows"):
        conformal_radius([0.1] * 8, level=0.9)


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, 2.0])
def test_a_level_outside_zero_and_one_is_refused(level: float) -> None:
    with pytest.raises(InputError, match="level of an interval"):
        conformal_radius([0.1] * 100, level=level)


def test_new_draws_are_covered_at_least_at_the_level() -> None:
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(400):
        radius = conformal_radius(list(rng.standard_t(3, size=39)), level=0.9)
        covered.append(float((np.abs(rng.standard_t(3, size=200)) <= radius).mean()))
    assert 0.89 <= np.mean(covered) <= 0.92
