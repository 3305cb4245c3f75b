"""Campaigns that are killed, interrupted, poisoned, or have nowhere to write: real processes, real signals."""

import ctypes
import json
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable

import pytest

from precision_time.flows.clusters.scratch import PREFIX
from precision_time.storage.timings import TimingsDataset
from precision_time.tests.faults.marked_processes import WAIT_S, Campaign, assert_whole
from precision_time.tests.faults.prefect_server import PrefectServer

pytestmark = pytest.mark.faults


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
    assert error["got"].startswith("nothing is left to measure: the cells without timings were refused")
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
    message = err.splitlines()[-1]
    assert "warmup_steps" in message
    assert "3" in message
    assert "9" in message
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
    """Without this capability root obeys file modes too; for other users the call fails and changes nothing."""
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
