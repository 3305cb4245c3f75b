"""Clusters: local ones, which neither other hosts nor Ctrl-C reach, running schedulers, and what is refused."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client, LocalCluster, Scheduler, SpecCluster, Worker

from precision_time.flows.clusters import cluster as cluster_module
from precision_time.flows.clusters.cluster import check_scratch, open_cluster, probe_worker
from precision_time.flows.clusters.scratch import OWNER, PREFIX, find_scratch, open_scratch
from precision_time.flows.clusters.settings import is_address, is_local
from precision_time.storage.errors import InputError, NoWorkersError, StorageError
from precision_time.tasks.gangs.leases import gang_state, lease_workers
from precision_time.tasks.probing.probe_device import ProbeReport


def test_each_rank_gets_a_process_that_ctrl_c_does_not_reach() -> None:
    environment = dict(os.environ)
    own_status = Path("/proc/self/status")  # read on the worker, it is the worker's
    with open_cluster("cpu", 2) as client:
        addresses = list(client.scheduler_info(n_workers=-1)["workers"])
        answers = [
            client.submit(Path.read_text, own_status, workers=[address], pure=False).result(timeout=60)
            for address in addresses
        ]
        assert all(address.startswith("tcp://127.0.0.1:") for address in [*addresses, client.scheduler.address])
        assert not gang_state(client)["leases"]
    statuses = [dict(line.split(":\t", 1) for line in text.splitlines()) for text in answers]
    assert len({status["Pid"] for status in statuses} - {str(os.getpid())}) == 2
    assert all(int(status["SigBlk"], 16) >> (signal.SIGINT - 1) & 1 for status in statuses)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    # Dask's settings for its workers, such as one thread, do not remain for a later retraining in this process.
    assert dict(os.environ) == environment


def test_gpu_workers_without_dask_cuda_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dask_cuda", None)
    for cluster in ("auto", "local-cuda"):
        with pytest.raises(InputError, match="gpu-cu12"), open_cluster("cuda", 1, cluster=cluster):
            pass


@pytest.mark.parametrize(
    ("device_type", "cluster", "said"),
    [
        ("cuda", "local", "does not fit the device"),
        ("cpu", "local-cuda", "does not fit the device"),
        ("cuda", "slurm", "deploy/slurm/campaign.sbatch"),
    ],
)
def test_a_cluster_that_does_not_fit_the_device_is_refused(device_type: str, cluster: str, said: str) -> None:
    with pytest.raises(InputError, match=said), open_cluster(device_type, 1, cluster=cluster):
        pass


def test_slurm_without_its_package_or_its_commands_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "dask_jobqueue", None)
        with pytest.raises(InputError, match=r"precision-time\[slurm\]"), open_cluster("cpu", 1, cluster="slurm"):
            pass
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="sbatch"), open_cluster("cpu", 1, cluster="slurm"):
        pass


def test_an_address_where_nothing_answers_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "CONNECT_S", 0.5)
    with pytest.raises(InputError, match="no scheduler answers"), open_cluster("cpu", 1, cluster="tcp://127.0.0.1:9"):
        pass


@pytest.fixture
def outside(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a scheduler with two workers; ``request.param`` may change its settings."""
    settings: dict[str, Any] = {"failures": 0, "threads": 1, **getattr(request, "param", {})}
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": settings["failures"]}),
        LocalCluster(
            n_workers=2,
            threads_per_worker=settings["threads"],
            processes=False,
            protocol="tcp://",
            dashboard_address=None,
        ) as cluster,
    ):
        yield cluster.scheduler_address


def test_a_scheduler_that_runs_already_is_used_and_left_running(outside: str, tmp_path: Path) -> None:
    for _ in range(2):
        with open_cluster("cpu", 2, cluster=outside) as client:
            assert client.submit(pow, 2, 3).result(timeout=30) == 8
            with open_scratch(cluster=outside, data=str(tmp_path / "data")) as folder:
                check_scratch(client, folder)
                assert folder.parent == tmp_path / "scratch"
            assert not folder.exists()


@pytest.mark.parametrize(
    ("device_type", "gpus", "counted"), [("cpu", 16, (3, 4, 2)), ("cuda", 2, (2, 3, 2)), ("cuda", 8, (3, 4, 2))]
)
def test_the_probe_of_a_cluster_counts_what_all_of_its_hosts_take(
    device: ProbeReport, monkeypatch: pytest.MonkeyPatch, device_type: str, gpus: int, counted: tuple[int, int, int]
) -> None:
    probed = replace(device, environment=replace(device.environment, device_type=device_type), device_count=gpus)
    monkeypatch.setattr(cluster_module, "probe_device", lambda wanted: probed)
    hosts = ("127.0.0.1", "127.0.0.2", "127.0.0.2", "127.0.0.2")
    workers = {
        index: {"cls": Worker, "options": {"nthreads": 1, "host": host, "dashboard": False}}
        for index, host in enumerate(hosts)
    }
    scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard": False, "port": 0}}
    with SpecCluster(scheduler=scheduler, workers=workers) as cluster, Client(cluster) as client:
        client.wait_for_workers(4, timeout=30)
        report = probe_worker(client, device_type, wait_s=30)
    assert (report.device_count, report.worker_count, report.host_count) == counted
    assert report.most_ranks == report.worker_count


