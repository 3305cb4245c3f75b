"""Sums by NCCL on the stand-in for CuPy; the last rank hangs in a run, and the first must end by the deadline."""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
import stand_in_cupy

stand_in_cupy.install(Path(tempfile.mkdtemp(dir=sys.argv[2])))
stand_in_cupy.DEVICE.count = 2
stand_in_cupy.DEVICE.stuck = True  # each process has a stand-in of its own, so no sum ever ends

from precision_time.casgd.nccl import NcclCommunicator, sum_over_ranks  # noqa: E402

comm = NcclCommunicator("mpi", deadline_s=float(sys.argv[1]))
if comm.rank == comm.size - 1:
    time.sleep(120)
sum_over_ranks(np.ones(3), comm=comm)
print("not reached")
