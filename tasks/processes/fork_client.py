"""The worker's side of the fork server: start it, let it fork ranks, replace it when it died."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from precision_time.tasks.processes.fork_server import LOADING_SETTINGS, TITLE_BYTES
from precision_time.tasks.ranks.rank import PARENT_VARIABLE

__all__ = ["ForkClient", "ForkServer", "ForkServerLost", "ForkedRank", "RankRequest"]

#: How long a rank waits for the fork server to be ready; after that it gets a fresh interpreter. Well below the grace
#: that ``profile_cell`` gives beyond the ranks' deadline, since the start of the server does not count towards that.
READY_S = 20.0
#: A server that is not ready by then never will be.
LOADING_S = 180.0
#: How long the server may take to answer a request; a fork takes milliseconds.
ANSWER_S = 15.0
#: Failed servers in a row after which this process starts no more.
MOST_FAILURES = 2

#: Variables that differ from rank to rank; libraries may have read any other one while they were loaded.
PER_RANK = {PARENT_VARIABLE, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}


class ForkServerLost(Exception):
    """The fork server ended, cannot fork or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """The file of a rank's job, its number, the file of its output, and its environment."""

    job: str
    rank: int
    log: str
    environment: dict[str, str]


class _Lines:
    """Lines read from a socket; after a time-out the next call goes on where it stopped."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream, self.pending = stream, b""

    def read(self) -> tuple[str, str]:
        """The first word of the next line, and the rest; raises ``ForkServerLost`` at the end of the stream."""
        while b"\n" not in self.pending:
            try:
                data = self.stream.recv(4096)
            except ConnectionError:
                data = b""
            if not data:
                raise ForkServerLost("the fork server of the worker is gone")
            self.pending += data
        line, _, self.pending = self.pending.partition(b"\n")
        word, _, rest = line.decode().partition(" ")
        return word, rest


@dataclass(slots=True)
class ForkedRank:
    """A rank that the server forked, as the worker sees it."""

    pid: int
    report: socket.socket
    lines: _Lines

    def wait(self, timeout_s: float) -> int:
        """The exit code, negative for a signal, as in ``subprocess``.

        Raises ``TimeoutError`` when the rank still runs after ``timeout_s``, and ``ForkServerLost`` when the server is
        gone; the rank dies with it.
        """
        self.report.settimeout(max(timeout_s, 1e-3))
        word, rest = self.lines.read()
        if word != "ended":
            raise ForkServerLost(f"the fork server answered: {word} {rest}")
        return int(rest)


class ForkServer:
    """One fork server, which lives no longer than this process."""

    def __init__(self, environment: Mapping[str, str], *, log: Path) -> None:
        """Let it load its modules; its output meanwhile goes to ``log``, that of the rank that needs it first."""
        self.started_at = time.monotonic()
        self.settled = threading.Event()
        self.trouble = ""
        self.is_gone = False
        self.process: subprocess.Popen[bytes] | None = None
        self._control, theirs = socket.socketpair()
        threading.Thread(
            target=self._keep, args=(dict(environment), theirs, log), name="precision-time-fork-server", daemon=True
        ).start()

    def _keep(self, environment: dict[str, str], theirs: socket.socket, log: Path) -> None:
        """Start the server, and stay: the kernel ends it when the thread that started it ends."""
        environment |= LOADING_SETTINGS | {PARENT_VARIABLE: str(os.getpid())}
        command = [
            sys.executable,
            "-m",
            "precision_time.tasks.processes.fork_server",
            str(theirs.fileno()),
            "-" * TITLE_BYTES,
        ]
        try:
            with theirs, log.open("ab") as output:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                    pass_fds=[theirs.fileno()], start_new_session=True,
                )  # fmt: skip
            word, rest = _Lines(self._control).read()
            if word != "ready":
                self.trouble = f"{word} {rest}"
        except (OSError, ForkServerLost) as error:
            self.trouble = str(error)
        self.settled.set()
        if self.process is not None:
            self.process.wait()
        self.is_gone = True
        self._control.close()

    @property
    def is_ready(self) -> bool:
        """Whether ranks can be asked for."""
        return self.settled.is_set() and not self.trouble and not self.is_gone

    def fork(self, request: RankRequest) -> ForkedRank:
        """A new rank in a session of its own.

        Raises ``ForkServerLost`` when the server is gone or the fork failed; the server then ends.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"r"], [theirs.fileno()])
            ours.settimeout(ANSWER_S)
            lines = _Lines(ours)
            word, rest = lines.read()
            if word == "pid":
                ours.sendall(json.dumps(asdict(request)).encode() + b"\n")
                return ForkedRank(int(rest), ours, lines)
            self.retire()
            raise ForkServerLost(f"the fork server answered: {word} {rest}")
        except OSError as error:
            ours.close()
            self.kill()
            raise ForkServerLost(f"{type(error).__name__}: {error}") from error
        except ForkServerLost:
            ours.close()
            raise

    def retire(self) -> None:
        """Let it end after its last rank."""
        with contextlib.suppress(OSError):
            self._control.send(b"q")

    def kill(self) -> None:
        """End it and its ranks now."""
        if self.process is not None:
            self.process.kill()


