"""One attempt at a cell: which workers it takes and when, what it records, and what it leaves to other campaigns."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from precision_time.flows.campaigns import measure_cell as measuring
from precision_time.flows.campaigns.summary import summarise
from precision_time.flows.planning.plan import CampaignPlan, PlannedCell
from precision_time.storage.errors import ClusterLostError, StorageError, StorageFullError
from precision_time.storage.schema import CellOutcome
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.gangs import profile_cell as profiling
from precision_time.tasks.gangs.record_cell import DISCARDED
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tasks.ranks.job import CellReceipt, RankJob, TraceLimits
from precision_time.tests.flows.campaigns.made_up import make_outcome, make_plan, make_spec

MEANWHILE = "recorded by another campaign meanwhile"


class FakeCluster:
    """Leases that are granted at once, after ``wait``; ranks that fail with signal 9 unless ``profile`` is set."""

    def __init__(self) -> None:
        self.leases: list[dict[str, Any]] = []
        self.is_held = self.is_clean = False
        self.wait: Callable[[], None] = lambda: None
        self.profile: Callable[[RankJob], Any] = self.fail
        self.jobs: list[RankJob] = []

    @contextlib.contextmanager
    def lease_workers(self, client: object, count: int, **options: Any) -> Iterator[SimpleNamespace]:
        self.leases.append({"count": count, **options})
        self.wait()
        self.is_held, self.is_clean = True, False
        try:
            yield SimpleNamespace(mark_clean=lambda: setattr(self, "is_clean", True))
        finally:
            self.is_held = False

    def profile_cell(self, job: RankJob, *, lease: object) -> CellReceipt:
        assert self.is_held
        self.jobs.append(job)
        return self.profile(job)

    def fail(self, job: RankJob) -> CellReceipt:
        return job.conclude(cause="signal 9", message="", host="here", started_at=0.0, duration_s=1.0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    cluster = FakeCluster()
    monkeypatch.setattr(measuring, "lease_workers", cluster.lease_workers)
    monkeypatch.setattr(profiling, "profile_cell", cluster.profile_cell)
    return cluster


@pytest.fixture
def plan(tmp_path: Path, device: ProbeReport) -> CampaignPlan:
    return make_plan(make_spec(tmp_path), device)


@pytest.fixture
def dataset(plan: CampaignPlan) -> TimingsDataset:
    return TimingsDataset(plan.spec.data)


def measure(planned: PlannedCell, plan: CampaignPlan, *, status: str = "running") -> CellOutcome:
    client = SimpleNamespace(scheduler=object(), status=status)
    dataset = TimingsDataset(plan.spec.data)
    return measuring.measure_cell(
        planned, plan=plan, dataset=dataset, client=client, scratch=Path(plan.spec.data).parent / "scratch"
    )


def pretend_recorded(monkeypatch: pytest.MonkeyPatch, planned: PlannedCell) -> None:
    monkeypatch.setattr(TimingsDataset, "recorded_cells", lambda self: {planned.cell_id})


def assert_nothing_is_added(plan: CampaignPlan, outcome: CellOutcome) -> None:
    result = summarise(plan, {outcome.cell_id: outcome}, rows={}, duration_s=1.0)
    assert (result.cells_recorded, result.cells_measured, result.rows_added) == (1, 0, 0)


def test_a_cell_that_another_campaign_has_recorded_meanwhile_is_not_measured_again(
    plan: CampaignPlan,
    dataset: TimingsDataset,
    cluster: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    planned = plan.cells[0]
    theirs = make_outcome(planned)
    dataset.record_outcome(theirs)
    pretend_recorded(monkeypatch, planned)
    outcome = measure(planned, plan)
    assert cluster.leases == []
    # Without rows, which this run did not add.
    assert outcome == replace(theirs, rows=0, message=MEANWHILE)
    assert capsys.readouterr().err.splitlines() == [f"mlp fp32 x1 b8: {MEANWHILE}"]
    assert dataset.outcomes() == [theirs]
    assert_nothing_is_added(plan, outcome)


@pytest.mark.parametrize("has_outcome", [True, False], ids=["written", "died before it was written"])
def test_a_cell_that_is_recorded_during_the_wait_for_workers_is_not_measured_again(
    plan: CampaignPlan,
    dataset: TimingsDataset,
    cluster: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    has_outcome: bool,
) -> None:
    planned = plan.cells[0]

    def wait() -> None:
        pretend_recorded(monkeypatch, planned)
        if has_outcome:
            dataset.record_outcome(make_outcome(planned))

    cluster.wait = wait
    outcome = measure(planned, plan)
    assert (cluster.jobs, cluster.is_held, cluster.is_clean) == ([], False, True)
    assert (outcome.status, outcome.rows, outcome.message) == ("recorded", 0, MEANWHILE)
    assert (outcome.cell_id, outcome.host == "here") == (planned.cell_id, has_outcome)
    assert len(dataset.outcomes()) == has_outcome


def test_an_attempt_is_numbered_after_the_wait_and_recorded_while_workers_are_held(
    plan: CampaignPlan, dataset: TimingsDataset, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, real_record = plan.cells[0], measuring.record_cell

    def record(dataset: TimingsDataset, receipt: CellReceipt) -> CellOutcome:
        assert cluster.is_held
        return real_record(dataset, receipt)

    monkeypatch.setattr(measuring, "record_cell", record)
    cluster.wait = lambda: dataset.record_outcome(make_outcome(planned, cause="signal 9"))
    outcome = measure(planned, plan)
    assert [(other.attempt, other.cause) for other in dataset.outcomes()] == [(1, "signal 9"), (2, "signal 9")]
    assert outcome == dataset.outcomes()[1]
    # A campaign that measures the same cell into the same data claims it so, and no other does.
    assert cluster.leases == [
        {"count": 1, "hosts": 1, "claim": f"{dataset.url} {planned.cell_id}", "alone": True, "watch": None}
    ]


def test_what_can_be_refused_without_a_start_takes_no_workers(
    tmp_path: Path, device: ProbeReport, cluster: FakeCluster
) -> None:
    plan = make_plan(make_spec(tmp_path, strategies=["fsdp"]), device)
    outcome = measure(plan.cells[0], plan)
    assert (outcome.status, outcome.cause, outcome.attempt) == ("refused", "strategy-unsupported", 1)
    assert "fsdp" in outcome.message
    assert TimingsDataset(plan.spec.data).outcomes() == [outcome]
    assert cluster.leases == []


def test_rows_that_come_second_are_announced_as_discarded_and_count_for_nothing(
    plan: CampaignPlan,
    cluster: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    discarded = replace(make_outcome(plan.cells[0]), rows=0, message=DISCARDED)
    monkeypatch.setattr(measuring, "record_cell", lambda *_: discarded)
    assert measure(plan.cells[0], plan) == discarded
    assert capsys.readouterr().err.splitlines() == ["mlp fp32 x1 b8: recorded before, discarded"]
    assert_nothing_is_added(plan, discarded)


def break_down(job: RankJob) -> CellReceipt:
    raise RuntimeError("the ranks went away")


def test_an_unforeseen_error_costs_the_cell_and_is_written_down(
    plan: CampaignPlan, dataset: TimingsDataset, cluster: FakeCluster
) -> None:
    cluster.profile = break_down
    for attempt in (1, 2):
        outcome = measure(plan.cells[0], plan)
        assert (outcome.status, outcome.cause, outcome.attempt) == ("failed", "exception", attempt)
    assert [outcome.message for outcome in dataset.outcomes()] == ["RuntimeError: the ranks went away"] * 2
    assert not cluster.is_held


def test_an_error_of_a_lost_cluster_is_no_fault_of_the_cell(
    plan: CampaignPlan, dataset: TimingsDataset, cluster: FakeCluster
) -> None:
    cluster.profile = break_down
    with pytest.raises(ClusterLostError):
        measure(plan.cells[0], plan, status="closed")
    assert dataset.outcomes() == []


def test_a_disk_that_fills_up_stops_the_campaign(
    plan: CampaignPlan, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise StorageFullError("no room")

    monkeypatch.setattr(measuring, "record_cell", fill)
    with pytest.raises(StorageError):
        measure(plan.cells[0], plan)


def test_traces_are_taken_until_their_quota_is_used_up(
    tmp_path: Path, device: ProbeReport, cluster: FakeCluster
) -> None:
    plan = make_plan(make_spec(tmp_path, traced_steps=3, max_trace_bytes=100 * 2**20), device)
    for number, stored in enumerate((0, 60, 60)):
        if stored:
            TimingsDataset(plan.spec.data).write_trace(f"{number:016x}", bytes(stored * 2**20))
        measure(plan.cells[0], plan)
    assert [job.trace for job in cluster.jobs] == [TraceLimits(steps=3, max_bytes=size * 2**20) for size in (64, 40, 0)]
    measure(plan.cells[0], make_plan(make_spec(tmp_path), device))
    assert cluster.jobs[-1].trace is None
