"""From data and a few numbers to a trained model: the start, the step sizes, s, and the run."""

import math
from typing import Any

import numpy as np

from precision_time.casgd.arrays import import_cupy, library_of, move_to_gpu, to_host
from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.communicator import Communicator, OneProcess
from precision_time.casgd.errors import InputError
from precision_time.casgd.nccl import sum_over_ranks
from precision_time.casgd.objectives import Objective
from precision_time.casgd.plan import Plan, plan
from precision_time.casgd.problem import Options, Problem, Schedule, Solution, Start

__all__ = [
    "best_constant",
    "choose_s",
    "expected_smoothness",
    "make_schedule",
    "null_deviance",
    "place_features",
    "train",
]

# With learning_rate "optimal" the step has halved after so many epochs, and falls as 1/t from there.
_DECAY_EPOCHS = 10

# Rows of the sample from which the largest eigenvalue of the second moments is estimated.
_SAMPLED_ROWS = 256

# s = "auto" may take at most this share of the time of plain SGD.
_PLANNING_SHARE = 0.05


def place_features(features: Any, *, device: str) -> Any:
    """``features`` on ``device``: 'cpu' and 'cuda' move them, 'auto' leaves them in place.

    Raises:
        InputError: another device, no CuPy, or a sparse matrix for a GPU.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise InputError("unknown device", got=repr(device), expected="auto, cpu or cuda")
    library = library_of(features)
    if device == "cpu" and library == "cupy":
        return features.get()
    if device == "cuda" and library == "scipy":
        raise InputError(
            "sparse features stay on the CPU", got="device='cuda'", fix="device='cpu', or pass X.toarray()"
        )
    if device == "cuda" and library == "numpy":
        return move_to_gpu(features)
    return features


def expected_smoothness(problem: Problem, *, batch_size: int, comm: Communicator) -> float:
    """The expected smoothness of a batch of b rows, the same on every rank: a step of its inverse is stable.

    L(b) = (m (b - 1) / (b (m - 1))) lambda_max + ((m - b) / (b (m - 1))) max_i h_i |x_i|^2, with lambda_max that of
    (1/m) sum_i h_i x_i x_i^T: the b-nice sampling of Gower et al., "SGD: general analysis and improved rates" (2019),
    with an intercept as one more column of ones, and the penalty added. h_i is the sample weight times the largest
    phi''; for Poisson, whose phi'' is unbounded, times max(y_i, mean y), phi'' near a fitted model. lambda_max is
    estimated from 256 rows, so it is too large if there are many columns.

    One sum of m + 256^2 words over the ranks.
    """
    m = problem.rows
    y = np.asarray(problem.targets, dtype=np.float64)
    height = np.full(m, problem.objective.smoothness or 0.0)
    if problem.objective.smoothness is None:
        height = np.maximum(y, max(_mean(y, problem.sample_weight), np.finfo(float).tiny))
    if problem.sample_weight is not None:
        height = height * np.asarray(problem.sample_weight, dtype=np.float64)
    sample = np.sort(np.random.default_rng(0).permutation(m)[:_SAMPLED_ROWS])
    buffer = np.concatenate([_square_norms(problem.features), _gram(problem.features, sample).ravel()])
    if comm.size > 1:
        sum_over_ranks(buffer, comm=comm)
    extra = float(problem.fit_intercept)
    norms = (buffer[:m] + extra) * height
    scale = np.sqrt(height[sample])
    gram = (buffer[m:].reshape(sample.size, sample.size) + extra) * scale * scale[:, None] / sample.size
    longest = float(norms.max())
    if not math.isfinite(longest) or not np.isfinite(gram).all():
        raise InputError(
            "the features are too large to choose a step size",
            got=f"a squared row norm of {longest:g}",
            fix="standardise the features first (sklearn.preprocessing.StandardScaler)",
        )
    # The eigenvalue of a small sample may be too large; the true one is at most the largest norm.
    largest = min(max(float(np.linalg.eigvalsh(gram)[-1]), 0.0), longest)
    b = min(batch_size, m)
    if m == 1:
        return longest + problem.l2
    return (m * (b - 1) * largest + (m - b) * longest) / (b * (m - 1)) + problem.l2


def _square_norms(features: Any) -> np.ndarray:
    """|x_i|^2 over this rank's columns, (m,) float64 on the host."""
    if library_of(features) == "scipy":
        return np.asarray(features.multiply(features).sum(axis=1), dtype=np.float64).ravel()
    parts = []
    with np.errstate(over="ignore"):
        for start in range(0, features.shape[0], 4096):
            part = features[start : start + 4096].astype(np.float64)
            parts.append(to_host((part * part).sum(axis=1)))
    return np.concatenate(parts)


