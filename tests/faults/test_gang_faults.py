"""Gangs whose workers, clients and schedulers die: no overlap, no lost cell, nothing left behind."""

import contextlib
import importlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import dask
import psutil
import pytest
from distributed import Client, LocalCluster
from distributed.core import Status

from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.leases import gang_state, lease_workers
from precision_time.tasks.rank_process import end_ranks

pytestmark = pytest.mark.faults

MARK = "PRECISION_TIME_TEST_MARK"
WAIT_S = 120
HERE = Path(__file__).parent


def wait_until(holds: Callable[[], Any], *, within_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def read_lines(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.glob(pattern) for line in path.read_text().splitlines()]


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A mark in the environment of every process that the test starts; none of them outlives it."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield mark
    for process in marked_processes(mark):
        with contextlib.suppress(psutil.Error):
            process.kill()


def marked_processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get(MARK) == mark:
                found.append(process)
    return found


@pytest.fixture
def fake_ranks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # Local workers are spawned with the path of this process; the scheduler in it reads the tasks too.
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("fake_ranks")


@pytest.fixture
def four(mark: str, fake_ranks: ModuleType) -> Iterator[Client]:
    """Four workers under nannies that bring them back; the scheduler is here, and reads what the clients send."""
    with (
        dask.config.set(
            {"distributed.scheduler.allowed-failures": 0, "distributed.scheduler.no-workers-timeout": "30s"}
        ),
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=None, silence_logs="CRITICAL") as cluster,
        Client(cluster) as client,
    ):
        yield client


def worker_pids(client: Client) -> dict[str, int]:
    """The processes of the workers, by address, whose nannies have seen them start: only those are brought back."""
    known = client.scheduler_info(n_workers=-1)["workers"]
    return {
        nanny.worker_address: nanny.pid
        for nanny in client.cluster.workers.values()
        if nanny.worker_address in known and nanny.process and nanny.status == nanny.process.status == Status.running
    }


def assert_nothing_is_held(client: Client) -> None:
    client.wait_for_workers(4, timeout=60)
    wait_until(lambda: not gang_state(client)["draining"])
    assert not any(gang_state(client).values())
    assert set(client.run(end_ranks).values()) == {0}


def test_two_clients_finish_300_cells_on_workers_that_keep_dying(four: Client, mark: str, tmp_path: Path) -> None:
    address = four.scheduler.address
    command = [sys.executable, str(HERE / "fake_ranks.py"), address, str(tmp_path)]
    clients = [
        subprocess.Popen([*command, *bounds], stderr=subprocess.PIPE, text=True)
        for bounds in (["0", "150"], ["150", "300"])
    ]
    chance, killed = random.Random(5), 0
    wait_until(lambda: len(read_lines(tmp_path, "done-*.jsonl")) > 2)
    seen_whole = time.monotonic()
    while any(client.poll() is None for client in clients):
        # A new worker takes seconds to start, and a gang of four needs all of them.
        pids = list(worker_pids(four).values())
        if len(pids) >= 4:
            seen_whole = time.monotonic()
            if killed < 20:
                os.kill(chance.choice(pids), signal.SIGKILL)
                killed += 1
        elif time.monotonic() - seen_whole > 12:
            # A nanny gives up on a worker that dies while it starts; whoever runs a cluster then starts another.
            four.cluster.scale(len(four.cluster.workers) + 1)
            seen_whole = time.monotonic()
        time.sleep(chance.uniform(0.1, 0.5))
    for client in clients:
        _, said = client.communicate(timeout=240)
        assert client.returncode == 0, said
    assert killed == 20

    done = read_lines(tmp_path, "done-*.jsonl")
    assert sorted(entry["cell"] for entry in done) == list(range(300))
    by_worker: dict[str, list[tuple[float, float]]] = {}
    for lease in read_lines(tmp_path, "lease-*.jsonl"):
        for worker in lease["workers"]:
            by_worker.setdefault(worker, []).append((lease["began"], lease["ended"]))
    overlaps = [
        (worker, first, second)
        for worker, spans in by_worker.items()
        for first, second in itertools.pairwise(sorted(spans))
        if second[0] < first[1]
    ]
    assert overlaps == []
    # What the workers say themselves: one rank at a time each.
    for path in tmp_path.glob("worker-*.log"):
        spans = sorted((entry["began"], entry["ended"]) for entry in read_lines(tmp_path, path.name))
        assert all(second[0] >= first[1] for first, second in itertools.pairwise(spans))
    causes = Counter(entry["cause"] for entry in read_lines(tmp_path, "failed-*.jsonl"))
    assert set(causes) <= {"lost contact"}, causes
    print(f"\n{sum(map(len, by_worker.values()))} ranks on {len(by_worker)} workers, 20 killed: {dict(causes)}")
    assert_nothing_is_held(four)
    assert not [process for process in marked_processes(mark) if process.pid in {client.pid for client in clients}]


