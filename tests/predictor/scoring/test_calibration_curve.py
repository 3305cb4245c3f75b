"""The calibration curve: which rows are drawn and scored, and that measured rows remove the errors they share."""

from typing import Any

import numpy as np
import pytest

from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.calibration_curve import (
    CalibrationCurve,
    format_curves,
    measure_calibration,
    plot_calibration,
)
from precision_time.predictor.scoring.cross_validation import CrossValidation
from precision_time.storage.errors import InputError

#: Folds of whole networks, each of a family of its own, or of whole chips.
FOLDS = 3


def leave_out(observations: list[Observation], split: str, errors: Any) -> CrossValidation:
    """Predictions whose log errors are ``errors``, in folds of whole networks or chips."""
    names = [observation.network if split != "leave-gpu-out" else observation.chip for observation in observations]
    order = sorted(set(names))
    measured = np.array([observation.measurement.iteration_time_s for observation in observations])
    return CrossValidation(
        split=split,
        rows=np.arange(len(observations)),
        measured_s=measured,
        predicted_s={"predictor": measured * np.exp(-errors)},
        folds=np.array([order.index(name) % FOLDS for name in names]),
        regimes=("new model",) * len(observations),
        covered=np.ones(len(observations), dtype=np.bool_),
        level=0.9,
    )


@pytest.fixture(scope="module")
def rows(many_rows: list[Observation]) -> list[Observation]:
    return many_rows[::3]


@pytest.fixture(scope="module")
def curve(rows: list[Observation]) -> CalibrationCurve:
    """Errors that consist of a shift for each network and some noise."""
    rng = np.random.default_rng(0)
    shifts: dict[str, float] = {}
    errors = np.array([shifts.setdefault(observation.network, rng.normal(0, 0.3)) for observation in rows])
    return measure_calibration(leave_out(rows, "leave-model-out", errors + rng.normal(0, 0.03, len(rows))), rows)


def test_measured_rows_remove_the_error_that_a_network_shares(curve: CalibrationCurve) -> None:
    assert [point.measured for point in curve.points] == [0, 1, 3, 10]
    mape = [point.after["mape"] for point in curve.points]
    assert mape[0] == curve.points[0].before["mape"]
    assert mape[0] > 0.15
    assert mape[1] < 0.3 * mape[0]
    assert mape[3] <= mape[1]
    assert all(point.groups == 10 and point.rows == 480 for point in curve.points)
    assert all(0.8 < (point.after["coverage"] or 0) <= 1 for point in curve.points)


def test_unrelated_errors_hardly_change(rows: list[Observation]) -> None:
    errors = np.random.default_rng(1).normal(0, 0.2, len(rows))
    curve = measure_calibration(leave_out(rows, "leave-family-out", errors), rows, rows=(1, 10))
    for point in curve.points:
        assert point.after["mape"] == pytest.approx(point.before["mape"], rel=0.1)


def test_rows_of_any_network_correct_others_on_their_gpu(rows: list[Observation]) -> None:
    rng = np.random.default_rng(2)
    shifts: dict[str, float] = {}
    errors = np.array([shifts.setdefault(observation.chip, rng.normal(0, 0.3)) for observation in rows])
    curve = measure_calibration(leave_out(rows, "leave-gpu-out", errors), rows, rows=(0, 3))
    assert curve.what == "on the GPU"
    assert curve.points[1].groups == 8
    assert (curve.points[1].after["mape"] or 1) < 0.5 * (curve.points[1].before["mape"] or 0)


def test_the_covariance_is_not_fitted_to_the_scored_group(rows: list[Observation]) -> None:
    errors = np.random.default_rng(3).normal(0, 0.05, len(rows))
    plain = leave_out(rows, "leave-model-out", errors)
    shifted = leave_out(rows, "leave-model-out", errors + 0.5 * (plain.folds == 0))
    (point,) = measure_calibration(shifted, rows, rows=(1,)).points
    (plain_point,) = measure_calibration(plain, rows, rows=(1,)).points
    # the covariance of fold 0 comes from folds 1 and 2, which do not have the shift
    assert point.before["mape"] != plain_point.before["mape"]
    assert (point.after["mape"] or 0) > 0.1


def test_the_same_seed_gives_the_same_curve(rows: list[Observation]) -> None:
    result = leave_out(rows, "leave-model-out", np.random.default_rng(4).normal(0, 0.2, len(rows)))
    first = measure_calibration(result, rows, rows=(1,))
    assert measure_calibration(result, rows, rows=(1,)) == first
    assert measure_calibration(result, rows, rows=(1,), seed=5) != first


def test_groups_with_too_few_configurations_are_left_out_of_a_point(rows: list[Observation]) -> None:
    resnet = [observation for observation in rows if observation.network == "resnet50"]
    others = [observation for observation in rows if observation.network != "resnet50"]
    mixed = [*others[:300], *resnet[:3]]
    curve = measure_calibration(
        leave_out(mixed, "leave-model-out", np.random.default_rng(5).normal(0, 0.2, len(mixed))), mixed, rows=(1, 3)
    )
    assert curve.points[0].groups == curve.points[1].groups + 1


def test_other_splits_and_counts_are_refused(rows: list[Observation]) -> None:
    result = leave_out(rows, "row", np.zeros(len(rows)))
    with pytest.raises(InputError, match="not measured on this split"):
        measure_calibration(result, rows)
    with pytest.raises(InputError, match="numbers of measured rows"):
        measure_calibration(leave_out(rows, "leave-model-out", np.zeros(len(rows))), rows, rows=(-1,))


def test_a_curve_is_shown_as_a_table_and_as_a_plot(curve: CalibrationCurve) -> None:
    lines = format_curves([curve]).splitlines()
    assert len(lines) == 6
    assert lines[3].startswith("| leave-model-out | 1 of the model | 480 of 10 | ")
    data = plot_calibration([curve, curve])
    assert data.startswith(b"\x89PNG")
    assert plot_calibration([curve, curve]) == data
    with pytest.raises(InputError, match="nothing to draw"):
        plot_calibration([])
