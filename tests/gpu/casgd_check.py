"""Measure the GPU back end of CA-SGD on one GPU, judge the results, and write both as JSON; casgd_check.sh runs it.

python tests/gpu/casgd_check.py OUT [--seconds N]. Each part has limits; a part that misses one, or fails, is named at
the end and makes the exit status 1. A part that cannot run here (no MPI, no NCCL), or for which no time is left, is
named as not run.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from precision_time.casgd import gpu
from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.communicator import DelayedCommunicator, OneProcess, Pending
from precision_time.casgd.kernels import SOURCE
from precision_time.casgd.mpi import MpiCommunicator
from precision_time.casgd.nccl import NcclCommunicator
from precision_time.casgd.objectives import find_objective
from precision_time.casgd.plan import plan
from precision_time.casgd.precision import POLICIES
from precision_time.casgd.problem import Options, Problem, Schedule

SHAPES = {"susy": (2**18, 18), "higgs": (2**18, 28), "epsilon": (2**15, 2000)}
PRODUCTS = ((64, 256, 1024, 4096), (18, 28, 500, 2000, 16384))  # rows, columns
RECURRENCES = ((8, 16), (64, 4), (16, 64), (32, 64))  # s, b
END_TO_END = ((16, 64, 256), (1, 4, 16, 64), 1024)  # b, s, steps of an epoch
DELAYS_US = (0, 20, 50)
PLANNED = (2**16, (16, 64), (1, 2, 4, 8, 16, 32, 64))  # rows, b, s
STORED = (2**14, 2000)
SUMMED = (1024, 128, 4, 64)  # rows, columns, s, b
REPEAT = 20  # calls that are timed together
RANK_ROWS = 4096

# The limits. 1e-6 of |Y| |Y|^T is for products of two different rows, which the solver uses. The product of a row with
# itself sums squares, all of one sign, and tensor cores truncate at the last place of the sum instead of rounding.
LARGEST_PRODUCT_ERROR = 1e-6
CUT_OFF = 2.0**-23  # of a sum of squares, a column at most
LARGEST_ITERATE_ERROR = 1e-5  # FP32 arithmetic in another order
LARGEST_LOSS_GAPS = {"fp32": 1e-4, "recipe": 5e-3, "paper": 5e-3}
LARGEST_ABOVE_BEST = 0.25  # of the planner's choice: probes of 20 outer steps of some 10 us are rough

# A kernel that takes about so many nanoseconds: the time that a slower network would add to a sum. One thread.
WAIT = """
#define HAS_WAIT_NS
extern "C" __global__ void wait_ns(unsigned long long nanoseconds) {
#ifdef __CUDA_ARCH__
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
#endif
}
"""


class NotRunError(Exception):
    """This part cannot run on this machine."""


def make_problem(m: int, n: int, *, objective: str = "logistic", seed: int = 0) -> Problem:
    """Standard-normal features scaled to rows of unit length, on the host."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, n), dtype=np.float32) / np.float32(np.sqrt(n))
    z = x @ rng.standard_normal(n, dtype=np.float32) * 2
    y = {"logistic": np.where(rng.random(m) < 1 / (1 + np.exp(-z)), 1.0, -1.0), "squared": z + rng.normal(0, 0.3, m)}
    targets = y[objective] if objective in y else rng.poisson(np.exp(z / 2)).astype(float)
    return Problem(features=x, targets=targets, objective=find_objective(objective), l2=1e-4)


def on_device(problem: Problem) -> Problem:
    import cupy

    return replace(problem, features=cupy.asarray(problem.features))


def make_options(policy: str, s: int, b: int, **more: Any) -> Options:
    settings = {"epochs": 1, "schedule": Schedule(kind="invscaling", eta0=0.5), **more}
    return Options(s=s, batch_size=b, policy=POLICIES[policy], **settings)


def seconds_of(launch: Callable[[], Any]) -> float:
    """Device seconds of one call, by events around ``REPEAT`` calls, the least of three."""
    import cupy

    launch()
    times_s = []
    for _ in range(3):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(REPEAT):
            launch()
        stop.record()
        stop.synchronize()
        times_s.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3 / REPEAT)
    return min(times_s)


