"""Ranks that do one thing each as soon as they build their model, and end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def _tell(values):
    path = Path(os.environ["SCRIPTED_RANK_OUT"])
    path.with_suffix(".part").write_text(json.dumps(values))
    path.with_suffix(".part").replace(path)


def ends():
    os._exit(0)


def ends_with_3():
    os._exit(3)


def raises():
    raise ValueError("nothing to train")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def tells():
    import ctypes

    import numpy
    import torch

    status = Path("/proc/self/status").read_text().splitlines()
    openblas = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
    _tell(
        {
            "environment": dict(os.environ),
            "path": sys.path,
            "arguments": sys.argv,
            "folder": os.getcwd(),
            "command": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
            "leads_session": os.getsid(0) == os.getpid(),
            "signals": [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
            "files": sorted(os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)),
            "open": len(os.listdir("/proc/self/fd")),
            "parent": os.getppid(),
            "pid": os.getpid(),
            "torch_threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "openblas_threads": [
                ctypes.CDLL(path).scipy_openblas_get_num_threads64_()
                for path in openblas
                if hasattr(ctypes.CDLL(path), "scipy_openblas_get_num_threads64_")
            ],
            "torch_seed": torch.initial_seed(),
            "cuda": torch.cuda.is_initialized(),
            "numpy_draw": float(numpy.random.random()),
            "data_kib": next(int(line.split()[1]) for line in status if line.startswith("VmData")),
        }
    )
    print("a rank said this", flush=True)
    os._exit(0)


def sleeps():
    time.sleep(600)


def sleeps_with_family():
    """Ignores polite signals, and so do its child and a grandchild in a session of its own."""
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN); "
    grandchild = [sys.executable, "-c", deaf + "time.sleep(600)"]
    code = deaf + (
        f"import subprocess; print(subprocess.Popen({grandchild}, start_new_session=True).pid, flush=True); "
        "time.sleep(600)"
    )
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    _tell({"family": [os.getpid(), child.pid, int(child.stdout.readline())]})
    time.sleep(600)


def leaves_orphan():
    """Ends well, and leaves behind a process that has left its session and lost its parent."""
    daemon = [sys.executable, "-c", "import time; time.sleep(600)"]
    code = f"import subprocess; print(subprocess.Popen({daemon}, start_new_session=True, stdout=-3).pid)"
    left = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    _tell({"family": [int(left.stdout)]})
    os._exit(0)


def hoards():
    import torch

    tensors = []
    while True:
        tensors.append(torch.ones(2**22))


def tries_for_memory():
    """Allocates pieces of 64 MB up to 1 GB, which succeeds without a limit."""
    import torch

    tensors = [torch.ones(2**24) for _ in range(16)]
    _tell({"pieces": len(tensors)})
    os._exit(0)
