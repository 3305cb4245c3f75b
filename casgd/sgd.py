"""Mini-batch SGD in column layout, one sum over ranks a step: the baseline, and what s = 1 means."""

import hashlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from precision_time.casgd.arrays import Features, library_of, store_features, work_type
from precision_time.casgd.comm import Communicator, check_agreement, find_communicator
from precision_time.casgd.errors import CommunicationError, InputError
from precision_time.casgd.gram import round_in_place
from precision_time.casgd.precision import ROUNDOFF, carrier
from precision_time.casgd.problem import PARTS, Options, Problem, Solution, batch_order

__all__ = ["Epoch", "Run", "cut", "run_sgd"]

# What ranks hold alike may differ by so many roundoffs: processors of two kinds round exp differently in the last bit.
_DRIFT_ROUNDOFFS = 2.0**12


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the rows, everything in the order in which its steps take them.

    rows: (m,), or None where that order is the order of storage.
    targets: y, (m,).
    scales: eta_t a_i / b_t, (m,): what turns phi' into the coefficient of a row.
    shrinks: rho_t = 1 - eta_t l2, one a step, as Python numbers.
    margins: (m,), for the steps to fill.
    """

    rows: np.ndarray | None
    targets: np.ndarray
    scales: np.ndarray
    shrinks: list[float]
    margins: np.ndarray

    def rows_between(self, start: int, stop: int) -> np.ndarray | slice:
        return slice(start, stop) if self.rows is None else self.rows[start:stop]


def cut(count: int, size: int) -> list[int]:
    """Sizes of the runs that ``count`` things make when taken ``size`` at a time; the last may be shorter."""
    full, rest = divmod(count, size)
    return [size] * full + ([rest] if rest else [])


class Run:
    """What plain and communication-avoiding SGD share: types, stored features, epochs, early stopping, clocks.

    The arithmetic is at least as exact as the policy says: ``work`` is the type of all products with the features,
    ``recurrence`` of margins, link and coefficients, ``wire`` of the summed buffer. ``owned`` are this rank's columns
    where ``problem`` has a stand-in for them. Raises InputError for what the policy or the data cannot do, for ranks
    that disagree, and where one of several ranks owns no column.
    """

    def __init__(
        self,
        problem: Problem,
        options: Options,
        *,
        comm: Any,
        weights: Any,
        intercept: float,
        first_step: int,
        first_epoch: int,
        owned: Any = None,
    ) -> None:
        policy = options.policy
        policy.check_executable()
        self.problem, self.options = problem, options
        self._owned = problem.features if owned is None else owned
        self.comm: Communicator = find_communicator(comm)
        self.m = problem.rows
        self.batch_size = min(options.batch_size, self.m)
        self.batches = cut(self.m, self.batch_size)
        self.work = work_type(policy)
        self.wire = carrier("fp64" if "fp64" in (policy.gram_storage, policy.margin_storage) else "fp32")
        self.recurrence = carrier("fp64" if "fp64" in (policy.recurrence, policy.link) else "fp32")
        if self.comm.size > 1:
            check_agreement(self.comm, self._replicated(intercept, first_step, first_epoch))
        self.features, self.weights = self._prepare_columns(weights)
        self.intercept = float(intercept)
        self.targets = np.asarray(problem.targets, dtype=self.recurrence)
        self.importance = None if problem.sample_weight is None else np.asarray(problem.sample_weight, dtype=np.float64)
        self.first_step, self.first_epoch = first_step, first_epoch
        self.steps = 0
        self.losses: list[float] = []
        self.converged = False
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._reductions = self.comm.reductions

    def _replicated(self, intercept: float, first_step: int, first_epoch: int) -> dict[str, object]:
        """What has to be the same on every rank, or the ranks would quietly solve different problems."""
        problem, options = self.problem, self.options

        def digest(values: Any) -> str | None:
            if values is None:
                return None
            return hashlib.sha256(np.ascontiguousarray(values, dtype=np.float64).tobytes()).hexdigest()[:16]

        return {
            "rows": problem.rows,
            "features.library": library_of(self._owned),
            "features.dtype": str(self._owned.dtype),
            "targets": digest(problem.targets),
            "sample_weight": digest(problem.sample_weight),
            "objective": problem.objective.name,
            "l2": problem.l2,
            "fit_intercept": problem.fit_intercept,
            **{f"policy.{choice}": fmt for choice, fmt in options.policy.formats.items()},
            **{f"schedule.{name}": value for name, value in asdict(options.schedule).items()},
            **{
                name: getattr(options, name)
                for name in ("s", "batch_size", "epochs", "order", "seed", "tol", "n_iter_no_change", "prefetch")
            },
            "earlier_losses": digest(options.earlier_losses),
            "intercept": float(intercept),
            "first_step": first_step,
            "first_epoch": first_epoch,
        }

    def _prepare_columns(self, weights: Any) -> tuple[Features, np.ndarray]:
        """Features and first weights; where one rank's are refused, every rank ends instead of waiting for it."""
        failure: InputError | None = None
        try:
            if self.comm.size > 1 and self._owned.shape[1] == 0:
                raise InputError(
                    "a rank owns no column",
                    got=f"rank {self.comm.rank} of {self.comm.size}",
                    expected="at least one column on every rank",
                    fix="start at most as many ranks as there are columns",
                )
            stored = store_features(self.problem.features, self.options.policy), self._start(weights)
        except InputError as error:
            failure = error
        if self.comm.size > 1:
            told = self.comm.gather(None if failure is None else str(failure))
            others = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
            if others and failure is None:
                raise InputError("another rank cannot start", got="; ".join(others[:4]))
        if failure is not None:
            raise failure
        return stored

    def _start(self, weights: Any) -> np.ndarray:
        kind = carrier(self.options.policy.weights)
        columns = self.problem.columns
        if weights is None:
            return np.zeros(columns, dtype=kind)
        start = np.array(weights, dtype=kind)
        if start.shape != (columns,):
            raise InputError("initial weights", got=f"shape {start.shape}", expected=f"({columns},), one a column")
        round_in_place(start, self.options.policy.weights)
        return start

    def epochs(self) -> Iterator[Epoch]:
        """The epochs until the last or until the loss stops falling; scores each when the next is asked for."""
        options = self.options
        sizes = np.asarray(self.batches)
        best, stale = np.inf, 0
        for loss in options.earlier_losses:
            best, stale = self._follow(loss, best, stale)
        margins = np.empty(self.m, dtype=self.recurrence)
        for number in range(options.epochs):
            cyclic = options.order == "cyclic"
            rows = batch_order(
                self.m, self.batch_size, self.first_epoch + number, order=options.order, seed=options.seed
            )
            rates = options.schedule.rates(self.first_step + self.steps + 1, len(sizes))
            scales = np.repeat(rates / sizes, sizes)
            if self.importance is not None:
                scales *= self.importance if cyclic else self.importance[rows]
            epoch = Epoch(
                rows=None if cyclic else rows,
                targets=self.targets if cyclic else self.targets[rows],
                scales=scales.astype(self.recurrence, copy=False),
                shrinks=(1.0 - rates * self.problem.l2).tolist(),
                margins=margins,
            )
            with np.errstate(over="ignore", invalid="ignore"):
                yield epoch
                loss = self._score(epoch)
            self.steps += len(sizes)
            self.losses.append(loss)
            best, stale = self._follow(loss, best, stale)
            if self._end_epoch(number + 1, loss, options.tol is not None and stale >= options.n_iter_no_change):
                self.converged = True
                return

    def _follow(self, loss: float, best: float, stale: int) -> tuple[float, int]:
        """The least loss so far, and for how many epochs none was below it by ``tol``."""
        tol = self.options.tol
        return min(best, loss), stale + 1 if tol is not None and loss > best - tol else 0

    def _end_epoch(self, number: int, loss: float, stop: bool) -> bool:
        """Whether training stops here, which rank 0 decides for all.

        Every rank computes the loss and the intercept for itself, from sums that should be the same everywhere. Where
        they are not, the recurrences drift apart and the weights belong to no iterate: so they are compared.
        """
        told = [(loss, self.intercept, stop)]
        if self.comm.size > 1:
            told = [(float(one[0]), float(one[1]), bool(one[2])) for one in self.comm.gather(told[0])]
        diverged = next((one[0] for one in told if not math.isfinite(one[0])), None)
        if diverged is not None:
            raise InputError(
                f"the iterates diverged in epoch {number}",
                got=f"loss {diverged}",
                expected="a finite loss",
                fix="lower eta0, standardise the columns, or bound the counts",
            )
        allowed = _DRIFT_ROUNDOFFS * ROUNDOFF["fp64" if self.recurrence == np.float64 else "fp32"]
        first = told[0]
        # An intercept near 0 is compared in the unit of the margins.
        unit = max(1.0, math.sqrt(abs(first[0])))
        for rank, one in enumerate(told):
            if not (
                math.isclose(one[0], first[0], rel_tol=allowed, abs_tol=allowed)
                and math.isclose(one[1], first[1], rel_tol=allowed, abs_tol=allowed * unit)
            ):
                raise CommunicationError(
                    f"the ranks no longer hold the same model after epoch {number}",
                    got=f"rank {rank} has loss {one[0]!r}, intercept {one[1]!r}; rank 0 has {first[0]!r}, {first[1]!r}",
                    expected="sums that are the same on every rank",
                    fix="choose another MPI library or another of its AllReduce algorithms",
                )
        return first[2]

    def _score(self, epoch: Epoch) -> float:
        """Weighted mean of phi over the margins of the epoch."""
        values = self.problem.objective.loss(epoch.margins, epoch.targets)
        if self.importance is None:
            return float(np.mean(values, dtype=np.float64))
        weights = self.importance if epoch.rows is None else self.importance[epoch.rows]
        return float(np.average(values, weights=weights)) if weights.any() else 0.0

    def finish(self) -> Solution:
        return Solution(
            weights=self.weights,
            intercept=self.intercept,
            epochs=len(self.losses),
            steps=self.steps,
            loss_curve=tuple(self.losses),
            reductions=self.comm.reductions - self._reductions,
            seconds=dict(self.seconds),
            converged=self.converged,
            policy=self.options.policy,
        )


