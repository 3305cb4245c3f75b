"""Measure one cell: start its ranks on whole Dask workers, wait for all, and say in a receipt what came of it."""

import contextlib
import functools
import json
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from distributed import Client, Future, wait
from distributed.client import FuturesCancelledError

from precision_time.storage.errors import ClusterLostError, PrecisionTimeError
from precision_time.storage.schema import Environment, GridCell
from precision_time.tasks.gangs.leases import GangLease, LeaseWait, check_connected, lease_workers, number_attempt
from precision_time.tasks.processes.rank_process import RankReport, assign_devices, run_rank, visible_devices
from precision_time.tasks.processes.running_ranks import end_ranks
from precision_time.tasks.ranks.job import Attempt, CellReceipt, MeasurementLimits, RankJob, TraceLimits
from precision_time.tasks.ranks.rank import card_path, trace_path
from precision_time.tasks.ranks.refusals import refuse_unstarted

__all__ = ["profile_cell"]

#: Beyond the ranks' own deadline: what Dask may need to bring a rank to its worker and its report back.
DASK_GRACE_S = 30.0
POLL_S = 0.1
#: Fetching the few hundred bytes of a rank's report.
REPORT_S = 5.0
#: A rank that only lost its peer waits this long for the peer's own report, which tells the cause.
CULPRIT_GRACE_S = 3.0
FORGOTTEN = "the scheduler has lost the ranks: it was started anew"
#: After a failure, how long the ranks that were killed may take to disappear.
ENDING_S = 10.0


def profile_cell(
    cell: GridCell,
    *,
    attempt: int | Callable[[], int],
    environment: Environment,
    limits: MeasurementLimits,
    client: Client,
    scratch: Path,
    trace: TraceLimits | None = None,
    watch: Callable[[LeaseWait], None] | None = None,
    claim: str = "",
    alone: bool = False,
    keep: Callable[[CellReceipt], None] = lambda receipt: None,
) -> CellReceipt:
    """Measure ``cell`` on a gang of ``world_size`` workers of ``client``, one rank on each, and wait for all of them.

    The workers stand evenly on ``cell.nodes`` hosts and belong to this cell alone until it ends; waiting for them is
    no part of ``duration_s``, has no limit, and is told to ``watch`` (see ``lease_workers``, also for ``claim`` and
    ``alone``). Steps after the measured ones are traced as far as ``trace`` says. An ``attempt`` that is a function is
    asked once the workers are held and before a rank starts; what it raises gives them back and goes on up. ``keep``
    gets the receipt while they are still held, so that whoever waits for the same ``claim`` finds what it wrote. A rank
    that dies, hangs or runs out of memory ends its peers and costs only this cell: the receipt then carries the cause
    of the first failure. ``scratch`` must be seen by all workers; the attempt gets a folder of its own in it. What can
    be refused without a start takes no workers. Raises ``InputError`` when the cluster stays too small,
    ``NoWorkersError`` when it is empty, ``ClusterLostError`` when its scheduler is gone and ``StorageError`` when the
    folder cannot be made. An interrupt kills the ranks and goes on up.
    Threads of one client may measure cells side by side.
    """
    refused = refuse_unstarted(Attempt(cell=cell, attempt=1, environment=environment))
    if refused is not None:
        receipt = replace(refused, attempt=number_attempt(attempt))
        keep(receipt)
        return receipt
    try:
        with lease_workers(client, cell.world_size, hosts=cell.nodes, claim=claim, alone=alone, watch=watch) as lease:
            number = number_attempt(attempt, lease=lease)
            receipt = _profile_on(
                lease, cell, attempt=number, environment=environment, limits=limits, client=client, scratch=scratch,
                trace=trace,
            )  # fmt: skip
            keep(receipt)
            return receipt
    except PrecisionTimeError:
        raise
    except Exception:
        # A scheduler that is gone cancels what waits on it: that is no fault of the cell.
        check_connected(client)
        raise


def _profile_on(
    lease: GangLease,
    cell: GridCell,
    *,
    attempt: int,
    environment: Environment,
    limits: MeasurementLimits,
    client: Client,
    scratch: Path,
    trace: TraceLimits | None,
) -> CellReceipt:
    started_at, began = time.time(), time.monotonic()
    cell_id = cell.cell_id(environment)
    receipt = functools.partial(CellReceipt, cell=cell, attempt=attempt, environment=environment, started_at=started_at)
    folder = scratch / f"{cell_id}-{attempt}"
    try:
        workers = lease.workers
        devices: tuple[str, ...] = ()
        if environment.device_type == "cuda":
            seen = client.run(visible_devices, workers=list(workers))
            devices = assign_devices(workers, [seen[address] for address in workers])
        job = RankJob(
            cell=cell,
            attempt=attempt,
            environment=environment,
            limits=limits,
            scratch=str(folder.resolve()),
            devices=devices,
            trace=trace,
            hosts=tuple(urlsplit(address).hostname or "" for address in workers),
        )
        job.lay_out()
        failure, reports = _run_gang(job, client=client, lease=lease)
    except PrecisionTimeError:
        raise
    except (OSError, TimeoutError) as error:
        check_connected(client)
        failure, reports = _lost(f"{type(error).__name__}: {error}"), []
    duration_s = time.monotonic() - began
    host = reports[0]["host"] if reports else socket.gethostname()
    if failure is not None:
        return receipt(
            cause=failure["cause"],
            message=failure["message"],
            scratch=str(folder),
            duration_s=duration_s,
            host=host,
        )
    card, traced = card_path(folder), trace_path(folder)
    return receipt(
        scratch=str(folder),
        fragments=tuple(report["fragment"] for report in sorted(reports, key=lambda report: report["rank"])),
        trace=str(traced) if traced.exists() else "",
        workload=json.loads(card.read_text(encoding="utf-8")) if card.exists() else None,
        duration_s=duration_s,
        host=host,
    )


