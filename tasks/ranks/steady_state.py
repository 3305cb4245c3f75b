"""The arithmetic of the timed loop: when it is steady, how many steps still fit, how long buckets were in flight."""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = [
    "STEADY_TOLERANCE",
    "Levels",
    "find_levels",
    "is_steady",
    "least_warmup",
    "pair_size",
    "union_length",
    "warmup_size",
]

#: Relative change between two halves of a window that counts as none, larger where caches and cores are shared.
STEADY_TOLERANCE = {"cuda": 0.02, "cpu": 0.05}

#: Steps between two decisions; ranks agree on each of these, and CUDA ranks empty their pipeline for it.
BLOCK_STEPS = 5
#: Seconds of steps between two decisions of a slow model; at least one step.
WARMUP_BLOCK_S = 0.5
#: DDP makes its buckets anew after the first backward pass; this many steps after a change of buckets are cold.
STEPS_AFTER_REBUILD = 3
#: Steps that are measured even when the time is up, since fewer give no useful median.
LEAST_MEASURED = 3
#: Share of a cell's time that warm-up may take.
WARMUP_SHARE = 0.5
STEADY_WINDOW = 8


def is_steady(times: Sequence[float], *, tolerance: float) -> bool:
    """Whether the medians of the two halves of the last ``STEADY_WINDOW`` times differ by less than ``tolerance``."""
    if len(times) < STEADY_WINDOW:
        return False
    half = STEADY_WINDOW // 2
    before = statistics.median(times[-STEADY_WINDOW:-half])
    after = statistics.median(times[-half:])
    return abs(after - before) < tolerance * min(before, after)


def least_warmup(buckets: Sequence[tuple[int, ...]], *, wanted: int, in_time: bool) -> int:
    """The least number of warm-up steps, from the bucket sizes (bytes) of every step so far.

    ``STEPS_AFTER_REBUILD`` after the last change of buckets, of which there always is one after step 0; and at least
    ``wanted`` while there is time.
    """
    changes = [step for step in range(1, len(buckets)) if buckets[step] != buckets[step - 1]]
    cold = max([1, *changes]) + STEPS_AFTER_REBUILD
    return max(wanted, cold) if in_time else cold


def warmup_size(times: Sequence[float], *, least: int, elapsed_s: float, cap_s: float, tolerance: float) -> int:
    """How many warm-up steps to take next; 0 ends warm-up. ``times`` are the seconds of the steps so far."""
    block = BLOCK_STEPS
    if times:
        block = min(BLOCK_STEPS, max(1, int(WARMUP_BLOCK_S / times[-1])))
    if len(times) < least:
        return min(block, least - len(times)) if times else 1
    if elapsed_s >= WARMUP_SHARE * cap_s or is_steady(times, tolerance=tolerance):
        return 0
    return block


def pair_size(done: int, *, wanted: int, step_s: float, blocks: int, elapsed_s: float, cap_s: float) -> int:
    """How many steps the next measured blocks take each; 0 ends measuring.

    ``blocks`` is 2 where a block without synchronisation follows each synchronised one. Every block starts with one
    step that is thrown away.
    """
    fitting = int((cap_s - elapsed_s) / (blocks * step_s)) - 1
    least = min(LEAST_MEASURED, wanted) - done
    return max(min(BLOCK_STEPS, wanted - done, fitting), least, 0)


def union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one of the intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


#: A level has at least this many steps; a shorter stretch may be an outlier.
SHORTEST_LEVEL = 5
#: Steps after which a level counts as settled.
SETTLED_STEPS = 8
#: Chance of calling noise a change.
FALSE_CHANGE_CHANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """A series of step times cut where its level changes: the first step of each level, and whether the last holds.

    ``starts[0]`` is 0. ``settled`` says that the last level is long enough and its two halves agree within
    ``tolerance`` and the noise of their medians.
    """

    starts: tuple[int, ...]
    settled: bool

    @property
    def steady_from(self) -> int:
        """First step of the last level; 0 when nothing changed."""
        return self.starts[-1]


def find_levels(times: Sequence[float], *, tolerance: float) -> Levels:
    """Where the level of ``times`` (seconds, in order) changes by more than the share ``tolerance``, and if it settled.

    Binary segmentation with Pettitt's rank test (A. N. Pettitt 1979, Applied Statistics 28(2), 126-135): ranks, so that
    single slow steps move nothing. A slow-down of 15 % after step 60 is found within 20 steps.
    """
    starts: list[int] = [0]
    waiting = [(0, len(times))]
    while waiting:
        first, end = waiting.pop()
        change = _find_change(times[first:end], tolerance=tolerance)
        if change is not None:
            starts.append(first + change)
            waiting += [(first, first + change), (first + change, end)]
    last = times[max(starts) :]
    half = len(last) // 2
    settled = len(starts) == 1 or len(last) >= SETTLED_STEPS
    if settled and half >= STEADY_WINDOW // 2:
        # The halves differ for a drift, the last few steps for a level that goes up and down.
        settled = (
            _difference(last[:half], last[half:]) < tolerance + _noise(last, half=half)
            and _difference(last, last[-SETTLED_STEPS:]) < 2.0 * tolerance
        )
    return Levels(starts=tuple(sorted(starts)), settled=settled)


def _noise(times: Sequence[float], *, half: int) -> float:
    """Two standard errors of the difference between the medians of two halves, as a share.

    The spread is the median distance of neighbouring steps, which a drift hardly changes, converted as for a normal
    distribution. The standard error of the median of n values is 1.2533 / sqrt(n) times the spread.
    """
    spread = 1.4826 / math.sqrt(2.0) * statistics.median(abs(b - a) for a, b in itertools.pairwise(times))
    return 2.0 * 1.2533 * spread * math.sqrt(2.0 / half) / statistics.median(times)


def _find_change(times: Sequence[float], *, tolerance: float) -> int | None:
    """The step at which ``times`` change most, if they do."""
    count = len(times)
    if count < 2 * SHORTEST_LEVEL:
        return None
    ranks = _ranks(times)
    best, largest, where, total = 0.0, 0.0, 0, 0.0
    for before in range(1, count):
        total += ranks[before - 1]
        distance = abs(2.0 * total - before * (count + 1))
        if not SHORTEST_LEVEL <= before <= count - SHORTEST_LEVEL:
            continue
        best = max(best, distance)
        # Pettitt's own estimate is biased towards the middle; divided by its standard deviation the distance is largest
        # at the change.
        scaled = distance / math.sqrt(before * (count - before))
        if scaled > largest:
            largest, where = scaled, before
    chance = 2.0 * math.exp(-6.0 * best**2 / (count**3 + count**2))
    if chance > FALSE_CHANGE_CHANCE or _difference(times[:where], times[where:]) <= tolerance:
        return None
    return where


def _ranks(times: Sequence[float]) -> list[float]:
    """The rank of each time, 1 for the smallest; equal times share the mean of their ranks."""
    order = sorted(range(len(times)), key=times.__getitem__)
    ranks = [0.0] * len(times)
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and times[order[end]] == times[order[begin]]:
            end += 1
        for place in order[begin:end]:
            ranks[place] = (begin + end + 1) / 2.0
        begin = end
    return ranks


def _difference(before: Sequence[float], after: Sequence[float]) -> float:
    low, high = sorted((statistics.median(before), statistics.median(after)))
    return (high - low) / low if low > 0 else math.inf