def _gram(features: Any, rows: np.ndarray) -> np.ndarray:
    """Y Y^T of these rows over this rank's columns, float64 on the host."""
    if library_of(features) == "cupy":
        rows = import_cupy().asarray(rows)
    block = features[rows].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        product = block @ block.T
    return np.asarray(to_host(product.toarray() if library_of(features) == "scipy" else product))


def _mean(values: np.ndarray, weights: Any) -> float:
    return float(np.mean(values) if weights is None else np.average(values, weights=weights))


def best_constant(objective: Objective, targets: np.ndarray, weights: Any = None) -> float:
    """The intercept of the best model without features, where training starts.

    Half an observation of the other kind is added to labels of one class and to counts that are all zero, because
    their best constant is infinite.
    """
    total = float(targets.size if weights is None else np.sum(weights))
    if objective.name == "squared":
        return _mean(targets, weights)
    if objective.name == "poisson":
        return math.log(max(_mean(targets, weights), 0.5 / max(total, 1.0)))
    positive = _mean(targets > 0, weights) * total
    return math.log((positive + 0.5) / (total - positive + 0.5))


def null_deviance(objective: Objective, targets: np.ndarray, weights: Any = None) -> float:
    """The explainable loss: the mean loss of the best constant model less that of a perfect fit.

    Half the variance of the targets for the squared loss, the entropy of the labels for the logistic one, half the
    mean null deviance for Poisson.
    """
    start = np.full(targets.size, best_constant(objective, targets, weights))
    loss = objective.loss(start, targets)
    if objective.name == "poisson":
        counts = np.maximum(targets, np.finfo(float).tiny)
        loss = loss - (targets - targets * np.log(counts))
    weights = None if weights is None else np.asarray(weights, dtype=np.float64)
    return max(float(np.mean(loss if weights is None else loss * weights)), 0.0)


def make_schedule(kind: str, *, eta0: float, power_t: float, steps_per_epoch: int) -> Schedule:
    """The step sizes of a run; 'optimal' is eta0 / (1 + (t - 1) / T) with T the steps of ten epochs.

    scikit-learn's 'optimal' falls as 1 / (alpha t), which for the usual small alpha is nearly constant in a run of far
    fewer than 1 / (alpha eta0) steps; mixed precision needs steps that fall (see guard.py).
    """
    horizon = float(_DECAY_EPOCHS * max(steps_per_epoch, 1))
    return Schedule(kind=kind, eta0=eta0, power_t=power_t, alpha=1 / (eta0 * horizon), t0=horizon)


def choose_s(problem: Problem, options: Options, *, s: int | str, comm: Communicator) -> tuple[int, Plan | None]:
    """The steps between two communications, and the plan, if the planner chose them; 1 on one process without a plan.

    The planner may take a twentieth of the expected time of ``options.epochs`` epochs.
    """
    if s != "auto":
        return int(s), None
    if isinstance(comm, OneProcess):
        return 1, None
    planned = plan(problem, options, comm=comm, budget_share=_PLANNING_SHARE)
    return planned.s, planned


def train(problem: Problem, options: Options, *, comm: Communicator, start: Start) -> Solution:
    """One run of the solver from ``start``, with a check that the result is finite.

    Raises:
        InputError: on every rank, when a weight or the loss is not finite on one of them.
    """
    solution = run_ca_sgd(
        problem,
        options,
        comm=comm,
        start=start,
    )
    finite = bool(np.isfinite(solution.weights).all()) and math.isfinite(solution.intercept)
    if not all(comm.gather(finite)):
        raise InputError(
            "training diverged: a weight is not finite",
            got=f"eta0={options.schedule.eta0:g}, schedule {options.schedule.kind!r}, loss of the last epoch "
            f"{solution.loss_curve[-1] if solution.loss_curve else float('nan'):g}",
            fix="leave eta0=None, or lower it; standardise the features",
        )
    return solution
