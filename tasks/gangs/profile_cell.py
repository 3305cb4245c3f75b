"""Measure a cell on leased Dask workers: start its ranks there, wait for all of them, and write the receipt."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from distributed import Future, wait
from distributed.client import FuturesCancelledError

from precision_time.storage.errors import ClusterLostError, PrecisionTimeError
from precision_time.tasks.gangs.leases import GangLease, check_connected
from precision_time.tasks.processes.rank_process import (
    RankReport,
    assign_devices,
    report_loss,
    run_rank,
    visible_devices,
)
from precision_time.tasks.processes.running_ranks import end_ranks
from precision_time.tasks.ranks.job import CellReceipt, RankJob

__all__ = ["RankStart", "profile_cell", "profile_on_lease"]

#: Beyond the ranks' own deadline: what Dask may need to send a rank to its worker and return its report.
DASK_GRACE_S = 30.0
POLL_S = 0.1
#: Limit for fetching a report, which has a few hundred bytes.
REPORT_S = 5.0
#: After a rank that only lost its peer, the wait for the peer's own report, which has the cause.
CULPRIT_GRACE_S = 3.0
FORGOTTEN = "the scheduler has lost the ranks: it was started anew"
#: How long killed ranks may take to disappear.
ENDING_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """A call that starts one or more ranks on a leased worker and returns when they have ended."""

    worker: str
    run: Callable[..., RankReport]
    arguments: tuple[Any, ...]


def profile_cell(job: RankJob, *, lease: GangLease) -> CellReceipt:
    """Measure the cell of ``job`` with one rank on each worker of ``lease``; see ``profile_on_lease``.

    Steps after the measured ones are traced as far as the job's ``trace`` says.
    """
    return profile_on_lease(job, lease=lease, prepare=_prepare_ranks)


def _prepare_ranks(job: RankJob, lease: GangLease) -> list[RankStart]:
    workers = lease.workers
    devices: tuple[str, ...] = ()
    if job.environment.device_type == "cuda":
        visible = lease.client.run(visible_devices, workers=list(workers))
        devices = assign_devices(workers, [visible[address] for address in workers])
    job = replace(job, devices=devices, hosts=tuple(urlsplit(address).hostname or "" for address in workers))
    job.lay_out()
    text = job.to_json()
    return [RankStart(worker=address, run=run_rank, arguments=(text, rank)) for rank, address in enumerate(workers)]


def profile_on_lease(
    job: RankJob, *, lease: GangLease, prepare: Callable[[RankJob, GangLease], list[RankStart]]
) -> CellReceipt:
    """Lay out ``job`` by ``prepare``, make the calls that it returns on the workers of ``lease``, and wait for them.

    A rank that dies, hangs or runs out of memory ends its peers and costs only this cell: the receipt then carries the
    cause of the first failure. All workers must see the job's folder. Raises ``ClusterLostError`` when the scheduler is
    gone, ``StorageError`` when the folder cannot be made, and ``InputError`` when a host has fewer GPUs than ranks. An
    interrupt kills the ranks and goes on up. Threads of one client may measure cells side by side.
    """
    started_at, began = time.time(), time.monotonic()
    try:
        failure, reports = _run_gang(job, prepare(job, lease), lease=lease)
    except PrecisionTimeError:
        raise
    except (OSError, TimeoutError) as error:
        check_connected(lease.client)
        failure, reports = report_loss(f"{type(error).__name__}: {error}"), []
    report = failure or reports[0]
    return job.conclude(
        cause=report["cause"],
        message=report["message"],
        host=(reports[0] if reports else report)["host"],
        started_at=started_at,
        duration_s=time.monotonic() - began,
    )


def _run_gang(
    job: RankJob, starts: Sequence[RankStart], *, lease: GangLease
) -> tuple[RankReport | None, list[RankReport]]:
    """Make the calls ``starts``, each pinned to its worker: (the first failure or None, the reports that came)."""
    futures: dict[Future[RankReport], str] = {}
    is_over = False
    if lease.lost_workers():
        # This process may have stood still, and the workers may belong to another gang: nothing may start on them.
        return report_loss(lease.loss), []
    try:
        for number, start in enumerate(starts):
            future = lease.client.submit(
                start.run, *start.arguments, workers=[start.worker], allow_other_workers=False, pure=False, retries=0,
                key=f"{job.cell_id}-{job.attempt}-{number}-{lease.identity}",
            )  # fmt: skip
            futures[future] = start.worker
        failure, reports = _await_ranks(futures, lease=lease, deadline=_deadline(job.limits.timeout_s + DASK_GRACE_S))
        is_over = failure is None
        return failure, reports
    except ClusterLostError:
        # The ranks cannot be reached any more; they end with their workers, which end with the scheduler.
        is_over = True
        raise
    finally:
        if not is_over:
            _end_gang(futures, lease=lease)
        if all(future.status == "finished" for future in futures):
            lease.mark_clean()


def _deadline(seconds: float) -> float:
    return time.monotonic() + seconds


def _await_ranks(
    futures: dict[Future[RankReport], str], *, lease: GangLease, deadline: float
) -> tuple[RankReport | None, list[RankReport]]:
    """Wait until all ranks ended well, or one failed by itself, or its worker is gone.

    A future pinned to a worker that died stays pending for ever, so the lease is watched too.
    """
    pending = set(futures)
    reports: list[RankReport] = []
    patience: float | None = None
    while pending:
        try:
            with contextlib.suppress(TimeoutError):
                wait(pending, timeout=POLL_S, return_when="FIRST_COMPLETED")
        except FuturesCancelledError:
            return report_loss(FORGOTTEN), reports
        done = [future for future in pending if future.done()]
        if any(future.status == "cancelled" for future in done):
            return report_loss(FORGOTTEN), reports
        for future in done:
            pending.discard(future)
            reports.append(_expect_rows(_report_of(future, worker=futures[future])))
        failures = sorted((report for report in reports if report["cause"]), key=lambda report: report["ended_at"])
        culprits = [report for report in failures if not report["peer_lost"]]
        if (pending or failures) and not set(lease.lost_workers()).isdisjoint(futures.values()):
            # The states of a dead worker's futures change in any order, and its death is the cause of all of them.
            return report_loss(lease.loss), reports
        if culprits:
            return culprits[0], reports
        if failures and patience is None:
            patience = _deadline(CULPRIT_GRACE_S)
        if failures and (not pending or (patience is not None and time.monotonic() > patience)):
            return failures[0], reports
        if time.monotonic() > deadline:
            return report_loss("no word of the ranks after their deadline", cause="timed out"), reports
    return None, reports


def _report_of(future: Future[RankReport], *, worker: str) -> RankReport:
    if future.status == "finished":
        try:
            report: RankReport = future.result(timeout=REPORT_S)
        except Exception as error:
            # The report is on the worker until it is fetched, and lost with it: Dask then waits for another one.
            return report_loss(f"worker {worker}: its report is gone: {type(error).__name__}: {error}")
        return report
    reason = future.exception(timeout=REPORT_S) if future.status == "error" else future.status
    return report_loss(f"worker {worker}: {type(reason).__name__}: {reason}")


def _expect_rows(report: RankReport) -> RankReport:
    """``report``, as a failure where a rank ended with exit code 0 and left no rows: its model called exit."""
    missing = [] if report["cause"] else [path for path in map(Path, report["fragments"]) if not path.exists()]
    if not missing:
        return report
    message = f"{missing[0].stem}: the process ended with exit code 0 without a result"
    return report | {"cause": "exit code 0", "message": message}


def _end_gang(futures: dict[Future[RankReport], str], *, lease: GangLease) -> None:
    """Kill the ranks that still run and wait until their workers are free again."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, ClusterLostError):
        ends = _deadline(ENDING_S)
        lost = set(lease.lost_workers())
        # Again and again: a start may still be on its way to its worker.
        while time.monotonic() < ends and (
            running := [future for future, worker in futures.items() if not future.done() and worker not in lost]
        ):
            lease.client.run(end_ranks, workers=[futures[future] for future in running], on_error="ignore")
            with contextlib.suppress(TimeoutError):
                wait(running, timeout=POLL_S)
            lost = set(lease.lost_workers())
        lease.client.cancel([future for future in futures if not future.done()], force=True)
