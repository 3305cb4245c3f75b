"""The process of a rank: start it, wait for it, end it at its deadline, and report how it ended."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit

from precision_time.storage.errors import InputError
from precision_time.storage.schema import Environment, GridCell
from precision_time.tasks.processes.fork_client import ForkClient, ForkedRank, ForkServerLost, RankRequest
from precision_time.tasks.processes.process_families import kill_family
from precision_time.tasks.processes.running_ranks import RunningRank, register_rank
from precision_time.tasks.processes.training_environment import training_environment
from precision_time.tasks.ranks.job import REFUSAL_CAUSES, Attempt, CellReceipt, MeasurementLimits, RankJob
from precision_time.tasks.ranks.rank import PARENT_VARIABLE

__all__ = ["RankReport", "assign_devices", "profile_here", "report_loss", "run_rank", "visible_devices"]

LOG_LINES = 8
_SELF_EXPLAINED = REFUSAL_CAUSES | {"nan loss", "environment changed"}
#: How long the report of a killed rank's end may take.
ENDING_S = 10.0

#: ``0`` starts every rank in a fresh interpreter, for comparisons.
_FORK_VARIABLE = "PRECISION_TIME_TEMPLATE"


_fork_client = ForkClient()


class RankReport(TypedDict):
    """How a rank, or all ranks of a launcher, ended; ``cause`` is empty when they ended well.

    ``fragments`` are the files that their rows belong in; ``peer_lost`` says that a rank failed only because another
    one had gone.
    """

    cause: str
    message: str
    fragments: list[str]
    peer_lost: bool
    ended_at: float
    host: str


def report_loss(message: str, *, cause: str = "lost contact") -> RankReport:
    """The report of ranks of which nothing is known but ``message``."""
    return RankReport(
        cause=cause, message=message, fragments=[], peer_lost=False, ended_at=time.time(), host=socket.gethostname()
    )


def run_rank(job_json: str, rank: int) -> RankReport:
    """Run one rank in a process and a session of its own, and kill that session at the deadline.

    The process is forked by the fork server, which has torch imported; without one it is a fresh interpreter. The
    deadline counts from its start. Runs on a Dask worker or in any other process; never raises for what the rank does.
    """
    job = RankJob.from_json(job_json)
    scratch = Path(job.scratch)
    log_path = scratch / f"rank-{rank}.log"
    log_path.write_bytes(b"")
    request = RankRequest(
        job=str(scratch / "job.json"), rank=rank, log=str(log_path), environment=_rank_environment(job, rank)
    )
    cause, message, peer_lost = "", "", False
    try:
        returncode = _run_process(request, timeout_s=job.limits.timeout_s)
    except TimeoutError:
        cause, message = "timed out", f"rank {rank} was killed after {job.limits.timeout_s:g} s"
    except ForkServerLost as error:
        cause, message = "lost contact", f"rank {rank}: {error}"
    else:
        if returncode != 0:
            cause, message, peer_lost = _read_failure(job.failure_path(rank), returncode=returncode)
            message = f"rank {rank}: {message}"
    # For causes of our own the rank's message is enough; for any other the end of its log is needed too.
    if cause and cause not in _SELF_EXPLAINED:
        message = "\n".join([message, *_last_lines(log_path)])
    return RankReport(
        cause=cause,
        message=message,
        fragments=[str(job.fragment_path(rank))],
        peer_lost=peer_lost,
        ended_at=time.time(),
        host=socket.gethostname(),
    )


def _run_process(request: RankRequest, *, timeout_s: float) -> int:
    """The exit code of the rank's process, of which nothing is left; raises ``TimeoutError`` and ``ForkServerLost``."""
    with register_rank() as running:
        # Linux only: elsewhere nothing ends a rank whose fork server died, and torch does not survive a fork on macOS.
        if sys.platform == "linux" and os.environ.get(_FORK_VARIABLE) != "0":
            forked = _fork_client.fork(request, is_over=lambda: running.is_ended)
            if forked is not None:
                return _await_forked(forked, running=running, timeout_s=timeout_s)
        if running.is_ended:
            return -signal.SIGKILL
        return _run_fresh(request, running=running, timeout_s=timeout_s)


