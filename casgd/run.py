"""The part of a run that every back end shares: types, stored features, epochs, losses, early stopping, clocks."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from precision_time.casgd.arrays import Features, library_of, store_features, work_type
from precision_time.casgd.communicator import Communicator, agree, check_agreement
from precision_time.casgd.errors import CommunicationError, InputError
from precision_time.casgd.gram import round_in_place
from precision_time.casgd.mpi import find_communicator
from precision_time.casgd.precision import ROUNDOFF, carrier
from precision_time.casgd.problem import PARTS, Options, Problem, Solution, Start, batch_order

__all__ = ["Epoch", "Run", "cut"]

# Losses and intercepts of the ranks may differ by so many roundoffs: two kinds of processors round exp differently.
_DRIFT_ROUNDOFFS = 2.0**12


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the rows; all arrays are in the order in which the steps take the rows.

    rows: (m,), or None if that order is the order of storage.
    targets: y, (m,).
    scales: eta_t a_i / b_t, (m,): times phi' they give the coefficient of a row.
    shrinks: rho_t = 1 - eta_t l2, one a step, as Python numbers.
    margins: (m,), which the steps fill.
    """

    rows: np.ndarray | None
    targets: np.ndarray
    scales: np.ndarray
    shrinks: list[float]
    margins: np.ndarray

    def rows_between(self, start: int, stop: int) -> np.ndarray | slice:
        return slice(start, stop) if self.rows is None else self.rows[start:stop]


def cut(count: int, size: int) -> list[int]:
    """The sizes of the groups when ``count`` items are taken ``size`` at a time; the last may be smaller."""
    full, rest = divmod(count, size)
    return [size] * full + ([rest] if rest else [])


class Run(ABC):
    """One run of SGD or CA-SGD; a back end adds `pass_over`, the steps of an epoch.

    The arithmetic is at least as exact as the policy says: ``work`` is the type of all products with the features,
    ``recurrence`` of margins, link and coefficients, ``wire`` of the summed buffer. ``owned`` are this rank's columns
    if ``problem`` holds a stand-in for them. Raises InputError for a policy that cannot be executed, for data that do
    not fit the policy, for ranks that disagree, and if one of several ranks owns no column.
    """

    def __init__(
        self,
        problem: Problem,
        options: Options,
        *,
        comm: Any = None,
        start: Start | None = None,
        owned: Any = None,
    ) -> None:
        start = start or Start()
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
            check_agreement(self.comm, self._replicated(start))
        self.features, self.weights = agree(self.comm, lambda: self._prepare_columns(start.weights))
        self.intercept = float(start.intercept)
        self.targets = np.asarray(problem.targets, dtype=self.recurrence)
        self.importance = None if problem.sample_weight is None else np.asarray(problem.sample_weight, dtype=np.float64)
        self.first_step, self.first_epoch = start.steps, start.epochs
        self.steps = 0
        self.losses: list[float] = []
        self.converged = False
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._reductions = self.comm.reductions

    @abstractmethod
    def pass_over(self, epoch: Epoch) -> None:
        """Take all steps of one epoch: fill its margins, move the weights and the intercept, add to ``seconds``."""

    def _replicated(self, start: Start) -> dict[str, object]:
        """The values that must be the same on every rank: otherwise the ranks would solve different problems."""
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
            "intercept": float(start.intercept),
            "first_step": start.steps,
            "first_epoch": start.epochs,
        }

    def _prepare_columns(self, weights: Any) -> tuple[Features, np.ndarray]:
        """Features and first weights of this rank."""
        if self.comm.size > 1 and self._owned.shape[1] == 0:
            raise InputError(
                "a rank owns no column",
                got=f"rank {self.comm.rank} of {self.comm.size}",
                expected="at least one column on every rank",
                fix="start at most as many ranks as there are columns",
            )
        return store_features(self.problem.features, self.options.policy), self._place_weights(weights)

    def _place_weights(self, weights: Any) -> np.ndarray:
        kind = carrier(self.options.policy.weights)
        columns = self.problem.columns
        if weights is None:
            return np.zeros(columns, dtype=kind)
        first = np.array(weights, dtype=kind)
        if first.shape != (columns,):
            raise InputError("initial weights", got=f"shape {first.shape}", expected=f"({columns},), one a column")
        round_in_place(first, self.options.policy.weights)
        return first

    def epochs(self) -> Iterator[Epoch]:
        """The epochs until the last, or until the loss stops falling; the loss is scored after each epoch."""
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
        """Whether training stops here; rank 0 decides for all ranks.

        Every rank computes the loss and the intercept for itself, from sums that should be the same everywhere. If
        they differ, the recurrences drift apart and the weights belong to no iterate: so the ranks compare them.
        """
        states = [(loss, self.intercept, stop)]
        if self.comm.size > 1:
            states = [(float(state[0]), float(state[1]), bool(state[2])) for state in self.comm.gather(states[0])]
        diverged = next((loss for loss, _, _ in states if not math.isfinite(loss)), None)
        if diverged is not None:
            raise InputError(
                f"the iterates diverged in epoch {number}",
                got=f"loss {diverged}",
                expected="a finite loss",
                fix="lower eta0, standardise the columns, or bound the counts",
            )
        allowed = _DRIFT_ROUNDOFFS * ROUNDOFF["fp64" if self.recurrence == np.float64 else "fp32"]
        first_loss, first_intercept, first_stop = states[0]
        # An intercept near 0 is compared in the unit of the margins.
        unit = max(1.0, math.sqrt(abs(first_loss)))
        for rank, (loss, intercept, _) in enumerate(states):
            if not (
                math.isclose(loss, first_loss, rel_tol=allowed, abs_tol=allowed)
                and math.isclose(intercept, first_intercept, rel_tol=allowed, abs_tol=allowed * unit)
            ):
                raise CommunicationError(
                    f"the ranks no longer hold the same model after epoch {number}",
                    got=f"rank {rank} has loss {loss!r}, intercept {intercept!r}; "
                    f"rank 0 has {first_loss!r}, {first_intercept!r}",
                    expected="sums that are the same on every rank",
                    fix="choose another MPI library or another of its AllReduce algorithms",
                )
        return first_stop

    def _score(self, epoch: Epoch) -> float:
        """The weighted mean of phi over the margins of the epoch."""
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
