"""First-order bounds on the error that each of the nine precision choices adds to the weights in one outer step.

The nine choices and their bounds are our derivation; the list of the paper (arXiv 2606.18463) was not available to us.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from precision_time.casgd.errors import InputError
from precision_time.casgd.objectives import Objective
from precision_time.casgd.precision import CHOICES, ROUNDOFF, PrecisionPolicy

__all__ = ["BOUNDS", "ExactStep", "OuterStep", "PolicyBounds", "accumulation_bound", "bound_gram_accumulate",
           "bound_gram_storage", "bound_increment", "bound_link", "bound_margin_accumulate", "bound_margin_storage",
           "bound_policy", "bound_recurrence", "bound_weights", "bound_x_storage", "check_accumulators",
           "solve_exactly", "worst_propagation"]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OuterStep:
    """The input of one outer step of CA-SGD: s batches of b rows, without penalty, intercept and sample weights.

    rows: Y, (s b, n), the batches stacked in the order of their steps, all columns.
    targets: y, (s b,); they enter the link unrounded.
    weights: w at the start, (n,).
    rates: eta_j, (s,); they enter the recurrence unrounded.
    objective: phi.
    ranks: P; each owns a block of n/P columns.

    Raises:
        InputError: shapes that do not fit, more ranks than columns.
    """

    rows: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    rates: np.ndarray
    objective: Objective
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rates.ndim != 1 or self.rates.size == 0 or len(self.rows) == 0:
            raise InputError(
                "an outer step", got=f"rows {self.rows.shape}, rates {self.rates.shape}", expected="(s b, n) and (s,)"
            )
        if len(self.rows) % self.s:
            raise InputError("rows of an outer step", got=len(self.rows), expected=f"a multiple of s = {self.s}")
        if self.targets.shape != self.rows.shape[:1] or self.weights.shape != self.rows.shape[1:]:
            raise InputError(
                "targets and weights of an outer step",
                got=f"{self.targets.shape} and {self.weights.shape}",
                expected=f"{self.rows.shape[:1]} and {self.rows.shape[1:]}",
            )
        if not 1 <= self.ranks <= self.rows.shape[1]:
            raise InputError("ranks of an outer step", got=self.ranks, expected=f"1 to {self.rows.shape[1]} columns")

    @property
    def s(self) -> int:
        """Steps in the outer step."""
        return int(self.rates.shape[0])

    @property
    def batch_size(self) -> int:
        """b."""
        return int(self.rows.shape[0]) // self.s

    @property
    def columns_per_rank(self) -> int:
        """n/P, of the rank with the most columns."""
        return -(-int(self.rows.shape[1]) // self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExactStep:
    """The outer step in float64, and the quantities that the bounds need.

    step: the input.
    margins: v = Y w, (s b,).
    gram_lower: |G|_<, absolute values of the blocks of Y Y^T strictly below the diagonal, (s b, s b).
    gram_bound: (|Y| |Y|^T)_<, (s b, s b): rounding errors inside G are proportional to it.
    live_margins: z, the margins of the steps of SGD, (s b,).
    coefficients: c = eta phi'(z)/b, (s b,).
    sensitivity: d = eta phi''(z)/b, (s b,).
    propagation: K = |(I + G_< diag(d))^-1|, (s b, s b): carries a change of v to z, exactly to first order.
    increment: Y^T c, (n,).
    """

    step: OuterStep
    margins: np.ndarray
    gram_lower: np.ndarray
    gram_bound: np.ndarray
    live_margins: np.ndarray
    coefficients: np.ndarray
    sensitivity: np.ndarray
    propagation: np.ndarray
    increment: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        """w after the s steps, (n,)."""
        return np.asarray(self.step.weights - self.increment)

    @property
    def margin_scale(self) -> np.ndarray:
        """|Y| |w|, (s b,)."""
        return np.asarray(np.abs(self.step.rows) @ np.abs(self.step.weights))

    @property
    def increment_scale(self) -> np.ndarray:
        """|Y|^T |c|, (n,)."""
        return np.asarray(np.abs(self.step.rows).T @ np.abs(self.coefficients))


def solve_exactly(step: OuterStep) -> ExactStep:
    """One outer step in float64: z_j = v_j - sum_{i<j} G_ji c_i, c_j = eta_j phi'(z_j, y_j)/b, w <- w - Y^T c."""
    rows = np.asarray(step.rows, dtype=np.float64)
    s, b = step.s, step.batch_size
    block = np.repeat(np.arange(s), b)
    lower = block[:, None] > block[None, :]
    gram = np.where(lower, rows @ rows.T, 0.0)
    margins = rows @ np.asarray(step.weights, dtype=np.float64)
    live, coefficients = margins.copy(), np.zeros(s * b)
    for j in range(s):
        here = slice(j * b, (j + 1) * b)
        live[here] -= gram[here, : j * b] @ coefficients[: j * b]
        coefficients[here] = step.rates[j] / b * step.objective.derivative(live[here], step.targets[here])
    sensitivity = np.repeat(step.rates, b) / b * step.objective.second(live, step.targets)
    return ExactStep(
        step=step,
        margins=margins,
        gram_lower=np.abs(gram),
        gram_bound=np.where(lower, np.abs(rows) @ np.abs(rows).T, 0.0),
        live_margins=live,
        coefficients=coefficients,
        sensitivity=sensitivity,
        propagation=np.abs(np.linalg.inv(np.eye(s * b) + gram * sensitivity[None, :])),
        increment=rows.T @ coefficients,
    )


