"""Ranks that sleep instead of training, and client processes that measure cells of them; workers import this file.

``python fake_ranks.py ADDRESS FOLDER CELLS`` takes so many cells through a campaign's ``measure_cell``, in four
threads, into the dataset ``FOLDER/data``; ``python fake_ranks.py ADDRESS FOLDER MODEL RANKS`` tries one cell and prints
what came of it.
"""

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from precision_time.storage.schema import Environment, GridCell, IterationTiming
from precision_time.storage.timings import TimingsDataset, write_fragment
from precision_time.tasks.gangs import scheduler_plugin as gangs
from precision_time.tasks.processes.rank_process import RankReport
from precision_time.tasks.ranks.job import CellReceipt, MeasurementLimits, RankJob

ENVIRONMENT = Environment(device_type="cpu", gpu="cpu-test-4c", cpu_model="test", cpu_cores=4, backend="gloo")
LIMITS = MeasurementLimits(seconds_per_cell=10.0, timeout_s=60.0)

#: Set by ``end_ranks``, in place of killing the rank's process.
_ended = threading.Event()
_running: set[str] = set()


def run_rank(job_json: str, rank: int) -> RankReport:
    """A rank that waits for its peers, sleeps, writes its rows and logs when it ran; its model names its fault."""
    # From now on the sweeps of this worker find these ranks and end them.
    gangs.end_ranks = end_ranks
    job = RankJob.from_json(job_json)
    scratch = Path(job.scratch)
    _ended.clear()
    _running.add(job_json)
    began = time.monotonic()
    cause = ""
    try:
        (scratch / f"rank-{rank}.here").touch()
        while len(list(scratch.glob("*.here"))) < job.cell.world_size and not _ended.wait(0.005):
            pass
        if job.cell.model == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        if _ended.wait(3600 if job.cell.model == "sleeper" else 0.02):
            cause = "signal 9"
        else:
            write_fragment(job.fragment_path(rank), make_rows(job, rank))
    finally:
        _running.discard(job_json)
        entry = {"cell": job.cell_id, "attempt": job.attempt, "began": began, "ended": time.monotonic()}
        with (scratch.parent / f"worker-{os.getpid()}.log").open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
    return RankReport(
        cause=cause, message=cause, fragments=[str(job.fragment_path(rank))], peer_lost=bool(cause),
        ended_at=time.time(), host="",
    )  # fmt: skip


def count_rows(cell: GridCell) -> int:
    """How many rows all ranks of ``cell`` write; cells differ in it, so that a mix-up is noticed."""
    return cell.world_size * (4 + cell.per_gpu_batch_size % 5)


def make_rows(job: RankJob, rank: int) -> list[IterationTiming]:
    """One warm-up step and some measured ones of one rank."""
    values: dict[str, Any] = job.row_columns() | {
        "task_input": "", "effective_precision": job.cell.precision, "rank": rank, "is_steady": True,
        "iteration_time_s": 1.0, "forward_time_s": 0.25, "backward_time_s": 0.5, "optimizer_time_s": 0.25,
        "bucket_count": 1, "bucket_bytes": 4, "loss_scale": None, "step_skipped": False, "peak_memory_bytes": 1,
        "model_params": 1, "threads_per_rank": 1, "float32_matmul_precision": "highest", "load_average": 0.0,
        "recorded_at": 0.0,
    }  # fmt: skip
    measured = {"compute_time_s": 0.875, "communication_time_s": 0.125, "exposed_communication_s": 0.125}
    steps = count_rows(job.cell) // job.cell.world_size
    return [
        IterationTiming(**values, **(measured if step else dict.fromkeys(measured)), step=step, is_warmup=not step)
        for step in range(steps)
    ]


def end_ranks() -> int:
    """End the rank of this worker; returns how many there were."""
    _ended.set()
    return len(_running)


def exit_cleanly() -> None:
    """End this worker with exit code 0 a moment from now."""
    threading.Timer(0.05, os._exit, (0,)).start()


