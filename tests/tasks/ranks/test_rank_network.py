"""The network interface that the ranks of a cell on several hosts use."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from distributed import Client, Scheduler, SpecCluster, Worker

from precision_time.storage.schema import GridCell
from precision_time.tasks.ranks.job import MeasurementLimits
from precision_time.tasks.ranks.rank import use_interface_of
from precision_time.tests.tasks.builders import make_job, profile_alone

LIMITS = MeasurementLimits(warmup_steps=1, measured_steps=3, seconds_per_cell=3.0, timeout_s=60.0)
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        # Set first, so that monkeypatch removes the values of the test again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def chosen() -> list[str | None]:
    return [os.environ.get(name) for name in VARIABLES]


def make_up_interfaces(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> None:
    made_up = {
        name: [
            SimpleNamespace(family=socket.AF_INET6 if ":" in text else socket.AF_INET, address=text),
            SimpleNamespace(family=psutil.AF_LINK, address="02:00:00:00:00:01"),
        ]
        for name, text in addresses.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: made_up)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.0.0.17", "ib0"),
        ("192.168.4.2", "eth1"),
        ("fe80::1", "eth10"),
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),
        ("localhost", "lo"),
    ],
)
def test_ranks_talk_over_the_interface_that_has_the_address_of_their_worker(
    monkeypatch: pytest.MonkeyPatch, host: str, name: str
) -> None:
    make_up_interfaces(monkeypatch, lo="127.0.0.1", eth1="192.168.4.2", eth10="fe80::1%eth10", ib0="10.0.0.17")
    use_interface_of(host)
    assert chosen() == [name, f"={name}"]


def test_what_the_user_chose_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_interfaces(monkeypatch, eth1="192.168.4.2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib1")
    use_interface_of("192.168.4.2")
    assert chosen() == ["ib1", "=eth1"]


@pytest.mark.parametrize("host", ["192.168.4.3", ""])
def test_an_address_that_is_not_of_this_host_chooses_nothing(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    make_up_interfaces(monkeypatch, lo="127.0.0.1", eth1="192.168.4.2")
    use_interface_of(host)
    assert chosen() == [None, None]


def test_a_name_that_leads_nowhere_here_chooses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    use_interface_of("gpu-node-7")
    assert chosen() == [None, None]


#: A rank that joins, sums up a tensor, and prints the interface that it chose.
RANK = """
import os, socket, sys
from pathlib import Path
import torch, torch.distributed as dist
from precision_time.tasks.ranks import rank as ranks
from precision_time.tasks.ranks.job import RankJob
job, rank = RankJob.from_json(Path(sys.argv[1]).read_text()), int(sys.argv[2])
ranks._join(job, rank, device=torch.device("cpu"))
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
print(os.environ["GLOO_SOCKET_IFNAME"], total.item(), flush=True)
os._exit(0)
"""


def test_ranks_on_two_hosts_meet_over_the_interface_of_their_job(tmp_path: Path) -> None:
    cell = GridCell(model="mlp", precision="fp32", world_size=2, nodes=2, per_gpu_batch_size=4)
    path = make_job(tmp_path / "job", cell, limits=LIMITS, hosts=("127.0.0.1", "127.0.0.2")).lay_out()
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(path), str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["lo 3.0\n"] * 2


def test_the_job_of_a_cell_carries_the_hosts_of_its_ranks(tmp_path: Path) -> None:
    options = [{"nthreads": 1, "host": host, "dashboard": False} for host in ("127.0.0.1", "127.0.0.2")]
    workers = {index: {"cls": Worker, "options": option} for index, option in enumerate(options)}
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard": False, "port": 0}}
    cell = GridCell(model="mlp", precision="fp32", world_size=2, nodes=2, per_gpu_batch_size=4)
    with SpecCluster(scheduler=scheduler, workers=workers) as cluster, Client(cluster) as client:
        client.wait_for_workers(2, timeout=30)
        receipt = profile_alone(cell, client=client, scratch=tmp_path, limits=LIMITS)
    assert (receipt.status, receipt.message) == ("recorded", "")
    job = json.loads((Path(receipt.scratch) / "job.json").read_text(encoding="utf-8"))
    assert sorted(job["hosts"]) == ["127.0.0.1", "127.0.0.2"]
