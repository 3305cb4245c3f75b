"""Tests of communication-avoiding SGD: its iterates are those of SGD, its messages are counted."""

import dataclasses
import itertools

import numpy as np
import pytest
import scipy.sparse
from sklearn.datasets import load_breast_cancer, load_digits

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.communicator import OneProcess
from precision_time.casgd.errors import CommunicationError, InputError
from precision_time.casgd.gram import packed_gram_words
from precision_time.casgd.objectives import LOGISTIC
from precision_time.casgd.precision import POLICIES
from precision_time.casgd.problem import PARTS, Options, Problem, Schedule, Start, batch_order
from precision_time.casgd.run import Run

SCHEDULES = {
    "constant": Schedule("constant", 0.3),
    "invscaling": Schedule("invscaling", 0.5, power_t=0.5),
    "optimal": Schedule("optimal", 0.5, alpha=0.05),
}


def options(**more):
    return Options(**{"batch_size": 8, "epochs": 2, "schedule": SCHEDULES["optimal"], "policy": "fp64", **more})


def take_columns(problem, columns):
    """The problem of the rank that owns these columns."""
    return Problem(
        features=problem.features[:, columns],
        targets=problem.targets,
        objective=problem.objective,
        l2=problem.l2,
        sample_weight=problem.sample_weight,
        fit_intercept=problem.fit_intercept,
    )


def after(solution):
    """Where the next part of a run starts."""
    return Start(weights=solution.weights, intercept=solution.intercept, steps=solution.steps, epochs=solution.epochs)


def assert_same_iterate(solution, expected, relative=1e-12):
    scale = np.abs(expected.weights).max()
    assert scale > 0
    assert np.abs(solution.weights - expected.weights).max() <= relative * scale
    assert solution.intercept == pytest.approx(expected.intercept, rel=relative, abs=relative * scale)
    np.testing.assert_allclose(solution.loss_curve, expected.loss_curve, rtol=relative)


def reference_sgd(problem, solver):
    """Textbook mini-batch SGD, on all columns at once."""
    x, y = np.asarray(problem.features, dtype=float), np.asarray(problem.targets, dtype=float)
    a = np.ones(len(y)) if problem.sample_weight is None else problem.sample_weight
    w, w0, t = np.zeros(x.shape[1]), 0.0, 0
    for epoch in range(solver.epochs):
        rows = batch_order(len(y), solver.batch_size, epoch, order=solver.order, seed=solver.seed)
        for start in range(0, len(y), solver.batch_size):
            batch = rows[start : start + solver.batch_size]
            t += 1
            eta = solver.schedule.rates(t, 1)[0]
            z = x[batch] @ w + w0
            r = a[batch] * problem.objective.derivative(z, y[batch]) / len(batch)
            w = w - eta * (x[batch].T @ r + problem.l2 * w)
            w0 -= eta * r.sum() if problem.fit_intercept else 0.0
    return w, w0


GRID = list(
    itertools.product(
        [(2, 8), (5, 3), (4, 16), (40, 8), (3, 500)],  # (s, b): short tails, one block an epoch, one batch an epoch
        ["logistic", "squared", "poisson"],
        [0.0, 0.1],
        sorted(SCHEDULES),
    )
)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("form", ["dense", "csr", "csr made dense"])
@pytest.mark.parametrize("number", range(8))
def test_float64_iterates_are_those_of_sgd(form, number, size, problem_of, ranks):
    for index, ((s, b), objective, l2, schedule) in enumerate(GRID):
        if index % 8 != number:
            continue
        weighted, fit_intercept, cyclic = np.random.default_rng(index).random(3) < 0.5
        problem = problem_of(
            objective,
            l2=l2,
            sample_weight=np.random.default_rng(index).random(203) if weighted else None,
            fit_intercept=bool(fit_intercept),
        )
        if form != "dense":
            share = 0.03 if form == "csr" else 0.3  # on both sides of the density from which blocks are made dense
            holes = np.random.default_rng(index).random(problem.features.shape) < share
            problem = take_columns(problem, slice(None))
            object.__setattr__(problem, "features", scipy.sparse.csr_matrix(problem.features * holes))
        solver = options(s=s, batch_size=b, schedule=SCHEDULES[schedule], order="cyclic" if cyclic else "shuffled")
        plain = run_ca_sgd(problem, dataclasses.replace(solver, s=1))
        if size == 1:
            assert_same_iterate(run_ca_sgd(problem, solver), plain)
            continue
        parts = [slice(0, 9), slice(9, None)]
        solutions = ranks(
            lambda comm, problem=problem, solver=solver, parts=parts: run_ca_sgd(
                take_columns(problem, parts[comm.rank]), solver, comm=comm
            ),
            2,
        )
        weights = np.concatenate([solution.weights for solution in solutions])
        for solution in solutions:
            assert_same_iterate(dataclasses.replace(solution, weights=weights), plain)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("objective", ["logistic", "squared", "poisson"])
