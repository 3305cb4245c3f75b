"""Measure one cell: start its ranks on whole Dask workers, wait for all, and say in a receipt what came of it."""

import contextlib
import functools
import json
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from distributed import Client, Future, wait

from precision_time.storage.errors import InputError, PrecisionTimeError, StorageError
from precision_time.storage.schema import Environment, GridCell
from precision_time.tasks.job import CellReceipt, MeasurementLimits, RankJob
from precision_time.tasks.rank_process import RankReport, end_ranks, run_rank, visible_devices
from precision_time.tasks.ranks import card_path

__all__ = ["assign_devices", "profile_cell"]

#: Beyond the ranks' own deadline: what Dask may need to bring a rank to its worker and its report back.
DASK_GRACE_S = 30.0
POLL_S = 0.2
#: A rank that only lost its peer waits this long for the peer's own report, which tells the cause.
CULPRIT_GRACE_S = 3.0
#: After a failure, how long the ranks that were killed may take to disappear.
ENDING_S = 10.0


def assign_devices(workers: Sequence[str], visible: Sequence[str | None]) -> tuple[str, ...]:
    """The ``CUDA_VISIBLE_DEVICES`` entry of each rank, from its worker's address and what that worker sees.

    dask-cuda rotates the list so that a worker's own GPU comes first; plain workers of one host all see the same list
    and take its entries in turn. Raises ``InputError`` when a host has fewer GPUs than ranks.
    """
    devices: list[str] = []
    for index, (address, entries) in enumerate(zip(workers, visible, strict=True)):
        host = urlsplit(address).hostname
        before = [other for other in range(index) if urlsplit(workers[other]).hostname == host]
        if entries is None:
            devices.append(str(len(before)))
            continue
        own = entries.split(",")
        taken = {devices[other] for other in before}
        free = [entry for entry in own if entry and entry not in taken]
        if not free:
            raise InputError(
                "a host has fewer GPUs than ranks",
                got=f"CUDA_VISIBLE_DEVICES={entries} for {len(before) + 1} ranks on {host}",
                expected="a GPU for every rank",
                fix="ask for fewer GPUs, or start the workers with dask-cuda",
            )
        devices.append(free[0])
    return tuple(devices)


def profile_cell(
    cell: GridCell,
    *,
    attempt: int,
    environment: Environment,
    limits: MeasurementLimits,
    client: Client,
    scratch: Path,
) -> CellReceipt:
    """Measure ``cell`` on ``world_size`` workers of ``client``, one rank on each, and wait for all of them.

    A rank that dies, hangs or runs out of memory ends its peers and costs only this cell: the receipt then carries the
    cause of the first failure. ``scratch`` must be seen by all workers; the attempt gets a folder of its own in it.
    Raises ``InputError`` when there are too few workers and ``StorageError`` when the folder cannot be made. An
    interrupt kills the ranks and goes on up.
    """
    started_at, began = time.time(), time.monotonic()
    cell_id = cell.cell_id(environment)
    receipt = functools.partial(
        CellReceipt, cell=cell, cell_id=cell_id, attempt=attempt, environment=environment, started_at=started_at
    )
    folder = scratch / f"{cell_id}-{attempt}"
    try:
        workers = _choose_workers(client, cell.world_size)
        # What an earlier owner of these workers left running would spoil the timings.
        client.run(end_ranks, workers=workers)
        devices: tuple[str, ...] = ()
        if environment.device_type == "cuda":
            seen = client.run(visible_devices, workers=workers)
            devices = assign_devices(workers, [seen[address] for address in workers])
        job = RankJob(
            cell=cell,
            cell_id=cell_id,
            attempt=attempt,
            environment=environment,
            limits=limits,
            scratch=str(folder.resolve()),
            devices=devices,
        )
        _lay_out(folder, job)
        failure, reports = _run_gang(job, client=client, workers=workers)
    except PrecisionTimeError:
        raise
    except (OSError, TimeoutError) as error:
        failure, reports = _lost(f"{type(error).__name__}: {error}"), []
    duration_s = time.monotonic() - began
    host = reports[0]["host"] if reports else socket.gethostname()
    if failure is not None:
        return receipt(
            status="refused" if failure["cause"] == "precision-unsupported" else "failed",
            cause=failure["cause"],
            message=failure["message"],
            scratch=str(folder),
            duration_s=duration_s,
            host=host,
        )
    card = card_path(folder)
    return receipt(
        status="recorded",
        scratch=str(folder),
        fragments=tuple(report["fragment"] for report in sorted(reports, key=lambda report: report["rank"])),
        workload=json.loads(card.read_text(encoding="utf-8")) if card.exists() else None,
        duration_s=duration_s,
        host=host,
    )


