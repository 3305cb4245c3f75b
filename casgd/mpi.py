"""The ranks of a job joined by MPI, whether MPI takes arrays on a GPU, and the communicator that a caller names."""

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from precision_time.casgd.communicator import (
    ABORT_STATUS,
    SPIN_S,
    WIRE_TYPES,
    Communicator,
    OneProcess,
    Pending,
    check_buffer,
    check_deadline,
    describe_loss,
    refuse_if_lost,
    say,
    to_json,
    without_delay,
)
from precision_time.casgd.errors import CommunicationError, InputError

__all__ = ["GpuAwareness", "MpiCommunicator", "explain_staging", "find_communicator", "probe_gpu_awareness"]

#: How long the last words of a rank may take to reach the terminal.
WORDS_S = 0.5

_SUM = "a sum over the ranks"

# An MPI that is not GPU-aware copies from a device pointer on the host and dies of SIGSEGV (mpi4py issue 115), so a
# child process tries it. Send and receive buffers differ on purpose: an in-place reduction over one rank touches no
# memory and would prove nothing.
_PROBE = """
import ctypes, json, sys

def answer(aware, reason):
    print(json.dumps({"aware": aware, "reason": reason}))
    sys.exit(0)

try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    answer(False, "no GPU: the NVIDIA driver is not installed")
count = ctypes.c_int(0)
if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
    answer(False, "no GPU: the NVIDIA driver finds none")
try:
    import cupy
except ImportError:
    answer(False, "cupy is not installed")
from mpi4py import MPI

sent = cupy.arange(4096, dtype=cupy.float32)
received = cupy.zeros_like(sent)
cupy.cuda.get_current_stream().synchronize()
MPI.COMM_SELF.Allreduce(sent, received, op=MPI.SUM)
if not bool((sent == received).all()):
    answer(False, "a reduction of a GPU array came back wrong")
received[...] = 0
cupy.cuda.get_current_stream().synchronize()
MPI.COMM_SELF.Sendrecv(sent, 0, recvbuf=received, source=0)
if not bool((sent == received).all()):
    answer(False, "a message of a GPU array came back wrong")
answer(True, "a reduction and a message of GPU arrays came back right")
"""

# Variables that tell a process that it is one rank of a running job. The child is a job of its own, and would
# otherwise wait for its parent, or answer in its parent's place.
_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "PMIP_", "PRTE_", "OMPI_COMM_", "OMPI_UNIVERSE_", "HYDI_", "HYDRA_", "MPIEXEC_")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAwareness:
    """``aware`` is true if GPU arrays may be handed to MPI; ``reason`` says in words how that is known."""

    aware: bool
    reason: str


