"""Interrupts: a first Ctrl-C asks a campaign to end after the cells under way, a second one stops it now."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interrupts", "catch_interrupts"]

FIRST = "\ninterrupted: finishing the cells under way; press Ctrl-C again to stop them now\n"


class Interrupts:
    """Counts Ctrl-C; from the second on they raise ``KeyboardInterrupt`` in the main thread."""

    def __init__(self) -> None:
        self.requested = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # Print may be in the middle of a line in this very thread, and cannot be entered twice.
        with contextlib.suppress(OSError, ValueError):
            os.write(sys.stderr.fileno(), FIRST.encode())


@contextlib.contextmanager
def catch_interrupts() -> Iterator[Interrupts]:
    """Handle Ctrl-C this way during the block; elsewhere than in the main thread nothing changes."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
