"""Campaigns that are killed, interrupted, poisoned, or have nowhere to write: real processes, real signals."""

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from precision_time.flows.clusters.scratch import PREFIX
from precision_time.storage.timings import TimingsDataset
from precision_time.tests.faults.prefect_server import PrefectServer

pytestmark = pytest.mark.faults

MARK = "PRECISION_TIME_TEST_MARK"
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


class Campaign:
    """A campaign file, and the processes of its command: every descendant carries a mark in its environment."""

    def __init__(self, folder: Path, prefect_home: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.mark = uuid.uuid4().hex
        self.environment = os.environ | {MARK: self.mark, "PREFECT_HOME": str(prefect_home), "PYTHONPATH": str(folder)}
        self.environment.pop("PREFECT_API_URL", None)

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
        deadline = time.monotonic() + WAIT_S
        while not self.data.exists() or len(TimingsDataset(str(self.data)).recorded_cells()) < count:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline, "no cell was recorded in time"
            time.sleep(0.2)

    def wait_for_rank(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while not any("precision_time.tasks.ranks.rank" in " ".join(command) for command in self.living()):
            assert time.monotonic() < deadline, "no rank was started in time"
            # Each look reads the environment of every process.
            time.sleep(0.2)

    def living(self) -> list[list[str]]:
        """The command lines of the processes of this campaign that are still alive; a zombie is not."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process.cmdline())
        return found

    def assert_nothing_is_left(self) -> None:
        deadline = time.monotonic() + 30
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert self.living() == []


@pytest.fixture(scope="module")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prefect")


@pytest.fixture
def campaign(tmp_path: Path, prefect_home: Path) -> Iterator[Campaign]:
    campaign = Campaign(tmp_path, prefect_home)
    yield campaign
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == campaign.mark:
                process.kill()


def assert_whole(data: Path, *, cells: int) -> None:
    """Every cell has all of its rows once, and one outcome says that it was recorded."""
    dataset = TimingsDataset(str(data))
    rows = dataset.read().select(["cell_id", "rank", "step", "is_warmup"]).to_pylist()
    assert len({row["cell_id"] for row in rows}) == cells
    assert max(Counter(tuple(row.values()) for row in rows).values()) == 1
    recorded = [outcome.cell_id for outcome in dataset.outcomes() if outcome.status == "recorded"]
    assert len(recorded) == len(set(recorded))


def test_a_killed_campaign_leaves_no_process_and_goes_on_where_it_stopped(campaign: Campaign) -> None:
    campaign.write()
    temporary = campaign.folder / "tmp"
    temporary.mkdir()
    campaign.environment["TMPDIR"] = str(temporary)
    process = campaign.start()
    campaign.wait_for_cells(process, 1)
    campaign.wait_for_rank()
    process.kill()
    process.communicate()
    campaign.assert_nothing_is_left()
    before = len(TimingsDataset(str(campaign.data)).recorded_cells())
    assert 1 <= before < 4
    assert len(list(temporary.glob(f"{PREFIX}*"))) == 1

    again = campaign.start()
    out, err = again.communicate(timeout=2 * WAIT_S)
    assert again.returncode == 0, err
    result = json.loads(out)
    assert (result["cells_recorded"], result["cells_measured"]) == (4, 4 - before)
    assert_whole(campaign.data, cells=4)
    assert not list(temporary.glob(f"{PREFIX}*"))
    campaign.assert_nothing_is_left()


def test_a_campaign_in_which_nothing_can_run_starts_no_cluster_and_says_so(campaign: Campaign) -> None:
    campaign.write()
    with (campaign.folder / "campaign.yaml").open("a", encoding="utf-8") as file:
        file.write("strategies: [fsdp]\n")
    process = campaign.start()
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 5, err
    result = json.loads(out)
    assert (result["cells_recorded"], result["cells_left"], result["ended_by"]) == (0, 0, "")
    assert {cell["cause"] for cell in result["failed"]} == {"strategy-unsupported"}
    error = json.loads(err.splitlines()[-1])
    assert error["code"] == "E-PARTIAL"
    assert error["got"].startswith("nothing is left to measure: what has no timings was refused")
    assert len(TimingsDataset(str(campaign.data)).outcomes()) == len(result["failed"]) == 4


def test_ctrl_c_ends_with_130_and_leaves_whole_data_and_no_process(campaign: Campaign) -> None:
    campaign.write()
    process = campaign.start()
    campaign.wait_for_cells(process, 1)
    campaign.wait_for_rank()
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the whole group, workers included
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err, err
    campaign.assert_nothing_is_left()
    recorded = len(TimingsDataset(str(campaign.data)).recorded_cells())
    assert 2 <= recorded < 4, "the cell under way is finished and kept, and no other is started"
    assert_whole(campaign.data, cells=recorded)


@pytest.mark.long
def test_other_settings_are_refused_with_the_difference_and_measure_nothing(
    campaign: Campaign, standing_server: PrefectServer
) -> None:
    campaign.environment["PREFECT_API_URL"] = standing_server.url
    campaign.write(gpus="[1]")
    process = campaign.start()
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    before = TimingsDataset(str(campaign.data)).read()
    file = campaign.folder / "campaign.yaml"
    file.write_text(file.read_text().replace("warmup_steps: 3", "warmup_steps: 9").replace("[mlp]", "[mlp, vit_tiny]"))
    process = campaign.start()
    out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (2, "")
    said = err.splitlines()[-1]
    assert "warmup_steps" in said
    assert "3" in said
    assert "9" in said
    assert TimingsDataset(str(campaign.data)).read().equals(before)


@pytest.mark.long
def test_a_cell_that_kills_itself_costs_only_itself(campaign: Campaign, standing_server: PrefectServer) -> None:
    campaign.environment["PREFECT_API_URL"] = standing_server.url
    (campaign.folder / "poison.py").write_text(
        "import os, signal\n\n\ndef make():\n    os.kill(os.getpid(), signal.SIGKILL)\n", encoding="utf-8"
    )
    campaign.write(models="[poison:make, mlp]", gpus="[1]")
    process = campaign.start()
    out, err = process.communicate(timeout=2 * WAIT_S)
    assert process.returncode == 5, err
    result = json.loads(out)
    assert (result["status"], result["cells_recorded"]) == ("partial", 2)
    assert {cell["cause"] for cell in result["failed"]} == {"signal 9"}
    attempts = Counter(
        outcome.model for outcome in TimingsDataset(str(campaign.data)).outcomes() if outcome.status == "failed"
    )
    assert attempts == {"poison:make": 4}
    campaign.assert_nothing_is_left()


def allow_no_file_to_grow() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def obey_file_modes() -> None:
    """Without this capability root obeys them too; for anyone else the call fails and changes nothing."""
    pr_capbset_drop, cap_dac_override = 24, 1
    ctypes.CDLL(None).prctl(pr_capbset_drop, cap_dac_override)


@pytest.mark.parametrize(
    ("preexec", "mode", "code"),
    [(allow_no_file_to_grow, 0o755, "E-STORE-FULL"), (obey_file_modes, 0o555, "E-STORE-READ-ONLY")],
    ids=["full", "read-only"],
)
def test_nowhere_to_write_is_found_before_anything_is_measured(
    campaign: Campaign, preexec: Callable[[], None], mode: int, code: str
) -> None:
    campaign.write()
    campaign.data.mkdir(mode=mode)
    process = campaign.start(preexec)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2, err
    assert json.loads(err.splitlines()[-1])["code"] == code
    assert out == ""
    assert list(campaign.data.iterdir()) == []
