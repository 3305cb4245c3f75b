"""Gang leases on a real scheduler whose workers are threads of this process: which lease gets which workers, when."""

import asyncio
import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, Event, LocalCluster, SpecCluster, Worker
from distributed.core import Status
from distributed.scheduler import Scheduler

from precision_time.storage.errors import ClusterLostError, InputError, NoWorkersError
from precision_time.tasks.gangs import leases
from precision_time.tasks.gangs import scheduler_plugin as gangs
from precision_time.tasks.gangs.leases import LeaseWait, gang_state, lease_workers
from precision_time.tasks.gangs.scheduler_plugin import GangPlugin, choose_workers


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=4, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=None
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as client:
        yield client


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_nothing_is_held(client: Client) -> None:
    wait_until(lambda: not gang_state(client)["draining"])
    assert not any(gang_state(client).values())


class Waiter(threading.Thread):
    """A thread that leases ``count`` workers, and holds them until ``let_go`` is set."""

    def __init__(self, client: Client, count: int) -> None:
        super().__init__(daemon=True)
        self.client, self.count = client, count
        self.held, self.let_go = threading.Event(), threading.Event()
        self.workers: tuple[str, ...] = ()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with lease_workers(self.client, self.count) as lease:
                self.workers = lease.workers
                self.held.set()
                self.let_go.wait(60)
        except BaseException as error:
            self.error = error

    def queue(self) -> "Waiter":
        """Start, and return when the request is in the queue."""
        before = len(gang_state(self.client)["queue"])
        self.start()
        wait_until(lambda: len(gang_state(self.client)["queue"]) == before + 1)
        return self


A, B = [f"tcp://10.0.0.1:{port}" for port in range(1, 4)], [f"tcp://10.0.0.2:{port}" for port in range(1, 3)]


@pytest.mark.parametrize(
    ("count", "hosts", "chosen"),
    [
        (1, None, B[:1]),  # the narrowest host, so that a gang of three still finds room
        (2, None, B),
        (3, None, A),
        (4, None, [*A, B[0]]),
        (6, None, None),
        (3, 1, A),
        (4, 1, None),
        (4, 2, [*B, *A[:2]]),
        (3, 2, None),
        (3, 3, None),
    ],
)
def test_a_gang_stands_on_one_host_or_evenly_on_as_many_as_asked(
    count: int, hosts: int | None, chosen: list[str] | None
) -> None:
    assert choose_workers(reversed(A + B), count, hosts=hosts) == chosen


def test_a_worker_is_in_one_gang_at_a_time_and_free_after_it(client: Client) -> None:
    with lease_workers(client, 3) as first:
        second = Waiter(client, 2).queue()
        assert len(set(first.workers)) == 3
        assert not first.lost_workers()
        assert not second.held.is_set()
    assert second.held.wait(30)
    second.let_go.set()
    second.join(30)
    assert_nothing_is_held(client)


def test_a_wide_gang_is_not_overtaken_by_a_narrow_one_that_would_fit(client: Client) -> None:
    with lease_workers(client, 2):
        wide = Waiter(client, 3).queue()
        narrow = Waiter(client, 1).queue()
        time.sleep(0.3)
        assert not narrow.held.is_set()
    assert wide.held.wait(30)
    assert narrow.held.wait(30)
    for waiter in (wide, narrow):
        waiter.let_go.set()
        waiter.join(30)


def test_the_lease_and_the_request_of_a_client_that_is_gone_are_dropped(cluster: LocalCluster, client: Client) -> None:
    other = Client(cluster)
    holder = Waiter(other, 3)
    holder.start()
    assert holder.held.wait(30)
    Waiter(other, 4).queue()
    other.close()
    with lease_workers(client, 4, timeout_s=30) as lease:
        assert len(lease.workers) == 4
    assert_nothing_is_held(client)


def test_a_dead_worker_makes_the_lease_lost_and_keeps_its_peers_in_it(cluster: LocalCluster, client: Client) -> None:
    with lease_workers(client, 4) as lease:
        victim = cluster.workers[0]
        address = victim.address
        cluster.sync(victim.close)
        wait_until(lease.lost_workers)
        assert lease.lost_workers() == [address]
        assert lease.loss == f"worker {address} is gone"
        with pytest.raises(NoWorkersError, match="did not become free"), lease_workers(client, 1, timeout_s=0.3):
            pass
    with lease_workers(client, 3) as lease:
        assert address not in lease.workers
        assert not lease.lost_workers()
    assert_nothing_is_held(client)


