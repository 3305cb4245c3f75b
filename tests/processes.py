"""What tests that start processes share: a free port, and waiting until something holds."""

import socket
import time
from collections.abc import Callable
from typing import Any

__all__ = ["free_port", "wait_for"]


def free_port() -> int:
    """A port of the loopback address that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], *, seconds: float, what: str, poll_s: float = 0.2) -> Any:
    """What ``condition`` returns as soon as that is true; fails with ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(poll_s)
    return value
