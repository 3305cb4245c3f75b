"""Conditions of a block: the CPU time of other processes and machines, load, and the GPU."""

import pytest

from precision_time.tasks.ranks import conditions
from precision_time.tasks.ranks.conditions import CpuTimes, MachineWatch, read_cpu_times
from precision_time.tasks.ranks.device_state import GpuState


def test_the_counters_of_the_kernel_are_read_as_seconds(tmp_path):
    path = tmp_path / "stat"
    path.write_text("cpu  100 10 50 700 40 5 5 90 7 0\ncpu0 1 2 3\n")
    times = read_cpu_times(path)
    tick = times.total_s / 1000
    assert (times.busy_s, times.steal_s) == pytest.approx((170 * tick, 90 * tick))
    assert times.own_s > 0


@pytest.mark.parametrize("text", ["", "cpu 1 2", "cpu a b c d e f g h"])
def test_a_system_without_such_counters_gives_none(tmp_path, text):
    path = tmp_path / "stat"
    path.write_text(text)
    assert read_cpu_times(path) is None
    assert read_cpu_times(tmp_path / "nothing") is None


def watch_over(monkeypatch, readings, *, load=0.5, ranks_here=1, monitor=None):
    """The conditions on a machine of 2 cores: ``readings`` are (at, busy, steal, own) in seconds."""
    replies = iter([CpuTimes(at=at, total_s=2 * at, busy_s=busy, steal_s=steal, own_s=own)
                    for at, busy, steal, own in readings])  # fmt: skip
    monkeypatch.setattr(conditions, "read_cpu_times", lambda: next(replies))
    monkeypatch.setattr(conditions.os, "getloadavg", lambda: (load, 0.0, 0.0))
    watch = MachineWatch(monitor=monitor, ranks_here=ranks_here, cores=2)
    watch.start_block()
    watch.look()
    return watch.end_block()


def test_ranks_of_the_cell_are_not_others(monkeypatch):
    conditions = watch_over(monkeypatch, [(0, 0, 0, 0), (1, 0, 0, 0), (2, 2.0, 0, 1.0)], ranks_here=2)
    assert (conditions.other_cpu_share, conditions.steal_share, conditions.contended) == (0.0, 0.0, False)


def test_a_busy_neighbour_marks_the_block(monkeypatch):
    conditions = watch_over(monkeypatch, [(0, 0, 0, 0), (1, 0, 0, 0), (2, 1.5, 0, 1.0)])
    assert conditions.other_cpu_share == pytest.approx(0.25)
    assert conditions.contended


def test_time_that_a_hypervisor_gives_away_marks_the_block(monkeypatch):
    conditions = watch_over(monkeypatch, [(0, 0, 0, 0), (1, 0, 0, 0), (2, 1.0, 0.2, 1.0)])
    assert conditions.steal_share == pytest.approx(0.1)
    assert conditions.contended


def test_a_load_above_the_cells_cores_marks_the_block(monkeypatch):
    quiet = [(0, 0, 0, 0), (1, 0, 0, 0), (2, 1.0, 0, 1.0)]
    assert not watch_over(monkeypatch, quiet, load=2.9).contended
    assert watch_over(monkeypatch, quiet, load=3.1).contended


def test_a_short_block_is_judged_over_the_time_before_it_too(monkeypatch):
    # The last 20 ms are two ticks of the counter; the window is the second before.
    conditions = watch_over(monkeypatch, [(1, 0, 0, 0), (2, 0.0, 0, 0), (2.02, 0.51, 0, 0.0)])
    assert conditions.other_cpu_share == pytest.approx(0.25, rel=0.01)
    only = watch_over(monkeypatch, [(1, 0, 0, 0), (1.01, 0.0, 0, 0), (1.03, 0.01, 0, 0.0)])
    assert only.other_cpu_share is None


def test_the_gpu_is_read_while_it_works(monkeypatch):
    class Monitor:
        def read(self):
            return GpuState(clock_hz=1e9, throttled=True)

    conditions = watch_over(monkeypatch, [(0, 0, 0, 0), (1, 0, 0, 0), (2, 1.0, 0, 1.0)], monitor=Monitor())
    assert conditions.gpu == GpuState(clock_hz=1e9, throttled=True)
