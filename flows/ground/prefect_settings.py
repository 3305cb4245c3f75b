"""Prefect as the commands need it: quiet, without tracking, JSON results, and a server of its own if none is set."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

from precision_time.flows.ground.addresses import without_password
from precision_time.storage.errors import InputError, PrecisionTimeError
from precision_time.storage.filesystem import open_store
from precision_time.tasks.process_ties import start_tied

__all__ = ["DEFAULTS", "SERVER_ENVIRONMENT", "prefect_api", "prepare_prefect", "server_command"]

#: Read by Prefect at its first import. A value that the user has set stays.
DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    # Prefect's newer pages contact a tracking service whatever the variables above say.
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    # The commands print what a person must know; the page of a run still gets its log.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    # The first start creates the database's tables, which takes longer than Prefect waits by default.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}
#: Tells Prefect's application that it is complete, so that it serves requests at once.
SERVER_ENVIRONMENT = {"PREFECT__SERVER_FINAL": "1"}
_START_SECONDS = 180.0


def prepare_prefect() -> None:
    """Set the defaults in the environment; call it before the first import of Prefect."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def prefect_api() -> Iterator[None]:
    """Run the block with a Prefect API: the configured one (``PREFECT_API_URL``, a profile), else a temporary server.

    The temporary server listens on the loopback address, uses the database of ``PREFECT_HOME``, and ends with this
    process however that ends. Raises ``InputError`` when the configured API does not answer or refuses the login.
    """
    prepare_prefect()
    from prefect.settings import PREFECT_API_URL

    configured = PREFECT_API_URL.value()
    if configured:
        problem = _health_problem()
        if problem is not None:
            raise InputError(
                "the Prefect API does not answer",
                got=f"{without_password(configured)}: {problem}",
                expected="a running Prefect server",
                fix="start it (prefect server start), or unset PREFECT_API_URL to do without a server",
            )
        refusal = _login_refusal()
        if refusal is not None:
            attempt = "with the login of" if os.environ.get("PREFECT_API_AUTH_STRING") else "without"
            raise InputError(
                "the Prefect API refuses the login",
                got=f"{without_password(configured)}: {refusal}, {attempt} PREFECT_API_AUTH_STRING",
                expected="the user and password that the server was started with",
                fix="set PREFECT_API_AUTH_STRING=user:password",
            )
        yield
        return
    # The temporary server ends with this process, so a log sent to it would be lost, and its last lines come too late.
    home = os.environ.get("PREFECT_HOME") or "~/.prefect"
    open_store(home).check_writable()
    with _own_server() as url, _global_settings({"PREFECT_API_URL": url, "PREFECT_LOGGING_TO_API_ENABLED": "false"}):
        yield


@contextlib.contextmanager
def _global_settings(variables: dict[str, str]) -> Iterator[None]:
    """Prefect settings for every thread; ``temporary_settings`` would hold only in this thread and its copies."""
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


def _health_problem() -> Exception | None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.api_healthcheck()


def _login_refusal() -> str | None:
    """How the API refuses the login, such as ``401 Unauthorized``; its health check needs no login."""
    import httpx
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            client.request("GET", "/admin/version")
    except httpx.HTTPStatusError as error:
        answer = error.response
        return f"{answer.status_code} {answer.reason_phrase}" if answer.status_code in {401, 403} else None
    return None


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
    environment = os.environ | {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"} | SERVER_ENVIRONMENT
    return start_tied(server_command(port), env=environment, log=log), f"http://127.0.0.1:{port}/api"


def server_command(port: int) -> list[str]:
    """The command of Prefect's server on the loopback address; its environment needs ``SERVER_ENVIRONMENT``."""
    application = ["--factory", "prefect.server.api.server:create_app", "--lifespan", "on"]
    address = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    return [sys.executable, "-m", "uvicorn", *application, *address]
