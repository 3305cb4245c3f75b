"""Measure CA-SGD cells on leased Dask workers, or here and without Dask, and say in a receipt what came of them."""

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from precision_time.storage.errors import ClusterLostError, PrecisionTimeError
from precision_time.storage.schema import CellOutcome, Environment, GridCell
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.casgd_cells.cells import GlmCell
from precision_time.tasks.casgd_cells.launch import LaunchReport, launch_ranks, lose_ranks
from precision_time.tasks.gangs.leases import GangLease, LeaseWait, check_connected, lease_workers, number_attempt
from precision_time.tasks.gangs.record_cell import record_cell
from precision_time.tasks.processes.running_ranks import end_ranks
from precision_time.tasks.ranks.job import CellReceipt, MeasurementLimits, RankJob
from precision_time.tasks.ranks.rank import fragment_path

__all__ = ["profile_glm_cell", "run_glm_cell", "run_glm_cells"]

POLL_S = 0.1
#: Beyond the ranks' own deadline: what Dask may need to bring the start to its worker and the report back.
DASK_GRACE_S = 30.0
#: Fetching the few hundred bytes of a report.
REPORT_S = 5.0
#: After an interrupt, how long the ranks that were killed may take to disappear.
ENDING_S = 10.0


def profile_glm_cell(
    cell: GridCell,
    *,
    attempt: int | Callable[[], int],
    environment: Environment,
    limits: MeasurementLimits,
    client: Any,
    scratch: Path,
    watch: Callable[[LeaseWait], None] | None = None,
    claim: str = "",
    alone: bool = False,
    keep: Callable[[CellReceipt], None] = lambda receipt: None,
) -> CellReceipt:
    """Measure ``cell`` on ``world_size`` workers of the ``distributed.Client`` ``client``, all on one host.

    The workers belong to this cell alone until it ends, so that nothing is timed beside it; mpiexec runs on the first,
    and the ranks take the cores of all. ``environment`` is that of ``glm_environment``. ``attempt``, ``watch``,
    ``claim``, ``alone``, ``keep`` and what is raised are those of ``profile_cell``; an interrupt kills the ranks and
    goes on up.
    """
    try:
        with lease_workers(client, cell.world_size, hosts=1, claim=claim, alone=alone, watch=watch) as lease:
            number = number_attempt(attempt, lease=lease)
            job = _lay_out(cell, attempt=number, environment=environment, limits=limits, scratch=scratch)
            started_at, began = time.time(), time.monotonic()
            report = _launch_on(lease, job, client=client)
            receipt = _receipt_of(job, report, started_at=started_at, duration_s=time.monotonic() - began)
            keep(receipt)
            return receipt
    except PrecisionTimeError:
        raise
    except Exception:
        # A scheduler that is gone cancels what waits on it: that is no fault of the cell.
        check_connected(client)
        raise


def _launch_on(lease: GangLease, job: RankJob, *, client: Any) -> LaunchReport:
    worker = lease.workers[0]
    if worker in lease.lost_workers():
        # This process may have stood still since: nothing of it may start beside the gang of another.
        return lose_ranks(lease.loss)
    future = client.submit(
        launch_ranks, job.to_json(), workers=[worker], allow_other_workers=False, pure=False, retries=0,
        key=f"{job.cell_id}-{job.attempt}-mpi-{lease.identity}",
    )  # fmt: skip
    deadline = time.monotonic() + job.limits.timeout_s + DASK_GRACE_S
    try:
        while not future.done():
            # A future pinned to a worker that died stays pending for ever.
            if worker in lease.lost_workers():
                return lose_ranks(lease.loss)
            if time.monotonic() > deadline:
                return lose_ranks("no word of the ranks after their deadline", cause="timed out")
            time.sleep(POLL_S)
        if future.status != "finished":
            reason = future.exception(timeout=REPORT_S) if future.status == "error" else future.status
            return lose_ranks(f"worker {worker}: {type(reason).__name__}: {reason}")
        report: LaunchReport = future.result(timeout=REPORT_S)
        if report["cause"] and worker in lease.lost_workers():
            # Ended by the sweep after a lease that this process slept away.
            return lose_ranks(lease.loss)
        lease.mark_clean()
        return report
    finally:
        if not future.done():
            _end(future, worker=worker, lease=lease, client=client)


def _end(future: Any, *, worker: str, lease: GangLease, client: Any) -> None:
    """Kill the ranks that still run and wait until their worker is free again."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, ClusterLostError):
        deadline = time.monotonic() + ENDING_S
        # Again and again: the start may still be on its way.
        while not future.done() and worker not in lease.lost_workers() and time.monotonic() < deadline:
            client.run(end_ranks, workers=[worker], on_error="ignore")
            time.sleep(POLL_S)
        client.cancel([future], force=True)


def run_glm_cells(
    cells: Iterable[GlmCell],
    *,
    dataset: TimingsDataset,
    environment: Environment,
    scratch: str | Path,
    limits: MeasurementLimits | None = None,
) -> list[CellOutcome]:
    """Time the cells that ``dataset`` lacks, one after the other, and record each; a cell that fails is an outcome.

    ``environment`` is that of ``glm_environment``; ranks run on this machine, on CPUs. ``scratch`` is a local folder.
    """
    outcomes = []
    recorded = dataset.recorded_cells()
    for cell in cells:
        cell_id = cell.grid_cell.cell_id(environment)
        if cell_id in recorded:
            continue
        receipt = run_glm_cell(
            cell,
            environment=environment,
            scratch=Path(scratch),
            limits=limits or MeasurementLimits(),
            attempt=dataset.next_attempt(cell_id),
        )
        outcomes.append(record_cell(dataset, receipt))
    return outcomes


def run_glm_cell(
    cell: GlmCell, *, environment: Environment, scratch: Path, limits: MeasurementLimits, attempt: int = 1
) -> CellReceipt:
    """One attempt at one cell, in a folder of its own in ``scratch``, on this machine and without Dask."""
    job = _lay_out(cell.grid_cell, attempt=attempt, environment=environment, limits=limits, scratch=scratch)
    started_at, began = time.time(), time.monotonic()
    report = launch_ranks(job.to_json())
    return _receipt_of(job, report, started_at=started_at, duration_s=time.monotonic() - began)


def _lay_out(
    cell: GridCell, *, attempt: int, environment: Environment, limits: MeasurementLimits, scratch: Path
) -> RankJob:
    cell_id = cell.cell_id(environment)
    job = RankJob(
        cell=cell,
        attempt=attempt,
        environment=environment,
        limits=limits,
        scratch=str((scratch / f"{cell_id}-{attempt}").resolve()),
    )
    job.lay_out()
    return job


def _receipt_of(job: RankJob, report: LaunchReport, *, started_at: float, duration_s: float) -> CellReceipt:
    fragments = tuple(str(fragment_path(Path(job.scratch), rank)) for rank in range(job.cell.world_size))
    return job.receipt(
        cause=report["cause"],
        message=report["message"],
        scratch=job.scratch,
        fragments=() if report["cause"] else fragments,
        started_at=started_at,
        duration_s=duration_s,
        host=report["host"],
    )
