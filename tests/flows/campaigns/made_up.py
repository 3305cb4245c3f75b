"""Made-up campaigns: specs, plans of eight cells, and the outcomes and measurements of their cells."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from precision_time.flows.planning.plan import CampaignPlan, PlannedCell
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.storage.schema import CellOutcome, Measurement
from precision_time.tasks.gangs.record_cell import outcome_of
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tasks.ranks.job import Attempt
from precision_time.tests.tasks.builders import ENVIRONMENT


def make_spec(folder: Path, **changes: object) -> CampaignSpec:
    """A campaign of eight cells, with its data in ``folder``."""
    values = {
        "name": "trial", "models": ["mlp", "gpt2_mini"], "precisions": ["fp32", "amp_bf16"], "gpus": [1, 2],
        "batch_sizes": [8], "data": str(folder / "data"),
    }  # fmt: skip
    return CampaignSpec.model_validate(values | changes)


def make_plan(spec: CampaignSpec, device: ProbeReport, *, recorded: tuple[int, ...] = ()) -> CampaignPlan:
    """A plan in which each cell takes 10 s and the cells run in the order of the grid."""
    cells = tuple(
        PlannedCell(
            cell=cell, cell_id=cell.cell_id(device.environment), is_recorded=index in recorded, estimated_s=10.0
        )
        for index, cell in enumerate(spec.cells())
    )
    return CampaignPlan(spec=spec, device=device, cells=cells)


def make_outcome(planned: PlannedCell, *, cause: str = "", attempt: int = 1) -> CellOutcome:
    """The outcome of a cell that took 1 s: recorded with 40 rows, or failed or refused for ``cause``."""
    made = Attempt(cell=planned.cell, attempt=attempt, environment=ENVIRONMENT)
    outcome = outcome_of(made.receipt(cause=cause, started_at=0.0, duration_s=1.0, host="here"))
    return replace(outcome, cell_id=planned.cell_id, rows=0 if cause else 40)


def make_measurement(planned: PlannedCell, *, iteration_time_s: float, **parts: Any) -> Measurement:
    """The measurement of a recorded cell."""
    cell = planned.cell
    return Measurement(
        source="campaign", model=cell.model, task_input="", gpu="cpu-test-2c", nodes=1, world_size=cell.world_size,
        precision=cell.precision, strategy="ddp", per_gpu_batch_size=cell.per_gpu_batch_size,
        gradient_accumulation_steps=1, framework="pytorch", iteration_time_s=iteration_time_s, cell_id=planned.cell_id,
        **parts,
    )  # fmt: skip
