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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from precision_time.tasks.gangs import profile_cell as profile
from precision_time.tasks.gangs import scheduler_plugin as gangs
from precision_time.tasks.gangs.leases import gang_state, lease_workers
from precision_time.tests.faults.prefect_server import PrefectServer

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
    marked = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_alive and process.environ().get(MARK) == mark:
                marked.append(process)
    return marked


@pytest.fixture
def fake_ranks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # Local workers are spawned with the path of this process, whose scheduler reads the tasks too.
    monkeypatch.syspath_prepend(str(HERE))
    # They replace the real ones in this process too, and must be undone.
    for name in ("run_rank", "end_ranks"):
        monkeypatch.setattr(profile, name, getattr(profile, name))
    return importlib.import_module("fake_ranks")


@pytest.fixture
def four(mark: str, fake_ranks: ModuleType) -> Iterator[Client]:
    """Four workers under nannies that restart them; the scheduler is in this process."""
    with (
        dask.config.set(
            {"distributed.scheduler.allowed-failures": 0, "distributed.scheduler.no-workers-timeout": "30s"}
        ),
        LocalCluster(n_workers=4, threads_per_worker=1, dashboard_address=None, silence_logs="CRITICAL") as cluster,
        Client(cluster) as client,
    ):
        yield client


def worker_pids(client: Client) -> dict[str, int]:
    """The processes of the workers by address, if their nannies have seen them start: only those are restarted."""
    known = client.scheduler_info(n_workers=-1)["workers"]
    return {
        nanny.worker_address: nanny.pid
        for nanny in client.cluster.workers.values()
        if nanny.worker_address in known and nanny.process and nanny.status == nanny.process.status == Status.running
    }


def assert_nothing_is_held(client: Client, fake_ranks: ModuleType) -> None:
    client.wait_for_workers(4, timeout=60)
    wait_until(lambda: not gang_state(client)["draining"])
    assert not any(gang_state(client).values())
    assert set(client.run(fake_ranks.end_ranks).values()) == {0}


def assert_no_process_is_left(client: Client, mark: str) -> None:
    """Of the processes of the test only its cluster's workers live, and the resource tracker of their locks."""

    def strangers() -> list[list[str]]:
        workers = set(client.run(os.getpid).values())
        commands = []
        for process in marked_processes(mark):
            with contextlib.suppress(psutil.Error):
                if process.pid not in workers and "multiprocessing.resource_tracker" not in " ".join(process.cmdline()):
                    commands.append(process.cmdline())
        return commands

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not strangers(), within_s=30)
    assert strangers() == []


def kill_workers(client: Client, clients: Sequence["subprocess.Popen[str]"], *, kills: int) -> int:
    """SIGKILL a worker now and then while there are four, until the clients have ended; returns the number of kills."""
    chance, killed = random.Random(5), 0
    seen_whole = time.monotonic()
    while any(process.poll() is None for process in clients):
        # A new worker takes seconds to start, and a gang of four needs all of them.
        pids = list(worker_pids(client).values())
        if len(pids) >= 4:
            seen_whole = time.monotonic()
            if killed < kills:
                os.kill(chance.choice(pids), signal.SIGKILL)
                killed += 1
        elif time.monotonic() - seen_whole > 12:
            # A nanny gives up on a worker that dies while it starts; then another one has to be started.
            client.cluster.scale(len(client.cluster.workers) + 1)
            seen_whole = time.monotonic()
        time.sleep(chance.uniform(0.1, 0.5))
    return killed


