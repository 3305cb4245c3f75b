"""What each split of the measurements leaves out, and the folds that follow from it."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.folds import split_by_group
from precision_time.predictor.rows.observations import Observation
from precision_time.storage.errors import InputError

__all__ = ["FEWEST_TO_LEARN", "SPLITS", "Fold", "OneWaySplit", "RotatingSplit", "feasible_splits", "same_but_precision"]

Positions = npt.NDArray[np.int64]

#: Trees on fewer rows are no predictor, so a fold that leaves fewer is none either.
FEWEST_TO_LEARN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Positions of the rows that teach and of those that are predicted."""

    train: Positions
    test: Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatingSplit:
    """Groups of rows are dealt to ``folds`` folds, and each fold is predicted from all the others."""

    title: str
    folds: int
    group: Callable[[Observation], Hashable]

    def divide(self, observations: Sequence[Observation], *, seed: int) -> list[Fold]:
        """The folds; together they predict every row once. Raises ``InputError`` below two groups."""
        numbers = split_by_group([self.group(seen) for seen in observations], folds=self.folds, seed=seed)
        return [
            Fold(train=np.flatnonzero(numbers != number), test=np.flatnonzero(numbers == number))
            for number in np.unique(numbers)
        ]

    def is_feasible(self, observations: Sequence[Observation]) -> bool:
        """Whether there are two groups or more, and enough rows whichever of them is left out."""
        sizes = Counter(self.group(seen) for seen in observations)
        return len(sizes) > 1 and len(observations) - max(sizes.values()) >= FEWEST_TO_LEARN

    def calibrate(self, observations: Sequence[Observation]) -> Fold | None:
        """None: the errors of the other folds calibrate the intervals of one."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWaySplit:
    """Some rows teach and others are predicted, never the other way round: one fold.

    ``divide_rows`` names both for the rows it is given. ``divide_again`` divides the teaching rows the same way one
    step nearer: with a single fold no other one has errors, so intervals are calibrated inside the teaching rows.
    """

    title: str
    divide_rows: Callable[[Sequence[Observation]], Fold]
    divide_again: Callable[[Sequence[Observation]], Fold]

    def divide(self, observations: Sequence[Observation], *, seed: int) -> list[Fold]:
        """The one fold. Raises ``InputError`` where too few rows teach or none is left to predict."""
        fold = self.divide_rows(observations)
        if not self.is_feasible(observations):
            raise InputError(
                f"nothing can be left out: {self.title}",
                got=f"{len(fold.train)} rows to learn from and {len(fold.test)} to predict",
                expected=f"at least {FEWEST_TO_LEARN} and 1",
                fix="ask for another split",
            )
        return [fold]

    def is_feasible(self, observations: Sequence[Observation]) -> bool:
        """Whether enough rows teach and others are left to predict."""
        fold = self.divide_rows(observations)
        return len(fold.train) >= FEWEST_TO_LEARN and len(fold.test) > 0

    def calibrate(self, observations: Sequence[Observation]) -> Fold | None:
        """The division inside the teaching rows, in positions of ``observations``; None where it has no two sides."""
        train = self.divide_rows(observations).train
        inner = self.divide_again([observations[position] for position in train])
        if not len(inner.train) or not len(inner.test):
            return None
        return Fold(train=train[inner.train], test=train[inner.test])


def _configure(seen: Observation) -> tuple[str | int, ...]:
    """The configuration of a row under its network's one name, so that synonyms stay together."""
    return replace(seen.measurement, model=seen.network).configuration


def _configure_without_precision(seen: Observation) -> tuple[str | int, ...]:
    return replace(seen.measurement, model=seen.network, precision="").configuration


def same_but_precision(seen: Observation) -> tuple[Hashable, ...]:
    """What two rows share that are of one source, script and machine and differ in nothing but precision."""
    setup, measured = seen.setup, seen.measurement
    return (
        measured.source, measured.task_input, measured.framework, seen.network, setup.workload, setup.hardware.name,
        setup.hardware.network_bytes_per_s, setup.world_size, setup.nodes, setup.batch_size,
        setup.gradient_accumulation_steps, setup.strategy, setup.layout, setup.implementation,
    )  # fmt: skip


def _divide_by_scale(observations: Sequence[Observation], *, most: int) -> Fold:
    """Rows of at most ``most`` GPUs teach, the others are predicted."""
    large = np.array([seen.setup.world_size > most for seen in observations], dtype=np.bool_)
    return Fold(train=np.flatnonzero(~large), test=np.flatnonzero(large))


def _divide_by_precision(
    observations: Sequence[Observation], *, taught: tuple[str, ...], known_by: Callable[[Observation], Hashable]
) -> Fold:
    """Rows at the ``taught`` policies teach; predicted are others with the ``known_by`` of one that taught.

    The rest stays out: it would ask about new models or batches as well.
    """
    teaches = np.array([seen.setup.precision.name in taught for seen in observations], dtype=np.bool_)
    keys = [known_by(seen) for seen in observations]
    known = {key for key, is_taught in zip(keys, teaches, strict=True) if is_taught}
    asked = np.array([key in known for key in keys], dtype=np.bool_) & ~teaches
    return Fold(train=np.flatnonzero(teaches), test=np.flatnonzero(asked))


#: Every split by name: what its folds leave out together, and how many there are. All of one seed (0 by default).
SPLITS: dict[str, RotatingSplit | OneWaySplit] = {
    # one row: mostly between repeats; the paper's own split, for comparison with it
    "row": RotatingSplit(title="5-fold by row", folds=5, group=id),
    # all rows of a configuration: replicates never straddle two folds
    "configuration": RotatingSplit(title="5-fold by configuration", folds=5, group=_configure),
    # all a source says of one network on one GPU
    "source-model-gpu": RotatingSplit(
        title="leave source, model and GPU out",
        folds=10,
        group=lambda seen: (seen.measurement.source, seen.network, seen.setup.hardware.name),
    ),
    # a network under all its names
    "leave-model-out": RotatingSplit(title="leave model out", folds=10, group=lambda seen: seen.network),
    # a family of networks (families.csv)
    "leave-family-out": RotatingSplit(
        title="leave family out", folds=10, group=lambda seen: seen.setup.workload.family or seen.network
    ),
    # a chip with all its sister parts
    "leave-gpu-out": RotatingSplit(title="leave GPU out", folds=10, group=lambda seen: seen.chip),
    # 1 fold: everything on more than 8 GPUs; its intervals come from 3 to 8 GPUs predicted from at most 2
    "scale": OneWaySplit(
        title="up to 8 GPUs to more",
        divide_rows=functools.partial(_divide_by_scale, most=8),
        divide_again=functools.partial(_divide_by_scale, most=2),
    ),
    # 1 fold: 16 bits and fewer, in configurations that taught in fp32 or tf32; its intervals come from tf32, predicted
    # from fp32, of networks that taught: no configuration of the public table has both
    "precision-transfer": OneWaySplit(
        title="fp32 and tf32 to fewer bits",
        divide_rows=functools.partial(
            _divide_by_precision, taught=("fp32", "tf32"), known_by=_configure_without_precision
        ),
        divide_again=functools.partial(_divide_by_precision, taught=("fp32",), known_by=lambda seen: seen.network),
    ),
}


def feasible_splits(observations: Sequence[Observation]) -> tuple[str, ...]:
    """The names in ``SPLITS`` for which the rows hold something to learn from and something to leave out."""
    return tuple(name for name, split in SPLITS.items() if split.is_feasible(observations))
