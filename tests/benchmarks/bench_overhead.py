"""The overhead of a cell beyond its training steps; run: python tests/benchmarks/bench_overhead.py

A cell of two gloo ranks of ``mlp`` is measured several times on leases of two local workers, with ranks forked by a
fork server and with ranks in fresh interpreters. Overhead is the wall time of the call less the steps of
the rank that trained longest: warm-up, measured, and each measured one's partner without synchronisation. Lead-in
steps, which leave no row, count as overhead. Prints one JSON object.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from distributed import Client, LocalCluster

from precision_time.tasks.gangs.record_cell import read_fragments
from precision_time.tasks.ranks.job import CellReceipt, MeasurementLimits
from precision_time.tests.tasks.builders import CELL, profile_alone

LIMITS = MeasurementLimits(warmup_steps=3, measured_steps=5, seconds_per_cell=5.0, timeout_s=120.0)


def steps_s(receipt: CellReceipt) -> float:
    """Seconds that the rank with the longest steps trained."""
    seconds: dict[int, float] = defaultdict(float)
    for row in read_fragments(receipt):
        seconds[row.rank] += row.iteration_time_s + (0.0 if row.is_warmup else row.compute_time_s or 0.0)
    return max(seconds.values())


def measure_overheads(cells: int, *, forked: bool) -> list[dict[str, float]]:
    """Seconds of the call, of its steps and of the rest, for each of ``cells`` equal cells in turn."""
    # Workers inherit it; see tasks/processes/rank_process.py.
    os.environ["PRECISION_TIME_TEMPLATE"] = "1" if forked else "0"
    seconds = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(2, timeout=60)
        for attempt in range(1, cells + 1):
            began = time.perf_counter()
            receipt = profile_alone(CELL, client=client, scratch=Path(scratch), limits=LIMITS, attempt=attempt)
            wall_s = time.perf_counter() - began
            if receipt.status != "recorded":
                sys.exit(f"cell {attempt}: {receipt.cause}: {receipt.message}")
            trained_s = steps_s(receipt)
            seconds.append({"wall_s": wall_s, "steps_s": trained_s, "overhead_s": wall_s - trained_s})
    return seconds


def summarise(cells: list[dict[str, float]]) -> dict[str, object]:
    """All cells, the overhead of the first, and the median and range of that of the others."""
    later = [cell["overhead_s"] for cell in cells[1:]]
    return {
        "cells": [{name: round(seconds, 3) for name, seconds in cell.items()} for cell in cells],
        "first_overhead_s": round(cells[0]["overhead_s"], 3),
        "later_overhead_s": [round(value, 3) for value in (statistics.median(later), min(later), max(later))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=6, help="cells of each kind, at least 2")
    parser.add_argument("--only", choices=("forked", "fresh"), help="measure one kind alone")
    options = parser.parse_args()
    if options.cells < 2:
        parser.error("--cells must be at least 2")
    kinds = [options.only] if options.only else ["forked", "fresh"]
    overheads: dict[str, object] = {
        kind: summarise(measure_overheads(options.cells, forked=kind == "forked")) for kind in kinds
    }
    print(json.dumps(overheads | {"load_average": os.getloadavg()[0]}, indent=1))


if __name__ == "__main__":
    main()