def find_overlaps(spans: Iterable[tuple[float, float]]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    return [(first, second) for first, second in itertools.pairwise(sorted(spans)) if second[0] < first[1]]


CELLS, KILLS = 300, 20


def test_two_clients_finish_300_cells_on_workers_that_keep_dying(
    four: Client, mark: str, fake_ranks: ModuleType, tmp_path: Path
) -> None:
    # Like two campaigns, both go through all cells, and the second at a cell finds it recorded.
    command = [sys.executable, str(HERE / "fake_ranks.py"), four.scheduler.address, str(tmp_path), str(CELLS)]
    clients = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        # Their output is read all the time, or they would block on it.
        said = [pool.submit(client.communicate) for client in clients]
        dataset = TimingsDataset(str(tmp_path / "data"))
        wait_until(lambda: any(client.poll() is not None for client in clients) or len(dataset.recorded_cells()) > 2)
        killed = kill_workers(four, clients, kills=KILLS)
    for client, text in zip(clients, said, strict=True):
        assert client.returncode == 0, text.result()[1]
    assert killed == KILLS

    cells = {cell.cell_id(fake_ranks.ENVIRONMENT): cell for cell in map(fake_ranks.make_cell, range(CELLS))}
    expected = {cell_id: fake_ranks.count_rows(cell) for cell_id, cell in cells.items()}
    assert Counter(dataset.read(strict=True)["cell_id"].to_pylist()) == expected
    outcomes = dataset.outcomes(strict=True)
    assert Counter(outcome.cell_id for outcome in outcomes if outcome.status == "recorded") == dict.fromkeys(cells, 1)
    assert {outcome.cell_id: outcome.rows for outcome in outcomes if outcome.status == "recorded"} == expected
    causes = Counter(outcome.cause for outcome in outcomes if outcome.status != "recorded")
    assert set(causes) <= {"lost contact"}, causes
    # Both clients have an outcome of each cell, which one of the two measured.
    came = [outcome for outcome in read_lines(tmp_path, "outcome-*.jsonl") if outcome["status"] == "recorded"]
    assert Counter(outcome["cell_id"] for outcome in came) == dict.fromkeys(cells, 2)
    assert {outcome["cell_id"]: outcome["rows"] for outcome in came if outcome["rows"]} == expected
    assert sum(outcome["rows"] for outcome in came) == sum(expected.values())

    leases = read_lines(tmp_path, "lease-*.jsonl")
    by_worker: dict[str, list[tuple[float, float]]] = {}
    for lease in leases:
        for worker in lease["workers"]:
            by_worker.setdefault(worker, []).append((lease["began"], lease["ended"]))
    assert {worker: overlaps for worker, spans in by_worker.items() if (overlaps := find_overlaps(spans))} == {}
    # No attempt is wasted: there are as many gangs as outcomes.
    assert Counter(lease["cell"] for lease in leases) == Counter(outcome.cell_id for outcome in outcomes)
    # By the workers' own logs: one rank at a time each.
    for name in {path.name for path in tmp_path.glob("*/worker-*.log")}:
        assert not find_overlaps((outcome["began"], outcome["ended"]) for outcome in read_lines(tmp_path, f"*/{name}"))
    print(f"\n{sum(map(len, by_worker.values()))} ranks on {len(by_worker)} workers, {KILLS} killed: {dict(causes)}")
    assert_nothing_is_held(four, fake_ranks)
    assert_no_process_is_left(four, mark)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler in this process that gives up silent clients after seconds."""
    for name, value in {"LISTEN_EVERY_S": 0.5, "SILENT_REQUEST_S": 8.0, "SILENT_LEASE_S": 8.0}.items():
        monkeypatch.setattr(gangs, name, value)


def start_one(client: Client, folder: Path, *, model: str, ranks: int) -> "subprocess.Popen[str]":
    command = [sys.executable, str(HERE / "fake_ranks.py"), client.scheduler.address, str(folder), model, str(ranks)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("impatient")
def test_a_stopped_client_loses_its_workers_and_is_told_so_when_it_goes_on(
    four: Client, mark: str, fake_ranks: ModuleType, tmp_path: Path
) -> None:
    stopped = start_one(four, tmp_path, model="sleeper", ranks=4)
    wait_until(lambda: len(list(tmp_path.glob("*/*.here"))) == 4)
    stopped.send_signal(signal.SIGSTOP)
    # Its ranks, which would sleep for an hour, are ended with its lease.
    cell = fake_ranks.make_cell(1, ranks=4)
    assert fake_ranks.measure(four, cell, attempt=1, scratch=tmp_path).status == "recorded"
    stopped.send_signal(signal.SIGCONT)
    told, _ = stopped.communicate(timeout=WAIT_S)
    assert stopped.returncode == 0
    receipt = json.loads(told)
    assert (receipt["status"], receipt["cause"]) == ("failed", "lost contact")
    assert receipt["message"].startswith("its lease was ended: nothing was heard of this campaign for ")
    assert_nothing_is_held(four, fake_ranks)
    assert_no_process_is_left(four, mark)


@pytest.mark.usefixtures("impatient")
def test_a_client_that_is_stopped_in_the_queue_holds_up_nobody_and_is_served_when_it_goes_on(
    four: Client, mark: str, fake_ranks: ModuleType, tmp_path: Path
) -> None:
    with lease_workers(four, 1) as lease:
        stopped = start_one(four, tmp_path, model="sleep", ranks=4)
        wait_until(lambda: lease.lost_workers() or gang_state(four)["queue"])
        stopped.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(1) as pool:
            narrow = pool.submit(
                fake_ranks.measure, four, fake_ranks.make_cell(1, ranks=1), attempt=1, scratch=tmp_path
            )
            # This lease and the narrow request keep asking the scheduler.
            wait_until(lambda: lease.lost_workers() or narrow.done())
            assert narrow.result().status == "recorded"
        assert not lease.lost_workers()
    stopped.send_signal(signal.SIGCONT)
    told, _ = stopped.communicate(timeout=WAIT_S)
    assert json.loads(told)["status"] == "recorded"
    assert_nothing_is_held(four, fake_ranks)
    assert_no_process_is_left(four, mark)


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
    assert_nothing_is_held(four, fake_ranks)


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
    assert_nothing_is_held(four, fake_ranks)


FILE = """\
name: outside
models: {models}
precisions: [fp32]
gpus: [1, 2]
batch_sizes: {batches}
exclude: {exclude}
device: cpu
cluster: {address}
data: {data}
warmup_steps: 2
measured_steps: 3
seconds_per_cell: 5s
timeout_per_cell: 2m
workers_timeout: {wait}
max_attempts: {attempts}
cells_at_once: {at_once}
"""

#: A model that kills the Dask worker of its rank.
KILLER = """\
import os
import signal

import psutil


def make():
    parents = psutil.Process().parents()
    (worker,) = [parent for parent in parents if "multiprocessing.spawn" in " ".join(parent.cmdline())]
    os.kill(worker.pid, signal.SIGKILL)
"""

#: A model whose ranks each write a file, and begin when another file appears.
WAITER = """\
import os
import pathlib
import time

from precision_time.tasks.workloads import build_workload


def make():
    pathlib.Path(f"here-{os.getpid()}").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    return build_workload("mlp")
"""


class Outside:
    """A scheduler and workers in processes of their own, and a campaign on them by the command line."""

    def __init__(self, folder: Path, *, prefect_api: str) -> None:
        self.folder, self.data, self.prefect_api = folder, folder / "data", prefect_api
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

    def start_campaign(
        self,
        *,
        models: str = "[mlp]",
        batches: str = "[4]",
        exclude: str = "[]",
        wait: str = "60s",
        attempts: int = 2,
        at_once: str = "null",
        prefect: str = "prefect",
    ) -> "subprocess.Popen[str]":
        text = FILE.format(
            models=models, batches=batches, exclude=exclude, address=self.address, data=json.dumps(str(self.data)),
            wait=wait, attempts=attempts, at_once=at_once,
        )  # fmt: skip
        (self.folder / "campaign.yaml").write_text(text, encoding="utf-8")
        return subprocess.Popen(
            [sys.executable, "-m", "precision_time", "campaign", "campaign.yaml", "--json"],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PREFECT_HOME": str(self.folder / prefect), "PREFECT_API_URL": self.prefect_api},
        )  # fmt: skip

    def write_model(self, name: str, text: str) -> None:
        """Write a module into the folder in which the campaign, the workers and their ranks run."""
        (self.folder / f"{name}.py").write_text(text, encoding="utf-8")

    def recorded(self) -> int:
        return len(TimingsDataset(str(self.data)).recorded_cells()) if self.data.exists() else 0


@pytest.fixture
def outside(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standing_server: PrefectServer) -> Outside:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(tmp_path)]))
    return Outside(tmp_path, prefect_api=standing_server.url)


def assert_no_rank_is_left(mark: str) -> None:
    def ranks() -> list[list[str]]:
        commands = []
        for process in marked_processes(mark):
            with contextlib.suppress(psutil.Error):
                commands.append(process.cmdline())
        return [command for command in commands if "precision_time.tasks.ranks.rank" in " ".join(command)]

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
        # The time limit for workers to appear does not limit the wait for workers that others hold.
        time.sleep(10)
        assert campaign.poll() is None
        campaign.send_signal(signal.SIGINT)
        began = time.monotonic()
        out, said = campaign.communicate(timeout=WAIT_S)
        assert time.monotonic() - began < WAIT_S / 2
        assert campaign.returncode == 130, said
        assert len(gang_state(client)["leases"]) == 1
    # The results of the run until then are shown all the same.
    result = json.loads(out)
    assert (result["ended_by"], result["failed"]) == ("interrupted", [])
    assert 1 <= result["cells_recorded"] == outside.recorded() < 4
    assert_rows_are_whole(outside, cells=outside.recorded())
    assert not list((outside.folder / "scratch").iterdir())
    assert_no_rank_is_left(mark)


def test_two_campaigns_on_one_scheduler_and_the_same_data_measure_each_cell_once(outside: Outside, mark: str) -> None:
    outside.start_scheduler()
    outside.start_workers(2)
    with Client(outside.address) as client:
        client.wait_for_workers(2, timeout=WAIT_S)
        with lease_workers(client, 2):
            # With cells_at_once stated, cells of the two may run side by side on one host.
            campaigns = [
                outside.start_campaign(batches="[4, 8]", attempts=4, at_once="1", prefect=name, wait="120s")
                for name in ("one", "two")
            ]
            # Both have found all cells missing, and want the same one first.
            wait_until(
                lambda: (
                    len(gang_state(client)["queue"]) == 2 or any(campaign.poll() is not None for campaign in campaigns)
                )
            )
        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(lambda campaign: campaign.communicate(timeout=2 * WAIT_S), campaigns))
        assert not any(gang_state(client)["leases"])
    assert [campaign.returncode for campaign in campaigns] == [0, 0], said
    results = [json.loads(out) for out, _ in said]
    assert [result["cells_recorded"] for result in results] == [4, 4]
    assert sum(result["cells_measured"] for result in results) == 4
    assert sum(err.count("recorded by another campaign meanwhile") for _, err in said) >= 4
    dataset = TimingsDataset(str(outside.data))
    rows = dataset.read().num_rows
    assert sum(result["rows_added"] for result in results) == rows
    recorded = [outcome for outcome in dataset.outcomes() if outcome.status == "recorded"]
    assert (len(recorded), sum(outcome.rows for outcome in recorded)) == (4, rows)
    assert_rows_are_whole(outside, cells=4)
    assert not list((outside.folder / "scratch").iterdir())
    assert_no_rank_is_left(mark)


def count_measured_rows(outside: Outside) -> dict[str, int]:
    """How many measured rows each cell has; the number of warm-up rows differs from run to run."""
    rows = TimingsDataset(str(outside.data)).read(strict=True).select(["cell_id", "is_warmup"]).to_pylist()
    return Counter(row["cell_id"] for row in rows if not row["is_warmup"])


#: Most seconds of a campaign of six small cells, one of which kills its worker.
POISONED_S = 2 * WAIT_S


def test_a_cell_that_kills_its_worker_every_time_ends_a_campaign_with_5_and_the_others_recorded(
    outside: Outside, mark: str
) -> None:
    outside.start_scheduler()
    outside.start_workers(2)
    outside.write_model("killer", KILLER)
    campaign = outside.start_campaign(
        models="[mlp, 'killer:make']", batches="[4, 8, 16]", attempts=3,
        exclude="[{model: mlp, gpus: 2, batch_size: 16}, {model: 'killer:make', gpus: 2}, "
        "{model: 'killer:make', batch_size: 8}, {model: 'killer:make', batch_size: 16}]",
    )  # fmt: skip
    out, said = campaign.communicate(timeout=POISONED_S)
    assert campaign.returncode == 5, said
    assert json.loads(said.splitlines()[-1])["code"] == "E-PARTIAL"
    result = json.loads(out)
    assert (result["status"], result["cells_planned"], result["cells_recorded"]) == ("partial", 6, 5)
    (failed,) = result["failed"]
    assert (failed["label"], failed["attempt"], failed["cause"]) == ("killer:make fp32 x1 b4", 3, "lost contact")
    assert "is gone" in failed["message"]
    assert result["cells_left"] == 0
    assert_rows_are_whole(outside, cells=5)
    assert sorted(count_measured_rows(outside).values()) == [3, 3, 3, 6, 6]
    outcomes = TimingsDataset(str(outside.data)).outcomes()
    attempts = [(outcome.attempt, outcome.cause) for outcome in outcomes if outcome.model == "killer:make"]
    assert attempts == [(1, "lost contact"), (2, "lost contact"), (3, "lost contact")]
    assert_no_rank_is_left(mark)


@pytest.mark.long
def test_a_campaign_that_loses_a_worker_records_all_cells_with_the_rows_of_an_undisturbed_one(
    outside: Outside, mark: str
) -> None:
    outside.start_scheduler()
    outside.start_workers(2)
    outside.write_model("waiter", WAITER)
    (outside.folder / "go").touch()
    calm = outside.start_campaign(models="[mlp, 'waiter:make']", attempts=4)
    _, said = calm.communicate(timeout=2 * WAIT_S)
    assert calm.returncode == 0, said
    undisturbed = count_measured_rows(outside)
    assert sorted(undisturbed.values()) == [3, 3, 6, 6]

    outside.data = outside.folder / "disturbed"
    for path in (outside.folder / "go", *outside.folder.glob("here-*")):
        path.unlink()
    campaign = outside.start_campaign(models="[mlp, 'waiter:make']", attempts=4)
    wait_until(lambda: campaign.poll() is not None or list(outside.folder.glob("here-*")))
    with Client(outside.address) as client:
        (held,) = gang_state(client)["leases"].values()
        pids = client.run(os.getpid, workers=list(held))
        os.kill(pids[held[-1]], signal.SIGKILL)
        (outside.folder / "go").touch()
        out, said = campaign.communicate(timeout=2 * WAIT_S)
        assert campaign.returncode == 0, said
        client.wait_for_workers(2, timeout=WAIT_S)
        wait_until(lambda: not any(gang_state(client).values()))
    assert json.loads(out)["cells_measured"] == 4
    assert count_measured_rows(outside) == undisturbed
    assert_rows_are_whole(outside, cells=4)
    outcomes = TimingsDataset(str(outside.data)).outcomes()
    assert Counter(outcome.cell_id for outcome in outcomes if outcome.status == "recorded") == dict.fromkeys(
        undisturbed, 1
    )
    lost = [outcome for outcome in outcomes if outcome.cause == "lost contact"]
    assert [outcome.model for outcome in lost] == ["waiter:make"]
    assert held[-1] in lost[0].message
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
