"""Start the ranks of a CA-SGD cell with mpiexec on this host, wait for them, and report how they ended."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from precision_time.storage.errors import InputError
from precision_time.storage.schema import GridCell
from precision_time.tasks.processes.process_families import kill_family
from precision_time.tasks.processes.rank_process import RankReport, report_loss
from precision_time.tasks.processes.running_ranks import register_rank
from precision_time.tasks.processes.training_environment import training_environment
from precision_time.tasks.ranks.job import RankJob
from precision_time.tasks.ranks.rank import OUT_OF_MEMORY, PARENT_VARIABLE

__all__ = ["check_mpi", "launch_ranks"]

_MISSING_MPI = "pip install 'precision-time[mpi]' (mpi4py and mpich), in the environment of the workers too"
_LOG_LINES = 12

#: Variables by which a process finds itself in another MPI job or in an allocation; the ranks of a cell are a job of
#: their own, on this host.
_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "PMIP_", "PRTE_", "OMPI_COMM_", "OMPI_UNIVERSE_", "HYDI_", "MPIEXEC_", "SLURM_")


def check_mpi(cells: Iterable[GridCell]) -> None:
    """Raise ``InputError`` when one of these CA-SGD cells has several ranks and no MPI can start them."""
    if all(cell.world_size == 1 for cell in cells):
        return
    lacking = [] if importlib.util.find_spec("mpi4py") else ["mpi4py"]
    lacking += [] if _find_mpiexec() else ["mpiexec"]
    if lacking:
        raise InputError(
            "CA-SGD on several ranks needs MPI",
            got=f"no {' and no '.join(lacking)}",
            fix=f"{_MISSING_MPI}, or gpus: [1]",
        )


def launch_ranks(job_json: str) -> RankReport:
    """Start the ranks of a job on this host with mpiexec (one rank: without), wait for them, and kill the rest.

    Ranks that exceed the time limit are killed. Runs on a Dask worker or in any other process; never raises for what
    the ranks do.
    """
    job = RankJob.from_json(job_json)
    scratch, ranks = Path(job.scratch), job.cell.world_size
    command = [sys.executable, "-m", "precision_time.tasks.casgd_cells.rank", str(scratch / "job.json")]
    if ranks > 1:
        mpiexec = _find_mpiexec()
        if mpiexec is None:
            return report_loss(f"mpiexec was not found; {_MISSING_MPI}", cause="exception")
        command = [mpiexec, "-n", str(ranks), *command]
    cause, message = _run(command, log=scratch / "ranks.log", timeout_s=job.limits.timeout_s)
    if cause and cause != "timed out":
        cause, message = _find_culprit(job) or (cause, message)
    return RankReport(
        cause=cause,
        message=message,
        fragments=[str(job.fragment_path(rank)) for rank in range(ranks)],
        peer_lost=False,
        ended_at=time.time(),
        host=socket.gethostname(),
    )


def _find_mpiexec() -> str | None:
    """The mpiexec beside this Python, which belongs to the library that mpi4py loads, or another one on the path."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return shutil.which("mpiexec", path=beside)


def _run(command: list[str], *, log: Path, timeout_s: float) -> tuple[str, str]:
    """Run a process, and leave no child of it: (cause, message) of its end, both empty when it ended well."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_environment(), start_new_session=True
        )  # fmt: skip
    with register_rank() as running:
        running.begin(process.pid)
        try:
            returncode = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "timed out", f"the ranks ran for more than {timeout_s:g} s"
        finally:
            kill_family(process.pid)
            process.wait()
    if returncode == 0:
        return "", ""
    text = log.read_text(encoding="utf-8", errors="replace")
    # mpiexec frames its message.
    lines = [line for raw in text.splitlines() if (line := raw.strip("= "))]
    cause = _name_end(returncode, text)
    return cause, "\n".join([f"the ranks ended with {cause}", *lines[-_LOG_LINES:]])[-2000:]


def _environment() -> dict[str, str]:
    variables = {
        name: value for name, value in training_environment().items() if not name.startswith(_LAUNCHER_PREFIXES)
    }
    return {
        **variables,
        PARENT_VARIABLE: str(os.getpid()),
        # One BLAS thread a rank: ranks that compete for the cores are ten times slower.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _name_end(returncode: int, text: str) -> str:
    """The cause of a job that ended with ``returncode``; mpiexec reports the signal of a rank only in its output."""
    if any(phrase in text.casefold() for phrase in OUT_OF_MEMORY):
        return "memory-limit"  # MPI aborts when it gets no memory
    number = re.search(r"\(signal (\d+)\)|on signal (\d+)", text)
    if returncode < 0:
        return f"signal {-returncode}"
    return f"signal {number[1] or number[2]}" if number else f"exit code {returncode}"


def _find_culprit(job: RankJob) -> tuple[str, str] | None:
    """(cause, message) that a rank wrote which failed by itself and not by the loss of a peer; None without one."""
    for rank in range(job.cell.world_size):
        with contextlib.suppress(OSError, ValueError, KeyError):
            failure = json.loads(job.failure_path(rank).read_text(encoding="utf-8"))
            if not failure["peer_lost"]:
                return str(failure["cause"]), f"rank {rank}: {failure['message']}"
    return None