def worst_propagation(step: OuterStep) -> float:
    """(1 + eta L R^2)^(s-1) >= ||K||_inf, with R^2 = max ||x||^2 and the largest eta: the worst effect of s.

    K itself stays far below it (1.15 to 1.44 at s = 8). Infinite for a loss with unbounded phi'' (Poisson).
    """
    if step.objective.smoothness is None:
        return math.inf
    radius = float(np.max(np.einsum("ik,ik->i", step.rows, step.rows)))
    return float((1 + np.max(step.rates) * step.objective.smoothness * radius) ** (step.s - 1))


def _roundings(count: float, probabilistic: bool) -> float:
    # n roundings of one sign add up to n u; as independent errors of mean zero they add up to about sqrt(n) u:
    # Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41 (2019).
    return math.sqrt(count) if probabilistic else count


def _reach_weights(exact: ExactStep, *, margin: Any = 0.0, coefficient: Any = 0.0, direct: Any = 0.0) -> float:
    """|| |Y|^T (d * K (dz + |G|_< dc) + dc) + direct ||_2 for errors dz of margins, dc of c, ``direct`` of w."""
    start = np.broadcast_to(margin, exact.margins.shape) + exact.gram_lower @ np.broadcast_to(
        coefficient, exact.margins.shape
    )
    change = exact.sensitivity * (exact.propagation @ start) + coefficient
    return float(np.linalg.norm(np.abs(exact.step.rows).T @ change + direct))


def bound_x_storage(exact: ExactStep, *, u: float, probabilistic: bool = False) -> float:
    """1: Y (s b, n) rounded once. dz = u |Y||w| + 2u (|Y||Y|^T)_< |c|, direct u |Y|^T |c|.

    As in all nine: ``u`` is the unit roundoff of the choice; the result bounds the Euclidean norm of the change of w
    after the outer step, in the unit of w, to first order in u. ``probabilistic`` replaces a count of roundings by its
    square root: a prediction, not a bound.
    """
    margin = u * exact.margin_scale + 2 * u * (exact.gram_bound @ np.abs(exact.coefficients))
    return _reach_weights(exact, margin=margin, direct=u * exact.increment_scale)


def bound_margin_accumulate(exact: ExactStep, *, u: float, probabilistic: bool = False) -> float:
    """2: n/P products and additions of Y w on each rank. dz = (n/P) u |Y||w|; units as `bound_x_storage`."""
    count = _roundings(exact.step.columns_per_rank, probabilistic)
    return _reach_weights(exact, margin=count * u * exact.margin_scale)


def bound_margin_storage(exact: ExactStep, *, u: float, probabilistic: bool = False) -> float:
    """3: P partial margins rounded, then added one after the other: dz = P u |Y||w|; units as `bound_x_storage`.

    A tree of additions would need log2(P) + 1 in place of P.
    """
    return _reach_weights(exact, margin=_roundings(exact.step.ranks, probabilistic) * u * exact.margin_scale)


def bound_gram_accumulate(exact: ExactStep, *, u: float, probabilistic: bool = False) -> float:
    """4: n/P products and additions of Y Y^T on each rank: dz = (n/P) u (|Y||Y|^T)_< |c|; units as `bound_x_storage`.

    The rounding of Y is choice 1; products of two BF16 or FP16 numbers are exact in FP32.
    """
    count = _roundings(exact.step.columns_per_rank, probabilistic)
    return _reach_weights(exact, margin=count * u * (exact.gram_bound @ np.abs(exact.coefficients)))


def bound_gram_storage(exact: ExactStep, *, u: float, probabilistic: bool = False) -> float:
    """5: P partial Gram blocks rounded, then added: dz = P u (|Y||Y|^T)_< |c|; units as `bound_x_storage`."""
    count = _roundings(exact.step.ranks, probabilistic)
    return _reach_weights(exact, margin=count * u * (exact.gram_bound @ np.abs(exact.coefficients)))


def bound_recurrence(exact: ExactStep, *, u: float, probabilistic: bool = False) -> float:
    """6: z_j = v_j - sum_{i<j} G_ji c_i and c_j = eta_j r_j; units as `bound_x_storage`.

    dz_j = (j+1) u |v_j| + (b+j+2) u (|G|_< |c|)_j: v is rounded on entry and by j subtractions; a product G c is
    rounded on entry twice, by b products and additions and by at most j subtractions. dc = u |c|.
    """
    step = exact.step
    j = np.repeat(np.arange(step.s, dtype=np.float64), step.batch_size)
    inside = exact.gram_lower @ np.abs(exact.coefficients)
    of_margin, of_product = j + 1, step.batch_size + j + 2
    if probabilistic:
        of_margin, of_product = np.sqrt(of_margin), np.sqrt(of_product)
    margin = u * (of_margin * np.abs(exact.margins) + of_product * inside)
    return _reach_weights(exact, margin=margin, coefficient=u * np.abs(exact.coefficients))