@pytest.mark.parametrize("way", ["SIGKILL", "segfault", "clean exit"])
def test_a_worker_that_ends_in_mid_cell_costs_one_attempt(
    four: Client, fake_ranks: ModuleType, tmp_path: Path, way: str
) -> None:
    cell = fake_ranks.make_cell(0, model="sleeper", ranks=3)
    with ThreadPoolExecutor(1) as pool:
        measured = pool.submit(fake_ranks.measure, four, cell, attempt=1, scratch=tmp_path)
        wait_until(lambda: len(list(tmp_path.glob("*/*.here"))) == 3)
        (workers,) = gang_state(four)["leases"].values()
        pid = worker_pids(four)[workers[1]]
        began = time.monotonic()
        if way == "clean exit":
            four.run(fake_ranks.exit_cleanly, workers=[workers[1]])
        else:
            os.kill(pid, signal.SIGKILL if way == "SIGKILL" else signal.SIGSEGV)
        receipt = measured.result(timeout=60)
    assert (receipt.status, receipt.cause) == ("failed", "lost contact")
    assert workers[1] in receipt.message
    assert time.monotonic() - began < fake_ranks.LIMITS.timeout_s / 2
    again = fake_ranks.make_cell(1, ranks=4)
    assert fake_ranks.measure(four, again, attempt=1, scratch=tmp_path).status == "recorded"
    assert_nothing_is_held(four)


def test_a_cell_that_always_kills_its_worker_ends_and_its_neighbours_finish(
    four: Client, fake_ranks: ModuleType, tmp_path: Path
) -> None:
    poison = fake_ranks.make_cell(500, model="poison", ranks=2)

    def attempts(cell: Any) -> list[str]:
        return [fake_ranks.measure(four, cell, attempt=n, scratch=tmp_path).cause for n in range(1, 4)]

    with ThreadPoolExecutor(3) as pool:
        poisoned = pool.submit(attempts, poison)
        neighbours = [
            pool.submit(fake_ranks.measure, four, fake_ranks.make_cell(number, ranks=1), attempt=1, scratch=tmp_path)
            for number in range(20)
        ]
        assert [neighbour.result(timeout=120).status for neighbour in neighbours] == ["recorded"] * 20
        assert poisoned.result(timeout=120) == ["lost contact"] * 3
    assert_nothing_is_held(four)


FILE = """\
name: outside
models: [mlp]
precisions: [fp32]
gpus: [1, 2]
batch_sizes: {batches}
device: cpu
cluster: {address}
data: {data}
warmup_steps: 2
measured_steps: 3
seconds_per_cell: 5s
timeout_per_cell: 2m
workers_timeout: {wait}
"""


