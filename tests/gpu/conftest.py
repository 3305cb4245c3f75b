"""Fixtures of tests on a GPU: the device, and phases of training steps read from a trace of torch.profiler."""

import bisect
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
#: Share of device time without a launching phase, above which a trace is useless. A little is normal: of the driver's
#: calls Kineto records only kernel launches (CuptiCbidRegistry.cpp), so a memset by the driver lacks its launch.
_UNASSIGNED_SHARE = 0.01


def _read_phases(events: Sequence[Mapping[str, Any]], *, phases: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each phase in each step but the first, from the ``traceEvents`` of steps with ranges around them.

    Work on the device belongs to the phase in whose range the host launched it, from whichever thread: the backward
    pass is launched by autograd's own, and Kineto ties a kernel to the innermost range of its thread
    (``gpu_user_annotation``), which inside the optimizer is ``Optimizer.step#...``. A phase lasts from the end of the
    last work of the phase before it to the end of its own, as CUDA events between phases see it; so the first phase of
    the trace has no length, and the first step is left out. ``phases`` is their order in a step.

    Raises ``ValueError`` for ranges in another order, a range that launched nothing, and work of no range.
    """
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in phases
    )
    names = [name for _, _, name in ranges]
    if not names or names != list(phases) * (len(names) // len(phases)):
        raise ValueError(f"phases out of order: {names[:6]}")
    ends = _find_ends(events, ranges)
    seconds: dict[str, list[float]] = {name: [] for name in phases}
    for place, (before, end) in enumerate(itertools.pairwise(ends), start=1):
        if place >= len(phases):
            seconds[names[place]].append((end - before) / 1e6)
    return seconds


def _find_ends(events: Sequence[Mapping[str, Any]], ranges: Sequence[tuple[float, float, str]]) -> list[float]:
    """When the device ended the last work launched in each of ``ranges`` (begin, end, name), in the trace's time."""
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    begins = [begin for begin, _, _ in ranges]
    ends: list[float | None] = [None] * len(ranges)
    whole = unassigned = 0.0
    for event in events:
        if event.get("cat") not in _ON_DEVICE:
            continue
        whole += event["dur"]
        at = launched.get(event.get("args", {}).get("correlation"))
        place = -1 if at is None else bisect.bisect_right(begins, at) - 1
        if place < 0 or at > ranges[place][1]:
            unassigned += event["dur"]
            continue
        end = event["ts"] + event["dur"]
        ends[place] = end if ends[place] is None else max(ends[place], end)
    if unassigned > _UNASSIGNED_SHARE * whole:
        raise ValueError(f"{unassigned / whole:.1%} of the device's time was launched by no phase")
    known = [end for end in ends if end is not None]
    if len(known) < len(ends):
        raise ValueError(f"a range launched nothing: {ranges[ends.index(None)][2]}, number {ends.index(None)}")
    return known


def _median_phases(events: Sequence[Mapping[str, Any]], *, phases: Sequence[str]) -> dict[str, float]:
    return {name: statistics.median(seconds) for name, seconds in _read_phases(events, phases=phases).items()}


def _profile_block(loop: Any, size: int, *, folder: Path) -> tuple[list[dict[str, Any]], list[Any]]:
    """A block of ``loop`` under torch.profiler, ranges around its phases: the trace's events, and the steps' times.

    Both tell of the same steps, so what the profiler itself costs is in both. The trace begins with the lead-in step.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from precision_time.tasks.ranks.chrome_trace import RangedClock

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    clock = loop.clock
    loop.clock = RangedClock(clock)
    try:
        with profile(activities=activities) as profiler:
            steps = loop._block(size, synchronise=True, lead_in=True)
    finally:
        loop.clock = clock
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    return json.loads(trace.read_text(encoding="utf-8"))["traceEvents"], steps


@pytest.fixture(scope="session")
def read_phases() -> Callable[..., dict[str, float]]:
    """``read_phases(events, phases=...)``: the median seconds of each phase, see ``_read_phases``."""
    return _median_phases


@pytest.fixture
def profile_block(tmp_path: Path) -> Callable[..., tuple[list[dict[str, Any]], list[Any]]]:
    """``profile_block(loop, size)``, see ``_profile_block``."""
    return lambda loop, size: _profile_block(loop, size, folder=tmp_path)


@pytest.fixture(scope="session")
def device() -> Any:
    """The first GPU. Without one the test fails, since ``-m gpu`` was requested."""
    import torch

    if not torch.cuda.is_available():
        pytest.fail(f"no CUDA GPU can be used here: torch {torch.__version__}, built for CUDA {torch.version.cuda}")
    return torch.device("cuda:0")
