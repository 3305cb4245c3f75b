"""``precision-time up``: run Prefect's server, deployments, a worker and a Dask cluster here until Ctrl-C."""

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO
from urllib.parse import quote

from precision_time.flows.clusters.device_claims import claim_devices
from precision_time.flows.clusters.local_gpus import count_gpus, name_devices
from precision_time.flows.clusters.settings import ADDRESS, ADDRESS_EXPECTED, is_address
from precision_time.flows.stack.deployments import POOL, Nightly, load_forms, plan_deployments, register_deployments
from precision_time.flows.stack.lost_runs import end_lost_runs
from precision_time.flows.stack.services import (
    LOOPBACK,
    Service,
    choose_port,
    dask_services,
    prefect_services,
    require_free,
    require_scheduler,
)  # fmt: skip
from precision_time.storage.errors import InputError, PrecisionTimeError, StorageError
from precision_time.storage.filesystem import open_store

__all__ = ["STATE", "Addresses", "UpSettings", "prefilled_form", "read_addresses", "stay_up"]

CLUSTERS = ("auto", "local", "local-cuda", "none")
STATE = "up.json"
LOCK = "up.lock"
DASK_PORT, DASHBOARD_PORT = 8786, 8787
#: At its first start the server creates the tables of its database.
START_S = 180.0
#: When services have ended this often within this many seconds, they are not restarted again.
MOST_DEATHS, WITHIN_S = 5, 300.0
MOST_CPU_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What to run: ``cluster`` is auto, local, local-cuda, none, or the address of a running scheduler."""

    home: Path
    port: int = 4200
    cluster: str = "auto"
    workers: int | None = None
    with_worker: bool = True
    nightly: Nightly | None = None
    stale_after_days: float | None = None

    def __post_init__(self) -> None:
        if self.cluster not in CLUSTERS and not ADDRESS.fullmatch(self.cluster):
            raise InputError(
                "not a cluster", got=repr(self.cluster)[:80], expected=f"{', '.join(CLUSTERS)}, or {ADDRESS_EXPECTED}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the running stack can be reached; ``up.json`` in its home holds the same."""

    pid: int
    home: str
    ui: str
    api: str
    campaign_form: str
    scheduler: str | None
    dashboard: str | None
    deployments: dict[str, str]
    started_in_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def describe(self) -> str:
        """What a person can open, line by line."""
        lines = {
            "pages": self.ui,
            "measure": self.campaign_form,
            "dashboard": self.dashboard,
            "scheduler": self.scheduler,
            "home": self.home,
        }
        rows = [f"{name:<10} {value}" for name, value in lines.items() if value is not None]
        return "\n".join([*rows, f"everything is up after {self.started_in_s:g} s; Ctrl-C stops it"])


