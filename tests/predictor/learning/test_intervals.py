"""Conformal radii have their coverage, regime by regime, and too few rows are refused."""

import math

import numpy as np
import pytest
from crepes import ConformalRegressor
from hypothesis import given
from hypothesis import strategies as st

from precision_time.predictor.learning import intervals
from precision_time.predictor.learning.intervals import conformal_radius, fewest_rows, radii_by_regime
from precision_time.predictor.learning.regimes import REGIMES
from precision_time.storage.errors import InputError

ORDER = ("near", "far", "farther")


@pytest.fixture
def three_regimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regimes called ``ORDER`` in place of the real ones."""
    monkeypatch.setattr(intervals, "REGIMES", dict.fromkeys(ORDER))


def test_the_radius_is_the_order_statistic_of_the_absolute_errors() -> None:
    errors = [0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7, -0.8, 0.9]
    assert conformal_radius(errors, level=0.9) == 0.9
    assert conformal_radius(errors, level=0.5) == 0.5


def test_nine_rows_are_the_fewest_for_ninety_percent() -> None:
    assert fewest_rows(0.9) == 9
    conformal_radius([0.1] * 9, level=0.9)
    with pytest.raises(InputError, match="too few held-out rows"):
        conformal_radius([0.1] * 8, level=0.9)


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, 2.0])
def test_a_level_outside_zero_and_one_is_refused(level: float) -> None:
    with pytest.raises(InputError, match="level of an interval"):
        conformal_radius([0.1] * 100, level=level)


def test_new_draws_are_covered_at_least_at_the_level() -> None:
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(400):
        radius = conformal_radius(rng.standard_t(3, size=39), level=0.9)
        covered.append(float((np.abs(rng.standard_t(3, size=200)) <= radius).mean()))
    assert 0.89 <= np.mean(covered) <= 0.92


@given(
    errors=st.lists(st.floats(-3, 3), min_size=16, max_size=200),
    # exact in binary: crepes takes the rank from a product with 1 - level, which rounds down at 0.9 and 9 rows
    level=st.sampled_from([0.5, 0.75, 0.875, 0.9375]),
)
def test_the_radius_is_that_of_a_conformal_library(errors: list[float], level: float) -> None:
    interval = ConformalRegressor().fit(np.array(errors)).predict_int(np.zeros(1), confidence=level)
    assert conformal_radius(errors, level=level) == interval[0, 1] == -interval[0, 0]


def test_radii_by_regime_are_those_of_a_mondrian_conformal_library(three_regimes) -> None:
    rng = np.random.default_rng(1)
    regimes = np.repeat(["near", "far", "farther"], [70, 55, 101])
    errors = rng.normal(size=len(regimes)) * np.repeat([0.1, 0.4, 0.2], [70, 55, 101])
    library = ConformalRegressor().fit(errors, bins=regimes)
    ends = library.predict_int(np.zeros(3), bins=np.array(ORDER), confidence=0.9)[:, 1]
    radii = radii_by_regime(errors, list(regimes), level=0.9)
    assert list(radii) == list(ORDER)
    assert list(radii.values()) == pytest.approx(list(ends), rel=1e-12)


def test_a_small_regime_takes_the_radius_of_the_next_wider_one(three_regimes) -> None:
    errors, regimes = [0.1] * 60 + [0.2] * 10 + [0.5] * 60, ["near"] * 60 + ["far"] * 10 + ["farther"] * 60
    assert radii_by_regime(errors, regimes, level=0.9) == {"near": 0.1, "far": 0.5, "farther": 0.5}


def test_the_widest_regime_without_rows_takes_the_largest_radius(three_regimes) -> None:
    errors, regimes = [0.4] * 60 + [0.1] * 60, ["near"] * 60 + ["far"] * 60
    assert radii_by_regime(errors, regimes, level=0.9) == {"near": 0.4, "far": 0.1, "farther": 0.4}


def test_rows_of_many_small_regimes_give_one_radius_together(three_regimes) -> None:
    errors, regimes = [0.1] * 20 + [0.3] * 20, ["near"] * 20 + ["far"] * 20
    assert radii_by_regime(errors, regimes, level=0.9) == dict.fromkeys(ORDER, 0.3)
    assert radii_by_regime(errors[:8], regimes[:8], level=0.9) == {}


def test_a_high_level_needs_more_rows_than_a_regime_does(three_regimes) -> None:
    errors, regimes = [0.1] * 60 + [0.3] * 200, ["near"] * 60 + ["far"] * 200
    assert fewest_rows(0.99) == 99
    assert radii_by_regime(errors, regimes, level=0.99)["near"] == 0.3


def test_the_order_is_that_of_the_regimes_and_an_unknown_regime_is_refused() -> None:
    radii = radii_by_regime([0.1] * 60, ["known"] * 60, level=0.9)
    assert list(radii) == list(REGIMES)
    assert not any(math.isnan(radius) for radius in radii.values())
    with pytest.raises(InputError, match="regime of a held-out row"):
        radii_by_regime([0.1] * 60, ["elsewhere"] * 60, level=0.9)
