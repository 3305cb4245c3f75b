"""Processes that end with the one that started them, however that one ends: the kernel of Linux sends them a signal."""

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
    """Let the kernel send ``stop`` to this process when the thread that started it ends; nothing on other systems.

    A parent that died before this call sends nothing: ask ``os.getppid`` afterwards.
    """
    _set(_PR_SET_PDEATHSIG, stop)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent died, so that they can be ended; nothing on other systems."""
    _set(_PR_SET_CHILD_SUBREAPER, 1)


def _set(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def tied_command(command: Sequence[str], *, stop: signal.Signals = signal.SIGKILL, parent: int = 0) -> list[str]:
    """``command`` behind a step that asks the kernel to send it ``stop`` when its parent dies.

    ``parent`` is the process that will start it, where that is known: a child whose parent is already another one then
    ends at once.
    """
    return [sys.executable, "-m", "precision_time.tasks.process_ties", stop.name, str(parent), *command]


def start_tied(
    command: Sequence[str], *, env: Mapping[str, str], log: IO[bytes], stop: signal.Signals = signal.SIGKILL
) -> "subprocess.Popen[bytes]":
    """Start ``command``, which ends with this process; call it in the main thread, whose end counts as the parent's.

    It has a session of its own: Ctrl-C in the terminal reaches this process only, which decides what ends when.
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
    """Replace this process by ``command``, tied to its parent where the kernel can do it."""
    before = int(parent) or os.getppid()
    end_with_parent(signal.Signals[stop])
    if os.getppid() != before:  # it died before that
        return
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    _become(sys.argv[1], sys.argv[2], sys.argv[3:])
