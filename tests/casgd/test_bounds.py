"""The bounds of the nine precision choices against an emulator that rounds after every operation."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from precision_time.casgd.bounds import BOUNDS, ExactStep, OuterStep, bound_policy, solve_exactly, worst_propagation
from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.emulator import emulate_outer_step, isolate_choice, measure_errors, rounding_error
from precision_time.casgd.errors import InputError
from precision_time.casgd.objectives import OBJECTIVES, Objective
from precision_time.casgd.precision import CHOICES, POLICIES, ROUNDOFF
from precision_time.casgd.problem import Options, Problem, Schedule, Start

FORMATS = ("bf16", "fp16", "fp32")


def make_step(
    objective: Objective, *, seed: int = 0, n: int = 128, s: int = 8, b: int = 16, ranks: int = 4
) -> OuterStep:
    """Rows of length about 1 and a first rate at half the stability limit, so that no format leaves its range."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((s * b, n)) / math.sqrt(n)
    truth = random.standard_normal(n)
    z = rows @ truth
    targets = {
        "logistic": np.where(random.random(s * b) < 1 / (1 + np.exp(-z)), 1.0, -1.0),
        "squared": z + 0.3 * random.standard_normal(s * b),
        "poisson": random.poisson(np.exp(z)).astype(float),
    }[objective.name]
    weights = 0.7 * truth + 0.3 * random.standard_normal(n)
    largest = objective.smoothness or float(np.exp(rows @ weights).max())
    rates = 1 / (largest * np.square(rows).sum(axis=1).max()) / np.sqrt(1 + np.arange(s))
    return OuterStep(rows=rows, targets=targets, weights=weights, rates=rates, objective=objective, ranks=ranks)


@pytest.fixture(scope="module")
def exact() -> dict[str, ExactStep]:
    return {name: solve_exactly(make_step(objective)) for name, objective in OBJECTIVES.items()}


@pytest.fixture(scope="module")
def errors(exact: dict[str, ExactStep]) -> dict[str, dict[tuple[str, str], float]]:
    return {name: dict(measure_errors(solved.step, formats=FORMATS)) for name, solved in exact.items()}


def test_exact_step_is_the_s_steps_of_plain_sgd(exact):
    for solved in exact.values():
        step, w = solved.step, solved.step.weights.copy()
        for j, rate in enumerate(step.rates):
            batch = slice(j * step.batch_size, (j + 1) * step.batch_size)
            z = step.rows[batch] @ w
            np.testing.assert_allclose(z, solved.live_margins[batch], rtol=0, atol=1e-13)
            w -= rate * step.rows[batch].T @ step.objective.derivative(z, step.targets[batch]) / step.batch_size
        np.testing.assert_allclose(solved.weights, w, rtol=0, atol=1e-13)


def test_propagation_is_how_a_change_of_the_margins_reaches_the_coefficients(exact):
    for solved in exact.values():
        step, size = solved.step, len(solved.margins)
        change = 1e-6 * np.random.default_rng(1).standard_normal(size)
        live, c = solved.margins + change, np.zeros(size)
        gram = step.rows @ step.rows.T
        for j, rate in enumerate(step.rates):
            batch = slice(j * step.batch_size, (j + 1) * step.batch_size)
            live[batch] -= gram[batch, : batch.start] @ c[: batch.start]
            c[batch] = rate / step.batch_size * step.objective.derivative(live[batch], step.targets[batch])
        assert np.all(np.abs(live - solved.live_margins) <= solved.propagation @ np.abs(change) * (1 + 1e-4))


def test_propagation_stays_below_its_worst_case(exact):
    for name in ("logistic", "squared"):
        assert 1 < exact[name].propagation.sum(axis=1).max() < 2 < worst_propagation(exact[name].step)
    assert worst_propagation(exact["poisson"].step) == math.inf


@pytest.mark.parametrize(("objective", "choice", "fmt"), itertools.product(OBJECTIVES, CHOICES, FORMATS))
def test_error_is_below_its_bound(exact, errors, objective, choice, fmt):
    error, bound = errors[objective][choice, fmt], BOUNDS[choice](exact[objective], u=ROUNDOFF[fmt])
    assert 0 < error < bound


@pytest.mark.parametrize(("objective", "choice"), itertools.product(OBJECTIVES, CHOICES))
def test_error_follows_the_unit_roundoff(errors, objective, choice):
    error = {fmt: errors[objective][choice, fmt] for fmt in FORMATS}
    assert 4 < error["bf16"] / error["fp16"] < 20  # 8 by the roundoffs
    assert 2e3 < error["fp16"] / error["fp32"] < 2e4  # 8192


def test_bounds_are_linear_in_the_unit_roundoff(exact):
    for bound in BOUNDS.values():
        assert bound(exact["logistic"], u=2.0**-8) == pytest.approx(8 * bound(exact["logistic"], u=2.0**-11))