class _StopSignals:
    """Counts SIGINT, SIGTERM and SIGHUP; from the second signal on nothing is waited for."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1


def stay_up(
    settings: UpSettings, *, announce: Callable[[Addresses], None], say: Callable[[str], None] = lambda text: None
) -> None:
    """Start everything, call ``announce`` once it answers, wait for a signal, and stop everything.

    A service that dies is started again, and the runs of a worker that died end as Crashed. Call it in the main thread,
    after ``adopt_environment``. Raises ``InputError`` when the home is in use or a port is taken, and
    ``PrecisionTimeError`` with the end of the log of a service that did not start or keeps ending.
    """
    started = time.monotonic()
    home = settings.home
    with _lock_home(home, say) as signals, contextlib.ExitStack() as claims:
        require_free(settings.port)
        if is_address(settings.cluster):
            require_scheduler(settings.cluster)
        for folder in ("logs", "prefect", "precision-time-data", "precision-time-registry"):
            (home / folder).mkdir(exist_ok=True)
        for log in (home / "logs").glob("*.log"):
            log.replace(f"{log}.1")  # the last run's logs may say why it ended
        stack = _Stack(settings, signals, say)
        claims.enter_context(claim_devices(stack.devices, scheduler=stack.dask_address))
        try:
            addresses = stack.start(since=started)
            if addresses is not None:
                _write_state(home, addresses)
                announce(addresses)
                stack.watch()
        finally:
            stack.stop()
            (home / STATE).unlink(missing_ok=True)


def read_addresses(home: Path) -> Addresses | None:
    """The addresses of the stack of ``home``, or None when none runs there."""
    try:
        values = json.loads((home / STATE).read_text(encoding="utf-8"))
        with (home / LOCK).open("r", encoding="utf-8") as lock:
            if _try_lock(lock):
                return None
        return Addresses(**values)
    except (OSError, ValueError, TypeError):
        return None


def prefilled_form(ui: str, deployment: str, parameters: dict[str, Any]) -> str:
    """The address of the form for a run of ``deployment``, prefilled; the page decodes the parameters twice."""
    encoded = quote(quote(json.dumps(parameters), safe=""), safe="")
    return f"{ui}/deployments/deployment/{deployment}/run?parameters={encoded}"


class _Stack:
    """The services, and how they are started, watched and stopped together."""

    def __init__(self, settings: UpSettings, signals: _StopSignals, say: Callable[[str], None]) -> None:
        self.settings, self.signals, self.say = settings, signals, say
        logs = settings.home / "logs"
        self.api = f"http://{LOOPBACK}:{settings.port}/api"
        self.server, self.worker = prefect_services(port=settings.port, logs=logs)
        self.scheduler: Service | None = None
        self.dask_workers: Service | None = None
        self.dask_address = settings.cluster if is_address(settings.cluster) else None
        self.dashboard: str | None = None
        self.dask_counts: str | None = None
        self.dask_count = 0
        self.ranks: tuple[int, ...] = (1, 2)
        self.devices: tuple[str, ...] = ()
        if settings.cluster in ("auto", "local", "local-cuda"):
            self._plan_dask(logs)
        self._deaths: list[float] = []

    def _plan_dask(self, logs: Path) -> None:
        gpus = 0 if self.settings.cluster == "local" else count_gpus()
        if self.settings.cluster == "local-cuda" and not gpus:
            raise InputError("no GPU was found", got="nvidia-smi lists none", fix="--cluster local for CPU workers")
        workers = gpus or self.settings.workers or max(2, min(os.cpu_count() or 1, MOST_CPU_WORKERS))
        port, dashboard = choose_port(DASK_PORT), choose_port(DASHBOARD_PORT)
        self.scheduler, self.dask_workers = dask_services(
            port=port, dashboard_port=dashboard, workers=workers, on_gpus=gpus > 0, logs=logs
        )
        self.dask_address = f"tcp://{LOOPBACK}:{port}"
        # Dask has its dashboard only with bokeh; its plain pages are always there.
        page = "status" if importlib.util.find_spec("bokeh") else "info/main/workers.html"
        self.dashboard = f"http://{LOOPBACK}:{dashboard}/{page}"
        self.dask_counts, self.dask_count = f"http://{LOOPBACK}:{dashboard}/json/counts.json", workers
        self.ranks = (1, 2) if workers > 1 else (1,)
        self.devices = name_devices("cuda" if gpus else "cpu", count=workers)

    @property
    def services(self) -> list[Service]:
        """In the order of their start; they are stopped in reverse."""
        worker = self.worker if self.settings.with_worker else None
        return [part for part in (self.server, self.scheduler, self.dask_workers, worker) if part is not None]

    def start(self, *, since: float) -> Addresses | None:
        """Start all services and wait until each one works; None when a signal came meanwhile."""
        self.say("starting Prefect's server; the first start takes about half a minute")
        for service in self.services:
            if service is not self.worker:
                service.start()
        planned = plan_deployments(
            self.settings.home,
            cluster=self.dask_address or "auto",
            ranks=self.ranks,
            nightly=self.settings.nightly,
            stale_after_days=self.settings.stale_after_days,
        )
        # Prefect is imported only here: it reads its settings at its first import.
        from precision_time.flows.stack.automations import register_automations

        forms = load_forms(planned)
        if not self._wait_until(lambda: _read_page(f"{self.api}/health") is not None, self.server):
            return None
        self.say("registering the deployments")
        end_lost_runs("The precision-time up that ran it was stopped or killed.")
        version = importlib.metadata.version("precision-time")
        ids = register_deployments(planned, forms, version=version, keep_schedules=self.settings.nightly is None)
        register_automations(deployment_ids=ids)
        if self.settings.with_worker:
            self.worker.start()
            if not self._wait_for_worker():
                return None
        if not self._wait_for_dask():
            return None
        ui = self.api.removesuffix("/api")
        return Addresses(
            pid=os.getpid(),
            home=str(self.settings.home),
            ui=ui,
            api=self.api,
            campaign_form=prefilled_form(ui, str(ids[planned[0].full_name]), planned[0].parameters),
            scheduler=self.dask_address,
            dashboard=self.dashboard,
            deployments={name: str(id_) for name, id_ in ids.items()},
            started_in_s=round(time.monotonic() - since, 1),
        )

    def _wait_for_dask(self) -> bool:
        if self.scheduler is None or self.dask_workers is None or self.dask_counts is None:
            return True
        url, wanted = self.dask_counts, self.dask_count

        def has_workers() -> bool:
            answer = _read_page(url)
            return answer is not None and json.loads(answer)["workers"] >= wanted

        return self._wait_until(has_workers, self.dask_workers, self.scheduler)

    def _wait_for_worker(self) -> bool:
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:

            def is_online() -> bool:
                return any(worker.status == "ONLINE" for worker in client.read_workers_for_work_pool(POOL))

            return self._wait_until(is_online, self.worker)

    def _wait_until(self, condition: Callable[[], bool], *services: Service) -> bool:
        """Whether ``condition`` became true before a signal; raises when a service ends or takes too long."""
        deadline = time.monotonic() + START_S
        while not condition():
            if self.signals.count:
                return False
            for service in services:
                service.require_running()
            if time.monotonic() > deadline:
                late = services[0]
                raise PrecisionTimeError(
                    f"{late.name} did not start", got=f"no answer within {START_S:g} s", fix=f"see {late.log}"
                )
            time.sleep(0.2)
        return True

    def watch(self) -> None:
        """Wait for a signal, and start services again that have ended."""
        while not self.signals.count:
            for service in self.services:
                if not service.is_running:
                    self._restart(service)
            time.sleep(0.2)

    def _restart(self, service: Service) -> None:
        now = time.monotonic()
        self._deaths = [*(death for death in self._deaths if now - death < WITHIN_S), now]
        if len(self._deaths) >= MOST_DEATHS:
            raise PrecisionTimeError(
                f"{service.name} keeps ending", got=service.tail() or "no message", fix=f"see {service.log}"
            )
        self.say(f"{service.name} ended; starting it again")
        if service is self.worker:
            # The kernel told its runs to end, and they report more than we can; only silent ones are ended here.
            end_lost_runs("The worker that ran it died.")
        service.stop()
        service.start()

    def stop(self) -> None:
        """Stop all: the worker and its runs first, while the server can still record how they ended."""
        self.say("stopping; press Ctrl-C again to stop at once")
        if self.worker.process is not None:
            self.worker.ask_to_stop(is_hurried=self._is_hurried)
            if self.server.is_running and not self._is_hurried():
                # The runs were told to end with their worker and may report their end; the others are ended here.
                end_lost_runs("precision-time up was stopped.")
            self.worker.stop(is_hurried=self._is_hurried)
        for service in (self.dask_workers, self.scheduler, self.server):
            if service is not None:
                service.stop(is_hurried=self._is_hurried)
        self.say("stopped")

    def _is_hurried(self) -> bool:
        return self.signals.count > 1


def _read_page(url: str) -> bytes | None:
    """The answer of a service's page; None while there is none."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        body: bytes = answer.read()
        return body
    return None


