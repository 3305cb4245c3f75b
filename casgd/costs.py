"""What the parts of an outer step cost: the terms of their seconds, and a fit of them to probes.

The cost model and s* = sqrt(A/C) are our own derivation.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

import numpy as np

from precision_time.casgd.errors import InputError
from precision_time.casgd.gram import packed_gram_words

__all__ = ["Costs", "Sample", "fit_costs", "fit_nonnegative"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One probe: CA-SGD at one s and batch size, the slowest rank of each repeat.

    step_s: seconds of one SGD-equivalent step with each part at its fastest; usual_step_s: the median of the repeats.
    parts_s: the same by part (problem.PARTS), each the least of all repeats. rounds_s: whole, repeat by repeat; the
    repeats of all probes were taken in turn.
    features: columns over all ranks; columns: of the rank that owns most; density: the share
    of its entries that are stored (1 if dense).
    """

    objective: str
    policy: str
    rows: int
    features: int
    columns: int
    density: float
    ranks: int
    s: int
    batch_size: int
    outer_steps: int
    step_s: float
    usual_step_s: float
    parts_s: Mapping[str, float]
    rounds_s: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """JSON values."""
        content: dict[str, object] = {one.name: getattr(self, one.name) for one in fields(self)}
        return content | {"parts_s": dict(self.parts_s), "rounds_s": list(self.rounds_s)}


def _reduced_bytes(s: int, b: int, word_bytes: int) -> int:
    """Bytes of one AllReduce: the strictly lower Gram blocks and the margins."""
    return word_bytes * (packed_gram_words(s * b, b) + s * b)


# Per part, the terms of the seconds of one outer step; n is the columns of a rank times the density. The first of
# `communicate` is alpha, its second beta; the last of `gram` is gamma, of 2 flops a word and column. Plain SGD has no
# Gram and no earlier blocks, hence the s - 1. The margins Y w are within `recurrence`, whose s b stands for any n.
_TERMS: Mapping[str, Callable[[int, int, float, int], tuple[float, ...]]] = MappingProxyType(
    {
        "gather": lambda s, b, n, _: (1, s * b * n),
        "gram": lambda s, b, n, _: (float(s > 1), s - 1, s * b * n * (s > 1), b * b * s * (s - 1) * n),
        "communicate": lambda s, b, _, word_bytes: (1, _reduced_bytes(s, b, word_bytes)),
        "recurrence": lambda s, b, _n, _w: (s, s - 1, s * b, b * b * s * (s - 1)),
        "update": lambda s, b, n, _: (1, s * b * n),
    }
)


def fit_nonnegative(design: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |design x - target|, (k,), for a design of shape (m, k) with k at most 6.

    Every set of columns that may be positive is tried: at most 63 least-squares problems of a dozen rows, and exact.
    """
    columns = design.shape[1]
    best, best_error = np.zeros(columns), float(np.linalg.norm(target))
    for count in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), count):
            found = np.linalg.lstsq(design[:, chosen], target, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(np.linalg.norm(design[:, chosen] @ found - target))
            if error < best_error * (1 - 1e-12):
                best, best_error = np.zeros(columns), error
                best[list(chosen)] = found
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What the parts of an outer step cost: seconds = terms . coefficients, by part.

    alpha_s: an AllReduce of nothing; beta_s_per_byte: a byte of it; gamma_s_per_flop: a flop of the Gram product;
    step_s: an inner step of nothing.
    """

    coefficients: Mapping[str, tuple[float, ...]]
    word_bytes: int

    @property
    def alpha_s(self) -> float:
        return self.coefficients["communicate"][0]

    @property
    def beta_s_per_byte(self) -> float:
        return self.coefficients["communicate"][1]

    @property
    def gamma_s_per_flop(self) -> float:
        return self.coefficients["gram"][3]

    @property
    def step_s(self) -> float:
        return self.coefficients["recurrence"][0]

    def predict_step_s(self, s: int, batch_size: int, *, stored_columns: float) -> float:
        """Seconds of one SGD-equivalent step; ``stored_columns`` is the columns of a rank times their density."""
        return sum(
            float(np.dot(terms(s, batch_size, stored_columns, self.word_bytes), self.coefficients[part])) / s
            for part, terms in _TERMS.items()
        )

    def best_s(self, batch_size: int, *, stored_columns: float) -> float:
        """s* = sqrt(A/C) of T(s)/s = A/s + B + C s; infinite if nothing grows with s.

        A collects what an outer step costs once, C what grows with s squared. Terms of s - 1 give back to A what they
        would cost at s = 0.
        """
        b, n, found = batch_size, stored_columns, self.coefficients
        once = found["gather"][0] + found["gram"][0] + found["communicate"][0] + found["update"][0]
        once = max(0.0, once - found["gram"][1] - found["recurrence"][1])
        growing = (
            b * b * (n * found["gram"][3] + self.word_bytes / 2 * found["communicate"][1] + found["recurrence"][3])
        )
        return math.sqrt(once / growing) if growing > 0 else math.inf


def fit_costs(samples: Sequence[Sample], *, word_bytes: int = 4) -> Costs:
    """Costs from probes: per part, non-negative least squares with relative weights.

    A part that is under a thousandth of its probe is weighted as if it were that: its relative error means nothing.

    Raises:
        InputError: no samples.
    """
    if not samples:
        raise InputError("there is nothing to fit", got="no samples", expected="probes of several s and batch sizes")
    coefficients = {}
    for part, terms in _TERMS.items():
        seconds = np.array([one.parts_s[part] * one.s for one in samples])
        floor = np.array([one.step_s * one.s * 1e-3 for one in samples])
        weights = 1 / np.maximum(np.maximum(seconds, floor), 1e-12)
        design = np.array([terms(one.s, one.batch_size, one.columns * one.density, word_bytes) for one in samples])
        # Columns of like size keep the least squares well posed: the terms span ten orders of magnitude.
        sizes = np.maximum(np.abs(design).max(axis=0), 1e-300)
        found = fit_nonnegative(design / sizes * weights[:, None], seconds * weights) / sizes
        coefficients[part] = tuple(float(value) for value in found)
    return Costs(coefficients=MappingProxyType(coefficients), word_bytes=word_bytes)
