"""Which cells to measure next: those of which a predictor fitted on the recorded ones is least sure, spread out."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from precision_time.flows.campaigns.cell_loop import Choose
from precision_time.flows.campaigns.terminal import say
from precision_time.flows.planning.order import axes_of, cover_cells
from precision_time.flows.planning.plan import CampaignPlan, CellEstimate, PlannedCell
from precision_time.predictor.learning.folds import split_by_group
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.observations import Observation, observe
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.workloads.workload import WorkloadFeatures
from precision_time.storage.errors import PrecisionTimeError
from precision_time.storage.schema import CellOutcome, GridCell
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.work_kinds import kind_of

__all__ = ["FEWEST_TO_FIT", "choose_adaptively", "choose_widest", "next_batch", "spread_of"]

Floats = npt.NDArray[np.float64]

#: With fewer measured cells the fits differ by chance more than by what they do not know; the cover comes first.
FEWEST_TO_FIT = 12
MEMBERS = 5
#: A batch adds a quarter to what is recorded: a fit for each cell would choose hardly better.
BATCH_SHARE = 0.25
SMALLEST_BATCH = 4
#: How much less a cell is worth that agrees with one of the batch in everything.
OVERLAP = 0.5


def spread_of(queries: Sequence[Query], *, measured: Sequence[Observation], seed: int = 0) -> Floats:
    """How far predictors that each lack a fifth of ``measured`` disagree: standard deviation of log seconds, (rows,).

    Not the width of the interval that a predictor states: that is one for all of a regime, so past the cover it tells
    little more than which cells lie outside of the measured range. Chosen by it on three public grids, errors on cells
    not yet measured were 1.11 times as large (standard error 0.05), those on cells that are never measured the same
    within noise (0.94, 0.07); by the product and the sum of both they were 0.98 and 1.04 times as large
    (``tests/benchmarks/replay_adaptive.py``). The spread is blind to a value of an axis that no row holds, where all
    fits go on alike: the cover comes first.

    Raises ``InputError`` when too few rows are left to fit on.
    """
    folds = split_by_group([seen.measurement.configuration for seen in measured], folds=MEMBERS, seed=seed)
    answers = []
    for fold in np.unique(folds):
        kept = [seen for seen, other in zip(measured, folds, strict=True) if other != fold]
        answers.append(np.log(HierarchicalPredictor.fit(kept, seed=seed).predict(queries).iteration_time_s))
    spread: Floats = np.std(answers, axis=0)
    return spread


def choose_widest(cells: Sequence[GridCell], worth: Floats, *, count: int) -> list[int]:
    """Indices of ``count`` cells of great ``worth``, shape (cells,): each lowers the worth of those like it."""
    axes = axes_of(cells)
    columns = [np.array([hash(getattr(cell, name)) for cell in cells]) for name in axes]
    worth = worth.astype(np.float64)
    chosen: list[int] = []
    for _ in range(min(count, len(cells))):
        best = int(np.argmax(worth))
        chosen.append(best)
        alike = sum((column == column[best] for column in columns), start=np.zeros(len(cells))) / max(1, len(axes))
        worth *= 1 - OVERLAP * alike
        worth[best] = -np.inf
    return chosen


def next_batch(
    cells: Sequence[GridCell],
    queries: Sequence[Query | None],
    *,
    measured: Sequence[Observation],
    count: int,
    seed: int = 0,
) -> list[int]:
    """Indices of ``count`` of ``cells`` to measure next; one without a query (nothing is known of it) comes first."""
    unknown = [index for index, query in enumerate(queries) if query is None][:count]
    known = [(index, query) for index, query in enumerate(queries) if query is not None]
    if len(unknown) == count or not known:
        return unknown
    spread = spread_of([query for _, query in known], measured=measured, seed=seed)
    widest = choose_widest([cells[index] for index, _ in known], spread, count=count - len(unknown))
    return unknown + [known[index][0] for index in widest]


def choose_adaptively(plan: CampaignPlan, dataset: TimingsDataset) -> Choose:
    """Batches of the missing cells of ``plan`` up to its budget: the cover first, then where the predictor is unsure.

    A cell that fails counts as well, one that is refused does not. Where no predictor can be fitted, the order of the
    plan goes on.
    """
    recorded = sum(planned.is_recorded for planned in plan.cells)
    cover = len(cover_cells([planned.cell for planned in plan.cells if not planned.is_refusable]))
    first = max(FEWEST_TO_FIT, min(cover, plan.goal // 2))

    def choose(outcomes: Mapping[str, CellOutcome]) -> list[PlannedCell]:
        left = [planned for planned in plan.missing if planned.cell_id not in outcomes]
        tried = sum(outcome.status != "refused" for outcome in outcomes.values())
        count = min(len(left), plan.cells_to_measure - tried)
        if count <= 0:
            return []
        known = recorded + sum(outcome.status == "recorded" for outcome in outcomes.values())
        if recorded + tried < first:
            return left[: min(count, first - recorded - tried)]
        size = min(count, max(SMALLEST_BATCH, int(BATCH_SHARE * known)))
        try:
            measured = _observe(plan, dataset)
            estimate = CellEstimate(plan.spec, plan.device, cards=dataset.read_cards("workloads"))
            setups = [estimate.setup(planned.cell) for planned in left]
            queries = [None if setup is None else Query.of(setup) for setup in setups]
            batch = next_batch([planned.cell for planned in left], queries, measured=measured, count=size)
        except PrecisionTimeError as error:
            say(f"the next cells are taken in order, since no predictor could be fitted: {error}")
            return left[:size]
        return [left[index] for index in batch]

    return choose


def _observe(plan: CampaignPlan, dataset: TimingsDataset) -> list[Observation]:
    """What the dataset holds of this campaign's device, joined with cards."""
    gpu = plan.device.hardware.name
    measured = [seen for seen in dataset.measurements() if seen.gpu == gpu and not kind_of(seen.model).unlearnable]
    cards = [WorkloadFeatures.from_dict(card) for card in dataset.read_cards("workloads")]
    hardware = [HardwareSpec.from_dict(card) for card in dataset.read_cards("hardware")]
    return observe(measured, workloads=cards, hardware=[*hardware, plan.device.hardware])
