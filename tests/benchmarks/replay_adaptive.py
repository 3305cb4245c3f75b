"""Whether adaptive campaigns learn faster; run: python tests/benchmarks/replay_adaptive.py [DATA_FOLDER]

A finished grid is measured again from its records: cell by cell in random orders (mean of 5), in the grid's own order,
in the order of a campaign, and adaptively. After each number of cells a predictor is fitted on them, and its MAPE is
printed in %, on the cells of the pool not yet measured and on a fifth of the grid that is never measured. The first
figure favours an order that takes the hard cells first; the second does not. Without a folder the grids are those of
three sources of the shipped public table, each on one GPU. Its rows of several ranks tell no parts, so their compute
is taken at the share that the closed forms give it; three divisions into pool and held-out fifth are averaged.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and xgboost look at it

import random
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from precision_time.flows.adaptive import BATCH_SHARE, FEWEST_TO_FIT, SMALLEST_BATCH, next_batch
from precision_time.flows.order import cover_cells, order_cells
from precision_time.predictor.hardware import HardwareSpec
from precision_time.predictor.hierarchy import HierarchicalPredictor
from precision_time.predictor.observations import Observation, observe, observe_table
from precision_time.predictor.public_table import load_public_table
from precision_time.predictor.workload import WorkloadFeatures
from precision_time.storage.schema import GridCell
from precision_time.storage.timings import TimingsDataset

GRIDS = (
    ("Oneflow-Inc/DLPerf", "V100-SXM2-16GB"),
    ("NVIDIA/DeepLearningExamples", "A100-SXM4-80GB"),
    ("ryujaehun/pytorch-gpu-benchmark", "A100-SXM4-40GB"),
)
COUNTS = (12, 24, 36, 48, 64, 80, 96, 128, 160)
RANDOM_ORDERS = 5
DIVISIONS = 3

Curve = list[tuple[float, float]]


class Grid:
    """A recorded grid, one observation a cell, divided into a pool and a fifth that is never measured."""

    def __init__(self, observations: Sequence[Observation], *, seed: int) -> None:
        first: dict[GridCell, Observation] = {}
        for seen in observations:
            measured = seen.measurement
            cell = GridCell(
                model=measured.model,
                precision=measured.precision,
                world_size=measured.world_size,
                nodes=measured.nodes if measured.world_size % measured.nodes == 0 else 1,
                per_gpu_batch_size=measured.per_gpu_batch_size,
                gradient_accumulation_steps=measured.gradient_accumulation_steps,
            )
            first.setdefault(cell, seen)
        self.cells, self.seen = list(first), list(first.values())
        shuffled = random.Random(seed).sample(range(len(self.cells)), len(self.cells))
        held = len(self.cells) // 5
        self.held_out, self.pool = sorted(shuffled[:held]), sorted(shuffled[held:])
        self.counts = [count for count in COUNTS if count < len(self.pool)]

    def error(self, train: Sequence[int], test: Sequence[int]) -> float:
        """MAPE on ``test``, as a fraction, of a predictor fitted on ``train``."""
        predictor = HierarchicalPredictor.fit([self.seen[i] for i in train])
        predicted = predictor.predict([self.seen[i].query for i in test]).iteration_time_s
        measured = np.array([self.seen[i].measurement.iteration_time_s for i in test])
        return float(np.abs(predicted / measured - 1).mean())

    def curve(self, order: Sequence[int]) -> Curve:
        """Errors on what is not yet measured and on what never is, after each number of cells."""
        found = []
        for count in self.counts:
            measured = set(order[:count])
            left = [i for i in self.pool if i not in measured]
            found.append((self.error(order[:count], left), self.error(order[:count], self.held_out)))
        return found

    def campaign_order(self) -> list[int]:
        """The pool as a campaign without a budget measures it."""
        places = {self.cells[i]: i for i in self.pool}
        return [places[cell] for cell in order_cells([self.cells[i] for i in self.pool])]

    def adaptive_order(self) -> list[int]:
        """The pool as an adaptive campaign measures it, up to the largest number of cells."""
        most = self.counts[-1]
        cover = len(cover_cells([self.cells[i] for i in self.pool]))
        chosen = self.campaign_order()[: max(FEWEST_TO_FIT, min(cover, most // 2))]
        while len(chosen) < most:
            left = [i for i in self.pool if i not in set(chosen)]
            size = min(most - len(chosen), max(SMALLEST_BATCH, int(BATCH_SHARE * len(chosen))))
            batch = next_batch(
                [self.cells[i] for i in left],
                [self.seen[i].query for i in left],
                measured=[self.seen[i] for i in chosen],
                count=size,
            )
            chosen += [left[i] for i in batch]
        return chosen


def read_public(source: str, gpu: str) -> list[Observation]:
    """The rows of one source on one GPU, with the compute time of several ranks filled in."""
    table = load_public_table().kept
    observations, _ = observe_table(table[(table["source"] == source) & (table["gpu"] == gpu)])
    filled = []
    for seen in observations:
        share = seen.closed.compute_time_s / seen.closed.iteration_time_s
        measured = replace(seen.measurement, compute_time_s=seen.measurement.iteration_time_s * share)
        filled.append(replace(seen, measurement=measured))
    return filled


def read_folder(url: str) -> list[Observation]:
    """The cells of a recorded campaign."""
    dataset = TimingsDataset(url)
    return observe(
        dataset.measurements(),
        workloads=[WorkloadFeatures.from_dict(card) for card in dataset.read_cards("workloads")],
        hardware=[HardwareSpec.from_dict(card) for card in dataset.read_cards("hardware")],
    )


def replay(name: str, observations: Sequence[Observation]) -> None:
    """Print the curves of one grid."""
    curves: dict[str, list[Curve]] = {}
    for seed in range(DIVISIONS):
        grid = Grid(observations, seed=seed)
        for number in range(RANDOM_ORDERS):
            order = random.Random(number).sample(grid.pool, len(grid.pool))
            curves.setdefault("random", []).append(grid.curve(order))
        for label, order in (
            ("grid", grid.pool),
            ("campaign", grid.campaign_order()),
            ("adaptive", grid.adaptive_order()),
        ):
            curves.setdefault(label, []).append(grid.curve(order))
    cover = len(cover_cells([grid.cells[i] for i in grid.pool]))
    print(f"\n{name}: {len(grid.pool)} cells in the pool, {len(grid.held_out)} held out, a cover takes {cover}")
    print("| order | " + " | ".join(f"{count} cells" for count in grid.counts) + " |")
    print("|---|" + "---|" * len(grid.counts))
    for label, found in curves.items():
        means = np.mean(found, axis=0) * 100
        print(f"| {label} | " + " | ".join(f"{left:.1f} / {held:.1f}" for left, held in means) + " |", flush=True)


if __name__ == "__main__":
    print("MAPE, %: cells not yet measured / held-out fifth")
    if len(sys.argv) > 1:
        replay(sys.argv[1], read_folder(sys.argv[1]))
    else:
        for source, gpu in GRIDS:
            replay(f"{source} on {gpu}", read_public(source, gpu))
