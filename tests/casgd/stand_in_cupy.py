"""The part of CuPy and NCCL that casgd uses, on the CPU: kernels run as C++, streams run at once, ranks are threads.

Like CuPy's own, the module ``cupy.cuda`` has no attribute ``nccl`` until ``cupy.cuda.nccl`` is imported. Where
``DEVICE.stuck`` is set no sum comes to an end: events are not done, and a host that reads an array fails, because on
a GPU it would wait for ever.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
import threading
import types
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

SHIM = Path(__file__).with_name("cuda_on_cpu.cpp")

#: ``count``: number of GPUs; ``sums``: words of each AllReduce; ``aborted``: how often NCCL was aborted.
DEVICE = types.SimpleNamespace(stuck=False, count=1, sums=[], aborted=0)
_THREAD = threading.local()
_LOCK = threading.Lock()
_IDENTIFIERS = itertools.count(1)
_WORLDS: dict[tuple[int, ...], "_World"] = {}


class Device:
    def __init__(self, number: int | None = None) -> None:
        self.id = getattr(_THREAD, "device", 0) if number is None else number
        self.pci_bus_id = f"0000:{self.id:02x}:00.0"
        self.cublas_handle = 1

    def use(self) -> None:
        assert 0 <= self.id < DEVICE.count
        _THREAD.device = self.id

    def synchronize(self) -> None:
        return


class Array:
    """The part of a CuPy array that casgd uses, on a NumPy array."""

    def __init__(self, held: np.ndarray) -> None:
        self.held = held
        self.data = types.SimpleNamespace(ptr=held.ctypes.data)
        self.device = Device()

    shape = property(lambda self: self.held.shape)
    dtype = property(lambda self: self.held.dtype)
    size = property(lambda self: self.held.size)
    nbytes = property(lambda self: self.held.nbytes)
    flags = property(lambda self: self.held.flags)

    def __getitem__(self, key: Any) -> "Array":
        return Array(self.held[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.held[key] = value.held if isinstance(value, Array) else value

    def get(self) -> np.ndarray:
        assert not DEVICE.stuck, "the host reads behind a sum that does not end: it would wait for ever"
        return self.held.copy()

    def set(self, values: np.ndarray) -> None:
        assert values.dtype == self.dtype
        self.held[...] = values

    def astype(self, kind: Any) -> "Array":
        return Array(self.held.astype(kind))

    def reshape(self, *shape: int) -> "Array":
        return Array(self.held.reshape(*shape))

    def max(self) -> Any:
        return self.held.max()


Array.__module__ = "cupy"


class Event:
    done = property(lambda self: not DEVICE.stuck)

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        return


class Stream:
    def __init__(self, *, non_blocking: bool = False) -> None:
        self.ptr = int(non_blocking)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        return

    def record(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        return

    def synchronize(self) -> None:
        return

    def begin_capture(self) -> None:
        return

    def end_capture(self) -> Any:
        return types.SimpleNamespace(launch=lambda: None)


class _World:
    def __init__(self, size: int) -> None:
        self.barrier, self.brought = threading.Barrier(size, timeout=20), [None] * size


class NcclCommunicator:
    def __init__(self, size: int, identifier: tuple[int, ...], rank: int) -> None:
        assert len(identifier) == 128
        with _LOCK:
            self._world = _WORLDS.setdefault(identifier, _World(size))
        self._rank = rank
        if not DEVICE.stuck:
            self._world.barrier.wait()

    def allReduce(self, sent: int, received: int, count: int, kind: int, operation: int, stream: int) -> None:
        assert sent == received
        assert operation == 0
        DEVICE.sums.append(count)
        if DEVICE.stuck:
            return
        real = {7: ctypes.c_float, 8: ctypes.c_double}[kind]
        values = np.ctypeslib.as_array(ctypes.cast(sent, ctypes.POINTER(real)), (count,))
        self._world.brought[self._rank] = values.copy()
        self._world.barrier.wait()
        total = np.sum(self._world.brought, axis=0)
        self._world.barrier.wait()
        values[:] = total

    def check_async_error(self) -> None:
        return

    def abort(self) -> None:
        DEVICE.aborted += 1


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


def find_compiler() -> str:
    """The C++ compiler that stands in for CUDA's: ``CXX``, g++ or clang++."""
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "g++", "clang++")))), None)
    if compiler is None:
        raise FileNotFoundError("a C++ compiler is needed (on Debian: apt-get install g++), or CXX that names one")
    return compiler