@contextlib.contextmanager
def _lock_home(home: Path, say: Callable[[str], None]) -> Iterator[_StopSignals]:
    """Keep the home for this process alone, and count signals instead of ending by them."""
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (home / LOCK).open("a", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            "the home folder cannot be written", got=f"{home}: {error.strerror}", expected="a writable folder"
        ) from error
    with lock:
        if not _try_lock(lock):
            time.sleep(0.2)  # a reader of the addresses holds it for a moment
            if not _try_lock(lock):
                raise _already_running(home)
        left_state = _read_state(home)
        if left_state is not None:
            say(f"the precision-time up of process {left_state.get('pid')} ended without cleaning up; taking over")
        signals = _StopSignals()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        handlers = {number: signal.signal(number, signals) for number in numbers}
        try:
            yield signals
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _try_lock(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _already_running(home: Path) -> InputError:
    state = _read_state(home) or {}
    where = f"process {state['pid']}, pages at {state['ui']}, scheduler {state['scheduler']}" if state else "starting"
    return InputError(
        f"precision-time up is already running in {home}",
        got=where,
        expected="one at a time",
        fix="use it, end it, or choose another --home",
    )


def _read_state(home: Path) -> dict[str, Any] | None:
    try:
        state = json.loads((home / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _write_state(home: Path, addresses: Addresses) -> None:
    open_store(home).write_bytes(STATE, (json.dumps(addresses.to_dict(), indent=1) + "\n").encode())
