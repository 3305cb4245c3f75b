"""Folds: groups of rows, such as the replicates of a configuration, dealt to folds as a whole."""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from precision_time.storage.errors import InputError

__all__ = ["split_by_group"]


def split_by_group(groups: Sequence[Hashable], *, folds: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """The fold (0..folds-1) of each row, such that rows of one group share a fold; shape (rows,).

    Groups are shuffled with ``seed`` and then dealt, the largest first, to the fold that has the fewest rows. With
    fewer groups than ``folds`` each group is a fold of its own. Raises ``InputError`` below two groups: nothing
    could be held out.
    """
    names = list(dict.fromkeys(groups))
    if len(names) < 2:
        raise InputError(
            "too few groups to hold one out",
            got=f"{len(names)} in {len(groups)} rows",
            expected="at least 2 different configurations",
            fix="measure more cells",
        )
    index = {name: number for number, name in enumerate(names)}
    codes = np.array([index[group] for group in groups])
    sizes = np.bincount(codes)
    shuffled = np.random.default_rng(seed).permutation(len(names))
    by_size = shuffled[np.argsort(-sizes[shuffled], kind="stable")]
    loads = np.zeros(min(folds, len(names)), dtype=np.int64)
    fold_of_group = np.empty(len(names), dtype=np.int64)
    for group in by_size:
        fold = int(np.argmin(loads))
        fold_of_group[group] = fold
        loads[fold] += sizes[group]
    folds_of_rows: npt.NDArray[np.int64] = fold_of_group[codes]
    return folds_of_rows
