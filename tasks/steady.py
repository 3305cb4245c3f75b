"""The arithmetic of the timed loop: when it is steady, how many steps still fit, how long buckets were in flight."""

import statistics
from collections.abc import Iterable, Sequence

__all__ = ["is_steady", "least_warmup", "pair_size", "union_length", "warmup_size"]

#: Steps between two decisions; ranks agree on each, and CUDA ranks stop their pipeline for it.
BLOCK_STEPS = 5
#: A slow model decides more often: this many seconds of steps, or a single one.
WARMUP_BLOCK_S = 0.5
#: DDP makes its buckets anew after the first backward pass; this many steps after a change of buckets are cold.
STEPS_AFTER_REBUILD = 3
#: Fewer measured steps give no median worth the name, so these are taken even when the time is up.
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
    """Warm-up steps that must be taken, from the bucket sizes (bytes) of every step so far.

    ``STEPS_AFTER_REBUILD`` past the last change of buckets, the certain one after step 0 included; and as many as
    ``wanted`` while there is time.
    """
    changes = [step for step in range(1, len(buckets)) if buckets[step] != buckets[step - 1]]
    cold = max([1, *changes]) + STEPS_AFTER_REBUILD
    return max(wanted, cold) if in_time else cold


def warmup_size(times: Sequence[float], *, least: int, elapsed_s: float, cap_s: float, tolerance: float) -> int:
    """How many warm-up steps to take next; 0 ends warm-up. ``times`` are the seconds of those taken so far."""
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

    ``blocks`` is 2 where a block without synchronisation follows each one with it. Every block starts with one step
    that is thrown away.
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
