"""A made-up machine, and the jobs, steps and rows that tests build on it; a cell measured on a lease of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precision_time.storage.schema import Environment, GridCell, IterationTiming
from precision_time.tasks.ranks.conditions import Conditions
from precision_time.tasks.ranks.job import Attempt, CellReceipt, MeasurementLimits, RankJob, TraceLimits
from precision_time.tasks.ranks.rank import make_rows

if TYPE_CHECKING:
    from distributed import Client

    from precision_time.tasks.ranks.timed_loop import LoopResult, StepTimes

ENVIRONMENT = Environment(device_type="cpu", gpu="cpu-test-2c", cpu_model="test", cpu_cores=2, backend="gloo")
CELL = GridCell(model="mlp", precision="fp32", world_size=2, per_gpu_batch_size=4)


def make_job(
    scratch: Path, cell: GridCell = CELL, *, limits: MeasurementLimits | None = None, **others: Any
) -> RankJob:
    """The first attempt at ``cell``, in the folder ``scratch`` itself."""
    values = {"attempt": 1, "environment": ENVIRONMENT, "limits": limits or MeasurementLimits()} | others
    return RankJob(cell=cell, scratch=str(scratch), **values)


def make_step(**changes: Any) -> "StepTimes":
    """A step of 1 s whose parts add up, on a quiet machine."""
    from precision_time.tasks.ranks.timed_loop import StepTimes

    times = {"iteration_s": 1.0, "forward_s": 0.25, "backward_s": 0.5, "optimizer_s": 0.25, "communication_s": 0.0}
    others = {"buckets": (), "loss_scale": None, "step_skipped": False, "recorded_at": 0.0, "peak_memory_bytes": 1}
    return StepTimes(**{**times, **others, "conditions": Conditions(load_average=0.0), **changes})


def rows_of(job: RankJob, result: "LoopResult", *, rank: int = 0, **facts: Any) -> list[IterationTiming]:
    """The rows that ``rank`` writes of ``result``."""
    return make_rows(
        job,
        rank,
        result=result,
        task_input="8",
        effective_precision=job.cell.precision,
        model_params=10,
        float32_matmul_precision="highest",
        **facts,
    )


def profile_alone(
    cell: GridCell,
    *,
    client: "Client",
    scratch: Path,
    limits: MeasurementLimits,
    attempt: int = 1,
    environment: Environment = ENVIRONMENT,
    trace: TraceLimits | None = None,
    profile: Callable[..., CellReceipt] | None = None,
) -> CellReceipt:
    """Measure ``cell`` on a lease of its own by ``profile``, by default ``profile_cell``, and record nothing."""
    from precision_time.tasks.gangs import leases, profile_cell

    job = RankJob.of(
        Attempt(cell=cell, attempt=attempt, environment=environment), limits=limits, scratch=scratch, trace=trace
    )
    with leases.lease_workers(client, cell.world_size, hosts=cell.nodes) as lease:
        return (profile or profile_cell.profile_cell)(job, lease=lease)
