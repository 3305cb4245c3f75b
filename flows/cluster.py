"""Which Dask cluster a campaign runs on: local CPU workers or local GPU workers, one rank's room each."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

import dask
from distributed import Client, LocalCluster

from precision_time.storage.errors import InputError

__all__ = ["Client", "open_cluster"]

#: A worker that dies costs one attempt of one cell, decided by us: Dask must not run a rank again by itself, and a
#: rank pinned to a worker that is gone must end with an error instead of pending for ever.
_SETTINGS: dict[str, Any] = {
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.no-workers-timeout": "30s",
    "distributed.comm.retry.count": 3,
    # ranks are processes of their own with their own limit; Dask would pause or kill the worker by its own share
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "distributed.admin.tick.limit": "60s",
    "logging.distributed": "critical",
}


@contextlib.contextmanager
def open_cluster(device_type: str, workers: int) -> Iterator[Client]:
    """A client of a local cluster of ``workers`` single-threaded processes, closed at the end of the block.

    ``device_type`` is ``cpu`` or ``cuda``; on CUDA each worker sees its own GPU first (dask-cuda). The scheduler
    listens on the loopback address only. Raises ``InputError`` when dask-cuda is not installed.
    """
    settings = _SETTINGS | ({} if device_type == "cuda" else {"distributed.diagnostics.nvml": False})
    with dask.config.set(settings), contextlib.ExitStack() as stack:
        with _interrupts_held_back():
            cluster = stack.enter_context(_start(device_type, workers))
            client = stack.enter_context(Client(cluster))
        client.wait_for_workers(workers, timeout=120)
        yield client


def _start(device_type: str, workers: int) -> Any:
    options: dict[str, Any] = {
        "n_workers": workers,
        "threads_per_worker": 1,
        "host": "127.0.0.1",
        "dashboard_address": None,
        # without this the scheduler still opens a fixed HTTP port, and a second campaign warns that it is taken
        "scheduler_kwargs": {"dashboard_address": "127.0.0.1:0"},
        "silence_logs": "CRITICAL",
    }
    if device_type != "cuda":
        return LocalCluster(processes=True, memory_limit=None, **options)
    try:
        from dask_cuda import LocalCUDACluster
    except ImportError as error:
        raise InputError(
            "dask-cuda is needed to run on GPUs and does not import",
            got=error,
            expected="the extra gpu-cu12 or gpu-cu13",
            fix="pip install 'precision-time[gpu-cu12]'",
        ) from error
    # The GPUs are those of CUDA_VISIBLE_DEVICES, else all. The worker itself must never touch their memory (a pool, a
    # cache): all of it belongs to the rank it starts.
    return LocalCUDACluster(device_memory_limit=None, memory_limit=None, protocol="tcp", **options)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: a terminal sends it to all of them, and only the flow may act on it.

    The mask is inherited; a Ctrl-C during the block reaches this process at its end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Python's resource tracker unblocks SIGINT in the thread that starts it, so it starts first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
