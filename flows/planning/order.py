"""The order in which cells are measured: the most informative first, so that a campaign cut short is still useful."""

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields
from typing import TypeVar

from precision_time.storage.schema import GridCell

__all__ = ["axes_of", "cover_cells", "order_cells"]

Value = tuple[str, Hashable]
Item = TypeVar("Item", bound=Hashable)

_AXES = tuple(field.name for field in fields(GridCell))
#: These are covered first: without a measurement of a model, precision or world size a predictor knows nothing of it,
#: but it can interpolate between batch sizes.
_FIRST_AXES = frozenset({"model", "precision", "world_size"})
_FIRST_WEIGHT, _OTHER_WEIGHT = 1000, 1


def axes_of(cells: Sequence[GridCell]) -> tuple[str, ...]:
    """The fields in which ``cells`` differ, in the order of ``GridCell``."""
    return tuple(name for name in _AXES if len({getattr(cell, name) for cell in cells}) > 1)


def order_cells(cells: Sequence[GridCell]) -> list[GridCell]:
    """``cells`` in the order of their use to a predictor; the same list for the same cells, each exactly once.

    First comes a cover: cells until every value of every axis has occurred, beginning with one of each model, precision
    and world size. Then come whole configurations until every pair of values has occurred together; the precisions of a
    configuration follow each other, so that a speed-up compares measurements of nearly the same moment. Then come the
    other configurations, by model in turn, ends of the axes before their middles.
    """
    cover = cover_cells(cells)
    covered = set(cover)
    groups: dict[tuple[Value, ...], list[GridCell]] = {}
    axes = tuple(name for name in axes_of(cells) if name != "precision")
    for cell in cells:
        groups.setdefault(_values(cell, axes), []).append(cell)
    configurations = list(groups)
    with_new_pairs = _cover_greedily([_pairs(values) for values in configurations], weigh=lambda pair: 1)
    others = sorted(set(range(len(configurations))) - set(with_new_pairs))
    indices = [*with_new_pairs, *_in_turn(others, configurations, axes)]
    return cover + [cell for index in indices for cell in groups[configurations[index]] if cell not in covered]


def cover_cells(cells: Sequence[GridCell]) -> list[GridCell]:
    """A few of ``cells`` with every value of every axis: as many as the longest axis has, when none is excluded."""
    axes = axes_of(cells)
    indices = _cover_greedily([_values(cell, axes) for cell in cells], weigh=_weigh)
    return [cells[index] for index in indices] or list(cells[:1])


def _values(cell: GridCell, axes: Iterable[str]) -> tuple[Value, ...]:
    return tuple((name, getattr(cell, name)) for name in axes)


def _weigh(value: Value) -> int:
    return _FIRST_WEIGHT if value[0] in _FIRST_AXES else _OTHER_WEIGHT


def _pairs(values: tuple[Value, ...]) -> tuple[Hashable, ...]:
    """Pairs of values; on a grid with a single axis, its single values."""
    return tuple(itertools.combinations(values, 2)) or values


def _cover_greedily(sets: Sequence[tuple[Item, ...]], *, weigh: Callable[[Item], int]) -> list[int]:
    """Indices of sets that together hold every item: always the set that adds most weight, the first among equals.

    The weight that a set adds only shrinks, so a set is weighed again only when its old weight is the largest (Minoux,
    Accelerated greedy algorithms, 1978): 10,000 sets take a fraction of a second.
    """
    covered: set[Item] = set()
    heap = [(-sum(map(weigh, items)), index) for index, items in enumerate(sets)]
    heapq.heapify(heap)
    indices = []
    while heap and heap[0][0] < 0:
        negative_gain, index = heapq.heappop(heap)
        gain = sum(weigh(item) for item in sets[index] if item not in covered)
        if -gain == negative_gain:
            indices.append(index)
            covered.update(sets[index])
        elif gain:
            heapq.heappush(heap, (-gain, index))
    return indices


def _in_turn(indices: list[int], configurations: Sequence[tuple[Value, ...]], axes: tuple[str, ...]) -> list[int]:
    """``indices`` by model in turn, and within a model the first, the last, then the middles in between."""
    models: dict[Hashable, list[int]] = {}
    place = axes.index("model") if "model" in axes else None
    for index in indices:
        models.setdefault(None if place is None else configurations[index][place], []).append(index)
    queues = [_ends_first(of_model) for of_model in models.values()]
    return [index for turn in itertools.zip_longest(*queues) for index in turn if index is not None]


def _ends_first(items: list[int]) -> list[int]:
    """The first, the last, the middle, the quarters, and so on."""
    if not items:
        return []
    places, spans = [0, len(items) - 1], [(0, len(items) - 1)]
    while spans:
        halves = []
        for low, high in spans:
            middle = (low + high) // 2
            if low < middle < high:
                places.append(middle)
                halves += [(low, middle), (middle, high)]
        spans = halves
    return [items[place] for place in dict.fromkeys(places)]
