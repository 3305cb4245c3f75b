"""Error metrics worked by hand, and a bootstrap interval that narrows with more rows."""

import math

import numpy as np
import pytest

from precision_time.predictor.scoring.metrics import bootstrap_mape, score
from precision_time.storage.errors import InputError


def test_metrics_by_hand() -> None:
    # errors of 0, 10 %, 20 %, 50 %
    metrics = score([1.0, 1.1, 0.8, 3.0], [1.0, 1.0, 1.0, 2.0])
    assert metrics["n"] == 4
    assert metrics["mape"] == pytest.approx(0.2)
    assert metrics["median_ape"] == pytest.approx(0.15)
    assert metrics["p90_ape"] == pytest.approx(0.2 + 0.7 * 0.3)
    assert metrics["within_25"] == 0.75
    assert metrics["bias"] == pytest.approx((1.1 * 0.8 * 1.5) ** 0.25 - 1)
    assert metrics["rmse_s"] == pytest.approx(math.sqrt((0.01 + 0.04 + 1.0) / 4))
    assert metrics["coverage"] is None


def test_an_error_at_the_bound_counts_as_within_it() -> None:
    assert score([1.25, 0.75, 1.26], [1.0, 1.0, 1.0])["within_25"] == pytest.approx(2 / 3)
    assert score([0.90625, 0.875], [1.0, 1.0])["within_10"] == 0.5


def test_a_bias_is_positive_where_predictions_are_too_slow() -> None:
    assert score([2.0, 2.0], [1.0, 1.0])["bias"] == pytest.approx(1.0)
    assert score([1.0], [2.0])["bias"] == pytest.approx(-0.5)


def test_coverage_is_the_share_of_rows_inside_their_interval() -> None:
    assert score([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], covered=[True, True, False, True])["coverage"] == 0.75


@pytest.mark.parametrize(("predicted", "measured"), [([], []), ([1.0], [1.0, 2.0]), ([[1.0]], [1.0])])
def test_rows_that_do_not_match_are_refused(predicted: list, measured: list) -> None:
    with pytest.raises(InputError, match="nothing to score"):
        score(predicted, measured)


def test_the_bootstrap_interval_holds_the_error_and_narrows_with_the_rows() -> None:
    rng = np.random.default_rng(0)
    widths = []
    for rows in (30, 3000):
        measured = rng.uniform(1, 2, size=rows)
        predicted = measured * np.exp(rng.normal(0, 0.2, size=rows))
        low, high = bootstrap_mape(predicted, measured)
        mape = score(predicted, measured)["mape"]
        assert mape is not None
        assert low < mape < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 5


def test_the_bootstrap_gives_the_same_interval_on_every_call() -> None:
    measured = np.linspace(1, 2, 50)
    predicted = measured * np.linspace(0.5, 1.5, 50)
    assert bootstrap_mape(predicted, measured) == bootstrap_mape(predicted, measured)