def probe_gpu_awareness(program: str = _PROBE, *, timeout_s: float = 60.0) -> GpuAwareness:
    """Run ``program`` in a child process and read its last line, a JSON object ``{"aware": bool, "reason": str}``.

    A child that is killed, fails, prints nothing readable or takes longer than ``timeout_s`` seconds means "not
    aware"; no outcome raises.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return GpuAwareness(aware=False, reason=f"the probe did not answer within {timeout_s:g} s")
    except OSError as error:
        return GpuAwareness(aware=False, reason=f"the probe could not be started: {error}")
    if done.returncode < 0:
        try:
            name = signal.Signals(-done.returncode).name
        except ValueError:
            name = f"signal {-done.returncode}"
        return GpuAwareness(aware=False, reason=f"MPI does not take GPU arrays: the probe was ended by {name}")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return GpuAwareness(aware=False, reason=f"the probe failed with status {done.returncode}: {last}")
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        return GpuAwareness(aware=answer["aware"] is True, reason=str(answer["reason"]))
    except (IndexError, KeyError, TypeError, ValueError):
        return GpuAwareness(aware=False, reason="the probe printed nothing readable")


@functools.cache
def _find_gpu_awareness() -> GpuAwareness:
    """The answer of one probe for this process and MPI library; later calls repeat it."""
    return probe_gpu_awareness()


def _is_ready(array: np.ndarray) -> bool:
    """Whether MPI can sum the array where it lies: native float32 or float64, contiguous, writeable."""
    return array.dtype.char in "fd" and array.dtype.isnative and array.flags.carray


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there and no MPI library is
        raise CommunicationError(
            "MPI cannot be used here", got=error, fix="pip install 'precision-time[mpi]' (mpi4py and mpich)"
        ) from error
    return MPI


class _MpiSum:
    def __init__(self, owner: "MpiCommunicator", request: Any, buffer: Any, wire: Any) -> None:
        self._owner, self._request, self._buffer, self._wire = owner, request, buffer, wire

    def wait(self) -> None:
        if self._request is None:
            return
        self._owner._finish(self._request, _SUM)
        self._owner._under_way.discard(self)
        self._request = None
        if self._wire is self._buffer:
            return
        if isinstance(self._buffer, np.ndarray):
            self._buffer[...] = self._wire
        else:
            self._buffer.set(self._wire.astype(self._buffer.dtype))


class MpiCommunicator:
    """Sums over the ranks of an mpi4py communicator (``MPI.COMM_WORLD`` if none is given).

    Only MPI's float and double are put on the wire. MPI's own bfloat16 is never used: summing it aborts the process
    in MPICH 5.0.2 and is refused by Open MPI 5.0.11 (both observed). GPU arrays go straight to MPI if a probe in a
    child process found that MPI takes them, and through host memory otherwise. In the second case rank 0 warns once
    and ``staging_reason``, None until then, says why.

    All calls are nonblocking inside, so none waits longer than ``deadline_s`` seconds for a rank that has died or
    hangs: it raises CommunicationError, this communicator takes no more calls, and when the process ends it ends the
    whole job with status 3 instead of waiting for the lost rank once more. MPI may do the work of `start_sum` during
    ``wait``: how much of a sum is hidden depends on the library (MPICH moves data during calls only).
    """

    def __init__(self, comm: Any = None, *, deadline_s: float = 120.0, gpu_aware: bool | None = None) -> None:
        check_deadline(deadline_s)
        self._mpi = _import_mpi()
        self._comm = self._mpi.COMM_WORLD if comm is None else comm
        if self._comm == self._mpi.COMM_NULL or self._comm.Is_inter():
            raise InputError("the ranks must form one group", expected="an mpi4py intracommunicator")
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self.deadline_s = deadline_s
        self.reductions = 0
        self.staging_reason: str | None = None
        self._lost: CommunicationError | None = None
        # MPI writes into these buffers: they must live until then, even if the caller has dropped the sum.
        self._under_way: set[_MpiSum] = set()
        self._unfinished: Any = None
        self._gpu = None if gpu_aware is None else GpuAwareness(aware=gpu_aware, reason="as the caller said")

    @property
    def gpu(self) -> GpuAwareness:
        """Whether GPU arrays are handed to MPI as they are; the first access starts the probe."""
        if self._gpu is None:
            self._gpu = _find_gpu_awareness()
        return self._gpu

    def sum(self, buffer: Any) -> None:
        if self._lost is None and isinstance(buffer, np.ndarray) and _is_ready(buffer):
            self.reductions += 1
            self._finish(self._start(_SUM, self._comm.Iallreduce, self._mpi.IN_PLACE, buffer), _SUM)
        else:
            self.start_sum(buffer).wait()

    def start_sum(self, buffer: Any) -> Pending:
        check_buffer(buffer)
        refuse_if_lost(self._lost)
        wire = self._stage(buffer)
        self.reductions += 1
        request = self._start(_SUM, self._comm.Iallreduce, self._mpi.IN_PLACE, wire)  # MPI.SUM is the default
        pending = _MpiSum(self, request, buffer, wire)
        self._under_way.add(pending)
        return pending

    def _stage(self, buffer: Any) -> Any:
        """``buffer`` itself if MPI can take it, otherwise a contiguous float32 or float64 copy on the host."""
        wire_type = np.dtype(np.float64 if buffer.dtype.name == "float64" else np.float32)
        if isinstance(buffer, np.ndarray):
            return buffer if _is_ready(buffer) else np.array(buffer, dtype=wire_type, order="C")
        reason = self._why_staged(buffer)
        if reason is None:
            # MPI knows nothing of streams: it must not read before the kernels have written.
            buffer.device.synchronize()
            return buffer
        if self.staging_reason is None:
            self.staging_reason = reason
            if self.rank == 0:
                warnings.warn(f"GPU arrays are summed through host memory: {reason}", RuntimeWarning, stacklevel=4)
        return np.ascontiguousarray(buffer.astype(wire_type).get())

    def _why_staged(self, buffer: Any) -> str | None:
        """Why an array on a GPU cannot be handed to MPI as it is, or None."""
        if buffer.dtype.name not in WIRE_TYPES:
            return f"{buffer.dtype.name} is summed in float32"
        if not buffer.flags.c_contiguous:
            return "the array is not contiguous"
        return None if self.gpu.aware else self.gpu.reason

    def gather(self, value: object) -> list[Any]:
        refuse_if_lost(self._lost)
        call = "a gathering of values"
        encoded = np.frombuffer(to_json(value), dtype=np.uint8)
        lengths = np.zeros(self.size, dtype=np.int64)
        self._finish(self._start(call, self._comm.Iallgather, np.array([encoded.size], dtype=np.int64), lengths), call)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        text = np.empty(int(offsets[-1]), dtype=np.uint8)
        parts = (text, (lengths.tolist(), offsets[:-1].tolist()), self._mpi.BYTE)
        self._finish(self._start(call, self._comm.Iallgatherv, (encoded, self._mpi.BYTE), parts), call)
        return [json.loads(text[start:end].tobytes()) for start, end in pairwise(offsets)]

    def barrier(self) -> None:
        refuse_if_lost(self._lost)
        self._finish(self._start("a barrier", self._comm.Ibarrier), "a barrier")

    def abort(self, message: str) -> NoReturn:
        say(f"rank {self.rank}: {message}")
        # The last words travel through mpiexec, which ends at once.
        time.sleep(WORDS_S)
        self._comm.Abort(ABORT_STATUS)
        os._exit(ABORT_STATUS)  # Abort does not return in MPICH and Open MPI, but the standard does not promise that

    def _start(self, call: str, start: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return start(*arguments)
        except self._mpi.Exception as error:
            raise self.lose(describe_loss(self, call, f"MPI reports: {error}")) from error

    def _finish(self, request: Any, call: str) -> None:
        started_s = time.monotonic()
        tries = 0
        try:
            while not request.Test():
                tries += 1
                if tries % 128:
                    continue
                waited_s = time.monotonic() - started_s
                if waited_s > self.deadline_s:
                    self._unfinished = request
                    reason = f"no answer for {waited_s:.1f} s (deadline {self.deadline_s:g} s)"
                    raise self.lose(describe_loss(self, call, reason))
                if waited_s > SPIN_S:
                    # At most 1 % is added to a wait, and a rank that shares our core gets its turn.
                    time.sleep(min(waited_s / 100, 0.001))
        except self._mpi.Exception as error:
            raise self.lose(describe_loss(self, call, f"MPI reports: {error}")) from error

    def lose(self, error: CommunicationError) -> CommunicationError:
        """Take no more calls, and end the job with this process; returns ``error`` for the caller to raise."""
        if self._lost is None:
            # MPI finalises after Python's exit functions, and would wait there for the lost rank without end.
            atexit.register(self.abort, "the job ends because a rank was lost")
        self._lost = error
        return error


def explain_staging(comm: Communicator) -> str | None:
    """Why sums of GPU arrays went through host memory so far, in words; None if none did."""
    inner = without_delay(comm)
    return inner.staging_reason if isinstance(inner, MpiCommunicator) else None


def find_communicator(comm: Any) -> Communicator:
    """The Communicator for ``comm``: one process for None, ``MPI.COMM_WORLD`` for "mpi", a wrapped mpi4py communicator.

    A Communicator is returned as it is. InputError for anything else, CommunicationError if MPI is missing.
    """
    if comm is None:
        return OneProcess()
    if isinstance(comm, str):
        if comm != "mpi":
            raise InputError("there is no communicator of this name", got=comm, expected='None or "mpi"')
        return MpiCommunicator()
    if all(hasattr(comm, name) for name in ("Iallreduce", "Iallgatherv", "Ibarrier", "Get_rank", "Is_inter")):
        return MpiCommunicator(comm)
    if isinstance(comm, Communicator):
        return comm
    raise InputError(
        "this is no communicator",
        got=type(comm).__name__,
        expected='None, "mpi", an mpi4py communicator, or a Communicator of precision_time.casgd.communicator',
    )