def test_the_gram_matters_least_and_the_weights_most(errors):
    for of in errors.values():
        order = sorted(CHOICES, key=lambda choice: of[choice, "bf16"])
        assert set(order[:2]) == {"gram_accumulate", "gram_storage"}
        assert order[-1] == "weights"


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", ["recipe", "paper", "fp16", "bf16-gram", "all bf16", "all fp16"])
def test_choices_add_up_to_first_order(exact, objective, name):
    policy = POLICIES[name] if name in POLICIES else POLICIES["fp64"].replace(
        name=name, **dict.fromkeys(CHOICES, name.removeprefix("all "))
    )  # fmt: skip
    solved = exact[objective]
    parts = [rounding_error(solved, isolate_choice(choice, fmt)) for choice, fmt in policy.formats.items()]
    joint = rounding_error(solved, policy)
    assert joint == pytest.approx(math.hypot(*parts), rel=0.3)
    assert joint < sum(parts) * 1.02
    bounds = bound_policy(solved, policy)
    assert joint < bounds.root_sum_square < bounds.plain_sum
    assert bounds.parts["x_storage"] == BOUNDS["x_storage"](solved, u=ROUNDOFF[policy.x_storage])
    assert bounds.step_norm == pytest.approx(np.linalg.norm(solved.weights - solved.step.weights))


def test_prediction_counts_roundings_by_their_square_root(exact):
    policy = isolate_choice("margin_accumulate", "bf16")
    bound = bound_policy(exact["squared"], policy).parts["margin_accumulate"]
    predicted = bound_policy(exact["squared"], policy, probabilistic=True).parts["margin_accumulate"]
    assert predicted == pytest.approx(bound / math.sqrt(128 / 4))
    assert rounding_error(exact["squared"], policy) < predicted


def test_fp64_policy_emulates_the_exact_step(exact):
    for solved in exact.values():
        assert np.max(np.abs(emulate_outer_step(solved.step, POLICIES["fp64"]) - solved.weights)) < 1e-14


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_solver_rounds_as_the_emulator_does(objective, name, ranks):
    """One outer step on two ranks: only the order of FP32 sums differs, or a single 16-bit rounding."""
    step = make_step(OBJECTIVES[objective], s=4, b=8, ranks=2)
    solver = Options(
        s=step.s,
        batch_size=step.batch_size,
        epochs=1,
        schedule=Schedule("invscaling", float(step.rates[0]), power_t=0.5),
        order="cyclic",
        policy=name,
    )

    def solve(comm):
        columns = slice(comm.rank * step.columns_per_rank, (comm.rank + 1) * step.columns_per_rank)
        problem = Problem(
            features=step.rows[:, columns], targets=step.targets, objective=step.objective, fit_intercept=False
        )
        return run_ca_sgd(problem, solver, comm=comm, start=Start(weights=step.weights[columns])).weights

    weights = np.concatenate(ranks(solve, 2)).astype(np.float64)
    emulated = emulate_outer_step(step, POLICIES[name])
    away = np.linalg.norm(weights - emulated)
    if name == "fp64":
        assert away < 1e-14 * np.linalg.norm(emulated)
        return
    fp32 = bound_policy(solve_exactly(step), POLICIES["fp32"]).plain_sum
    assert away < (2 * fp32 if name != "paper" else 0.25 * rounding_error(solve_exactly(step), POLICIES[name]))


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_emulator_deals_columns_that_do_not_divide(ranks):
    solved = solve_exactly(make_step(OBJECTIVES["logistic"], n=7, s=3, b=2, ranks=ranks))
    assert np.max(np.abs(emulate_outer_step(solved.step, POLICIES["fp64"]) - solved.weights)) < 1e-15
    assert rounding_error(solved, POLICIES["fp32"]) < bound_policy(solved, POLICIES["fp32"]).plain_sum


def test_emulator_rounds_every_product_and_sum():
    # One rank, one step: margins and increment by hand, in bfloat16 scalars.
    step = make_step(OBJECTIVES["squared"], n=9, s=1, b=2, ranks=1)
    bf16 = ml_dtypes.bfloat16
    low = isolate_choice("margin_accumulate", "bf16").replace(name="by hand", increment="bf16")
    margins = []
    for row in step.rows:
        total = bf16(0)
        for x, w in zip(row, step.weights, strict=True):
            total = bf16(float(total) + float(bf16(x * w)))
        margins.append(float(total))
    c = step.rates[0] * (np.array(margins) - step.targets) / 2
    increment = [float(bf16(float(bf16(column[0] * c[0])) + float(bf16(column[1] * c[1])))) for column in step.rows.T]
    np.testing.assert_array_equal(emulate_outer_step(step, low), step.weights - increment)


def test_a_small_accumulator_stops_at_two_over_u():
    # A running sum of ones: bf16 stops at 256 and fp16 at 2048 (casgd never accumulates in either).
    for fmt, stops, n in (("bf16", 256, 300), ("fp16", 2048, 2100)):
        step = OuterStep(
            rows=np.ones((1, n)), targets=np.zeros(1), weights=np.ones(n), rates=np.ones(1),
            objective=OBJECTIVES["squared"],
        )  # fmt: skip
        after = emulate_outer_step(step, isolate_choice("margin_accumulate", fmt))
        np.testing.assert_array_equal(after, 1.0 - stops)


def test_steps_that_do_not_fit_are_refused():
    good = {"rows": np.ones((4, 3)), "targets": np.ones(4), "weights": np.ones(3), "rates": np.ones(2)}
    for wrong, words in (
        ({"rates": np.ones(3)}, "multiple of s"),
        ({"targets": np.ones(3)}, "targets and weights"),
        ({"weights": np.ones(4)}, "targets and weights"),
        ({"ranks": 4}, "1 to 3 columns"),
        ({"rows": np.ones(4)}, "an outer step"),
        ({"rates": np.ones(0)}, "an outer step"),
    ):
        with pytest.raises(InputError, match=words):
            OuterStep(objective=OBJECTIVES["squared"], **(good | wrong))
