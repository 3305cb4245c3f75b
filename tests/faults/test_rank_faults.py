"""Ranks that hang, hoard or will not die, and workers and fork servers that are killed: what is left of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from distributed import Client, LocalCluster

from precision_time.tasks.processes import fork_client, rank_process
from precision_time.tasks.processes.rank_process import run_rank
from precision_time.tasks.processes.running_ranks import end_ranks
from precision_time.tests.tasks.scripted_runs import (
    forget,
    lives,
    make_job,
    open_forks,
    run,
    run_in_thread,
    server_pid,
    told,
    wait_for,
    wait_until_gone,
)

pytestmark = pytest.mark.faults

MIB = 2**20

#: The simplest worker: it runs each of its jobs in a thread, and stays alive.
WORKER = """
import sys, threading, time
from precision_time.tasks.processes.rank_process import run_rank
for path in sys.argv[1:]:
    threading.Thread(target=run_rank, args=(open(path).read(), 0)).start()
time.sleep(600)
"""


@pytest.fixture(scope="module", autouse=True)
def forks(tmp_path_factory):
    with open_forks(tmp_path_factory.mktemp("own")) as forks:
        yield forks


@pytest.fixture(autouse=True)
def nothing_is_left():
    """After each test no rank of it runs; its fork server may."""
    forget()
    yield
    assert end_ranks() == 0
    if "family" in told():
        assert wait_until_gone(told()["family"]) == []


def parents(pid):
    return psutil.Process(pid).ppid()


# A fresh interpreter first has to import torch, on a busy machine too.
@pytest.mark.parametrize(("forked", "timeout_s"), [("1", 4.0), pytest.param("0", 20.0, marks=pytest.mark.long)])
def test_a_rank_deaf_to_signals_is_killed_at_its_deadline_with_its_family(tmp_path, monkeypatch, forked, timeout_s):
    monkeypatch.setenv(rank_process._FORK_VARIABLE, forked)
    report = run(tmp_path / "a", "scripted_ranks:sleeps_with_family", timeout_s=timeout_s)
    assert report["cause"] == "timed out"
    assert f"after {timeout_s:g} s" in report["message"]
    family = told()["family"]
    assert len(set(family)) == 3
    assert wait_until_gone(family) == []


def test_a_rank_that_ignores_polite_signals_is_ended_by_its_worker(tmp_path):
    thread, reports = run_in_thread(tmp_path / "a", "scripted_ranks:sleeps_with_family")
    wait_for(told)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.killpg(told()["family"][0], number)
    assert all(map(lives, told()["family"]))
    assert end_ranks() == 1
    thread.join()
    assert reports[0]["cause"] == "signal 9"


def test_what_a_rank_left_running_behind_its_back_ends_with_it(tmp_path):
    assert run(tmp_path / "a", "scripted_ranks:leaves_orphan")["cause"] == ""
    assert wait_until_gone(told()["family"]) == []


def test_a_hoarder_meets_its_memory_limit_and_the_next_cell_has_none_of_it(tmp_path):
    run(tmp_path / "a", "scripted_ranks:tells")
    limit = told()["data_kib"] * 1024 + 256 * MIB
    report = run(tmp_path / "b", "scripted_ranks:hoards", memory_limit_bytes=limit)
    assert report["cause"] == "memory-limit"
    assert run(tmp_path / "c", "scripted_ranks:tries_for_memory", memory_limit_bytes=limit)["cause"] == "memory-limit"
    assert run(tmp_path / "d", "scripted_ranks:tries_for_memory")["cause"] == ""
    assert told() == {"pieces": 16}


def test_a_killed_worker_takes_its_rank_its_fork_server_and_their_children_with_it(tmp_path):
    make_job(tmp_path / "a", "scripted_ranks:sleeps_with_family")
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path / "a" / "job.json")])
    wait_for(told)
    family = told()["family"]
    server = parents(family[0])
    assert parents(server) == worker.pid
    worker.kill()
    worker.wait()
    assert wait_until_gone([server, *family]) == []


def test_a_worker_killed_while_its_fork_server_loads_leaves_nothing(tmp_path):
    make_job(tmp_path / "a", "scripted_ranks:sleeps")
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path / "a" / "job.json")])
    wait_for(lambda: psutil.Process(worker.pid).children())
    (server,) = psutil.Process(worker.pid).children()
    worker.kill()
    worker.wait()
    assert wait_until_gone([server.pid]) == []


def test_a_fork_server_killed_in_mid_cell_fails_that_cell_alone(tmp_path, forks):
    thread, reports = run_in_thread(tmp_path / "a", "scripted_ranks:sleeps_with_family")
    wait_for(told)
    family, killed = told()["family"], server_pid(forks)
    os.kill(killed, signal.SIGKILL)
    thread.join()
    assert reports[0]["cause"] == "lost contact"
    assert "fork server of the worker is gone" in reports[0]["message"]
    assert wait_until_gone(family[:1]) == []

    assert run(tmp_path / "b", "scripted_ranks:ends")["cause"] == ""
    assert server_pid(forks) != killed
    for pid in family:
        # No process is left that knows the children in sessions of their own of a rank that the kernel ended.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_fork_server_killed_between_cells_costs_none(tmp_path, forks):
    assert run(tmp_path / "a", "scripted_ranks:ends")["cause"] == ""
    killed = server_pid(forks)
    os.kill(killed, signal.SIGKILL)
    assert run(tmp_path / "b", "scripted_ranks:tells")["cause"] == ""
    assert told()["parent"] == server_pid(forks) != killed


def test_a_fork_server_that_does_not_answer_is_replaced(tmp_path, forks, monkeypatch):
    assert run(tmp_path / "a", "scripted_ranks:ends")["cause"] == ""
    stopped = server_pid(forks)
    os.kill(stopped, signal.SIGSTOP)
    monkeypatch.setattr(fork_client, "ANSWER_S", 0.5)
    assert run(tmp_path / "b", "scripted_ranks:ends")["cause"] == ""
    assert wait_until_gone([stopped]) == []


@pytest.mark.parametrize(
    "trouble",
    [
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "torch.cuda._is_in_bad_fork = lambda: True",
    ],
    ids=["thread", "cuda"],
)
def test_a_fork_server_that_is_not_fit_to_fork_costs_no_cell(tmp_path, forks, monkeypatch, trouble):
    imports = "import sys, threading, time"
    (tmp_path / "sitecustomize.py").write_text(
        f"{imports}\nif 'precision_time.tasks.processes.fork_server' in sys.orig_argv:\n"
        f"    import torch\n    {trouble}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert run(tmp_path / "a", "scripted_ranks:tells")["cause"] == ""
    assert told()["parent"] == os.getpid()
    assert forks._current is None


def test_fifty_ranks_leave_no_zombie_and_no_open_file(tmp_path, forks):
    run(tmp_path / "a", "scripted_ranks:ends")
    pids = (os.getpid(), server_pid(forks))

    def count_files():
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]

    # The fork server closes a rank's socket just after it reported its end.
    time.sleep(0.5)
    before = count_files()
    for number in range(50):
        model = ("ends", "dies", "ends_with_3")[number % 3]
        assert run(tmp_path / "a", f"scripted_ranks:{model}")["cause"] == ("", "signal 9", "exit code 3")[number % 3]
    assert server_pid(forks) == pids[1]
    wait_for(lambda: count_files() == before)
    assert psutil.Process(pids[1]).children() == []


def test_a_dask_worker_that_is_killed_or_closed_takes_its_fork_server_with_it(tmp_path):
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        workers = client.run(os.getpid)
        servers = []
        for number, address in enumerate(workers):
            job = make_job(tmp_path / f"{number}", "scripted_ranks:tells")
            assert client.submit(run_rank, job, 0, workers=[address], pure=False).result()["cause"] == ""
            servers.append(told()["parent"])
            assert parents(servers[-1]) == workers[address]
        victim, closed = workers
        os.kill(workers[victim], signal.SIGKILL)
        assert wait_until_gone(servers[:1]) == []
        assert lives(servers[1])
        client.retire_workers([closed])
        assert wait_until_gone(servers[1:]) == []