def test_workers_that_do_not_come_end_the_wait(outside: str) -> None:
    with (
        pytest.raises(NoWorkersError, match=r"2 of 3 within 0\.3 s"),
        open_cluster("cpu", 3, cluster=outside, wait_s=0.3),
    ):
        pass


def test_the_probe_of_a_busy_cluster_waits_for_a_worker_no_longer_than_it_may(outside: str) -> None:
    with open_cluster("cpu", 2, cluster=outside) as client:
        with (
            lease_workers(client, 2),
            pytest.raises(NoWorkersError, match=r"fewer than 1 free workers for 0\.3 s"),
        ):
            probe_worker(client, "cpu", wait_s=0.3)
        assert not gang_state(client)["queue"]


@pytest.mark.parametrize(
    ("outside", "said"),
    [({"failures": 3}, "ALLOWED_FAILURES=0"), ({"threads": 2}, "--nthreads 1")],
    indirect=["outside"],
)
def test_a_cluster_that_would_run_ranks_otherwise_is_refused_with_what_to_set(outside: str, said: str) -> None:
    with pytest.raises(InputError, match=said), open_cluster("cpu", 1, cluster=outside):
        pass


def test_another_release_on_a_worker_is_refused(outside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_check_scheduler", lambda client: None)
    monkeypatch.setattr(Client, "run", lambda *_, **__: {"tcp://127.0.0.1:1": "0.0.1"})
    said = r"worker tcp://127.0.0.1:1 does not have.*0\.0\.1"
    with pytest.raises(InputError, match=said), open_cluster("cpu", 1, cluster=outside):
        pass


def test_workers_of_a_host_that_put_the_same_gpu_first_are_refused(
    outside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible = iter([["0,1", "0,1"], ["0,1", "1,0"]])

    def run(client: Client, *_: object, **__: object) -> dict[str, str]:
        return dict(zip(client.scheduler_info(n_workers=-1)["workers"], next(visible), strict=True))

    with Client(outside) as client:
        monkeypatch.setattr(Client, "run", run)
        with pytest.raises(InputError, match="dask cuda worker"):
            cluster_module._check_devices(client)
        cluster_module._check_devices(client)


def test_the_scratch_folder_is_the_one_named_else_beside_local_data(tmp_path: Path) -> None:
    assert find_scratch(data=str(tmp_path / "d"), scratch=None) == tmp_path / "scratch"
    assert find_scratch(data=f"file://{tmp_path}/d", scratch=None) == tmp_path / "scratch"
    assert find_scratch(data="s3://bucket/d", scratch=str(tmp_path)) == tmp_path
    with pytest.raises(InputError, match="scratch: with a folder"):
        find_scratch(data="s3://bucket/d", scratch=None)


def test_a_local_cluster_keeps_its_scratch_among_temporary_files(tmp_path: Path) -> None:
    with open_scratch(cluster="auto", data=str(tmp_path / "data")) as folder:
        assert tmp_path not in folder.parents
    with open_scratch(cluster="auto", data="s3://bucket/d", scratch=str(tmp_path / "own")) as folder:
        assert folder.parent == tmp_path / "own"
    (tmp_path / "file").touch()
    with pytest.raises(StorageError), open_scratch(cluster="auto", data="d", scratch=str(tmp_path / "file")):
        pass


def test_a_scratch_folder_that_a_worker_does_not_see_is_refused(
    outside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(outside) as client:
        monkeypatch.setattr(Client, "run", lambda *_, **__: {"tcp://10.0.0.9:1": FileNotFoundError("mark")})
        with pytest.raises(InputError, match=r"does not see the scratch folder.*tcp://10\.0\.0\.9:1"):
            check_scratch(client, tmp_path)


#: A campaign that is killed within its scratch folder.
KILLED = """
import os, signal, sys
from precision_time.flows.clusters.scratch import open_scratch
with open_scratch(cluster="local", data="d", scratch=sys.argv[1]) as folder:
    (folder / "cell").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_campaign_left_is_swept_by_the_next_and_nothing_else_is(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    assert (left / "cell").exists()
    elsewhere, unmarked, others = (tmp_path / f"{PREFIX}{name}" for name in ("elsewhere", "unmarked", "others"))
    for folder in (elsewhere, unmarked, others, tmp_path / "precision-time-other", tmp_path / "kept"):
        folder.mkdir()
    for folder in (elsewhere, others):
        (folder / OWNER).write_text('{"host": "another"}', encoding="utf-8")
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "kept")
    a_day_ago = time.time() - 25 * 3600
    for folder in (elsewhere, tmp_path / "precision-time-other"):
        os.utime(folder, (a_day_ago, a_day_ago))

    with open_scratch(cluster="local", data="d", scratch=str(tmp_path)) as living:
        assert not left.exists()
        assert not elsewhere.exists()
        assert unmarked.exists()
        assert others.exists()
        assert (tmp_path / "kept").exists()
        assert (tmp_path / "precision-time-other").exists()
        os.utime(living, (a_day_ago, a_day_ago))
        with open_scratch(cluster="local", data="d", scratch=str(tmp_path)):
            assert living.exists()
    assert not living.exists()


def test_local_clusters_and_addresses_are_told_apart() -> None:
    assert [is_local(name) for name in ("auto", "local", "local-cuda", "slurm", "tcp://h:1")] == [True] * 3 + [
        False
    ] * 2
    assert is_address("tls://host:8786")
    assert not is_address("slurm")
