"""Splits: how rows of measurements are left out of a fit, one record for each way, and the folds that follow.

A new split is a record in ``SPLITS``; a regime whose interval or blend it should set names it in ``regimes.py``.
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.folds import split_by_group
from precision_time.predictor.rows.observations import Observation
from precision_time.storage.errors import InputError

__all__ = [
    "FEWEST_TO_LEARN",
    "NO_GOAL",
    "SPLITS",
    "CurvePlan",
    "Fold",
    "Goal",
    "OneWaySplit",
    "RotatingSplit",
    "configuration_of",
    "feasible_splits",
    "same_but_precision",
]

Positions = npt.NDArray[np.int64]

#: Trees need at least this many rows, so a fold must leave as many.
FEWEST_TO_LEARN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Positions of the rows that are trained on and of the rows that are predicted."""

    train: Positions
    test: Positions


class Goal(NamedTuple):
    """What the predictor should reach on a split of the public table, as fractions; None: no goal."""

    mape: float | None = None
    median: float | None = None


NO_GOAL = Goal()


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePlan:
    """How measured rows correct the rows that a split left out: rows of one ``group`` correct the others of it.

    ``what`` describes the rows in reports, and ``covariance`` names the plan whose pairs of rows the correlation of
    errors is fitted on.
    """

    what: str
    group: Callable[[Observation], str]
    covariance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatingSplit:
    """Groups of rows are dealt to ``folds`` folds, and each fold is predicted from all the others.

    ``curve`` says how corrections by measured rows are scored after this split; None where they are not scored.
    """

    title: str
    folds: int
    group: Callable[[Observation], Hashable]
    goal: Goal = NO_GOAL
    curve: CurvePlan | None = None

    def divide(self, observations: Sequence[Observation], *, seed: int) -> list[Fold]:
        """The folds; together they predict every row once. Raises ``InputError`` below two groups."""
        numbers = split_by_group([self.group(observation) for observation in observations], folds=self.folds, seed=seed)
        return [
            Fold(train=np.flatnonzero(numbers != number), test=np.flatnonzero(numbers == number))
            for number in np.unique(numbers)
        ]

    def is_feasible(self, observations: Sequence[Observation]) -> bool:
        """Whether there are at least two groups, and enough rows to train on whichever group is left out."""
        sizes = Counter(self.group(observation) for observation in observations)
        return len(sizes) > 1 and len(observations) - max(sizes.values()) >= FEWEST_TO_LEARN

    def find_interval_fold(self, observations: Sequence[Observation]) -> Fold | None:
        """None: the errors of the other folds set the intervals of each fold."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWaySplit:
    """Some rows are trained on and others predicted, never the other way round: one fold.

    ``divide_rows`` makes the fold. With a single fold no other fold has errors, so intervals are fitted inside the
    training rows: ``divide_again`` divides those in the same way, one step nearer.
    """

    title: str
    divide_rows: Callable[[Sequence[Observation]], Fold]
    divide_again: Callable[[Sequence[Observation]], Fold]
    goal: Goal = NO_GOAL
    curve: CurvePlan | None = None

    def divide(self, observations: Sequence[Observation], *, seed: int) -> list[Fold]:
        """The one fold; raises ``InputError`` when too few rows are left to train on, or none to predict."""
        fold = self.divide_rows(observations)
        if not self.is_feasible(observations):
            raise InputError(
                f"nothing can be left out: {self.title}",
                got=f"{len(fold.train)} rows to train on and {len(fold.test)} to predict",
                expected=f"at least {FEWEST_TO_LEARN} and 1",
                fix="ask for another split",
            )
        return [fold]

    def is_feasible(self, observations: Sequence[Observation]) -> bool:
        """Whether enough rows are left to train on, and some to predict."""
        fold = self.divide_rows(observations)
        return len(fold.train) >= FEWEST_TO_LEARN and len(fold.test) > 0

    def find_interval_fold(self, observations: Sequence[Observation]) -> Fold | None:
        """The division of the training rows, in positions of ``observations``; None where one side is empty."""
        train = self.divide_rows(observations).train
        inner = self.divide_again([observations[position] for position in train])
        if not len(inner.train) or not len(inner.test):
            return None
        return Fold(train=train[inner.train], test=train[inner.test])


def configuration_of(observation: Observation, *, with_precision: bool = True) -> tuple[str | int, ...]:
    """The configuration of a row under the one name of its network, so that synonyms stay together."""
    measured = replace(observation.measurement, model=observation.network)
    return (measured if with_precision else replace(measured, precision="")).configuration


def same_but_precision(observation: Observation) -> tuple[Hashable, ...]:
    """A key that is equal for rows of one source, script and machine that differ in precision alone."""
    setup, measured = observation.setup, observation.measurement
    return (
        measured.source, measured.task_input, measured.framework, observation.network, setup.workload,
        setup.hardware.name, setup.hardware.network_bytes_per_s, setup.world_size, setup.nodes, setup.batch_size,
        setup.gradient_accumulation_steps, measured.strategy, setup.layout, setup.implementation,
    )  # fmt: skip


def _divide_by_scale(observations: Sequence[Observation], *, most: int) -> Fold:
    """Rows on at most ``most`` GPUs are trained on, the others are predicted."""
    large = np.array([observation.setup.world_size > most for observation in observations], dtype=np.bool_)
    return Fold(train=np.flatnonzero(~large), test=np.flatnonzero(large))


def _divide_by_precision(
    observations: Sequence[Observation], *, trained: tuple[str, ...], group: Callable[[Observation], Hashable]
) -> Fold:
    """Rows at the ``trained`` precisions are trained on; other rows of a ``group`` of theirs are predicted.

    The rest is left out: its models or batches are new as well.
    """
    is_train = np.array([observation.setup.precision.name in trained for observation in observations], dtype=np.bool_)
    groups = [group(observation) for observation in observations]
    trained_groups = {name for name, trains in zip(groups, is_train, strict=True) if trains}
    is_test = np.array([name in trained_groups for name in groups], dtype=np.bool_) & ~is_train
    return Fold(train=np.flatnonzero(is_train), test=np.flatnonzero(is_test))


#: Every split by name: what its folds leave out together, and how many folds there are.
SPLITS: dict[str, RotatingSplit | OneWaySplit] = {
    # single rows, mostly with a repeat among the others: the split of the paper, for comparison with it
    "row": RotatingSplit(title="5-fold by row", folds=5, group=id, goal=Goal(0.05, 0.025)),
    # all rows of a configuration, so replicates are never in two folds
    "configuration": RotatingSplit(
        title="5-fold by configuration", folds=5, group=configuration_of, goal=Goal(0.06, 0.035)
    ),
    # all rows of one source for one network on one GPU
    "source-model-gpu": RotatingSplit(
        title="leave source, model and GPU out",
        folds=10,
        group=lambda observation: (
            observation.measurement.source,
            observation.network,
            observation.setup.hardware.name,
        ),
        goal=Goal(0.10, 0.06),
    ),
    # a network under all its names
    "leave-model-out": RotatingSplit(
        title="leave model out",
        folds=10,
        group=lambda observation: observation.network,
        goal=Goal(0.15, 0.09),
        curve=CurvePlan(what="of the model", group=lambda observation: observation.network, covariance="new model"),
    ),
    # a family of networks (families.csv)
    "leave-family-out": RotatingSplit(
        title="leave family out",
        folds=10,
        group=lambda observation: observation.setup.workload.family or observation.network,
        goal=Goal(0.22, 0.13),
        curve=CurvePlan(what="of the model", group=lambda observation: observation.network, covariance="new family"),
    ),
    # a chip with all its sister parts
    "leave-gpu-out": RotatingSplit(
        title="leave GPU out",
        folds=10,
        group=lambda observation: observation.chip,
        goal=Goal(0.15, 0.10),
        curve=CurvePlan(
            what="on the GPU", group=lambda observation: observation.setup.hardware.name, covariance="new gpu"
        ),
    ),
    # 1 fold: all rows on more than 8 GPUs; its intervals come from 3 to 8 GPUs predicted from at most 2
    "scale": OneWaySplit(
        title="up to 8 GPUs to more",
        divide_rows=functools.partial(_divide_by_scale, most=8),
        divide_again=functools.partial(_divide_by_scale, most=2),
        goal=Goal(0.15, 0.10),
    ),
    # 1 fold: 16 bits and fewer, in configurations trained on in fp32 or tf32; its intervals come from tf32 predicted
    # from fp32, of networks that were trained on: no configuration of the public table has both
    "precision-transfer": OneWaySplit(
        title="fp32 and tf32 to fewer bits",
        divide_rows=functools.partial(
            _divide_by_precision,
            trained=("fp32", "tf32"),
            group=functools.partial(configuration_of, with_precision=False),
        ),
        divide_again=functools.partial(
            _divide_by_precision, trained=("fp32",), group=lambda observation: observation.network
        ),
    ),
}


def feasible_splits(observations: Sequence[Observation]) -> tuple[str, ...]:
    """The names in ``SPLITS`` that leave enough rows to train on and some to predict."""
    return tuple(name for name, split in SPLITS.items() if split.is_feasible(observations))
