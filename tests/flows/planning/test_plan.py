"""The plan of a campaign on a cluster: that it fills the cluster, its expected duration, and what it refuses."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from precision_time.flows.campaigns.progress import CampaignProgress
from precision_time.flows.ground.settings_file import build_model, read_document
from precision_time.flows.planning import plan as plan_module
from precision_time.flows.planning.plan import CampaignPlan, PlannedCell, plan_campaign
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.storage.errors import InputError
from precision_time.tasks.gangs.leases import LeaseWait
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tests.flows.made_up import make_outcome

PAPER_GRID = Path(__file__).parents[3] / "deploy" / "campaigns" / "paper-grid.yaml"
MakeDevice = Callable[..., ProbeReport]


@pytest.fixture
def make_device(device: ProbeReport) -> MakeDevice:
    """Hosts of 8 GPUs, or of 8 CPU workers, each."""

    def make(device_type: str, *, hosts: int) -> ProbeReport:
        environment = replace(device.environment, device_type=device_type)
        return replace(device, environment=environment, device_count=8, worker_count=8 * hosts, host_count=hosts)

    return make


def make_spec(**changes: object) -> CampaignSpec:
    values = {"name": "trial", "models": ["mlp"], "precisions": ["fp32"], "gpus": [1], "batch_sizes": [8]}
    return CampaignSpec.model_validate(values | changes)


def make_plan(
    spec: CampaignSpec, device: ProbeReport, *, recorded: Callable[[int], bool] | None = None
) -> CampaignPlan:
    """A plan in which each cell takes 10 s."""
    cells = tuple(
        PlannedCell(
            cell=cell, cell_id=f"{number:016x}", is_recorded=bool(recorded and recorded(cell.world_size)),
            estimated_s=10.0, place=number,
        )
        for number, cell in enumerate(spec.cells())
    )  # fmt: skip
    return CampaignPlan(spec=spec, device=device, cells=cells)


def test_the_paper_grid_fills_eight_hosts_of_eight_gpus(make_device: MakeDevice) -> None:
    spec = build_model(CampaignSpec, read_document(PAPER_GRID))
    plan = make_plan(spec, make_device("cuda", hosts=8))
    assert plan.at_once == 64
    # Of 336 cells a seventh has each width, and all 64 GPUs are busy: 48 x (1 + 2 + ... + 64) / 64 turns.
    assert plan.estimated_s == pytest.approx(48 * 127 / 64 * 10.0)


def test_no_more_cells_start_than_gpus_are_there_for_the_narrowest_that_is_missing(make_device: MakeDevice) -> None:
    spec = make_spec(gpus=[1, 16], gpus_per_node=8)
    assert make_plan(spec, make_device("cuda", hosts=8)).at_once == 64
    assert make_plan(spec, make_device("cuda", hosts=8), recorded=lambda ranks: ranks == 1).at_once == 4
    assert make_plan(make_spec(), make_device("cuda", hosts=1000)).at_once == 256


def test_on_cpus_each_host_measures_one_cell(make_device: MakeDevice) -> None:
    spec = make_spec(gpus=[1, 2, 4, 16], gpus_per_node=8, batch_sizes=[8, 16])
    plan = make_plan(spec, make_device("cpu", hosts=4))
    assert plan.at_once == 4
    assert plan.is_one_per_host
    # Six cells of one host, two of two hosts.
    assert plan.estimated_s == pytest.approx((6 + 2 * 2) / 4 * 10.0)


def test_what_the_campaign_says_of_cells_at_once_holds(make_device: MakeDevice) -> None:
    for device_type in ("cpu", "cuda"):
        plan = make_plan(make_spec(batch_sizes=[1, 2, 3, 4], cells_at_once=2), make_device(device_type, hosts=4))
        assert (plan.at_once, plan.is_one_per_host) == (2, False)
        assert plan.estimated_s == pytest.approx(20.0)


def test_the_time_left_counts_a_cell_by_its_share_of_the_cluster(
    make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("precision_time.flows.campaigns.progress.time.monotonic", lambda: clock[0])
    plan = make_plan(make_spec(gpus=[1, 8], batch_sizes=[1, 2]), make_device("cuda", hosts=1))
    progress = CampaignProgress(plan, stream=io.StringIO())
    narrow, wide = ([planned for planned in plan.cells if planned.cell.world_size == ranks] for ranks in (1, 8))
    progress.start_cell(narrow[0])
    clock[0] = 10.0
    progress.finish_cell(narrow[0], make_outcome(narrow[0]), is_last_attempt=True)
    assert progress.seconds_left == pytest.approx(10.0 + 10.0 + 10.0 / 8)
    progress.start_cell(narrow[1])
    progress.start_cell(wide[0])
    clock[0] = 14.0
    assert progress.seconds_left == pytest.approx(21.25 - 4.0 - 4.0 / 8)


def test_of_many_cells_that_wait_one_speaks_for_all(make_device: MakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("precision_time.flows.campaigns.progress.time.monotonic", lambda: clock[0])
    plan = make_plan(make_spec(batch_sizes=[1, 2, 3]), make_device("cuda", hosts=1))
    stream = io.StringIO()
    progress = CampaignProgress(plan, stream=stream)

    def let_wait(cells: list[PlannedCell], *, seconds: int) -> list[str]:
        before = len(stream.getvalue().splitlines())
        for _ in range(seconds):
            clock[0] += 1.0
            for planned in cells:
                wait = LeaseWait(seconds=clock[0], wanted=1, known=8, held=8, leases=8)
                progress.show_wait(planned, wait)
        return [line.split(": ")[0] for line in stream.getvalue().splitlines()[before:]]

    assert let_wait(list(plan.cells), seconds=20) == ["mlp fp32 x1 b1 and 2 more"]
    # The first has its workers now.
    assert let_wait(list(plan.cells[1:]), seconds=20) == ["mlp fp32 x1 b2 and 1 more"]
    assert let_wait([plan.cells[2]], seconds=20) == ["mlp fp32 x1 b3"]


def test_cells_that_are_wider_than_a_job_of_slurm_are_refused_before_a_job_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "_probe_once", lambda *_: pytest.fail("the cluster was opened"))
    spec = {"cluster": "slurm", "device": "cpu", "gpus": [1, 2, 4], "data": str(tmp_path)}
    said = r"got: gpus: 2, 4; slurm\.workers_per_job: 1;.*workers_per_job: 4\}, or gpus_per_node: 1"
    with pytest.raises(InputError, match=said):
        plan_campaign(make_spec(**spec))
    with pytest.raises(InputError, match=r"got: gpus: 4; slurm\.workers_per_job: 3;"):
        plan_campaign(make_spec(**spec, slurm={"workers_per_job": 3}))


@pytest.mark.parametrize("room", [{"slurm": {"workers_per_job": 4}}, {"gpus_per_node": 1}])
def test_cells_that_fit_the_jobs_of_slurm_are_planned(
    tmp_path: Path, make_device: MakeDevice, room: dict[str, object]
) -> None:
    spec = make_spec(cluster="slurm", device="cpu", gpus=[1, 4], data=str(tmp_path), **room)
    assert len(plan_campaign(spec, probe=lambda wanted: make_device("cpu", hosts=4)).cells) == 2


def test_cells_on_more_hosts_than_there_are_are_refused(tmp_path: Path, make_device: MakeDevice) -> None:
    spec = make_spec(cluster="tcp://h:1", device="cpu", gpus=[2, 6], gpus_per_node=2, data=str(tmp_path))
    with pytest.raises(InputError, match=r"more hosts than the cluster has; got: 3; expected: at most 2"):
        plan_campaign(spec, probe=lambda wanted: make_device("cpu", hosts=2))
