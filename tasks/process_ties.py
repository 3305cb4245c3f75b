"""Processes that end with the process that started them, however that ends: the Linux kernel sends them a signal."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

__all__ = ["adopt_orphans", "end_with_parent", "start_tied", "tied_command"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_parent(stop: signal.Signals) -> None:
    """Let the kernel send ``stop`` to this process when the thread that started it ends; Linux only.

    Nothing is sent for a parent that died before this call: ask ``os.getppid`` afterwards.
    """
    _set(_PR_SET_PDEATHSIG, stop)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent died, so that they can be ended; Linux only."""
    _set(_PR_SET_CHILD_SUBREAPER, 1)


def _set(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def tied_command(command: Sequence[str], *, stop: signal.Signals = signal.SIGKILL, parent: int = 0) -> list[str]:
    """A command that asks the kernel for ``stop`` at its parent's death, and then becomes ``command``.

    ``parent`` is the process that will start it, if known: a child that finds another parent ends at once.
    """
    return [sys.executable, "-m", "precision_time.tasks.process_ties", stop.name, str(parent), *command]


def start_tied(
    command: Sequence[str], *, env: Mapping[str, str], log: IO[bytes], stop: signal.Signals = signal.SIGKILL
) -> "subprocess.Popen[bytes]":
    """Start ``command``, which ends with this process; to be called in the main thread, whose end counts.

    It has a session of its own: Ctrl-C in the terminal reaches only this process, which decides what ends when.
    """
    return subprocess.Popen(
        tied_command(command, stop=stop, parent=os.getpid()),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env=dict(env),
    )


def _become(stop: str, parent: str, command: Sequence[str]) -> None:
    """Replace this process by ``command``, tied to its parent on Linux."""
    before = int(parent) or os.getppid()
    end_with_parent(signal.Signals[stop])
    if os.getppid() != before:  # the parent has died meanwhile
        return
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    _become(sys.argv[1], sys.argv[2], sys.argv[3:])
