"""What the kernel does for families of processes on Linux: a child ends with its parent, an ancestor adopts orphans."""

import ctypes
import signal
import sys

__all__ = ["adopt_orphans", "end_with_parent"]

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