class Outside:
    """A scheduler and workers that run as processes of their own, and a campaign on them through the command line."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "data"
        self.workers: list[subprocess.Popen[str]] = []

    def start_scheduler(self, *, failures: str = "0") -> None:
        file = self.folder / f"scheduler-{uuid.uuid4().hex}.json"
        environment = os.environ | {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": failures}
        self.scheduler = self._start(
            "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(file),
            environment=environment,
        )  # fmt: skip
        wait_until(lambda: file.exists() and file.read_text().strip())
        self.address = json.loads(file.read_text())["address"]

    def start_workers(self, count: int, *, threads: int = 1) -> None:
        self.workers = [
            self._start("worker", self.address, "--nthreads", str(threads), "--host", "127.0.0.1", "--no-dashboard")
            for _ in range(count)
        ]

    def _start(self, *command: str, environment: dict[str, str] | None = None) -> "subprocess.Popen[str]":
        log = (self.folder / f"{command[0]}.log").open("a")
        return subprocess.Popen(
            [sys.executable, "-m", "dask", *command],
            cwd=self.folder, env=environment, stdout=log, stderr=log, text=True,
        )  # fmt: skip

    def start_campaign(self, *, batches: str = "[4]", wait: str = "60s") -> "subprocess.Popen[str]":
        text = FILE.format(batches=batches, address=self.address, data=json.dumps(str(self.data)), wait=wait)
        (self.folder / "campaign.yaml").write_text(text, encoding="utf-8")
        return subprocess.Popen(
            [sys.executable, "-m", "precision_time", "campaign", "campaign.yaml", "--json"],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def recorded(self) -> int:
        return len(TimingsDataset(str(self.data)).recorded_cells()) if self.data.exists() else 0


@pytest.fixture
def outside(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Outside:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return Outside(tmp_path)


def assert_no_rank_is_left(mark: str) -> None:
    def ranks() -> list[list[str]]:
        found = []
        for process in marked_processes(mark):
            with contextlib.suppress(psutil.Error):
                found.append(process.cmdline())
        return [command for command in found if "precision_time.tasks.ranks" in " ".join(command)]

    wait_until(lambda: not ranks(), within_s=60)


def assert_rows_are_whole(outside: Outside, *, cells: int) -> None:
    rows = TimingsDataset(str(outside.data)).read().select(["cell_id", "rank", "step"]).to_pylist()
    assert len({row["cell_id"] for row in rows}) == cells
    assert max(Counter(tuple(row.values()) for row in rows).values()) == 1


def test_a_campaign_runs_on_a_scheduler_outside_and_survives_its_death(outside: Outside, mark: str) -> None:
    outside.start_scheduler()
    outside.start_workers(2)
    campaign = outside.start_campaign(batches="[4, 8]")
    wait_until(lambda: campaign.poll() is not None or outside.recorded() >= 1)
    outside.scheduler.kill()
    out, said = campaign.communicate(timeout=WAIT_S)
    assert campaign.returncode == 5, said
    assert json.loads(said.splitlines()[-1])["code"] == "E-PARTIAL"
    assert "the Dask scheduler is gone or does not answer" in json.loads(out)["ended_by"]
    before = outside.recorded()
    assert 1 <= before < 4
    assert_rows_are_whole(outside, cells=before)
    assert_no_rank_is_left(mark)

    outside.start_scheduler()
    outside.start_workers(2)
    campaign = outside.start_campaign(batches="[4, 8]")
    out, said = campaign.communicate(timeout=2 * WAIT_S)
    assert campaign.returncode == 0, said
    result = json.loads(out)
    assert (result["cells_recorded"], result["cells_measured"]) == (4, 4 - before)
    assert_rows_are_whole(outside, cells=4)
    assert not list((outside.folder / "scratch").iterdir())
    with Client(outside.address) as client:
        assert not any(gang_state(client).values())
    assert_no_rank_is_left(mark)


def test_a_campaign_that_waits_for_workers_says_so_and_ends_at_once_by_ctrl_c(outside: Outside, mark: str) -> None:
    outside.start_scheduler()
    outside.start_workers(2)
    campaign = outside.start_campaign(batches="[4, 8]", wait="20s")
    assert campaign.stderr is not None
    wait_until(lambda: campaign.poll() is not None or outside.recorded() >= 1)
    with Client(outside.address) as client, lease_workers(client, 2):
        waits = "waiting for"
        while waits not in (line := campaign.stderr.readline()):
            assert line, "it ended without a word of the wait"
        assert "2 of 2 are held by 1 lease of others" in line
        # The limit for workers to appear is none for workers that others hold.
        time.sleep(10)
        assert campaign.poll() is None
        campaign.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, said = campaign.communicate(timeout=WAIT_S)
        assert time.monotonic() - began < WAIT_S / 2
        assert campaign.returncode == 130, said
        assert len(gang_state(client)["leases"]) == 1
    # What came of the run until then is shown all the same.
    result = json.loads(out)
    assert (result["ended_by"], result["failed"]) == ("interrupted", [])
    assert 1 <= result["cells_recorded"] == outside.recorded() < 4
    assert_rows_are_whole(outside, cells=outside.recorded())
    assert not list((outside.folder / "scratch").iterdir())
    assert_no_rank_is_left(mark)


def last_error(campaign: "subprocess.Popen[str]") -> dict[str, str]:
    _, said = campaign.communicate(timeout=WAIT_S)
    assert campaign.returncode != 0
    error: dict[str, str] = json.loads(said.splitlines()[-1])
    return error | {"exit": str(campaign.returncode)}


def test_a_cluster_that_cannot_measure_is_refused_with_what_to_do(outside: Outside) -> None:
    outside.start_scheduler(failures="3")
    error = last_error(outside.start_campaign(wait="2s"))
    assert (error["code"], error["exit"]) == ("E-INPUT", "2")
    assert "ALLOWED_FAILURES=0" in error["fix"]
    outside.scheduler.kill()

    outside.start_scheduler()
    error = last_error(outside.start_campaign(wait="2s"))
    assert (error["code"], error["exit"], error["got"]) == ("E-NO-WORKERS", "2", "0 of 2 within 2 s")

    outside.start_workers(2, threads=2)
    error = last_error(outside.start_campaign())
    assert (error["code"], error["exit"]) == ("E-INPUT", "2")
    assert "--nthreads 1" in error["fix"]
    assert outside.recorded() == 0