def test_a_worker_on_which_something_still_runs_is_not_given_away(client: Client) -> None:
    started, end = Event("started", client), Event("end", client)

    def linger() -> None:
        Event("started").set()
        Event("end").wait(60)

    with lease_workers(client, 1) as lease:
        future = client.submit(linger, workers=list(lease.workers), pure=False)
        assert started.wait(30)
    with lease_workers(client, 3, timeout_s=30) as others:
        assert gang_state(client)["draining"] == lease.workers
        assert lease.workers[0] not in others.workers
    with pytest.raises(NoWorkersError), lease_workers(client, 4, timeout_s=0.5):
        pass
    end.set()
    future.result(timeout=30)
    with lease_workers(client, 4, timeout_s=30):
        pass


def test_every_worker_is_swept_before_its_next_gang(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = threading.Event()
    with lease_workers(client, 4) as lease:
        monkeypatch.setattr(gangs, "end_ranks", lambda: 0 if swept.is_set() else 1)
        lease.mark_clean()
    waiter = Waiter(client, 1).queue()
    time.sleep(0.5)
    assert not waiter.held.is_set()
    swept.set()
    assert waiter.held.wait(30)
    waiter.let_go.set()
    waiter.join(30)


def test_a_gang_that_the_cluster_never_had_is_refused_after_the_grace(client: Client) -> None:
    said = r"fewer workers than the cell has ranks.*4 workers.*expected: 5"
    with pytest.raises(InputError, match=said), lease_workers(client, 5, grace_s=0.2):
        pass
    assert_nothing_is_held(client)


def test_a_worker_that_comes_within_the_grace_makes_the_gang_possible(cluster: LocalCluster, client: Client) -> None:
    waiter = Waiter(client, 5).queue()
    time.sleep(0.3)
    cluster.scale(5)
    assert waiter.held.wait(30)
    waiter.let_go.set()
    waiter.join(30)


def test_a_cluster_without_workers_says_so(cluster: LocalCluster, client: Client) -> None:
    cluster.scale(0)
    wait_until(lambda: not client.scheduler_info(n_workers=-1)["workers"])
    with pytest.raises(NoWorkersError, match="no worker left") as caught, lease_workers(client, 1, grace_s=0.1):
        pass
    assert (caught.value.code, caught.value.exit_code) == ("E-NO-WORKERS", 2)


def test_an_interrupt_in_the_queue_leaves_no_entry(client: Client) -> None:
    with lease_workers(client, 4):
        waiter = Waiter(client, 2).queue()
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(waiter.ident or 0), ctypes.py_object(KeyboardInterrupt)
        )
        waiter.join(30)
        assert isinstance(waiter.error, KeyboardInterrupt)
        assert gang_state(client)["queue"] == ()
    assert_nothing_is_held(client)


def test_who_waits_is_told_who_has_the_workers_and_may_give_up(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "CALL_S", 0.05)
    told: list[LeaseWait] = []

    def give_up(wait: LeaseWait) -> None:
        told.append(wait)
        if len(told) == 3:
            raise TimeoutError("long enough")

    with lease_workers(client, 2), lease_workers(client, 1):
        with pytest.raises(TimeoutError, match="long enough"), lease_workers(client, 3, watch=give_up):
            pass
        assert gang_state(client)["queue"] == ()
    assert [(wait.wanted, wait.known, wait.held, wait.leases) for wait in told] == [(3, 4, 3, 2)] * 3
    assert 0 < told[0].seconds < told[1].seconds < told[2].seconds
    assert str(told[0]) == "waiting for 3 free workers: 3 of 4 are held by 2 leases of others"
    assert_nothing_is_held(client)


def test_who_waits_is_told_how_many_workers_are_being_swept(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "CALL_S", 0.05)
    with lease_workers(client, 3):
        monkeypatch.setattr(gangs, "end_ranks", lambda: 1)
    told: list[LeaseWait] = []

    def give_up(wait: LeaseWait) -> None:
        told.append(wait)
        raise TimeoutError

    with lease_workers(client, 1), pytest.raises(TimeoutError), lease_workers(client, 2, watch=give_up):
        pass
    assert str(told[0]) == ("waiting for 2 free workers: 1 of 4 are held by 1 lease of others, 3 more are being swept")
    monkeypatch.setattr(gangs, "end_ranks", lambda: 0)
    assert_nothing_is_held(client)


