"""Ranks that sleep instead of training, and a client process that measures cells of them; workers import this file.

``python fake_ranks.py ADDRESS FOLDER FIRST LAST`` measures the cells of these numbers in four threads.
"""

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from precision_time.storage.schema import Environment, GridCell
from precision_time.tasks.job import CellReceipt, MeasurementLimits, RankJob
from precision_time.tasks.rank_process import RankReport

ENVIRONMENT = Environment(device_type="cpu", gpu="cpu-test-4c", cpu_model="test", cpu_cores=4, backend="gloo")
LIMITS = MeasurementLimits(seconds_per_cell=10.0, timeout_s=60.0)

#: Set by ``end_ranks``, which here stands for the kill of the rank's process.
_ended = threading.Event()
_running: set[str] = set()


def run_rank(job_json: str, rank: int) -> RankReport:
    """A rank that meets its peers, sleeps, and logs when it ran on which worker; the model says what goes wrong."""
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
    finally:
        _running.discard(job_json)
        entry = {"cell": job.cell_id, "attempt": job.attempt, "began": began, "ended": time.monotonic()}
        with (scratch.parent / f"worker-{os.getpid()}.log").open("a", encoding="utf-8") as log:
            log.write(json.dumps(entry) + "\n")
    return RankReport(
        rank=rank, returncode=-9 if cause else 0, cause=cause, message=cause, fragment="", peer_lost=bool(cause),
        ended_at=time.time(), host="",
    )  # fmt: skip


def end_ranks() -> int:
    """End the rank of this worker; returns how many there were."""
    _ended.set()
    return len(_running)


def exit_cleanly() -> None:
    """End this worker with exit code 0 a moment from now."""
    threading.Timer(0.05, os._exit, (0,)).start()


def measure(client: object, cell: GridCell, *, attempt: int, scratch: Path) -> CellReceipt:
    """One attempt at ``cell`` with these ranks, by the code that measures real ones."""
    from precision_time.tasks import profile

    profile.run_rank, profile.end_ranks = run_rank, end_ranks
    return profile.profile_cell(
        cell, attempt=attempt, environment=ENVIRONMENT, limits=LIMITS, client=client, scratch=scratch
    )


def make_cell(number: int, *, model: str = "sleep", ranks: int | None = None) -> GridCell:
    """Cell ``number`` of 1 to 4 ranks."""
    return GridCell(
        model=model, precision="fp32", world_size=ranks or 1 + (number * 7 + number // 4) % 4,
        per_gpu_batch_size=number + 1,
    )  # fmt: skip


def main(address: str, folder: str, first: int, last: int) -> None:
    """Measure cells ``first`` to ``last`` until each is done, and write down every lease and every finished cell."""
    from distributed import Client

    from precision_time.tasks import profile

    scratch, real_run_gang = Path(folder), profile._run_gang
    lock = threading.Lock()

    def note(kind: str, **values: object) -> None:
        with lock, (scratch / f"{kind}-{os.getpid()}.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(values) + "\n")

    def run_gang(job, *, client, lease):
        began = time.monotonic()
        try:
            return real_run_gang(job, client=client, lease=lease)
        finally:
            note("lease", workers=lease.workers, began=began, ended=time.monotonic())

    profile._run_gang = run_gang

    def finish(number: int) -> None:
        for attempt in range(1, 40):
            receipt = measure(client, make_cell(number), attempt=attempt, scratch=scratch)
            if receipt.status == "recorded":
                note("done", cell=number, attempt=attempt)
                return
            note("failed", cell=number, attempt=attempt, cause=receipt.cause)

    with Client(address) as client, ThreadPoolExecutor(4) as pool:
        list(pool.map(finish, range(first, last)))


if __name__ == "__main__":
    # Under its own name, so that workers can import what is sent to them.
    import fake_ranks

    fake_ranks.main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