@pytest.mark.parametrize("order", ["shuffled", "cyclic"])
def test_every_s_takes_the_steps_of_textbook_sgd(objective, order, weighted, problem_of):
    problem = problem_of(objective, l2=0.05, sample_weight=np.random.default_rng(5).random(203) if weighted else None)
    for s in (1, 6):
        solver = options(s=s, order=order, seed=3)
        solution = run_ca_sgd(problem, solver)
        weights, intercept = reference_sgd(problem, solver)
        np.testing.assert_allclose(solution.weights, weights, rtol=1e-11, atol=1e-13)
        assert solution.intercept == pytest.approx(intercept, rel=1e-11)
        assert solution.steps == 2 * 26


def plain_float32_sgd(problem, solver):
    """`reference_sgd` with every number in float32."""
    x, y = problem.features.astype(np.float32), problem.targets.astype(np.float32)
    w, w0, t = np.zeros(x.shape[1], np.float32), np.float32(0), 0
    for epoch in range(solver.epochs):
        rows = batch_order(len(y), solver.batch_size, epoch, order=solver.order, seed=solver.seed)
        for start in range(0, len(y), solver.batch_size):
            batch = rows[start : start + solver.batch_size]
            t += 1
            eta = np.float32(solver.schedule.rates(t, 1)[0])
            r = problem.objective.derivative(x[batch] @ w + w0, y[batch]).astype(np.float32) / np.float32(len(batch))
            w = w - eta * (x[batch].T @ r + np.float32(problem.l2) * w)
            w0 = w0 - eta * r.sum()
    return w


@pytest.mark.parametrize(("s", "b"), [(2, 8), (5, 3), (4, 16), (40, 8)])
@pytest.mark.parametrize("objective", ["logistic", "squared", "poisson"])
def test_fp32_iterates_stay_within_a_roundoff_a_step_of_each_other(objective, s, b, problem_of):
    """s > 1 against s = 1, and s = 1 against textbook SGD: the bound that run_ca_sgd states."""
    problem = problem_of(objective, l2=0.01)
    solver = options(s=1, batch_size=b, policy="fp32")
    plain = run_ca_sgd(problem, solver)
    bound = plain.steps * 2.0**-24 * np.abs(plain.weights).max()
    unrolled = run_ca_sgd(problem, dataclasses.replace(solver, s=s))
    assert 0 < np.abs(unrolled.weights - plain.weights).max() < bound
    assert np.abs(plain_float32_sgd(problem, solver) - plain.weights).max() < bound
    np.testing.assert_allclose(unrolled.loss_curve, plain.loss_curve, rtol=plain.steps * 2.0**-24)


@pytest.mark.parametrize("form", ["dense", "csr"])
@pytest.mark.parametrize("s", [1, 6])
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("objective", ["logistic", "squared", "poisson"])
def test_two_ranks_reach_the_solution_of_one(form, s, prefetch, objective, problem_of, ranks):
    problem = problem_of(objective, l2=0.05)
    if form == "csr":
        holes = np.random.default_rng(1).random(problem.features.shape) < 0.03
        object.__setattr__(problem, "features", scipy.sparse.csr_matrix(problem.features * holes))
    solver = options(s=s, prefetch=prefetch)
    alone = run_ca_sgd(problem, solver)
    parts = [slice(0, 9), slice(9, None)]
    solutions = ranks(lambda comm: run_ca_sgd(take_columns(problem, parts[comm.rank]), solver, comm=comm), 2)
    assert solutions[0].intercept == solutions[1].intercept
    assert solutions[0].loss_curve == solutions[1].loss_curve
    np.testing.assert_allclose(
        np.concatenate([solution.weights for solution in solutions]), alone.weights, rtol=1e-12, atol=1e-13
    )


def test_there_is_one_sum_an_outer_step_and_it_carries_half_of_the_gram_and_the_margins(problem_of, ranks):
    problem = problem_of("logistic", m=200)
    solver = options(s=4, batch_size=8, epochs=3, policy="recipe")  # 25 batches: six blocks of 4, one of 1
    parts = [slice(0, 9), slice(9, None)]

    def job(comm):
        return run_ca_sgd(take_columns(problem, parts[comm.rank]), solver, comm=comm), comm.words

    for solution, words in ranks(job, 2):
        assert solution.reductions == 3 * 7
        assert words == 3 * (6 * [packed_gram_words(32, 8) + 32] + [8])