def _await_forked(forked: ForkedRank, *, running: RunningRank, timeout_s: float) -> int:
    with forked.report:
        running.begin(forked.pid)
        try:
            return forked.wait(timeout_s)
        except BaseException:
            kill_family(forked.pid)
            # The server reaps it; only then is this worker free for another rank.
            with contextlib.suppress(TimeoutError, ForkServerLost):
                forked.wait(ENDING_S)
            raise


def _run_fresh(request: RankRequest, *, running: RunningRank, timeout_s: float) -> int:
    command = [sys.executable, "-m", "precision_time.tasks.ranks.rank", request.job, str(request.rank)]
    with open(request.log, "ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=request.environment, start_new_session=True
        )  # fmt: skip
    running.begin(process.pid)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    finally:
        # Its data loaders and compilers end with it, however it ended.
        kill_family(process.pid)
        process.wait()


def _rank_environment(job: RankJob, rank: int) -> dict[str, str]:
    threads = str(job.threads_per_rank)
    return {
        # On a CPU with anything else to do, threads that spin at barriers made a step of vit_tiny 30 times longer.
        "OMP_WAIT_POLICY": "PASSIVE",
        **training_environment(),
        PARENT_VARIABLE: str(os.getpid()),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # A CPU rank must not touch a GPU; a GPU rank sees its own alone, as cuda:0.
        "CUDA_VISIBLE_DEVICES": job.devices[rank] if job.devices else "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _read_failure(path: Path, *, returncode: int) -> tuple[str, str, bool]:
    """(cause, message, peer_lost) from the file that the rank left behind, else from the end of its process."""
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


def profile_here(cell: GridCell, *, environment: Environment, limits: MeasurementLimits, scratch: Path) -> CellReceipt:
    """The first attempt at ``cell``, of one rank on the first device that this process sees, without Dask.

    The attempt gets a folder of its own in ``scratch``. Raises ``InputError`` when no GPU is visible, and
    ``StorageError`` when the folder cannot be made.
    """
    attempt = Attempt(cell=cell, attempt=1, environment=environment)
    job = RankJob.of(attempt, limits=limits, scratch=scratch)
    if environment.device_type == "cuda":
        job = replace(job, devices=assign_devices([""], [os.environ.get("CUDA_VISIBLE_DEVICES")]))
    job.lay_out()
    began, started_at = time.monotonic(), time.time()
    report = run_rank(job.to_json(), 0)
    return job.conclude(
        cause=report["cause"],
        message=report["message"],
        host=report["host"],
        started_at=started_at,
        duration_s=time.monotonic() - began,
    )


def visible_devices() -> str | None:
    """The host's GPUs that this worker may use, by ``CUDA_VISIBLE_DEVICES``."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def assign_devices(workers: Sequence[str], visible: Sequence[str | None]) -> tuple[str, ...]:
    """The ``CUDA_VISIBLE_DEVICES`` entry of each rank, from its worker's address and that worker's own list.

    dask-cuda rotates the list so that a worker's own GPU comes first; plain workers of one host all have the same list
    and take its entries in turn. Raises ``InputError`` when a host has fewer GPUs than ranks.
    """
    devices: list[str] = []
    for index, (address, entries) in enumerate(zip(workers, visible, strict=True)):
        host = urlsplit(address).hostname
        before = [other for other in range(index) if urlsplit(workers[other]).hostname == host]
        if entries is None:
            devices.append(str(len(before)))
            continue
        taken = {devices[other] for other in before}
        free = [entry for entry in entries.split(",") if entry and entry not in taken]
        if not free:
            raise InputError(
                "a host has fewer GPUs than ranks",
                got=f"CUDA_VISIBLE_DEVICES={entries} for {len(before) + 1} ranks on {host}",
                expected="a GPU for every rank",
                fix="ask for fewer GPUs, or start the workers with dask-cuda",
            )
        devices.append(free[0])
    return tuple(devices)
