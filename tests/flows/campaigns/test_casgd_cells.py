"""CA-SGD cells in campaigns: the checks of a file, the plan of their times, and the end of their ranks."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import yaml
from distributed import Client, LocalCluster

from precision_time.flows.campaigns.cell_loop import CellStoppedError, _Running
from precision_time.flows.campaigns.measure_cell import measure_cell
from precision_time.flows.planning.plan import CampaignPlan, PlannedCell, plan_campaign
from precision_time.flows.planning.spec import CampaignSpec, read_campaign
from precision_time.storage.errors import InputError, PrecisionUnsupportedError
from precision_time.storage.schema import CellOutcome
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.casgd_cells import launch
from precision_time.tasks.gangs import verdicts
from precision_time.tasks.gangs.leases import gang_state
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tasks.ranks.refusals import refuse_cell

Probe = Callable[[str], ProbeReport]
EXAMPLE = Path(__file__).parents[3] / "deploy" / "campaigns" / "casgd.yaml"


def make_spec(folder: Path, **changes: object) -> CampaignSpec:
    values = {
        "name": "casgd",
        "models": ["casgd-logistic-n28"],
        "strategies": ["columns"],
        "precisions": ["fp32"],
        "gpus": [1, 2],
        "batch_sizes": [16],
        "gradient_accumulation_steps": [1, 4],
        "warmup_steps": 1,
        "measured_steps": 4,
        "seconds_per_cell": 20,
        "timeout_per_cell": 60,
        "data": str(folder / "data"),
    }
    return CampaignSpec.model_validate(values | changes)


def refusal(folder: Path, probe: Probe, **changes: object) -> str:
    with pytest.raises(InputError) as caught:
        plan_campaign(make_spec(folder, **changes), probe=probe)
    return str(caught.value)


def test_the_example_pairs_s_batch_precision_and_ranks_beside_a_network(
    tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = plan_campaign(read_campaign(EXAMPLE), probe=probe)
    solver = [planned.cell for planned in plan.cells if planned.cell.strategy == "columns"]
    assert len(solver) == 3 * 2 * 2 * 2  # s x batch x precision x ranks
    assert {cell.model for cell in solver} == {"casgd-logistic-n28"}
    others = [planned.cell for planned in plan.cells if planned.cell not in solver]
    assert {(cell.model, cell.gradient_accumulation_steps) for cell in others} == {("mlp", 1)}
    assert {refuse_cell(cell) for cell in others} == {None}
    assert len({planned.cell_id for planned in plan.cells}) == len(plan.cells)


@pytest.mark.parametrize(
    "changes",
    [
        {"strategies": ["ddp", "columns"]},
        {"models": ["mlp", "casgd-logistic-n28"], "strategies": ["columns", "ddp"]},
        {"models": ["casgd-logistic-n28", "gpt2_mini"], "strategies": ["columns", "ddp", "columns-paper"]},
        {"precisions": ["fp32", "bf16"]},
        {"strategies": ["columns", "columns-bf16-gram"]},
        {"compiled": [False, True], "compression": ["none", "bf16"]},
        {"models": ["casgd-poisson-n1", "casgd-squared-n5"]},
    ],
    ids=["ddp", "beside mlp", "policies", "pure bf16", "gram in fp32", "options", "a rank without a column"],
)
def test_pairs_that_make_no_sense_are_refused_with_what_to_exclude(
    tmp_path: Path, probe: Probe, changes: dict[str, object]
) -> None:
    message = refusal(tmp_path, probe, **changes)
    suggested = yaml.safe_load("exclude: " + re.search(r"exclude: (\[.*\]), or a campaign file", message)[1])
    plan = plan_campaign(make_spec(tmp_path, **changes, **suggested), probe=probe)
    assert any(planned.cell.model.startswith("casgd-") for planned in plan.cells)


@pytest.mark.parametrize("model", ["casgd-hinge-n28", "casgd-logistic", "casgd-logistic-n0", "casgd-logistic-n028"])
def test_a_model_that_is_none_is_refused_when_the_file_is_read(tmp_path: Path, model: str) -> None:
    with pytest.raises(ValueError, match=r"not a model of CA-SGD.*casgd-OBJECTIVE-nCOLUMNS, OBJECTIVE one of logistic"):
        make_spec(tmp_path, models=[model])


def test_fp64_is_no_precision_of_a_campaign(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"fp64 training is not covered.*ask for fp32"):
        make_spec(tmp_path, precisions=["fp64"])


def test_ranks_on_several_hosts_are_refused(tmp_path: Path, probe: Probe) -> None:
    message = refusal(tmp_path, probe, gpus=[2], gpus_per_node=1, cluster="tcp://127.0.0.1:1")
    assert "casgd-logistic-n28 on 2 hosts: its ranks stand on one" in message


def test_a_gpu_is_no_place_for_the_solver_of_a_campaign(tmp_path: Path, device: ProbeReport) -> None:
    on_gpu = replace(device, environment=replace(device.environment, device_type="cuda", gpu="h100"))
    assert "expected: device: cpu" in refusal(tmp_path, lambda wanted: on_gpu)


def test_without_mpi_several_ranks_are_refused_before_anything_starts(
    tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_find_mpiexec", lambda: None)
    message = refusal(tmp_path, probe)
    assert "no mpiexec" in message
    assert "precision-time[mpi]" in message
    assert len(plan_campaign(make_spec(tmp_path, gpus=[1]), probe=probe).cells) == 2


def test_what_pytorch_cannot_run_here_the_solver_may(tmp_path: Path, device: ProbeReport) -> None:
    lacking = replace(device, unsupported={"amp_fp16": "no kernels"})
    spec = make_spec(tmp_path, precisions=["fp32", "amp_fp16"])
    assert len(plan_campaign(spec, probe=lambda wanted: lacking).cells) == 8
    with pytest.raises(PrecisionUnsupportedError, match="amp_fp16"):
        plan_campaign(
            make_spec(tmp_path, models=["mlp"], strategies=["ddp"], precisions=["amp_fp16"]),
            probe=lambda wanted: lacking,
        )


def test_a_cell_is_planned_by_its_size_and_at_most_by_its_cap(tmp_path: Path, probe: Probe) -> None:
    changes = {"models": ["casgd-logistic-n28", "casgd-logistic-n20000"], "gradient_accumulation_steps": [1, 64]}
    plan = plan_campaign(make_spec(tmp_path, batch_sizes=[64], **changes), probe=probe)
    by_size = {
        (p.cell.model[-3:], p.cell.gradient_accumulation_steps, p.cell.world_size): p.estimated_s for p in plan.cells
    }
    assert by_size["n28", 1, 1] < by_size["n28", 64, 1] < by_size["000", 64, 1] < 20 + 5
    assert by_size["n28", 1, 1] < by_size["n28", 1, 2]
    shown = plan.to_dict()["cells"]
    assert {cell["strategy"] for cell in shown} == {"columns"}
    assert all(cell["estimated_s"] > 0 for cell in shown)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def a_busy_machine_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share their cores with other tests are not timed here, so their times may be of no use."""
    monkeypatch.setattr(verdicts, "MOST_SPREAD", float("inf"))
    monkeypatch.setattr(verdicts, "MOST_OTHERS", 2.0)


