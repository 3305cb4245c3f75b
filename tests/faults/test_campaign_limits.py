"""Campaigns that are stopped twice, cancelled, or lose Prefect's server: the data stays whole and no rank is left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from precision_time.storage.timings import TimingsDataset
from precision_time.tests.faults.marked_processes import RANKS, WAIT_S, Campaign, assert_whole
from precision_time.tests.faults.prefect_server import PrefectServer
from precision_time.tests.processes import wait_for

pytestmark = pytest.mark.faults

#: Ranks of a cancelled run end within seconds; a busy machine gets some more.
CANCELLED_S = 20.0
#: A rank that would take an hour, beside good ones.
SLOW_MODEL = "import time\n\n\ndef make():\n    time.sleep(3600)\n"
#: A rank whose counters say that others use all of the CPU; a real scheduler would still give it bursts.
CROWDED_MODEL = """\
import dataclasses

from precision_time.tasks.ranks import conditions
from precision_time.tasks.workloads import build_workload

count = conditions.read_cpu_times


def count_others():
    seen = count()
    return dataclasses.replace(seen, at=100 * seen.at, busy_s=seen.total_s, own_s=0.0)


def make():
    conditions.read_cpu_times = count_others
    return build_workload("mlp")
"""


def test_a_second_ctrl_c_stops_the_cell_under_way_and_blames_it_for_nothing(campaign: Campaign) -> None:
    (campaign.folder / "slow.py").write_text(SLOW_MODEL, encoding="utf-8")
    campaign.write(models="[slow:make]", gpus="[1]")
    process = campaign.start()
    campaign.wait_for_rank()
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(3)
    assert process.poll() is None, "one Ctrl-C lets the cell under way finish"
    assert campaign.living(RANKS)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130, err
    assert "Traceback" not in err, err
    campaign.assert_nothing_is_left()
    dataset = TimingsDataset(str(campaign.data))
    assert dataset.check() == []
    assert (dataset.outcomes(), dataset.recorded_cells()) == ([], set())


def test_a_prefect_server_that_is_stopped_and_started_again_costs_no_cell(
    campaign: Campaign, server: PrefectServer
) -> None:
    campaign.write()
    campaign.environment["PREFECT_API_URL"] = server.url
    process = campaign.start()
    campaign.wait_for_cells(process, 1)
    server.stop()
    campaign.wait_for_cells(process, 2)
    server.start()
    _, err = process.communicate(timeout=3 * WAIT_S)
    assert process.returncode == 0, err
    assert_whole(campaign.data, cells=4)
    server.assert_caught_up(cells=4)
    campaign.assert_nothing_is_left()


def test_a_campaign_of_starved_cells_ends_with_the_reason_and_is_no_empty_success(
    campaign: Campaign, standing_server: PrefectServer
) -> None:
    campaign.environment["PREFECT_API_URL"] = standing_server.url
    (campaign.folder / "crowded.py").write_text(CROWDED_MODEL, encoding="utf-8")
    campaign.write(models="[crowded:make]", gpus="[1]")
    process = campaign.start()
    out, err = process.communicate(timeout=3 * WAIT_S)
    assert process.returncode == 5, err
    result = json.loads(out)
    assert (result["status"], result["cells_recorded"], result["rows"]) == ("failed", 0, 0)
    assert {cell["cause"] for cell in result["failed"]} == {"contended"}
    assert "of the host's CPU time in every measured step" in err
    assert TimingsDataset(str(campaign.data)).recorded_cells() == set()
    campaign.assert_nothing_is_left()


@pytest.mark.long
def test_a_prefect_server_that_never_comes_back_costs_only_its_pages(campaign: Campaign, server: PrefectServer) -> None:
    campaign.write(gpus="[1]")
    campaign.environment |= {"PREFECT_API_URL": server.url, "PREFECT_CLIENT_MAX_RETRIES": "1"}
    process = campaign.start()
    campaign.wait_for_cells(process, 1)
    server.stop()
    _, err = process.communicate(timeout=3 * WAIT_S)
    assert process.returncode == 0, err
    assert "Prefect has no result of the run" in err
    assert_whole(campaign.data, cells=2)
    campaign.assert_nothing_is_left()


def test_a_run_cancelled_on_its_page_ends_its_ranks_and_is_shown_as_cancelled(
    campaign: Campaign, server: PrefectServer
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.states import Cancelling

    (campaign.folder / "slow.py").write_text(SLOW_MODEL, encoding="utf-8")
    campaign.environment["PREFECT_API_URL"] = server.url
    prefect = [sys.executable, "-m", "prefect"]
    subprocess.run(
        [*prefect, "work-pool", "create", "--type", "process", "campaigns"],
        env=campaign.environment, check=True, capture_output=True,
    )  # fmt: skip
    worker = subprocess.Popen(
        [*prefect, "worker", "start", "--pool", "campaigns"],
        env=campaign.environment | {"PREFECT_WORKER_QUERY_SECONDS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    spec = {
        "name": "cancelled", "models": ["slow:make"], "precisions": ["fp32"], "gpus": [1], "batch_sizes": [4],
        "device": "cpu", "data": str(campaign.data),
    }  # fmt: skip
    with temporary_settings({PREFECT_API_URL: server.url}), get_client(sync_client=True) as client:
        deployment = client.create_deployment(
            flow_id=client.create_flow_from_name("profiling-campaign"),
            name="trial",
            work_pool_name="campaigns",
            entrypoint="precision_time.flows.campaigns.campaign:profiling_campaign",
            path=str(campaign.folder),
            enforce_parameter_schema=False,
        )
        run = client.create_flow_run_from_deployment(deployment, parameters={"spec": spec})
        campaign.wait_for_rank()
        client.set_flow_run_state(run.id, Cancelling())
        wait_for(lambda: not campaign.living(RANKS), seconds=CANCELLED_S, what="the end of the rank", poll_s=0.1)

        def read_end() -> Any:
            state = client.read_flow_run(run.id).state
            return state if state and state.is_final() else None

        state = wait_for(read_end, seconds=WAIT_S, what="the end of the run")
        assert state.is_cancelled(), state
    worker.send_signal(signal.SIGINT)
    worker.wait(timeout=WAIT_S)
    campaign.assert_nothing_is_left()
    assert TimingsDataset(str(campaign.data)).outcomes() == []


def test_ten_thousand_cells_are_planned_in_little_memory_and_time() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "benchmarks" / "bench_plan.py")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    figures = json.loads(done.stdout)
    assert figures["cells"] == 10_000
    assert figures["peak_memory_bytes"] < 500e6
    assert figures["read_s"] + figures["plan_s"] < 10  # it takes less than one


def test_a_prefect_server_that_is_absent_from_the_start_is_named_and_nothing_hangs(campaign: Campaign) -> None:
    campaign.write()
    campaign.environment["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
    process = campaign.start()
    out, err = process.communicate(timeout=2 * WAIT_S)
    assert (process.returncode, out) == (2, "")
    assert "the Prefect API does not answer" in json.loads(err.splitlines()[-1])["what"]
    campaign.assert_nothing_is_left()
