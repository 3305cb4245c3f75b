"""One outer step of CA-SGD that rounds after every operation, in any of the formats, on emulated ranks.

It shows the effect of a precision choice independent of hardware, and checks the bounds of `casgd.bounds`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from precision_time.casgd.bounds import ExactStep, OuterStep, bound_policy, solve_exactly, worst_propagation
from precision_time.casgd.errors import InputError
from precision_time.casgd.precision import CHOICES, POLICIES, PrecisionPolicy, round_to

__all__ = ["compare_errors", "emulate_outer_step", "isolate_choice", "measure_errors", "rounding_error"]


def isolate_choice(choice: str, fmt: str) -> PrecisionPolicy:
    """The policy that makes one choice in ``fmt`` and the other eight in fp64."""
    return POLICIES["fp64"].replace(name=f"{choice} in {fmt}", **{choice: fmt})


def _round(values: np.ndarray, fmt: str) -> np.ndarray:
    """``values`` rounded to ``fmt``, carried in float64, where a product or sum of two is exact or nearly so.

    So the result of one operation is rounded once for FP16, BF16 and TF32, and as if once for FP32 (53 bits are more
    than 2 x 24 + 2: Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter 30, 1995).
    """
    return values if fmt == "fp64" else np.asarray(round_to(values, fmt), dtype=np.float64)


def _sum_products(left: np.ndarray, right: np.ndarray, fmt: str) -> np.ndarray:
    """left @ right over the last axis of left and the second last of right, rounded after every operation.

    Every product is rounded, then added to the sum of those before it, and the sum is rounded. fp64 leaves it to
    `numpy.matmul`. Shapes: (..., r, k) and (..., k, c) to (..., r, c).
    """
    if fmt == "fp64":
        return np.asarray(left @ right)
    total = _round(left[..., :, :1] * right[..., :1, :], fmt)
    for k in range(1, left.shape[-1]):
        total = _round(total + _round(left[..., :, k : k + 1] * right[..., k : k + 1, :], fmt), fmt)
    return total


def _sum_ranks(parts: np.ndarray, fmt: str) -> np.ndarray:
    """The sum of the partial results of the ranks, (P, ...), rounded before and after each of P - 1 additions."""
    stored = _round(parts, fmt)
    total: np.ndarray = stored[0]
    for part in stored[1:]:
        total = _round(total + part, fmt)
    return total


def emulate_outer_step(step: OuterStep, policy: PrecisionPolicy) -> np.ndarray:
    """The weights (n,) after one outer step in the formats of ``policy``, rounded after every operation, in float64.

    Each rank has a block of ceil(n/P) columns, the last block filled up with zero columns, which change no result.
    Targets and rates are not rounded; the link is one operation, rounded on entry and exit.
    """
    s, b, ranks, width = step.s, step.batch_size, step.ranks, step.columns_per_rank
    n = step.rows.shape[1]
    rows = np.zeros((len(step.rows), ranks * width))
    rows[:, :n] = _round(np.asarray(step.rows, dtype=np.float64), policy.x_storage)
    weights = np.zeros(ranks * width)
    weights[:n] = step.weights
    per_rank = rows.reshape(len(rows), ranks, width).transpose(1, 0, 2)

    margins = _sum_products(per_rank, weights.reshape(ranks, width, 1), policy.margin_accumulate)[..., 0]
    margins = _round(_sum_ranks(margins, policy.margin_storage), policy.recurrence)
    gram = _sum_products(per_rank, per_rank.transpose(0, 2, 1), policy.gram_accumulate)
    gram = _round(_sum_ranks(gram, policy.gram_storage), policy.recurrence)

    coefficients = np.zeros(s * b)
    for j in range(s):
        here = slice(j * b, (j + 1) * b)
        live = margins[here]
        for i in range(j):
            there = slice(i * b, (i + 1) * b)
            product = _sum_products(gram[here, there], coefficients[there, None], policy.recurrence)[:, 0]
            live = _round(live - product, policy.recurrence)
        residual = step.objective.derivative(_round(live, policy.link), step.targets[here]) / b
        coefficients[here] = _round(step.rates[j] * _round(residual, policy.link), policy.recurrence)

    increment = _sum_products(rows.T, coefficients[:, None], policy.increment)[:n, 0]
    return _round(step.weights - increment, policy.weights)


def rounding_error(exact: ExactStep, policy: PrecisionPolicy) -> float:
    """The Euclidean distance of the emulated weights from the exact ones, in the unit of w."""
    return float(np.linalg.norm(emulate_outer_step(exact.step, policy) - exact.weights))


def measure_errors(
    step: OuterStep, *, formats: Iterable[str] = ("bf16", "fp16", "fp32")
) -> Mapping[tuple[str, str], float]:
    """`rounding_error` of each choice alone in each of ``formats``, by (choice, format)."""
    exact = solve_exactly(step)
    return {(choice, fmt): rounding_error(exact, isolate_choice(choice, fmt)) for fmt in formats for choice in CHOICES}


def compare_errors(step: OuterStep, policies: Sequence[PrecisionPolicy]) -> dict[str, Any]:
    """The bound of each error that ``policies`` add to one outer step, and the error measured by emulation.

    JSON values. ``policies`` maps a name to a list: an entry for each choice below fp64, then one for ``all`` choices
    together, whose bound is the sum of the others. ``bound`` and ``measured`` are relative to the length of the exact
    step, ||Y^T c||; None if a number left the range of its format. ``propagation`` is ||K||_inf, the growth of an error
    of the margins within the step, and ``worst_propagation`` its limit (None: no limit).

    Raises:
        InputError: all formats are fp64, the reference of the measured errors.
    """
    formats = sorted({fmt for policy in policies for fmt in policy.formats.values()} - {"fp64"})
    if not formats:
        raise InputError(
            "there is no rounding error to bound",
            got=", ".join(policy.name for policy in policies),
            expected="a precision with a format below fp64, the reference of the measured errors",
        )
    exact = solve_exactly(step)
    with np.errstate(over="ignore", invalid="ignore"):
        measured = measure_errors(step, formats=formats)
        studied = {policy.name: _compare_policy(exact, policy, measured) for policy in policies}
    return {
        "propagation": float(exact.propagation.sum(axis=1).max()),
        "worst_propagation": _finite(worst_propagation(step)),
        "policies": studied,
    }


def _compare_policy(
    exact: ExactStep, policy: PrecisionPolicy, measured: Mapping[tuple[str, str], float]
) -> list[dict[str, Any]]:
    bounds = bound_policy(exact, policy)
    rows = [
        (choice, fmt, bounds.parts[choice], measured[choice, fmt])
        for choice, fmt in policy.formats.items()
        if fmt != "fp64"
    ]
    rows.append(("all", "", bounds.plain_sum, rounding_error(exact, policy)))
    names = ("choice", "format", "bound", "measured")
    unit = bounds.step_norm
    return [
        dict(zip(names, (choice, fmt, _finite(bound / unit), _finite(error / unit)), strict=True))
        for choice, fmt, bound, error in rows
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