class Campaign:
    """A planned campaign whose cells are measured one at a time, as the flow does it."""

    def __init__(self, folder: Path, probe: Probe, client: Client, **changes: object) -> None:
        self.folder, self.client = folder, client
        self.plan: CampaignPlan = plan_campaign(make_spec(folder, **changes), probe=probe)
        self.dataset = TimingsDataset(self.plan.spec.data)

    def measure(self, planned: PlannedCell) -> CellOutcome:
        return measure_cell(
            planned, plan=self.plan, dataset=self.dataset, client=self.client, scratch=self.folder / "scratch"
        )


def list_ranks() -> list[psutil.Process]:
    """Every process of the ranks of a CA-SGD cell, with mpiexec."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if "precision_time.tasks.casgd_cells.rank" in (process.info["cmdline"] or [])
    ]


def await_ranks(number: int, *, seconds: float = 60.0) -> list[psutil.Process]:
    """Wait until there are ``number`` rank processes, and return them; for 0 also mpiexec must have ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ranks = [process for process in list_ranks() if not number or process.name().startswith("python")]
        if len(ranks) == number:
            return ranks
        time.sleep(0.05)
    raise AssertionError(f"{len(ranks)} ranks instead of {number}")


@pytest.mark.mpi
def test_solver_and_network_are_measured_once_and_hold_their_workers(
    tmp_path: Path, probe: Probe, client: Client
) -> None:
    campaign = Campaign(
        tmp_path, probe, client, models=["casgd-logistic-n28", "mlp"], strategies=["columns", "ddp"], gpus=[2],
        gradient_accumulation_steps=[4], measured_steps=20,
        exclude=[{"model": "mlp", "strategy": "columns"}, {"model": "casgd-logistic-n28", "strategy": "ddp"}],
    )  # fmt: skip
    (solver,) = [planned for planned in campaign.plan.cells if planned.cell.strategy == "columns"]
    outcomes: list[CellOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(campaign.measure(solver)))
    thread.start()
    await_ranks(2)
    (held,) = gang_state(client)["leases"].values()
    thread.join()
    assert len(held) == 2
    assert (outcomes[0].status, outcomes[0].message, outcomes[0].rows) == ("recorded", "", 2 * 21)
    again = campaign.measure(solver)
    assert (again.attempt, again.status) == (1, "recorded")
    measured = campaign.dataset.measurements()
    assert [(row.model, row.framework, row.world_size) for row in measured] == [("casgd-logistic-n28", "casgd", 2)]
    resumed = plan_campaign(campaign.plan.spec, probe=probe)
    assert {planned.cell.strategy: planned.state for planned in resumed.cells} == {
        "columns": "recorded",
        "ddp": "missing",
    }


