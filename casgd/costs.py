"""The cost model of an outer step: the terms of the seconds of its parts, and their fit to probes.

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
    """One probe: CA-SGD at one s and batch size; each round counts the slowest rank.

    features: columns over all ranks.
    columns: columns of the rank with the most stored entries.
    density: the share of its entries that are stored (1 if dense).
    step_s: seconds of one SGD-equivalent step, with each part at its fastest.
    usual_step_s: the same, the median of the rounds.
    parts_s: the same by part (problem.PARTS), each the least of all rounds.
    rounds_s: the same, round by round; the rounds of all probes were taken in turn.
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
        content: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        return content | {"parts_s": dict(self.parts_s), "rounds_s": list(self.rounds_s)}


def _reduced_bytes(s: int, b: int, word_bytes: int) -> int:
    """Bytes of one AllReduce: the strictly lower Gram blocks and the margins."""
    return word_bytes * (packed_gram_words(s * b, b) + s * b)


# For each part, the terms of the seconds of one outer step; n is the columns of a rank times the density. The first
# coefficient of `communicate` is alpha, the second beta; the last of `gram` is gamma, for 2 flops a word and column.
# Plain SGD has no Gram and no earlier blocks, hence the s - 1. `recurrence` includes the margins Y w, in s b for any n.
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

    Exact: it tries every set of columns that may be positive, at most 63 least-squares problems of a dozen rows.
    """
    columns = design.shape[1]
    best, best_error = np.zeros(columns), float(np.linalg.norm(target))
    for count in range(1, columns + 1):
        for positive in itertools.combinations(range(columns), count):
            values = np.linalg.lstsq(design[:, positive], target, rcond=None)[0]
            if (values < 0).any():
                continue
            error = float(np.linalg.norm(design[:, positive] @ values - target))
            if error < best_error * (1 - 1e-12):
                best, best_error = np.zeros(columns), error
                best[list(positive)] = values
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The coefficients of the cost model, by part: seconds of an outer step = terms . coefficients.

    alpha_s: seconds of an empty AllReduce; beta_s_per_byte: of a byte of it; gamma_s_per_flop: of a flop of the Gram
    product; step_s: of an empty inner step.
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

        A has the costs of an outer step that do not depend on s, C those that grow with s squared. A term in s - 1
        counts in A with its value at s = 0.
        """
        b, n, costs = batch_size, stored_columns, self.coefficients
        once = costs["gather"][0] + costs["gram"][0] + costs["communicate"][0] + costs["update"][0]
        once = max(0.0, once - costs["gram"][1] - costs["recurrence"][1])
        growing = (
            b * b * (n * costs["gram"][3] + self.word_bytes / 2 * costs["communicate"][1] + costs["recurrence"][3])
        )
        return math.sqrt(once / growing) if growing > 0 else math.inf


def fit_costs(samples: Sequence[Sample], *, word_bytes: int = 4) -> Costs:
    """Costs from probes: non-negative least squares with relative weights, part by part.

    A part below a thousandth of its probe is weighted as a thousandth, because its relative error means nothing.

    Raises:
        InputError: no samples.
    """
    if not samples:
        raise InputError("there is nothing to fit", got="no samples", expected="probes of several s and batch sizes")
    coefficients = {}
    for part, terms in _TERMS.items():
        seconds = np.array([sample.parts_s[part] * sample.s for sample in samples])
        floor = np.array([sample.step_s * sample.s * 1e-3 for sample in samples])
        weights = 1 / np.maximum(np.maximum(seconds, floor), 1e-12)
        design = np.array(
            [terms(sample.s, sample.batch_size, sample.columns * sample.density, word_bytes) for sample in samples]
        )
        # Columns of similar size keep the least squares well posed: the terms span ten orders of magnitude.
        sizes = np.maximum(np.abs(design).max(axis=0), 1e-300)
        values = fit_nonnegative(design / sizes * weights[:, None], seconds * weights) / sizes
        coefficients[part] = tuple(float(value) for value in values)
    return Costs(coefficients=MappingProxyType(coefficients), word_bytes=word_bytes)
