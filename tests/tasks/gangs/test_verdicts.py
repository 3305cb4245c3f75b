"""A cell judged by all of its rows."""

from dataclasses import replace

import pytest

from precision_time.tasks.gangs.verdicts import judge_rows, mark_levels
from precision_time.tasks.ranks.conditions import Conditions
from precision_time.tasks.ranks.device_state import GpuState
from precision_time.tasks.ranks.timed_loop import LoopResult
from precision_time.tests.tasks import builders
from precision_time.tests.tasks.builders import ENVIRONMENT, make_job, make_step

JOB = make_job("none", environment=replace(ENVIRONMENT, device_type="cuda", gpu="A100-SXM4-80GB"))


def rows_of(times, *, warmup=5, skipped=(), rank_1=1.0, **conditions):
    """Rows of two ranks: ``times`` of rank 0, rank 1 takes ``rank_1`` times as long."""
    rows = []
    for rank in range(2):
        steps = [
            make_step(iteration_s=seconds * (rank_1 if rank else 1.0), step_skipped=step in skipped, **conditions)
            for step, seconds in enumerate(times)
        ]
        result = LoopResult(warmup=steps[:warmup], synced=steps[warmup:], local=steps[warmup:], steady=True)
        rows += builders.rows_of(JOB, result, rank=rank)
    return rows


def cold_steps(rows):
    return sorted({row.step for row in rows if row.is_cold})


def test_a_late_slow_down_makes_the_steps_before_it_cold_on_every_rank():
    rows = mark_levels(rows_of([0.100] * 60 + [0.115] * 20))
    assert cold_steps(rows) == list(range(60))
    assert len([row for row in rows if row.is_cold]) == 2 * 60
    assert all(row.is_settled for row in rows)


def test_the_slowest_rank_of_a_step_makes_the_series():
    # Rank 0 alone never changes level; rank 1 is slower from step 60 on.
    rows = rows_of([0.1] * 80)
    slow = rows_of([0.1] * 60 + [0.12] * 20)[80:]
    assert cold_steps(mark_levels(rows[:80] + slow)) == list(range(60))


def test_a_change_too_late_to_measure_after_it_leaves_the_cell_unsettled():
    rows = mark_levels(rows_of([0.1] * 40 + [0.2] * 20, warmup=59))
    assert cold_steps(rows) == list(range(40))  # the only measured step is after the change
    never = mark_levels(rows_of([0.1 * 1.02**step for step in range(60)]))
    assert not any(row.is_settled for row in never)


def test_a_quiet_cell_has_no_cold_step():
    rows = mark_levels(rows_of([0.1, 0.101] * 15))
    assert cold_steps(rows) == []
    assert judge_rows(rows) is None


THROTTLED = Conditions(load_average=0.0, gpu=GpuState(throttled=True, reasons="hardware thermal slowdown"))
CROWDED = Conditions(load_average=90.0, other_cpu_share=0.95, steal_share=0.04, contended=True)
BUSY = Conditions(load_average=9.0, other_cpu_share=0.85, steal_share=0.0, contended=True)


@pytest.mark.parametrize(
    ("options", "cause", "said"),
    [
        ({"conditions": THROTTLED}, "throttled", "hardware thermal slowdown"),
        ({"conditions": CROWDED}, "contended", "at least 99%"),
        ({"skipped": range(5, 30)}, "no usable step", "every measured step"),
    ],
)
def test_a_cell_without_one_good_step_is_no_success(options, cause, said):
    verdict = judge_rows(mark_levels(rows_of([0.1] * 30, **options)))
    assert verdict[0] == cause
    assert said in verdict[1]


def test_a_cell_that_never_settles_and_has_no_median_is_no_success():
    wild = [0.1 * 1.5 ** (step // 3) for step in range(30)]
    assert judge_rows(mark_levels(rows_of(wild)))[0] == "unsteady"


def test_ordinary_noise_and_contention_stay_recorded():
    assert judge_rows(mark_levels(rows_of([0.1, 0.13, 0.09] * 10, conditions=BUSY))) is None
    one_good = rows_of([0.1] * 30, conditions=THROTTLED)[:-1] + rows_of([0.1] * 30)[-1:]
    assert judge_rows(mark_levels(one_good)) is None