def run_sgd(
    problem: Problem,
    options: Options,
    *,
    comm: Any = None,
    weights: Any = None,
    intercept: float = 0.0,
    first_step: int = 0,
    first_epoch: int = 0,
) -> Solution:
    """Plain SGD in column layout; ``options.s`` and ``options.prefetch`` play no part.

    Step t with batch I of b rows: z = sum over ranks of X[I, J] w, plus w0; r = a phi'(z, y_I) / b;
    w <- (1 - eta_t l2) w - eta_t X[I, J]^T r; w0 <- w0 - eta_t sum(r). One sum of b words a step.

    comm: as :func:`precision_time.casgd.comm.find_communicator` takes it; None is one process.
    weights, intercept: where to start, (n_local,) and a number.
    first_step, first_epoch: steps and epochs done before, for the schedule and the shuffling.

    Raises:
        InputError: data, options or ranks that do not fit together, or iterates that diverge.
        CommunicationError: a rank that is gone, or sums that are not the same on all ranks.
    """
    begin: dict[str, Any] = {
        "comm": comm,
        "weights": weights,
        "intercept": intercept,
        "first_step": first_step,
        "first_epoch": first_epoch,
    }
    if library_of(problem.features) == "cupy":
        from precision_time.casgd.gpu import run_sgd as run_sgd_on_gpu

        return run_sgd_on_gpu(problem, options, **begin)
    run = Run(problem, options, **begin)
    for epoch in run.epochs():
        _pass_over(run, epoch)
    return run.finish()


