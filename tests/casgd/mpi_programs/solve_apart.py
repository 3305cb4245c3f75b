"""Rank 1 runs the solver with another option, or other data, than rank 0; both must raise at the start."""

import sys

import numpy as np

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.errors import InputError
from precision_time.casgd.mpi import MpiCommunicator
from precision_time.casgd.objectives import find_objective
from precision_time.casgd.precision import find_policy
from precision_time.casgd.problem import Options, Problem, Schedule

comm = MpiCommunicator(deadline_s=20)
messages = {}
for name in sys.argv[1:]:
    odd = comm.rank == 1
    rows = 39 if odd and name == "rows" else 40
    targets = np.where(np.arange(rows) % 2, 1.0, -1.0)
    if odd and name == "targets":
        targets[3] = -targets[3]
    options = Options(
        s=1 if odd and name == "s" else 4,
        batch_size=5 if odd and name == "batch_size" else 4,
        epochs=1,
        schedule=Schedule(kind="constant", eta0=0.1),
        seed=int(odd and name == "seed"),
        policy=find_policy("fp32" if odd and name == "policy" else "fp64"),
    )
    problem = Problem(features=np.ones((rows, 2)), targets=targets, objective=find_objective("logistic"))
    try:
        run_ca_sgd(problem, options, comm=comm)
    except InputError as error:
        messages[name] = str(error)
    else:
        messages[name] = "no error"
of_ranks = comm.gather(messages)
if comm.rank == 0:
    for name in sys.argv[1:]:
        assert of_ranks[0][name] == of_ranks[1][name]
        print(f"{name}: {of_ranks[0][name]}")
