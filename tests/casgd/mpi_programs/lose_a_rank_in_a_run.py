"""The last rank is killed in the middle of a run of the solver; the others must end within the deadline."""

import os
import signal
import sys

import numpy as np

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.mpi import MpiCommunicator
from precision_time.casgd.objectives import find_objective
from precision_time.casgd.problem import Options, Problem, Schedule


class Dying(MpiCommunicator):
    """Its last rank is killed in its fifth sum."""

    def sum(self, buffer):
        if self.rank == self.size - 1 and self.reductions == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        super().sum(buffer)


comm = Dying(deadline_s=float(sys.argv[1]))
rng = np.random.default_rng(comm.rank)
problem = Problem(
    features=rng.standard_normal((64, 3)), targets=np.arange(64.0) / 64, objective=find_objective("squared")
)
options = Options(s=4, batch_size=4, epochs=3, schedule=Schedule(kind="constant", eta0=0.01))
run_ca_sgd(problem, options, comm=comm)
print("not reached")
