"""Gangs of whole Dask workers: a scheduler plugin that leases them all or nothing, and the client's side of a lease."""

import asyncio
import contextlib
import itertools
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from distributed import Client
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialized, deserialize

from precision_time.storage.errors import ClusterLostError, InputError, NoWorkersError
from precision_time.tasks.rank_process import end_ranks

__all__ = [
    "GangLease", "GangPlugin", "check_connected", "choose_workers", "count_running", "gang_state", "install_gangs",
    "lease_workers",
]  # fmt: skip

PLUGIN_NAME = "precision-time-gangs"

#: A nanny brings a killed worker back within seconds, under a new address: until then a gang only seems impossible.
GRACE_S = 30.0
#: How long one call of a waiting client stays with the scheduler; it then asks again, so no queue entry outlives it.
CALL_S = 1.0
#: Beyond that, how long the answer may take before the scheduler counts as gone.
ANSWER_S = 30.0
SWEEP_TIMEOUT_S = 10.0
SWEEP_EVERY_S = 0.2
#: Identities of released leases that are remembered, so that a request overtaken by its own release is not granted.
REMEMBERED = 10_000


def choose_workers(free: Iterable[str], count: int, *, hosts: int | None = None) -> list[str] | None:
    """``count`` of the addresses ``free``, those of one host side by side; None when they do not suffice.

    With ``hosts`` the gang stands evenly on exactly that many hosts. Without, one host takes all of it if one can:
    the one with the least to spare, so that wide gangs find room later.
    """
    by_host: dict[str, list[str]] = {}
    for address in sorted(free):
        by_host.setdefault(urlsplit(address).hostname or address, []).append(address)
    if hosts is None:
        fitting = [addresses for addresses in by_host.values() if len(addresses) >= count]
        if fitting:
            return min(fitting, key=len)[:count]
        widest = sorted(by_host.values(), key=len, reverse=True)
        pooled = list(itertools.chain.from_iterable(widest))[:count]
        return pooled if len(pooled) == count else None
    share, rest = divmod(count, hosts)
    fitting = sorted((addresses for addresses in by_host.values() if len(addresses) >= share), key=len)
    if rest or len(fitting) < hosts:
        return None
    return [address for addresses in fitting[:hosts] for address in addresses[:share]]


def count_running(dask_worker: Any) -> int:
    """Kill the ranks that run on this worker, and count them and the tasks that still hold it.

    ``Client.run`` and the plugin run it on the worker's event loop, so it only looks and signals.
    """
    return end_ranks() + len(dask_worker.state.executing) + len(dask_worker.state.ready)


@dataclass(slots=True, kw_only=True)
class _Request:
    """A gang that a client waits for, and for how long it has been impossible."""

    lease: str
    client: str
    count: int
    hosts: int | None
    grace_s: float
    impossible_since: float | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, kw_only=True)
class _Lease:
    """A granted gang; ``lost`` are those of its workers that have died since."""

    client: str
    workers: tuple[str, ...]
    lost: set[str] = field(default_factory=set)


