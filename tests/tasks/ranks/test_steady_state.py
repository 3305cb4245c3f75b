import random
import statistics

import pytest

from precision_time.tasks.ranks.steady_state import (
    Levels,
    find_levels,
    is_steady,
    least_warmup,
    pair_size,
    union_length,
    warmup_size,
)


def test_steady_means_that_the_halves_of_the_last_window_agree():
    assert is_steady([9.0, 5.0, *[1.0, 1.02, 0.99, 1.01] * 2], tolerance=0.05)
    assert not is_steady([1.2, 1.2, 1.2, 1.2, 1.0, 1.0, 1.0, 1.0], tolerance=0.05)
    assert not is_steady([1.0] * 7, tolerance=0.05)


def test_one_outlier_does_not_make_a_window_unsteady():
    assert is_steady([1.0, 1.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0], tolerance=0.05)


def test_warmup_goes_three_steps_past_the_last_change_of_buckets():
    assert least_warmup([(50,)], wanted=0, in_time=True) == 4
    assert least_warmup([(50,), (1, 49), (1, 49)], wanted=0, in_time=True) == 4
    assert least_warmup([(50,), (50,), (50,), (50,), (1, 49)], wanted=0, in_time=True) == 7
    assert least_warmup([(50,)], wanted=10, in_time=True) == 10


def test_a_late_cell_takes_only_the_warmup_that_the_buckets_ask_for():
    assert least_warmup([(50,), (1, 49)], wanted=10, in_time=False) == 4


def test_warmup_ends_when_steady_and_not_before_its_least():
    steady = [1.0] * 8
    assert warmup_size(steady, least=8, elapsed_s=1.0, cap_s=60.0, tolerance=0.05) == 0
    assert warmup_size(steady, least=9, elapsed_s=1.0, cap_s=60.0, tolerance=0.05) == 1


def test_warmup_ends_at_its_share_of_the_time_though_not_steady():
    restless = [1.0, 2.0] * 4 + [3.0] * 4
    assert warmup_size(restless, least=5, elapsed_s=10.0, cap_s=60.0, tolerance=0.05) > 0
    assert warmup_size(restless, least=5, elapsed_s=30.0, cap_s=60.0, tolerance=0.05) == 0


def test_slow_steps_are_decided_one_by_one():
    assert warmup_size([0.01] * 4, least=20, elapsed_s=1.0, cap_s=60.0, tolerance=0.05) == 5
    assert warmup_size([2.0] * 4, least=20, elapsed_s=8.0, cap_s=60.0, tolerance=0.05) == 1


def test_measured_blocks_fit_into_the_time_that_is_left():
    sizes = {"wanted": 20, "step_s": 1.0, "blocks": 2, "cap_s": 60.0}
    assert pair_size(0, elapsed_s=0.0, **sizes) == 5
    assert pair_size(18, elapsed_s=0.0, **sizes) == 2
    assert pair_size(20, elapsed_s=0.0, **sizes) == 0
    # Two blocks of 5 steps fit into 10 s, and the first step of each is thrown away.
    assert pair_size(5, elapsed_s=50.0, **sizes) == 4
    assert pair_size(5, elapsed_s=59.0, **sizes) == 0


def test_three_steps_are_measured_even_when_the_time_is_up():
    assert pair_size(0, wanted=20, step_s=10.0, blocks=2, elapsed_s=70.0, cap_s=60.0) == 3
    assert pair_size(0, wanted=2, step_s=10.0, blocks=2, elapsed_s=70.0, cap_s=60.0) == 2


def test_overlapping_buckets_count_once():
    assert union_length([]) == 0.0
    assert union_length([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (0.6, 0.7)]) == pytest.approx(3.0)


def noisy(seconds, count, *, seed=0, spread=0.02):
    rng = random.Random(seed)
    return [seconds * (1.0 + rng.gauss(0.0, spread)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_down_of_15_percent_is_found_within_20_steps(seed):
    before, after = noisy(0.100, 60, seed=seed), noisy(0.115, 20, seed=100 + seed)
    levels = find_levels(before + after, tolerance=0.02)
    assert abs(levels.steady_from - 60) <= 3
    assert levels.settled
    assert statistics.median((before + after)[: levels.steady_from]) == pytest.approx(0.100, rel=0.02)
    assert statistics.median((before + after)[levels.steady_from :]) == pytest.approx(0.115, rel=0.02)


def test_noise_and_single_slow_steps_are_no_change():
    times = noisy(0.1, 80)
    times[40] = 5.0
    assert find_levels(times, tolerance=0.02) == Levels(starts=(0,), settled=True)
    assert find_levels([0.1] * 9, tolerance=0.02).starts == (0,)
    assert find_levels([0.1] * 50, tolerance=0.02) == Levels(starts=(0,), settled=True)


def test_two_changes_are_told_apart():
    levels = find_levels(noisy(0.2, 15) + noisy(0.1, 40, seed=1) + noisy(0.13, 30, seed=2), tolerance=0.02)
    assert levels.starts == (0, 15, 55)
    assert levels.settled


@pytest.mark.parametrize(
    "times",
    [
        [0.1 * 1.01**step for step in range(80)],
        ([0.1] * 10 + [0.2] * 10) * 4,
        [0.1] * 60 + [0.1 + 0.002 * step for step in range(40)],
    ],
    ids=["ramp", "up and down", "a level that is left"],
)
def test_a_series_that_never_settles_is_marked(times):
    assert not find_levels(times, tolerance=0.02).settled


def test_a_long_series_takes_no_long_time():
    levels = find_levels(noisy(0.1, 10_000) + noisy(0.12, 10_000, seed=1), tolerance=0.02)
    assert abs(levels.steady_from - 10_000) < 20