def _lay_out(folder: Path, job: RankJob) -> None:
    try:
        # A rendezvous left by a killed attempt would make the ranks wait for processes that are gone.
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        (folder / "job.json").write_text(job.to_json(), encoding="utf-8")
    except OSError as error:
        raise StorageError(
            "the scratch folder cannot be written",
            got=f"{folder}: {error.strerror}",
            expected="a folder that this process and all workers can write",
        ) from error


def _choose_workers(client: Client, count: int) -> list[str]:
    """Addresses of ``count`` workers; sorted, so that those of one host stand together."""
    addresses = sorted(_worker_addresses(client))
    if len(addresses) < count:
        raise InputError(
            "the cluster has fewer workers than the cell has ranks",
            got=f"{len(addresses)} workers for world_size {count}",
            expected=f"at least {count} workers of one thread each",
            fix="start more workers, or leave this world size out",
        )
    return addresses[:count]


def _worker_addresses(client: Client) -> set[str]:
    # Without n_workers the answer names only a few of them.
    return set(client.scheduler_info(n_workers=-1)["workers"])


def _lost(message: str) -> RankReport:
    return RankReport(
        rank=-1, returncode=None, cause="lost contact", message=message, fragment="", peer_lost=False,
        ended_at=time.time(), host="",
    )  # fmt: skip


def _run_gang(job: RankJob, *, client: Client, workers: Sequence[str]) -> tuple[RankReport | None, list[RankReport]]:
    """All ranks of ``job``, one pinned to each worker: (the failure that came first or None, reports that came)."""
    text = job.to_json()
    futures = {
        client.submit(
            run_rank, text, rank, workers=[address], allow_other_workers=False, pure=False, retries=0,
            key=f"{job.cell_id}-{job.attempt}-r{rank}-{time.time_ns()}",
        ): address
        for rank, address in enumerate(workers)
    }  # fmt: skip
    finished = False
    try:
        failure, reports = _await_ranks(futures, client=client, deadline=_deadline(job.limits.timeout_s + DASK_GRACE_S))
        finished = failure is None
        return failure, reports
    finally:
        if not finished:
            _end_gang(futures, client=client)


def _deadline(seconds: float) -> float:
    return time.monotonic() + seconds


def _await_ranks(
    futures: dict[Future[RankReport], str], *, client: Client, deadline: float
) -> tuple[RankReport | None, list[RankReport]]:
    """Wait until all ranks ended well, or one failed and is known to be the culprit, or its worker is gone.

    A future pinned to a worker that died stays pending for ever, so the workers are watched too.
    """
    pending = set(futures)
    reports: list[RankReport] = []
    patience: float | None = None
    while pending:
        with contextlib.suppress(TimeoutError):
            wait(pending, timeout=POLL_S, return_when="FIRST_COMPLETED")
        for future in [future for future in pending if future.done()]:
            pending.discard(future)
            reports.append(_report_of(future, worker=futures[future]))
        failures = sorted((report for report in reports if report["cause"]), key=lambda report: report["ended_at"])
        culprits = [report for report in failures if not report["peer_lost"]]
        if culprits:
            return culprits[0], reports
        gone = {futures[future] for future in pending} - _worker_addresses(client)
        if gone:
            return _lost(f"worker {', '.join(sorted(gone))} is gone"), reports
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
        report: RankReport = future.result()
        return report
    reason = future.exception() if future.status == "error" else future.status
    return _lost(f"worker {worker}: {type(reason).__name__}: {reason}")


def _end_gang(futures: dict[Future[RankReport], str], *, client: Client) -> None:
    """Kill the ranks that still run and wait until their workers are free again."""
    with contextlib.suppress(OSError, TimeoutError, ValueError):
        pending = [future for future in futures if not future.done()]
        alive = _worker_addresses(client)
        survivors = [futures[future] for future in pending if futures[future] in alive]
        if survivors:
            client.run(end_ranks, workers=survivors, on_error="ignore")
            with contextlib.suppress(TimeoutError):
                wait([future for future in pending if futures[future] in alive], timeout=ENDING_S)
        client.cancel([future for future in futures if not future.done()], force=True)