class GangPlugin(SchedulerPlugin):
    """Leases of whole workers on the scheduler: all or nothing, first come first served.

    A worker is ``draining`` from the moment it appears or its lease ends until it has answered that nothing of an
    earlier lease runs there; only then it is free. A lease ends when its holder releases it or the holder's connection
    closes. The death of a worker marks its lease as lost and keeps the others in it until the holder lets go.
    """

    name = PLUGIN_NAME
    idempotent = True

    def __init__(self) -> None:
        self._queue: deque[_Request] = deque()
        self._leases: dict[str, _Lease] = {}
        self._draining: set[str] = set()
        self._released: dict[str, None] = {}
        self._sweeps: set[asyncio.Task[None]] = set()

    # Not a coroutine: between the scheduler's look for a plugin of this name and its entry nothing else may run, or
    # two clients that come at once would start two plugins.
    def start(self, scheduler: Any) -> None:  # type: ignore[override]
        """Open the plugin's handlers on ``scheduler`` and look at the workers that are already there."""
        self._scheduler = scheduler
        scheduler.handlers.update(
            gang_acquire=self.acquire, gang_release=self.release, gang_check=self.check, gang_state=self.state
        )
        for worker in scheduler.workers:
            self._drain(worker, sweeps=1)

    async def acquire(
        self, *, lease: str, holder: str, count: int, hosts: int | None, grace_s: float, wait_s: float
    ) -> dict[str, Any]:
        """Queue for a gang, or ask again for one that is queued; answers within ``wait_s`` seconds.

        ``state`` is ``granted`` (with ``workers``), ``queued``, ``impossible`` (more than the cluster has had for
        ``grace_s`` seconds; the request is then dropped) or ``refused`` (released before, or the client is gone).
        """
        if lease in self._released or holder not in self._scheduler.clients:
            return {"state": "refused"}
        if lease not in self._leases:
            request = next((waiting for waiting in self._queue if waiting.lease == lease), None)
            if request is None:
                request = _Request(lease=lease, client=holder, count=count, hosts=hosts, grace_s=grace_s)
                self._queue.append(request)
            self._grant()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(request.answered.wait(), wait_s)
            if lease not in self._leases and self._is_impossible(request):
                self._forget(lease)
                return {"state": "impossible", "workers": sorted(self._scheduler.workers)}
        if lease in self._leases:
            return {"state": "granted", "workers": list(self._leases[lease].workers)}
        return {"state": "refused" if lease in self._released else "queued"}

    async def release(self, *, lease: str, sweeps: int) -> None:
        """End a lease, or take its request out of the queue."""
        self._forget(lease)
        self._end(lease, sweeps=sweeps)
        self._grant()

    async def check(self, *, lease: str) -> dict[str, Any]:
        """Whether a lease is ``held``, and which of its workers have died."""
        held = self._leases.get(lease)
        return {"held": held is not None, "lost": sorted(held.lost) if held else []}

    async def state(self) -> dict[str, Any]:
        """Leases (workers by lease), lost workers by lease, requests in the queue, and workers being swept."""
        return {
            "leases": {lease: list(held.workers) for lease, held in self._leases.items()},
            "lost": {lease: sorted(held.lost) for lease, held in self._leases.items() if held.lost},
            "queue": [{"lease": request.lease, "count": request.count} for request in self._queue],
            "draining": sorted(self._draining),
        }

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """A worker appeared; what it ran for another scheduler may still run."""
        for request in self._queue:
            self._is_impossible(request)
        self._drain(worker, sweeps=1)

    def remove_worker(self, scheduler: Any, worker: str, *, stimulus_id: str, **_: Any) -> None:
        """A worker died: its lease is lost, but its peers stay in it."""
        for held in self._leases.values():
            if worker in held.workers:
                held.lost.add(worker)
        self._grant()

    def remove_client(self, scheduler: Any, client: str) -> None:
        """A client went away: its leases end and its requests leave the queue."""
        for request in [request for request in self._queue if request.client == client]:
            self._forget(request.lease)
        for lease in [lease for lease, held in self._leases.items() if held.client == client]:
            self._end(lease, sweeps=2)
        self._grant()

    def _free(self) -> list[str]:
        held = {worker for lease in self._leases.values() for worker in lease.workers}
        return [
            address
            for address, worker in self._scheduler.workers.items()
            if worker.status == Status.running and address not in held and address not in self._draining
        ]

    def _grant(self) -> None:
        # The first in the queue is served first, even if a later one would fit: a wide gang never starves.
        while self._queue:
            request = self._queue[0]
            workers = choose_workers(self._free(), request.count, hosts=request.hosts)
            if workers is None:
                break
            self._queue.popleft()
            self._leases[request.lease] = _Lease(client=request.client, workers=tuple(workers))
            request.answered.set()

    def _is_impossible(self, request: _Request) -> bool:
        now = time.monotonic()
        if choose_workers(self._scheduler.workers, request.count, hosts=request.hosts) is not None:
            request.impossible_since = None
        elif request.impossible_since is None:
            request.impossible_since = now
        return request.impossible_since is not None and now - request.impossible_since >= request.grace_s

    def _forget(self, lease: str) -> None:
        for request in [request for request in self._queue if request.lease == lease]:
            self._queue.remove(request)
            request.answered.set()
        self._released[lease] = None
        while len(self._released) > REMEMBERED:
            del self._released[next(iter(self._released))]

    def _end(self, lease: str, *, sweeps: int) -> None:
        held = self._leases.pop(lease, None)
        for worker in held.workers if held else ():
            self._drain(worker, sweeps=sweeps)

    def _drain(self, worker: str, *, sweeps: int) -> None:
        if worker in self._scheduler.workers and worker not in self._draining:
            self._draining.add(worker)
            sweep = asyncio.get_running_loop().create_task(self._sweep(worker, sweeps=sweeps))
            self._sweeps.add(sweep)
            sweep.add_done_callback(self._sweeps.discard)

    async def _sweep(self, worker: str, *, sweeps: int) -> None:
        """Ask until ``worker`` has said ``sweeps`` times in a row that it is empty, or is gone."""
        clean = 0
        try:
            while worker in self._scheduler.workers:
                is_empty = False
                # Also what nobody foresaw: a worker that cannot answer is asked again, and one that is gone drops out.
                with contextlib.suppress(Exception):
                    is_empty = await asyncio.wait_for(self._is_empty(worker), SWEEP_TIMEOUT_S)
                clean = clean + 1 if is_empty else 0
                if clean >= sweeps:
                    break
                await asyncio.sleep(SWEEP_EVERY_S)
        finally:
            self._draining.discard(worker)
        self._grant()

    async def _is_empty(self, worker: str) -> bool:
        running = await self._call_sweep(worker)
        known = self._scheduler.workers.get(worker)
        # A rank that is on its way there is not in the worker's own count yet.
        return running == 0 and known is not None and not known.processing

    async def _call_sweep(self, worker: str) -> int:
        answer = await self._scheduler.rpc(worker).run(function=dumps(count_running))
        if answer["status"] != "OK":
            raise OSError(f"the sweep of {worker} failed")
        result = answer["result"]
        # The scheduler passes results on unread.
        return int(deserialize(result.header, result.frames) if isinstance(result, Serialized) else result)


