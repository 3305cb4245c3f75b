"""The planner on costs made up by hand; real runs test only results that do not depend on seconds."""

import itertools
import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.communicator import DelayedCommunicator, OneProcess
from precision_time.casgd.costs import Sample, fit_costs, fit_nonnegative
from precision_time.casgd.errors import InputError
from precision_time.casgd.gram import packed_gram_words
from precision_time.casgd.objectives import LOGISTIC
from precision_time.casgd.plan import Plan, _decide, plan
from precision_time.casgd.precision import POLICIES
from precision_time.casgd.problem import PARTS, Options, Problem, Schedule


def make_problem(m: int = 8192, n: int = 28) -> Problem:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, n)).astype(np.float32)
    return Problem(features=x, targets=np.where(x.sum(axis=1) > 0, 1.0, -1.0), objective=LOGISTIC, l2=1e-4)


def make_options(**changed: Any) -> Options:
    return Options(**{"batch_size": 16, "epochs": 1, "schedule": Schedule(eta0=1e-3), **changed})


def emulated() -> DelayedCommunicator:
    """One process that counts as a network."""
    return DelayedCommunicator(OneProcess(), 0.0)


def made_samples(parts_of, *, sizes=((1, 16), (2, 16), (4, 16), (8, 16), (32, 16), (1, 4), (4, 4), (16, 4), (4, 32))):
    """Samples whose seconds a part of an outer step are ``parts_of(s, b)``, for 28 columns on two ranks."""
    for s, b in sizes:
        parts = {part: seconds / s for part, seconds in parts_of(s, b).items()}
        total = sum(parts.values())
        yield Sample(
            objective="logistic",
            policy="fp32",
            rows=8192,
            features=28,
            columns=28,
            density=1.0,
            ranks=2,
            s=s,
            batch_size=b,
            outer_steps=20,
            step_s=total,
            usual_step_s=total,
            parts_s=parts,
        )


def test_the_planned_s_hides_latency_four_times_over_and_is_within_a_tenth_of_the_best(simulate_probes):
    """By a cost model whose network has latency only; bench_casgd_latency.py prints the same figures as measured."""
    costs = partial(parts_of, s_per_byte=0.0)
    simulate_probes(costs)
    problem, options = make_problem(), make_options()
    planned = plan(problem, options, comm=emulated())
    step_s = {2**k: sum(costs(2**k, 16).values()) / 2**k for k in range(7)}
    assert step_s[planned.s] <= 1.1 * min(step_s.values())
    assert step_s[1] >= 4 * step_s[planned.s]
    assert planned.speedup == pytest.approx(step_s[1] / step_s[planned.s])
    for s in (1, planned.s):
        assert run_ca_sgd(problem, replace(options, s=s), comm=OneProcess()).reductions == math.ceil(8192 / 16 / s)


def test_the_plan_finds_the_latency_that_was_put_in(simulate_probes):
    simulate_probes(partial(parts_of, latency_s=200e-6))
    planned = plan(make_problem(4096), make_options(), comm=emulated(), largest_s=16)
    assert planned.alpha_s == pytest.approx(200e-6)
    assert planned.s == 16
    assert planned.speedup > 4
    assert 0 < planned.low_s <= planned.seconds_per_epoch <= planned.high_s
    assert planned.steps_per_epoch == 256
    assert len(planned.samples) <= 13
    assert all(set(sample.parts_s) == set(PARTS) for sample in planned.samples)
    assert any("AllReduce" in reason for reason in planned.reasons)


@pytest.mark.parametrize("comm", [None, OneProcess()])
def test_one_process_runs_plain_sgd(comm):
    planned = plan(make_problem(512), make_options(batch_size=32), comm=comm)
    assert (planned.s, planned.speedup, planned.best_s) == (1, 1.0, 1.0)
    assert {sample.s for sample in planned.samples} == {1}
    assert planned.steps_per_epoch == 16
    assert "one process" in planned.reasons[0]


def test_the_plan_is_json_and_leaves_the_options_policy_alone():
    import json

    planned = plan(make_problem(256, 4), make_options(policy=POLICIES["recipe"]))
    content = json.loads(json.dumps(planned.to_dict()))
    assert content["policy"] == planned.policy.name == "recipe"
    assert len(content["samples"]) == len(planned.samples)
    assert content["samples"][0]["parts_s"].keys() == set(PARTS)


