"""The ranks of a job joined by NCCL: sums of arrays that stay on the GPUs."""

import importlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from precision_time.casgd.arrays import choose_gpu, import_cupy
from precision_time.casgd.communicator import (
    SPIN_S,
    WIRE_TYPES,
    Communicator,
    Pending,
    check_buffer,
    check_deadline,
    describe_loss,
    refuse_if_lost,
    without_delay,
)
from precision_time.casgd.errors import CommunicationError, InputError
from precision_time.casgd.mpi import find_communicator

__all__ = ["NcclCommunicator", "drain", "sum_over_ranks"]

_ABORT_S = 10.0  # NCCL's own abort waits for the GPU, which may never come (NVIDIA/nccl issue 549)
_SUM = "a sum over the GPUs"


class _NcclSum:
    def __init__(self, stream: Any, done: Any) -> None:
        self._stream, self._done = stream, done

    def wait(self) -> None:
        self._stream.wait_event(self._done)


class NcclCommunicator:
    """Sums of CuPy arrays over the GPUs of a job by NCCL, one GPU a rank; written from CuPy 14.2's source, untested.

    ``control`` joins the same ranks on their hosts, as `mpi.find_communicator` takes it: it carries NCCL's identifier,
    `gather` and `barrier`. A sum is put on CuPy's current stream and returns before it is done, as kernels do;
    `start_sum` uses a stream of its own, so that kernels started before ``wait`` overlap. At most eight sums are under
    way: the next call waits for the oldest. Call `drain` before the host reads what the device wrote after a sum: the
    read itself has no deadline. A wait of more than ``deadline_s`` seconds takes NCCL down and raises
    CommunicationError, and the job ends with this process.

    Ranks that start on the same GPU move to the GPU of their local rank (`choose_gpu`). NCCL refuses two ranks on one
    GPU (NVIDIA/nccl issue 418): use MpiCommunicator there.
    """

    _MOST_UNDER_WAY = 8

    def __init__(self, control: Any = "mpi", *, deadline_s: float = 120.0) -> None:
        check_deadline(deadline_s)
        self._cupy = import_cupy()
        if not self._cupy.cuda.is_available():
            raise InputError("NCCL joins GPUs, and CuPy finds none", fix="take MpiCommunicator, or see nvidia-smi")
        # CuPy has no attribute of this name before the module is imported (cupy issues 5766, 8710).
        self._nccl = importlib.import_module("cupy.cuda.nccl")
        if not self._nccl.available:
            cuda = int(self._cupy.cuda.runtime.runtimeGetVersion()) // 1000
            raise CommunicationError("CuPy finds no NCCL", fix=f"pip install nvidia-nccl-cu{cuda}")
        self._control = find_communicator(control)
        self.rank, self.size = self._control.rank, self._control.size
        self.deadline_s = deadline_s
        self.reductions = 0
        self._lost: CommunicationError | None = None
        self._comm: Any = None
        self._settle_on_gpus()
        identifier = self._control.gather(list(self._nccl.get_unique_id()) if self.rank == 0 else None)[0]
        self._join(tuple(identifier))
        self._own_stream = self._cupy.cuda.Stream(non_blocking=True)
        self._under_way: deque[Any] = deque()

    def _settle_on_gpus(self) -> None:
        places = self._gather_places()
        if len(set(places)) < len(places):
            choose_gpu()
            places = self._gather_places()
        for place, count in Counter(places).items():
            if count > 1:
                ranks = [rank for rank, other in enumerate(places) if other == place]
                raise InputError(
                    "NCCL needs a GPU of its own for every rank",
                    got=f"ranks {ranks} on GPU {place[1]} of {place[0]}",
                    fix="choose another device with cupy.cuda.Device(i).use(), or take MpiCommunicator",
                )

    def _gather_places(self) -> list[tuple[str, str]]:
        place = [os.uname().nodename, self._cupy.cuda.Device().pci_bus_id]
        return [(str(host), str(gpu)) for host, gpu in self._control.gather(place)]

    def _join(self, identifier: tuple[int, ...]) -> None:
        # Connect now, under the deadline: in the first sum NCCL would wait for a lost rank without end.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        device = self._cupy.cuda.Device()
        failures: list[Exception] = []

        def start() -> None:
            try:
                device.use()  # each thread has a current device of its own
                self._comm = self._nccl.NcclCommunicator(self.size, identifier, self.rank)
            except Exception as error:
                failures.append(error)

        if not _finishes(start, self.deadline_s):
            self._lose("the start of NCCL", f"no answer for {self.deadline_s:g} s")
        if failures:
            raise CommunicationError(
                "NCCL does not start", got=failures[0], fix="set NCCL_DEBUG=INFO and read the messages of NCCL"
            ) from failures[0]

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

    def drain(self) -> None:
        """Return when no sum is under way; CommunicationError after the deadline."""
        self._wait_until(0)

    def _wait_until(self, under_way: int) -> None:
        refuse_if_lost(self._lost)
        while len(self._under_way) > under_way:
            started_s = time.monotonic()
            while not self._under_way[0][0].done:
                waited_s = time.monotonic() - started_s
                if waited_s <= SPIN_S:
                    continue
                if waited_s > self.deadline_s:
                    self._lose(_SUM, f"no answer for {waited_s:.1f} s (deadline {self.deadline_s:g} s)")
                try:
                    self._comm.check_async_error()
                except Exception as error:  # NCCL reports a broken network before the deadline
                    self._lose(_SUM, f"NCCL reports: {error}")
                time.sleep(min(waited_s / 100, 0.001))
            self._under_way.popleft()

    def _lose(self, call: str, reason: str) -> NoReturn:
        self._lost = describe_loss(self, call, reason)
        lose = getattr(without_delay(self._control), "lose", None)
        if lose is not None:
            lose(self._lost)
        if self._comm is not None:
            _finishes(self._comm.abort, _ABORT_S)
        raise self._lost

    def gather(self, value: object) -> list[Any]:
        return self._control.gather(value)

    def barrier(self) -> None:
        self._wait_until(0)
        self._control.barrier()

    def abort(self, message: str) -> NoReturn:
        self._control.abort(message)


def _finishes(call: Callable[[], Any], seconds: float) -> bool:
    """Whether ``call`` returns within ``seconds``; if not, its thread keeps running."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def drain(comm: Communicator) -> None:
    """Return when the host can read device arrays without waiting for a rank; CommunicationError after the deadline."""
    inner = without_delay(comm)
    if isinstance(inner, NcclCommunicator):
        inner.drain()


def sum_over_ranks(buffer: np.ndarray, *, comm: Communicator) -> None:
    """Replace ``buffer``, a host array, by its sum over the ranks; it goes through the GPU if NCCL joins them."""
    if not isinstance(without_delay(comm), NcclCommunicator):
        comm.sum(buffer)
        return
    on_device = import_cupy().asarray(buffer)
    comm.sum(on_device)
    drain(comm)
    buffer[...] = on_device.get()
