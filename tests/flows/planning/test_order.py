"""The order of cells: the same permutation each time, in which every value and pair occurs early."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precision_time.flows.planning.order import axes_of, cover_cells, order_cells
from precision_time.storage.schema import GridCell


def make_grid(models: int, precisions: int, sizes: int, batches: int, accumulations: int = 1) -> list[GridCell]:
    names = ("fp32", "amp_bf16", "amp_fp16", "tf32", "bf16")
    return [
        GridCell(
            model=f"m{model}",
            precision=precision,
            world_size=2**size,
            per_gpu_batch_size=batch + 1,
            gradient_accumulation_steps=accumulation + 1,
        )
        for model, size, batch, accumulation, precision in itertools.product(
            range(models), range(sizes), range(batches), range(accumulations), names[:precisions]
        )
    ]


def count_until_seen(order: list[GridCell], names: tuple[str, ...]) -> int:
    """After how many cells every value of the axes ``names`` has occurred."""
    missing = {(name, getattr(cell, name)) for cell in order for name in names}
    for count, cell in enumerate(order, start=1):
        missing -= {(name, getattr(cell, name)) for name in names}
        if not missing:
            return count
    return len(order)


GRIDS = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.integers(1, 2))


@given(GRIDS)
@settings(max_examples=60, deadline=None)
def test_after_as_many_cells_as_the_longest_axis_has_every_value_was_seen(sizes: tuple[int, ...]) -> None:
    order = order_cells(make_grid(*sizes))
    assert count_until_seen(order, axes_of(order)) == max(sizes)
    assert len(cover_cells(order)) == max(sizes)


@given(GRIDS)
@settings(max_examples=60, deadline=None)
def test_models_precisions_and_world_sizes_are_seen_before_batches(sizes: tuple[int, ...]) -> None:
    order = order_cells(make_grid(*sizes))
    assert count_until_seen(order, ("model", "precision", "world_size")) == max(sizes[:3])


@given(GRIDS, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_of_any_part_of_a_grid_each_cell_comes_once_and_the_cover_is_of_use(
    sizes: tuple[int, ...], random: object
) -> None:
    grid = make_grid(*sizes)
    part = [cell for cell in grid if random.random() < 0.7] or grid[:1]  # type: ignore[attr-defined]
    order = order_cells(part)
    assert sorted(order, key=repr) == sorted(part, key=repr)
    assert order == order_cells(part)
    covered: set[tuple[str, object]] = set()
    for cell in cover_cells(part):
        values = {(name, getattr(cell, name)) for name in axes_of(part)}
        assert not axes_of(part) or not values <= covered, "a cell of the cover shows something new"
        covered |= values
    assert covered == {(name, getattr(cell, name)) for cell in part for name in axes_of(part)}


@pytest.mark.parametrize("batches", [1, 5])
def test_after_the_cover_the_precisions_of_a_configuration_are_neighbours(batches: int) -> None:
    grid = make_grid(4, 3, 3, batches)
    order = order_cells(grid)
    after = order[len(cover_cells(grid)) :]
    configurations = [(cell.model, cell.world_size, cell.per_gpu_batch_size) for cell in after]
    assert len(list(itertools.groupby(configurations))) == len(set(configurations))


def test_every_pair_of_values_is_seen_before_refinements() -> None:
    grid = make_grid(4, 2, 3, 6)
    order = order_cells(grid)
    pairs = {(cell.model, cell.world_size) for cell in grid}
    first = next(n for n in range(len(order)) if {(cell.model, cell.world_size) for cell in order[:n]} == pairs)
    assert first < len(order) / 2
    half = order[: len(order) // 2]
    assert {cell.model for cell in half} == {cell.model for cell in grid}
    counts = [sum(cell.model == f"m{model}" for cell in half) for model in range(4)]
    assert max(counts) - min(counts) <= len(half) // 4


def test_a_single_cell_and_a_grid_of_one_axis_are_ordered_too() -> None:
    assert order_cells([]) == []
    assert len(order_cells(make_grid(1, 1, 1, 1))) == 1
    batches = [cell.per_gpu_batch_size for cell in order_cells(make_grid(1, 1, 1, 9))]
    assert sorted(batches) == list(range(1, 10))
