"""Ctrl-C during a campaign: the first one lets running cells finish, the second one stops them at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interrupts", "catch_interrupts"]

FIRST = "\ninterrupted: finishing the running cells; press Ctrl-C again to stop them at once\n"


class Interrupts:
    """Notes the first Ctrl-C; every further one raises ``KeyboardInterrupt`` in the main thread."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # This thread may be in the middle of a print, which cannot be entered twice.
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), FIRST.encode())


@contextlib.contextmanager
def catch_interrupts() -> Iterator[Interrupts]:
    """Handle Ctrl-C this way during the block; outside the main thread nothing changes."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
