"""``precision-time up`` under faults: one stack of real processes for all of these tests, in the order of the file."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from precision_time.storage.registry import Registry
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.process_ties import tied_command
from precision_time.tests.faults.marked_processes import RANKS, MarkedProcesses
from precision_time.tests.processes import free_port, wait_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(420)]

START_S = 180.0
RUN_S = 240.0
CAMPAIGN = "profiling-campaign/profiling-campaign"
NIGHTLY = "nightly-retrain/nightly-retrain"
RETRAIN = "retrain-predictor/retrain-predictor"
ROLL_BACK = "roll-back/roll-back"


class Stack(MarkedProcesses):
    """One ``up`` in a home of its own."""

    def __init__(self, home: Path) -> None:
        super().__init__(PYTHONUNBUFFERED="1")
        self.home = home
        self.data = home / "precision-time-data"
        self.registry = home / "precision-time-registry"
        self.process: subprocess.Popen[str] | None = None
        self.found: dict[str, Any] = {}

    def command(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "precision_time", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def start(self, *options: str) -> None:
        up = [sys.executable, "-m", "precision_time", "up", "--home", str(self.home), "--port", str(free_port())]
        self.process = subprocess.Popen(
            tied_command([*up, "--json", *options], stop=signal.SIGTERM, parent=os.getpid()),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=(self.home.parent / "up.err").open("a"),
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.home.parent / "up.err").read_text()
        self.found = json.loads(line)

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        from prefect.client.orchestration import SyncPrefectClient

        with SyncPrefectClient(self.found["api"]) as client:
            yield client

    def run(self, name: str, /, **spec: Any) -> Any:
        """Start a run of a deployment, with some values of its spec replaced."""
        with self.client() as client:
            deployment = client.read_deployment(self.found["deployments"][name])
            parameters = {"spec": deployment.parameters["spec"] | spec}
            return client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id

    def read(self, run: Any) -> Any:
        with self.client() as client:
            return client.read_flow_run(run)

    def wait(self, run: Any) -> Any:
        return wait_for(lambda: self._ended(run), seconds=RUN_S, what=f"the end of {run}")

    def _ended(self, run: Any) -> Any:
        flow_run = self.read(run)
        return flow_run if flow_run.state.is_final() else None

    def runs(self, name: str) -> list[Any]:
        from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId

        ids = FlowRunFilterDeploymentId(any_=[self.found["deployments"][name]])
        with self.client() as client:
            return client.read_flow_runs(flow_run_filter=FlowRunFilter(deployment_id=ids))

    def schedule(self, name: str, schedule: Any) -> Any:
        with self.client() as client:
            (made,) = client.create_deployment_schedules(self.found["deployments"][name], [(schedule, True)])
            return made.id

    def unschedule(self, name: str, schedule: Any) -> None:
        with self.client() as client:
            client.delete_deployment_schedule(self.found["deployments"][name], schedule)

    def miss(self, name: str, *, days: int) -> None:
        """Create the runs that the schedule would have started in the last days."""
        now = datetime.now(UTC)
        span = {"start_time": (now - timedelta(days=days)).isoformat(), "end_time": now.isoformat(), "min_runs": days}
        with self.client() as client:
            client.request(
                "POST",
                "/deployments/{id}/schedule",
                path_params={"id": self.found["deployments"][name]},
                json=span,
            )

    def pause(self, is_paused: bool) -> None:
        from prefect.client.schemas.actions import WorkPoolUpdate

        with self.client() as client:
            client.update_work_pool("campaigns", WorkPoolUpdate(is_paused=is_paused))

    def cells(self) -> set[str]:
        return set(TimingsDataset(str(self.data)).recorded_cells()) if self.data.exists() else set()

    def worker(self) -> psutil.Process:
        assert self.process is not None
        children = psutil.Process(self.process.pid).children()
        (process,) = [child for child in children if "worker start" in " ".join(child.cmdline())]
        return process


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("operations") / "home")
    stack.start("--workers", "2")
    yield stack
    stack.kill_all()


def test_a_second_up_says_what_runs_and_a_port_in_use_says_who_has_it(stack: Stack, tmp_path: Path) -> None:
    assert stack.process is not None
    again = stack.command("up", "--home", str(stack.home))
    assert again.returncode == 2
    assert f"process {stack.process.pid}" in again.stderr
    assert stack.found["ui"] in again.stderr
    port = stack.found["ui"].rpartition(":")[2]
    beside = stack.command("up", "--home", str(tmp_path / "other"), "--port", port)
    assert beside.returncode == 2
    assert "uvicorn" in beside.stderr
    assert "--port" in beside.stderr


def test_up_is_not_announced_when_its_dask_workers_do_not_start(tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    ended = subprocess.run(
        [sys.executable, "-m", "precision_time", "up", "--home", home, "--port", str(free_port()), "--json"],
        env=os.environ | {"DASK_DISTRIBUTED__WORKER__PRELOAD": '["no_such_module"]'},
        capture_output=True, text=True, check=False, timeout=START_S,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "the Dask workers ended right after the start" in ended.stderr
    assert "no_such_module" in (tmp_path / "home" / "logs" / "dask-workers.log").read_text()
    assert not (tmp_path / "home" / "up.json").exists()
    assert "started_in_s" not in ended.stdout


def test_the_doctor_finds_nothing_wrong_with_a_fresh_stack(stack: Stack) -> None:
    examined = stack.command("doctor", "--home", str(stack.home), "--json")
    report = json.loads(examined.stdout)
    assert [finding for finding in report["findings"] if finding["level"] == "problem"] == []
    assert examined.returncode == 0
    findings = {finding["topic"]: finding["what"] for finding in report["findings"]}
    assert findings["worker"].startswith("1 online")
    assert findings["deployments"] == "4 are registered"
    assert "2 workers" in findings["dask"]


def test_twelve_missed_nights_are_made_up_for_by_one_run(stack: Stack, measure: Any, record: Any) -> None:
    from prefect.client.schemas.schedules import CronSchedule

    record(str(stack.data), measure(models=("mlp", "vit_tiny", "bert_mini", "gpt2_mini")))
    stack.pause(True)
    schedule = stack.schedule(NIGHTLY, CronSchedule(cron="15 2 * * *", timezone="Europe/Berlin"))
    stack.miss(NIGHTLY, days=12)

    def missed() -> list[Any]:
        return [run for run in stack.runs(NIGHTLY) if run.expected_start_time < datetime.now(UTC)]

    assert {run.state.is_scheduled() for run in missed()} == {True}
    stack.pause(False)
    wait_for(lambda: all(run.state.is_final() for run in missed()), seconds=RUN_S, what="the end of all runs")
    ended = missed()
    stack.unschedule(NIGHTLY, schedule)
    assert len(ended) == 12
    (worked,) = [run for run in ended if run.state.is_completed()]
    assert {run.state.name for run in ended if run is not worked} == {"Skipped"}
    assert Registry(str(stack.registry)).versions("default") == [1]

    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

    with stack.client() as client:
        logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[worked.id])))
    said = "\n".join(log.message for log in logs)
    assert all(run.name in said for run in ended if run is not worked)


def test_of_two_nights_at_once_the_second_waits_and_finds_nothing_new(stack: Stack) -> None:
    first, second = stack.run(NIGHTLY), stack.run(NIGHTLY)
    wait_for(
        lambda: "AwaitingConcurrencySlot" in {stack.read(run).state.name for run in (first, second)},
        seconds=60,
        what="one of them waiting",
    )
    ended = sorted((stack.wait(first), stack.wait(second)), key=lambda run: run.start_time)
    assert all(run.state.is_completed() for run in ended)
    assert ended[0].end_time <= ended[1].start_time
    assert Registry(str(stack.registry)).versions("default") == [1]


def test_a_schedule_of_one_minute_fires_twice_and_never_after_it_is_removed(stack: Stack) -> None:
    from prefect.client.schemas.schedules import IntervalSchedule

    before = {run.id for run in stack.runs(NIGHTLY)}
    soon = datetime.now(UTC) + timedelta(seconds=10)
    schedule = stack.schedule(NIGHTLY, IntervalSchedule(interval=timedelta(minutes=1), anchor_date=soon))

    def fired() -> list[Any]:
        new = [run for run in stack.runs(NIGHTLY) if run.id not in before and run.auto_scheduled]
        return [run for run in new if run.state.is_completed()]

    wait_for(lambda: len(fired()) >= 2, seconds=200, what="two runs of the schedule")
    stack.unschedule(NIGHTLY, schedule)
    times = sorted(run.expected_start_time for run in fired())
    assert times[1] - times[0] == timedelta(minutes=1)
    assert all(run.state.is_final() or run.state.is_running() for run in stack.runs(NIGHTLY))


def test_a_killed_worker_crashes_its_run_leaves_no_rank_and_the_next_run_resumes(stack: Stack) -> None:
    spec = {"models": ["mlp"], "data": str(stack.home / "measured")}
    stack.data = stack.home / "measured"
    run = stack.run(CAMPAIGN, **spec)
    wait_for(stack.cells, seconds=RUN_S, what="a recorded cell")
    wait_for(lambda: stack.living(RANKS), seconds=60, what="a rank")
    killed = stack.worker()
    killed.kill()
    wait_for(
        lambda: not stack.living(RANKS) and not stack.living("prefect.engine"), seconds=60, what="the end of ranks"
    )
    assert stack.wait(run).state.name == "Crashed"
    recorded_before = stack.cells()
    assert 1 <= len(recorded_before) < 4

    again = stack.wait(stack.run(CAMPAIGN, **spec))
    assert again.state.is_completed()
    assert stack.worker().pid != killed.pid
    assert len(stack.cells()) == 4
    outcomes = TimingsDataset(str(stack.data)).outcomes()
    recorded = [outcome.cell_id for outcome in outcomes if outcome.status == "recorded"]
    assert sorted(recorded) == sorted(stack.cells()), "a recorded cell was measured again"


def test_a_retraining_and_a_roll_back_started_from_their_pages_change_what_is_in_use(
    stack: Stack, measure: Any, record: Any
) -> None:
    data, shelf = str(stack.home / "by-hand"), Registry(str(stack.registry))
    for models in (("mlp",), ("vit_tiny", "bert_mini")):
        record(data, measure(models=models, batches=(8, 16, 32, 64) if models == ("mlp",) else (8, 16, 32)))
        retrained = stack.wait(stack.run(RETRAIN, data=data, name="by-hand"))
        assert retrained.name == "retrain by-hand"
        assert retrained.state.is_completed(), retrained.state.message
    assert shelf.aliases("by-hand") == {"champion": 2}
    back = stack.wait(stack.run(ROLL_BACK, name="by-hand"))
    assert back.name == "roll back by-hand@champion"
    assert back.state.is_completed(), back.state.message
    assert shelf.aliases("by-hand") == {"champion": 1}

    # The retraining after it does not undo it.
    assert stack.wait(stack.run(RETRAIN, data=data, name="by-hand")).state.is_completed()
    assert (shelf.aliases("by-hand"), shelf.versions("by-hand")) == ({"champion": 1}, [1, 2])
    refused = stack.wait(stack.run(ROLL_BACK, name="by-hand", to_version=9))
    assert refused.state.is_failed()
    assert "by-hand@9" in refused.state.message


def test_ctrl_c_stops_runs_and_processes_and_nothing_looks_alive_afterwards(stack: Stack) -> None:
    assert stack.process is not None
    run = stack.run(CAMPAIGN, models=["gpt2_mini"], data=str(stack.home / "more"))
    wait_for(lambda: stack.living(RANKS), seconds=RUN_S, what="a rank")
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(timeout=90) == 0
    stack.assert_nothing_is_left()
    assert not (stack.home / "up.json").exists()

    stack.start("--cluster", "none", "--no-worker")
    assert stack.read(run).state.name == "Crashed"
    stack.process.kill()
    stack.assert_nothing_is_left()
