"""run_rank and end_ranks with real templates and scripted ranks, which end as soon as they build their model."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dask
import distributed  # noqa: F401, it registers its settings
import psutil
import pytest

from precision_time.storage.schema import Environment, GridCell
from precision_time.tasks.processes import fork_client as warm_starts
from precision_time.tasks.processes import rank_process
from precision_time.tasks.processes.fork_client import Templates
from precision_time.tasks.processes.rank_process import run_rank
from precision_time.tasks.processes.running_ranks import end_ranks
from precision_time.tasks.ranks.job import MeasurementLimits, RankJob
from precision_time.tasks.ranks.rank import PARENT_VARIABLE

ENVIRONMENT = Environment(device_type="cpu", gpu="cpu-test-2c", cpu_model="test", cpu_cores=2, backend="gloo")
NO_TEMPLATE = rank_process._TEMPLATE_VARIABLE


@pytest.fixture(scope="module", autouse=True)
def templates(tmp_path_factory):
    """One template for all tests of this file; ranks find the scripted models, and what a test writes into ``own``."""
    own = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), str(own)]))
        patch.setenv("SCRIPTED_RANK_OUT", str(own / "told.json"))
        patch.setattr(rank_process, "_templates", Templates())
        # Here a busy machine must not bring a fresh interpreter.
        patch.setattr(warm_starts, "READY_S", 120.0)
        yield rank_process._templates
        if rank_process._templates._current is not None:
            rank_process._templates._current.kill()


def make_job(scratch, model, *, limits=None, world_size=1):
    # It changes with every test, and a changed environment gets a new template.
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    cell = GridCell(model=model, precision="fp32", world_size=world_size, per_gpu_batch_size=4)
    job = RankJob(
        cell=cell,
        attempt=1,
        environment=ENVIRONMENT,
        limits=limits or MeasurementLimits(timeout_s=60.0),
        scratch=str(scratch),
    )
    scratch.mkdir(exist_ok=True)
    (scratch / "job.json").write_text(job.to_json())
    return job.to_json()


def told():
    return json.loads(Path(os.environ["SCRIPTED_RANK_OUT"]).read_text())


def run(scratch, model, **options):
    return run_rank(make_job(scratch, model, **options), 0)


def template_pid(templates):
    return templates._current.process.pid


def run_in_thread(scratch, model):
    """A rank that runs until it is killed, in a thread as on a Dask worker, and the list its report comes to."""
    job, reports = make_job(scratch, model), []
    thread = threading.Thread(target=lambda: reports.append(run_rank(job, 0)))
    thread.start()
    return thread, reports


def wait_for(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come to pass")


@pytest.mark.parametrize("template", ["", "0"])
@pytest.mark.parametrize(("given", "left"), [("65536", None), ("131072", "131072")])
def test_a_rank_allocates_as_outside_dask(tmp_path, templates, monkeypatch, given, left, template):
    """What Dask wants of its workers' memory made training on a CPU 1.45 times as slow."""
    wanted = dask.config.get("distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_")
    assert str(wanted) == "65536"
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", given)
    monkeypatch.setenv(NO_TEMPLATE, template)
    assert run(tmp_path / "a", "scripted_ranks:tells")["cause"] == ""
    assert told()["environment"].get("MALLOC_TRIM_THRESHOLD_") == left


def test_a_forked_rank_finds_what_a_fresh_interpreter_finds(tmp_path, templates, monkeypatch):
    assert run(tmp_path / "a", "scripted_ranks:tells")["cause"] == ""
    forked = told()
    assert run(tmp_path / "a", "scripted_ranks:tells")["cause"] == ""
    again = told()
    monkeypatch.setenv(NO_TEMPLATE, "0")
    assert run(tmp_path / "a", "scripted_ranks:tells")["cause"] == ""
    fresh = told()

    assert (forked["parent"], fresh["parent"]) == (template_pid(templates), os.getpid())
    for seen in (forked, fresh):
        assert seen["environment"].pop(PARENT_VARIABLE) == str(seen.pop("parent"))
        assert not seen.pop("cuda")
        assert seen["leads_session"]
    del fresh["environment"][NO_TEMPLATE]
    draws = {seen.pop("numpy_draw") for seen in (forked, again, fresh)}
    assert len(draws) == 3
    assert len({seen.pop("pid") for seen in (forked, again, fresh)}) == 3
    assert forked.pop("data_kib") == pytest.approx(fresh.pop("data_kib"), rel=0.5)
    assert forked == fresh
    assert forked["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert forked["environment"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert forked["torch_threads"][0] == 2
    assert "a rank said this" in (tmp_path / "a" / "rank-0.log").read_text()


def test_ranks_of_several_cells_come_from_one_template_and_are_processes_of_their_own(tmp_path, templates):
    run(tmp_path / "a", "scripted_ranks:tells")
    first, pid = told(), template_pid(templates)
    run(tmp_path / "b", "scripted_ranks:tells")
    second = told()
    assert template_pid(templates) == pid
    assert first["parent"] == second["parent"] == pid
    assert first["pid"] != second["pid"]


def test_changed_code_of_the_user_is_seen(tmp_path):
    source = Path(os.environ["PYTHONPATH"].split(os.pathsep)[1]) / "changing.py"
    source.write_text("import os\n\n\ndef make():\n    os._exit(11)\n")
    assert run(tmp_path / "a", "changing:make")["cause"] == "exit code 11"
    source.write_text("import os\n\n\ndef make():\n    print('more words than before')\n    os._exit(12)\n")
    assert run(tmp_path / "b", "changing:make")["cause"] == "exit code 12"


@pytest.mark.parametrize(
    ("model", "template", "cause", "said"),
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
def test_how_a_rank_ended_is_told_alike(tmp_path, monkeypatch, model, template, cause, said):
    if template == "0":
        monkeypatch.setenv(NO_TEMPLATE, template)
    report = run(tmp_path / "a", model)
    assert report["cause"] == cause
    assert report["message"].startswith(said)
    assert not report["peer_lost"]


def test_a_rank_without_a_template_gets_a_fresh_interpreter(tmp_path, monkeypatch):
    monkeypatch.setattr(Templates, "fork", lambda self, request, *, is_over: None)
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
    Path(os.environ["SCRIPTED_RANK_OUT"]).unlink(missing_ok=True)
    thread, reports = run_in_thread(tmp_path / "a", "scripted_ranks:sleeps_with_family")
    wait_for(Path(os.environ["SCRIPTED_RANK_OUT"]).exists)
    assert end_ranks() == 1
    thread.join()
    assert reports[0]["cause"] == "signal 9"
    assert end_ranks() == 0
    wait_for(lambda: not any(lives(pid) for pid in told()["family"]))


def test_a_rank_that_was_ended_while_it_waited_for_its_template_never_begins(tmp_path, monkeypatch):
    waiting = threading.Event()

    def wait(self, request, *, is_over):
        waiting.set()
        wait_for(is_over)

    monkeypatch.setattr(Templates, "fork", wait)
    thread, reports = run_in_thread(tmp_path / "a", "scripted_ranks:ends")
    waiting.wait()
    assert end_ranks() == 1
    thread.join()
    assert reports[0]["cause"] == "signal 9"


def test_a_plain_process_runs_a_rank_and_leaves_no_template_behind(tmp_path):
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
    wait_for(lambda: not lives(told()["parent"]))


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
