"""One rank of a CA-SGD cell: make its columns of the data, time repeats of one epoch, write its fragment."""

import json
import math
import os
import resource
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.communicator import Communicator, OneProcess
from precision_time.casgd.errors import CommunicationError
from precision_time.casgd.gram import packed_gram_words
from precision_time.casgd.mpi import MpiCommunicator
from precision_time.casgd.objectives import find_objective
from precision_time.casgd.precision import find_policy
from precision_time.casgd.problem import Options, Problem, Schedule, Solution
from precision_time.storage.schema import IterationTiming
from precision_time.storage.timings import write_fragment
from precision_time.tasks.casgd_cells.cells import REPEAT_S, CasgdCell, casgd_environment
from precision_time.tasks.ranks.code_versions import find_tool_version
from precision_time.tasks.ranks.conditions import Conditions, MachineWatch
from precision_time.tasks.ranks.job import RankJob
from precision_time.tasks.ranks.rank import PARENT_VARIABLE, describe_failure
from precision_time.tasks.ranks.refusals import EnvironmentChangedError

__all__ = ["main"]

#: How long after the time limit of the cell a rank ends itself.
GRACE_S = 5.0
#: How soon a rank notices that the process which started the ranks is gone.
WATCH_S = 1.0


def main(job_path: str) -> None:
    """Warm up, measure, and write the rank's fragment; an error is written beside it and ends all ranks."""
    job = RankJob.from_json(Path(job_path).read_text(encoding="utf-8"))
    signal.alarm(int(job.limits.timeout_s + GRACE_S) + 1)  # no rank outlives its job, even without mpiexec
    _die_with_launcher()
    comm: Communicator = OneProcess()
    try:
        _limit_memory(job)
        _check_environment(job)
        if job.cell.world_size > 1:
            comm = MpiCommunicator(deadline_s=job.limits.timeout_s)
        _run(job, comm)
    except Exception as error:
        traceback.print_exc()
        report = describe_failure(error, precision=job.cell.precision)
        report["peer_lost"] = isinstance(error, CommunicationError) and comm.size > 1
        job.failure_path(comm.rank).write_text(json.dumps(report), encoding="utf-8")
        if comm.size > 1:
            comm.abort(report["message"])  # the others would wait for this rank
        sys.exit(1)


def _die_with_launcher() -> None:
    """End this process soon after the launcher; mpiexec, which stands between them, does not do so."""
    launcher = os.environ.get(PARENT_VARIABLE)
    if launcher is None:
        return

    def watch() -> None:
        while Path(f"/proc/{launcher}").exists():
            time.sleep(WATCH_S)
        os._exit(1)

    if Path("/proc/self").exists():
        threading.Thread(target=watch, name="launcher", daemon=True).start()


def _limit_memory(job: RankJob) -> None:
    limit = job.limits.memory_limit_bytes
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _check_environment(job: RankJob) -> None:
    version, planned = casgd_environment(job.environment).framework_version, job.environment.framework_version
    if version != planned:
        raise EnvironmentChangedError(f"this rank runs {version}, but the campaign was planned with {planned}")


def _run(job: RankJob, comm: Communicator) -> None:
    cell = CasgdCell.of(job.cell)
    problem, options = _make_problem(cell, rank=comm.rank)
    options = replace(options, epochs=_count_epochs(problem, options, comm))
    watch = MachineWatch(monitor=None, ranks_here=cell.ranks, cores=cell.ranks)
    began = time.monotonic()
    rows: list[IterationTiming] = []
    least, most = job.limits.warmup_steps + 3, job.limits.warmup_steps + job.limits.measured_steps
    while len(rows) < most:
        overdue = time.monotonic() - began > job.limits.seconds_per_cell
        if len(rows) >= least and any(comm.gather(overdue)):
            break
        comm.barrier()
        solution = run_ca_sgd(problem, options, comm=comm)
        rows.append(_row_of(solution, job=job, cell=cell, rank=comm.rank, step=len(rows), conditions=watch.end_block()))
    write_fragment(job.fragment_path(comm.rank), rows)
    comm.barrier()


def _count_epochs(problem: Problem, options: Options, comm: Communicator) -> int:
    """Epochs of a repeat, the same on every rank: so many that they last ``REPEAT_S`` at least."""
    seconds = sum(run_ca_sgd(problem, options, comm=comm).seconds.values())
    return int(max(comm.gather(math.ceil(REPEAT_S / max(seconds, 1e-6)))))


def _make_problem(cell: CasgdCell, *, rank: int) -> tuple[Problem, Options]:
    """This rank's columns of standard-normal features for whole outer steps, and the options of one epoch."""
    rows = cell.s * cell.batch_size * cell.outer_steps
    bounds = np.linspace(0, cell.columns, cell.ranks + 1).astype(int)
    kind = np.float64 if cell.policy == "fp64" else np.float32
    features = np.random.default_rng((0, rank)).standard_normal(
        (rows, int(bounds[rank + 1] - bounds[rank])), dtype=kind
    )
    signs = np.where(np.random.default_rng(1).random(rows) < 0.5, -1.0, 1.0)
    targets = {"logistic": signs, "squared": signs, "poisson": (1 + signs) / 2}[cell.objective]
    problem = Problem(features=features, targets=targets, objective=find_objective(cell.objective))
    # Such small steps cannot overflow, and the size of a step does not change its time.
    schedule = Schedule(kind="constant", eta0=1e-6)
    options = Options(
        s=cell.s, batch_size=cell.batch_size, epochs=1, schedule=schedule, policy=find_policy(cell.policy)
    )
    return problem, options


def _row_of(
    solution: Solution, *, job: RankJob, cell: CasgdCell, rank: int, step: int, conditions: Conditions
) -> IterationTiming:
    """The mean outer step of one repeat, as a row."""
    outer_steps = solution.steps // cell.s
    parts = {part: seconds / outer_steps for part, seconds in solution.seconds.items()}
    whole = sum(parts.values())
    warm = step < job.limits.warmup_steps
    word_bytes = 8 if cell.policy == "fp64" else 4
    block_rows = cell.s * cell.batch_size
    reduced = packed_gram_words(block_rows, cell.batch_size) + block_rows
    return IterationTiming(
        **job.row_columns(),
        **conditions.row_columns(),
        task_input=f"n{cell.columns}",
        effective_precision=job.cell.precision,
        rank=rank,
        step=step,
        is_warmup=warm,
        is_steady=True,
        iteration_time_s=whole,
        # As the docstring of cells.py pairs them.
        forward_time_s=parts["gather"] + parts["gram"],
        backward_time_s=parts["communicate"] + parts["recurrence"],
        optimizer_time_s=parts["update"],
        compute_time_s=None if warm else whole - parts["communicate"],
        communication_time_s=None if warm else parts["communicate"],
        exposed_communication_s=None if warm else parts["communicate"],
        bucket_count=1,
        bucket_bytes=word_bytes * reduced,
        bucket_sizes=str(word_bytes * reduced),
        loss_scale=None,
        step_skipped=False,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        model_params=cell.columns + 1,
        threads_per_rank=1,
        float32_matmul_precision="highest",
        recorded_at=time.time(),
        tool_version=find_tool_version(),
    )


if __name__ == "__main__":
    main(sys.argv[1])