class GangLease:
    """The workers of a granted gang, rank by rank."""

    def __init__(self, client: Client, identity: str, workers: Sequence[str]) -> None:
        self.workers = tuple(workers)
        self.identity = identity
        self._client = client
        self._is_clean = False

    def lost_workers(self) -> list[str]:
        """Those of the workers that have died since; all of them when the lease itself is gone.

        Raises ``ClusterLostError`` when the scheduler does not answer.
        """
        answer = _ask(self._client, "gang_check", lease=self.identity)
        return list(answer["lost"]) if answer["held"] else list(self.workers)

    def is_lost(self) -> bool:
        """Whether a worker of the gang has died."""
        return bool(self.lost_workers())

    def mark_clean(self) -> None:
        """Say that every task sent to the workers has come back: they are then free after one sweep instead of two."""
        self._is_clean = True


@contextlib.contextmanager
def lease_workers(
    client: Client,
    count: int,
    *,
    hosts: int | None = None,
    timeout_s: float | None = None,
    grace_s: float | None = None,
) -> Iterator[GangLease]:
    """Wait for ``count`` whole workers of the cluster and hold them during the block; no one else gets them.

    ``hosts`` asks for a gang spread evenly over exactly so many hosts. ``timeout_s`` limits the wait (None: as long as
    others hold the workers), ``grace_s`` how long a gang that the cluster cannot hold may stay so (30 s). Raises
    ``InputError`` for a gang that stays impossible, ``NoWorkersError`` when there is no worker at all or the time is
    up, and ``ClusterLostError`` when the scheduler is gone. Threads of one client may wait side by side.
    """
    if count < 1 or (hosts is not None and (hosts < 1 or count % hosts)):
        raise InputError(
            "no such gang", got=f"{count} workers on {hosts or 1} hosts", expected="a whole number on every host"
        )
    install_gangs(client)
    identity = uuid.uuid4().hex
    lease: GangLease | None = None
    grace_s = GRACE_S if grace_s is None else grace_s
    try:
        lease = _wait_for(client, identity, count=count, hosts=hosts, timeout_s=timeout_s, grace_s=grace_s)
        yield lease
    finally:
        # Whatever happened, also while waiting: nothing of it stays in the queue.
        with contextlib.suppress(ClusterLostError):
            _ask(client, "gang_release", lease=identity, sweeps=1 if lease is not None and lease._is_clean else 2)


