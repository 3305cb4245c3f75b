"""The processes of ranks that this process waits for: a register, so that all of them can be ended at once."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from precision_time.tasks.processes.process_families import kill_family

__all__ = ["RunningRank", "end_ranks", "register_rank"]


@dataclass(eq=False, slots=True)
class RunningRank:
    """A process that runs one rank, or launches several: its number once it has one, and whether it must end."""

    pid: int | None = None
    is_ended: bool = False

    def begin(self, pid: int) -> None:
        """Note that the process has started; it is killed at once if ``end_ranks`` was called before."""
        with _lock:
            self.pid = pid
            if self.is_ended:
                kill_family(pid)


_running: set[RunningRank] = set()
#: ``end_ranks`` runs beside the threads that wait for ranks.
_lock = threading.Lock()


@contextlib.contextmanager
def register_rank() -> Iterator[RunningRank]:
    """Keep a rank in the register while the block runs."""
    running = RunningRank()
    with _lock:
        _running.add(running)
    try:
        yield running
    finally:
        with _lock:
            _running.discard(running)


def end_ranks() -> int:
    """Kill every registered process and their children; returns how many there were.

    Short on purpose: ``Client.run`` runs it on the worker's event loop.
    """
    with _lock:
        for running in _running:
            running.is_ended = True
            if running.pid is not None:
                kill_family(running.pid)
        return len(_running)
