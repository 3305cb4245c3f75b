"""Clocks of the timed loop: marks in the work of a device, read only after all of that work has ended."""

import time
from typing import Any, Protocol

import torch

__all__ = ["Clock", "DeviceClock", "HostClock", "make_clock"]


class Clock(Protocol):
    """Marks points in the work of the device, which can be read after ``settle``."""

    def mark(self) -> Any: ...
    def settle(self) -> None: ...
    def seconds(self, start: Any, end: Any) -> float: ...
    def reuse(self) -> None: ...


class HostClock:
    """The clock of a CPU, which works in step with the host: marks are readings of ``perf_counter``."""

    def mark(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        return

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def reuse(self) -> None:
        return


class DeviceClock:
    """The clock of a GPU: CUDA events on the current stream, reused in every block; no step waits for the device."""

    def __init__(self, count: int = 256) -> None:
        self._free = [_new_event() for _ in range(count)]
        self._used: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else _new_event()
        event.record()
        self._used.append(event)
        return event

    def settle(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def reuse(self) -> None:
        self._free += self._used
        self._used = []


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def make_clock(device: torch.device) -> Clock:
    """The clock of ``device``."""
    return DeviceClock() if device.type == "cuda" else HostClock()