def test_the_guard_is_asked_if_on_risk_is_given():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((512, 8))
    w = rng.standard_normal(8) * 3
    from precision_time.casgd.objectives import SQUARED

    problem = Problem(features=x, targets=x @ w + 1e-3 * rng.standard_normal(512), objective=SQUARED)
    planned = plan(problem, make_options(policy=POLICIES["recipe"]), on_risk="fallback")
    assert planned.policy.x_storage in ("fp16", "fp32")
    assert "instead of recipe" in planned.reasons[0]


def test_costs_that_miss_the_probes_are_warned_of_and_choose_only_an_s_that_was_faster_in_every_round(simulate_probes):
    """A sum costs ten times as much above 300 words, which no linear cost can fit."""

    def staged(s: int, b: int) -> dict[str, float]:
        words = packed_gram_words(s * b, b) + s * b
        return parts_of(s, b) | {"communicate": 2e-3 if words > 300 else 2e-4}

    simulate_probes(staged)
    planned = plan(make_problem(1024), make_options(), comm=emulated(), largest_s=8)
    fastest = min((sample for sample in planned.samples if sample.batch_size == 16), key=lambda one: one.usual_step_s)
    assert planned.error > 0.15
    assert planned.warning in planned.reasons
    assert "faster in every round" in planned.warning
    assert len(fastest.rounds_s) >= 6
    assert planned.s == fastest.s == 2
    assert planned.seconds_per_epoch == pytest.approx(64 * fastest.usual_step_s, rel=1e-9)


def decide(rounds_by_s: dict[int, list[float]]) -> Plan:
    """The plan from made-up rounds at a batch size of 16."""
    samples = [
        replace(sample, s=s, batch_size=16, rounds_s=tuple(rounds), usual_step_s=float(np.median(rounds)),
                step_s=min(rounds), parts_s=dict.fromkeys(PARTS, min(rounds) / len(PARTS)))
        for sample, (s, rounds) in zip(made_samples(parts_of), rounds_by_s.items(), strict=False)
    ]  # fmt: skip
    return _decide(
        samples, problem=make_problem(1024), options=make_options(), word_bytes=4, limit=max(rounds_by_s), level=0.9,
        reasons=[],
    )  # fmt: skip


def test_a_gain_that_no_cost_explains_must_show_in_every_round():
    """s = 2 is slower than its neighbours by so much that no costs fit; a slow spell met s = 1 in most rounds."""
    always = decide({1: [10.0] * 6, 2: [90.0] * 6, 4: [5.0] * 6})
    assert always.warning
    assert (always.s, always.speedup) == (4, 2.0)
    once = decide({1: [10.0, 10.0, 4.0, 10.0, 10.0, 10.0], 2: [90.0] * 6, 4: [5.0] * 6})
    assert once.warning
    assert (once.s, once.speedup) == (1, 1.0)
    assert any("in 83% of the rounds only: s = 1" in reason for reason in once.reasons)


def test_a_gain_that_costs_explain_counts_by_the_fastest_rounds():
    """A larger s has longer probes, which other work on the machine disturbs more often."""
    busy = decide({1: [4.0, 4.2, 4.1, 4.0, 6.0, 4.0], 2: [9.0, 2.5, 8.0, 7.0, 2.5, 9.0]})
    assert not busy.warning
    assert busy.s == 2
    even = decide({1: [4.0] * 6, 2: [3.9] * 6})
    assert not even.warning
    assert even.s == 1


def test_a_slow_spell_at_the_start_meets_all_probes_and_not_plain_sgd_alone(simulate_probes):
    """At 128 rows a step an outer step forms a Gram of 256 x 128 for one sum that costs nothing: s = 1 is best."""
    calls = itertools.count()

    def busy_at_first(s: int, b: int) -> dict[str, float]:
        delay_s = 2e-3 if next(calls) < 12 else 0.0  # all first probes, and a part of the first round
        return parts_of(s, b, latency_s=delay_s + 1e-6)

    simulate_probes(busy_at_first)
    planned = plan(make_problem(), make_options(batch_size=128), comm=emulated(), largest_s=4)
    assert planned.s == 1
    plain = next(sample for sample in planned.samples if (sample.s, sample.batch_size) == (1, 128))
    assert plain.step_s == pytest.approx(sum(parts_of(1, 128, latency_s=1e-6).values()))
    assert next(calls) > 12


def test_planning_is_left_out_if_it_would_take_more_than_its_share_of_training(simulate_probes):
    simulate_probes(parts_of)
    problem, comm = make_problem(600), emulated()
    short = plan(problem, make_options(epochs=5), comm=comm, budget_share=0.05)
    assert (short.s, len(short.samples), short.warning) == (1, 1, "")
    assert "planning takes" in short.reasons[-1]
    assert "5% of the" in short.reasons[-1]
    assert 0 < short.low_s < short.seconds_per_epoch < short.high_s
    long = plan(problem, make_options(epochs=10**6), comm=comm, budget_share=0.05)
    assert len(long.samples) > 5


