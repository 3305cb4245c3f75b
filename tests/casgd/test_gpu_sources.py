"""The GPU back end without a GPU: its CUDA source runs as C++ on the CPU, under a stand-in for CuPy.

The threads of a CTA are fibres, resumed in random order at every barrier and shuffle, so a barrier that is missing
shows as a wrong number. What only a GPU can tell (tests/gpu/casgd_check.sh) is speed, cuBLAS and NCCL.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import types
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.errors import InputError
from precision_time.casgd.objectives import find_objective
from precision_time.casgd.precision import POLICIES, round_to
from precision_time.casgd.problem import Options, Problem
from precision_time.casgd.schedules import Schedule

pytestmark = pytest.mark.compiler

SHIM = Path(__file__).with_name("cuda_on_cpu.cpp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


class Array:
    """What gpu.py asks of a CuPy array, over a NumPy one."""

    def __init__(self, held: np.ndarray) -> None:
        self.held = held
        self.data = types.SimpleNamespace(ptr=held.ctypes.data)

    shape = property(lambda self: self.held.shape)
    dtype = property(lambda self: self.held.dtype)
    size = property(lambda self: self.held.size)

    def __getitem__(self, key: Any) -> "Array":
        return Array(self.held[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.held[key] = value.held if isinstance(value, Array) else value

    def get(self) -> np.ndarray:
        return self.held.copy()

    def astype(self, kind: Any) -> "Array":
        return Array(self.held.astype(kind))

    def max(self) -> Any:
        return self.held.max()


Array.__module__ = "cupy"
_BLOCKS: dict[str, tuple[int, ...]] = {}
_LOCK = threading.Lock()


def _pack(value: Any) -> tuple[ctypes.Array, int]:
    raw = np.uintp(value.data.ptr).tobytes() if isinstance(value, Array) else value.tobytes()
    return ctypes.create_string_buffer(raw, len(raw)), len(raw)


def _read(pointer: int, count: int, kind: int) -> np.ndarray:
    """``count`` numbers of a CUDA data type: 0 float32, 1 float64, 2 float16, 14 bfloat16."""
    width = {0: 4, 1: 8, 2: 2, 14: 2}[kind]
    raw = ctypes.string_at(pointer, count * width)
    if kind == 14:
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {0: np.float32, 1: np.float64, 2: np.float16}[kind])


def gemm_ex(
    handle, op_a, op_b, m, n, k, alpha, a, a_kind, lda, b, b_kind, ldb, beta, c, c_kind, ldc, compute, algorithm
):  # fmt: skip
    assert (op_a, op_b, m, lda, a, a_kind) == (1, 0, n, ldb, b, b_kind)
    assert k == lda
    assert (compute, c_kind) in {(68, 0), (77, 0), (70, 1)}
    assert lda % 8 == 0
    real = np.float64 if compute == 70 else np.float32
    assert ctypes.string_at(alpha, np.dtype(real).itemsize) == real(1).tobytes()
    assert ctypes.string_at(beta, np.dtype(real).itemsize) == real(0).tobytes()
    y = _read(a, m * lda, a_kind).reshape(m, lda).astype(real)
    product = np.asfortranarray(y @ y.T)
    assert ldc == m
    ctypes.memmove(c, product.ctypes.data, product.nbytes)


def make_cupy(folder: Path) -> types.ModuleType:
    """A module that stands for cupy."""

    class Kernel:
        def __init__(self, library: ctypes.CDLL, name: str) -> None:
            self.library, self.name = library, name

        def __call__(self, grid: tuple, block: tuple, arguments: tuple, *, shared_mem: int = 0) -> None:
            threads = int(np.prod(block))
            assert threads % 32 == 0
            assert threads <= 1024
            assert shared_mem <= 48 * 1024
            packed = [_pack(one) for one in arguments]
            pointers = (ctypes.c_void_p * len(packed))(*(ctypes.addressof(one) for one, _ in packed))
            sizes = (ctypes.c_int * len(packed))(*(size for _, size in packed))
            x, y = (*block, 1)[:2]
            with _LOCK:
                status = self.library.launch(self.name.encode(), grid[0], x, y, pointers, sizes, len(packed))
            assert status == 0, f"arguments of {self.name} do not fit its parameters"

    class RawModule:
        def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
            self.library = compile_for_cpu(folder, code, options)

        def get_function(self, name: str) -> Kernel:
            return Kernel(self.library, name)

    class Event:
        def record(self) -> None:
            return

    cupy = types.ModuleType("cupy")
    cupy.RawModule = RawModule
    cupy.empty = lambda shape, dtype: Array(np.full(shape, 77, dtype=dtype))
    cupy.zeros = lambda shape, dtype: Array(np.zeros(shape, dtype=dtype))
    cupy.asarray = lambda given, dtype=None: Array(np.array(given, dtype=dtype))
    cupy.ascontiguousarray = lambda given: Array(np.ascontiguousarray(given.held))
    cupy.abs = lambda given: Array(np.abs(given.held))
    device = types.SimpleNamespace(id=0, cublas_handle=1)
    cupy.cuda = types.SimpleNamespace(Device=lambda: device, Event=Event, get_elapsed_time=lambda before, after: 1.0)
    return cupy


def find_compiler() -> str:
    """The C++ compiler that stands in for CUDA's: ``CXX``, g++ or clang++."""
    found = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))), None)
    return found or pytest.fail("a C++ compiler is needed (on Debian: apt-get install g++), or CXX that names one")


