"""Folds keep groups whole, are balanced, and depend only on the seed."""

import numpy as np
import pytest

from precision_time.predictor.learning.folds import split_by_group
from precision_time.storage.errors import InputError


def test_rows_of_one_group_share_a_fold() -> None:
    groups = [number % 23 for number in range(200)]
    folds = split_by_group(groups, folds=5, seed=3)
    for group in set(groups):
        assert len({folds[i] for i in range(200) if groups[i] == group}) == 1
    sizes = np.bincount(folds)
    assert len(sizes) == 5
    assert sizes.max() - sizes.min() <= 9


def test_the_seed_decides_and_the_same_seed_repeats() -> None:
    groups = list(range(40))
    np.testing.assert_array_equal(split_by_group(groups, folds=5, seed=1), split_by_group(groups, folds=5, seed=1))
    assert (split_by_group(groups, folds=5, seed=1) != split_by_group(groups, folds=5, seed=2)).any()


def test_fewer_groups_than_folds_are_a_fold_each() -> None:
    assert sorted(split_by_group(["a", "b", "c"], folds=10)) == [0, 1, 2]


def test_one_group_cannot_be_split() -> None:
    with pytest.raises(InputError, match="too few groups"):
        split_by_group(["only", "only"], folds=5)
