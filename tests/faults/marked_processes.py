"""Commands of the tests whose descendants all carry a mark in their environment, and a campaign as such a command."""

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from precision_time.storage.timings import TimingsDataset
from precision_time.tests.processes import wait_for

__all__ = ["RANKS", "WAIT_S", "Campaign", "MarkedProcesses", "assert_whole"]

MARK = "PRECISION_TIME_TEST_MARK"
#: What stands in the command line of a rank.
RANKS = "precision_time.tasks.ranks.rank"
WAIT_S = 180

FILE = """\
name: faults
models: {models}
precisions: [fp32, amp_bf16]
gpus: {gpus}
batch_sizes: [4]
device: cpu
data: {data}
warmup_steps: 3
measured_steps: 5
seconds_per_cell: 5s
timeout_per_cell: 2m
"""


class MarkedProcesses:
    """Processes that are started with ``environment``, and all of their descendants."""

    def __init__(self, **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self.environment = os.environ | {MARK: self.mark} | environment

    def living(self, *words: str) -> list[str]:
        """The command lines of those that are alive and hold all of ``words``; a zombie is not alive."""
        lines = []
        for process in self._find():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    lines.append(" ".join(process.cmdline()))
        return [line for line in lines if all(word in line for word in words)]

    def assert_nothing_is_left(self) -> None:
        wait_for(lambda: not self.living(), seconds=30, what="the end of all processes")

    def kill_all(self) -> None:
        for process in self._find():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _find(self) -> list[psutil.Process]:
        marked = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    marked.append(process)
        return marked


class Campaign(MarkedProcesses):
    """A campaign file, and the processes of its command."""

    def __init__(self, folder: Path, prefect_home: Path) -> None:
        super().__init__(PREFECT_HOME=str(prefect_home), PYTHONPATH=str(folder))
        self.environment.pop("PREFECT_API_URL", None)
        self.folder = folder
        self.data = folder / "data"

    def write(self, *, models: str = "[mlp]", gpus: str = "[1, 2]") -> None:
        text = FILE.format(models=models, gpus=gpus, data=json.dumps(str(self.data)))
        (self.folder / "campaign.yaml").write_text(text, encoding="utf-8")

    def start(self, preexec: Callable[[], None] | None = None) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "precision_time", "campaign", "campaign.yaml", "--json"],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=preexec,
        )

    def wait_for_cells(self, process: "subprocess.Popen[str]", count: int) -> None:
        def are_recorded() -> bool:
            if self.data.exists() and len(TimingsDataset(str(self.data)).recorded_cells()) >= count:
                return True
            assert process.poll() is None, process.communicate()[1]
            return False

        wait_for(are_recorded, seconds=WAIT_S, what="a recorded cell")

    def wait_for_rank(self) -> None:
        wait_for(lambda: self.living(RANKS), seconds=WAIT_S, what="the start of a rank")


def assert_whole(data: Path, *, cells: int) -> None:
    """Every cell has all of its rows once, and one outcome says that it was recorded."""
    dataset = TimingsDataset(str(data))
    rows = dataset.read().select(["cell_id", "rank", "step", "is_warmup"]).to_pylist()
    assert len({row["cell_id"] for row in rows}) == cells
    assert max(Counter(tuple(row.values()) for row in rows).values()) == 1
    recorded = [outcome.cell_id for outcome in dataset.outcomes() if outcome.status == "recorded"]
    assert len(recorded) == len(set(recorded))
