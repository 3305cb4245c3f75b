"""``precision-time up``: Prefect's server, deployments, a worker and a Dask cluster on this machine, until Ctrl-C."""

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
)
from precision_time.storage.errors import InputError, PrecisionTimeError, StorageError
from precision_time.storage.filesystem import open_store

__all__ = ["STATE", "Addresses", "UpSettings", "prefilled_form", "read_addresses", "stay_up"]

CLUSTERS = ("auto", "local", "local-cuda", "none")
STATE = "up.json"
LOCK = "up.lock"
DASK_PORT, DASHBOARD_PORT = 8786, 8787
#: The first start of the server writes the tables of its database.
START_S = 180.0
#: A process that ends so many times within so many seconds will not stay.
DEATHS, WITHIN_S = 5, 300.0
MOST_CPU_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """What is to run: ``cluster`` is auto, local, local-cuda, none, or the address of a scheduler that runs already."""

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
    """Where the running stack is to be found; ``up.json`` in its home holds the same."""

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
        """What a person is to open, line by line."""
        lines = {
            "pages": self.ui,
            "measure": self.campaign_form,
            "dashboard": self.dashboard,
            "scheduler": self.scheduler,
            "home": self.home,
        }
        rows = [f"{name:<10} {value}" for name, value in lines.items() if value is not None]
        return "\n".join([*rows, f"up after {self.started_in_s:g} s; Ctrl-C stops everything"])


class _Stop:
    """Set by SIGINT, SIGTERM or SIGHUP; from the second signal on nothing is waited for."""

    def __init__(self) -> None:
        self.signals = 0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.signals += 1

    @property
    def is_asked(self) -> bool:
        return self.signals > 0

    @property
    def is_hurried(self) -> bool:
        return self.signals > 1


def stay_up(
    settings: UpSettings, *, announce: Callable[[Addresses], None], say: Callable[[str], None] = lambda text: None
) -> None:
    """Start everything, call ``announce`` when it answers, and stay until a signal; then stop everything.

    Processes that die meanwhile are started again, and runs that died with their worker end as Crashed. Call it in the
    main thread, after ``adopt_environment``. Raises ``InputError`` when something runs already or a port is in use,
    ``PrecisionTimeError`` with the last words of a process that did not start or did not stay.
    """
    started = time.monotonic()
    home = settings.home
    with _hold(home, say) as stop, contextlib.ExitStack() as claims:
        require_free(settings.port)
        if is_address(settings.cluster):
            require_scheduler(settings.cluster)
        for folder in ("logs", "prefect", "precision-time-data", "precision-time-registry"):
            (home / folder).mkdir(exist_ok=True)
        for log in (home / "logs").glob("*.log"):
            log.replace(f"{log}.1")  # whoever starts it again may want to know why it ended
        stack = _Stack(settings, stop, say)
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
    """Where the stack of ``home`` is, or None when none runs there."""
    try:
        values = json.loads((home / STATE).read_text(encoding="utf-8"))
        with (home / LOCK).open("r", encoding="utf-8") as lock:
            if _take(lock):
                return None
        return Addresses(**values)
    except (OSError, ValueError, TypeError):
        return None


def prefilled_form(ui: str, deployment: str, parameters: dict[str, Any]) -> str:
    """The address of the form for a run of ``deployment``, filled in; its page decodes them twice."""
    encoded = quote(quote(json.dumps(parameters), safe=""), safe="")
    return f"{ui}/deployments/deployment/{deployment}/run?parameters={encoded}"