def test_a_plan_with_prefetch_is_that_of_runs_with_prefetch():
    class Counting(DelayedCommunicator):
        started = 0

        def start_sum(self, buffer: np.ndarray) -> Any:
            self.started += 1
            return super().start_sum(buffer)

    for prefetch in (False, True):
        comm = Counting(OneProcess(), 1e-5)
        planned = plan(make_problem(512), make_options(prefetch=prefetch), comm=comm, largest_s=4, budget_s=0.1)
        assert planned.prefetch is prefetch
        assert planned.to_dict()["prefetch"] is prefetch
        assert (comm.started > 0) is prefetch


def test_memory_limits_s(simulate_probes):
    simulate_probes(parts_of)
    planned = plan(make_problem(2048), make_options(), comm=emulated(), memory_bytes=2 * 4 * (4 * 16) ** 2)
    assert planned.s == 4


def test_a_block_is_not_longer_than_an_epoch():
    planned = plan(make_problem(40), make_options(), comm=emulated())
    assert planned.s <= 2


def test_tiny_data_and_a_batch_of_all_rows():
    planned = plan(make_problem(7, 3), make_options(batch_size=100), comm=emulated())
    assert (planned.s, planned.steps_per_epoch, planned.batch_size) == (1, 1, 7)


@pytest.mark.parametrize("wrong", [{"largest_s": 0}, {"outer_steps": 0}, {"level": 1.0}])
def test_limits_out_of_range_are_named(wrong):
    with pytest.raises(InputError):
        plan(make_problem(64, 3), make_options(), **wrong)


def parts_of(s: int, b: int, *, latency_s: float = 50e-6, s_per_byte: float = 1e-9) -> dict[str, float]:
    return {
        "gather": 2e-6 + 1e-9 * s * b * 28,
        "gram": 1.5e-6 * (s - 1) + 2e-11 * b * b * s * (s - 1) * 28,
        "communicate": latency_s + s_per_byte * 4 * (b * b * s * (s - 1) / 2 + s * b),
        "recurrence": 4e-6 * s + 1e-8 * s * b + 3e-10 * b * b * s * (s - 1),
        "update": 1e-6 + 5e-10 * s * b * 28,
    }


def test_a_fit_returns_the_costs_that_made_the_samples():
    costs = fit_costs(list(made_samples(parts_of)))
    assert costs.alpha_s == pytest.approx(50e-6, rel=1e-6)
    assert costs.beta_s_per_byte == pytest.approx(1e-9, rel=1e-6)
    assert costs.gamma_s_per_flop == pytest.approx(2e-11, rel=1e-6)
    assert costs.step_s == pytest.approx(4e-6, rel=1e-6)
    for s, b in ((16, 16), (64, 8)):
        expected = sum(parts_of(s, b).values()) / s
        assert costs.predict_step_s(s, b, stored_columns=28) == pytest.approx(expected, rel=1e-6)


def test_the_unrounded_optimum_is_where_the_prediction_is_least():
    costs = fit_costs(list(made_samples(parts_of)))
    least = min(range(2, 200), key=lambda s: costs.predict_step_s(s, 16, stored_columns=28))
    assert costs.best_s(16, stored_columns=28) == pytest.approx(least, abs=0.51)


def test_least_squares_keep_signs_and_match_scipy():
    from scipy.optimize import nnls

    rng = np.random.default_rng(5)
    for _ in range(30):
        design, target = rng.standard_normal((12, 4)), rng.standard_normal(12)
        solution = fit_nonnegative(design, target)
        assert (solution >= 0).all()
        np.testing.assert_allclose(solution, nnls(design, target)[0], atol=1e-10)


def test_nothing_can_be_fitted_to_no_samples():
    with pytest.raises(InputError, match="nothing to fit"):
        fit_costs([])


def test_ranks_with_different_columns_plan_alike(ranks):
    problem = make_problem(1024, 9)

    def work(comm):
        columns = slice(0, 7) if comm.rank else slice(7, 9)
        part = replace(problem, features=np.ascontiguousarray(problem.features[:, columns]))
        return plan(part, make_options(), comm=comm, largest_s=8, budget_s=0.5, outer_steps=4)

    first, second = ranks(work, 2)
    assert first.to_dict() == second.to_dict()
    assert (first.samples[0].columns, first.samples[0].features) == (7, 9)
    assert first.samples[0].ranks == 2