@pytest.mark.mpi
@pytest.mark.faults
@pytest.mark.parametrize("victim", ["rank", "mpiexec", "worker"])
def test_a_killed_process_costs_its_cell_alone_and_leaves_no_rank(
    tmp_path: Path, probe: Probe, client: Client, victim: str
) -> None:
    campaign = Campaign(
        tmp_path, probe, client, gpus=[2], gradient_accumulation_steps=[4], measured_steps=10_000, timeout_per_cell=120
    )
    (planned,) = campaign.plan.cells
    outcomes: list[CellOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(campaign.measure(planned)))
    thread.start()
    ranks = await_ranks(2)
    starter = next(process for process in list_ranks() if process.name().startswith("mpiexec"))
    {"rank": ranks[1], "mpiexec": starter, "worker": starter.parent()}[victim].kill()
    thread.join(timeout=60)
    await_ranks(0, seconds=20)
    cause = "lost contact" if victim == "worker" else f"signal {signal.SIGKILL}"
    assert (outcomes[0].status, outcomes[0].cause) == ("failed", cause)
    assert [(outcome.cause, outcome.attempt) for outcome in campaign.dataset.outcomes()] == [(cause, 1)]
    # The next attempt finds free workers.
    short = Campaign(tmp_path, probe, client, gpus=[2], gradient_accumulation_steps=[4])
    outcome = short.measure(short.plan.cells[0])
    assert (outcome.status, outcome.message, outcome.attempt) == ("recorded", "", 2)


@pytest.mark.mpi
@pytest.mark.faults
def test_ranks_past_their_time_limit_are_ended_and_recorded_so(tmp_path: Path, probe: Probe, client: Client) -> None:
    campaign = Campaign(
        tmp_path, probe, client, gpus=[2], gradient_accumulation_steps=[4], measured_steps=10_000,
        seconds_per_cell=4, timeout_per_cell=4.5,
    )  # fmt: skip
    (planned,) = campaign.plan.cells
    thread_paused = threading.Thread(target=lambda: [os.kill(rank.pid, signal.SIGSTOP) for rank in await_ranks(2)])
    thread_paused.start()
    outcome = campaign.measure(planned)
    thread_paused.join()
    assert (outcome.status, outcome.cause) == ("failed", "timed out")
    await_ranks(0, seconds=10)


@pytest.mark.mpi
@pytest.mark.faults
def test_a_stopped_cell_ends_its_ranks_and_gives_its_workers_back(tmp_path: Path, probe: Probe, client: Client) -> None:
    campaign = Campaign(tmp_path, probe, client, gpus=[2], gradient_accumulation_steps=[4], measured_steps=10_000)
    running = _Running(planned=campaign.plan.cells[0], measure=campaign.measure)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            running()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    await_ranks(2)
    running.stop()
    thread.join(timeout=30)
    await_ranks(0, seconds=10)
    assert isinstance(raised[0], CellStoppedError)
    assert gang_state(client)["leases"] == {}


@pytest.mark.mpi
@pytest.mark.faults
def test_a_rank_out_of_memory_is_recorded_with_its_cause(tmp_path: Path, probe: Probe, client: Client) -> None:
    campaign = Campaign(
        tmp_path, probe, client, models=["casgd-logistic-n20000"], gpus=[2], batch_sizes=[512],
        gradient_accumulation_steps=[4], memory_limit_bytes=100 * 2**20,
    )  # fmt: skip
    outcome = campaign.measure(campaign.plan.cells[0])
    assert (outcome.status, outcome.cause) == ("failed", "memory-limit"), outcome.message
    await_ranks(0, seconds=10)
