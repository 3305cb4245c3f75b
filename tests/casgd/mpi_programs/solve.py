"""Each case is solved by one process and by all ranks; rank 0 prints the differences and the number of MPI calls."""

import json
import math

import numpy as np
from counted import Counted
from scipy.sparse import csr_matrix

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.column_cache import split_columns
from precision_time.casgd.datasets import synth
from precision_time.casgd.mpi import MpiCommunicator
from precision_time.casgd.objectives import find_objective
from precision_time.casgd.precision import find_policy
from precision_time.casgd.problem import Options, Problem, Schedule

ROWS, COLUMNS, EPOCHS = 203, 13, 2
CASES = [
    (objective, density, s, batch_size, policy)
    for objective in ("logistic", "squared", "poisson")
    for density in (1.0, 0.4)
    for s, batch_size in ((1, 8), (4, 8), (16, 3))
    for policy in ("fp64",)
] + [("logistic", 1.0, 4, 8, policy) for policy in ("fp32", "recipe", "paper", "fp16", "bf16-gram")]

counted = Counted()
comm = MpiCommunicator(counted, deadline_s=30)
first, end = split_columns(COLUMNS, comm.size)[comm.rank]
out = []
for objective, density, s, batch_size, policy in CASES:
    data = synth(objective, ROWS, COLUMNS, seed=5)
    features = data.features
    if density < 1:
        features = csr_matrix(features * (np.random.default_rng(5).random(features.shape) < density))
    options = Options(
        s=s,
        batch_size=batch_size,
        epochs=EPOCHS,
        schedule=Schedule(kind="invscaling", eta0=0.05),
        seed=3,
        policy=find_policy(policy),
    )

    def problem_of(columns, data=data, objective=objective):
        return Problem(features=columns, targets=data.targets, objective=find_objective(objective), l2=1e-3)

    alone = run_ca_sgd(problem_of(features), options)
    before = counted.all_reductions()
    together = run_ca_sgd(problem_of(features[:, first:end]), options, comm=comm)
    calls = counted.all_reductions() - before
    weights = np.concatenate(comm.gather(np.asarray(together.weights, dtype=float).tolist()))
    intercepts = comm.gather(float(together.intercept))
    whole = np.asarray(alone.weights, dtype=float)
    out.append(
        {
            "case": [objective, density, s, batch_size, policy],
            "difference": float(np.abs(weights - whole).max() / np.abs(whole).max()),
            "intercept_difference": abs(float(alone.intercept) - intercepts[0]),
            "intercepts_equal": len(set(intercepts)) == 1,
            "calls": calls,
            "reductions": together.reductions,
            "outer_steps": EPOCHS * math.ceil(math.ceil(ROWS / batch_size) / s),
        }
    )
if comm.rank == 0:
    print(json.dumps(out))
