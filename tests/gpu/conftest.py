"""What tests on a GPU share: the device, and phases of training steps read from a trace of torch.profiler."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def _read_phases(events: Sequence[Mapping[str, Any]], *, phases: Sequence[str]) -> dict[str, float]:
    """Median seconds by phase, from the ``traceEvents`` of steps whose phases are ``record_function`` ranges.

    A phase lasts from the end of the last device work of the phase before it to the end of its own, as CUDA events
    between phases see it; so the first phase of the first step has no length. ``phases`` is their order in a step.
    """
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "gpu_user_annotation" and event["name"] in phases
    )
    work = sorted(event["ts"] + event["dur"] for event in events if event.get("cat") in _ON_DEVICE)
    ends = [(name, max(end for end in work if end <= stop + 1.0)) for _, stop, name in spans]
    names = [name for name, _ in ends]
    if names != list(itertools.islice(itertools.cycle(phases), len(names))):
        raise ValueError(f"phases out of order: {names[:6]}")
    seconds: dict[str, list[float]] = {name: [] for name in phases}
    for (_, before), (name, end) in itertools.pairwise(ends):
        seconds[name].append((end - before) / 1e6)
    return {name: statistics.median(found) for name, found in seconds.items()}


@pytest.fixture(scope="session")
def read_phases() -> Callable[..., dict[str, float]]:
    """``read_phases(events, phases=...)``, see ``_read_phases``."""
    return _read_phases


@pytest.fixture(scope="session")
def device() -> Any:
    """The first GPU. A machine without one fails the test: whoever asks for ``-m gpu`` has one."""
    import torch

    if not torch.cuda.is_available():
        pytest.fail(f"no CUDA GPU can be used here: torch {torch.__version__}, built for CUDA {torch.version.cuda}")
    return torch.device("cuda:0")
