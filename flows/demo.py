"""The whole loop on this CPU: measure, retrain, publish, predict an unseen cell in a new process, and measure it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from precision_time.flows.campaigns.summary import CampaignResult
from precision_time.flows.campaigns.terminal import open_console, print_retraining
from precision_time.flows.ground.prefect_settings import prefect_api, prepare_prefect
from precision_time.flows.retraining.result import RetrainResult
from precision_time.predictor.answering.estimate import format_duration
from precision_time.storage.errors import GoalNotMetError, PrecisionTimeError
from precision_time.storage.filesystem import open_store
from precision_time.storage.schema import GridCell, Measurement
from precision_time.storage.timings import TimingsDataset

__all__ = ["main", "run_demo"]

CAMPAIGN = """\
# 24 cells for training, and 8 of a model that the predictor never sees
name: demo
models: [mlp, vit_tiny, bert_mini, gpt2_mini]
precisions: [fp32, bf16-mixed]
gpus: [1, 2]              # ranks; on a CPU each takes a share of the cores
batch_sizes: [4, 16]
device: cpu
data: {data}
warmup_steps: 5
measured_steps: 20
seconds_per_cell: 8s
"""

#: This cell is measured only after its prediction: a batch size between those of the grid.
LEFT_OUT = """\
name: demo-left-out
models: [bert_mini]
precisions: [bf16-mixed]
gpus: [2]
batch_sizes: [8]
device: cpu
data: {data}
warmup_steps: 5
measured_steps: 20
seconds_per_cell: 8s
"""
HOLDOUT_MODEL = "gpt2_mini"


def run_demo(folder: Path, *, console: Console) -> dict[str, Any]:
    """Run the demo in ``folder`` and return the summary that it also writes there.

    Cells that an earlier run has measured are kept; only missing cells are measured.
    """
    from precision_time.flows.campaigns.campaign import run_campaign
    from precision_time.flows.planning.spec import read_campaign
    from precision_time.flows.retraining.retrain import run_retraining
    from precision_time.flows.retraining.spec import RetrainSpec

    registry = str(folder / "registry")

    console.rule("1. Measure real training runs")
    plan = folder / "campaign.yaml"
    plan.write_text(CAMPAIGN.format(data=json.dumps(str(folder / "timings"))), encoding="utf-8")
    console.print(f"campaign file: {plan}")
    campaign = run_campaign(read_campaign(plan), console=console)

    console.rule("2. Retrain, validate, publish")
    retrained = run_retraining(
        RetrainSpec(data=str(folder / "timings"), registry=registry, holdout_models=(HOLDOUT_MODEL,))
    )
    print_retraining(retrained, console=console)
    if retrained.artifact_id is None:
        raise GoalNotMetError(
            "no predictor was published",
            got="; ".join(retrained.reasons),
            expected="a passed gate",
            fix=f"delete {folder}, which holds the measurements, and run the demo again on a quieter machine",
        )
    console.print(f"artifact: {registry}/{retrained.artifact_id}")

    console.rule("3. Predict a cell that was left out, in a new process")
    left_out = folder / "left-out.yaml"
    left_out.write_text(LEFT_OUT.format(data=json.dumps(str(folder / "left-out"))), encoding="utf-8")
    spec = read_campaign(left_out)
    (cell,) = spec.cells()
    predicted = predict_in_new_process(cell, artifact=f"{registry}/{retrained.artifact_id}")

    console.rule("4. Now measure it")
    run_campaign(spec, console=console)
    (measured,) = TimingsDataset(spec.data).measurements()

    summary = summarise(campaign=campaign, retrained=retrained, cell=cell, predicted=predicted, measured=measured)
    data = (json.dumps(summary, indent=1, allow_nan=False) + "\n").encode()
    open_store(folder).write_bytes("summary.json", data)
    error = predicted["iteration_time_s"] / measured.iteration_time_s - 1
    inside = predicted["low_s"] <= measured.iteration_time_s <= predicted["high_s"]
    console.print(f"{cell.label}")
    console.print(
        f"predicted {format_duration(predicted['iteration_time_s'])} "
        f"({format_duration(predicted['low_s'])} .. {format_duration(predicted['high_s'])} at {predicted['level']:.0%})"
    )
    console.print(
        f"measured  {format_duration(measured.iteration_time_s)}: the prediction is {error:+.1%} off, "
        f"{'inside' if inside else 'outside'} its interval"
    )
    console.print(f"summary: {folder / 'summary.json'}")
    return summary


def predict_in_new_process(cell: GridCell, *, artifact: str) -> dict[str, Any]:
    """The answer of ``precision-time predict`` for ``cell``, from a new process that loads the published artifact."""
    command = [sys.executable, "-m", "precision_time", "predict", "--json", "--artifact", artifact, "--gpu", "cpu"]
    command += ["--model", cell.model, "--precision", cell.precision]
    command += ["--gpus", str(cell.world_size), "--batch-size", str(cell.per_gpu_batch_size)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise PrecisionTimeError("the published artifact did not answer", got=finished.stderr.strip()[-500:])
    answer: dict[str, Any] = json.loads(finished.stdout)
    return answer


def summarise(
    *,
    campaign: CampaignResult,
    retrained: RetrainResult,
    cell: GridCell,
    predicted: dict[str, Any],
    measured: Measurement,
) -> dict[str, Any]:
    """The figures of the demo: fractions and seconds."""
    folds, holdout = retrained.accuracy["configuration"], retrained.accuracy["holdout"]
    return {
        "cells_planned": campaign.cells_planned,
        "cells_recorded": campaign.cells_recorded,
        "rows": campaign.rows,
        "cv_mape": folds["predictor"]["mape"],
        "cv_median_ape": folds["predictor"]["median_ape"],
        "holdout_models": retrained.holdout_models,
        "holdout_mape": holdout["predictor"]["mape"],
        "blind_cv_mape": folds["precision_blind"]["mape"],
        "roofline_cv_mape": folds["roofline"]["mape"],
        "artifact_id": retrained.artifact_id,
        "left_out": {
            "cell": cell.label,
            "predicted_s": predicted["iteration_time_s"],
            "low_s": predicted["low_s"],
            "high_s": predicted["high_s"],
            "measured_s": measured.iteration_time_s,
        },
    }


def main() -> int:
    """Run in ``.demo`` of the current folder; returns the exit code."""
    console = open_console()
    folder = Path(".demo")
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("PREFECT_HOME", str((folder / "prefect").resolve()))
    prepare_prefect()
    try:
        with prefect_api():
            run_demo(folder, console=console)
    except PrecisionTimeError as error:
        Console(stderr=True).print(f"error {error.code}: {error.message}", markup=False, soft_wrap=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