def test_of_two_with_one_claim_the_second_waits_for_the_first_and_holds_up_nobody(
    cluster: LocalCluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "CALL_S", 0.05)
    told: list[LeaseWait] = []
    got: list[tuple[str, ...]] = []

    def lease_the_same(other: Client) -> None:
        with lease_workers(other, 2, claim="cell", watch=told.append) as lease:
            got.append(lease.workers)

    with Client(cluster) as other:
        second = threading.Thread(target=lease_the_same, args=(other,), daemon=True)
        with lease_workers(client, 1, claim="cell"):
            second.start()
            wait_until(lambda: len(told) > 2)
            # Three workers are free, and a later request with another claim gets them.
            with lease_workers(client, 3, claim="another cell", timeout_s=10):
                pass
            with lease_workers(client, 3, timeout_s=10):
                pass
            assert not got
        second.join(30)
    assert len(got) == 1
    assert str(told[0]) == "waiting for another campaign, which measures this cell"
    assert_nothing_is_held(client)


class Silence:
    """A plugin on a made-up scheduler with two workers, and a clock that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.plugin = GangPlugin(clock=lambda: self.now)
        self.swept: list[str] = []
        workers = {address: SimpleNamespace(status=Status.running, processing=()) for address in A[:2]}
        self.plugin.start(SimpleNamespace(handlers={}, workers=workers, clients={"asleep": None, "awake": None}))

        async def sweep(worker: str) -> int:
            self.swept.append(worker)
            return 0

        monkeypatch.setattr(self.plugin, "_call_sweep", sweep)
        monkeypatch.setattr(gangs, "SWEEP_EVERY_S", 0.0)

    async def ask(self, lease: str, *, holder: str, count: int = 2) -> dict[str, Any]:
        """One call of a waiting client."""
        return await self.plugin.acquire(
            lease=lease, holder=holder, count=count, hosts=None, claim="", grace_s=30.0, wait_s=0.05
        )

    async def pass_time(self, seconds: float, *, meanwhile: Callable[[], Any] | None = None) -> None:
        for _ in range(round(seconds / gangs.LISTEN_EVERY_S)):
            self.now += gangs.LISTEN_EVERY_S
            if meanwhile is not None:
                await meanwhile()
            self.plugin.drop_silent()
        await asyncio.sleep(0.02)

    async def leases(self) -> list[str]:
        return list((await self.plugin.state())["leases"])

    async def queue(self) -> list[str]:
        return [request["lease"] for request in (await self.plugin.state())["queue"]]


def test_a_request_of_which_nothing_is_heard_leaves_the_queue_and_queues_anew_when_it_asks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        silence = Silence(monkeypatch)
        assert (await silence.ask("held", holder="awake"))["state"] == "granted"
        assert (await silence.ask("wide", holder="asleep"))["state"] == "queued"
        check = lambda: silence.plugin.check(lease="held")  # noqa: E731
        await silence.pass_time(gangs.SILENT_REQUEST_S, meanwhile=check)
        assert await silence.queue() == ["wide"]
        await silence.pass_time(gangs.LISTEN_EVERY_S, meanwhile=check)
        assert await silence.queue() == []
        # A new request is served, and the one of the stopped client is behind it.
        await silence.ask("next", holder="awake")
        await silence.ask("wide", holder="asleep")
        assert await silence.queue() == ["next", "wide"]
        await silence.plugin.release(lease="held", sweeps=1)
        assert (await silence.ask("next", holder="awake"))["state"] == "granted"
        await silence.plugin.close()

    asyncio.run(run())


def test_a_lease_that_was_granted_to_a_stopped_client_ends_as_early_as_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        silence = Silence(monkeypatch)
        await silence.ask("held", holder="awake")
        await silence.ask("wide", holder="asleep")
        await silence.pass_time(10)
        await silence.plugin.release(lease="held", sweeps=1)
        await asyncio.sleep(0.02)
        assert await silence.leases() == ["wide"]
        await silence.pass_time(gangs.SILENT_REQUEST_S)
        assert await silence.leases() == []
        # Nothing ran on its workers, so it may queue again.
        assert (await silence.ask("wide", holder="asleep"))["state"] == "granted"
        await silence.plugin.close()

    asyncio.run(run())


def test_a_lease_whose_holder_keeps_silent_for_minutes_ends_swept_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        silence = Silence(monkeypatch)
        await silence.ask("held", holder="asleep")
        await silence.pass_time(gangs.SILENT_LEASE_S)
        assert (await silence.plugin.check(lease="held"))["held"]
        # The client has asked: its silence begins anew.
        await silence.pass_time(gangs.SILENT_LEASE_S)
        assert await silence.leases() == ["held"]
        silence.swept.clear()
        await silence.pass_time(gangs.LISTEN_EVERY_S)
        assert await silence.leases() == []
        assert sorted(silence.swept) == sorted(A[:2] * 2)
        assert (await silence.ask("next", holder="awake"))["state"] == "granted"
        answer = await silence.plugin.check(lease="held")
        assert (answer["held"], answer["why"]) == (
            False,
            "its lease was ended: nothing was heard of this campaign for 305 s; was it stopped, or its machine asleep?",
        )
        await silence.plugin.close()

    asyncio.run(run())


def test_hours_in_which_the_scheduler_itself_stood_still_are_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        silence = Silence(monkeypatch)
        await silence.ask("held", holder="awake", count=1)
        await silence.ask("wide", holder="awake")
        silence.now += 7200.0
        silence.plugin.drop_silent()
        assert (await silence.leases(), await silence.queue()) == (["held"], ["wide"])
        await silence.plugin.close()

    asyncio.run(run())


def test_the_scheduler_listens_by_itself(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gangs, "LISTEN_EVERY_S", 0.05)
    monkeypatch.setattr(gangs, "SILENT_LEASE_S", 0.3)
    with lease_workers(client, 4) as lease:
        wait_until(lambda: not gang_state(client)["leases"])
        assert lease.lost_workers() == list(lease.workers)
        assert "nothing was heard of this campaign for" in lease.loss
    assert_nothing_is_held(client)


def test_a_request_that_its_own_release_overtook_is_not_granted(client: Client) -> None:
    gang_state(client)
    leases._ask(client, "gang_release", lease="late", sweeps=1)
    answer = leases._ask(
        client, "gang_acquire", lease="late", holder=client.id, count=1, hosts=None, grace_s=1.0, wait_s=0.1
    )
    assert answer == {"state": "refused"}
    assert_nothing_is_held(client)


def test_registering_again_keeps_the_leases(cluster: LocalCluster, client: Client) -> None:
    with lease_workers(client, 4) as lease, Client(cluster) as other:
        leases.install_gangs(other)
        assert list(gang_state(other)["leases"].values()) == [lease.workers]


def test_threads_of_two_clients_share_the_workers_without_overlap(cluster: LocalCluster, client: Client) -> None:
    held: list[set[str]] = []
    lock, overlaps = threading.Lock(), []

    def measure(one: Client, counts: list[int]) -> None:
        for count in counts:
            with lease_workers(one, count) as lease:
                mine = set(lease.workers)
                with lock:
                    overlaps.extend(mine & other for other in held if mine & other)
                    held.append(mine)
                time.sleep(0.01)
                with lock:
                    held.remove(mine)
                lease.mark_clean()
                done.append(count)

    done: list[int] = []
    with Client(cluster) as other:
        threads = [
            threading.Thread(target=measure, args=(one, counts))
            for one, counts in itertools.product((client, other), ([1, 2, 3, 4] * 3, [4, 3, 2, 1] * 3, [2] * 8))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert (len(done), overlaps, held) == (64, [], [])
    assert_nothing_is_held(client)


def test_hosts_are_asked_for_by_address() -> None:
    options = [{"nthreads": 1, "host": host, "dashboard": False} for host in ("127.0.0.1", "127.0.0.1", "127.0.0.2")]
    workers = {index: {"cls": Worker, "options": option} for index, option in enumerate(options)}
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard": False, "port": 0}}
    with SpecCluster(scheduler=scheduler, workers=workers) as cluster, Client(cluster) as client:
        client.wait_for_workers(3, timeout=30)
        with lease_workers(client, 2, hosts=2) as lease:
            assert sorted(address.rsplit(":", 1)[0] for address in lease.workers) == [
                "tcp://127.0.0.1",
                "tcp://127.0.0.2",
            ]
        with lease_workers(client, 2, hosts=1) as lease:
            assert all(address.startswith("tcp://127.0.0.1:") for address in lease.workers)
        with pytest.raises(InputError, match="on 1 hosts, evenly"), lease_workers(client, 3, hosts=1, grace_s=0.1):
            pass


@pytest.mark.parametrize(("count", "hosts"), [(0, None), (3, 2), (2, 0)])
def test_what_is_no_gang_is_refused_at_once(count: int, hosts: int | None) -> None:
    with pytest.raises(InputError, match="no such gang"), contextlib.ExitStack() as stack:
        stack.enter_context(lease_workers(None, count, hosts=hosts))  # type: ignore[arg-type]


@pytest.mark.parametrize(("scheduler", "status"), [(None, "running"), (object(), "closed")])
def test_a_client_that_gave_its_scheduler_up_says_so_and_not_what_dask_tripped_over(scheduler, status) -> None:
    client = SimpleNamespace(scheduler=scheduler, status=status, id="c")
    with pytest.raises(ClusterLostError, match="gone"), lease_workers(client, 1):
        pass