class _Stack:
    """The services in the order of their start."""

    def __init__(self, settings: UpSettings, stop: _Stop, say: Callable[[str], None]) -> None:
        self.settings, self.stop_asked, self.say = settings, stop, say
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
            raise InputError(
                "no GPU was found", got="nvidia-smi lists none", expected="--cluster local for CPU workers"
            )
        workers = gpus or self.settings.workers or max(2, min(os.cpu_count() or 1, MOST_CPU_WORKERS))
        port, dashboard = choose_port(DASK_PORT), choose_port(DASHBOARD_PORT)
        self.scheduler, self.dask_workers = dask_services(
            port=port, dashboard_port=dashboard, workers=workers, on_gpus=gpus > 0, logs=logs
        )
        self.dask_address = f"tcp://{LOOPBACK}:{port}"
        # Only with bokeh has Dask its dashboard; the plain pages are always there.
        page = "status" if importlib.util.find_spec("bokeh") else "info/main/workers.html"
        self.dashboard = f"http://{LOOPBACK}:{dashboard}/{page}"
        self.dask_counts, self.dask_count = f"http://{LOOPBACK}:{dashboard}/json/counts.json", workers
        self.ranks = (1, 2) if workers > 1 else (1,)
        self.devices = name_devices("cuda" if gpus else "cpu", count=workers)

    @property
    def services(self) -> list[Service]:
        """In the order in which they are started; stopped in the opposite one."""
        worker = [self.worker] if self.settings.with_worker else []
        return [
            self.server,
            *(service for service in (self.scheduler, self.dask_workers) if service is not None),
            *worker,
        ]

    def start(self, *, since: float) -> Addresses | None:
        """Start all and wait until each service does its work; None when a signal came meanwhile."""
        self.say("starting Prefect's server, which takes about half a minute the first time")
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
        # Prefect reads its settings at its first import, and the flows are imported for their forms.
        from precision_time.flows.stack.automations import register_automations

        forms = load_forms(planned)
        if not self._until(lambda: _ask(f"{self.api}/health") is not None, self.server):
            return None
        self.say("registering the deployments")
        end_lost_runs("The stack that ran it was stopped or died.")
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
            deployments={name: str(found) for name, found in ids.items()},
            started_in_s=round(time.monotonic() - since, 1),
        )

    def _wait_for_dask(self) -> bool:
        if self.scheduler is None or self.dask_workers is None or self.dask_counts is None:
            return True
        url, wanted = self.dask_counts, self.dask_count

        def has_workers() -> bool:
            answer = _ask(url)
            return answer is not None and json.loads(answer)["workers"] >= wanted

        return self._until(has_workers, self.dask_workers, self.scheduler)

    def _wait_for_worker(self) -> bool:
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:

            def is_online() -> bool:
                return any(found.status == "ONLINE" for found in client.read_workers_for_work_pool(POOL))

            return self._until(is_online, self.worker)

    def _until(self, condition: Callable[[], bool], *services: Service) -> bool:
        deadline = time.monotonic() + START_S
        while not condition():
            if self.stop_asked.is_asked:
                return False
            for service in services:
                service.require_running()
            if time.monotonic() > deadline:
                raise PrecisionTimeError(
                    f"no answer of {services[0].name}",
                    got=f"nothing within {START_S:g} s",
                    fix=f"see {services[0].log}",
                )
            time.sleep(0.2)
        return True

    def watch(self) -> None:
        """Stay until a signal, and start again what has died."""
        while not self.stop_asked.is_asked:
            for service in self.services:
                if not service.is_running:
                    self._revive(service)
            time.sleep(0.2)

    def _revive(self, service: Service) -> None:
        now = time.monotonic()
        self._deaths = [*(then for then in self._deaths if now - then < WITHIN_S), now]
        if len(self._deaths) >= DEATHS:
            raise PrecisionTimeError(
                f"{service.name} does not stay", got=service.tail() or "no message", fix=f"see {service.log}"
            )
        self.say(f"{service.name} ended; starting it again")
        if service is self.worker:
            # The kernel told its runs to end: what they say themselves is better than what we can say.
            end_lost_runs("The worker that ran it died.")
        service.stop()
        service.start()

    def stop(self) -> None:
        """Stop all: runs with their worker first, while the server still takes their last word."""
        self.say("stopping; press Ctrl-C again to stop at once")
        if self.worker.process is not None:
            self.worker.ask_to_stop(is_hurried=self._is_hurried)
            if self.server.is_running and not self._is_hurried():
                # Its runs were told to end with it, and may say themselves how far they came.
                end_lost_runs("precision-time up was stopped.")
            self.worker.stop(is_hurried=self._is_hurried)
        for service in (self.dask_workers, self.scheduler, self.server):
            if service is not None:
                service.stop(is_hurried=self._is_hurried)
        self.say("stopped")

    def _is_hurried(self) -> bool:
        return self.stop_asked.is_hurried


def _ask(url: str) -> bytes | None:
    """What a page of a service answers; None while it does not."""
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        body: bytes = answer.read()
        return body
    return None


@contextlib.contextmanager
def _hold(home: Path, say: Callable[[str], None]) -> Iterator[_Stop]:
    """The home for this process alone, with signals counted instead of obeyed."""
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (home / LOCK).open("a", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            "the home of the stack cannot be written", got=f"{home}: {error.strerror}", expected="a writable folder"
        ) from error
    with lock:
        if not _take(lock):
            time.sleep(0.2)  # a reader of the addresses holds it for a moment
            if not _take(lock):
                raise _runs_already(home)
        left = _read_state(home)
        if left is not None:
            say(f"the stack of process {left.get('pid')} ended without tidying up; taking over")
        stop = _Stop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, stop) for number in signals}
        try:
            yield stop
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _take(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _runs_already(home: Path) -> InputError:
    state = _read_state(home) or {}
    where = f"process {state['pid']}, pages at {state['ui']}, scheduler {state['scheduler']}" if state else "starting"
    return InputError(
        f"a stack runs already in {home}",
        got=where,
        expected="one at a time",
        fix="use it, end it, or take another --home",
    )


def _read_state(home: Path) -> dict[str, Any] | None:
    try:
        state = json.loads((home / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _write_state(home: Path, addresses: Addresses) -> None:
    open_store(home).write_bytes(STATE, (json.dumps(addresses.to_dict(), indent=1) + "\n").encode())
