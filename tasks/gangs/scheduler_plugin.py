"""The scheduler plugin that leases gangs of whole Dask workers: all or nothing, first come first served."""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.protocol.pickle import dumps
from distributed.protocol.serialize import Serialized, deserialize

from precision_time.tasks.processes.running_ranks import end_ranks

__all__ = ["PLUGIN_NAME", "GangPlugin", "choose_workers", "count_running"]

PLUGIN_NAME = "precision-time-gangs"

SWEEP_TIMEOUT_S = 10.0
SWEEP_EVERY_S = 0.2
#: How many past leases are remembered, so that a request overtaken by its own release is not granted, and a holder
#: learns why it lost its workers.
REMEMBERED = 10_000
#: A waiting client asks about every second. After so much silence it is stopped, asleep or cut off, and would hold up
#: the requests behind it: its own is dropped, and queues anew when it asks again.
SILENT_REQUEST_S = 30.0
#: A client that holds workers asks ten times a second while ranks run, and not at all while it ends them, fetches their
#: reports or records their rows: some ten seconds, on a slow object store a minute or two.
SILENT_LEASE_S = 300.0
#: Seconds between two counts of silence.
LISTEN_EVERY_S = 5.0

_SILENT = "its lease was ended: nothing was heard of this campaign for {:.0f} s; was it stopped, or its machine asleep?"
_PARTED = "its lease was ended: this campaign's connection to the scheduler was lost"


def choose_workers(free: Iterable[str], count: int, *, hosts: int | None = None) -> list[str] | None:
    """``count`` of the addresses ``free``, those of one host side by side; None when there are not enough.

    With ``hosts`` the gang is spread evenly over exactly that many hosts. Without, it is placed on one host if one is
    wide enough: the narrowest of those, so that wide gangs find room later.
    """
    by_host: dict[str, list[str]] = {}
    for address in sorted(free):
        by_host.setdefault(_host_of(address), []).append(address)
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


def _host_of(address: str) -> str:
    return urlsplit(address).hostname or address


def count_running(dask_worker: Any) -> int:
    """Kill the ranks that run on this worker, and count them and the tasks that still occupy it.

    ``Client.run`` and the plugin call it on the worker's event loop, so it must be short.
    """
    return end_ranks() + len(dask_worker.state.executing) + len(dask_worker.state.ready)


def _remember(known: dict[str, Any], lease: str, value: Any) -> None:
    known[lease] = value
    while len(known) > REMEMBERED:
        del known[next(iter(known))]


@dataclass(slots=True, kw_only=True)
class _Request:
    """A gang that a client waits for, since when it has been impossible, and how long the client has been silent."""

    lease: str
    client: str
    count: int
    hosts: int | None
    claim: str
    alone: bool
    grace_s: float
    silent_s: float = 0.0
    impossible_since: float | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, kw_only=True)
class _Lease:
    """A granted gang; ``lost`` are its dead workers, ``is_told`` says whether its client has the answer."""

    client: str
    workers: tuple[str, ...]
    claim: str
    silent_s: float = 0.0
    is_told: bool = False
    lost: set[str] = field(default_factory=set)


