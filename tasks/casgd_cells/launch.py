"""Start the ranks of a CA-SGD cell with mpiexec on this host, wait for them, and say how they ended."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

from precision_time.storage.errors import InputError
from precision_time.storage.schema import GridCell
from precision_time.tasks.casgd_cells.cells import is_glm
from precision_time.tasks.processes.environment import training_environment
from precision_time.tasks.processes.process_families import kill_family
from precision_time.tasks.processes.running_ranks import register_rank
from precision_time.tasks.ranks.job import RankJob
from precision_time.tasks.ranks.rank import OUT_OF_MEMORY, PARENT_VARIABLE, failure_path

__all__ = ["LaunchReport", "check_mpi", "launch_ranks", "lose_ranks"]

_MISSING_MPI = "pip install 'precision-time[mpi]' (mpi4py and mpich), in the environment of the workers too"
_LOG_LINES = 12

#: Variables by which a process knows that it is a rank of a job, or a launcher that it stands in another one's
#: allocation: the ranks of a cell are a job of their own, on this host.
_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "PMIP_", "PRTE_", "OMPI_COMM_", "OMPI_UNIVERSE_", "HYDI_", "MPIEXEC_", "SLURM_")


class LaunchReport(TypedDict):
    """How the ranks of a cell ended; ``cause`` is empty when all of them ended well."""

    cause: str
    message: str
    host: str


def check_mpi(cells: Iterable[GridCell]) -> None:
    """Raise ``InputError`` when ``cells`` hold one of CA-SGD on several ranks and no MPI can start them."""
    if not any(is_glm(cell.model) and cell.world_size > 1 for cell in cells):
        return
    lacking = [] if importlib.util.find_spec("mpi4py") else ["mpi4py"]
    lacking += [] if _find_mpiexec() else ["mpiexec"]
    if lacking:
        raise InputError(
            "CA-SGD on several ranks needs MPI",
            got=f"no {' and no '.join(lacking)}",
            fix=f"{_MISSING_MPI}, or gpus: [1]",
        )


def lose_ranks(message: str, *, cause: str = "lost contact") -> LaunchReport:
    """The report of ranks of which nothing is known but ``message``."""
    return LaunchReport(cause=cause, message=message, host=socket.gethostname())


def launch_ranks(job_json: str) -> LaunchReport:
    """Start the ranks of a job on this host with mpiexec (one rank: without), wait for them, and end what is left.

    Ranks that outlast the time limit are killed. Runs on a Dask worker or in any other process; never raises for what
    the ranks do.
    """
    job = RankJob.from_json(job_json)
    scratch, ranks = Path(job.scratch), job.cell.world_size
    command = [sys.executable, "-m", "precision_time.tasks.casgd_cells.rank", str(scratch / "job.json")]
    if ranks > 1:
        mpiexec = _find_mpiexec()
        if mpiexec is None:
            return lose_ranks(f"mpiexec was not found; {_MISSING_MPI}", cause="exception")
        command = [mpiexec, "-n", str(ranks), *command]
    cause, message = _run(command, log=scratch / "ranks.log", timeout_s=job.limits.timeout_s)
    if cause and cause != "timed out":
        cause, message = _find_culprit(scratch, ranks=ranks) or (cause, message)
    return LaunchReport(cause=cause, message=message, host=socket.gethostname())


def _find_mpiexec() -> str | None:
    """The mpiexec beside this Python first: it belongs to the library that mpi4py loads."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return shutil.which("mpiexec", path=beside)


def _run(command: list[str], *, log: Path, timeout_s: float) -> tuple[str, str]:
    """(cause, message) of a process and its children, of which none is left; empty when it ended well."""
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
    # mpiexec frames its words.
    lines = [line for raw in text.splitlines() if (line := raw.strip("= "))]
    cause = _name_end(returncode, text)
    return cause, "\n".join([f"the ranks ended with {cause}", *lines[-_LOG_LINES:]])[-2000:]


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in training_environment().items() if not name.startswith(_LAUNCHER_PREFIXES)}
    return {
        **kept,
        PARENT_VARIABLE: str(os.getpid()),
        # One BLAS thread a rank: ranks that fight for the cores are ten times slower.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _name_end(returncode: int, text: str) -> str:
    """The cause of a job that ended with ``returncode``; mpiexec tells the signal of a rank only in words."""
    if any(phrase in text.casefold() for phrase in OUT_OF_MEMORY):
        return "memory-limit"  # MPI aborts where it gets none
    told = re.search(r"\(signal (\d+)\)|on signal (\d+)", text)
    if returncode < 0:
        return f"signal {-returncode}"
    return f"signal {told[1] or told[2]}" if told else f"exit code {returncode}"


def _find_culprit(scratch: Path, *, ranks: int) -> tuple[str, str] | None:
    """(cause, message) that a rank left behind which did not only lose a peer; None where no rank did."""
    for rank in range(ranks):
        with contextlib.suppress(OSError, ValueError, KeyError):
            said = json.loads(failure_path(scratch, rank).read_text(encoding="utf-8"))
            if not said["peer_lost"]:
                return str(said["cause"]), f"rank {rank}: {said['message']}"
    return None