def _lost(message: str) -> RankReport:
    return RankReport(
        rank=-1, returncode=None, cause="lost contact", message=message, fragment="", peer_lost=False,
        ended_at=time.time(), host="",
    )  # fmt: skip


def _run_gang(job: RankJob, *, client: Client, lease: GangLease) -> tuple[RankReport | None, list[RankReport]]:
    """All ranks of ``job``, one pinned to each worker: (the failure that came first or None, reports that came)."""
    text = job.to_json()
    futures: dict[Future[RankReport], str] = {}
    finished = False
    if lease.lost_workers():
        # This process may have stood still since: nothing of it may start beside the gang of another.
        return _lost(lease.loss), []
    try:
        for rank, address in enumerate(lease.workers):
            future = client.submit(
                run_rank, text, rank, workers=[address], allow_other_workers=False, pure=False, retries=0,
                key=f"{job.cell_id}-{job.attempt}-r{rank}-{lease.identity}",
            )  # fmt: skip
            futures[future] = address
        deadline = _deadline(job.limits.timeout_s + DASK_GRACE_S)
        failure, reports = _await_ranks(futures, lease=lease, deadline=deadline)
        finished = failure is None
        return failure, reports
    except ClusterLostError:
        # There is no way to the ranks any more; their workers end with the scheduler, and they with their workers.
        finished = True
        raise
    finally:
        if not finished:
            _end_gang(futures, client=client, lease=lease)
        if all(future.status == "finished" for future in futures):
            lease.mark_clean()


def _deadline(seconds: float) -> float:
    return time.monotonic() + seconds


def _await_ranks(
    futures: dict[Future[RankReport], str], *, lease: GangLease, deadline: float
) -> tuple[RankReport | None, list[RankReport]]:
    """Wait until all ranks ended well, or one failed and is known to be the culprit, or its worker is gone.

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
            return _lost(FORGOTTEN), reports
        done = [future for future in pending if future.done()]
        if any(future.status == "cancelled" for future in done):
            return _lost(FORGOTTEN), reports
        for future in done:
            pending.discard(future)
            reports.append(_expect_result(_report_of(future, worker=futures[future])))
        failures = sorted((report for report in reports if report["cause"]), key=lambda report: report["ended_at"])
        culprits = [report for report in failures if not report["peer_lost"]]
        if (pending or failures) and lease.lost_workers():
            # What the scheduler says of the futures of a dead worker comes in any order; the death came first.
            return _lost(lease.loss), reports
        if culprits:
            return culprits[0], reports
        if failures and patience is None:
            patience = _deadline(CULPRIT_GRACE_S)
        if failures and (not pending or (patience is not None and time.monotonic() > patience)):
            return failures[0], reports
        if time.monotonic() > deadline:
            late = _lost(f"no word of {len(pending)} ranks after their deadline")
            return late | {"cause": "timed out"}, reports
    return None, reports


def _report_of(future: Future[RankReport], *, worker: str) -> RankReport:
    if future.status == "finished":
        try:
            report: RankReport = future.result(timeout=REPORT_S)
        except Exception as error:
            # The report lies on the worker until it is fetched, and goes with it: Dask then waits for another one.
            return _lost(f"worker {worker}: its report is gone: {type(error).__name__}: {error}")
        return report
    reason = future.exception(timeout=REPORT_S) if future.status == "error" else future.status
    return _lost(f"worker {worker}: {type(reason).__name__}: {reason}")


def _expect_result(report: RankReport) -> RankReport:
    """``report``, as a failure where the rank ended as if all were well and left nothing: its model called exit."""
    if report["cause"] or Path(report["fragment"]).exists():
        return report
    ended = f"exit code {report['returncode']}"
    return report | {
        "cause": ended,
        "message": f"rank {report['rank']}: the process ended with {ended} without a result",
    }


def _end_gang(futures: dict[Future[RankReport], str], *, client: Client, lease: GangLease) -> None:
    """Kill the ranks that still run and wait until their workers are free again."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, ClusterLostError):
        lost = set(lease.lost_workers())
        reachable = [future for future, address in futures.items() if not future.done() and address not in lost]
        if reachable:
            client.run(end_ranks, workers=[futures[future] for future in reachable], on_error="ignore")
            with contextlib.suppress(TimeoutError):
                wait(reachable, timeout=ENDING_S)
        client.cancel([future for future in futures if not future.done()], force=True)
