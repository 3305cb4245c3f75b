"""The ranks of a job joined by MPI or by NCCL, and the choice of a communicator."""

import atexit
import json
import os
import time
from collections import Counter, deque
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

__all__ = [
    "Communicator",
    "DelayedCommunicator",
    "MpiCommunicator",
    "NcclCommunicator",
    "OneProcess",
    "Pending",
    "check_agreement",
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
    child process found that it takes them, and through host memory otherwise; ``gpu`` tells which and why.

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
        if buffer.dtype.name in WIRE_TYPES and buffer.flags.c_contiguous and self.gpu.aware:
            # MPI knows nothing of streams: it must not read before the kernels have written.
            buffer.device.synchronize()
            return buffer
        return np.ascontiguousarray(buffer.astype(wire_type).get())

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
        self._lost = CommunicationError(
            f"rank {self.rank} of {self.size} waited in vain in {what}",
            got=why,
            expected="every rank makes the same calls and is alive",
            fix="look in the output of the other ranks for the first error; raise deadline_s if one is only slow",
        )
        # MPI finalises after Python's exit functions, and would wait there for the lost rank without end.
        atexit.register(self.abort, "the job ends because a rank was lost")
        raise self._lost


class _NcclSum:
    def __init__(self, stream: Any, done: Any) -> None:
        self._stream, self._done = stream, done

    def wait(self) -> None:
        self._stream.wait_event(self._done)


class NcclCommunicator:
    """Sums of CuPy arrays over the GPUs of a job by NCCL, one GPU a rank; written from CuPy 14.2's source, untested.

    ``control`` joins the same ranks on their hosts: it carries NCCL's identifier, `gather` and `barrier`. A sum is put
    on CuPy's current stream and returns before it is done, as kernels do; `start_sum` uses a stream of its own, so
    that kernels started before ``wait`` overlap. At most eight sums are under way: the next call waits for the oldest,
    and after ``deadline_s`` seconds takes NCCL down and raises CommunicationError. NCCL refuses two ranks on one GPU
    (NVIDIA/nccl issue 418): use MpiCommunicator there.
    """

    _MOST_UNDER_WAY = 8

    def __init__(self, control: Any = "mpi", *, deadline_s: float = 120.0) -> None:
        from precision_time.casgd.arrays import import_cupy

        self._cupy = import_cupy()
        self._nccl = self._cupy.cuda.nccl
        if not self._nccl.available:
            raise CommunicationError("CuPy finds no NCCL", fix="pip install nvidia-nccl-cu13")
        self._control = find_communicator(control)
        self.rank, self.size = self._control.rank, self._control.size
        self.deadline_s = deadline_s
        self.reductions = 0
        places = [tuple(place) for place in self._control.gather([os.uname().nodename, self._device().pci_bus_id])]
        for place, count in Counter(places).items():
            if count > 1:
                ranks = [rank for rank, other in enumerate(places) if other == place]
                raise InputError(
                    "NCCL needs a GPU of its own for every rank",
                    got=f"ranks {ranks} on GPU {place[1]} of {place[0]}",
                    fix="choose another device with cupy.cuda.Device(i).use(), or take MpiCommunicator",
                )
        identifier = self._control.gather(list(self._nccl.get_unique_id()) if self.rank == 0 else None)[0]
        self._comm = self._nccl.NcclCommunicator(self.size, tuple(identifier), self.rank)
        self._own_stream = self._cupy.cuda.Stream(non_blocking=True)
        self._under_way: deque[Any] = deque()

    def _device(self) -> Any:
        return self._cupy.cuda.Device()

    def sum(self, buffer: Any) -> None:
        self._reduce(buffer, self._cupy.cuda.get_current_stream())

    def start_sum(self, buffer: Any) -> Pending:
        current = self._cupy.cuda.get_current_stream()
        self._own_stream.wait_event(current.record())
        return _NcclSum(current, self._reduce(buffer, self._own_stream))

    def _reduce(self, buffer: Any, stream: Any) -> Any:
        check_buffer(buffer)
        if isinstance(buffer, np.ndarray) or not buffer.flags.c_contiguous:
            raise InputError("NCCL sums contiguous CuPy arrays", got=type(buffer).__name__)
        self._wait_until(self._MOST_UNDER_WAY - 1)
        # float16 and bfloat16 are raised to float32: NCCL would round them after every rank.
        with stream:
            wire = buffer if buffer.dtype.name in WIRE_TYPES else buffer.astype(np.float32)
            kind = self._nccl.NCCL_FLOAT64 if wire.dtype.name == "float64" else self._nccl.NCCL_FLOAT32
            self._comm.allReduce(wire.data.ptr, wire.data.ptr, wire.size, kind, self._nccl.NCCL_SUM, stream.ptr)
            if wire is not buffer:
                buffer[...] = wire.astype(buffer.dtype)
            done = stream.record()
        self.reductions += 1
        self._under_way.append((done, wire))  # the memory of ``wire`` must outlive the sum
        return done

    def _wait_until(self, under_way: int) -> None:
        while len(self._under_way) > under_way:
            started_s = time.monotonic()
            while not self._under_way[0][0].done:
                if time.monotonic() - started_s > self.deadline_s:
                    self._comm.abort()
                    raise CommunicationError(
                        f"rank {self.rank} of {self.size} waited in vain in a sum over the GPUs",
                        got=f"no answer for {self.deadline_s:g} s",
                        fix="look in the output of the other ranks for the first error",
                    )
            self._under_way.popleft()

    def gather(self, value: object) -> list[Any]:
        return self._control.gather(value)

    def barrier(self) -> None:
        self._wait_until(0)
        self._control.barrier()

    def abort(self, message: str) -> NoReturn:
        self._control.abort(message)


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
