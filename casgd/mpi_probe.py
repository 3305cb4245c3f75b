"""Whether this machine's MPI takes arrays that lie on a GPU, found out in a child process that may crash."""

import functools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

__all__ = ["GpuAwareness", "find_gpu_awareness", "probe"]

# An MPI that is not GPU-aware copies from a device pointer on the host and dies of SIGSEGV (mpi4py issue 115), so the
# question can only be asked where dying is allowed. Send and receive buffers differ on purpose: an in-place reduction
# over one rank touches no memory and would prove nothing.
_PROGRAM = """
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

# What tells a process that it is one rank of a running job. The child is a job of its own, and would otherwise wait
# for, or speak in the name of, its parent.
_LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "PMIP_", "PRTE_", "OMPI_COMM_", "OMPI_UNIVERSE_", "HYDI_", "HYDRA_", "MPIEXEC_")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAwareness:
    """``aware`` is true if GPU arrays may be handed to MPI; ``reason`` says in words how that is known."""

    aware: bool
    reason: str


def probe(program: str = _PROGRAM, *, timeout_s: float = 60.0) -> GpuAwareness:
    """Run ``program`` in a child process and believe its last line, a JSON object ``{"aware": bool, "reason": str}``.

    A child that is killed, that fails, that says nothing readable or that takes longer than ``timeout_s`` seconds
    means "not aware"; no outcome raises.
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
        told = json.loads(done.stdout.strip().splitlines()[-1])
        return GpuAwareness(aware=told["aware"] is True, reason=str(told["reason"]))
    except (IndexError, KeyError, TypeError, ValueError):
        return GpuAwareness(aware=False, reason="the probe said nothing readable")


@functools.cache
def find_gpu_awareness() -> GpuAwareness:
    """The answer of one `probe` for this process and MPI library; later calls repeat it."""
    return probe()
