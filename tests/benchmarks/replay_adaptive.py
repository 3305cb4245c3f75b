"""Whether adaptive campaigns learn faster; run: python tests/benchmarks/replay_adaptive.py [DATA_FOLDER]

A finished grid is measured again from its records: cell by cell in random orders (mean of 5), in the grid's own order,
in the order of a campaign, and adaptively, by each of ``RULES``. After each number of cells a predictor is fitted on
them, and its MAPE is printed in %, on the cells of the pool not yet measured and on a fifth of the grid that is never
measured. The first figure favours an order that takes the hard cells first; the second does not. Without a folder the
grids are those of three sources of the shipped public table, each on one GPU. Its rows of several ranks tell no parts,
so their compute is taken at the share that the closed forms give it; three divisions into pool and held-out fifth are
averaged. Last stand, over all grids, the mean log ratios of each rule's errors to those of the spread.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and xgboost look at it

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from precision_time.flows.campaigns.adaptive import BATCH_SHARE, FEWEST_TO_FIT, SMALLEST_BATCH, choose_widest, spread_of
from precision_time.flows.planning.order import cover_cells, order_cells
from precision_time.predictor.answering.answers import CLOSED_FORM_RADIUS
from precision_time.predictor.learning.domain import TrainingDomain
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.learning.intervals import conformal_radius
from precision_time.predictor.rows.observations import Observation, observe, observe_table
from precision_time.predictor.rows.public_table import load_public_table
from precision_time.predictor.scoring.cross_validation import cross_validate
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.workloads.workload import WorkloadFeatures
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
LEVEL = 0.9

Curve = list[tuple[float, float]]
Rule = Callable[[Sequence[Observation], Sequence[Observation]], np.ndarray]


def weigh_by_spread(cells: Sequence[Observation], measured: Sequence[Observation]) -> np.ndarray:
    """What a campaign chooses by: how far fits disagree that each lack a fifth of ``measured``."""
    return spread_of([cell.query for cell in cells], measured=measured)


def weigh_by_interval(cells: Sequence[Observation], measured: Sequence[Observation]) -> np.ndarray:
    """Half the width, in log seconds, of the interval that a predictor published on ``measured`` would state.

    Inside of what was measured it is the radius of 5-fold errors, outside the wide one that answers get there.
    """
    result = cross_validate(measured, split="configuration", level=LEVEL, methods=["predictor"])
    radius = conformal_radius(result.log_errors(), level=LEVEL)
    domain = TrainingDomain.of(measured)
    setups = [cell.setup for cell in cells]
    inside = [domain.regime_of(setup) == "known" and not domain.list_gaps(setup) for setup in setups]
    return np.where(inside, radius, max(radius, CLOSED_FORM_RADIUS))


RULES: dict[str, Rule] = {
    "spread": weigh_by_spread,
    "interval": weigh_by_interval,
    "spread x interval": lambda cells, seen: weigh_by_spread(cells, seen) * weigh_by_interval(cells, seen),
    "spread + interval": lambda cells, seen: weigh_by_spread(cells, seen) + weigh_by_interval(cells, seen),
}


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

    def curve(self, order: Sequence[int]) -> Curve:
        """MAPE, as a fraction, on what is not yet measured and on what never is, after each number of cells."""
        found = []
        for count in self.counts:
            measured = set(order[:count])
            predictor = HierarchicalPredictor.fit([self.seen[i] for i in order[:count]])
            left = [i for i in self.pool if i not in measured]
            found.append((self.error(predictor, left), self.error(predictor, self.held_out)))
        return found

    def error(self, predictor: HierarchicalPredictor, test: Sequence[int]) -> float:
        """MAPE on ``test``."""
        predicted = predictor.predict([self.seen[i].query for i in test]).iteration_time_s
        measured = np.array([self.seen[i].measurement.iteration_time_s for i in test])
        return float(np.abs(predicted / measured - 1).mean())

    def campaign_order(self) -> list[int]:
        """The pool as a campaign without a budget measures it."""
        places = {self.cells[i]: i for i in self.pool}
        return [places[cell] for cell in order_cells([self.cells[i] for i in self.pool])]

    def adaptive_order(self, rule: Rule) -> list[int]:
        """The pool as an adaptive campaign measures it by ``rule``, up to the largest number of cells."""
        most = self.counts[-1]
        order = self.campaign_order()
        cover = len(cover_cells([self.cells[i] for i in self.pool]))
        chosen = order[: max(FEWEST_TO_FIT, min(cover, most // 2))]
        while len(chosen) < most:
            taken = set(chosen)
            left = [i for i in order if i not in taken]
            size = min(most - len(chosen), max(SMALLEST_BATCH, int(BATCH_SHARE * len(chosen))))
            worth = rule([self.seen[i] for i in left], [self.seen[i] for i in chosen])
            chosen += [left[place] for place in choose_widest([self.cells[i] for i in left], worth, count=size)]
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


def trace_orders(observations: Sequence[Observation], *, seed: int) -> dict[str, Curve]:
    """The curve of every order on one division of a grid; that of random orders is their mean."""
    grid = Grid(observations, seed=seed)
    orders = [random.Random(number).sample(grid.pool, len(grid.pool)) for number in range(RANDOM_ORDERS)]
    curves = {"random": np.mean([grid.curve(order) for order in orders], axis=0).tolist()}
    curves |= {"grid": grid.curve(grid.pool), "campaign": grid.curve(grid.campaign_order())}
    return curves | {label: grid.curve(grid.adaptive_order(rule)) for label, rule in RULES.items()}


def replay(name: str, observations: Sequence[Observation]) -> dict[str, np.ndarray]:
    """Print the curves of one grid; returns the log ratios of each order's errors to those of the spread.

    Each is of shape (divisions, 2): a mean over the numbers of cells past the cover, on what is left and held out.
    """
    return print_curves(name, observations, [trace_orders(observations, seed=seed) for seed in range(DIVISIONS)])


def print_curves(
    name: str, observations: Sequence[Observation], divisions: Sequence[dict[str, Curve]]
) -> dict[str, np.ndarray]:
    """The part of ``replay`` that follows the work."""
    grid = Grid(observations, seed=0)
    cover = len(cover_cells([grid.cells[i] for i in grid.pool]))
    print(f"\n{name}: {len(grid.pool)} cells in the pool, {len(grid.held_out)} held out, a cover takes {cover}")
    print("| order | " + " | ".join(f"{count} cells" for count in grid.counts) + " |")
    print("|---|" + "---|" * len(grid.counts))
    curves = {label: np.array([one[label] for one in divisions]) for label in divisions[0]}
    for label, found in curves.items():
        means = found.mean(axis=0) * 100
        print(f"| {label} | " + " | ".join(f"{left:.1f} / {held:.1f}" for left, held in means) + " |", flush=True)
    differ = [place for place, count in enumerate(grid.counts) if count > max(cover, FEWEST_TO_FIT)]
    logs = {label: np.log(found)[:, differ].mean(axis=1) for label, found in curves.items()}
    return {label: found - logs["spread"] for label, found in logs.items()}


def print_ratios(ratios: Sequence[dict[str, np.ndarray]]) -> None:
    """Errors as multiples of the spread's, by grid and over all, with the standard error over divisions."""
    print("\nErrors as multiples of those of the spread, geometric mean over numbers of cells past the cover")
    print("| order | cells not yet measured | held-out fifth |")
    print("|---|---|---|")
    for label in ratios[0]:
        joined = np.concatenate([one[label] for one in ratios])
        means, errors = joined.mean(axis=0), joined.std(axis=0, ddof=1) / math.sqrt(len(joined))
        told = [f"{np.exp(mean):.3f} ± {np.exp(mean) * error:.3f}" for mean, error in zip(means, errors, strict=True)]
        print(f"| {label} | {told[0]} | {told[1]} |")


if __name__ == "__main__":
    print("MAPE, %: cells not yet measured / held-out fifth")
    if len(sys.argv) > 1:
        print_ratios([replay(sys.argv[1], read_folder(sys.argv[1]))])
    else:
        print_ratios([replay(f"{source} on {gpu}", read_public(source, gpu)) for source, gpu in GRIDS])
