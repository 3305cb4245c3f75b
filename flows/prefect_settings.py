"""Prefect as the command line wants it: quiet, without tracking, JSON results, and an API of its own if none is set."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO
from urllib.parse import urlsplit, urlunsplit

from precision_time.storage.errors import InputError, PrecisionTimeError
from precision_time.storage.filesystem import open_store

__all__ = ["prefect_api", "prepare_prefect"]

#: Read by Prefect at its first import. A value that the user has set stays.
DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    # what a person must know is printed by the commands; the pages of a run still get its log
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    # the first start writes the database's tables, which takes longer than Prefect waits by default
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}
_START_SECONDS = 180.0
_PR_SET_PDEATHSIG = 1


def prepare_prefect() -> None:
    """Set the defaults in the environment; call it before the first import of Prefect."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def prefect_api() -> Iterator[None]:
    """Run the block with a Prefect API: the configured one (``PREFECT_API_URL``, a profile), else one of our own.

    Our own is Prefect's temporary server on the loopback address with the database of ``PREFECT_HOME``; it ends with
    this process however that ends. Raises ``InputError`` when the configured API does not answer.
    """
    prepare_prefect()
    from prefect.settings import PREFECT_API_URL

    configured = PREFECT_API_URL.value()
    if configured:
        problem = _health_problem()
        if problem is not None:
            raise InputError(
                "the Prefect API does not answer",
                got=f"{_without_password(configured)}: {problem}",
                expected="a running Prefect server",
                fix="start it (prefect server start), or unset PREFECT_API_URL to do without",
            )
        yield
        return
    # Nobody looks at the log of a server that ends with this process, and its last lines would come too late.
    home = os.environ.get("PREFECT_HOME") or "~/.prefect"
    open_store(home).check_writable()
    with _own_server() as url, _global_settings({"PREFECT_API_URL": url, "PREFECT_LOGGING_TO_API_ENABLED": "false"}):
        yield


@contextlib.contextmanager
def _global_settings(variables: dict[str, str]) -> Iterator[None]:
    """Prefect settings for every thread; ``temporary_settings`` would hold in this one and its copies only."""
    from prefect.context import refresh_global_settings_context

    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    refresh_global_settings_context()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        refresh_global_settings_context()


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _health_problem() -> Exception | None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.api_healthcheck()


@contextlib.contextmanager
def _own_server() -> Iterator[str]:
    import httpx

    with tempfile.TemporaryFile() as log:
        server, url = _start_server(log)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while True:
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    tail = log.read()[-400:].decode(errors="replace")
                    raise PrecisionTimeError(
                        "Prefect's temporary server did not start",
                        got=tail.strip() or "no message",
                        fix="check PREFECT_HOME, or set PREFECT_API_URL to a running server",
                    )
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health", timeout=5).status_code == 200 and server.poll() is None:
                        break
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(timeout=10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _start_server(log: IO[bytes]) -> tuple["subprocess.Popen[bytes]", str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # A session of its own: Ctrl-C in the terminal must not take the server away before the flow has said its last word.
    server = subprocess.Popen(
        [sys.executable, "-m", "precision_time.flows.prefect_settings", str(port), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        env=os.environ | {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"},
    )
    return server, f"http://127.0.0.1:{port}/api"


def _become_server(port: str, parent: int) -> None:
    """Replace this process by the server, which the kernel ends when the process that asked for it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl
            return
    application = ["--factory", "prefect.server.api.server:create_app", "--lifespan", "on"]
    address = ["--host", "127.0.0.1", "--port", port, "--log-level", "error"]
    os.execv(sys.executable, [sys.executable, "-m", "uvicorn", *application, *address])


if __name__ == "__main__":
    _become_server(sys.argv[1], int(sys.argv[2]))
