"""Runs whose process is gone without reporting an end: set to Crashed, so that they free their slot in Prefect."""

import time
from typing import TYPE_CHECKING, Any

from precision_time.flows.stack.deployments import POOL

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun, State

__all__ = ["end_lost_runs"]

#: How long a run that was told to end may take to report its end itself.
ENDING_S = 20.0


def end_lost_runs(reason: str) -> list[str]:
    """End the pool's runs that Prefect shows as under way but that have no process here; returns their names.

    Processes that are just ending are waited for, because they report their end themselves. A run that was being
    cancelled becomes Cancelled, the others become Crashed with ``reason``.
    """
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        deadline = time.monotonic() + ENDING_S
        while any(_has_process(run) for run in _under_way(client)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [run.name for run in _under_way(client) if not _has_process(run) and _end(client, run, reason)]


def _under_way(client: "SyncPrefectClient") -> "list[FlowRun]":
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        WorkPoolFilter,
        WorkPoolFilterName,
    )
    from prefect.client.schemas.objects import StateType

    types = [StateType.RUNNING, StateType.PENDING, StateType.CANCELLING]
    return client.read_flow_runs(
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=types))),
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL])),
    )


def _has_process(run: "FlowRun") -> bool:
    """Whether the process that the worker started for ``run`` is alive and still a run's process."""
    import psutil

    pid = (run.infrastructure_pid or "").rpartition(":")[2]
    try:
        process = psutil.Process(int(pid))
        return process.status() != psutil.STATUS_ZOMBIE and "prefect.engine" in process.cmdline()
    except (ValueError, psutil.Error):
        return False


def _end(client: "SyncPrefectClient", run: "FlowRun", reason: str) -> bool:
    from prefect.client.schemas.responses import SetStateStatus
    from prefect.states import Cancelled, Crashed

    state: State[Any] = Crashed(message=reason)
    if run.state is not None and run.state.is_cancelling():
        state = Cancelled(message=reason)
    return client.set_flow_run_state(run.id, state).status == SetStateStatus.ACCEPT
