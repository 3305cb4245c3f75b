"""Ranks that hang, hoard or will not die, and workers and templates that are killed: what is left, and what is said."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from distributed import Client, LocalCluster

from precision_time.storage.schema import Environment, GridCell
from precision_time.tasks.processes import fork_client as warm_starts
from precision_time.tasks.processes import rank_process
from precision_time.tasks.processes.fork_client import Templates
from precision_time.tasks.processes.rank_process import run_rank
from precision_time.tasks.processes.running_ranks import end_ranks
from precision_time.tasks.ranks.job import MeasurementLimits, RankJob

pytestmark = pytest.mark.faults

ENVIRONMENT = Environment(device_type="cpu", gpu="cpu-test-2c", cpu_model="test", cpu_cores=2, backend="gloo")
SCRIPTS = Path(__file__).parent.parent / "tasks"
MIB = 2**20

#: A worker of the barest kind: it runs the jobs it is named, each in a thread, and stays.
WORKER = """
import sys, threading, time
from precision_time.tasks.processes.rank_process import run_rank
for path in sys.argv[1:]:
    threading.Thread(target=run_rank, args=(open(path).read(), 0)).start()
time.sleep(600)
"""


@pytest.fixture(scope="module", autouse=True)
def templates(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SCRIPTS))
        patch.setenv("SCRIPTED_RANK_OUT", str(tmp_path_factory.mktemp("told") / "told.json"))
        patch.setattr(rank_process, "_templates", Templates())
        # Here a busy machine must not bring a fresh interpreter.
        patch.setattr(warm_starts, "READY_S", 120.0)
        yield rank_process._templates
        if rank_process._templates._current is not None:
            rank_process._templates._current.kill()


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After each test no rank of it runs; its template may."""
    Path(os.environ["SCRIPTED_RANK_OUT"]).unlink(missing_ok=True)
    yield
    assert end_ranks() == 0
    if "family" in told():
        assert wait_until_gone(told()["family"]) == []


def make_job(scratch, model, **limits):
    # It changes with every test, and a changed environment gets a new template.
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    cell = GridCell(model=f"scripted_ranks:{model}", precision="fp32", world_size=1, per_gpu_batch_size=4)
    job = RankJob(
        cell=cell,
        attempt=1,
        environment=ENVIRONMENT,
        limits=MeasurementLimits(**{"timeout_s": 60.0, **limits}),
        scratch=str(scratch),
    )
    scratch.mkdir(exist_ok=True)
    (scratch / "job.json").write_text(job.to_json())
    return job.to_json()


def run(scratch, model, **limits):
    return run_rank(make_job(scratch, model, **limits), 0)


