"""run_rank and end_ranks with a real fork server and scripted ranks, which end as soon as they build their model."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask
import distributed  # noqa: F401, it registers its settings
import pytest

from precision_time.tasks.processes import rank_process
from precision_time.tasks.processes.fork_client import ForkClient
from precision_time.tasks.processes.rank_process import run_rank
from precision_time.tasks.processes.running_ranks import end_ranks
from precision_time.tasks.ranks.rank import PARENT_VARIABLE
from precision_time.tests.tasks.scripted_runs import (
    forget,
    make_job,
    open_forks,
    run,
    run_in_thread,
    server_pid,
    told,
    wait_for,
    wait_until_gone,
)

NO_FORK = rank_process._FORK_VARIABLE


@pytest.fixture(scope="module", autouse=True)
def forks(tmp_path_factory):
    with open_forks(tmp_path_factory.mktemp("own")) as forks:
        yield forks


@pytest.mark.parametrize("forked", ["", "0"])
@pytest.mark.parametrize(("given", "left"), [("65536", None), ("131072", "131072")])
def test_a_rank_allocates_as_outside_dask(tmp_path, forks, monkeypatch, given, left, forked):
    """Dask's memory setting for its workers made training on a CPU 1.45 times as slow."""
    wanted = dask.config.get("distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_")
    assert str(wanted) == "65536"
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", given)
    monkeypatch.setenv(NO_FORK, forked)
    assert run(tmp_path / "a", "scripted_ranks:tells")["cause"] == ""
    assert told()["environment"].get("MALLOC_TRIM_THRESHOLD_") == left


def test_a_forked_rank_finds_what_a_fresh_interpreter_finds(tmp_path, forks, monkeypatch):
    assert run(tmp_path / "a", "scripted_ranks:tells")["cause"] == ""
    forked = told()
    assert run(tmp_path / "a", "scripted_ranks:tells")["cause"] == ""
    again = told()
    monkeypatch.setenv(NO_FORK, "0")
    assert run(tmp_path / "a", "scripted_ranks:tells")["cause"] == ""
    fresh = told()

    assert (forked["parent"], fresh["parent"]) == (server_pid(forks), os.getpid())
    for values in (forked, fresh):
        assert values["environment"].pop(PARENT_VARIABLE) == str(values.pop("parent"))
        assert not values.pop("cuda")
        assert values["leads_session"]
    del fresh["environment"][NO_FORK]
    draws = {values.pop("numpy_draw") for values in (forked, again, fresh)}
    assert len(draws) == 3
    assert len({values.pop("pid") for values in (forked, again, fresh)}) == 3
    assert forked.pop("data_kib") == pytest.approx(fresh.pop("data_kib"), rel=0.5)
    assert forked == fresh
    assert forked["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert forked["environment"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert forked["torch_threads"][0] == 2
    assert "a rank said this" in (tmp_path / "a" / "rank-0.log").read_text()


def test_ranks_of_several_cells_come_from_one_fork_server_and_are_processes_of_their_own(tmp_path, forks):
    run(tmp_path / "a", "scripted_ranks:tells")
    first, pid = told(), server_pid(forks)
    run(tmp_path / "b", "scripted_ranks:tells")
    second = told()
    assert server_pid(forks) == pid
    assert first["parent"] == second["parent"] == pid
    assert first["pid"] != second["pid"]


def test_changed_code_of_the_user_is_seen(tmp_path):
    source = Path(os.environ["PYTHONPATH"].split(os.pathsep)[1]) / "changing.py"
    source.write_text("import os\n\n\ndef make():\n    os._exit(11)\n")
    assert run(tmp_path / "a", "changing:make")["cause"] == "exit code 11"
    source.write_text("import os\n\n\ndef make():\n    print('more words than before')\n    os._exit(12)\n")
    assert run(tmp_path / "b", "changing:make")["cause"] == "exit code 12"


@pytest.mark.parametrize(
    ("model", "forked", "cause", "said"),
    [
        ("scripted_ranks:ends", "1", "", ""),
        ("scripted_ranks:ends_with_3", "1", "exit code 3", "rank 0: the process ended with exit code 3"),
        ("scripted_ranks:dies", "1", "signal 9", "rank 0: the process was ended by SIGKILL"),
        ("scripted_ranks:dies", "0", "signal 9", "rank 0: the process was ended by SIGKILL"),
        (
            "scripted_ranks:raises",
            "1",
            "exception",
            "rank 0: scripted_ranks:raises() fails; got: ValueError",
        ),
    ],
)
def test_how_a_rank_ended_is_told_alike(tmp_path, monkeypatch, model, forked, cause, said):
    if forked == "0":
        monkeypatch.setenv(NO_FORK, forked)
    report = run(tmp_path / "a", model)
    assert report["cause"] == cause
    assert report["message"].startswith(said)
    assert not report["peer_lost"]


def test_a_rank_without_a_fork_server_gets_a_fresh_interpreter(tmp_path, monkeypatch):
    monkeypatch.setattr(ForkClient, "fork", lambda self, request, *, is_over: None)
    report = run(tmp_path / "a", "scripted_ranks:tells")
    assert report["cause"] == ""
    assert told()["parent"] == os.getpid()


def test_several_ranks_run_at_once(tmp_path):
    models = ["scripted_ranks:ends_with_3", "scripted_ranks:ends", "scripted_ranks:dies", "scripted_ranks:ends"] * 2
    jobs = [make_job(tmp_path / f"{number}", model) for number, model in enumerate(models)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        causes = [report["cause"] for report in pool.map(lambda job: run_rank(job, 0), jobs)]
    assert causes == ["exit code 3", "", "signal 9", ""] * 2
    assert end_ranks() == 0


def test_ending_the_ranks_of_a_worker_kills_the_one_that_runs(tmp_path):
    forget()
    thread, reports = run_in_thread(tmp_path / "a", "scripted_ranks:sleeps_with_family")
    wait_for(told)
    assert end_ranks() == 1
    thread.join()
    assert reports[0]["cause"] == "signal 9"
    assert end_ranks() == 0
    assert wait_until_gone(told()["family"]) == []


def test_a_rank_that_was_ended_while_it_waited_for_its_fork_server_never_begins(tmp_path, monkeypatch):
    waiting = threading.Event()

    def wait(self, request, *, is_over):
        waiting.set()
        wait_for(is_over)

    monkeypatch.setattr(ForkClient, "fork", wait)
    thread, reports = run_in_thread(tmp_path / "a", "scripted_ranks:ends")
    waiting.wait()
    assert end_ranks() == 1
    thread.join()
    assert reports[0]["cause"] == "signal 9"


def test_a_plain_process_runs_a_rank_and_leaves_no_fork_server_behind(tmp_path):
    job = make_job(tmp_path / "a", "scripted_ranks:tells")
    (tmp_path / "job.json").write_text(job)
    code = (
        "import sys; from precision_time.tasks.processes.rank_process import run_rank; "
        "print(run_rank(open(sys.argv[1]).read(), 0)['cause'] or 'well')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "job.json")], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "well\n"
    assert wait_until_gone([told()["parent"]]) == []
