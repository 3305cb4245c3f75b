"""Whether adaptive campaigns learn faster; run: python tests/benchmarks/replay_adaptive.py [DATA_FOLDER]

A finished grid is measured again from its records: cell by cell in random orders (mean of 5), in the grid's own order,
in the order of a campaign, and adaptively, by each of ``RULES``. After each number of cells a predictor is fitted on
them, and its MAPE is printed in %, on the cells of the pool not yet measured and on a fifth of the grid that is never
measured. The first figure favours an order with the hard cells first; the second does not. Without a folder the grids
are those of three sources of the shipped public table, each on one GPU. Its rows of several ranks have no parts, so
their compute time is the share that the closed forms give it; three divisions into pool and held-out fifth are
averaged. At the end stand, over all grids, the mean log ratios of each rule's errors to those of the spread.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # numpy and xgboost read it when they are imported

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
    """The rule of a campaign: how far fits that each lack a fifth of ``measured`` disagree."""
    return spread_of([cell.query for cell in cells], measured=measured)


def weigh_by_interval(cells: Sequence[Observation], measured: Sequence[Observation]) -> np.ndarray:
    """Half the width, in log seconds, of the interval that a predictor published on ``measured`` would state.

    Inside the measured range it is the radius of 5-fold errors, outside the wide radius of answers there.
    """
    result = cross_validate(measured, split="configuration", level=LEVEL, methods=["predictor"])
    radius = conformal_radius(result.log_errors(), level=LEVEL)
    domain = TrainingDomain.of(measured)
    setups = [cell.setup for cell in cells]
    is_inside = [domain.regime_of(setup) == "known" and not domain.list_gaps(setup) for setup in setups]
    return np.where(is_inside, radius, max(radius, CLOSED_FORM_RADIUS))


RULES: dict[str, Rule] = {
    "spread": weigh_by_spread,
    "interval": weigh_by_interval,
    "spread x interval": lambda cells, measured: weigh_by_spread(cells, measured) * weigh_by_interval(cells, measured),
    "spread + interval": lambda cells, measured: weigh_by_spread(cells, measured) + weigh_by_interval(cells, measured),
}


class Grid:
    """A recorded grid, one observation per cell, divided into a pool and a fifth that is never measured."""

    def __init__(self, observations: Sequence[Observation], *, seed: int) -> None:
        first: dict[GridCell, Observation] = {}
        for observation in observations:
            measured = observation.measurement
            cell = GridCell(
                model=measured.model,
                precision=measured.precision,
                world_size=measured.world_size,
                nodes=measured.nodes if measured.world_size % measured.nodes == 0 else 1,
                per_gpu_batch_size=measured.per_gpu_batch_size,
                gradient_accumulation_steps=measured.gradient_accumulation_steps,
            )
            first.setdefault(cell, observation)
        self.cells, self.observations = list(first), list(first.values())
        shuffled = random.Random(seed).sample(range(len(self.cells)), len(self.cells))
        held = len(self.cells) // 5
        self.held_out, self.pool = sorted(shuffled[:held]), sorted(shuffled[held:])
        self.counts = [count for count in COUNTS if count < len(self.pool)]

    def curve(self, order: Sequence[int]) -> Curve:
        """MAPE, as a fraction, on cells not yet measured and on those never measured, after each number of cells."""
        errors = []
        for count in self.counts:
            measured = set(order[:count])
            predictor = HierarchicalPredictor.fit([self.observations[i] for i in order[:count]])
            left = [i for i in self.pool if i not in measured]
            errors.append((self.error(predictor, left), self.error(predictor, self.held_out)))
        return errors

    def error(self, predictor: HierarchicalPredictor, test: Sequence[int]) -> float:
        """MAPE on ``test``."""
        predicted = predictor.predict([self.observations[i].query for i in test]).iteration_time_s
        measured = np.array([self.observations[i].measurement.iteration_time_s for i in test])
        return float(np.abs(predicted / measured - 1).mean())

    def campaign_order(self) -> list[int]:
        """The pool in the order of a campaign without a budget."""
        places = {self.cells[i]: i for i in self.pool}
        return [places[cell] for cell in order_cells([self.cells[i] for i in self.pool])]

    def adaptive_order(self, rule: Rule) -> list[int]:
        """The pool in the order of an adaptive campaign by ``rule``, up to the largest number of cells."""
        most = self.counts[-1]
        order = self.campaign_order()
        cover = len(cover_cells([self.cells[i] for i in self.pool]))
        measured = order[: max(FEWEST_TO_FIT, min(cover, most // 2))]
        while len(measured) < most:
            taken = set(measured)
            left = [i for i in order if i not in taken]
            size = min(most - len(measured), max(SMALLEST_BATCH, int(BATCH_SHARE * len(measured))))
            worth = rule([self.observations[i] for i in left], [self.observations[i] for i in measured])
            measured += [left[place] for place in choose_widest([self.cells[i] for i in left], worth, count=size)]
        return measured


def read_public(source: str, gpu: str) -> list[Observation]:
    """The rows of one source on one GPU, with the compute time of several ranks filled in."""
    table = load_public_table().kept
    observations, _ = observe_table(table[(table["source"] == source) & (table["gpu"] == gpu)])
    filled = []
    for row in observations:
        share = row.closed.compute_time_s / row.closed.iteration_time_s
        measured = replace(row.measurement, compute_time_s=row.measurement.iteration_time_s * share)
        filled.append(replace(row, measurement=measured))
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
    """The curve of every order on one division of a grid; for random orders it is their mean."""
    grid = Grid(observations, seed=seed)
    orders = [random.Random(number).sample(grid.pool, len(grid.pool)) for number in range(RANDOM_ORDERS)]
    curves = {"random": np.mean([grid.curve(order) for order in orders], axis=0).tolist()}
    curves |= {"grid": grid.curve(grid.pool), "campaign": grid.curve(grid.campaign_order())}
    return curves | {label: grid.curve(grid.adaptive_order(rule)) for label, rule in RULES.items()}


def replay(name: str, observations: Sequence[Observation]) -> dict[str, np.ndarray]:
    """Print the curves of one grid; returns the log ratios of each order's errors to those of the spread.

    Each has the shape (divisions, 2): means over the numbers of cells past the cover, on the cells left and held out.
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
    curves = {label: np.array([division[label] for division in divisions]) for label in divisions[0]}
    for label, errors in curves.items():
        means = errors.mean(axis=0) * 100
        print(f"| {label} | " + " | ".join(f"{left:.1f} / {held:.1f}" for left, held in means) + " |", flush=True)
    past_cover = [place for place, count in enumerate(grid.counts) if count > max(cover, FEWEST_TO_FIT)]
    logs = {label: np.log(errors)[:, past_cover].mean(axis=1) for label, errors in curves.items()}
    return {label: log_errors - logs["spread"] for label, log_errors in logs.items()}


def print_ratios(ratios: Sequence[dict[str, np.ndarray]]) -> None:
    """Errors as multiples of the spread's, by grid and over all, with the standard error over divisions."""
    print("\nErrors as multiples of those of the spread, geometric mean over numbers of cells past the cover")
    print("| order | cells not yet measured | held-out fifth |")
    print("|---|---|---|")
    for label in ratios[0]:
        joined = np.concatenate([of_grid[label] for of_grid in ratios])
        means, errors = joined.mean(axis=0), joined.std(axis=0, ddof=1) / math.sqrt(len(joined))
        texts = [f"{np.exp(mean):.3f} ± {np.exp(mean) * error:.3f}" for mean, error in zip(means, errors, strict=True)]
        print(f"| {label} | {texts[0]} | {texts[1]} |")


if __name__ == "__main__":
    print("MAPE, %: cells not yet measured / held-out fifth")
    if len(sys.argv) > 1:
        print_ratios([replay(sys.argv[1], read_folder(sys.argv[1]))])
    else:
        print_ratios([replay(f"{source} on {gpu}", read_public(source, gpu)) for source, gpu in GRIDS])
