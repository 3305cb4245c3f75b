"""The services of ``precision-time up``: how each process is started, checked and stopped."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from precision_time.flows.clusters.settings import dask_environment
from precision_time.flows.ground.prefect_settings import DEFAULTS, SERVER_ENVIRONMENT, server_command
from precision_time.flows.stack.deployments import POOL
from precision_time.storage.errors import InputError, PrecisionTimeError
from precision_time.tasks.process_ties import start_tied

__all__ = [
    "LOOPBACK", "Service", "adopt_environment", "choose_port", "dask_services", "prefect_services", "require_free",
    "require_scheduler",
]  # fmt: skip

LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0
WORKER_NAME = "precision-time-up"

#: Variables of the caller's environment that would lead the stack to another server, database or login.
_FOREIGN_VARIABLES = re.compile(
    r"PREFECT_(API_.*|CLOUD_.*|HOME|PROFILES?(_PATH)?|SERVER_DATABASE_.*|SERVER_API_(HOST|PORT|BASE_PATH))"
)


@dataclass(slots=True)
class Service:
    """One process of the stack, its log, and how long it may take to end after SIGTERM."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    stop_wait_s: float = 10.0
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    def start(self) -> None:
        """Start it, or start it again; its output is appended to its log."""
        with self.log.open("ab") as log:
            self.process = start_tied(self.command, env=self.environment, log=log)

    @property
    def is_running(self) -> bool:
        """Whether it has started and not ended."""
        return self.process is not None and self.process.poll() is None

    def require_running(self) -> None:
        """Raise ``PrecisionTimeError`` with the end of its log if it has ended by itself."""
        if not self.is_running:
            raise PrecisionTimeError(
                f"{self.name} ended right after the start", got=self.tail() or "no message", fix=f"see {self.log}"
            )

    def tail(self) -> str:
        """The end of its log."""
        try:
            return self.log.read_bytes()[-600:].decode(errors="replace").strip()
        except OSError:
            return ""

    def ask_to_stop(self, *, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Send SIGTERM, and wait until it has ended, ``stop_wait_s`` is over, or the caller ``is_hurried``."""
        if self.process is not None and self.is_running:
            self.process.terminate()
        deadline = time.monotonic() + self.stop_wait_s
        while self.is_running and time.monotonic() < deadline and not is_hurried():
            time.sleep(0.05)

    def stop(self, *, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """``ask_to_stop``, then SIGKILL to whatever is left of its session."""
        if self.process is None:
            return
        self.ask_to_stop(is_hurried=is_hurried)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def adopt_environment(home: Path, port: int) -> None:
    """Make this process and its children use the Prefect of ``home`` on ``port``; call it before Prefect's import."""
    # Without a home Prefect warns at its import. One that cannot be written is reported later, when it is locked.
    with contextlib.suppress(OSError):
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in [name for name in os.environ if _FOREIGN_VARIABLES.fullmatch(name)]:
        del os.environ[name]
    login = os.environ.get("PREFECT_SERVER_API_AUTH_STRING")
    os.environ.update(
        {
            **{name: value for name, value in DEFAULTS.items() if name not in os.environ},
            "PREFECT_HOME": str(home / "prefect"),
            "PREFECT_API_URL": f"http://{LOOPBACK}:{port}/api",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "PREFECT_WORKER_HEARTBEAT_SECONDS": "10",
            **({"PREFECT_API_AUTH_STRING": login} if login else {}),
        }
    )


def prefect_services(*, port: int, logs: Path) -> tuple[Service, Service]:
    """Prefect's server with its pages, and the worker that starts the runs, in the adopted environment."""
    environment = dict(os.environ)
    for_server = {name: value for name, value in environment.items() if name != "PREFECT_API_URL"}
    for_server |= SERVER_ENVIRONMENT | {"PREFECT_UI_API_URL": environment["PREFECT_API_URL"]}
    server = Service("Prefect's server", server_command(port), for_server, logs / "server.log")
    start = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    worker = Service("the worker", [*start, "--name", WORKER_NAME], environment, logs / "worker.log", stop_wait_s=30.0)
    return server, worker


def dask_services(
    *, port: int, dashboard_port: int, workers: int, on_gpus: bool, logs: Path
) -> tuple[Service, Service]:
    """A Dask scheduler on the loopback address, and its workers: one per rank, or one per GPU."""
    environment = (
        os.environ | dask_environment() | ({} if on_gpus else {"DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False"})
    )
    address = f"tcp://{LOOPBACK}:{port}"
    start = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", LOOPBACK, "--port", str(port)]
    dashboard = f"{LOOPBACK}:{dashboard_port}"
    scheduler = Service(
        "the Dask scheduler", [*start, "--dashboard-address", dashboard], environment, logs / "dask-scheduler.log"
    )
    shared = ["--no-dashboard", "--memory-limit", "0", "--host", LOOPBACK]
    if on_gpus:
        command = [sys.executable, "-m", "dask", "cuda", "worker", address, *shared, "--device-memory-limit", "0"]
    else:
        command = [sys.executable, "-m", "distributed.cli.dask_worker", address, *shared, "--nthreads", "1"]
        command += ["--nworkers", str(workers)]
    return scheduler, Service("the Dask workers", command, environment, logs / "dask-workers.log")


def is_free(port: int) -> bool:
    """Whether a server can listen at ``port`` of the loopback address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def choose_port(wanted: int) -> int:
    """``wanted`` if it is free, else any free port."""
    if is_free(wanted):
        return wanted
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def require_free(port: int) -> None:
    """Raise ``InputError`` if ``port`` is in use; it names the process that listens there, where the system tells."""
    if not is_free(port):
        raise InputError(
            f"port {port} of {LOOPBACK} is in use",
            got=describe_port(port),
            expected="a free port for Prefect's server",
            fix="stop that process, or use another port: precision-time up --port 4201",
        )


def require_scheduler(address: str) -> None:
    """Raise ``InputError`` unless something listens at ``address``, tcp://host:port of a Dask scheduler."""
    parts = urlsplit(address)
    try:
        socket.create_connection((str(parts.hostname), parts.port or 0), timeout=CONNECT_S).close()
    except OSError as error:
        raise InputError(
            "no scheduler answers at the cluster's address",
            got=f"{address}: {error}",
            expected="a running Dask scheduler",
            fix="start it first, see deploy/README.md; or leave --cluster out",
        ) from error


def describe_port(port: int) -> str:
    """The process that listens at ``port``: its id and command, as far as the system tells."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"process {connection.pid}: {command[:160]}"
    return "a process of another user"
