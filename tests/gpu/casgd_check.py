"""Measure the GPU back end of CA-SGD on one GPU and write what was found as JSON; casgd_check.sh runs it.

python tests/gpu/casgd_check.py OUT [--seconds N]. A part that fails is a result with its error; a part for which no
time is left is named as skipped.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from precision_time.casgd import gpu
from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.comm import MpiCommunicator, NcclCommunicator, OneProcess
from precision_time.casgd.objectives import find_objective
from precision_time.casgd.plan import plan
from precision_time.casgd.precision import POLICIES
from precision_time.casgd.problem import Options, Problem
from precision_time.casgd.schedules import Schedule

SHAPES = {"susy": (2**18, 18), "higgs": (2**18, 28), "epsilon": (2**15, 2000)}
START = {"comm": None, "intercept": 0.0, "first_step": 0, "first_epoch": 0}


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
    given = {"epochs": 1, "schedule": Schedule(kind="invscaling", eta0=0.5), **more}
    return Options(s=s, batch_size=b, policy=POLICIES[policy], **given)


def seconds_of(launch: Callable[[], Any], *, repeat: int = 20) -> float:
    """Device seconds of one call, by events about ``repeat`` of them, the least of three."""
    import cupy

    launch()
    found = []
    for _ in range(3):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        for _ in range(repeat):
            launch()
        stop.record()
        stop.synchronize()
        found.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3 / repeat)
    return min(found)


def find_versions() -> dict[str, Any]:
    import cupy
    import ml_dtypes

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    values = np.array([1.0, 1 + 2.0**-8, 3.14159, 65504.0], dtype=np.float32)
    there = cupy.asarray(values).astype(ml_dtypes.bfloat16)
    product = cupy.matmul(there.reshape(2, 2), there.reshape(2, 2))
    return {
        "gpu": properties["name"].decode(),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "nccl_available": bool(cupy.cuda.nccl.available),
        "nccl": cupy.cuda.nccl.get_version() if cupy.cuda.nccl.available else None,
        "bf16_round_trip": bool((there.get().astype(np.float32) == values.astype(ml_dtypes.bfloat16)).all()),
        "bf16_matmul_dtype": str(product.dtype),
        "tf32_variable": os.environ.get("CUPY_TF32"),
    }


def check_products() -> list[dict[str, Any]]:
    """gemmEx in the arithmetic of three policies: error against float64, equal bits over repeats, rate."""
    results = []
    tf32 = POLICIES["fp32"].replace(name="tf32", x_storage="tf32")
    for rows in (64, 256, 1024, 4096):
        for columns in (18, 28, 500, 2000, 16384):
            problem = on_device(make_problem(rows, columns))
            for policy in (POLICIES["recipe"], POLICIES["fp32"], tf32):
                options = replace(make_options("fp32", 2, rows // 2), policy=policy)
                run = gpu.DeviceRun(problem, options, **START)
                run._prepare(rows, with_gram=True)
                run._block[...] = run.device_features
                run._multiply(rows)
                first = run._gram.get().reshape(rows, rows)
                run._multiply(rows)
                stored = run.device_features.get()
                y = (stored.astype(np.uint32) << 16).view(np.float32) if stored.dtype == np.uint16 else stored
                y = y[:256].astype(np.float64)
                exact, size = y @ y.T, np.abs(y) @ np.abs(y).T
                seconds = seconds_of(lambda run=run, rows=rows: run._multiply(rows))
                results.append(
                    {
                        "rows": rows,
                        "columns": columns,
                        "policy": policy.name,
                        "error": float((np.abs(first[:256, :256] - exact) / size).max()),
                        "equal_bits": bool((run._gram.get().reshape(rows, rows) == first).all()),
                        "us": seconds * 1e6,
                        "tflop_per_s": 2 * rows * rows * columns / seconds / 1e12,
                    }
                )
    return results


def check_recurrence() -> list[dict[str, Any]]:
    """One outer step against NumPy in float64 on the same rounded features, and what its kernels take."""
    results = []
    for objective in ("logistic", "squared", "poisson"):
        for s, b in ((8, 16), (64, 4), (16, 64), (32, 64)):
            problem = make_problem(s * b, 128, objective=objective)
            options = make_options("recipe", s, b)
            exact = run_ca_sgd(
                problem, replace(options, policy=POLICIES["fp64"].replace(name="exact", x_storage="bf16"))
            )
            found = gpu.run_ca_sgd(on_device(problem), options)
            run = gpu.DeviceRun(on_device(problem), options, **START)
            run.pass_over(next(run.epochs()), s)
            results.append(
                {
                    "objective": objective,
                    "s": s,
                    "b": b,
                    "error": float(np.abs(found.weights - exact.weights).max() / np.abs(exact.weights).max()),
                    "launched": run.launched,
                    "outer_step_us": seconds_of(lambda run=run, n=s * b: run._outer_step(0, n, None)) * 1e6,
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
    run._outer_step(0, rows, None)
    run._launch = plain
    return times


def check_end_to_end() -> list[dict[str, Any]]:
    """us per SGD-equivalent step and the loss after an epoch, one GPU: what is saved are launches only."""
    results = []
    for shape, (m, n) in SHAPES.items():
        whole = make_problem(m, n)
        for b in (16, 64, 256):
            rows = min(m, 1024 * b)
            problem = on_device(replace(whole, features=whole.features[:rows], targets=whole.targets[:rows]))
            plain = None
            for policy in ("fp32", "recipe", "paper", "bf16-gram"):
                for s in (1, 4, 16, 64):
                    if s * b > 4096:
                        continue
                    gpu.run_ca_sgd(problem, make_options(policy, s, b))
                    found = gpu.run_ca_sgd(problem, make_options(policy, s, b, epochs=2))
                    plain = plain or found
                    step_s = sum(found.seconds.values()) / found.steps
                    results.append(
                        {
                            "shape": shape,
                            "b": b,
                            "s": s,
                            "policy": policy,
                            "step_us": step_s * 1e6,
                            "speedup": sum(plain.seconds.values()) / plain.steps / step_s,
                            "loss_gap": found.loss_curve[-1] / plain.loss_curve[-1] - 1,
                            "parts": {name: value / found.steps * 1e6 for name, value in found.seconds.items()},
                        }
                    )
    return results


def check_nccl() -> dict[str, Any]:
    """What a call costs with one rank, and what a stream can capture."""
    import cupy

    comm = NcclCommunicator(OneProcess())
    results: dict[str, Any] = {}
    for words in (64, 2**12, 2**16, 2**20):
        buffer = cupy.ones(words, dtype=np.float32)
        results[f"all_reduce_{words}_words_us"] = seconds_of(lambda buffer=buffer: comm.sum(buffer)) * 1e6
    problem = on_device(make_problem(1024, 128))
    run = gpu.DeviceRun(problem, make_options("recipe", 1, 64), **{**START, "comm": comm})
    run.pass_over(next(run.epochs()), 1)
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

    rows = 64
    results["graph_of_kernels_and_sum"] = captured(lambda: run._outer_step(0, rows, None))
    pair = gpu.DeviceRun(problem, make_options("recipe", 4, 64), **START)
    pair.pass_over(next(pair.epochs()), 4)
    results["graph_of_gemm"] = captured(lambda: pair._multiply(256))
    return results


class SpinCommunicator(OneProcess):
    """One process whose sums wait on the device: a network's latency, emulated."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        import cupy

        self._delay_ns = np.uint64(round(delay_s * 1e9))
        self._wait = cupy.RawModule(code=gpu.SOURCE.read_text()).get_function("wait_ns")

    def sum(self, buffer: Any) -> None:
        super().sum(buffer)
        self._wait((1,), (1,), (self._delay_ns,))


