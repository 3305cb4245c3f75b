"""The last rank is killed, or hangs, after the first sum; the others must end within the deadline."""

import os
import signal
import sys
import time

import numpy as np

from precision_time.casgd.mpi import MpiCommunicator

how, call = sys.argv[1:3]
comm = MpiCommunicator(deadline_s=float(sys.argv[3]))
comm.sum(np.ones(3))
if comm.rank == comm.size - 1:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)
if call == "sum":
    comm.sum(np.ones(3))
elif call == "gather":
    comm.gather({"rank": comm.rank})
else:
    comm.barrier()
print("not reached")