@lru_cache(maxsize=16)
def compile_for_cpu(folder: Path, code: str, options: tuple[str, ...]) -> ctypes.CDLL:
    name = "kernels" + "".join(options).replace("-D", "_").replace("=", "")
    (folder / f"{name}.cu").write_text(code)
    (folder / f"{name}.cpp").write_text(SHIM.read_text(encoding="utf-8"))
    command = [
        find_compiler(),
        "-std=c++17",
        "-O1",
        "-fno-strict-aliasing",
        "-shared",
        "-fPIC",
        f'-DKERNELS="{name}.cu"',
    ]
    subprocess.run([*command, *options, f"{name}.cpp", "-o", f"{name}.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / f"{name}.so"))


@pytest.fixture
def gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module casgd.gpu on the stand-in."""
    from precision_time.casgd import gpu

    cublas = types.ModuleType("cupy_backends.cuda.libs.cublas")
    cublas.gemmEx = gemm_ex
    libs = types.ModuleType("cupy_backends.cuda.libs")
    libs.cublas = cublas
    for name, module in {
        "cupy": make_cupy(folder),
        "cupy_backends": types.ModuleType("cupy_backends"),
        "cupy_backends.cuda": types.ModuleType("cupy_backends.cuda"),
        "cupy_backends.cuda.libs": libs,
        "cupy_backends.cuda.libs.cublas": cublas,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    gpu._load_kernels.cache_clear()
    yield gpu
    gpu._load_kernels.cache_clear()


def make_problem(objective: str, *, m: int = 53, n: int = 11, weighted: bool = False, l2: float = 0.0) -> Problem:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((m, n)) / np.sqrt(n)
    z = x @ rng.standard_normal(n)
    y = {"logistic": np.where(z > 0, 1.0, -1.0), "squared": z + 0.1, "poisson": rng.poisson(np.exp(z))}[objective]
    return Problem(
        features=x,
        targets=y,
        objective=find_objective(objective),
        l2=l2,
        sample_weight=rng.uniform(0.5, 2.0, m) if weighted else None,
    )


START = {"comm": None, "intercept": 0.0, "first_step": 0, "first_epoch": 0}


def on_device(problem: Problem) -> Problem:
    return replace(problem, features=Array(problem.features))


def make_options(policy: str, **changed: Any) -> Options:
    given = {"s": 4, "batch_size": 4, "epochs": 2, "schedule": Schedule(kind="invscaling", eta0=0.3), **changed}
    return Options(policy=POLICIES[policy], **given)


@pytest.mark.parametrize("objective", ["logistic", "squared", "poisson"])
@pytest.mark.parametrize(("policy", "tolerance"), [("fp64", 1e-12), ("recipe", 2e-6)])
def test_kernels_give_the_iterates_of_the_numpy_back_end(gpu, objective, policy, tolerance):
    problem, options = make_problem(objective, l2=1e-2, weighted=True), make_options(policy)
    expected = run_ca_sgd(problem, options)
    found = gpu.run_ca_sgd(on_device(problem), options)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=0, atol=tolerance * np.abs(expected.weights).max())
    assert found.intercept == pytest.approx(expected.intercept, rel=tolerance, abs=tolerance)
    np.testing.assert_allclose(found.loss_curve, expected.loss_curve, rtol=tolerance)
    assert (found.steps, found.reductions) == (expected.steps, expected.reductions)


@pytest.mark.parametrize(
    ("policy", "tolerance"), [("fp32", 2e-6), ("fp16", 2e-6), ("paper", 2e-3), ("bf16-gram", 1e-4)]
)
@pytest.mark.parametrize(("s", "batch_size"), [(1, 8), (3, 7), (16, 4)])
def test_every_policy_and_shape_of_block(gpu, policy, tolerance, s, batch_size):
    """53 rows leave a shorter last batch and a shorter last block; a margin on a rounding tie may fall either way."""
    problem, options = make_problem("logistic"), make_options(policy, s=s, batch_size=batch_size, order="cyclic")
    expected = run_ca_sgd(problem, options)
    found = gpu.run_ca_sgd(on_device(problem), options)
    np.testing.assert_allclose(found.weights, expected.weights, rtol=0, atol=tolerance * np.abs(expected.weights).max())


def test_plain_sgd_is_one_block_and_gathers_nothing(gpu):
    problem, options = make_problem("squared"), make_options("fp64", s=9)
    run = gpu.DeviceRun(
        on_device(problem), replace(options, s=1), comm=None, intercept=0.0, first_step=0, first_epoch=0
    )
    run.pass_over(next(run.epochs()), 1)
    assert run.launched == ["margins", "recurrence", "increment"]
    np.testing.assert_allclose(
        gpu.run_sgd(on_device(problem), options).weights, run_ca_sgd(problem, options).weights, rtol=1e-11
    )


class ThreadRanks:
    """Ranks in threads of this process; a sum adds what they brought."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier_, self.brought = size, threading.Barrier(size), [None] * size

    def rank(self, rank: int) -> Any:
        shared = self

        class Rank:
            size, reductions = shared.size, 0

            def exchange(self, value: Any) -> list:
                shared.brought[rank] = value
                shared.barrier_.wait(timeout=20)
                found = list(shared.brought)
                shared.barrier_.wait(timeout=20)
                return found

            def sum(self, buffer: Any) -> None:
                self.reductions += 1
                buffer[:] = np.sum(self.exchange(buffer.get()), axis=0)

            def start_sum(self, buffer: Any) -> Any:
                raise NotImplementedError

            gather = exchange

            def barrier(self) -> None:
                self.exchange(None)

            def abort(self, message: str) -> None:
                raise RuntimeError(message)

        Rank.rank = rank
        return Rank()


def test_two_ranks_hold_one_solution_after_one_sum_an_outer_step(gpu):
    problem, options = make_problem("logistic", weighted=True), make_options("fp64")
    ranks, found, columns = ThreadRanks(2), {}, [slice(0, 5), slice(5, 11)]

    def work(rank: int) -> None:
        part = replace(problem, features=Array(np.ascontiguousarray(problem.features[:, columns[rank]])))
        run = gpu.DeviceRun(part, options, **{**START, "comm": ranks.rank(rank)})
        for epoch in run.epochs():
            run.pass_over(epoch, options.s)
        found[rank] = (run.finish(), run.launched)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    whole = run_ca_sgd(problem, options)
    np.testing.assert_allclose(np.concatenate([found[0][0].weights, found[1][0].weights]), whole.weights, rtol=1e-10)
    assert found[0][0].intercept == found[1][0].intercept
    assert found[0][0].reductions == 2 * -(-53 // 16)
    assert tuple(found[0][1]) == gpu.LAUNCHES
    assert len(gpu.LAUNCHES) <= 6


def test_float64_features_are_rounded_once(gpu):
    # Just above a tie of BF16 in float64, on the tie in float32: two roundings would go down to even.
    tie = 1 + 2.0**-8 + 2.0**-30
    problem = replace(make_problem("squared"), features=np.full((53, 1), tie))
    run = gpu.DeviceRun(
        on_device(problem), make_options("recipe"), comm=None, intercept=0.0, first_step=0, first_epoch=0
    )
    bits = run.device_features.get()
    assert bits.shape == (53, 8)
    assert (bits[:, 1:] == 0).all()
    expected = round_to(np.array([tie]), "bf16").view(np.uint32)[0] >> 16
    assert (bits[:, 0] == expected).all()


@pytest.mark.parametrize(("value", "policy"), [(np.nan, "fp32"), (np.inf, "recipe"), (65520.0, "fp16")])
def test_features_that_the_format_cannot_hold_are_named(gpu, value, policy):
    problem = make_problem("squared")
    problem.features[7, 3] = value
    with pytest.raises(InputError, match="features hold"):
        gpu.run_ca_sgd(on_device(problem), make_options(policy))


def test_a_block_beyond_shared_memory_is_refused(gpu):
    problem = replace(make_problem("squared", m=53), features=np.ones((13000, 1)), targets=np.ones(13000))
    with pytest.raises(InputError, match="at most 12256"):
        gpu.run_ca_sgd(on_device(problem), make_options("fp32", s=3250))


def test_policies_become_macros():
    from precision_time.casgd.gpu import compile_options

    assert compile_options(POLICIES["recipe"]) == (
        "-DREAL=float",
        "-DSTORED=0",
        "-DROUND_FEATURES=0",
        "-DROUND_GRAM=0",
        "-DROUND_MARGIN=0",
    )
    assert compile_options(POLICIES["paper"])[4] == "-DROUND_MARGIN=1"
    mixed = POLICIES["fp64"].replace(name="mixed", x_storage="tf32", gram_storage="fp32")
    assert compile_options(mixed)[:4] == ("-DREAL=double", "-DSTORED=3", "-DROUND_FEATURES=3", "-DROUND_GRAM=4")
    with pytest.raises(InputError, match="weights below fp32"):
        compile_options(POLICIES["fp32"].replace(name="low", weights="bf16"))


def test_importing_the_solver_does_not_import_cupy():
    code = (
        "import sys; import precision_time.casgd.ca_sgd, precision_time.casgd.gpu, precision_time.casgd.plan;"
        "print([name for name in sys.modules if name.partition('.')[0] in ('cupy', 'cupy_backends', 'mpi4py')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
