"""The ranks of a job joined by MPI, and the choice of a communicator."""

import atexit
import json
import os
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from precision_time.casgd.communicator import (
    ABORT_STATUS,
    WIRE_TYPES,
    Communicator,
    DelayedCommunicator,
    OneProcess,
    Pending,
    check_agreement,
    check_buffer,
    say,
    to_json,
)
from precision_time.casgd.errors import CommunicationError, InputError
from precision_time.casgd.mpi_probe import GpuAwareness, find_gpu_awareness
from precision_time.casgd.nccl import NcclCommunicator, drain

__all__ = [
    "Communicator",
    "DelayedCommunicator",
    "MpiCommunicator",
    "NcclCommunicator",
    "OneProcess",
    "Pending",
    "check_agreement",
    "drain",
    "explain_staging",
    "find_communicator",
]

#: How long the last words of a rank may take to reach the terminal.
WORDS_S = 0.5

_SPIN_S = 0.002  # a wait shorter than this is polled without giving up the core: it is the case that is timed

_SUM = "a sum over the ranks"


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
    in MPICH 5.0.2 and is refused by Open MPI 5.0.11 (both seen). GPU arrays go straight to MPI where a probe in a
    child process found that it takes them, and through host memory otherwise: then ``staging_reason`` says why, which
    is None before, and rank 0 warns once.

    Everything is nonblocking inside, so that no call waits longer than ``deadline_s`` seconds for a rank that has
    died or fallen silent: it raises CommunicationError, this communicator takes no more calls, and when the process
    ends it ends the whole job with status 3 instead of waiting for the lost rank once more. MPI may use the wait for
    `start_sum` to do the work: how much is hidden is up to the library (MPICH moves data during calls only).
    """

    def __init__(self, comm: Any = None, *, deadline_s: float = 120.0, gpu_aware: bool | None = None) -> None:
        if not deadline_s > 0:
            raise InputError("the deadline of a communicator must be positive", got=deadline_s, expected="seconds > 0")
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
        """Whether GPU arrays are handed to MPI as they are; asking for the first time starts the probe."""
        if self._gpu is None:
            self._gpu = find_gpu_awareness()
        return self._gpu

    def sum(self, buffer: Any) -> None:
        if self._lost is None and isinstance(buffer, np.ndarray) and _is_ready(buffer):
            self.reductions += 1
            self._finish(self._start(_SUM, self._comm.Iallreduce, self._mpi.IN_PLACE, buffer), _SUM)
        else:
            self.start_sum(buffer).wait()

    def start_sum(self, buffer: Any) -> Pending:
        check_buffer(buffer)
        self._check_alive()
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
        why = self._why_staged(buffer)
        if why is None:
            # MPI knows nothing of streams: it must not read before the kernels have written.
            buffer.device.synchronize()
            return buffer
        if self.staging_reason is None:
            self.staging_reason = why
            if self.rank == 0:
                warnings.warn(f"GPU arrays are summed through host memory: {why}", RuntimeWarning, stacklevel=4)
        return np.ascontiguousarray(buffer.astype(wire_type).get())

    def _why_staged(self, buffer: Any) -> str | None:
        """Why an array on a GPU cannot be handed to MPI as it is, or None."""
        if buffer.dtype.name not in WIRE_TYPES:
            return f"{buffer.dtype.name} is summed in float32"
        if not buffer.flags.c_contiguous:
            return "the array is not contiguous"
        return None if self.gpu.aware else self.gpu.reason

    def gather(self, value: object) -> list[Any]:
        self._check_alive()
        what = "a gathering of values"
        mine = np.frombuffer(to_json(value), dtype=np.uint8)
        lengths = np.zeros(self.size, dtype=np.int64)
        self._finish(self._start(what, self._comm.Iallgather, np.array([mine.size], dtype=np.int64), lengths), what)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        text = np.empty(int(offsets[-1]), dtype=np.uint8)
        parts = (text, (lengths.tolist(), offsets[:-1].tolist()), self._mpi.BYTE)
        self._finish(self._start(what, self._comm.Iallgatherv, (mine, self._mpi.BYTE), parts), what)
        return [json.loads(text[start:end].tobytes()) for start, end in pairwise(offsets)]

    def barrier(self) -> None:
        self._check_alive()
        self._finish(self._start("a barrier", self._comm.Ibarrier), "a barrier")

    def abort(self, message: str) -> NoReturn:
        say(f"rank {self.rank}: {message}")
        # What was written last travels through mpiexec, which ends at once.
        time.sleep(WORDS_S)
        self._comm.Abort(ABORT_STATUS)
        os._exit(ABORT_STATUS)  # Abort does not return in MPICH and Open MPI; the standard asks only for its best

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise CommunicationError("this communicator has already lost a rank", got=self._lost.what)

    def _start(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._mpi.Exception as error:
            self._lose(what, f"MPI reports: {error}")

    def _finish(self, request: Any, what: str) -> None:
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
                    self._lose(what, f"no answer for {waited_s:.1f} s (deadline {self.deadline_s:g} s)")
                if waited_s > _SPIN_S:
                    # At most 1 % is added to a wait, and a rank that shares our core gets its turn.
                    time.sleep(min(waited_s / 100, 0.001))
        except self._mpi.Exception as error:
            self._lose(what, f"MPI reports: {error}")

    def _lose(self, what: str, why: str) -> NoReturn:
        raise self.lose(
            CommunicationError(
                f"rank {self.rank} of {self.size} waited in vain in {what}",
                got=why,
                expected="every rank makes the same calls and is alive",
                fix="look in the output of the other ranks for the first error; raise deadline_s if one is only slow",
            )
        )

    def lose(self, error: CommunicationError) -> CommunicationError:
        """Take no more calls, and end the job with this process; ``error``, for the caller to raise."""
        if self._lost is None:
            # MPI finalises after Python's exit functions, and would wait there for the lost rank without end.
            atexit.register(self.abort, "the job ends because a rank was lost")
        self._lost = error
        return error


def explain_staging(comm: Communicator) -> str | None:
    """Why sums of GPU arrays went through host memory so far, in words; None where none did."""
    inner = getattr(comm, "inner", comm)
    return inner.staging_reason if isinstance(inner, MpiCommunicator) else None


def find_communicator(given: Any) -> Communicator:
    """``given`` as a Communicator: None is one process, "mpi" is ``MPI.COMM_WORLD``, an mpi4py communicator is wrapped.

    A Communicator is returned as it is. InputError for anything else, CommunicationError where MPI is missing.
    """
    if given is None:
        return OneProcess()
    if isinstance(given, str):
        if given != "mpi":
            raise InputError("there is no communicator of this name", got=given, expected='None or "mpi"')
        return MpiCommunicator()
    if all(hasattr(given, name) for name in ("Iallreduce", "Iallgatherv", "Ibarrier", "Get_rank", "Is_inter")):
        return MpiCommunicator(given)
    if isinstance(given, Communicator):
        return given
    raise InputError(
        "this is no communicator",
        got=type(given).__name__,
        expected='None, "mpi", an mpi4py communicator, or a Communicator of precision_time.casgd.comm',
    )
