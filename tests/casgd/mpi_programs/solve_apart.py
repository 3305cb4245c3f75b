"""Rank 1 runs the solver with another option, or other data, than rank 0; both must be told at start."""

import sys

import numpy as np

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.errors import InputError
from precision_time.casgd.mpi import MpiCommunicator
from precision_time.casgd.objectives import find_objective
from precision_time.casgd.precision import find_policy
from precision_time.casgd.problem import Options, Problem, Schedule

comm = MpiCommunicator(deadline_s=20)
told = {}
for what in sys.argv[1:]:
    odd = comm.rank == 1
    rows = 39 if odd and what == "rows" else 40
    targets = np.where(np.arange(rows) % 2, 1.0, -1.0)
    if odd and what == "targets":
        targets[3] = -targets[3]
    options = Options(
        s=1 if odd and what == "s" else 4,
        batch_size=5 if odd and what == "batch_size" else 4,
        epochs=1,
        schedule=Schedule(kind="constant", eta0=0.1),
        seed=int(odd and what == "seed"),
        policy=find_policy("fp32" if odd and what == "policy" else "fp64"),
    )
    problem = Problem(features=np.ones((rows, 2)), targets=targets, objective=find_objective("logistic"))
    try:
        run_ca_sgd(problem, options, comm=comm)
    except InputError as error:
        told[what] = str(error)
    else:
        told[what] = "no error"
everyone = comm.gather(told)
if comm.rank == 0:
    for what in sys.argv[1:]:
        assert everyone[0][what] == everyone[1][what]
        print(f"{what}: {everyone[0][what]}")
