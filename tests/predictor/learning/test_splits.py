"""Each split leaves out related rows together, and its folds never train on the rows that they predict."""

from dataclasses import replace

import numpy as np
import pytest

from precision_time.predictor.learning.splits import (
    SPLITS,
    OneWaySplit,
    RotatingSplit,
    feasible_splits,
    same_but_precision,
)
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.observations import Observation, observe
from precision_time.storage.errors import InputError

GPUS = ("A100-SXM4-80GB", "A100-SXM4-40GB", "V100-SXM2-16GB", "H100-SXM5-80GB")


@pytest.fixture(scope="module")
def rows(measure) -> list[Observation]:
    measured = [
        row
        for gpu in GPUS
        for row in measure(
            gpu=gpu,
            precisions=("fp32", "amp_fp16"),
            world_sizes=(1, 2, 4, 8),
            batches=(8, 16),
            models=("mlp", "vit_tiny"),
        )
    ]
    return observe(measured)


def rename(observation: Observation, name: str) -> Observation:
    """The same row under another name of its network."""
    return replace(observation, measurement=replace(observation.measurement, model=name))


def enlarge(observation: Observation) -> Observation:
    """The same row on 16 GPUs in two nodes."""
    measured = replace(observation.measurement, world_size=16, nodes=2)
    return replace(
        observation, measurement=measured, query=Query.of(replace(observation.setup, world_size=16, nodes=2))
    )


def rotating() -> list[str]:
    return [name for name, split in SPLITS.items() if isinstance(split, RotatingSplit)]


@pytest.mark.parametrize("name", rotating())
def test_a_rotating_split_predicts_every_row_once_from_other_groups(rows, name: str) -> None:
    split = SPLITS[name]
    folds = split.divide(rows, seed=0)
    assert 2 <= len(folds) <= split.folds
    assert sorted(np.concatenate([fold.test for fold in folds])) == list(range(len(rows)))
    for fold in folds:
        assert len(fold.train) + len(fold.test) == len(rows)
        assert not {split.group(rows[i]) for i in fold.train} & {split.group(rows[i]) for i in fold.test}
    assert split.find_interval_fold(rows) is None


def test_the_splits_have_their_numbers_of_folds() -> None:
    folds = {name: split.folds if isinstance(split, RotatingSplit) else 1 for name, split in SPLITS.items()}
    assert folds == {
        "row": 5,
        "configuration": 5,
        "source-model-gpu": 10,
        "leave-model-out": 10,
        "leave-family-out": 10,
        "leave-gpu-out": 10,
        "scale": 1,
        "precision-transfer": 1,
    }


def test_only_the_split_by_row_puts_replicates_in_two_folds(rows) -> None:
    twice = [replace(observation) for observation in rows] + list(rows)
    by_row = SPLITS["row"].divide(twice, seed=0)
    apart = [
        sum(number in fold.test for number in pair) == 1
        for pair in zip(range(len(rows)), range(len(rows), len(twice)), strict=True)
        for fold in by_row
    ]
    assert any(apart)
    for fold in SPLITS["configuration"].divide(twice, seed=0):
        first = {int(i) for i in fold.test if i < len(rows)}
        assert first == {int(i) - len(rows) for i in fold.test if i >= len(rows)}


@pytest.mark.parametrize("name", ["configuration", "source-model-gpu", "leave-model-out"])
def test_names_of_one_network_are_left_out_together(rows, name: str) -> None:
    group = SPLITS[name].group
    for observation in rows[:4]:
        assert group(rename(observation, "another name")) == group(observation)


def test_sister_parts_of_one_chip_are_left_out_together(rows) -> None:
    for fold in SPLITS["leave-gpu-out"].divide(rows, seed=0):
        left_out = {rows[i].setup.hardware.name for i in fold.test}
        assert ("A100-SXM4-80GB" in left_out) == ("A100-SXM4-40GB" in left_out)
    assert len(SPLITS["leave-gpu-out"].divide(rows, seed=0)) == 3


def test_scale_trains_on_up_to_8_gpus_and_fits_intervals_inside_them(rows) -> None:
    all_rows = [*rows, *(enlarge(observation) for observation in rows[:6])]
    (fold,) = SPLITS["scale"].divide(all_rows, seed=0)
    assert {all_rows[i].setup.world_size for i in fold.train} == {1, 2, 4, 8}
    assert {all_rows[i].setup.world_size for i in fold.test} == {16}
    inner = SPLITS["scale"].find_interval_fold(all_rows)
    assert inner is not None
    assert {all_rows[i].setup.world_size for i in inner.train} == {1, 2}
    assert {all_rows[i].setup.world_size for i in inner.test} == {4, 8}


def test_precision_transfer_predicts_configurations_trained_on_in_fp32_or_tf32(rows, measure) -> None:
    alone = observe(measure(models=("bert_mini",), precisions=("amp_bf16",)))
    tf32 = observe(measure(models=("mlp",), precisions=("tf32",), batches=(64,)))
    all_rows = [*rows, *alone, *tf32]
    (fold,) = SPLITS["precision-transfer"].divide(all_rows, seed=0)
    assert {all_rows[i].setup.precision.name for i in fold.train} == {"fp32", "tf32"}
    assert {all_rows[i].setup.precision.name for i in fold.test} == {"amp_fp16"}
    assert len(fold.test) == len(rows) / 2
    inner = SPLITS["precision-transfer"].find_interval_fold(all_rows)
    assert inner is not None
    assert {all_rows[i].setup.precision.name for i in inner.train} == {"fp32"}
    assert {all_rows[i].setup.precision.name for i in inner.test} == {"tf32"}


def test_a_one_way_split_without_two_sides_is_refused_and_not_feasible(rows) -> None:
    assert "scale" not in feasible_splits(rows)
    with pytest.raises(InputError, match="nothing can be left out"):
        SPLITS["scale"].divide(rows, seed=0)
    assert isinstance(SPLITS["scale"], OneWaySplit)


def test_only_splits_with_something_to_leave_out_are_feasible(measure) -> None:
    one_model = observe(measure(models=("mlp",)))
    assert set(feasible_splits(one_model)) == {"row", "configuration", "precision-transfer"}


def test_rows_pair_up_only_where_nothing_but_precision_differs(rows) -> None:
    first = rows[0]
    pair = [row for row in rows if same_but_precision(row) == same_but_precision(first)]
    assert len({row.setup.precision.name for row in pair}) == len(pair) == 2
    elsewhere = replace(first, measurement=replace(first.measurement, source="elsewhere"))
    assert same_but_precision(elsewhere) != same_but_precision(first)


def test_a_split_that_could_leave_too_few_rows_to_train_on_is_not_feasible(measure) -> None:
    many = observe(measure(gpu="A100-SXM4-80GB"))
    few = observe(measure(gpu="H100-SXM5-80GB"))
    assert "leave-gpu-out" not in feasible_splits([*many, *few[:3]])
    assert "leave-gpu-out" in feasible_splits([*many, *few[:4]])
