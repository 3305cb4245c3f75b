"""Ranks of the scripted models, run as on a worker by a fork server of the test's own, and what is left of them."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from precision_time.storage.schema import GridCell
from precision_time.tasks.processes import fork_client, rank_process
from precision_time.tasks.processes.rank_process import RankReport, run_rank
from precision_time.tasks.ranks.job import MeasurementLimits
from precision_time.tests.tasks import builders

OUT_VARIABLE = "SCRIPTED_RANK_OUT"


@contextlib.contextmanager
def open_forks(own: Path) -> Iterator[fork_client.ForkClient]:
    """A fork client whose ranks find the scripted models and the modules in ``own``, where they also write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(own)]))
        patch.setenv(OUT_VARIABLE, str(own / "told.json"))
        forks = fork_client.ForkClient()
        patch.setattr(rank_process, "_fork_client", forks)
        # Here a busy machine must not bring a fresh interpreter.
        patch.setattr(fork_client, "READY_S", 120.0)
        yield forks
        if forks._current is not None:
            forks._current.kill()


def server_pid(forks: fork_client.ForkClient) -> int:
    return forks._current.process.pid


def make_job(scratch: Path, model: str, **limits: Any) -> str:
    """The JSON of a job of one rank that runs ``model``, also written to ``job.json`` in ``scratch``."""
    # It changes with every test, and a changed environment gets a new fork server.
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    cell = GridCell(model=model, precision="fp32", world_size=1, per_gpu_batch_size=4)
    job = builders.make_job(scratch, cell, limits=MeasurementLimits(**{"timeout_s": 60.0, **limits}))
    scratch.mkdir(exist_ok=True)
    (scratch / "job.json").write_text(job.to_json())
    return job.to_json()


def run(scratch: Path, model: str, **limits: Any) -> RankReport:
    return run_rank(make_job(scratch, model, **limits), 0)


def run_in_thread(scratch: Path, model: str) -> tuple[threading.Thread, list[RankReport]]:
    """A rank that runs until it is killed, in a thread as on a Dask worker, and the list that gets its report."""
    job, reports = make_job(scratch, model), []
    thread = threading.Thread(target=lambda: reports.append(run_rank(job, 0)))
    thread.start()
    return thread, reports


def told() -> dict[str, Any]:
    """What the last rank wrote of itself; empty before it has."""
    with contextlib.suppress(FileNotFoundError):
        return json.loads(Path(os.environ[OUT_VARIABLE]).read_text())
    return {}


def forget() -> None:
    Path(os.environ[OUT_VARIABLE]).unlink(missing_ok=True)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], Any], *, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)


def wait_until_gone(pids: list[int]) -> list[int]:
    """The processes that still live; a killed one takes a moment."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not any(map(lives, pids)), within_s=20.0)
    return [pid for pid in pids if lives(pid)]