class GangPlugin(SchedulerPlugin):
    """Leases of whole workers on the scheduler: all or nothing, first come first served.

    A worker is ``draining`` from the moment it appears or its lease ends until a sweep shows that nothing of an earlier
    lease runs there; only then it is free. A lease ends when its holder releases it, when the holder's connection
    closes, or when the holder is silent for minutes (a stopped process keeps its connection). The death of a worker
    marks its lease as lost; the other workers stay in it until the holder releases it. Of all requests with the same
    claim, only one holds workers at a time.
    """

    name = PLUGIN_NAME
    idempotent = True

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._listened_at = clock()
        self._queue: deque[_Request] = deque()
        self._leases: dict[str, _Lease] = {}
        self._draining: set[str] = set()
        self._released: dict[str, None] = {}
        self._ended: dict[str, str] = {}
        self._sweeps: set[asyncio.Task[None]] = set()

    # Not a coroutine: the scheduler must register the plugin right after it has looked for one of this name, or two
    # clients at the same moment would start two.
    def start(self, scheduler: Any) -> None:  # type: ignore[override]
        """Add the plugin's handlers to ``scheduler`` and sweep the workers that are already there."""
        self._scheduler = scheduler
        scheduler.handlers.update(
            gang_acquire=self.acquire, gang_release=self.release, gang_check=self.check, gang_state=self.state
        )
        for worker in scheduler.workers:
            self._drain(worker, sweeps=1)
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    async def close(self) -> None:
        """Stop listening, so that the scheduler can end."""
        self._listening.cancel()

    async def acquire(
        self, *, lease: str, holder: str, count: int, hosts: int | None, grace_s: float, wait_s: float,
        claim: str = "", alone: bool = False,
    ) -> dict[str, Any]:  # fmt: skip
        """Queue for a gang, or ask again for a queued one; answers within ``wait_s`` seconds.

        ``claim`` names the purpose of the gang, empty for none. An ``alone`` gang is granted no host on which another
        lease holds workers. ``state`` of the answer is ``granted`` (with ``workers``), ``queued`` (with the counts
        ``known``, ``held``, ``leases`` and ``draining``, and ``claimed`` where it waits for a lease with the same
        claim), ``impossible`` (too wide for the cluster for ``grace_s`` seconds; the request is then dropped) or
        ``refused`` (released before, or the client is gone).
        """
        if lease in self._released or holder not in self._scheduler.clients:
            return {"state": "refused"}
        if lease not in self._leases:
            request = next((waiting for waiting in self._queue if waiting.lease == lease), None)
            if request is None:
                request = _Request(
                    lease=lease, client=holder, count=count, hosts=hosts, claim=claim, alone=alone, grace_s=grace_s
                )
                self._queue.append(request)
            request.silent_s = 0.0
            self._grant()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(request.answered.wait(), wait_s)
            if lease not in self._leases and self._is_impossible(request):
                self._forget(lease)
                return {"state": "impossible", "workers": sorted(self._scheduler.workers)}
        if lease in self._leases:
            granted = self._leases[lease]
            granted.is_told, granted.silent_s = True, 0.0
            return {"state": "granted", "workers": list(granted.workers)}
        if lease in self._released:
            return {"state": "refused"}
        held = sum(worker in self._scheduler.workers for other in self._leases.values() for worker in other.workers)
        known = len(self._scheduler.workers)
        return {
            "state": "queued", "known": known, "held": held, "leases": len(self._leases),
            "draining": len(self._draining), "claimed": self._is_claimed(claim),
        }  # fmt: skip

    async def release(self, *, lease: str, sweeps: int) -> None:
        """End a lease, or take its request out of the queue."""
        self._forget(lease)
        self._end(lease, sweeps=sweeps)
        self._grant()

    async def check(self, *, lease: str) -> dict[str, Any]:
        """Whether a lease is ``held``, its dead workers as ``lost``, and ``why`` it was ended where that is known."""
        held = self._leases.get(lease)
        if held is None:
            return {"held": False, "lost": [], "why": self._ended.get(lease, "")}
        held.silent_s = 0.0
        return {"held": True, "lost": sorted(held.lost), "why": ""}

    async def state(self) -> dict[str, Any]:
        """Leases (workers by lease), lost workers by lease, requests in the queue, and workers being swept."""
        return {
            "leases": {lease: list(held.workers) for lease, held in self._leases.items()},
            "lost": {lease: sorted(held.lost) for lease, held in self._leases.items() if held.lost},
            "queue": [{"lease": request.lease, "count": request.count} for request in self._queue],
            "draining": sorted(self._draining),
        }

    def add_worker(self, scheduler: Any, worker: str) -> None:
        """A worker appeared; it may still run something for another scheduler."""
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
            self._end(lease, sweeps=2, why=_PARTED)
        self._grant()

    async def _listen(self) -> None:
        while True:
            await asyncio.sleep(LISTEN_EVERY_S)
            self.drop_silent()

    def drop_silent(self) -> None:
        """Drop the requests and leases whose clients have been silent for too long."""
        now = self._clock()
        # Time in which the scheduler itself stood still is no silence: no client could ask.
        passed_s, self._listened_at = min(now - self._listened_at, 2 * LISTEN_EVERY_S), now
        for request in tuple(self._queue):
            request.silent_s += passed_s
            if request.silent_s > SILENT_REQUEST_S:
                self._queue.remove(request)
        for lease, held in tuple(self._leases.items()):
            held.silent_s += passed_s
            # Until its client has the answer, it counts as a request.
            if held.silent_s > (SILENT_LEASE_S if held.is_told else SILENT_REQUEST_S):
                self._end(lease, sweeps=2, why=_SILENT.format(held.silent_s))
        self._grant()

    def _free(self, *, alone: bool) -> list[str]:
        held = {worker for lease in self._leases.values() for worker in lease.workers}
        shared = {_host_of(worker) for worker in held} if alone else set()
        return [
            address
            for address, worker in self._scheduler.workers.items()
            if worker.status == Status.running
            and address not in held
            and address not in self._draining
            and _host_of(address) not in shared
        ]

    def _grant(self) -> None:
        # The first in the queue is served first, even if a later one would fit, so that a wide gang never starves. A
        # request whose claim is held waits for that lease and not for workers, so it is passed over.
        for request in tuple(self._queue):
            if self._is_claimed(request.claim):
                continue
            workers = choose_workers(self._free(alone=request.alone), request.count, hosts=request.hosts)
            if workers is None:
                break
            self._queue.remove(request)
            self._leases[request.lease] = _Lease(
                client=request.client, workers=tuple(workers), claim=request.claim, silent_s=request.silent_s
            )
            request.answered.set()

    def _is_claimed(self, claim: str) -> bool:
        return bool(claim) and any(held.claim == claim for held in self._leases.values())

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
        _remember(self._released, lease, None)

    def _end(self, lease: str, *, sweeps: int, why: str = "") -> None:
        ended = self._leases.pop(lease, None)
        if why:
            _remember(self._ended, lease, why)
        for worker in ended.workers if ended else ():
            self._drain(worker, sweeps=sweeps)

    def _drain(self, worker: str, *, sweeps: int) -> None:
        if worker in self._scheduler.workers and worker not in self._draining:
            self._draining.add(worker)
            sweep = asyncio.get_running_loop().create_task(self._sweep(worker, sweeps=sweeps))
            self._sweeps.add(sweep)
            sweep.add_done_callback(self._sweeps.discard)

    async def _sweep(self, worker: str, *, sweeps: int) -> None:
        """Ask until ``worker`` has answered ``sweeps`` times in a row that it is empty, or is gone."""
        clean = 0
        try:
            while worker in self._scheduler.workers:
                is_empty = False
                # Whatever the error: a worker that cannot answer is asked again, and one that is gone drops out.
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
        # The worker does not count a rank that is still on its way to it.
        return running == 0 and known is not None and not known.processing

    async def _call_sweep(self, worker: str) -> int:
        answer = await self._scheduler.rpc(worker).run(function=dumps(count_running))
        if answer["status"] != "OK":
            raise OSError(f"the sweep of {worker} failed")
        result = answer["result"]
        # The scheduler passes results on without deserialising them.
        return int(deserialize(result.header, result.frames) if isinstance(result, Serialized) else result)
