"""Made-up outcomes of cells, and a campaign flow that measures without a cluster, for the tests of flows."""

import contextlib
import functools
from collections.abc import Callable

import pytest

from precision_time.flows.planning.plan import PlannedCell, plan_campaign
from precision_time.storage.schema import CellOutcome
from precision_time.tasks.probing.probe_device import ProbeReport

__all__ = ["make_outcome", "measure_by"]


def make_outcome(planned: PlannedCell, *, cause: str = "", message: str = "") -> CellOutcome:
    """The outcome of ``planned``: recorded with three rows, or failed where there is a ``cause``."""
    cell = planned.cell
    return CellOutcome(
        cell_id=planned.cell_id, attempt=1, status="failed" if cause else "recorded", cause=cause, message=message,
        rows=0 if cause else 3, model=cell.model, precision=cell.precision,
        world_size=cell.world_size, nodes=cell.nodes, per_gpu_batch_size=cell.per_gpu_batch_size,
        gradient_accumulation_steps=1, strategy=cell.strategy, gpu="cpu-test-2c", host="here", started_at=0.0,
        duration_s=1.5,
    )  # fmt: skip


def measure_by(
    measure_cell: Callable[..., CellOutcome], *, device: ProbeReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the campaign flow plan for ``device``, open no cluster, and get each outcome from ``measure_cell``."""
    from precision_time.flows.campaigns import campaign

    monkeypatch.setattr(campaign, "plan_campaign", functools.partial(plan_campaign, probe=lambda wanted: device))
    monkeypatch.setattr(campaign, "open_cluster", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(campaign, "check_scratch", lambda *_: None)
    monkeypatch.setattr(campaign, "measure_cell", measure_cell)
