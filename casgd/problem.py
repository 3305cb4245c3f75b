"""The values that the solver takes and gives: problem, options with their step sizes, start, and solution."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from precision_time.casgd.errors import InputError
from precision_time.casgd.objectives import Objective
from precision_time.casgd.precision import PrecisionPolicy, find_policy

__all__ = ["PARTS", "Options", "Problem", "Schedule", "Solution", "Start", "batch_order"]

#: The parts of a step; a Solution has the seconds of each.
PARTS = ("gather", "gram", "communicate", "recurrence", "update")

_SCHEDULES = ("constant", "invscaling", "optimal")


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """f(w, w0) = (1/m) sum_i a_i phi(x_i.w + w0, y_i) + (l2/2) |w|^2.

    features: the columns that this rank owns: an ndarray (m, n_local), a SciPy CSR matrix, or a CuPy array.
    targets: y, (m,), the same on every rank: -1/+1 for logistic, numbers for squared, counts for Poisson.
    objective: phi.
    l2: the penalty on the weights; the intercept w0 is never penalised.
    sample_weight: a, (m,), the same on every rank; None is all ones.
    fit_intercept: if false, w0 keeps its start value.

    Raises:
        InputError: shapes that do not fit, labels that the objective does not have, numbers out of range.
    """

    features: Any
    targets: Any
    objective: Objective
    l2: float = 0.0
    sample_weight: Any = None
    fit_intercept: bool = True

    def __post_init__(self) -> None:
        shape = getattr(self.features, "shape", None)
        if shape is None or len(shape) != 2:
            raise InputError("features", got=f"shape {shape}", expected="a matrix (samples, columns)")
        if shape[0] < 1:
            raise InputError("features", got=f"shape {shape}", expected="at least one row")
        if not (math.isfinite(self.l2) and self.l2 >= 0):
            raise InputError("l2", got=self.l2, expected="a finite number, 0 or above")
        for name, values in (("targets", self.targets), ("sample_weight", self.sample_weight)):
            if values is None and name == "sample_weight":
                continue
            array = np.asarray(values)
            if array.shape != (shape[0],):
                raise InputError(name, got=f"shape {array.shape}", expected=f"({shape[0]},), as the features have rows")
            if array.dtype.kind not in "fiub":
                raise InputError(name, got=f"type {array.dtype}", expected="numbers")
            if not np.isfinite(array).all():
                raise InputError(f"{name} hold NaN or infinity", got=f"row {int(np.argmin(np.isfinite(array)))}")
        if self.sample_weight is not None and np.min(self.sample_weight) < 0:
            raise InputError("sample_weight", got=np.min(self.sample_weight), expected="0 or above")
        if self.objective.name == "logistic" and not np.isin(self.targets, (-1, 1)).all():
            raise InputError("targets of the logistic loss", got=np.unique(self.targets)[:5], expected="-1 and +1")
        if self.objective.name == "poisson" and np.min(self.targets) < 0:
            raise InputError("targets of the Poisson loss", got=np.min(self.targets), expected="0 or above")

    @property
    def rows(self) -> int:
        """m."""
        return int(self.features.shape[0])

    @property
    def columns(self) -> int:
        """n_local."""
        return int(self.features.shape[1])


@dataclass(frozen=True)
class Schedule:
    """Step sizes eta_t for t = 1, 2, ...; a step is one batch (in scikit-learn one sample).

    ========== ================================
    kind        eta_t
    ========== ================================
    constant    eta0
    invscaling  eta0 / t^power_t
    optimal     1 / (alpha (t0 + t - 1))
    ========== ================================

    ``t0=None`` is 1 / (alpha eta0): the first step is then eta0. scikit-learn chooses t0 by a heuristic of Bottou
    instead (first step 1/sqrt(sqrt(alpha)) at most), and ignores eta0.

    Raises:
        InputError: an unknown kind, or a number out of range.
    """

    kind: str = "constant"
    eta0: float = 0.01
    power_t: float = 0.5
    alpha: float = 1e-4
    t0: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in _SCHEDULES:
            raise InputError("unknown schedule", got=repr(self.kind), expected=", ".join(_SCHEDULES))
        if not (math.isfinite(self.eta0) and self.eta0 > 0):
            raise InputError("eta0 of a schedule", got=self.eta0, expected="a finite number above 0")
        if not math.isfinite(self.power_t):
            raise InputError("power_t of a schedule", got=self.power_t, expected="a finite number")
        if self.kind == "optimal":
            if not (math.isfinite(self.alpha) and self.alpha > 0):
                raise InputError("alpha of schedule 'optimal'", got=self.alpha, expected="a finite number above 0")
            if self.t0 is not None and not (math.isfinite(self.t0) and self.t0 > 0):
                raise InputError("t0 of schedule 'optimal'", got=self.t0, expected="a finite number above 0")

    def rates(self, t_first: int, count: int) -> np.ndarray:
        """eta_t for t = t_first .. t_first + count - 1, float64 of shape (count,); t counts from 1."""
        if t_first < 1:
            raise InputError("first step of a schedule", got=t_first, expected="at least 1")
        if self.kind == "constant":
            return np.full(count, self.eta0)
        t = np.arange(t_first, t_first + count, dtype=np.float64)
        if self.kind == "invscaling":
            return np.asarray(self.eta0 / t**self.power_t)
        start = 1 / (self.alpha * self.eta0) if self.t0 is None else self.t0
        return np.asarray(1 / (self.alpha * (start + t - 1)))


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to solve.

    s: steps between two communications; 1 is plain SGD. It changes the time, not the iterates (in exact arithmetic).
    batch_size: rows of a step; above the number of rows, every step takes all rows.
    epochs: passes over the rows.
    schedule: step sizes.
    order: ``shuffled`` anew in each epoch, or ``cyclic``.
    seed: seed of the shuffling, the same on every rank.
    policy: the precision choices, or the name of a policy.
    tol: stop when the loss of an epoch has not fallen by ``tol`` below the best for ``n_iter_no_change`` epochs;
        None runs all epochs. The loss uses the margins of the steps, without a pass over the data. Rank 0 decides.
    earlier_losses: losses of the epochs of an earlier part of the run, which count for ``tol``.
    prefetch: send the Gram blocks of the next outer step during the recurrence of this one: two messages instead of
        one, the large one hidden if the communicator is non-blocking.

    Raises:
        InputError: a number out of range, an unknown order.
    """

    s: int = 1
    batch_size: int = 32
    epochs: int = 10
    schedule: Schedule = field(default_factory=Schedule)
    order: Literal["shuffled", "cyclic"] = "shuffled"
    seed: int = 0
    policy: PrecisionPolicy = field(default_factory=lambda: find_policy("fp32"))
    tol: float | None = None
    n_iter_no_change: int = 5
    prefetch: bool = False
    earlier_losses: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("s", "batch_size", "n_iter_no_change"):
            value = getattr(self, name)
            if value < 1 or int(value) != value:
                raise InputError(name, got=value, expected="a whole number, 1 or above")
        if self.epochs < 0 or int(self.epochs) != self.epochs:
            raise InputError("epochs", got=self.epochs, expected="a whole number, 0 or above")
        if self.order not in ("shuffled", "cyclic"):
            raise InputError("unknown order", got=repr(self.order), expected="shuffled, cyclic")
        if self.seed < 0:
            raise InputError("seed", got=self.seed, expected="0 or above")
        if self.tol is not None and math.isnan(self.tol):
            raise InputError("tol", got=self.tol, expected="a number, or None")
        object.__setattr__(self, "policy", find_policy(self.policy))


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts.

    weights: (n_local,), of this rank's columns; None is zero.
    intercept: w0.
    steps, epochs: done before, for the schedule and the shuffling.
    """

    weights: np.ndarray | None = None
    intercept: float = 0.0
    steps: int = 0
    epochs: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """The result of a run.

    weights: (n_local,), of this rank's columns, in the type that holds ``policy.weights``.
    intercept: w0, the same on every rank.
    epochs, steps: done in this run.
    loss_curve: for each epoch, the weighted mean of phi over the margins of its steps, without the penalty.
    reductions: sums over the ranks in this run.
    seconds: of this rank, by part (:data:`PARTS`).
    converged: whether ``tol`` ended the run.
    """

    weights: np.ndarray
    intercept: float
    epochs: int
    steps: int
    loss_curve: tuple[float, ...]
    reductions: int
    seconds: Mapping[str, float]
    converged: bool
    policy: PrecisionPolicy


def batch_order(m: int, batch_size: int, epoch: int, *, order: str, seed: int) -> np.ndarray:
    """The rows of one epoch in the order of the steps, (m,): batch t is [t b, (t + 1) b).

    The order does not depend on s, on the number of ranks or on the batch size.

    Raises:
        InputError: an unknown order.
    """
    if m < 1 or batch_size < 1:
        raise InputError("rows and batch size", got=f"{m} and {batch_size}", expected="1 or above")
    if order == "cyclic":
        return np.arange(m)
    if order == "shuffled":
        return np.random.default_rng((seed, epoch)).permutation(m)
    raise InputError("unknown order", got=repr(order), expected="shuffled, cyclic")
