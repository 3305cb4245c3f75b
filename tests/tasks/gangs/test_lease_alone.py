"""Leases that want their hosts to themselves, like cells on CPUs, which would slow each other down."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from distributed import Client, Scheduler, SpecCluster, Worker

from precision_time.storage.errors import NoWorkersError
from precision_time.tasks.gangs.leases import GangLease, LeaseWait, lease_workers


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two hosts, one of two workers and one of three."""
    hosts = ["127.0.0.1"] * 2 + ["127.0.0.2"] * 3
    workers = {
        index: {"cls": Worker, "options": {"nthreads": 1, "host": host, "dashboard": False}}
        for index, host in enumerate(hosts)
    }
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard": False, "port": 0}}
    with SpecCluster(scheduler=scheduler, workers=workers) as cluster, Client(cluster) as client:
        client.wait_for_workers(5, timeout=30)
        yield client


def hosts_of(*leases: GangLease) -> list[str | None]:
    return [urlsplit(address).hostname for lease in leases for address in lease.workers]


def test_two_cells_that_want_a_host_alone_stand_on_two_hosts_and_a_third_waits(client: Client) -> None:
    waits: list[LeaseWait] = []
    with (
        lease_workers(client, 1, hosts=1, alone=True, timeout_s=30) as first,
        lease_workers(client, 1, hosts=1, alone=True, timeout_s=30) as second,
    ):
        assert sorted(map(str, hosts_of(first, second))) == ["127.0.0.1", "127.0.0.2"]
        with (
            pytest.raises(NoWorkersError),
            lease_workers(client, 1, hosts=1, alone=True, timeout_s=0.3, watch=waits.append),
        ):
            pass
    assert "1 free worker on hosts of its own: 2 of 5 are held by 2 leases of others" in str(waits[0])
    with lease_workers(client, 2, hosts=1, alone=True, timeout_s=30):
        pass


def test_a_cell_on_two_hosts_that_wants_them_alone_starts_beside_nobody(client: Client) -> None:
    with (
        lease_workers(client, 1, timeout_s=30),
        pytest.raises(NoWorkersError),
        lease_workers(client, 2, hosts=2, alone=True, timeout_s=0.3),
    ):
        pass
    with lease_workers(client, 2, hosts=2, alone=True, timeout_s=30) as lease:
        assert len(set(hosts_of(lease))) == 2


def test_who_does_not_mind_others_shares_a_host(client: Client) -> None:
    with (
        lease_workers(client, 2, hosts=1, timeout_s=30) as first,
        lease_workers(client, 2, hosts=1, timeout_s=30) as second,
        lease_workers(client, 1, hosts=1, timeout_s=30) as third,
    ):
        assert sorted(map(str, hosts_of(first, second, third))) == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 3
