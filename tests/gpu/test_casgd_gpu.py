"""The GPU back end of CA-SGD on a GPU: the same iterates as on the CPU, in at most six launches an outer step."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from precision_time.casgd import gpu
from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.errors import InputError
from precision_time.casgd.objectives import find_objective
from precision_time.casgd.precision import POLICIES
from precision_time.casgd.problem import Options, Problem, Schedule

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy() -> Any:
    """CuPy on a GPU. Without one the test fails, since ``-m gpu`` was requested."""
    import cupy

    if not cupy.cuda.is_available():
        pytest.fail("no CUDA GPU can be used here")
    return cupy


def make_problem(objective: str, *, m: int = 4001, n: int = 100) -> Problem:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((m, n)) / np.sqrt(n)
    z = x @ rng.standard_normal(n)
    y = {"logistic": np.where(z > 0, 1.0, -1.0), "squared": z + 0.1, "poisson": rng.poisson(np.exp(z))}[objective]
    return Problem(features=x, targets=y, objective=find_objective(objective), l2=1e-3, sample_weight=rng.random(m))


def make_options(policy: str, **changed: Any) -> Options:
    settings = {"s": 8, "batch_size": 16, "epochs": 2, "schedule": Schedule(kind="invscaling", eta0=0.3), **changed}
    return Options(policy=POLICIES[policy], **settings)


@pytest.mark.parametrize("objective", ["logistic", "squared", "poisson"])
@pytest.mark.parametrize(("policy", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-5), ("recipe", 1e-5), ("fp16", 1e-5)])
@pytest.mark.parametrize(("s", "batch_size"), [(1, 32), (8, 16), (64, 4), (32, 64)])
def test_iterates_are_those_of_the_cpu(cupy, objective, policy, tolerance, s, batch_size):
    problem, options = make_problem(objective), make_options(policy, s=s, batch_size=batch_size)
    expected = run_ca_sgd(problem, options)
    solution = run_ca_sgd(replace(problem, features=cupy.asarray(problem.features)), options)
    atol = tolerance * np.abs(expected.weights).max()
    np.testing.assert_allclose(solution.weights, expected.weights, rtol=0, atol=atol)
    np.testing.assert_allclose(solution.loss_curve, expected.loss_curve, rtol=tolerance)


def test_an_outer_step_is_five_launches_and_a_sum(cupy):
    problem = make_problem("logistic")
    run = gpu.DeviceRun(replace(problem, features=cupy.asarray(problem.features)), make_options("recipe"))
    run.pass_over(next(run.epochs()))
    assert run.launched == [name for name in gpu.LAUNCHES if name != "all_reduce"]
    assert run.comm.reductions == -(-4001 // 128)


@pytest.mark.parametrize("objective", ["logistic", "squared", "poisson"])
def test_prefetch_changes_no_bit(cupy, objective):
    problem = make_problem(objective)
    on_gpu = replace(problem, features=cupy.asarray(problem.features))
    plain, ahead = (run_ca_sgd(on_gpu, make_options("recipe", prefetch=prefetch)) for prefetch in (False, True))
    assert (ahead.weights == plain.weights).all()
    assert ahead.loss_curve == plain.loss_curve


def test_equal_runs_give_equal_bits(cupy):
    problem = make_problem("logistic")
    on_gpu = replace(problem, features=cupy.asarray(problem.features))
    first, second = (run_ca_sgd(on_gpu, make_options("recipe")) for _ in range(2))
    assert (first.weights == second.weights).all()
    assert first.loss_curve == second.loss_curve


def test_nan_on_the_device_is_named(cupy):
    problem = make_problem("squared")
    on_gpu = cupy.asarray(problem.features)
    on_gpu[17, 3] = np.nan
    with pytest.raises(InputError, match="NaN"):
        run_ca_sgd(replace(problem, features=on_gpu), make_options("recipe"))
