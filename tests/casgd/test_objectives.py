"""Tests of the losses and their derivatives."""

import copy
import pickle

import numpy as np
import pytest

from precision_time.casgd.errors import InputError
from precision_time.casgd.objectives import LOGISTIC, OBJECTIVES, POISSON, SQUARED, find_objective

Z = np.linspace(-4, 4, 41)


def labels(objective):
    return np.where(np.arange(Z.size) % 2, 1.0, -1.0) if objective is LOGISTIC else np.arange(Z.size) % 5 * 1.0


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
def test_derivatives_are_those_of_the_loss(objective):
    y, h = labels(objective), 1e-5
    slope = (objective.loss(Z + h, y) - objective.loss(Z - h, y)) / (2 * h)
    curvature = (objective.derivative(Z + h, y) - objective.derivative(Z - h, y)) / (2 * h)
    np.testing.assert_allclose(objective.derivative(Z, y), slope, rtol=1e-7, atol=1e-8)
    np.testing.assert_allclose(objective.second(Z, y), curvature, rtol=1e-7, atol=1e-8)
    if objective.smoothness is not None:
        assert objective.second(Z, y).max() == pytest.approx(objective.smoothness)


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=list(OBJECTIVES))
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_values_keep_the_type_of_the_margins_and_may_be_written_in_place(objective, kind):
    z, y = Z.astype(kind), labels(objective).astype(kind)
    for function in (objective.loss, objective.derivative, objective.second):
        assert function(z, y).dtype == kind
    expected = objective.derivative(z, y)
    objective.derivative_into(z, y, z)
    np.testing.assert_array_equal(z, expected)


def test_the_logistic_residual_keeps_its_relative_accuracy_for_well_classified_rows():
    z = np.array([20.0, 80.0], dtype=np.float32)
    np.testing.assert_allclose(LOGISTIC.derivative(z, np.float32(1)), -np.exp(-z.astype(float)), rtol=1e-5)


@pytest.mark.filterwarnings("error")
def test_extreme_margins_overflow_neither_loss_nor_derivative():
    z = np.array([-1e4, -200.0, 200.0, 1e4], dtype=np.float32)
    for y in (-1.0, 1.0):
        assert np.isfinite(LOGISTIC.loss(z, y)).all()
        assert np.isfinite(LOGISTIC.derivative(z, y)).all()
        assert np.isfinite(LOGISTIC.second(z, y)).all()
    for function in (POISSON.loss, POISSON.derivative, POISSON.second):
        assert np.isfinite(function(z, 3.0)).all()


def test_above_the_clip_the_poisson_loss_goes_on_as_its_tangent():
    z = np.array([29.0, 31.0, 40.0])
    assert POISSON.derivative(z, 0.0)[1] == POISSON.derivative(z, 0.0)[2] == np.exp(30)
    np.testing.assert_allclose(np.diff(POISSON.loss(z[1:], 0.0)), 9 * np.exp(30))


def test_objectives_are_found_by_name_and_stay_themselves_when_copied():
    assert find_objective("squared") is SQUARED
    assert pickle.loads(pickle.dumps(LOGISTIC)) is LOGISTIC
    assert copy.deepcopy(POISSON) is POISSON
    with pytest.raises(InputError, match="did you mean 'logistic'"):
        find_objective("logistics")
