"""Measure CA-SGD cells on leased Dask workers, or here and without Dask."""

import time
from collections.abc import Iterable
from pathlib import Path

from precision_time.storage.schema import CellOutcome, Environment
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.casgd_cells.cells import CasgdCell
from precision_time.tasks.casgd_cells.launch import launch_ranks
from precision_time.tasks.gangs.leases import GangLease
from precision_time.tasks.gangs.profile_cell import RankStart, profile_on_lease
from precision_time.tasks.gangs.record_cell import record_cell
from precision_time.tasks.ranks.job import Attempt, CellReceipt, MeasurementLimits, RankJob

__all__ = ["profile_casgd_cell", "run_casgd_cell", "run_casgd_cells"]


def profile_casgd_cell(job: RankJob, *, lease: GangLease) -> CellReceipt:
    """Measure the cell of ``job`` on the workers of ``lease``, all on one host; see ``profile_on_lease``.

    The workers belong to this cell alone, so that nothing is timed beside it: mpiexec runs on the first, and the ranks
    take the cores of all. The job's environment is that of ``casgd_environment``.
    """
    return profile_on_lease(job, lease=lease, prepare=_prepare_launch)


def _prepare_launch(job: RankJob, lease: GangLease) -> list[RankStart]:
    job.lay_out()
    return [RankStart(worker=lease.workers[0], run=launch_ranks, arguments=(job.to_json(),))]


def run_casgd_cells(
    cells: Iterable[CasgdCell],
    *,
    dataset: TimingsDataset,
    environment: Environment,
    scratch: str | Path,
    limits: MeasurementLimits | None = None,
) -> list[CellOutcome]:
    """Time the cells that ``dataset`` lacks, one after the other, and record each; a cell that fails is an outcome.

    ``environment`` is that of ``casgd_environment``; ranks run on this machine, on CPUs. ``scratch`` is a local folder.
    """
    outcomes = []
    recorded = dataset.recorded_cells()
    for cell in cells:
        cell_id = cell.grid_cell.cell_id(environment)
        if cell_id in recorded:
            continue
        receipt = run_casgd_cell(
            cell,
            environment=environment,
            scratch=Path(scratch),
            limits=limits or MeasurementLimits(),
            attempt=dataset.next_attempt(cell_id),
        )
        outcomes.append(record_cell(dataset, receipt))
    return outcomes


def run_casgd_cell(
    cell: CasgdCell, *, environment: Environment, scratch: Path, limits: MeasurementLimits, attempt: int = 1
) -> CellReceipt:
    """One attempt at one cell, in a folder of its own in ``scratch``, on this machine and without Dask."""
    job = RankJob.of(
        Attempt(cell=cell.grid_cell, attempt=attempt, environment=environment), limits=limits, scratch=scratch
    )
    job.lay_out()
    started_at, began = time.time(), time.monotonic()
    report = launch_ranks(job.to_json())
    return job.conclude(
        cause=report["cause"],
        message=report["message"],
        host=report["host"],
        started_at=started_at,
        duration_s=time.monotonic() - began,
    )