def bound_link(exact: ExactStep, *, u: float, probabilistic: bool = False) -> float:
    """7: phi' of a rounded z, itself rounded: dc = u (d |z| + |c|), which also reaches the later margins by |G|_<.

    Units as `bound_x_storage`. In the term d |z|, exp of the Poisson loss multiplies the error of its argument by |z|.
    """
    change = u * (exact.sensitivity * np.abs(exact.live_margins) + np.abs(exact.coefficients))
    return _reach_weights(exact, coefficient=change)


def bound_increment(exact: ExactStep, *, u: float, probabilistic: bool = False) -> float:
    """8: s b products and additions of Y^T c: direct s b u |Y|^T |c|; units as `bound_x_storage`."""
    return _reach_weights(exact, direct=_roundings(len(exact.step.rows), probabilistic) * u * exact.increment_scale)


def bound_weights(exact: ExactStep, *, u: float, probabilistic: bool = False) -> float:
    """9: w - Y^T c rounded once: direct u (|w| + |Y|^T |c|); units as `bound_x_storage`.

    The step starts from weights that the format already holds. A step below u |w| is lost entirely.
    """
    return _reach_weights(exact, direct=u * (np.abs(exact.step.weights) + exact.increment_scale))


#: The choices that are sums of many products.
_ACCUMULATORS = ("margin_accumulate", "gram_accumulate", "increment")

#: The nine bounds by choice, each ``(exact, *, u, probabilistic=False) -> float``.
BOUNDS: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        "x_storage": bound_x_storage,
        "margin_accumulate": bound_margin_accumulate,
        "margin_storage": bound_margin_storage,
        "gram_accumulate": bound_gram_accumulate,
        "gram_storage": bound_gram_storage,
        "recurrence": bound_recurrence,
        "link": bound_link,
        "increment": bound_increment,
        "weights": bound_weights,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBounds:
    """The bounds of all nine choices of one policy, in the unit of w.

    parts: by choice.
    step_norm: ||Y^T c||, the length of the exact step; divide by it for relative errors.
    """

    parts: Mapping[str, float]
    step_norm: float

    @property
    def plain_sum(self) -> float:
        """Bounds the joint error to first order, whatever the signs."""
        return math.fsum(self.parts.values())

    @property
    def root_sum_square(self) -> float:
        """Predicts the joint error: rounding errors of different choices are not correlated."""
        return math.sqrt(math.fsum(part * part for part in self.parts.values()))


def bound_policy(exact: ExactStep, policy: PrecisionPolicy, *, probabilistic: bool = False) -> PolicyBounds:
    """The bound of every choice at its format in ``policy``; their sum is a first-order bound too."""
    parts = {
        choice: BOUNDS[choice](exact, u=ROUNDOFF[getattr(policy, choice)], probabilistic=probabilistic)
        for choice in CHOICES
    }
    return PolicyBounds(parts=parts, step_norm=float(np.linalg.norm(exact.increment)))


def accumulation_bound(fmt: str, count: int) -> float:
    """Bound on |error| / (|x|.|y|) of a dot product of ``count`` terms summed in ``fmt``: count u.

    TF32 rounds the two factors only and sums in FP32: 2 u_tf32 + count u_fp32.
    """
    if fmt == "tf32":
        return 2 * ROUNDOFF["tf32"] + count * ROUNDOFF["fp32"]
    return count * ROUNDOFF[fmt]


def check_accumulators(policy: PrecisionPolicy, *, columns: int, block_rows: int, tolerance: float = 0.01) -> None:
    """Refuse an accumulator below FP32 whose bound is above ``tolerance``: it would drop small addends.

    A running sum of ones stops at 2/u: 256 in bf16, 2048 in fp16. columns: n/P, the length of the sums of margins and
    Gram; block_rows: s b, the length of the sums of the increment.

    Raises:
        InputError: names the choice, the bound, and the largest size that would pass.
    """
    for choice in _ACCUMULATORS:
        fmt = getattr(policy, choice)
        count = block_rows if choice == "increment" else columns
        bound = accumulation_bound(fmt, count)
        if ROUNDOFF[fmt] <= ROUNDOFF["fp32"] or bound <= tolerance:
            continue
        raise InputError(
            f"policy {policy.name!r}: sums of {count} terms ({choice}) in {fmt}",
            got=f"relative error bound {bound:.3g}",
            expected=f"at most {tolerance:g}, which holds up to {int(tolerance / ROUNDOFF[fmt])} terms",
            fix="accumulate in fp32",
        )
