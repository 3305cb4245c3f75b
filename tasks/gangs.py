"""Gangs of whole Dask workers: the scheduler plugin that leases them, all or nothing, first come first served."""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialized, deserialize

from precision_time.tasks.glm_launch import end_glm_ranks
from precision_time.tasks.rank_process import end_ranks

__all__ = ["PLUGIN_NAME", "GangPlugin", "choose_workers", "count_running"]

PLUGIN_NAME = "precision-time-gangs"

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
    return end_ranks() + end_glm_ranks() + len(dask_worker.state.executing) + len(dask_worker.state.ready)


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

        ``state`` is ``granted`` (with ``workers``), ``queued`` (with the counts ``known``, ``held`` and ``leases``),
        ``impossible`` (more than the cluster has had for ``grace_s`` seconds; the request is then dropped) or
        ``refused`` (released before, or the client is gone).
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
        if lease in self._released:
            return {"state": "refused"}
        held = sum(worker in self._scheduler.workers for other in self._leases.values() for worker in other.workers)
        known = len(self._scheduler.workers)
        return {"state": "queued", "known": known, "held": held, "leases": len(self._leases)}

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
