"""Pooling: what the errors of measured rows tell of other questions, by how alike the two are."""

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.domain import network_of
from precision_time.predictor.rows.features import Query
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.storage.errors import InputError, IntegrityError

__all__ = [
    "DIFFERENCES",
    "SHIPPED_EFFECTS",
    "Effect",
    "Pooled",
    "Traits",
    "effects_from_dict",
    "effects_of",
    "pool",
    "pool_positions",
]

Floats = npt.NDArray[np.float64]

#: The ways in which two setups differ, in the order of ``Traits.compare``. All count once, but for ``batch`` (samples
#: of a GPU and micro-steps) and ``ranks``, which count doublings; ``any`` counts where any other one does.
DIFFERENCES = (
    "any", "network", "family", "chip", "gpu", "framework", "code", "precision", "input", "batch", "ranks",
)  # fmt: skip

#: Degrees of freedom of the prior on a variance: residuals larger than it expects widen the interval, smaller ones
#: narrow it (a Student-t process: Shah, Wilson and Ghahramani 2014).
_PRIOR_ROWS = 4.0
#: An error counts as much as this many deviations at most: for a question about another network, and about the same
#: one. A row that is far off says little of others: after leave-GPU-out one row without a limit made the answers for
#: its chip worse on average. Below a factor of 3 a row is always believed of its own network, and a repeat altogether.
_LIMIT_ELSEWHERE, _LIMIT_OF_NETWORK = 1.5, 4.0
_BELIEVED = math.log(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """How the log errors of two runs hang together: ``variance`` of one, and its correlation with another's.

    Two measurements of the same thing correlate by ``repeat``; each way in which two runs differ multiplies that by
    its factor in ``correlations`` (once, or once a doubling; 1 where none is named). Such products of kernels are
    positive definite (Rasmussen and Williams 2006, section 4.2.4).
    """

    variance: float
    repeat: float
    correlations: Mapping[str, float]

    def __post_init__(self) -> None:
        unknown = set(self.correlations) - set(DIFFERENCES)
        if unknown:
            raise InputError("a correlation of no known difference", got=", ".join(sorted(unknown)),
                             expected=", ".join(DIFFERENCES))  # fmt: skip
        if not 0 < self.variance < math.inf:
            raise InputError("variance of an effect", got=self.variance, expected="a number above 0")
        for name, value in {"repeat": self.repeat, **self.correlations}.items():
            # below 1, else the same run measured twice has no solution
            if not 0 <= value <= 1 or (name == "repeat" and value == 1):
                raise InputError(f"correlation {name!r} of an effect", got=value, expected="a number from 0 to 1")

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
    def from_dict(cls, values: Mapping[str, Any]) -> "Effect":
        """The inverse of ``to_dict``; raises ``KeyError``, ``TypeError`` or ``ValueError`` for what does not fit."""
        return cls(
            variance=float(values["variance"]),
            repeat=float(values["repeat"]),
            correlations={str(name): float(value) for name, value in values["correlations"].items()},
        )


def effects_from_dict(values: Mapping[str, Any]) -> dict[str, Effect]:
    """Effects by name from JSON; raises ``IntegrityError`` for what does not fit."""
    try:
        return {str(name): Effect.from_dict(value) for name, value in values.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError("the effects of a predictor cannot be read", got=repr(error),
                             expected="variance, repeat and correlations of each") from error  # fmt: skip


def _effect(variance: float, repeat: float, **correlations: float) -> Effect:
    return Effect(variance=variance, repeat=repeat, correlations=correlations)


#: Effects where a predictor brings none: what ``estimate_effects`` finds in the shipped table (10,837 rows, seed 0),
#: with the factors below 0.995.
SHIPPED_EFFECTS: dict[str, Effect] = {
    "known": _effect(
        0.0162, 0.791, network=0.423, family=0.0, gpu=0.098, framework=0.001, code=0.618, precision=0.240,
        batch=0.785, ranks=0.513,
    ),
    "new pair": _effect(
        0.0272, 0.879, any=0.752, network=0.640, family=0.0, chip=0.564, gpu=0.783, framework=0.714,
        code=0.929, precision=0.689, input=0.735, batch=0.950, ranks=0.905,
    ),
    "new model": _effect(
        0.0421, 0.958, any=0.800, network=0.817, family=0.0, chip=0.965, gpu=0.724, framework=0.669,
        code=0.920, precision=0.787, input=0.792, batch=0.928, ranks=0.977,
    ),
    "new family": _effect(
        0.0855, 0.969, any=0.872, network=0.854, family=0.0, chip=0.827, gpu=0.828, framework=0.648,
        code=0.854, precision=0.784, input=0.984, batch=0.930, ranks=0.978,
    ),
    "new gpu": _effect(
        0.0649, 0.873, network=0.438, family=0.995, chip=0.0, gpu=0.686, framework=0.130, code=0.805,
        precision=0.749, input=0.622, batch=0.989, ranks=0.990,
    ),
    "beyond scale": _effect(
        0.1478, 0.955, any=0.989, family=0.0, gpu=0.787, framework=0.797, code=0.861, input=0.840,
        batch=0.963, ranks=0.821,
    ),
    "closed forms": _effect(
        0.1364, 0.974, any=0.840, network=0.881, family=0.215, chip=0.857, gpu=0.916, framework=0.605,
        code=0.760, precision=0.631, batch=0.971, ranks=0.954,
    ),
    # An assumption, since no table of CPUs is shipped: 90 % of hosts within a factor of 3, and nearly the same factor
    # for all networks and precisions on one host.
    "cpu": _effect(
        (math.log(3) / 1.645) ** 2, 0.99, network=0.95, chip=0.0, gpu=0.0, framework=0.95, precision=0.97,
    ),
}  # fmt: skip

#: What makes up the error in each regime: an effect of the network, and of a chip that was never measured.
_EFFECTS_OF: dict[str, tuple[str, ...]] = {
    "known": ("known",),
    "new pair": ("new pair",),
    "new model": ("new model",),
    "new family": ("new family",),
    "beyond scale": ("beyond scale",),
    "new gpu": ("known", "new gpu"),
    "new model and gpu": ("new model", "new gpu"),
    "closed forms": ("closed forms",),
    "closed forms on a CPU": ("closed forms", "cpu"),
}


def effects_of(regime: str, effects: Mapping[str, Effect]) -> tuple[Effect, Effect | None]:
    """The effect of the network and, where the chip is new too, of the chip, for a question of this regime.

    What ``effects`` lacks is taken from ``SHIPPED_EFFECTS``. Raises ``InputError`` for an unknown regime.
    """
    if regime not in _EFFECTS_OF:
        raise InputError("no such regime", got=regime, expected=", ".join(_EFFECTS_OF))
    found = [effects.get(name) or SHIPPED_EFFECTS[name] for name in _EFFECTS_OF[regime]]
    return found[0], found[1] if len(found) > 1 else None


def _code_of(setup: TrainingSetup) -> tuple[Hashable, ...]:
    """What of the script differs; its framework has a factor of its own, and its year goes with hardware and model."""
    layout = dataclasses.replace(setup.layout, data=1)
    return dataclasses.replace(setup.implementation, framework="", software_year=None), layout


class Traits:
    """What of setups decides how alike they are, ready to be compared in many pairs."""

    def __init__(self, queries: Sequence[Query]) -> None:
        setups = [query.setup for query in queries]
        keys: list[list[Hashable]] = [
            [network_of(one) for one in setups],
            [one.workload.family or network_of(one) for one in setups],
            [one.hardware.chip or one.hardware.name for one in setups],
            [one.hardware.name for one in setups],
            [one.implementation.framework for one in setups],
            [_code_of(one) for one in setups],
            [one.precision.name for one in setups],
            [one.workload.task_input for one in setups],
        ]
        self._codes = np.array([_number(values) for values in keys], dtype=np.int64).reshape(len(keys), len(setups))
        self._sizes = np.array(
            [
                [math.log2(one.batch_size * one.gradient_accumulation_steps) for one in setups],
                [math.log2(one.world_size) for one in setups],
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
        found = np.concatenate([kinds, steps])
        differs = (found > 0).any(axis=0, keepdims=True).astype(np.float64)
        both: Floats = np.concatenate([differs, found])
        return both


def _number(values: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """What rows tell of queries: ``shift`` is the expected log error and ``weights`` the share of each row in it.

    ``narrowing`` is what the deviation of the error shrinks by (above 1 where the rows surprise). Shapes (queries,)
    and, of ``weights``, (queries, rows); a shift is the weights times the rows' errors, very large ones cut short.
    """

    shift: Floats
    narrowing: Floats
    weights: Floats


def pool(
    rows: Sequence[tuple[Query, float]],
    queries: Sequence[Query],
    *,
    effects: Sequence[Effect],
    row_deviations: Floats | None = None,
    query_deviations: Floats | None = None,
) -> Pooled:
    """The best linear prediction of the log errors of ``queries`` from those of ``rows`` (query and log error).

    The covariance of two runs is, summed over ``effects``, the product of their deviations and the correlation.
    ``row_deviations`` and ``query_deviations`` have shape (effects, rows) and (effects, queries), by default the root
    of each effect's variance. Errors have mean 0 before anything is measured, so where nothing is alike the shift is
    0 and the narrowing 1 (Henderson 1975; Rasmussen and Williams 2006, section 2.2). Raises ``InputError`` for an
    error that is not finite.
    """
    errors = np.array([error for _, error in rows], dtype=np.float64)
    if not np.isfinite(errors).all():
        raise InputError("log error of a measured row", got=str(errors[~np.isfinite(errors)][0]), expected="a number")
    traits = Traits([*(query for query, _ in rows), *queries])
    return pool_positions(
        traits,
        np.arange(len(rows)),
        np.arange(len(rows), len(rows) + len(queries)),
        errors=errors,
        effects=effects,
        row_deviations=row_deviations,
        query_deviations=query_deviations,
    )


def pool_positions(
    traits: Traits,
    rows: npt.NDArray[np.int64],
    queries: npt.NDArray[np.int64],
    *,
    errors: Floats,
    effects: Sequence[Effect],
    row_deviations: Floats | None = None,
    query_deviations: Floats | None = None,
) -> Pooled:
    """``pool`` for positions in ``traits``, of rows with log ``errors`` and of queries."""
    if not len(rows):
        count = len(queries)
        return Pooled(shift=np.zeros(count), narrowing=np.ones(count), weights=np.zeros((count, 0)))
    own = np.array([math.sqrt(effect.variance) for effect in effects])[:, None]
    of_rows = np.broadcast_to(own, (len(effects), len(rows))) if row_deviations is None else row_deviations
    asked = np.broadcast_to(own, (len(effects), len(queries))) if query_deviations is None else query_deviations
    within = traits.compare(rows[:, None], rows[None, :])
    across = traits.compare(queries[:, None], rows[None, :])
    covariance = np.zeros((len(rows), len(rows)))
    shared = np.zeros((len(queries), len(rows)))
    for effect, row_scale, query_scale in zip(effects, of_rows, asked, strict=True):
        alike = effect.correlate(within)
        np.fill_diagonal(alike, 1.0)
        covariance += np.outer(row_scale, row_scale) * alike
        shared += np.outer(query_scale, row_scale) * effect.correlate(across)
    # Rows without any deviation of their own would make it singular: nothing is learned from them.
    covariance[np.diag_indices(len(rows))] += 1e-12
    weights: Floats = np.linalg.solve(covariance, shared.T).T.astype(np.float64)
    prior = (asked**2).sum(axis=0)
    left = np.clip(1.0 - (weights * shared).sum(axis=1) / np.where(prior > 0, prior, 1.0), 0.0, 1.0)
    # Rows that surprise widen what they tell of, as far as they tell of it.
    deviations = np.sqrt((of_rows**2).sum(axis=0))
    widest = np.maximum(_LIMIT_OF_NETWORK * deviations, _BELIEVED)
    bounded = np.clip(errors, -widest, widest)
    surprise = float(bounded @ np.linalg.solve(covariance, bounded))
    scale = (_PRIOR_ROWS + surprise) / (_PRIOR_ROWS + len(rows))
    narrowing = np.sqrt(left * (1.0 + (1.0 - left) * (scale - 1.0)))
    limits = np.where(across[DIFFERENCES.index("network")] > 0, _LIMIT_ELSEWHERE * deviations, widest)
    limits = np.where(across[DIFFERENCES.index("any")] > 0, limits, np.inf)
    shift = (weights * np.clip(errors, -limits, limits)).sum(axis=1)
    return Pooled(shift=shift, narrowing=narrowing, weights=weights)
