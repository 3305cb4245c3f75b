"""Measure a cell of one rank in a child of this process: no Dask, nothing recorded."""

import os
import time
from dataclasses import replace
from pathlib import Path

from precision_time.storage.schema import Environment, GridCell
from precision_time.tasks.processes.rank_process import assign_devices, run_rank
from precision_time.tasks.ranks.job import Attempt, CellReceipt, MeasurementLimits, RankJob

__all__ = ["profile_here"]


def profile_here(cell: GridCell, *, environment: Environment, limits: MeasurementLimits, scratch: Path) -> CellReceipt:
    """The first attempt at ``cell``, of one rank on the first device that this process sees.

    The attempt gets a folder of its own in ``scratch``. Raises ``InputError`` when no GPU is visible, and
    ``StorageError`` when the folder cannot be made.
    """
    attempt = Attempt(cell=cell, attempt=1, environment=environment)
    job = RankJob.of(attempt, limits=limits, scratch=scratch)
    if environment.device_type == "cuda":
        job = replace(job, devices=assign_devices([""], [os.environ.get("CUDA_VISIBLE_DEVICES")]))
    job.lay_out()
    began, started_at = time.monotonic(), time.time()
    report = run_rank(job.to_json(), 0)
    return job.conclude(
        cause=report["cause"],
        message=report["message"],
        host=report["host"],
        started_at=started_at,
        duration_s=time.monotonic() - began,
    )