def test_prefetch_changes_nothing_but_the_messages(problem_of):
    problem = problem_of("logistic", l2=0.01)
    plain, ahead = (run_ca_sgd(problem, options(s=4, prefetch=prefetch)) for prefetch in (False, True))
    np.testing.assert_array_equal(plain.weights, ahead.weights)
    # 26 batches are 6 blocks of four and one of two, in each of the two epochs.
    assert (plain.reductions, ahead.reductions) == (2 * 7, 2 * 14)


def test_the_sum_of_the_next_gram_is_under_way_during_the_recurrence(problem_of):
    events = []

    class Watched(OneProcess):
        def start_sum(self, buffer):
            number = len(events)
            events.append(f"start {buffer.size}")

            class Pending:
                def wait(self):
                    events.append(f"wait {number}")

            self.reductions += 1
            return Pending()

    problem = problem_of("squared", m=64)
    run_ca_sgd(problem, options(s=4, batch_size=8, epochs=1, prefetch=True), comm=Watched())
    gram = packed_gram_words(32, 8)
    # The second Gram starts after the first block's sums are in and ends only when the second block asks for it.
    assert events == [
        f"start {gram}", "start 32", "wait 0", "wait 1", f"start {gram}", "start 32", "wait 4", "wait 5",
    ]  # fmt: skip


def test_neither_s_nor_the_ranks_change_the_order_of_the_rows():
    order = batch_order(100, 8, 3, order="shuffled", seed=1)
    assert sorted(order) == list(range(100))
    np.testing.assert_array_equal(order, batch_order(100, 32, 3, order="shuffled", seed=1))
    assert (order != batch_order(100, 8, 4, order="shuffled", seed=1)).any()
    assert batch_order(5, 2, 9, order="cyclic", seed=1).tolist() == list(range(5))


@pytest.mark.parametrize("s", [1, 5])
def test_a_run_in_two_parts_is_the_run_in_one(s, problem_of):
    problem = problem_of("logistic", l2=0.01)
    whole = run_ca_sgd(problem, options(s=s, epochs=3))
    first = run_ca_sgd(problem, options(s=s, epochs=2))
    second = run_ca_sgd(
        problem,
        options(s=s, epochs=1),
        start=after(first),
    )
    np.testing.assert_array_equal(second.weights, whole.weights)
    assert first.loss_curve + second.loss_curve == whole.loss_curve


@pytest.mark.parametrize("s", [1, 5])
def test_training_stops_when_the_loss_stops_falling(s, problem_of):
    problem = problem_of("logistic", l2=0.1)
    stopped = run_ca_sgd(problem, options(s=s, epochs=200, tol=1e-4, n_iter_no_change=3))
    assert stopped.converged
    assert 3 < stopped.epochs < 200
    assert len(stopped.loss_curve) == stopped.epochs
    best = np.minimum.accumulate(stopped.loss_curve)
    assert (np.asarray(stopped.loss_curve[-3:]) > best[-4:-1] - 1e-4).all()
    assert not run_ca_sgd(problem, options(s=s, epochs=3)).converged


def test_the_loss_of_an_epoch_is_that_of_the_margins_the_steps_saw(problem_of):
    problem = problem_of("squared", sample_weight=np.random.default_rng(1).random(203))
    still = run_ca_sgd(problem, options(s=4, schedule=Schedule("constant", 1e-30), epochs=1))
    expected = np.average(problem.targets**2 / 2, weights=problem.sample_weight)
    assert still.loss_curve[0] == pytest.approx(expected)


def test_zero_epochs_give_back_the_start(problem_of):
    start = np.arange(23.0)
    solution = run_ca_sgd(problem_of("squared"), options(s=3, epochs=0), start=Start(weights=start, intercept=0.5))
    np.testing.assert_array_equal(solution.weights, start)
    assert (solution.intercept, solution.steps, solution.loss_curve, solution.reductions) == (0.5, 0, (), 0)
    assert set(solution.seconds) == set(PARTS)


@pytest.mark.parametrize("s", [1, 8])
def test_iterates_that_diverge_are_an_error_that_names_the_epoch(s, problem_of):
    with pytest.raises(InputError, match=r"diverged in epoch \d+.*eta0"):
        run_ca_sgd(problem_of("squared"), options(s=s, epochs=400, schedule=Schedule("constant", 1e3), policy="fp32"))