def gang_state(client: Client) -> dict[str, Any]:
    """What the scheduler holds: ``leases``, ``lost``, ``queue`` and ``draining``; see ``GangPlugin.state``."""
    install_gangs(client)
    return dict(_ask(client, "gang_state"))


def install_gangs(client: Client) -> None:
    """Let the scheduler know the plugin; it keeps the one that it has."""
    check_connected(client)
    try:
        client.register_plugin(GangPlugin(), name=PLUGIN_NAME)
    except (OSError, TimeoutError, RuntimeError) as error:
        raise _lost(error) from error


def check_connected(client: Client) -> None:
    """Raise ``ClusterLostError`` for a client that has given up its scheduler: Dask then fails in many words."""
    if client.scheduler is None or client.status in ("closing", "closed"):
        raise _lost("the connection is closed")


def _wait_for(
    client: Client, identity: str, *, count: int, hosts: int | None, timeout_s: float | None, grace_s: float
) -> GangLease:
    began = time.monotonic()
    while True:
        left_s = CALL_S if timeout_s is None else min(CALL_S, timeout_s - (time.monotonic() - began))
        answer = _ask(
            client, "gang_acquire", lease=identity, holder=client.id, count=count, hosts=hosts, grace_s=grace_s,
            wait_s=max(0.0, min(left_s, grace_s / 4)),
        )  # fmt: skip
        if answer["state"] == "granted":
            return GangLease(client, identity, answer["workers"])
        if answer["state"] == "impossible":
            raise _impossible(answer["workers"], count=count, hosts=hosts, grace_s=grace_s)
        if answer["state"] == "refused":
            raise _lost("the scheduler has lost sight of this client")
        if timeout_s is not None and time.monotonic() - began >= timeout_s:
            raise NoWorkersError(
                "the workers did not become free in time",
                got=f"fewer than {count} free workers for {timeout_s:g} s",
                fix="wait for the other campaigns on this cluster, or start more workers",
            )


def _impossible(workers: Sequence[str], *, count: int, hosts: int | None, grace_s: float) -> Exception:
    if not workers:
        return NoWorkersError(
            "the cluster has no worker left",
            got=f"none for {grace_s:g} s",
            fix="start workers; what is recorded is kept, and running again measures the rest",
        )
    spread = Counter(str(urlsplit(address).hostname) for address in workers)
    hosts_of = ", ".join(f"{host}: {number}" for host, number in sorted(spread.items())[:20])
    return InputError(
        "the cluster has fewer workers than the cell has ranks",
        got=f"{len(workers)} workers ({hosts_of}) for {grace_s:g} s",
        expected=f"{count} workers of one thread each" + (f" on {hosts} hosts, evenly" if hosts else ""),
        fix="start more workers, or leave this number of ranks out",
    )


def _ask(client: Client, operation: str, **values: Any) -> Any:
    """One call of a handler of the plugin; raises ``ClusterLostError`` when no answer comes."""
    check_connected(client)
    try:
        answer = client.sync(
            getattr(client.scheduler, operation), callback_timeout=values.get("wait_s", 0.0) + ANSWER_S, **values
        )
    except (OSError, TimeoutError, RuntimeError) as error:
        raise _lost(error) from error
    if answer is None and operation != "gang_release":
        # What a scheduler answers to a call that it does not know: it was started anew.
        raise _lost("the scheduler knows nothing of this campaign's leases")
    return answer


def _lost(reason: object) -> ClusterLostError:
    return ClusterLostError(
        "the Dask scheduler is gone or does not answer",
        got=f"{type(reason).__name__}: {reason}" if isinstance(reason, BaseException) else str(reason),
        expected="a scheduler that runs for as long as the campaign",
        fix="start the cluster again and run the campaign again; what is recorded is kept",
    )