class Emulated:
    """A SpinCommunicator that the planner does not take for one process."""

    def __init__(self, inner: SpinCommunicator) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def check_planner() -> list[dict[str, Any]]:
    """The planner's s beside the best of 1..64, with emulated latency."""
    results = []
    problem = on_device(make_problem(2**16, SHAPES["higgs"][1]))
    for delay_us in (0, 20, 50):
        for b in (16, 64):
            comm = Emulated(SpinCommunicator(delay_us * 1e-6))
            options = make_options("recipe", 1, b)
            began = time.perf_counter()
            made = plan(problem, options, comm=comm)
            took_s = time.perf_counter() - began
            measured = {}
            for s in (1, 2, 4, 8, 16, 32, 64):
                times = []
                for _ in range(2):
                    found = run_ca_sgd(problem, replace(options, s=s), comm=comm)
                    times.append(sum(found.seconds.values()) / found.steps)
                measured[s] = min(times) * 1e6
            best = min(measured, key=measured.__getitem__)
            results.append(
                {
                    "delay_us": delay_us,
                    "b": b,
                    "s": made.s,
                    "best_s": best,
                    "above_best": measured[made.s] / measured[best] - 1,
                    "alpha_us": made.alpha_s * 1e6,
                    "fit_error": made.error,
                    "speedup": measured[1] / measured[made.s],
                    "predicted_epoch_s": made.seconds_per_epoch,
                    "measured_epoch_s": measured[made.s] * 1e-6 * made.steps_per_epoch,
                    "plan_s": took_s,
                    "measured_us": measured,
                }
            )
    return results