def told():
    with contextlib.suppress(FileNotFoundError):
        return json.loads(Path(os.environ["SCRIPTED_RANK_OUT"]).read_text())
    return {}


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids):
    """The processes that still live; a killed one takes a moment."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not any(map(lives, pids)), tries=200)
    return [pid for pid in pids if lives(pid)]


def wait_for(condition, *, tries=1200):
    for _ in range(tries):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come to pass")


def template_pid(templates):
    return templates._current.process.pid


def parents(pid):
    return psutil.Process(pid).ppid()


# A fresh interpreter first has to import torch, on a busy machine too.
@pytest.mark.parametrize(("template", "timeout_s"), [("1", 4.0), pytest.param("0", 20.0, marks=pytest.mark.long)])
def test_a_rank_deaf_to_signals_is_killed_at_its_deadline_with_its_family(tmp_path, monkeypatch, template, timeout_s):
    monkeypatch.setenv(rank_process._TEMPLATE_VARIABLE, template)
    report = run(tmp_path / "a", "sleeps_with_family", timeout_s=timeout_s)
    assert report["cause"] == "timed out"
    assert f"after {timeout_s:g} s" in report["message"]
    family = told()["family"]
    assert len(set(family)) == 3
    assert wait_until_gone(family) == []


def test_a_rank_that_ignores_polite_signals_is_ended_by_its_worker(tmp_path):
    reports = []
    job = make_job(tmp_path / "a", "sleeps_with_family")
    thread = threading.Thread(target=lambda: reports.append(run_rank(job, 0)))
    thread.start()
    wait_for(told)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.killpg(told()["family"][0], number)
    assert all(map(lives, told()["family"]))
    assert end_ranks() == 1
    thread.join()
    assert reports[0]["cause"] == "signal 9"


def test_what_a_rank_left_running_behind_its_back_ends_with_it(tmp_path):
    assert run(tmp_path / "a", "leaves_orphan")["cause"] == ""
    assert wait_until_gone(told()["family"]) == []


def test_a_hoarder_meets_its_memory_limit_and_the_next_cell_has_none_of_it(tmp_path):
    run(tmp_path / "a", "tells")
    limit = told()["data_kib"] * 1024 + 256 * MIB
    report = run(tmp_path / "b", "hoards", memory_limit_bytes=limit)
    assert report["cause"] == "memory-limit"
    assert run(tmp_path / "c", "tries_for_memory", memory_limit_bytes=limit)["cause"] == "memory-limit"
    assert run(tmp_path / "d", "tries_for_memory")["cause"] == ""
    assert told() == {"pieces": 16}


def test_a_killed_worker_takes_its_rank_its_template_and_their_children_with_it(tmp_path):
    make_job(tmp_path / "a", "sleeps_with_family")
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path / "a" / "job.json")])
    wait_for(told)
    family = told()["family"]
    template = parents(family[0])
    assert parents(template) == worker.pid
    worker.kill()
    worker.wait()
    assert wait_until_gone([template, *family]) == []


def test_a_worker_killed_while_its_template_loads_leaves_nothing(tmp_path):
    make_job(tmp_path / "a", "sleeps")
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path / "a" / "job.json")])
    wait_for(lambda: psutil.Process(worker.pid).children())
    (template,) = psutil.Process(worker.pid).children()
    worker.kill()
    worker.wait()
    assert wait_until_gone([template.pid]) == []


def test_a_template_killed_in_mid_cell_fails_that_cell_alone(tmp_path, templates):
    reports = []
    job = make_job(tmp_path / "a", "sleeps_with_family")
    thread = threading.Thread(target=lambda: reports.append(run_rank(job, 0)))
    thread.start()
    wait_for(told)
    family, killed = told()["family"], template_pid(templates)
    os.kill(killed, signal.SIGKILL)
    thread.join()
    assert reports[0]["cause"] == "lost contact"
    assert "template process of the worker is gone" in reports[0]["message"]
    assert wait_until_gone(family[:1]) == []

    assert run(tmp_path / "b", "ends")["cause"] == ""
    assert template_pid(templates) != killed
    for pid in family:
        # A child in a session of its own, of a rank that the kernel ended, has no one left who knows of it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_template_killed_between_cells_costs_none(tmp_path, templates):
    assert run(tmp_path / "a", "ends")["cause"] == ""
    killed = template_pid(templates)
    os.kill(killed, signal.SIGKILL)
    assert run(tmp_path / "b", "tells")["cause"] == ""
    assert told()["parent"] == template_pid(templates) != killed


def test_a_template_that_does_not_answer_is_replaced(tmp_path, templates, monkeypatch):
    assert run(tmp_path / "a", "ends")["cause"] == ""
    stopped = template_pid(templates)
    os.kill(stopped, signal.SIGSTOP)
    monkeypatch.setattr(warm_starts, "ANSWER_S", 0.5)
    assert run(tmp_path / "b", "ends")["cause"] == ""
    assert wait_until_gone([stopped]) == []


@pytest.mark.parametrize(
    "trouble",
    [
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "torch.cuda._is_in_bad_fork = lambda: True",
    ],
    ids=["thread", "cuda"],
)
def test_a_template_that_is_not_fit_to_fork_costs_no_cell(tmp_path, templates, monkeypatch, trouble):
    imports = "import sys, threading, time"
    (tmp_path / "sitecustomize.py").write_text(
        f"{imports}\nif 'precision_time.tasks.processes.fork_server' in sys.orig_argv:\n"
        f"    import torch\n    {trouble}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert run(tmp_path / "a", "tells")["cause"] == ""
    assert told()["parent"] == os.getpid()
    assert templates._current is None


def test_fifty_ranks_leave_no_zombie_and_no_open_file(tmp_path, templates):
    run(tmp_path / "a", "ends")
    pids = (os.getpid(), template_pid(templates))

    def count_files():
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]

    # The template closes a rank's socket just after it reported its end.
    time.sleep(0.5)
    before = count_files()
    for number in range(50):
        model = ("ends", "dies", "ends_with_3")[number % 3]
        assert run(tmp_path / "a", model)["cause"] == ("", "signal 9", "exit code 3")[number % 3]
    assert template_pid(templates) == pids[1]
    wait_for(lambda: count_files() == before)
    assert psutil.Process(pids[1]).children() == []


def test_a_dask_worker_that_is_killed_or_closed_takes_its_template_with_it(tmp_path):
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        workers = client.run(os.getpid)
        templates = []
        for number, address in enumerate(workers):
            job = make_job(tmp_path / f"{number}", "tells")
            assert client.submit(run_rank, job, 0, workers=[address], pure=False).result()["cause"] == ""
            templates.append(told()["parent"])
            assert parents(templates[-1]) == workers[address]
        victim, closed = workers
        os.kill(workers[victim], signal.SIGKILL)
        assert wait_until_gone(templates[:1]) == []
        assert lives(templates[1])
        client.retire_workers([closed])
        assert wait_until_gone(templates[1:]) == []
