"""The covariance of errors: how measured errors predict those of other questions, by the differences of the two."""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.rows.features import Query
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.storage.errors import InputError, IntegrityError

__all__ = [
    "DIFFERENCES",
    "ErrorCovariance",
    "ErrorPrediction",
    "PairPlan",
    "SetupComparison",
    "covariances_from_dict",
    "predict_errors",
    "predict_errors_at",
]

Floats = npt.NDArray[np.float64]

#: The ways in which two setups differ, in the order of ``SetupComparison.compare``. Each counts once, except ``batch``
#: (samples of a GPU times micro-steps) and ``ranks``, which count doublings. ``any`` counts once if any other does.
DIFFERENCES = (
    "any", "network", "family", "chip", "gpu", "framework", "code", "precision", "input", "batch", "ranks",
)  # fmt: skip

#: Degrees of freedom of the prior on a variance: residuals larger than expected widen the interval, smaller ones narrow
#: it (a Student-t process: Shah, Wilson and Ghahramani 2014).
_PRIOR_ROWS = 4.0
#: Errors are clipped at this many standard deviations, for questions about another network and about the same one. An
#: outlier says little about other networks: after leave-GPU-out, one unclipped row made the answers for its chip worse
#: on average. Below a factor of 3 a row is never clipped for its own network, and a repeat is not clipped at all.
_LIMIT_ELSEWHERE, _LIMIT_OF_NETWORK = 1.5, 4.0
_NEVER_CLIPPED = math.log(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCovariance:
    """The covariance of the log errors of two runs: the ``variance`` of one, and its correlation with the other.

    Two measurements of the same configuration correlate by ``repeat``. Each way in which two runs differ multiplies
    that by its factor in ``correlations`` (once, or once for each doubling; the default factor is 1). Such
    products of kernels are positive definite (Rasmussen and Williams 2006, section 4.2.4).
    """

    variance: float
    repeat: float
    correlations: Mapping[str, float]

    def __post_init__(self) -> None:
        unknown = set(self.correlations) - set(DIFFERENCES)
        if unknown:
            raise InputError("unknown difference in a covariance", got=", ".join(sorted(unknown)),
                             expected=", ".join(DIFFERENCES))  # fmt: skip
        if not 0 < self.variance < math.inf:
            raise InputError("unusable variance of a covariance", got=self.variance, expected="a number above 0")
        for name, value in {"repeat": self.repeat, **self.correlations}.items():
            # At 1 the same run measured twice would give a singular matrix.
            if not 0 <= value <= 1 or (name == "repeat" and value == 1):
                raise InputError(f"unusable correlation {name!r}", got=value, expected="a number from 0 to 1")

    def correlate(self, differences: Floats) -> Floats:
        """Correlations of pairs; ``differences`` has shape (DIFFERENCES, ...) and the result its other axes."""
        result: Floats = np.full(differences.shape[1:], self.repeat)
        for name, factor in self.correlations.items():
            if factor < 1:
                result = result * np.power(factor, differences[DIFFERENCES.index(name)])
        return result

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"variance": self.variance, "repeat": self.repeat, "correlations": dict(self.correlations)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ErrorCovariance":
        """The inverse of ``to_dict``; raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
        return cls(
            variance=float(values["variance"]),
            repeat=float(values["repeat"]),
            correlations={str(name): float(value) for name, value in values["correlations"].items()},
        )


def covariances_from_dict(values: Mapping[str, Any]) -> dict[str, ErrorCovariance]:
    """Covariances by name from JSON; raises ``IntegrityError`` for anything else."""
    try:
        return {str(name): ErrorCovariance.from_dict(value) for name, value in values.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError("the error covariances of a predictor cannot be read", got=repr(error),
                             expected="variance, repeat and correlations of each") from error  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """Which pairs of rows a covariance is fitted on.

    Both rows are of one group; ``groups`` gives, by kind of group, the most rows of each group that are paired. Errors
    of rows that differ in ``apart`` are taken as unrelated (a correlation of 0).
    """

    groups: Mapping[str, int]
    apart: str | None


def _code_of(setup: TrainingSetup) -> tuple[Hashable, ...]:
    """The code of a run, without its framework (a difference of its own) and its year (given by hardware and model)."""
    layout = dataclasses.replace(setup.layout, data=1)
    return dataclasses.replace(setup.implementation, framework="", software_year=None), layout


class SetupComparison:
    """Setups encoded as numbers, so that many pairs of them are compared at once."""

    def __init__(self, queries: Sequence[Query]) -> None:
        setups = [query.setup for query in queries]
        keys: list[list[Hashable]] = [
            [setup.network for setup in setups],
            [setup.workload.family or setup.network for setup in setups],
            [setup.chip for setup in setups],
            [setup.hardware.name for setup in setups],
            [setup.implementation.framework for setup in setups],
            [_code_of(setup) for setup in setups],
            [setup.precision.name for setup in setups],
            [setup.workload.task_input for setup in setups],
        ]
        self._codes = np.array([_number(values) for values in keys], dtype=np.int64).reshape(len(keys), len(setups))
        self._sizes = np.array(
            [
                [math.log2(setup.batch_size * setup.gradient_accumulation_steps) for setup in setups],
                [math.log2(setup.world_size) for setup in setups],
            ]
        ).reshape(2, len(setups))

    def group(self, name: str) -> npt.NDArray[np.int64]:
        """A number for each setup, equal where setups do not differ in ``name``; not for ``any`` nor for doublings."""
        codes: npt.NDArray[np.int64] = self._codes[DIFFERENCES.index(name) - 1]
        return codes

    def compare(self, left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> Floats:
        """Differences of pairs, shape (DIFFERENCES, ...), of positions that broadcast against each other."""
        kinds = (self._codes[:, left] != self._codes[:, right]).astype(np.float64)
        steps = np.abs(self._sizes[:, left] - self._sizes[:, right])
        differences = np.concatenate([kinds, steps])
        differs = (differences > 0).any(axis=0, keepdims=True).astype(np.float64)
        with_any: Floats = np.concatenate([differs, differences])
        return with_any


def _number(values: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPrediction:
    """The predicted errors of queries: ``shift`` is the expected log error, ``weights`` the weight of each row in it.

    ``narrowing`` is the factor on the standard deviation of the error, above 1 where the measured errors are larger
    than expected. Shapes are (queries,) and, for ``weights``, (queries, rows). A shift is the weights times the rows'
    errors, with very large errors clipped.
    """

    shift: Floats
    narrowing: Floats
    weights: Floats


def predict_errors(
    rows: Sequence[tuple[Query, float]],
    queries: Sequence[Query],
    *,
    covariances: Sequence[ErrorCovariance],
    row_deviations: Floats | None = None,
) -> ErrorPrediction:
    """The best linear prediction of the log errors of ``queries`` from those of ``rows`` (query and log error).

    The covariance of two runs is, summed over ``covariances``, the product of their standard deviations and their
    correlation. ``row_deviations`` has shape (covariances, rows); the default is the root of each variance. Errors
    have mean 0 before any measurement, so where no row correlates with a query its shift is 0 and its narrowing 1
    (Henderson 1975; Rasmussen and Williams 2006, section 2.2). Raises ``InputError`` for an error that is not finite.
    """
    errors = np.array([error for _, error in rows], dtype=np.float64)
    if not np.isfinite(errors).all():
        odd = str(errors[~np.isfinite(errors)][0])
        raise InputError("the log error of a measured row is not finite", got=odd, expected="a number")
    comparison = SetupComparison([*(query for query, _ in rows), *queries])
    return predict_errors_at(
        comparison,
        np.arange(len(rows)),
        np.arange(len(rows), len(rows) + len(queries)),
        errors=errors,
        covariances=covariances,
        row_deviations=row_deviations,
    )


def predict_errors_at(
    comparison: SetupComparison,
    rows: npt.NDArray[np.int64],
    queries: npt.NDArray[np.int64],
    *,
    errors: Floats,
    covariances: Sequence[ErrorCovariance],
    row_deviations: Floats | None = None,
) -> ErrorPrediction:
    """``predict_errors`` for positions in ``comparison``: of rows with log ``errors``, and of queries."""
    if not len(rows):
        count = len(queries)
        return ErrorPrediction(shift=np.zeros(count), narrowing=np.ones(count), weights=np.zeros((count, 0)))
    roots = np.array([math.sqrt(part.variance) for part in covariances])[:, None]
    of_rows = np.broadcast_to(roots, (len(covariances), len(rows))) if row_deviations is None else row_deviations
    of_queries = np.broadcast_to(roots, (len(covariances), len(queries)))
    within = comparison.compare(rows[:, None], rows[None, :])
    across = comparison.compare(queries[:, None], rows[None, :])
    covariance = np.zeros((len(rows), len(rows)))
    cross_covariance = np.zeros((len(queries), len(rows)))
    for part, row_scale, query_scale in zip(covariances, of_rows, of_queries, strict=True):
        correlation = part.correlate(within)
        np.fill_diagonal(correlation, 1.0)
        covariance += np.outer(row_scale, row_scale) * correlation
        cross_covariance += np.outer(query_scale, row_scale) * part.correlate(across)
    # Rows with a deviation of 0 would make the matrix singular; they get no weight.
    covariance[np.diag_indices(len(rows))] += 1e-12
    weights: Floats = np.linalg.solve(covariance, cross_covariance.T).T.astype(np.float64)
    prior = (of_queries**2).sum(axis=0)
    remaining = np.clip(1.0 - (weights * cross_covariance).sum(axis=1) / np.where(prior > 0, prior, 1.0), 0.0, 1.0)
    # Unexpectedly large residuals widen the interval in proportion to their weight.
    deviations = np.sqrt((of_rows**2).sum(axis=0))
    widest = np.maximum(_LIMIT_OF_NETWORK * deviations, _NEVER_CLIPPED)
    clipped = np.clip(errors, -widest, widest)
    surprise = float(clipped @ np.linalg.solve(covariance, clipped))
    scale = (_PRIOR_ROWS + surprise) / (_PRIOR_ROWS + len(rows))
    narrowing = np.sqrt(remaining * (1.0 + (1.0 - remaining) * (scale - 1.0)))
    limits = np.where(across[DIFFERENCES.index("network")] > 0, _LIMIT_ELSEWHERE * deviations, widest)
    limits = np.where(across[DIFFERENCES.index("any")] > 0, limits, np.inf)
    shift = (weights * np.clip(errors, -limits, limits)).sum(axis=1)
    return ErrorPrediction(shift=shift, narrowing=narrowing, weights=weights)