def find_versions() -> dict[str, Any]:
    import cupy
    import ml_dtypes

    nccl = importlib.import_module("cupy.cuda.nccl")  # no attribute of cupy.cuda before that
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    values = np.array([1.0, 1 + 2.0**-8, 3.14159, 65504.0], dtype=np.float32)
    on_gpu = cupy.asarray(values).astype(ml_dtypes.bfloat16)
    product = cupy.matmul(on_gpu.reshape(2, 2), on_gpu.reshape(2, 2))
    return {
        "gpu": properties["name"].decode(),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "nccl_available": bool(nccl.available),
        "nccl": nccl.get_version() if nccl.available else None,
        "bf16_round_trip": bool((on_gpu.get().astype(np.float32) == values.astype(ml_dtypes.bfloat16)).all()),
        "bf16_matmul_dtype": str(product.dtype),
        "tf32_variable": os.environ.get("CUPY_TF32"),
    }


def check_products() -> list[dict[str, Any]]:
    """gemmEx in the arithmetic of three policies: error against float64, equal bits over repeats, rate."""
    results = []
    tf32 = POLICIES["fp32"].replace(name="tf32", x_storage="tf32")
    for rows in PRODUCTS[0]:
        for columns in PRODUCTS[1]:
            problem = on_device(make_problem(rows, columns))
            for policy in (POLICIES["recipe"], POLICIES["fp32"], tf32):
                options = replace(make_options("fp32", 2, rows // 2), policy=policy)
                run = gpu.DeviceRun(problem, options)
                run._prepare(rows, with_gram=True)
                block, gram = run._blocks[0], run._gram
                block[...] = run.device_features
                run._product.run(block, rows, gram)
                first = gram.get().reshape(rows, rows)
                run._product.run(block, rows, gram)
                stored = run.device_features.get()
                y = (stored.astype(np.uint32) << 16).view(np.float32) if stored.dtype == np.uint16 else stored
                y = y[:256].astype(np.float64)
                errors = np.abs(first[:256, :256] - y @ y.T) / (np.abs(y) @ np.abs(y).T)
                seconds = seconds_of(lambda run=run, rows=rows: run._product.run(run._blocks[0], rows, run._gram))
                results.append(
                    {
                        "rows": rows,
                        "columns": columns,
                        "policy": policy.name,
                        "error": float(np.tril(errors, -1).max()),
                        "error_of_squares": float(np.diag(errors).max()),
                        "equal_bits": bool((gram.get().reshape(rows, rows) == first).all()),
                        "us": seconds * 1e6,
                        "tflop_per_s": 2 * rows * rows * columns / seconds / 1e12,
                    }
                )
    return results


def check_recurrence() -> list[dict[str, Any]]:
    """One outer step against NumPy in float64 on the same rounded features, and the times of its kernels."""
    results = []
    for objective in ("logistic", "squared", "poisson"):
        for s, b in RECURRENCES:
            problem = make_problem(s * b, 128, objective=objective)
            options = make_options("recipe", s, b)
            exact = run_ca_sgd(
                problem, replace(options, policy=POLICIES["fp64"].replace(name="exact", x_storage="bf16"))
            )
            solution = run_ca_sgd(on_device(problem), options)
            run = gpu.DeviceRun(on_device(problem), options)
            run.pass_over(next(run.epochs()))
            results.append(
                {
                    "objective": objective,
                    "s": s,
                    "b": b,
                    "error": float(np.abs(solution.weights - exact.weights).max() / np.abs(exact.weights).max()),
                    "launched": list(run.launched),
                    "outer_step_us": seconds_of(lambda run=run, n=s * b: run._outer_step(0, n)) * 1e6,
                    **time_kernels(run, s * b),
                }
            )
    return results


def time_kernels(run: Any, rows: int) -> dict[str, float]:
    """Microseconds of each kernel of an outer step by itself."""
    times: dict[str, float] = {}
    plain = run._launch

    def timed(name: str, grid: Any, block: Any, arguments: Any, **more: int) -> None:
        times[f"{name}_us"] = seconds_of(lambda: run.kernels[name](grid, block, arguments, **more)) * 1e6
        plain(name, grid, block, arguments, **more)

    run._launch = timed
    run._outer_step(0, rows)
    run._launch = plain
    return times


def check_end_to_end() -> list[dict[str, Any]]:
    """us per SGD-equivalent step and the loss after an epoch, on one GPU, where s saves only launches."""
    results = []
    for shape, (m, n) in SHAPES.items():
        full = make_problem(m, n)
        for b in END_TO_END[0]:
            rows = min(m, END_TO_END[2] * b)
            problem = on_device(replace(full, features=full.features[:rows], targets=full.targets[:rows]))
            plain = None
            for policy in ("fp32", "recipe", "paper", "bf16-gram"):
                for s in END_TO_END[1]:
                    if s * b > 4096:
                        continue
                    run_ca_sgd(problem, make_options(policy, s, b))
                    solution = run_ca_sgd(problem, make_options(policy, s, b, epochs=2))
                    plain = plain or solution
                    step_s = sum(solution.seconds.values()) / solution.steps
                    results.append(
                        {
                            "shape": shape,
                            "b": b,
                            "s": s,
                            "policy": policy,
                            "step_us": step_s * 1e6,
                            "speedup": sum(plain.seconds.values()) / plain.steps / step_s,
                            "loss_gap": solution.loss_curve[-1] / plain.loss_curve[-1] - 1,
                            "parts": {name: value / solution.steps * 1e6 for name, value in solution.seconds.items()},
                        }
                    )
    return results


def check_nccl() -> dict[str, Any]:
    """Sums of one rank, with and without prefetch: correctness, cost, and whether a stream captures them."""
    import cupy

    if not importlib.import_module("cupy.cuda.nccl").available:
        raise NotRunError("CuPy finds no NCCL: pip install nvidia-nccl-cu12 or -cu13")
    comm = NcclCommunicator(OneProcess())
    results: dict[str, Any] = {"unchanged": True}
    for words in (64, 2**12, 2**16, 2**20):
        buffer = cupy.ones(words, dtype=np.float32)
        results[f"all_reduce_{words}_words_us"] = seconds_of(lambda buffer=buffer: comm.sum(buffer)) * 1e6
        results["unchanged"] &= bool((buffer.get() == 1).all())
    rows, columns, s, b = SUMMED
    problem = on_device(make_problem(rows, columns))
    for name, prefetch in {"in_turn": False, "prefetch": True}.items():
        options = make_options("recipe", s, b, prefetch=prefetch)
        joined, alone = (run_ca_sgd(problem, options, comm=ranks) for ranks in (comm, None))
        results[f"{name}_equal_bits"] = bool((joined.weights == alone.weights).all())
        results[f"{name}_step_us"] = sum(joined.seconds.values()) / joined.steps * 1e6
    run = gpu.DeviceRun(problem, make_options("recipe", 1, b), comm=comm)
    run.pass_over(next(run.epochs()))
    stream = cupy.cuda.Stream(non_blocking=True)

    def captured(launch: Callable[[], Any]) -> str:
        with stream:
            stream.begin_capture()
            try:
                launch()
                graph = stream.end_capture()
            except Exception as error:
                with contextlib.suppress(Exception):
                    stream.end_capture()
                return f"{type(error).__name__}: {error}"
            graph.launch()
            stream.synchronize()
        return "captured"

    run._timed = None  # events of a capture cannot be read
    results["graph_of_kernels_and_sum"] = captured(lambda: run._outer_step(0, b))
    whole = gpu.DeviceRun(problem, make_options("recipe", s, b))
    whole.pass_over(next(whole.epochs()))
    results["graph_of_gemm"] = captured(lambda: whole._product.run(whole._blocks[0], s * b, whole._gram))
    return results


class SpinCommunicator(DelayedCommunicator):
    """One rank whose sums wait on the device, to emulate the latency of a network."""

    def __init__(self, delay_s: float) -> None:
        import cupy

        super().__init__(OneProcess(), 0.0)
        self._delay_ns = np.uint64(round(delay_s * 1e9))
        self._wait = cupy.RawModule(code=SOURCE.read_text(encoding="utf-8") + WAIT).get_function("wait_ns")

    def sum(self, buffer: Any) -> None:
        super().sum(buffer)
        self._wait((1,), (1,), (self._delay_ns,))

    def start_sum(self, buffer: Any) -> Pending:
        pending = super().start_sum(buffer)
        self._wait((1,), (1,), (self._delay_ns,))
        return pending


def check_planner() -> list[dict[str, Any]]:
    """The s of the planner against the best of 1..64, with emulated latency."""
    results = []
    problem = on_device(make_problem(PLANNED[0], SHAPES["higgs"][1]))
    for delay_us in DELAYS_US:
        for b in PLANNED[1]:
            comm = SpinCommunicator(delay_us * 1e-6)
            options = make_options("recipe", 1, b)
            began = time.perf_counter()
            planned = plan(problem, options, comm=comm)
            took_s = time.perf_counter() - began
            measured: dict[int, float] = {}
            for s in sorted({*PLANNED[2], planned.s}):
                times = []
                for _ in range(2):
                    solution = run_ca_sgd(problem, replace(options, s=s), comm=comm)
                    times.append(sum(solution.seconds.values()) / solution.steps)
                measured[s] = min(times) * 1e6
            best = min(measured, key=measured.__getitem__)
            results.append(
                {
                    "delay_us": delay_us,
                    "b": b,
                    "s": planned.s,
                    "best_s": best,
                    "above_best": measured[planned.s] / measured[best] - 1,
                    "alpha_us": planned.alpha_s * 1e6,
                    "fit_error": planned.error,
                    "speedup": measured[1] / measured[planned.s],
                    "predicted_epoch_s": planned.seconds_per_epoch,
                    "measured_epoch_s": measured[planned.s] * 1e-6 * planned.steps_per_epoch,
                    "plan_s": took_s,
                    "measured_us": measured,
                }
            )
    return results


def check_two_ranks() -> dict[str, Any]:
    """Two MPI ranks on the one GPU, sums through host memory (NCCL refuses two ranks on one device)."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    mpiexec = shutil.which("mpiexec", path=beside)
    if mpiexec is None or importlib.util.find_spec("mpi4py") is None:
        raise NotRunError(f"no {'mpiexec' if mpiexec is None else 'mpi4py'}: pip install mpi4py mpich")
    command = [mpiexec, "-n", "2", sys.executable, __file__, "-", "--rank", str(RANK_ROWS)]
    # Open MPI refuses to run as root, which is usual in containers, without these two variables.
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    of_ranks = json.loads(done.stdout.splitlines()[-1])
    alone = run_ca_sgd(on_device(make_problem(RANK_ROWS, 64)), make_options("recipe", 8, 16, epochs=2))
    weights = np.concatenate([np.array(of_rank["weights"], dtype=np.float32) for of_rank in of_ranks])
    return {
        "equal_replicated_bits": of_ranks[0]["intercept"] == of_ranks[1]["intercept"]
        and of_ranks[0]["losses"] == of_ranks[1]["losses"],
        "prefetch_equal_bits": of_ranks[0]["prefetch_equal_bits"] and of_ranks[1]["prefetch_equal_bits"],
        "difference_to_one_rank": float(np.abs(weights - alone.weights).max() / np.abs(alone.weights).max()),
        "reductions": of_ranks[0]["reductions"],
        "outer_steps": 2 * -(-RANK_ROWS // 128),
        "step_us": of_ranks[0]["step_us"],
    }


def run_rank(rows: int) -> None:
    """One of the two ranks: 32 of the 64 columns."""
    comm = MpiCommunicator(deadline_s=60.0, gpu_aware=False)
    if comm.size != 2:
        raise RuntimeError(f"{comm.size} ranks, expected 2: mpiexec and mpi4py are of two MPI libraries")
    problem = make_problem(rows, 64)
    half = np.ascontiguousarray(problem.features[:, 32 * comm.rank : 32 * (comm.rank + 1)])
    part, options = on_device(replace(problem, features=half)), make_options("recipe", 8, 16, epochs=2)
    solution = run_ca_sgd(part, options, comm=comm)
    ahead = run_ca_sgd(part, replace(options, prefetch=True), comm=comm)
    of_ranks = comm.gather(
        {
            "weights": [float(value) for value in solution.weights],
            "intercept": solution.intercept.hex(),
            "losses": [value.hex() for value in solution.loss_curve],
            "prefetch_equal_bits": bool((ahead.weights == solution.weights).all()),
            "reductions": solution.reductions,
            "step_us": sum(solution.seconds.values()) / solution.steps * 1e6,
        }
    )
    if comm.rank == 0:
        print(json.dumps(of_ranks), flush=True)


def check_memory() -> dict[str, int]:
    problem = on_device(make_problem(*STORED))
    return {
        policy: int(gpu.DeviceRun(problem, make_options(policy, 1, 64)).device_features.nbytes)
        for policy in ("fp32", "fp16", "recipe")
    }


PARTS = {
    "versions": find_versions,
    "products": check_products,
    "recurrence": check_recurrence,
    "memory": check_memory,
    "two_ranks": check_two_ranks,
    "nccl": check_nccl,
    "planner": check_planner,
    "end_to_end": check_end_to_end,
}


def find_misses(part: str, result: Any) -> list[str]:
    """The results of a part that are beyond its limits, in words; times are reported and not judged."""
    misses = []

    def expect(holds: bool, what: str) -> None:
        if not holds:
            misses.append(what)

    if part == "versions":
        expect(result["bf16_round_trip"], "numbers change on their way through bfloat16")
    if part == "products":
        for row in result:
            of = f"{row['policy']}, {row['rows']} x {row['columns']}"
            limit = LARGEST_PRODUCT_ERROR
            expect(row["error"] <= limit, f"{of}: error {row['error']:.2g}, above {limit:g}")
            limit += CUT_OFF * row["columns"]
            expect(row["error_of_squares"] <= limit, f"{of}: squares {row['error_of_squares']:.2g}, above {limit:.2g}")
            expect(row["equal_bits"], f"{of}: two products of the same numbers differ")
    if part == "recurrence":
        for row in result:
            of, limit = f"{row['objective']}, s={row['s']}, b={row['b']}", LARGEST_ITERATE_ERROR
            expect(row["error"] <= limit, f"{of}: error {row['error']:.2g}, above {limit:g}")
            launches = [name for name in gpu.LAUNCHES if name != "all_reduce"]
            expect(row["launched"] == launches, f"{of}: {row['launched']} instead of {launches}")
    if part == "memory":
        expect(2 * result["recipe"] == 2 * result["fp16"] == result["fp32"], f"16 bits are not half of 32: {result}")
    if part == "two_ranks":
        for name in ("equal_replicated_bits", "prefetch_equal_bits"):
            expect(result[name], f"{name} is not so")
        difference, limit = result["difference_to_one_rank"], LARGEST_ITERATE_ERROR
        expect(difference <= limit, f"weights differ from those of one rank by {difference:.2g}, above {limit:g}")
        sums = f"{result['reductions']} sums in {result['outer_steps']} outer steps"
        expect(result["reductions"] == result["outer_steps"], sums)
    if part == "nccl":
        for name in ("unchanged", "in_turn_equal_bits", "prefetch_equal_bits"):
            expect(result[name], f"{name} is not so")
    if part == "planner":
        for row in result:
            of, limit = f"{row['delay_us']} us, b={row['b']}", LARGEST_ABOVE_BEST
            slower = f"s={row['s']} is {row['above_best']:.0%} slower than s={row['best_s']}, above {limit:.0%}"
            expect(row["above_best"] <= limit, f"{of}: {slower}")
    if part == "end_to_end":
        for row in result:
            of, limit = f"{row['shape']}, {row['policy']}, s={row['s']}, b={row['b']}", LARGEST_LOSS_GAPS
            expect(math.isfinite(row["loss_gap"]), f"{of}: no loss")
            if row["policy"] in limit:
                gap = f"{of}: loss {row['loss_gap']:+.2%}, beyond {limit[row['policy']]:.2%}"
                expect(abs(row["loss_gap"]) <= limit[row["policy"]], gap)
    return misses


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=320.0)
    parser.add_argument("--rank", type=int, metavar="ROWS")
    options = parser.parse_args(arguments)
    if options.rank:
        run_rank(options.rank)
        return 0
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    failed: list[str] = []
    not_run: list[str] = []
    results: dict[str, Any] = {"not_shown": "the speed-up of a cluster: it needs two or more GPUs joined by NCCL"}
    for name, check in PARTS.items():
        start = time.monotonic()
        try:
            if start - began > options.seconds - 20:
                raise NotRunError(f"{options.seconds:g} s were over")
            results[name] = check()
            misses = find_misses(name, results[name])
            if misses:
                failed.append(f"{name}: {'; '.join(misses[:4])}{f' and {len(misses) - 4} more' * (len(misses) > 4)}")
                results[f"{name}_misses"] = misses
        except NotRunError as error:
            not_run.append(f"{name}: {error}")
            results[name] = {"not_run": str(error)}
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            results[name] = {"error": traceback.format_exc()[-3000:]}
        results[f"{name}_took_s"] = time.monotonic() - start
        print(f"{name}: {results[f'{name}_took_s']:.1f} s", flush=True)
        results |= {"failed": failed, "not_run": not_run}
        # Written after every part, so that an interrupted run keeps its results.
        (folder / "casgd.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for text in not_run:
        print(f"not run: {text}")
    for text in failed:
        print(f"FAILED: {text}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
