"""A worker's hold of its template process (``tasks.template``): start it, fork ranks from it, replace a dead one."""

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

__all__ = ["ForkedRank", "RankRequest", "Template", "TemplateLost", "Templates"]

#: How long a rank waits for its template to be ready; past it this rank gets a fresh interpreter. Well below the grace
#: that ``profile_cell`` gives beyond the ranks' deadline, since the template's start does not count towards that.
READY_S = 20.0
#: A template that is not ready by then never will be.
LOADING_S = 180.0
#: Within this the template answers a request: a fork takes milliseconds.
ANSWER_S = 15.0
#: Failures in a row before this process stops trying; there is one new start for each cell.
MOST_FAILURES = 2

#: What differs from rank to rank; everything else in the environment may have been read while libraries were loaded.
PER_RANK = {PARENT_VARIABLE, "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}


class TemplateLost(Exception):
    """The template ended, cannot fork or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """What a rank is to run: the file of its job, its number, the file of its output, and its environment."""

    job: str
    rank: int
    log: str
    environment: dict[str, str]


class _Lines:
    """Lines read from a socket; a time-out loses nothing, the next call goes on."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream, self.pending = stream, b""

    def read(self) -> tuple[str, str]:
        """The first word of the next line, and the rest; raises ``TemplateLost`` at the end of the stream."""
        while b"\n" not in self.pending:
            try:
                data = self.stream.recv(4096)
            except ConnectionError:
                data = b""
            if not data:
                raise TemplateLost("the template process of the worker is gone")
            self.pending += data
        line, _, self.pending = self.pending.partition(b"\n")
        word, _, rest = line.decode().partition(" ")
        return word, rest


@dataclass(slots=True)
class ForkedRank:
    """A rank that a template forked, as the worker sees it."""

    pid: int
    report: socket.socket
    lines: _Lines

    def wait(self, timeout_s: float) -> int:
        """The exit code, negative for a signal, as ``subprocess`` has it.

        Raises ``TimeoutError`` when the rank still runs after ``timeout_s``, and ``TemplateLost`` when the template
        is gone, with which the rank dies.
        """
        self.report.settimeout(max(timeout_s, 1e-3))
        word, rest = self.lines.read()
        if word != "ended":
            raise TemplateLost(f"the template said: {word} {rest}")
        return int(rest)


class Template:
    """One template process, which lives no longer than this process."""

    def __init__(self, environment: Mapping[str, str], *, log: Path) -> None:
        """Start loading; what is said meanwhile is written to ``log``, that of the rank that needs it first."""
        self.started_at = time.monotonic()
        self.settled = threading.Event()
        self.trouble = ""
        self.is_gone = False
        self.process: subprocess.Popen[bytes] | None = None
        self._control, theirs = socket.socketpair()
        threading.Thread(
            target=self._keep, args=(dict(environment), theirs, log), name="precision-time-template", daemon=True
        ).start()

    def _keep(self, environment: dict[str, str], theirs: socket.socket, log: Path) -> None:
        """Start the template, and stay: the kernel ends it when the thread that started it ends."""
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
        except (OSError, TemplateLost) as error:
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

        Raises ``TemplateLost`` when there is none, or it ended before it knew what to do; the template then ends.
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
            raise TemplateLost(f"the template said: {word} {rest}")
        except OSError as error:
            ours.close()
            self.kill()
            raise TemplateLost(f"{type(error).__name__}: {error}") from error
        except TemplateLost:
            ours.close()
            raise

    def retire(self) -> None:
        """Let it end once its last rank has."""
        with contextlib.suppress(OSError):
            self._control.send(b"q")

    def kill(self) -> None:
        """End it now, and its ranks with it."""
        if self.process is not None:
            self.process.kill()


class Templates:
    """The template of this process: started when first wanted, anew when it died or the environment changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: Template | None = None
        self._made_for: tuple[Any, ...] = ()
        self._failures = 0

    def fork(self, request: RankRequest, *, is_over: Callable[[], bool]) -> ForkedRank | None:
        """The rank that was asked for, or None: no template is ready in time, or ``is_over`` says to wait no longer.

        A template that fails is replaced once; after ``MOST_FAILURES`` in a row no more is tried.
        """
        # No files or threads left: a fresh interpreter may do without.
        with contextlib.suppress(OSError, RuntimeError):
            for _ in range(MOST_FAILURES):
                template = self._choose(request)
                if template is None or not _await(template, is_over=is_over):
                    return None
                try:
                    if template.is_ready:
                        rank = template.fork(request)
                        self._failures = 0
                        return rank
                    reason = template.trouble
                except TemplateLost as error:
                    reason = str(error)
                self._forget(template)
                with open(request.log, "a", encoding="utf-8") as log:
                    log.write(f"precision_time: no warm start: {reason}\n")
        return None

    def _choose(self, request: RankRequest) -> Template | None:
        made_for = _describe(request.environment)
        with self._lock:
            if made_for != self._made_for:
                # What a fork of this process inherited belongs to its parent.
                if self._current is not None and made_for[0] == self._made_for[0]:
                    self._current.retire()
                self._current, self._made_for, self._failures = None, made_for, 0
            current = self._current
            if current is not None and not current.settled.is_set():
                if time.monotonic() - current.started_at > LOADING_S:
                    current.kill()
                    self._current, self._failures = None, self._failures + 1
            elif current is not None and current.is_gone and not current.trouble:
                # One that was killed since it last forked is no sign that the next will fail.
                self._current = None
            if self._current is None and self._failures < MOST_FAILURES:
                self._current = Template(request.environment, log=Path(request.log))
            return self._current

    def _forget(self, template: Template) -> None:
        with self._lock:
            if self._current is template:
                self._current, self._failures = None, self._failures + 1


def _await(template: Template, *, is_over: Callable[[], bool]) -> bool:
    """Whether the template settled in time, well or not."""
    ends = time.monotonic() + READY_S
    while not template.settled.wait(0.05):
        if is_over() or time.monotonic() > ends:
            return False
    return True


def _describe(environment: Mapping[str, str]) -> tuple[Any, ...]:
    """What a template is made for: this process, its folder, and what libraries may read when they are loaded."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = ""
    has_device = bool(environment.get("CUDA_VISIBLE_DEVICES"))
    values = frozenset(item for item in environment.items() if item[0] not in PER_RANK)
    return os.getpid(), folder, has_device, values
