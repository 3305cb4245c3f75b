"""CA-SGD against plain SGD where sums over ranks are slow (emulated), and on two local ranks without any delay.

    python tests/benchmarks/bench_casgd_latency.py [--delays-us 0 20 50 200] [--batch-sizes 4 16 64]

A report without assertions, as one JSON object. Emulation: one process, and a busy wait before every sum. The local
part starts two ranks with mpiexec and prints the time of s="auto" over that of SGD as the median of paired runs, with
its interval by order statistics (sign test, 95 %): once without planning, and once with the planning of the
estimators, for training of several lengths.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.communicator import DelayedCommunicator, OneProcess
from precision_time.casgd.mpi import MpiCommunicator
from precision_time.casgd.objectives import LOGISTIC
from precision_time.casgd.plan import plan
from precision_time.casgd.problem import Options, Problem, Schedule
from precision_time.casgd.training import choose_s

POWERS = tuple(2**k for k in range(6))
LENGTHS = (1, 10, 100)  # epochs of the runs whose time includes planning


def make_problem(columns: int, *, rows: int = 8192, seed: int = 0) -> Problem:
    x = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    y = np.where(np.random.default_rng(9).random(rows) < 0.5, -1.0, 1.0)
    return Problem(features=x, targets=y, objective=LOGISTIC)


def make_options(batch_size: int) -> Options:
    return Options(batch_size=batch_size, epochs=1, schedule=Schedule(eta0=1e-3))


def wall_s(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def emulate(delay_us: float, batch_size: int, *, repeats: int = 5) -> dict[str, Any]:
    """us per SGD-equivalent step, the least of ``repeats`` epochs, and the choice of the planner."""
    problem, options = make_problem(28), make_options(batch_size)
    comm = DelayedCommunicator(OneProcess(), delay_us * 1e-6)
    planned = plan(problem, options, comm=comm, largest_s=max(POWERS))
    steps = planned.steps_per_epoch
    by_s = {
        s: min(wall_s(lambda s=s: run_ca_sgd(problem, replace(options, s=s), comm=comm)) for _ in range(repeats))
        / steps
        * 1e6
        for s in POWERS
    }
    best = min(by_s, key=by_s.__getitem__)
    return {
        "delay_us": delay_us,
        "batch_size": batch_size,
        "sgd_us": by_s[1],
        "planned_s": planned.s,
        "best_s": best,
        "above_best": by_s[planned.s] / by_s[best] - 1,
        "speedup_over_sgd": by_s[1] / by_s[planned.s],
        "fit_error": planned.error,
        "predicted_epoch_s": [planned.low_s, planned.seconds_per_epoch, planned.high_s],
        "measured_epoch_s": by_s[planned.s] * steps * 1e-6,
        "step_us": by_s,
    }


def compare(ours: Callable[[], Any], theirs: Callable[[], Any], *, comm: MpiCommunicator, pairs: int) -> dict[str, Any]:
    """The time of ``ours`` over that of ``theirs`` on the slower rank: median of alternating pairs, its interval."""
    ratios = []
    for _ in range(pairs):
        times = []
        for run in (ours, theirs):
            comm.barrier()
            times.append(max(comm.gather(wall_s(run))))
        ratios.append(times[0] / times[1])
    ratios.sort()
    # The order statistics whose interval holds the median in 95 % of samples (normal approximation).
    reach = round(0.98 * pairs**0.5)
    low, high = max(0, pairs // 2 - reach), min(pairs - 1, pairs // 2 + reach)
    return {"auto_over_sgd": statistics.median(ratios), "low": ratios[low], "high": ratios[high]}


def run_rank(batch_size: int, columns: int, pairs: int) -> None:
    """One of two local ranks: s = "auto" over SGD, an epoch at a time without planning, then whole runs with it."""
    comm = MpiCommunicator(deadline_s=60.0)
    problem, options = make_problem(columns // 2, seed=comm.rank), make_options(batch_size)
    planned = plan(problem, options, comm=comm)
    report: dict[str, Any] = {"batch_size": batch_size, "columns": columns, "planned_s": planned.s}
    report |= compare(
        lambda: run_ca_sgd(problem, replace(options, s=planned.s), comm=comm),
        lambda: run_ca_sgd(problem, options, comm=comm),
        comm=comm,
        pairs=pairs,
    )
    report["with_planning"] = []
    for epochs in LENGTHS:
        longer, chosen_s = replace(options, epochs=epochs), []

        def auto(longer: Options = longer, chosen_s: list[int] = chosen_s) -> None:
            s, _ = choose_s(problem, longer, s="auto", comm=comm)
            chosen_s.append(s)
            run_ca_sgd(problem, replace(longer, s=s), comm=comm)

        ratio = compare(
            auto, lambda longer=longer: run_ca_sgd(problem, longer, comm=comm), comm=comm, pairs=max(5, pairs // 6)
        )
        report["with_planning"].append({"epochs": epochs, "chosen_s": chosen_s, **ratio})
    if comm.rank == 0:
        print(json.dumps(report), flush=True)


def run_locally(batch_size: int, columns: int, *, pairs: int = 31) -> dict[str, Any]:
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if mpiexec is None:
        return {"not run": "mpiexec is missing: pip install 'precision-time[mpi]'"}
    command = [mpiexec, "-n", "2", sys.executable, __file__, "--rank", *map(str, (batch_size, columns, pairs))]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env={**os.environ, **threads}, capture_output=True, text=True, timeout=600, check=False
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-1500:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delays-us", type=float, nargs="+", default=[0.0, 20.0, 50.0, 200.0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--rank", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(*options.rank)
        return
    report = {
        "emulated": [emulate(delay, b) for b in options.batch_sizes for delay in options.delays_us],
        "two_local_ranks": [run_locally(b, 28) for b in options.batch_sizes],
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