@lru_cache(maxsize=32)
def compile_for_cpu(folder: Path, code: str, options: tuple[str, ...]) -> ctypes.CDLL:
    name = "kernels" + "".join(options).replace("-D", "_").replace("=", "")
    library = folder / f"{name}.so"
    if not library.exists():
        # Ranks share the folder, both processes and threads.
        unique = f"{name}.{os.getpid()}.{threading.get_ident()}"
        (folder / f"{unique}.cu").write_text(code)
        (folder / f"{unique}.cpp").write_text(SHIM.read_text(encoding="utf-8"))
        command = [find_compiler(), "-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC"]
        command += [f'-DKERNELS="{unique}.cu"', *options, f"{unique}.cpp", "-o", f"{unique}.so"]
        subprocess.run(command, cwd=folder, check=True)
        (folder / f"{unique}.so").replace(library)
    return ctypes.CDLL(str(library))


def make_modules(folder: Path) -> dict[str, types.ModuleType]:
    """Stand-ins for cupy and its submodules, by their names in ``sys.modules``; kernels are built in ``folder``."""

    class Kernel:
        def __init__(self, library: ctypes.CDLL, name: str) -> None:
            self.library, self.name = library, name

        def __call__(self, grid: tuple, block: tuple, arguments: tuple, *, shared_mem: int = 0) -> None:
            threads = int(np.prod(block))
            assert threads % 32 == 0 or threads == 1
            assert threads <= 1024
            assert shared_mem <= 48 * 1024
            packed = [_pack(argument) for argument in arguments]
            pointers = (ctypes.c_void_p * len(packed))(*(ctypes.addressof(argument) for argument, _ in packed))
            sizes = (ctypes.c_int * len(packed))(*(size for _, size in packed))
            x, y = (*block, 1)[:2]
            with _LOCK:
                status = self.library.launch(self.name.encode(), grid[0], x, y, pointers, sizes, len(packed))
            assert status == 0, f"arguments of {self.name} do not fit its parameters"

    class RawModule:
        def __init__(self, *, code: str, options: tuple[str, ...] = ()) -> None:
            self.library = compile_for_cpu(folder, code, options)

        def get_function(self, name: str) -> Kernel:
            return Kernel(self.library, name)

    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: DEVICE.count,
        runtimeGetVersion=lambda: 13020,
        driverGetVersion=lambda: 13020,
        getDeviceProperties=lambda device: {"name": b"a CPU"},
    )
    stream = Stream()
    nccl = types.ModuleType("cupy.cuda.nccl")
    vars(nccl).update(
        available=True,
        get_version=lambda: 22707,
        # Signed characters, so some are below 0.
        get_unique_id=lambda: (next(_IDENTIFIERS) % 128, *range(-128, -1)),
        NcclCommunicator=NcclCommunicator,
        NCCL_FLOAT32=7,
        NCCL_FLOAT64=8,
        NCCL_SUM=0,
    )
    cuda = types.ModuleType("cupy.cuda")
    vars(cuda).update(
        Device=Device,
        Event=Event,
        Stream=Stream,
        cublas=types.SimpleNamespace(gemmEx=gemm_ex),
        get_current_stream=lambda: stream,
        get_elapsed_time=lambda before, after: 1.0,
        is_available=lambda: DEVICE.count > 0,
        runtime=runtime,
    )
    cupy = types.ModuleType("cupy")
    vars(cupy).update(
        __version__="a stand-in",
        RawModule=RawModule,
        abs=lambda array: Array(np.abs(array.held)),
        asarray=lambda array, dtype=None: Array(np.array(array, dtype=dtype)),
        ascontiguousarray=lambda array: Array(np.ascontiguousarray(array.held)),
        cuda=cuda,
        empty=lambda shape, dtype: Array(np.full(shape, 77, dtype=dtype)),
        matmul=lambda a, b: Array((a.held.astype(np.float32) @ b.held.astype(np.float32)).astype(a.dtype)),
        ones=lambda shape, dtype: Array(np.ones(shape, dtype=dtype)),
        zeros=lambda shape, dtype: Array(np.zeros(shape, dtype=dtype)),
    )
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}


def install(folder: Path) -> None:
    """Put the modules where ``import cupy`` finds them, for the rest of the process."""
    sys.modules.update(make_modules(folder))
