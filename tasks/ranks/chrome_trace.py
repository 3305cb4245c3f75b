"""Profile a few steps after a cell is measured: a Chrome trace below a size limit, and exposed communication by it."""

import gzip
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from precision_time.tasks.ranks.steady_state import union_length

if TYPE_CHECKING:
    from precision_time.tasks.ranks.job import TraceLimits
    from precision_time.tasks.ranks.timed_loop import StepTimes

__all__ = ["RangedClock", "TraceSample", "exposed_communication", "sample_trace"]

#: Steps whose events the profiler throws away, since the first ones are slowed by its own start.
WARMUP_STEPS = 2


class Stepping(Protocol):
    """The loop whose steps are profiled; ``TimedLoop`` is one."""

    clock: Any
    accumulation_steps: int

    def take_block(self, size: int) -> "list[StepTimes]":
        """Take ``size`` more steps, together with all ranks."""
        ...

    def agree(self, value: int) -> int:
        """Rank 0's ``value``, on every rank."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSample:
    """The result of profiling: whether the trace has fewer steps than requested, and exposed communication.

    ``exposed_s`` is the time of one step of this rank in which a kernel of NCCL ran and no other kernel. None on a
    CPU, with one rank, and without a trace.
    """

    truncated: bool
    exposed_s: float | None = None


class RangedClock:
    """The clock of a timed loop, with a profiler range between each two of its marks in a step.

    A step has ``accumulation_steps`` forward and backward passes. Clearing gradients launches nothing, and counts as
    optimizer time in the rows.
    """

    def __init__(self, clock: Any, *, accumulation_steps: int = 1) -> None:
        self.ranges = ("clear", *("forward", "backward") * accumulation_steps, "optimizer")
        self._clock, self._marks = clock, 0
        self._open: Any = None

    def mark(self) -> Any:
        """A mark of the clock; it ends the open range, and begins the next one unless the step has ended."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
        point = self._clock.mark()
        place = self._marks % (len(self.ranges) + 1)
        self._open = record_function(self.ranges[place]) if place < len(self.ranges) else None
        if self._open is not None:
            self._open.__enter__()
        self._marks += 1
        return point

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)


def sample_trace(loop: Stepping, limits: "TraceLimits", *, path: Path | None) -> TraceSample:
    """Trace up to ``limits.steps`` steps of ``loop`` into ``path``, gzipped; all ranks call it, rank 0 with a path.

    The trace of one step shows how many fit into ``limits.max_bytes`` of JSON; if none fits, no trace is left. An error
    of the profiler goes to standard error and costs the trace, never the measurement.
    """
    if limits.max_bytes <= 0:
        return TraceSample(truncated=True)
    size = _trace(loop, 1, path=path)
    fits = loop.agree(0 if size is None else min(limits.steps, limits.max_bytes // size))
    if fits > 1:
        size = _trace(loop, fits, path=path)
    if path is None:
        return TraceSample(truncated=fits < limits.steps)
    if size is None or fits == 0 or size > limits.max_bytes:
        path.unlink(missing_ok=True)
        return TraceSample(truncated=True)
    text = path.read_bytes()
    path.write_bytes(gzip.compress(text))
    exposed_s = exposed_communication(json.loads(text)["traceEvents"])
    return TraceSample(truncated=fits < limits.steps, exposed_s=None if exposed_s is None else exposed_s / fits)


def exposed_communication(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Seconds of a Chrome trace in which kernels of NCCL ran and no other kernel; None if NCCL ran none."""
    sending: list[tuple[float, float]] = []
    computing: list[tuple[float, float]] = []
    for event in events:
        if event.get("cat") == "kernel":
            kind = sending if event["name"].startswith("nccl") else computing
            kind.append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    if not sending:
        return None
    return union_length(sending + computing) - union_length(computing)


def _trace(loop: Stepping, steps: int, *, path: Path | None) -> int | None:
    """Write a trace of ``steps`` steps to ``path``: its bytes, or None without a path and when the profiler failed."""
    if path is None:
        loop.take_block(WARMUP_STEPS)
        loop.take_block(steps)
        return None
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    profiler = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1))
    is_running = _try(profiler.start)
    loop.take_block(WARMUP_STEPS)
    is_running = is_running and _try(profiler.step)
    clock = loop.clock
    loop.clock = RangedClock(clock, accumulation_steps=loop.accumulation_steps)
    try:
        loop.take_block(steps)
    finally:
        loop.clock = clock
    is_running = is_running and _try(profiler.stop) and _try(lambda: profiler.export_chrome_trace(str(path)))
    return path.stat().st_size if is_running else None


def _try(act: Callable[[], Any]) -> bool:
    """Whether ``act`` succeeded. Its errors are caught, since the other ranks wait for this one in their steps."""
    try:
        act()
    except Exception as error:
        print(f"no trace of these steps: {type(error).__name__}: {error}", file=sys.stderr)
        return False
    return True
