"""Judge a cell by all of its rows: when it was cold, whether it settled, and whether its times are of any use."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from precision_time.storage.schema import IterationTiming
from precision_time.tasks.ranks.steady_state import LEAST_MEASURED, STEADY_TOLERANCE, find_levels

__all__ = ["judge_rows", "mark_levels"]

#: Share of the host's CPU time for others, above which the cell's times are those of its neighbours. Less contention is
#: recorded and marked.
MOST_OTHERS = 0.97
#: Interquartile range over the median, above which the median of an unsettled cell is useless.
MOST_SPREAD = 1.0


def mark_levels(rows: Sequence[IterationTiming]) -> list[IterationTiming]:
    """``rows`` of all ranks with ``is_cold`` and ``is_settled``.

    The series has the slowest rank of every step, with warm-up and without the steps that loss scaling left out. Steps
    before the last change of level are cold, if enough measured steps follow it; after a later change the cell counts
    as unsettled, with all of its measured steps.
    """
    series = _slowest(rows)
    steps = list(series)
    levels = find_levels(list(series.values()), tolerance=STEADY_TOLERANCE[rows[0].device_type])
    settled, first = levels.settled, steps[levels.steady_from] if steps else 0
    measured = {row.step for row in rows if not row.is_warmup}
    if sum(step >= first for step in steps if step in measured) < min(LEAST_MEASURED, len(measured)):
        settled, first = False, 0
    return [replace(row, is_cold=row.step < first, is_settled=settled) for row in rows]


def judge_rows(rows: Sequence[IterationTiming]) -> tuple[str, str] | None:
    """(cause, message) when no measured step of a cell is of use, else None; noise alone is no reason."""
    measured = [row for row in rows if not row.is_warmup and not row.is_cold]
    series = _slowest(measured)
    if not series:
        return "no usable step", "loss scaling left out every measured step"
    if all(row.throttled for row in measured):
        reasons = ", ".join(sorted({row.throttle_reasons for row in measured}))
        return "throttled", f"every measured step ran on a throttled GPU: {reasons}"
    shares = [(row.other_cpu_share, row.steal_share or 0.0) for row in measured]
    if all(others is not None and others + steal > MOST_OTHERS for others, steal in shares):
        least = min((others or 0.0) + steal for others, steal in shares)
        return "contended", f"others took at least {least:.0%} of the host's CPU time in every measured step"
    times = list(_slowest([row for row in rows if not row.is_warmup]).values())
    if not rows[0].is_settled and len(times) > 1:
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        if high - low > MOST_SPREAD * middle:
            return "unsteady", f"iterations never settled: a quarter is under {low:.3g} s, a quarter over {high:.3g} s"
    return None


def _slowest(rows: Sequence[IterationTiming]) -> Mapping[int, float]:
    """Seconds of the slowest rank by step, in order, without the steps that any rank skipped."""
    times: dict[int, float] = defaultdict(float)
    skipped = set()
    for row in rows:
        times[row.step] = max(times[row.step], row.iteration_time_s)
        if row.step_skipped:
            skipped.add(row.step)
    return {step: times[step] for step in sorted(times) if step not in skipped}