class ForkClient:
    """Forks ranks by a server, which it starts for the first one and again when it died or the environment changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: ForkServer | None = None
        self._made_for: tuple[Any, ...] = ()
        self._failures = 0

    def fork(self, request: RankRequest, *, is_over: Callable[[], bool]) -> ForkedRank | None:
        """The requested rank; None when no server is ready in time, or ``is_over`` says to wait no longer.

        A server that fails is replaced once; after ``MOST_FAILURES`` in a row no more is started.
        """
        # This process may have no files or threads left; a fresh interpreter needs fewer.
        with contextlib.suppress(OSError, RuntimeError):
            for _ in range(MOST_FAILURES):
                server = self._choose(request)
                if server is None or not _await(server, is_over=is_over):
                    return None
                try:
                    if server.is_ready:
                        rank = server.fork(request)
                        self._failures = 0
                        return rank
                    reason = server.trouble
                except ForkServerLost as error:
                    reason = str(error)
                self._forget(server)
                with open(request.log, "a", encoding="utf-8") as log:
                    log.write(f"precision_time: no fork server: {reason}\n")
        return None

    def _choose(self, request: RankRequest) -> ForkServer | None:
        made_for = _describe(request.environment)
        with self._lock:
            if made_for != self._made_for:
                # A fork of this process has inherited the server of its parent: it is not to be retired from here.
                if self._current is not None and made_for[0] == self._made_for[0]:
                    self._current.retire()
                self._current, self._made_for, self._failures = None, made_for, 0
            current = self._current
            if current is not None and not current.settled.is_set():
                if time.monotonic() - current.started_at > LOADING_S:
                    current.kill()
                    self._current, self._failures = None, self._failures + 1
            elif current is not None and current.is_gone and not current.trouble:
                # It was killed after it had worked: that does not count as a failure.
                self._current = None
            if self._current is None and self._failures < MOST_FAILURES:
                self._current = ForkServer(request.environment, log=Path(request.log))
            return self._current

    def _forget(self, server: ForkServer) -> None:
        with self._lock:
            if self._current is server:
                self._current, self._failures = None, self._failures + 1


def _await(server: ForkServer, *, is_over: Callable[[], bool]) -> bool:
    """Whether the server is ready or has failed within ``READY_S``."""
    ends = time.monotonic() + READY_S
    while not server.settled.wait(0.05):
        if is_over() or time.monotonic() > ends:
            return False
    return True


def _describe(environment: Mapping[str, str]) -> tuple[Any, ...]:
    """What a server fits: this process, its folder, and the variables that libraries may read when they are loaded."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = ""
    has_device = bool(environment.get("CUDA_VISIBLE_DEVICES"))
    values = frozenset(item for item in environment.items() if item[0] not in PER_RANK)
    return os.getpid(), folder, has_device, values