def test_ranks_that_disagree_are_named_before_the_first_sum(problem_of, ranks):
    problem = problem_of("logistic")
    with pytest.raises(InputError, match=r"rank 1 has seed=1"):
        ranks(lambda comm: run_ca_sgd(problem, options(s=2, seed=comm.rank), comm=comm), 2)
    with pytest.raises(InputError, match="targets"):
        ranks(lambda comm: run_ca_sgd(problem_of("logistic", seed=comm.rank), options(s=2), comm=comm), 2)


def test_features_of_another_type_or_library_on_one_rank_are_named(problem_of, ranks):
    problem = problem_of("logistic")

    def job(comm, convert):
        part = take_columns(problem, [slice(0, 9), slice(9, None)][comm.rank])
        if comm.rank == 1:
            part = dataclasses.replace(part, features=convert(part.features))
        return run_ca_sgd(part, options(s=2), comm=comm)

    with pytest.raises(InputError, match=r'rank 1 has features.dtype="float32" where the others have "float64"'):
        ranks(lambda comm: job(comm, lambda x: x.astype(np.float32)), 2)
    with pytest.raises(InputError, match=r'rank 1 has features.library="scipy"'):
        ranks(lambda comm: job(comm, scipy.sparse.csr_matrix), 2)


@pytest.mark.parametrize("s", [1, 3])
@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_matrix])
def test_a_rank_without_columns_is_named_on_every_rank(s, form, problem_of, ranks):
    problem = problem_of("logistic")
    object.__setattr__(problem, "features", form(problem.features))

    def job(comm):
        columns = [slice(0, 23), slice(23, 23)][comm.rank]
        with pytest.raises(InputError) as caught:
            run_ca_sgd(take_columns(problem, columns), options(s=s), comm=comm)
        return str(caught.value)

    first, second = ranks(job, 2)
    assert second.startswith("a rank owns no column; got: rank 1 of 2")
    assert first.startswith("rank 1 cannot go on; got: a rank owns no column")


class _OwnSums:
    """A communicator whose sums are a little larger on one rank, which no AllReduce should do."""

    def __init__(self, inner, factor):
        self._inner, self._factor = inner, factor

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def sum(self, buffer):
        self._inner.sum(buffer)
        buffer *= self._factor


@pytest.mark.parametrize(("policy", "factor"), [("fp64", 1 + 1e-9), ("fp32", 1 + 1e-2)])
@pytest.mark.parametrize("s", [1, 4])
def test_ranks_that_no_longer_hold_the_same_model_raise(s, policy, factor, problem_of, ranks):
    problem = problem_of("squared")

    def job(comm):
        part = take_columns(problem, [slice(0, 9), slice(9, None)][comm.rank])
        comm = _OwnSums(comm, factor if comm.rank == 1 else 1.0)
        with pytest.raises(CommunicationError, match=r"no longer hold the same model after epoch 1; got: rank 1 has"):
            run_ca_sgd(part, options(s=s, policy=policy), comm=comm)

    ranks(job, 2)


def test_rank_0_decides_when_to_stop(problem_of, ranks, monkeypatch):
    """The losses of rank 1 go up and down in the last bits, as on another processor, so it alone would stop at once."""
    score = Run._score

    def shaken(run, epoch):
        return score(run, epoch) * (1 + 2.0**-20 * run.comm.rank * (-1) ** len(run.losses))

    monkeypatch.setattr(Run, "_score", shaken)
    problem = problem_of("squared", l2=1.0)
    solver = options(s=4, policy="fp32", epochs=60, tol=0.0, n_iter_no_change=1, schedule=Schedule("constant", 1e-7))

    def job(comm):
        return run_ca_sgd(take_columns(problem, [slice(0, 9), slice(9, None)][comm.rank]), solver, comm=comm)

    first, second = ranks(job, 2)
    assert (first.epochs, first.converged) == (second.epochs, second.converged)
    assert first.epochs > 3


def test_losses_of_an_earlier_part_count_for_the_end_of_training(problem_of):
    problem = problem_of("logistic", l2=0.1)
    shared = {"s": 5, "tol": 1e-4, "n_iter_no_change": 3}
    whole = run_ca_sgd(problem, options(epochs=200, **shared))
    first = run_ca_sgd(problem, options(epochs=whole.epochs - 1, **shared))
    rest = run_ca_sgd(
        problem,
        options(epochs=50, earlier_losses=first.loss_curve, **shared),
        start=after(first),
    )
    assert not first.converged
    assert (rest.epochs, rest.converged) == (1, True)
    np.testing.assert_array_equal(rest.weights, whole.weights)