def use_fake_ranks() -> None:
    """Let ``profile_cell`` of this process start these ranks."""
    from precision_time.tasks.gangs import profile_cell as profile

    profile.run_rank, profile.end_ranks = run_rank, end_ranks


def measure(client: object, cell: GridCell, *, attempt: int, scratch: Path) -> CellReceipt:
    """One attempt at ``cell`` with these ranks, by the code that measures real ones."""
    from precision_time.tests.tasks.builders import profile_alone

    use_fake_ranks()
    return profile_alone(cell, client=client, scratch=scratch, limits=LIMITS, attempt=attempt, environment=ENVIRONMENT)


def make_cell(number: int, *, model: str = "sleep", ranks: int | None = None) -> GridCell:
    """Cell ``number`` of 1 to 4 ranks."""
    return GridCell(
        model=model, precision="fp32", world_size=ranks or 1 + (number * 7 + number // 4) % 4,
        per_gpu_batch_size=number + 1,
    )  # fmt: skip


def measure_all(address: str, folder: str, cells: int) -> None:
    """Measure each cell until it is recorded, by this process or another, and log every lease and every attempt."""
    from distributed import Client

    from precision_time.flows.campaigns.measure_cell import measure_cell
    from precision_time.flows.planning.plan import CampaignPlan, PlannedCell
    from precision_time.flows.planning.spec import CampaignSpec
    from precision_time.tasks.gangs import profile_cell as profile

    use_fake_ranks()
    data = Path(folder) / "data"
    scratch, real_run_gang = Path(folder) / f"scratch-{os.getpid()}", profile._run_gang
    spec = CampaignSpec.model_validate({
        "name": "fake", "models": ["mlp"], "precisions": ["fp32"], "gpus": [1], "batch_sizes": [1], "cells_at_once": 4,
        "data": str(data), "seconds_per_cell": 10, "timeout_per_cell": 60,
    })  # fmt: skip
    # A cell is measured by the plan's settings and environment alone.
    device: Any = SimpleNamespace(environment=ENVIRONMENT)
    plan = CampaignPlan(spec=spec, device=device, cells=())
    lock = threading.Lock()

    def note(kind: str, **values: object) -> None:
        with lock, (Path(folder) / f"{kind}-{os.getpid()}.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(values) + "\n")

    def run_gang(job, starts, *, lease):
        began = time.monotonic()
        try:
            return real_run_gang(job, starts, lease=lease)
        finally:
            note("lease", cell=job.cell_id, workers=lease.workers, began=began, ended=time.monotonic())

    profile._run_gang = run_gang

    def finish(number: int) -> None:
        cell = make_cell(number)
        planned = PlannedCell(cell=cell, cell_id=cell.cell_id(ENVIRONMENT), is_recorded=False, estimated_s=1.0)
        dataset = TimingsDataset(str(data))
        for _ in range(40):
            outcome = measure_cell(planned, plan=plan, dataset=dataset, client=client, scratch=scratch)
            note("outcome", **asdict(outcome))
            if outcome.status == "recorded":
                return

    with Client(address) as client, ThreadPoolExecutor(4) as pool:
        list(pool.map(finish, range(cells)))


def try_one(address: str, folder: str, model: str, ranks: int) -> None:
    """One attempt at a cell, and its cause and message on stdout."""
    from distributed import Client

    with Client(address) as client:
        receipt = measure(client, make_cell(os.getpid(), model=model, ranks=ranks), attempt=1, scratch=Path(folder))
    print(json.dumps({"status": receipt.status, "cause": receipt.cause, "message": receipt.message}))


if __name__ == "__main__":
    # Imported under its own name, so that workers can import the functions that are sent to them.
    import fake_ranks

    if len(sys.argv) == 4:
        fake_ranks.measure_all(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        fake_ranks.try_one(*sys.argv[1:4], int(sys.argv[4]))