def _pass_over(run: Run, epoch: Epoch) -> None:
    policy = run.options.policy
    gather, total = run.features.gather, run.comm.sum
    derivative_into = run.problem.objective.derivative_into
    fit_intercept, penalised = run.problem.fit_intercept, run.problem.l2 > 0
    round_margins = policy.margin_storage not in ("fp32", "fp64") or run.wire != carrier(policy.margin_storage)
    round_weights = policy.weights not in ("fp32", "fp64")
    one_type = run.weights.dtype == run.work == run.wire == run.recurrence
    weights, intercept = run.weights, run.intercept
    dense_delta = np.empty(weights.shape, dtype=run.work)
    wire = np.empty(run.batch_size, dtype=run.wire)
    coefficients = np.empty(run.batch_size, dtype=run.recurrence)
    ones = np.ones(run.batch_size, dtype=run.recurrence)
    gather_s = communicate_s = recurrence_s = update_s = 0.0
    now = time.perf_counter
    start = 0
    t0 = now()
    for size, shrink in zip(run.batches, epoch.shrinks, strict=True):
        stop = start + size
        if size != wire.shape[0]:
            wire, coefficients, ones = wire[:size], coefficients[:size], ones[:size]
        block = gather(epoch.rows_between(start, stop))
        dense = isinstance(block, np.ndarray)
        t1 = now()
        if dense and one_type:
            block.dot(weights, wire)
        else:
            wire[...] = block @ weights.astype(run.work, copy=False)
        if round_margins:
            round_in_place(wire, policy.margin_storage)
        t2 = now()
        total(wire)
        t3 = now()
        if round_margins:
            round_in_place(wire, policy.margin_storage)
        margins = epoch.margins[start:stop]
        np.add(wire, intercept, margins)
        derivative_into(margins, epoch.targets[start:stop], coefficients)
        np.multiply(coefficients, epoch.scales[start:stop], coefficients)
        if fit_intercept:
            intercept -= float(ones.dot(coefficients))
        t4 = now()
        if penalised:
            np.multiply(weights, shrink, weights)
        if dense and one_type:
            coefficients.dot(block, dense_delta)
            np.subtract(weights, dense_delta, weights)
        else:
            np.subtract(weights, block.T @ coefficients.astype(run.work, copy=False), weights, casting="same_kind")
        if round_weights:
            round_in_place(weights, policy.weights)
        start = stop
        t5 = now()
        gather_s += t1 - t0
        communicate_s += t3 - t2
        recurrence_s += (t2 - t1) + (t4 - t3)
        update_s += t5 - t4
        t0 = t5
    run.intercept = intercept
    for part, value in zip(PARTS, (gather_s, 0.0, communicate_s, recurrence_s, update_s), strict=True):
        run.seconds[part] += value
