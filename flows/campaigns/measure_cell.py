"""One attempt at a cell of a campaign: lease workers, measure it on them, and record the outcome."""

import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from precision_time.flows.campaigns.cell_loop import CellNotStartedError
from precision_time.flows.campaigns.terminal import log_of_run, say
from precision_time.flows.clusters.cluster import Client
from precision_time.flows.planning.changed_settings import limits_of, note_measured
from precision_time.flows.planning.plan import CampaignPlan, PlannedCell
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.storage.errors import ClusterLostError, NoWorkersError, StorageError, printable
from precision_time.storage.schema import CellOutcome
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.gangs.leases import LeaseWait, check_connected, lease_workers
from precision_time.tasks.gangs.record_cell import outcome_of, record_cell
from precision_time.tasks.ranks.job import Attempt, RankJob, TraceLimits
from precision_time.tasks.work_kinds import kind_of, refuse_unstarted

__all__ = ["announce", "measure_cell"]

#: JSON of one cell's trace; what viewers open without trouble.
MAX_TRACE_BYTES = 64 * 2**20


def measure_cell(
    planned: PlannedCell,
    *,
    plan: CampaignPlan,
    dataset: TimingsDataset,
    client: Client,
    scratch: Path,
    watch: Callable[[LeaseWait], None] | None = None,
) -> CellOutcome:
    """One attempt at one cell, recorded whether it went well or not; none where another campaign has recorded it.

    Campaigns on one scheduler and the same data measure a cell one after the other, so that the second finds it
    recorded. An outcome of status ``recorded`` without rows is of a cell that another campaign recorded. ``watch`` is
    called during a wait for workers. Raises only what concerns every cell that follows: ``StorageError`` (a full disk),
    ``ClusterLostError`` and ``NoWorkersError``, and what ``watch`` raises as ``CellNotStartedError``.
    """
    cell, kind = planned.cell, kind_of(planned.cell.model)
    started_at, began = time.time(), time.monotonic()
    attempt = Attempt(cell=cell, attempt=1, environment=kind.environment(plan.device.environment))
    if attempt.cell_id in dataset.recorded_cells():
        return _find_earlier(attempt, dataset, started_at=started_at)
    refused = refuse_unstarted(attempt)
    if refused is not None:
        return record_cell(dataset, replace(refused, attempt=dataset.next_attempt(attempt.cell_id)))
    trace = _limit_trace(plan.spec, dataset) if kind.takes_traces else None
    outcome: CellOutcome | None = None
    try:
        with lease_workers(
            client, cell.world_size, hosts=cell.nodes, claim=f"{dataset.url} {attempt.cell_id}",
            alone=plan.is_one_per_host, watch=watch,
        ) as lease:  # fmt: skip
            # Looked up with the workers held: others may have recorded it, or failed at it, during the wait for them.
            if attempt.cell_id in dataset.recorded_cells():
                lease.mark_clean()
                return _find_earlier(attempt, dataset, started_at=started_at)
            attempt = replace(attempt, attempt=dataset.next_attempt(attempt.cell_id))
            job = RankJob.of(attempt, limits=limits_of(plan.spec), scratch=scratch, trace=trace)
            receipt = kind.profile(job, lease)
            # Before the workers go back: a campaign that waits with the same claim then finds it recorded.
            outcome = record_cell(dataset, receipt)
    except (StorageError, ClusterLostError, NoWorkersError, CellNotStartedError):
        raise
    except Exception as error:
        # A scheduler that is gone cancels what waits on it: that is no fault of the cell.
        check_connected(client)
        # A cluster or a fragment can break in unforeseen ways; then this cell fails, and not the campaign.
        if outcome is None:
            receipt = replace(attempt, attempt=dataset.next_attempt(attempt.cell_id)).receipt(
                cause="exception",
                message=f"{type(error).__name__}: {error}",
                started_at=started_at,
                duration_s=time.monotonic() - began,
                host=platform.node(),
            )
            outcome = record_cell(dataset, receipt)
    if outcome.rows:
        note_measured(plan.spec, attempt.cell_id)
    elif outcome.status == "recorded":
        announce(f"{cell.label}: {outcome.message}")
    return outcome


def announce(text: str) -> None:
    """Print a line on the terminal, and keep it in the log of the run."""
    say(text)
    log_of_run().info("%s", printable(text))


def _limit_trace(spec: CampaignSpec, dataset: TimingsDataset) -> TraceLimits | None:
    """How large the trace of the next cell may be: a viewer's limit, and what the quota has left."""
    if not spec.traced_steps:
        return None
    # JSON is some ten times what it takes on disk, so a trace within this never goes beyond the quota.
    left = max(0, spec.max_trace_bytes - dataset.trace_bytes())
    return TraceLimits(steps=spec.traced_steps, max_bytes=min(MAX_TRACE_BYTES, left))


def _find_earlier(attempt: Attempt, dataset: TimingsDataset, *, started_at: float) -> CellOutcome:
    """The outcome of another campaign on the same data; a made-up one where that died before it could write it.

    Without rows: none of them are of this run.
    """
    message = "recorded by another campaign meanwhile"
    announce(f"{attempt.cell.label}: {message}")
    recorded = [outcome for outcome in dataset.outcomes(cells={attempt.cell_id}) if outcome.status == "recorded"]
    made_up = outcome_of(attempt.receipt(started_at=started_at, duration_s=0.0, host=platform.node()))
    return replace(recorded[-1] if recorded else made_up, rows=0, message=message)
