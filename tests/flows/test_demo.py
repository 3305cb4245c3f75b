"""The demo's campaigns are what the README says, and its summary has the figures it promises."""

import json
from pathlib import Path

import pytest

from precision_time.flows.campaigns.summary import CampaignResult
from precision_time.flows.demo import CAMPAIGN, HOLDOUT_MODEL, LEFT_OUT, predict_in_new_process, summarise
from precision_time.flows.planning.spec import CampaignSpec, read_campaign
from precision_time.flows.retraining.result import RetrainResult
from precision_time.storage.errors import PrecisionTimeError
from precision_time.storage.schema import GridCell, Measurement


def read(text: str, folder: Path) -> CampaignSpec:
    file = folder / "campaign.yaml"
    file.write_text(text.format(data=json.dumps(str(folder / "data"))), encoding="utf-8")
    return read_campaign(file)


def test_the_grid_has_24_cells_to_train_on_and_the_left_out_cell_is_not_among_them(tmp_path: Path) -> None:
    spec = read(CAMPAIGN, tmp_path)
    cells = spec.cells()
    assert len([cell for cell in cells if cell.model != HOLDOUT_MODEL]) == 24
    assert {cell.model for cell in cells} >= {HOLDOUT_MODEL}
    assert {cell.world_size for cell in cells} == {1, 2}
    assert {cell.precision for cell in cells} == {"fp32", "amp_bf16"}
    assert spec.seconds_per_cell <= 15
    (left_out,) = read(LEFT_OUT, tmp_path).cells()
    assert left_out not in cells
    assert left_out.model in spec.models


def test_the_summary_has_every_figure_as_fractions_and_seconds() -> None:
    cell = GridCell(model="mlp", precision="fp32", world_size=2, per_gpu_batch_size=8)
    campaign = CampaignResult(
        name="demo", data="d", gpu="cpu-x", cells_planned=32, cells_recorded=31, cells_measured=3, rows=900,
        rows_added=90, failed=(), duration_s=1.0,
    )  # fmt: skip
    accuracy = {
        split: {method: {"mape": 0.1 * n, "median_ape": 0.05} for n, method in enumerate(methods, start=1)}
        for split in ("configuration", "holdout")
        for methods in [("predictor", "precision_blind", "roofline")]
    }
    retrained = RetrainResult(
        status="published", artifact_id="default@1", reasons=[], left_out=[], rows=24, holdout_models=["gpt2_mini"],
        training_data_sha256="0" * 64, accuracy=accuracy,
    )  # fmt: skip
    measured = Measurement(
        source="campaign", model="mlp", task_input="", gpu="cpu-x", nodes=1, world_size=2, precision="fp32",
        strategy="ddp", per_gpu_batch_size=8, gradient_accumulation_steps=1, framework="pytorch", iteration_time_s=0.5,
    )  # fmt: skip
    predicted = {"iteration_time_s": 0.4, "low_s": 0.3, "high_s": 0.6}
    summary = summarise(campaign=campaign, retrained=retrained, cell=cell, predicted=predicted, measured=measured)
    assert summary == {
        "cells_planned": 32,
        "cells_recorded": 31,
        "rows": 900,
        "cv_mape": pytest.approx(0.1),
        "cv_median_ape": 0.05,
        "holdout_models": ["gpt2_mini"],
        "holdout_mape": pytest.approx(0.1),
        "blind_cv_mape": pytest.approx(0.2),
        "roofline_cv_mape": pytest.approx(0.3),
        "artifact_id": "default@1",
        "left_out": {
            "cell": "mlp fp32 x2 b8", "predicted_s": 0.4, "low_s": 0.3, "high_s": 0.6, "measured_s": 0.5,
        },
    }  # fmt: skip


def test_an_artifact_that_does_not_answer_ends_the_demo_with_the_reason(tmp_path: Path) -> None:
    cell = GridCell(model="mlp", precision="fp32", world_size=2, per_gpu_batch_size=8)
    with pytest.raises(PrecisionTimeError, match="E-NOT-FOUND"):
        predict_in_new_process(cell, artifact=f"{tmp_path}/default@1")
