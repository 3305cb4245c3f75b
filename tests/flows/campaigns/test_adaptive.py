"""Adaptive campaigns: the cover first, then where fits disagree, in batches without twins, up to the budget."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from precision_time.flows.campaigns.adaptive import (
    FEWEST_TO_FIT,
    choose_adaptively,
    choose_widest,
    next_batch,
    spread_of,
)
from precision_time.flows.planning.plan import CampaignPlan, plan_campaign
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.predictor.rows.observations import observe
from precision_time.storage.schema import CellOutcome, GridCell, Measurement
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tests.flows.made_up import make_outcome

Measure = Callable[..., list[Measurement]]


def cell_of(measured: Measurement) -> GridCell:
    return GridCell(
        model=measured.model,
        precision=measured.precision,
        world_size=measured.world_size,
        per_gpu_batch_size=measured.per_gpu_batch_size,
    )


def test_fits_disagree_most_about_a_model_with_a_single_measured_cell(measure: Measure) -> None:
    rows = measure(models=("mlp", "vit_tiny", "bert_mini"))
    unusual = [row for row in rows if row.model == "mlp"]
    measured = [row for row in rows if row.model != "mlp"] + unusual[:1]
    known, unsure = ([observation.query for observation in observe(part)] for part in (measured, unusual[1:]))
    spread = np.mean([spread_of([*known, *unsure], measured=observe(measured), seed=seed) for seed in range(3)], axis=0)
    assert spread.shape == (len(known) + len(unsure),)
    assert spread.min() > 0
    assert np.median(spread[len(known) :]) > 1.5 * np.median(spread[: len(known)])


def test_a_batch_takes_the_widest_and_leaves_out_their_twins() -> None:
    cells = [
        GridCell(model=model, precision=precision, world_size=1, per_gpu_batch_size=batch)
        for model in ("a", "b") for precision in ("fp32", "bf16") for batch in (1, 2, 3)
    ]  # fmt: skip
    worth = np.array([1.0 if cell.model == "a" else 0.7 for cell in cells])
    worth[0] = 1.1
    indices = choose_widest(cells, worth, count=3)
    assert indices[0] == 0
    assert {cells[index].model for index in indices} == {"a", "b"}
    assert {cells[index].precision for index in indices} == {"fp32", "bf16"}
    assert sorted(choose_widest(cells, worth, count=99)) == list(range(12))


def test_a_cell_of_a_model_without_a_card_comes_first(measure: Measure) -> None:
    rows = measure(models=("mlp",))
    observations = observe(rows)
    cells = [*map(cell_of, rows), replace(cell_of(rows[0]), model="own:make")]
    queries = [*(observation.query for observation in observations), None]
    batch = next_batch(cells, queries, measured=observations, count=3)
    assert batch[0] == len(cells) - 1
    assert len(set(batch)) == 3
    assert next_batch(cells, queries, measured=observations, count=3) == batch


@pytest.fixture
def plan(tmp_path: Path, device: ProbeReport) -> CampaignPlan:
    """A grid of 32 cells of which 20 are to be recorded."""
    spec = CampaignSpec.model_validate(
        {
            "name": "a", "models": ["mlp", "vit_tiny"], "precisions": ["fp32", "amp_bf16"], "gpus": [1, 2],
            "batch_sizes": [8, 16, 32, 64], "data": str(tmp_path / "data"), "budget_cells": 20,
        }
    )  # fmt: skip
    return plan_campaign(spec, probe=lambda wanted: device)


def answer(plan: CampaignPlan, measure: Measure, cells: Sequence[GridCell]) -> list[Measurement]:
    wanted = set(cells)
    made_up = measure(models=("mlp", "vit_tiny"), batches=(8, 16, 32, 64))
    return [replace(row, gpu=plan.device.hardware.name) for row in made_up if cell_of(row) in wanted]


def test_a_campaign_begins_with_its_cover_and_ends_at_its_budget(
    plan: CampaignPlan, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[GridCell] = []
    monkeypatch.setattr(TimingsDataset, "measurements", lambda self: answer(plan, measure, done))
    choose = choose_adaptively(plan, TimingsDataset(plan.spec.data))
    outcomes: dict[str, CellOutcome] = {}
    sizes = []
    while batch := choose(outcomes):
        sizes.append(len(batch))
        for planned in batch:
            assert planned.cell_id not in outcomes
            outcomes[planned.cell_id] = make_outcome(planned)
            done.append(planned.cell)
    assert done[:FEWEST_TO_FIT] == [planned.cell for planned in plan.missing[:FEWEST_TO_FIT]]
    assert sizes == [12, 4, 4]
    assert plan.goal == plan.cells_to_measure == 20


def test_without_a_predictor_the_order_goes_on_and_failures_use_up_the_budget(
    plan: CampaignPlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TimingsDataset, "measurements", lambda self: [])
    choose = choose_adaptively(plan, TimingsDataset(plan.spec.data))
    outcomes: dict[str, CellOutcome] = {}
    while batch := choose(outcomes):
        for planned in batch:
            outcomes[planned.cell_id] = make_outcome(planned, cause="signal 9")
    assert list(outcomes) == [planned.cell_id for planned in plan.missing[:20]]
    assert "no predictor could be fitted" in capsys.readouterr().err
