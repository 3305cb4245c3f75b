"""The work of the ``precision-time glm`` commands: fit a model, plan, bound errors, time runs."""

import math
import os
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from precision_time.casgd.arrays import to_host
from precision_time.casgd.bounds import OuterStep
from precision_time.casgd.command_data import CommandData
from precision_time.casgd.communicator import Communicator, agree
from precision_time.casgd.emulator import compare_errors
from precision_time.casgd.errors import InputError, NotConvergedWarning
from precision_time.casgd.guard import OnRisk, fallbacks
from precision_time.casgd.mpi import explain_staging
from precision_time.casgd.nccl import sum_over_ranks
from precision_time.casgd.plan import Plan, plan
from precision_time.casgd.precision import PrecisionPolicy, find_policy
from precision_time.casgd.problem import PARTS, Options, Problem, Solution, Start, batch_order
from precision_time.casgd.training import (
    best_constant,
    expected_smoothness,
    make_schedule,
    train,
)

__all__ = ["Model", "bound_errors", "fit_model", "plan_run", "save_model", "time_runs"]

_SCORES = {"logistic": "accuracy", "squared": "R2", "poisson": "D2"}

# The emulated outer step: at most so many steps, and rows (an emulated Gram takes rows^2 columns roundings).
_EMULATED_STEPS, _EMULATED_ROWS = 8, 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """Coefficients (n,) and intercept for the original features, before standardisation, and the settings in use.

    predicted_excess: of the precision in use (``Verdict.predicted_excess``); NaN if the guard was not asked.
    """

    objective: str
    coef: np.ndarray
    intercept: float
    precision: str
    s: int
    predicted_excess: float


def fit_model(data: CommandData, *, comm: Communicator, settings: Mapping[str, Any]) -> tuple[dict[str, Any], Model]:
    """Train the estimator of the data's objective with ``settings``; returns a report of JSON values and the model."""
    from precision_time.casgd.estimators import CASGDClassifier, CASGDPoissonRegressor, CASGDRegressor

    kinds = {"logistic": CASGDClassifier, "squared": CASGDRegressor, "poisson": CASGDPoissonRegressor}
    estimator = kinds[data.objective](**settings, comm=comm, column_block=True)
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        estimator.fit(data.features, data.targets)
        total_s = time.perf_counter() - started
        score = float(estimator.score(data.features, data.targets))
    first, past = estimator.columns_
    coef = np.zeros(data.columns)
    shift = np.zeros(1)
    coef[first:past] = np.ravel(estimator.coef_)[first:past] / data.scale
    shift[0] = float(data.mean @ coef[first:past])
    if comm.size > 1:
        sum_over_ranks(coef, comm=comm)
        sum_over_ranks(shift, comm=comm)
    intercept = float(np.ravel(estimator.intercept_)[0])
    excess = math.nan if estimator.verdict_ is None else float(estimator.verdict_.predicted_excess)
    report = {
        "data": data.name,
        "objective": data.objective,
        "rows": len(data.targets),
        "columns": data.columns,
        "ranks": comm.size,
        "s": estimator.s_,
        "batch_size": estimator.batch_size,
        "precision": estimator.precision_.name,
        "predicted_excess": None if math.isnan(excess) else excess,
        "prefetch": bool(estimator.prefetch),
        "epochs": estimator.n_iter_,
        "converged": not any(issubclass(warning.category, NotConvergedWarning) for warning in caught),
        "loss": float(estimator.loss_curve_[-1]),
        "score_name": _SCORES[data.objective],
        "score": score,
        "eta0": estimator.eta0_,
        "reductions": estimator.reductions_,
        "total_s": total_s,
        "seconds": estimator.timings_,
        "staging": explain_staging(comm),
        "warnings": list(dict.fromkeys(str(warning.message) for warning in caught)),
        "out": None,
    }
    return report, Model(
        objective=data.objective,
        coef=coef,
        intercept=intercept - float(shift[0]),
        precision=estimator.precision_.name,
        s=estimator.s_,
        predicted_excess=excess,
    )


