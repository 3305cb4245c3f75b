"""The worker's side of a rank: start it in a fresh process, wait for it, end it at its deadline, say how it ended."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TypedDict

from precision_time.tasks.job import RankJob
from precision_time.tasks.ranks import PARENT_VARIABLE, failure_path, fragment_path

__all__ = ["RankReport", "end_ranks", "run_rank", "visible_devices"]

LOG_LINES = 8

#: Processes of this worker's ranks. A lock, since ``end_ranks`` runs beside the thread that waits for the rank.
_running: dict[int, subprocess.Popen[bytes]] = {}
_running_lock = threading.Lock()


class RankReport(TypedDict):
    """How one rank ended; ``peer_lost`` says that it failed only because another one had gone."""

    rank: int
    returncode: int | None
    cause: str
    message: str
    fragment: str
    peer_lost: bool
    ended_at: float
    host: str


def run_rank(job_json: str, rank: int) -> RankReport:
    """Run one rank in a fresh process of its own session, and kill that session at the deadline.

    Runs on a Dask worker; never raises for what the rank does.
    """
    job = RankJob.from_json(job_json)
    scratch = Path(job.scratch)
    log_path = scratch / f"rank-{rank}.log"
    command = [sys.executable, "-m", "precision_time.tasks.ranks", str(scratch / "job.json"), str(rank)]
    timed_out = False
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_rank_environment(job, rank),
            start_new_session=True,
        )  # fmt: skip
        with _running_lock:
            _running[process.pid] = process
        try:
            process.wait(job.limits.timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            # Its whole session: data loaders and compilers of the rank go with it, however it ended.
            _kill_session(process.pid)
            process.wait()
            with _running_lock:
                _running.pop(process.pid, None)
    cause, message, peer_lost = "", "", False
    if timed_out:
        cause, message = "timed out", f"rank {rank} was killed after {job.limits.timeout_s:g} s"
    elif process.returncode != 0:
        cause, message, peer_lost = _read_failure(failure_path(scratch, rank), returncode=process.returncode)
        message = f"rank {rank}: {message}"
    if cause:
        message = "\n".join([message, *_last_lines(log_path)])
    return RankReport(
        rank=rank,
        returncode=process.returncode,
        cause=cause,
        message=message,
        fragment=str(fragment_path(scratch, rank)),
        peer_lost=peer_lost,
        ended_at=time.time(),
        host=socket.gethostname(),
    )


def _rank_environment(job: RankJob, rank: int) -> dict[str, str]:
    threads = str(job.threads_per_rank)
    return {
        # On a CPU with anything else to do, threads that spin at barriers made a step of vit_tiny 30 times longer.
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        PARENT_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # A CPU rank must not touch a GPU, a GPU rank only its own: it is cuda:0 there.
        "CUDA_VISIBLE_DEVICES": job.devices[rank] if job.devices else "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _read_failure(path: Path, *, returncode: int) -> tuple[str, str, bool]:
    """(cause, message, peer_lost) from what the rank left behind, else from how its process ended."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        values = json.loads(path.read_text(encoding="utf-8"))
        return str(values["cause"]), str(values["message"]), bool(values["peer_lost"])
    if returncode < 0:
        return f"signal {-returncode}", f"the process was ended by {_signal_name(-returncode)}", False
    return f"exit code {returncode}", f"the process ended with exit code {returncode}", False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    return []


def _kill_session(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def end_ranks() -> int:
    """Kill every rank process of this worker and their children; returns how many there were.

    Small on purpose: ``Client.run`` runs it on the worker's event loop.
    """
    with _running_lock:
        for pid in _running:
            _kill_session(pid)
        return len(_running)


def visible_devices() -> str | None:
    """What this worker may use of the host's GPUs, as ``CUDA_VISIBLE_DEVICES`` says it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
