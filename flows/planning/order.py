"""The order in which cells are measured: what teaches most first, so that a campaign cut short is still useful."""

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
#: Seen first: a predictor that never saw a model, a precision or a world size knows nothing of it, while it may
#: interpolate between batch sizes.
_FIRST_AXES = frozenset({"model", "precision", "world_size"})
_FIRST_WEIGHT, _OTHER_WEIGHT = 1000, 1


def axes_of(cells: Sequence[GridCell]) -> tuple[str, ...]:
    """The fields in which ``cells`` differ, in the order of ``GridCell``."""
    return tuple(name for name in _AXES if len({getattr(cell, name) for cell in cells}) > 1)


def order_cells(cells: Sequence[GridCell]) -> list[GridCell]:
    """``cells`` in the order of their use to a predictor; the same list for the same cells, each exactly once.

    First a cover: cells until every value of every axis was seen, one of each model, precision and world size before
    all else. Then whole configurations (all precisions of one follow each other, so that a speed-up compares
    measurements of nearly the same moment) until every pair of values was seen together. Then the other
    configurations, model by model in turn, ends before middles.
    """
    cover = cover_cells(cells)
    taken = set(cover)
    groups: dict[tuple[Value, ...], list[GridCell]] = {}
    others = tuple(name for name in axes_of(cells) if name != "precision")
    for cell in cells:
        groups.setdefault(_values(cell, others), []).append(cell)
    configurations = list(groups)
    chosen = _greedy([_pairs(values) for values in configurations], weigh=lambda pair: 1)
    picked = set(chosen)
    rest = _in_turn([index for index in range(len(configurations)) if index not in picked], configurations, others)
    after = [cell for index in (*chosen, *rest) for cell in groups[configurations[index]] if cell not in taken]
    return cover + after


def cover_cells(cells: Sequence[GridCell]) -> list[GridCell]:
    """Few of ``cells`` that hold every value of every axis: as many as the longest axis has when none is excluded."""
    axes = axes_of(cells)
    chosen = _greedy([_values(cell, axes) for cell in cells], weigh=_weigh)
    return [cells[index] for index in chosen] or list(cells[:1])


def _values(cell: GridCell, axes: Iterable[str]) -> tuple[Value, ...]:
    return tuple((name, getattr(cell, name)) for name in axes)


def _weigh(value: Value) -> int:
    return _FIRST_WEIGHT if value[0] in _FIRST_AXES else _OTHER_WEIGHT


def _pairs(values: tuple[Value, ...]) -> tuple[Hashable, ...]:
    """Pairs of values; a grid of a single axis has only those."""
    return tuple(itertools.combinations(values, 2)) or values


def _greedy(sets: Sequence[tuple[Item, ...]], *, weigh: Callable[[Item], int]) -> list[int]:
    """Indices of sets that together hold every item: each is the one that adds most weight, the first among equals.

    What a set adds only shrinks, so a set whose old figure is not the largest need not be looked at again (Minoux,
    Accelerated greedy algorithms, 1978): 10,000 sets take a fraction of a second.
    """
    seen: set[Item] = set()
    heap = [(-sum(map(weigh, items)), index) for index, items in enumerate(sets)]
    heapq.heapify(heap)
    chosen = []
    while heap and heap[0][0] < 0:
        old, index = heapq.heappop(heap)
        gain = sum(weigh(item) for item in sets[index] if item not in seen)
        if -gain == old:
            chosen.append(index)
            seen.update(sets[index])
        elif gain:
            heapq.heappush(heap, (-gain, index))
    return chosen


def _in_turn(indices: list[int], configurations: Sequence[tuple[Value, ...]], axes: tuple[str, ...]) -> list[int]:
    """``indices`` by model in turn, and within a model its first, its last, then the middles of what lies between."""
    models: dict[Hashable, list[int]] = {}
    place = axes.index("model") if "model" in axes else None
    for index in indices:
        models.setdefault(None if place is None else configurations[index][place], []).append(index)
    spread = [_ends_first(of_model) for of_model in models.values()]
    return [index for turn in itertools.zip_longest(*spread) for index in turn if index is not None]


def _ends_first(items: list[int]) -> list[int]:
    """The first, the last, the middle, the quarters, and so on."""
    if not items:
        return []
    found, spans = [0, len(items) - 1], [(0, len(items) - 1)]
    while spans:
        halves = []
        for low, high in spans:
            middle = (low + high) // 2
            if low < middle < high:
                found.append(middle)
                halves += [(low, middle), (middle, high)]
        spans = halves
    return [items[place] for place in dict.fromkeys(found)]
