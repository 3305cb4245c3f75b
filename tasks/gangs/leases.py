"""A client's leases of gangs of Dask workers: wait for one, watch it, give it back."""

import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from distributed import Client

from precision_time.storage.errors import ClusterLostError, InputError, NoWorkersError
from precision_time.tasks.gangs.scheduler_plugin import PLUGIN_NAME, GangPlugin

__all__ = [
    "GangLease", "LeaseWait", "check_connected", "gang_state", "install_gangs", "lease_workers",
]  # fmt: skip

#: How long a gang may seem impossible: a nanny restarts a killed worker within seconds, under a new address.
GRACE_S = 30.0
#: How long the scheduler may keep one call of a waiting client, which then asks again. The scheduler drops a request
#: that is not repeated for ``scheduler_plugin.SILENT_REQUEST_S``.
CALL_S = 1.0
#: How much longer an answer may take before the scheduler counts as gone.
ANSWER_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseWait:
    """Why a gang of ``wanted`` workers waits: others hold ``held`` of the ``known`` workers by ``leases`` leases.

    ``draining`` workers may still run something of an earlier lease. ``is_claimed``: a lease with the same claim is
    held, so the gang waits for its end. ``is_alone``: the gang wants its hosts to itself.
    """

    seconds: float
    wanted: int
    known: int
    held: int
    leases: int
    draining: int = 0
    is_claimed: bool = False
    is_alone: bool = False

    def __str__(self) -> str:
        if self.is_claimed:
            return "waiting for another campaign, which measures this cell"
        swept = f", {self.draining} more {'is' if self.draining == 1 else 'are'} being swept" if self.draining else ""
        where = " on hosts of its own" if self.is_alone else ""
        return (
            f"waiting for {_count(self.wanted, 'free worker')}{where}: {self.held} of {self.known} are held "
            f"by {_count(self.leases, 'lease')} of others{swept}"
        )


class GangLease:
    """The workers of a granted gang, rank by rank."""

    def __init__(self, client: Client, identity: str, workers: Sequence[str]) -> None:
        self.workers = tuple(workers)
        self.identity = identity
        #: The loss that ``lost_workers`` last found, in words.
        self.loss = ""
        self.client = client
        self._is_clean = False

    def lost_workers(self) -> list[str]:
        """The workers that have died since; all of them when the lease itself is gone.

        Raises ``ClusterLostError`` when the scheduler does not answer.
        """
        answer = _ask(self.client, "gang_check", lease=self.identity)
        if not answer["held"]:
            self.loss = answer["why"] or "the scheduler no longer knows its lease"
            return list(self.workers)
        lost = list(answer["lost"])
        if lost:
            self.loss = f"worker {', '.join(lost)} is gone"
        return lost

    def mark_clean(self) -> None:
        """Note that every task on the workers has returned: they are then free after one sweep instead of two."""
        self._is_clean = True


@contextlib.contextmanager
def lease_workers(
    client: Client,
    count: int,
    *,
    hosts: int | None = None,
    claim: str = "",
    alone: bool = False,
    timeout_s: float | None = None,
    grace_s: float | None = None,
    watch: Callable[[LeaseWait], None] | None = None,
) -> Iterator[GangLease]:
    """Wait for ``count`` whole workers of the cluster and hold them during the block; no other client gets them.

    ``hosts`` asks for a gang spread evenly over exactly so many hosts. ``claim`` names the purpose of the gang: of all
    gangs with the same claim, whichever client asks, only one has workers at a time. ``alone`` waits for hosts on which
    no other lease holds workers. ``timeout_s`` limits the wait (None: as long as others hold the workers), ``grace_s``
    how long the cluster may stay too small for the gang (30 s). ``watch`` is called about every second of the wait, in
    this thread; its exceptions end the wait and go on up. Raises ``InputError`` for a gang that stays impossible,
    ``NoWorkersError`` when there is no worker at all or the time is up, and ``ClusterLostError`` when the scheduler is
    gone. Threads of one client may wait side by side.
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
        lease = _wait_for(
            client, identity, count=count, hosts=hosts, claim=claim, alone=alone, timeout_s=timeout_s, grace_s=grace_s,
            watch=watch,
        )  # fmt: skip
        yield lease
    finally:
        # In every case, also after an interrupted wait: the request must not stay in the queue.
        with contextlib.suppress(ClusterLostError):
            _ask(client, "gang_release", lease=identity, sweeps=1 if lease is not None and lease._is_clean else 2)


def gang_state(client: Client) -> dict[str, Any]:
    """The state of the scheduler: ``leases``, ``lost``, ``queue`` and ``draining``; see ``GangPlugin.state``."""
    install_gangs(client)
    return dict(_ask(client, "gang_state"))


def install_gangs(client: Client) -> None:
    """Register the plugin with the scheduler, which keeps one that it already has."""
    check_connected(client)
    try:
        client.register_plugin(GangPlugin(), name=PLUGIN_NAME)
    except (OSError, TimeoutError, RuntimeError) as error:
        raise _lost(error) from error


def check_connected(client: Client) -> None:
    """Raise ``ClusterLostError`` for a client that has given up its scheduler; Dask itself then fails in many ways."""
    if client.scheduler is None or client.status in ("closing", "closed"):
        raise _lost("the connection is closed")


def _wait_for(
    client: Client,
    identity: str,
    *,
    count: int,
    hosts: int | None,
    claim: str,
    alone: bool,
    timeout_s: float | None,
    grace_s: float,
    watch: Callable[[LeaseWait], None] | None,
) -> GangLease:
    began = time.monotonic()
    while True:
        left_s = CALL_S if timeout_s is None else min(CALL_S, timeout_s - (time.monotonic() - began))
        answer = _ask(
            client, "gang_acquire", lease=identity, holder=client.id, count=count, hosts=hosts, claim=claim,
            alone=alone, grace_s=grace_s, wait_s=max(0.0, min(left_s, grace_s / 4)),
        )  # fmt: skip
        if answer["state"] == "granted":
            return GangLease(client, identity, answer["workers"])
        if answer["state"] == "impossible":
            raise _impossible(answer["workers"], count=count, hosts=hosts, grace_s=grace_s)
        if answer["state"] == "refused":
            raise _lost("the scheduler no longer knows this client")
        seconds = time.monotonic() - began
        if watch is not None:
            counts = {name: answer[name] for name in ("known", "held", "leases", "draining")}
            watch(LeaseWait(seconds=seconds, wanted=count, is_claimed=answer["claimed"], is_alone=alone, **counts))
        if timeout_s is not None and seconds >= timeout_s:
            raise NoWorkersError(
                "the workers did not become free in time",
                got=f"fewer than {count} free workers for {timeout_s:g} s",
                fix="wait for the other campaigns on this cluster, or start more workers",
            )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _impossible(workers: Sequence[str], *, count: int, hosts: int | None, grace_s: float) -> Exception:
    if not workers:
        return NoWorkersError(
            "the cluster has no worker left",
            got=f"none for {grace_s:g} s",
            fix="start workers; recorded cells are kept, and the next run measures the rest",
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
        # A scheduler answers so to an unknown call: it was started anew, without the plugin.
        raise _lost("the scheduler does not know this campaign's leases")
    return answer


def _lost(reason: object) -> ClusterLostError:
    return ClusterLostError(
        "the Dask scheduler is gone or does not answer",
        got=f"{type(reason).__name__}: {reason}" if isinstance(reason, BaseException) else str(reason),
        expected="a scheduler that runs for as long as the campaign",
        fix="start the cluster and the campaign again; recorded cells are kept",
    )