def save_model(path: Path, model: Model, *, comm: Communicator) -> None:
    """Write the fields of ``model`` to ``path`` on rank 0, whole or not at all: ``coef`` (n,), the others ().

    Read it with ``numpy.load(path, allow_pickle=False)``.

    Raises:
        InputError: on every rank, if the file cannot be written.
    """

    def write() -> None:
        if comm.rank:
            return
        try:
            handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        except OSError as error:
            raise InputError("the model cannot be written", got=error, fix="choose another --out") from error
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(
                    file,
                    coef=model.coef,
                    intercept=model.intercept,
                    objective=np.array(model.objective),
                    precision=np.array(model.precision),
                    s=model.s,
                    predicted_excess=model.predicted_excess,
                )
                file.flush()
                os.fsync(file.fileno())
            os.chmod(partial, 0o644)
            os.replace(partial, path)
        except OSError as error:
            Path(partial).unlink(missing_ok=True)
            raise InputError("the model cannot be written", got=error, fix="choose another --out") from error

    agree(comm, write)


def plan_run(
    data: CommandData,
    *,
    comm: Communicator,
    alpha: float,
    batch_size: int,
    precision: str,
    seed: int,
    on_risk: OnRisk | None = None,
    prefetch: bool = False,
) -> Plan:
    """The plan for these data; precision 'auto' is the guarded recipe.

    on_risk: as the guard takes it; None is 'fallback' for 'auto', and no guard for a named precision.
    """
    problem = data.problem(l2=alpha)
    options = _options(problem, comm, batch_size=batch_size, epochs=100, seed=seed)
    policy, on_risk = _read_precision(precision, on_risk)
    return plan(problem, replace(options, policy=policy, prefetch=prefetch), comm=comm, on_risk=on_risk)


