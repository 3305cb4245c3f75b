"""Measure a cell of one rank in a child of this process: no Dask, nothing recorded."""

import os
import time
from pathlib import Path

from precision_time.storage.schema import Environment, GridCell
from precision_time.tasks.processes.rank_process import assign_devices, run_rank
from precision_time.tasks.ranks.job import CellReceipt, MeasurementLimits, RankJob

__all__ = ["profile_here"]


def profile_here(cell: GridCell, *, environment: Environment, limits: MeasurementLimits, scratch: Path) -> CellReceipt:
    """The first attempt at ``cell``, of one rank on the first device that this process sees.

    ``scratch`` is a folder of this attempt alone, which exists. Raises ``InputError`` when no GPU is visible.
    """
    devices: tuple[str, ...] = ()
    if environment.device_type == "cuda":
        devices = assign_devices([""], [os.environ.get("CUDA_VISIBLE_DEVICES")])
    job = RankJob(
        cell=cell,
        attempt=1,
        environment=environment,
        limits=limits,
        scratch=str(scratch),
        devices=devices,
    )
    (scratch / "job.json").write_text(job.to_json(), encoding="utf-8")
    began, started_at = time.monotonic(), time.time()
    ended = run_rank(job.to_json(), 0)
    return job.receipt(
        cause=ended["cause"],
        message=ended["message"],
        scratch=str(scratch),
        fragments=(ended["fragment"],),
        started_at=started_at,
        duration_s=time.monotonic() - began,
        host=ended["host"],
    )
