"""Steps traced after a cell is measured: the content of the trace, its size limit, and exposed communication by it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from precision_time.tasks.ranks import chrome_trace
from precision_time.tasks.ranks.chrome_trace import WARMUP_STEPS, TraceSample, exposed_communication, sample_trace
from precision_time.tasks.ranks.job import TraceLimits
from precision_time.tests.tasks.ranks.test_timed_loop import make_loop

MANY = 2**26


def read_ranges(path: Path) -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {"clear", "forward", "backward", "optimizer"}
    ranges = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in names]
    return [event["name"] for event in sorted(ranges, key=lambda event: event["ts"])]


def one_step_bytes(path: Path) -> int:
    sample_trace(make_loop(), TraceLimits(steps=1, max_bytes=MANY), path=path)
    return len(gzip.decompress(path.read_bytes()))


def test_the_trace_holds_the_steps_asked_for_with_their_phases(tmp_path: Path) -> None:
    loop = make_loop(accumulation_steps=2)
    clock = loop.clock
    path = tmp_path / "trace.json"
    sample = sample_trace(loop, TraceLimits(steps=3, max_bytes=MANY), path=path)
    assert sample == TraceSample(truncated=False, exposed_s=None)
    assert read_ranges(path) == ["clear", "forward", "backward", "forward", "backward", "optimizer"] * 3
    assert loop.clock is clock


def test_a_trace_beyond_its_cap_has_fewer_steps_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    cap = int(2.5 * one_step_bytes(path))
    sample = sample_trace(make_loop(), TraceLimits(steps=10, max_bytes=cap), path=path)
    assert sample.truncated
    assert read_ranges(path) == ["clear", "forward", "backward", "optimizer"] * 2
    assert len(gzip.decompress(path.read_bytes())) <= cap


def test_nothing_is_kept_where_no_step_fits(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    cap = one_step_bytes(path) // 2
    assert sample_trace(make_loop(), TraceLimits(steps=3, max_bytes=cap), path=path) == TraceSample(truncated=True)
    assert not path.exists()


def test_without_room_no_step_is_taken(tmp_path: Path) -> None:
    loop = make_loop()
    path = tmp_path / "trace.json"
    assert sample_trace(loop, TraceLimits(steps=3, max_bytes=0), path=path) == TraceSample(truncated=True)
    assert loop.workload.module.calls == 0
    assert not path.exists()


@pytest.mark.parametrize("broken", ["start", "step", "stop", "export_chrome_trace"])
def test_a_profiler_that_fails_costs_the_trace_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], broken: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUPTI is held by another tool")

    monkeypatch.setattr(chrome_trace.profile, broken, fail)
    loop = make_loop()
    path = tmp_path / "trace.json"
    assert sample_trace(loop, TraceLimits(steps=3, max_bytes=MANY), path=path) == TraceSample(truncated=True)
    # The steps of the first trace, which the other ranks take too.
    assert loop.workload.module.calls == WARMUP_STEPS + 1
    assert "CUPTI is held by another tool" in capsys.readouterr().err
    assert not path.exists()


class Follower:
    """A rank that gets the answer of rank 0."""

    def __init__(self, *told: int) -> None:
        self.clock, self.taken, self._told = None, [], list(told)

    def take_block(self, size: int) -> list[Any]:
        self.taken.append(size)
        return []

    def agree(self, value: int) -> int:
        assert value == 0
        return self._told.pop(0)


def test_the_other_ranks_take_the_same_steps_and_trace_none() -> None:
    rank = Follower(2)
    assert sample_trace(rank, TraceLimits(steps=3, max_bytes=MANY), path=None) == TraceSample(truncated=True)
    assert rank.taken == [WARMUP_STEPS, 1, WARMUP_STEPS, 2]
    assert sample_trace(Follower(3), TraceLimits(steps=3, max_bytes=MANY), path=None) == TraceSample(truncated=False)


def kernel(name: str, begin: float, length: float, *, kind: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": length, "args": {"stream": 7}}


def test_exposed_communication_is_nccl_while_nothing_else_computes() -> None:
    reduce = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        {"ph": "M", "name": "process_name"},
        kernel("ampere_sgemm_128x64_tn", 0.0, 100.0),
        kernel(reduce, 50.0, 90.0),  # 40 of it alone, less 10 under the next kernel
        kernel("void at::native::vectorized_elementwise_kernel", 120.0, 10.0),
        kernel(reduce, 200.0, 25.0),
        kernel("nccl:all_reduce", 0.0, 999.0, kind="user_annotation"),
        kernel("Memcpy HtoD", 200.0, 25.0, kind="gpu_memcpy"),
    ]
    assert exposed_communication(events) == pytest.approx(55e-6)
    assert exposed_communication(events[:2]) is None