def bound_errors(
    data: CommandData,
    *,
    comm: Communicator,
    alpha: float,
    batch_size: int,
    precision: str,
    seed: int,
    on_risk: OnRisk | None = None,
) -> dict[str, Any]:
    """How far rounding moves one outer step, bounded and measured, for the policies that `plan_run` considers.

    The step starts from the weights of an epoch of FP32 SGD. It has no intercept: targets of the squared loss are
    centred. Returns the JSON values of `emulator.compare_errors`, and ``batch_size`` and ``s`` of the step.

    Raises:
        InputError: several ranks, an unknown precision, or one that rounds nothing.
    """
    if comm.size > 1:
        raise InputError(
            "bounds need all columns in one process", got=f"{comm.size} ranks", fix="leave out --bounds, or mpiexec"
        )
    policy, on_risk = _read_precision(precision, on_risk)
    policies = fallbacks(policy) if on_risk == "fallback" else [policy]
    problem = data.problem(l2=alpha, fit_intercept=False)
    if data.objective == "squared":
        problem = replace(problem, targets=data.targets - data.targets.mean())
    options = _options(problem, comm, batch_size=batch_size, epochs=1, seed=seed)
    trained = train(problem, options, comm=comm, start=Start())
    b = min(batch_size, problem.rows, _EMULATED_ROWS)
    s = max(1, min(_EMULATED_STEPS, _EMULATED_ROWS // b, problem.rows // b))
    rows = batch_order(problem.rows, b, 1, order="shuffled", seed=seed)[: s * b]
    block = to_host(problem.features[rows])
    step = OuterStep(
        rows=np.asarray(block.toarray() if hasattr(block, "toarray") else block, dtype=np.float64),
        targets=problem.targets[rows],
        weights=trained.weights.astype(np.float64),
        rates=options.schedule.rates(trained.steps + 1, s),
        objective=problem.objective,
    )
    return {"s": s, "batch_size": b, **compare_errors(step, policies)}


def _read_precision(precision: str, on_risk: OnRisk | None) -> tuple[PrecisionPolicy, OnRisk | None]:
    """The policy to start from, and what the guard does on a risk; None asks no guard."""
    if precision == "auto":
        return find_policy("recipe"), on_risk or "fallback"
    return find_policy(precision), on_risk


def time_runs(
    data: CommandData,
    *,
    comm: Communicator,
    alpha: float,
    s: Sequence[int],
    batch_sizes: Sequence[int],
    precisions: Sequence[str],
    epochs: int,
    repeats: int,
    seed: int,
    prefetch: bool = False,
) -> list[dict[str, Any]]:
    """One row for each batch size, precision and s: seconds of an epoch of the slowest rank (the fastest of
    ``repeats``), speed-up and loss gap against FP32 SGD of the same batch size.

    Losses are those of the last iterate with the penalty, on the features before rounding. Each round makes all runs in
    turn, so that a slow spell of the machine affects all of them.

    Raises:
        InputError: a count below 1, an unknown precision, or training that diverges.
    """
    for name, values in (("s", s), ("batch size", batch_sizes), ("epochs", (epochs,)), ("repeats", (repeats,))):
        if min(values) < 1:
            raise InputError(f"{name} is not usable", got=min(values), expected="at least 1")
    problem = data.problem(l2=alpha)
    cells: dict[tuple[int, str, int], Options] = {}
    for b in batch_sizes:
        plain = _options(problem, comm, batch_size=b, epochs=epochs, seed=seed)
        cells[b, "fp32", 1] = plain
        for precision in precisions:
            for steps in s:
                cells[b, precision, steps] = replace(
                    plain, s=steps, policy=find_policy(precision), prefetch=prefetch and steps > 1
                )
    start = Start(intercept=best_constant(problem.objective, data.targets))
    fastest: dict[tuple[int, str, int], tuple[float, Solution]] = {}
    for _ in range(repeats):
        for cell, options in cells.items():
            comm.barrier()
            solution = train(problem, options, comm=comm, start=start)
            seconds = max(comm.gather(sum(solution.seconds.values()))) / epochs
            if cell not in fastest or seconds < fastest[cell][0]:
                fastest[cell] = seconds, solution
    losses = {cell: _loss(problem, solution, comm) for cell, (_, solution) in fastest.items()}
    rows = []
    for (b, precision, steps), (seconds, solution) in fastest.items():
        plain_s, plain_loss = fastest[b, "fp32", 1][0], losses[b, "fp32", 1]
        loss = losses[b, precision, steps]
        rows.append(
            {
                "s": steps,
                "batch_size": b,
                "precision": precision,
                "seconds_per_epoch": seconds,
                "seconds": {part: float(solution.seconds[part]) / epochs for part in PARTS},
                "speedup": plain_s / seconds,
                "reductions_per_epoch": solution.reductions / epochs,
                "loss": loss,
                "loss_gap": (loss - plain_loss) / abs(plain_loss) if plain_loss else 0.0,
            }
        )
    return rows


def _options(problem: Problem, comm: Communicator, *, batch_size: int, epochs: int, seed: int) -> Options:
    """FP32 SGD with the step sizes of the estimators."""
    smoothness = expected_smoothness(problem, batch_size=batch_size, comm=comm)
    steps = -(-problem.rows // batch_size)
    schedule = make_schedule("optimal", eta0=1 / smoothness, power_t=0.5, steps_per_epoch=steps)
    return Options(batch_size=batch_size, epochs=epochs, schedule=schedule, seed=seed, policy=find_policy("fp32"))


def _loss(problem: Problem, solution: Solution, comm: Communicator) -> float:
    """f at the solution, with the penalty, on the features before rounding: float64, the same on every rank."""
    features, weights = to_host(problem.features).astype(np.float64), solution.weights.astype(np.float64)
    buffer = np.concatenate([np.asarray(features @ weights).ravel(), [float(weights @ weights)]])
    sum_over_ranks(buffer, comm=comm)
    loss = problem.objective.loss(buffer[:-1] + solution.intercept, np.asarray(problem.targets))
    return float(np.mean(loss)) + problem.l2 / 2 * float(buffer[-1])