def test_bad_columns_on_one_rank_end_every_rank(problem_of, ranks):
    problem = problem_of("logistic")

    def job(comm):
        features = problem.features.copy()
        features[5, 0] = np.nan if comm.rank == 1 else 0.0
        broken = take_columns(problem, slice(None))
        object.__setattr__(broken, "features", features)
        with pytest.raises(InputError) as caught:
            run_ca_sgd(broken, options(s=2), comm=comm)
        return str(caught.value)

    messages = ranks(job, 3)
    assert "rank 1 cannot go on; got: features hold NaN" in messages[0]
    assert messages[1].startswith("features hold NaN")
    assert messages[2] == messages[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"targets": np.zeros(203)},
        {"targets": np.ones(202)},
        {"sample_weight": -np.ones(203)},
        {"l2": -1.0},
        {"features": np.ones(203)},
        {"targets": np.full(203, np.nan)},
    ],
)
def test_an_invalid_problem_is_refused(wrong, problem_of):
    with pytest.raises(InputError):
        problem_of("logistic", **wrong)


@pytest.mark.parametrize("wrong", [{"s": 0}, {"batch_size": 0}, {"epochs": -1}, {"order": "random"}, {"policy": "x"}])
def test_invalid_options_are_refused(wrong):
    with pytest.raises(InputError):
        options(**wrong)


def full_loss(problem, solution):
    """f on the original features, in float64."""
    weights = solution.weights.astype(np.float64)
    z = problem.features @ weights + solution.intercept
    return problem.objective.loss(z, problem.targets).mean() + problem.l2 / 2 * weights @ weights


def excess(problem, policy, *, s, batch_size, epochs):
    """Loss of the policy over that of FP32 SGD, less 1; the step is 1/t from the stability estimate 1/(L max|x|^2)."""
    norm2 = np.square(problem.features).sum(axis=1).max()
    eta0 = 1 / ((problem.objective.smoothness or 4.0) * norm2)
    steps = -(-problem.rows // batch_size)
    schedule = Schedule("optimal", eta0, alpha=1 / (eta0 * steps))  # half of eta0 after one epoch
    shared = {"batch_size": batch_size, "epochs": epochs, "schedule": schedule}
    exact = run_ca_sgd(problem, Options(policy="fp32", **shared))
    mixed = run_ca_sgd(problem, Options(s=s, policy=policy, **shared))
    return full_loss(problem, mixed) / full_loss(problem, exact) - 1


@pytest.mark.parametrize("policy", ["recipe", "paper", "fp16", "bf16-gram"])
@pytest.mark.parametrize("objective", ["logistic", "squared", "poisson"])
def test_mixed_precision_stays_within_half_a_percent_of_fp32_sgd_on_made_up_data(objective, policy, problem_of):
    for seed in range(3):
        problem = problem_of(objective, m=2048, n=64, seed=seed)
        assert abs(excess(problem, policy, s=16, batch_size=16, epochs=3)) < 0.005


def standardised(features):
    scale = features.std(axis=0)
    return (features - features.mean(axis=0)) / np.where(scale > 0, scale, 1)


@pytest.mark.parametrize("policy", ["recipe", "paper"])
@pytest.mark.parametrize("name", ["breast_cancer", "digits"])
def test_mixed_precision_stays_within_a_twentieth_of_a_percent_on_real_data(name, policy):
    features, target = (load_breast_cancer if name == "breast_cancer" else load_digits)(return_X_y=True)
    labels = np.where(target % 2 == 1, 1.0, -1.0)
    scaled = standardised(features) if name == "breast_cancer" else features / 16
    problem = Problem(features=scaled, targets=labels, objective=LOGISTIC)
    for s in (8, 32):
        assert abs(excess(problem, policy, s=s, batch_size=16, epochs=5)) < 0.0005


def test_a_low_format_shows_where_it_is_chosen(problem_of):
    """Every choice that may be low changes the result, so no choice is without effect."""
    problem = problem_of("logistic", m=256)
    base = run_ca_sgd(problem, options(s=4, policy="fp32")).weights
    for choice in ("x_storage", "margin_storage", "gram_storage", "weights"):
        policy = POLICIES["fp32"].replace(name="one", **{choice: "bf16"})
        difference = np.abs(run_ca_sgd(problem, options(s=4, policy=policy)).weights - base).max()
        assert 0 < difference < 0.05 * np.abs(base).max()
