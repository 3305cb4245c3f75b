"""Which cells to measure next: those about which a predictor fitted on the recorded cells is least sure, spread out."""

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

#: With fewer measured cells the fits differ mostly by chance; until then the cover is measured.
FEWEST_TO_FIT = 12
#: Predictors that are fitted, each without one fold of the measured cells.
MEMBERS = 5
#: A batch adds a quarter to the recorded cells: a new fit after every cell would choose hardly better.
BATCH_SHARE = 0.25
SMALLEST_BATCH = 4
#: The share of its worth that a cell loses to a cell of the batch with the same value on every axis.
OVERLAP = 0.5


def spread_of(queries: Sequence[Query], *, measured: Sequence[Observation], seed: int = 0) -> Floats:
    """How far predictors that each lack a fifth of ``measured`` disagree: standard deviation of log seconds, (rows,).

    The width of a predictor's interval is not used: it is the same within a regime, so past the cover it says little
    more than which cells lie outside the measured range. On three public grids, choosing by the interval made errors on
    cells not yet measured 1.11 times as large (standard error 0.05) and left those on cells that are never measured the
    same within noise (0.94, 0.07); choosing by the product and the sum of both made them 0.98 and 1.04 times as large
    (``tests/benchmarks/replay_adaptive.py``). All fits extrapolate alike to a value of an axis without any row, and the
    spread then says nothing: therefore the cover comes first.

    Raises ``InputError`` when too few rows are left to fit on.
    """
    folds = split_by_group([row.measurement.configuration for row in measured], folds=MEMBERS, seed=seed)
    log_times = []
    for fold in np.unique(folds):
        training = [row for row, fold_of_row in zip(measured, folds, strict=True) if fold_of_row != fold]
        log_times.append(np.log(HierarchicalPredictor.fit(training, seed=seed).predict(queries).iteration_time_s))
    spread: Floats = np.std(log_times, axis=0)
    return spread


def choose_widest(cells: Sequence[GridCell], worth: Floats, *, count: int) -> list[int]:
    """Indices of ``count`` cells of great ``worth``, shape (cells,): each choice lowers the worth of similar cells."""
    axes = axes_of(cells)
    columns = [np.array([hash(getattr(cell, name)) for cell in cells]) for name in axes]
    worth = worth.astype(np.float64)
    indices: list[int] = []
    for _ in range(min(count, len(cells))):
        best = int(np.argmax(worth))
        indices.append(best)
        likeness = sum((column == column[best] for column in columns), start=np.zeros(len(cells))) / max(1, len(axes))
        worth *= 1 - OVERLAP * likeness
        worth[best] = -np.inf
    return indices


def next_batch(
    cells: Sequence[GridCell],
    queries: Sequence[Query | None],
    *,
    measured: Sequence[Observation],
    count: int,
    seed: int = 0,
) -> list[int]:
    """Indices of ``count`` of ``cells`` to measure next; cells without a query (no card of the model) come first."""
    unknown = [index for index, query in enumerate(queries) if query is None][:count]
    known = [(index, query) for index, query in enumerate(queries) if query is not None]
    if len(unknown) == count or not known:
        return unknown
    spread = spread_of([query for _, query in known], measured=measured, seed=seed)
    widest = choose_widest([cells[index] for index, _ in known], spread, count=count - len(unknown))
    return unknown + [known[index][0] for index in widest]


def choose_adaptively(plan: CampaignPlan, dataset: TimingsDataset) -> Choose:
    """Batches of the missing cells of ``plan`` up to its budget: the cover first, then where the predictor is unsure.

    A failed cell counts towards the budget, a refused cell does not. Where no predictor can be fitted, the cells follow
    in the order of the plan.
    """
    recorded = sum(planned.is_recorded for planned in plan.cells)
    cover = len(cover_cells([planned.cell for planned in plan.cells if not planned.is_refusable]))
    in_order = max(FEWEST_TO_FIT, min(cover, plan.goal // 2))

    def choose(outcomes: Mapping[str, CellOutcome]) -> list[PlannedCell]:
        left = [planned for planned in plan.missing if planned.cell_id not in outcomes]
        tried = sum(outcome.status != "refused" for outcome in outcomes.values())
        count = min(len(left), plan.cells_to_measure - tried)
        if count <= 0:
            return []
        in_dataset = recorded + sum(outcome.status == "recorded" for outcome in outcomes.values())
        if recorded + tried < in_order:
            return left[: min(count, in_order - recorded - tried)]
        size = min(count, max(SMALLEST_BATCH, int(BATCH_SHARE * in_dataset)))
        try:
            measured = _observe(plan, dataset)
            estimate = CellEstimate(plan.spec, plan.device, cards=dataset.read_cards("workloads"))
            setups = [estimate.setup(planned.cell) for planned in left]
            queries = [None if setup is None else Query.of(setup) for setup in setups]
            batch = next_batch([planned.cell for planned in left], queries, measured=measured, count=size)
        except PrecisionTimeError as error:
            say(f"the next cells are taken in the plan's order, because no predictor could be fitted: {error}")
            return left[:size]
        return [left[index] for index in batch]

    return choose


def _observe(plan: CampaignPlan, dataset: TimingsDataset) -> list[Observation]:
    """The dataset's measurements on this campaign's device, joined with their cards."""
    gpu = plan.device.hardware.name
    measured = [row for row in dataset.measurements() if row.gpu == gpu and not kind_of(row.model).unlearnable]
    cards = [WorkloadFeatures.from_dict(card) for card in dataset.read_cards("workloads")]
    hardware = [HardwareSpec.from_dict(card) for card in dataset.read_cards("hardware")]
    return observe(measured, workloads=cards, hardware=[*hardware, plan.device.hardware])