def check_two_ranks() -> dict[str, Any]:
    """Two MPI ranks on the one GPU, sums through host memory (NCCL refuses two ranks on one device)."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    mpiexec = shutil.which("mpiexec", path=beside)
    if mpiexec is None:
        raise FileNotFoundError("mpiexec; install mpi4py and mpich")
    command = [mpiexec, "-n", "2", sys.executable, __file__, "-", "--rank"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    told = json.loads(done.stdout.splitlines()[-1])
    alone = gpu.run_ca_sgd(on_device(make_problem(4096, 64)), make_options("recipe", 8, 16, epochs=2))
    weights = np.concatenate([np.array(one["weights"], dtype=np.float32) for one in told])
    return {
        "equal_replicated_bits": told[0]["intercept"] == told[1]["intercept"]
        and told[0]["losses"] == told[1]["losses"],
        "difference_to_one_rank": float(np.abs(weights - alone.weights).max() / np.abs(alone.weights).max()),
        "reductions": told[0]["reductions"],
        "outer_steps": 2 * 32,
        "step_us": told[0]["step_us"],
    }


def run_rank() -> None:
    """One of the two ranks: 32 of the 64 columns."""
    comm = MpiCommunicator(deadline_s=60.0, gpu_aware=False)
    problem = make_problem(4096, 64)
    half = np.ascontiguousarray(problem.features[:, 32 * comm.rank : 32 * (comm.rank + 1)])
    found = gpu.run_ca_sgd(
        on_device(replace(problem, features=half)), make_options("recipe", 8, 16, epochs=2), comm=comm
    )
    told = comm.gather(
        {
            "weights": [float(value) for value in found.weights],
            "intercept": found.intercept.hex(),
            "losses": [value.hex() for value in found.loss_curve],
            "reductions": found.reductions,
            "step_us": sum(found.seconds.values()) / found.steps * 1e6,
        }
    )
    if comm.rank == 0:
        print(json.dumps(told), flush=True)


def check_memory() -> dict[str, int]:
    problem = on_device(make_problem(2**14, 2000))
    return {
        policy: int(gpu.DeviceRun(problem, make_options(policy, 1, 64), **START).device_features.nbytes)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=350.0)
    parser.add_argument("--rank", action="store_true")
    given = parser.parse_args()
    if given.rank:
        run_rank()
        return 0
    folder = Path(given.out)
    folder.mkdir(parents=True, exist_ok=True)
    began, failed = time.monotonic(), 0
    results: dict[str, Any] = {"not_shown": "the speed-up of a cluster: it needs two or more GPUs joined by NCCL"}
    for name, check in PARTS.items():
        if time.monotonic() - began > given.seconds - 20:
            results[name] = {"skipped": f"{given.seconds:g} s were over"}
            continue
        start = time.monotonic()
        try:
            results[name] = check()
        except Exception:
            failed += 1
            results[name] = {"error": traceback.format_exc()[-3000:]}
        results[f"{name}_took_s"] = time.monotonic() - start
        print(f"{name}: {results[f'{name}_took_s']:.1f} s", flush=True)
        # Written after every part: a run that is cut short keeps what it had.
        (folder / "casgd.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
