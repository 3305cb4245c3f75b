"""The loop over the cells of a campaign: limits, retries, cells side by side, and interrupts."""

import io
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from precision_time.flows.campaigns import campaign
from precision_time.flows.campaigns.cell_loop import CellStoppedError, MeasuredCells, measure_missing, watch_wait
from precision_time.flows.campaigns.interrupts import Interrupts, catch_interrupts
from precision_time.flows.campaigns.progress import CampaignProgress
from precision_time.flows.campaigns.summary import markdown_report, summarise
from precision_time.flows.planning.budget import Budget
from precision_time.flows.planning.plan import CampaignPlan, PlannedCell, plan_campaign
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.storage.errors import ClusterLostError, NoWorkersError, StorageFullError
from precision_time.storage.schema import CellOutcome
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.gangs.leases import LeaseWait
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tests.flows.campaigns import made_up
from precision_time.tests.flows.campaigns.made_up import make_outcome, make_spec

MakePlan = Callable[..., CampaignPlan]


@pytest.fixture
def make_plan(tmp_path: Path, device: ProbeReport) -> MakePlan:
    """A plan of eight cells, which run in the order of the grid; further keys of the campaign can be given."""

    def make(**changes: object) -> CampaignPlan:
        return made_up.make_plan(make_spec(tmp_path, **changes), device)

    return make


def run(plan: CampaignPlan, measure: Callable[[PlannedCell], CellOutcome], **options: Any) -> MeasuredCells:
    with CampaignProgress(plan, stream=io.StringIO()) as progress:
        return measure_missing(plan, measure=measure, progress=progress, budget=Budget.of(plan.spec), **options)


def test_max_cells_ends_a_run_that_says_so_and_what_is_left(make_plan: MakePlan) -> None:
    plan = make_plan(max_cells=3)
    measured = run(plan, make_outcome)
    assert list(measured.outcomes) == [planned.cell_id for planned in plan.cells[:3]]
    result = summarise(plan, measured.outcomes, rows={}, duration_s=1.0, ended_by=measured.ended_by)
    assert (result.status, result.ended_by, result.cells_left) == ("partial", "max_cells 3", 5)
    assert "ended by max\\_cells 3; 5 cells were not tried" in markdown_report(result, [])


def test_a_limit_that_leaves_nothing_out_is_not_blamed(make_plan: MakePlan) -> None:
    measured = run(make_plan(max_cells=8, max_failures=1, max_hours=1), make_outcome)
    assert (len(measured.outcomes), measured.ended_by) == (8, "")


def test_cells_within_max_cells_keep_their_attempts(make_plan: MakePlan) -> None:
    asked: list[str] = []

    def fail(planned: PlannedCell) -> CellOutcome:
        asked.append(planned.cell_id)
        return make_outcome(planned, cause="signal 9")

    plan = make_plan(max_cells=1, max_attempts=3)
    assert run(plan, fail).ended_by == "max_cells 1"
    assert asked == [plan.cells[0].cell_id] * 3


def test_max_failures_counts_cells_that_failed_and_not_what_is_refused(make_plan: MakePlan) -> None:
    plan = make_plan(max_failures=2, max_attempts=1)
    causes = iter(["precision-unsupported", "signal 9", "", "timed out"])
    measured = run(plan, lambda planned: make_outcome(planned, cause=next(causes)))
    assert (len(measured.outcomes), measured.ended_by) == (4, "max_failures 2")


def test_max_hours_lets_the_cell_under_way_finish(make_plan: MakePlan) -> None:
    def measure(planned: PlannedCell) -> CellOutcome:
        time.sleep(0.4)
        return make_outcome(planned)

    plan = make_plan(max_hours=0.3 / 3600)
    measured = run(plan, measure)
    assert measured.ended_by == f"max_hours {plan.spec.max_hours:g}"
    assert len(measured.outcomes) <= 1


def test_max_hours_counts_from_the_start_of_the_run(make_plan: MakePlan) -> None:
    measured = run(make_plan(max_hours=0.5), make_outcome, started=time.monotonic() - 1801)
    assert (measured.outcomes, measured.ended_by) == ({}, "max_hours 0.5")


def test_hours_and_failures_are_compared_with_their_limits() -> None:
    budget = Budget(max_hours=0.5, max_failures=2)
    assert budget.forbid_any(elapsed_s=1799.0, failures=1) == ""
    assert budget.forbid_any(elapsed_s=1800.0, failures=1) == "max_hours 0.5"
    assert budget.forbid_any(elapsed_s=0.0, failures=2) == "max_failures 2"
    assert Budget().forbid_any(elapsed_s=1e9, failures=10**6) == Budget().forbid_new(cells=10**6) == ""


def test_as_many_cells_as_allowed_run_side_by_side_and_no_more_are_handed_over(make_plan: MakePlan) -> None:
    together = threading.Barrier(3, timeout=30)
    under_way, most = [0], [0]
    lock = threading.Lock()
    cells = 6

    def measure(planned: PlannedCell) -> CellOutcome:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        together.wait()
        with lock:
            under_way[0] -= 1
        return make_outcome(planned)

    measured = run(make_plan(max_cells=cells), measure, at_once=3)
    assert (len(measured.outcomes), most[0]) == (cells, 3)


def test_an_error_that_concerns_all_cells_lets_neighbours_finish_and_is_raised(make_plan: MakePlan) -> None:
    plan = make_plan()
    started, failed = threading.Event(), threading.Event()
    finished: list[str] = []

    def measure(planned: PlannedCell) -> CellOutcome:
        if planned is plan.cells[0]:
            assert started.wait(30)
            failed.set()
            raise StorageFullError("no room")
        started.set()
        assert failed.wait(30)
        finished.append(planned.cell_id)
        return make_outcome(planned)

    with pytest.raises(StorageFullError):
        run(plan, measure, at_once=2)
    assert finished == [plan.cells[1].cell_id]


def test_one_interrupt_ends_the_campaign_after_the_cell_under_way(make_plan: MakePlan) -> None:
    interrupts = Interrupts()

    def measure(planned: PlannedCell) -> CellOutcome:
        interrupts(signal.SIGINT, None)
        return make_outcome(planned)

    measured = run(make_plan(), measure, interrupts=interrupts)
    assert (len(measured.outcomes), measured.ended_by) == (1, "interrupted")


def test_an_interrupt_in_the_last_cell_is_answered_too(make_plan: MakePlan) -> None:
    interrupts, plan = Interrupts(), make_plan()

    def measure(planned: PlannedCell) -> CellOutcome:
        if planned is plan.cells[-1]:
            interrupts(signal.SIGINT, None)
        return make_outcome(planned)

    measured = run(plan, measure, interrupts=interrupts)
    assert (len(measured.outcomes), measured.ended_by) == (8, "interrupted")
    result = summarise(plan, measured.outcomes, rows={}, duration_s=1.0, ended_by=measured.ended_by)
    assert (result.status, result.end) == ("complete", "ended by interrupted; no cell was left to try")


def make_wait(seconds: float) -> LeaseWait:
    return LeaseWait(seconds=seconds, wanted=3, known=4, held=2, leases=1)


def test_an_interrupt_gives_up_a_cell_that_still_waits_for_workers(make_plan: MakePlan) -> None:
    interrupts, plan = Interrupts(), make_plan()
    stream = io.StringIO()
    under_way = threading.Barrier(2, timeout=30)

    def measure(planned: PlannedCell) -> CellOutcome:
        under_way.wait()
        if planned is plan.cells[0]:
            interrupts(signal.SIGINT, None)
            return make_outcome(planned)
        watch = watch_wait(planned, progress=progress, interrupts=interrupts)
        while True:
            watch(make_wait(20.0))
            time.sleep(0.01)

    with CampaignProgress(plan, stream=stream) as progress:
        measured = measure_missing(plan, measure=measure, progress=progress, at_once=2, interrupts=interrupts)
    assert (list(measured.outcomes), measured.ended_by) == ([plan.cells[0].cell_id], "interrupted")


def test_a_wait_for_workers_is_named_after_15_s_and_then_every_minute(make_plan: MakePlan) -> None:
    plan, stream = make_plan(), io.StringIO()
    with CampaignProgress(plan, stream=stream) as progress:
        watch = watch_wait(plan.cells[0], progress=progress, interrupts=Interrupts())
        for seconds in range(1, 140):
            watch(make_wait(float(seconds)))
    said = "mlp fp32 x1 b8: waiting for 3 free workers: 2 of 4 are held by 1 lease of others, for"
    assert stream.getvalue().splitlines() == [f"{said} {waited} so far" for waited in ("15 s", "1 m 15 s", "2 m 15 s")]


def test_the_time_of_a_cell_begins_when_it_has_its_workers(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("precision_time.flows.campaigns.progress.time.monotonic", lambda: clock[0])
    plan, stream = make_plan(), io.StringIO()
    progress = CampaignProgress(plan, stream=stream)
    progress.start_cell(plan.cells[0])
    clock[0] = 3600.0
    progress.show_wait(plan.cells[0], make_wait(1.0))
    clock[0] += 5.0
    progress.finish_cell(plan.cells[0], make_outcome(plan.cells[0]), is_last_attempt=True)
    assert "mlp fp32 x1 b8: recorded (5 s), about 35 s left" in stream.getvalue()


@pytest.mark.parametrize("error", [ClusterLostError("the scheduler is gone"), NoWorkersError("no worker is left")])
def test_a_lost_cluster_ends_a_run_that_has_recorded_something_and_breaks_any_other(
    make_plan: MakePlan, error: Exception
) -> None:
    plan = make_plan()

    def lose(planned: PlannedCell) -> CellOutcome:
        if planned is plan.cells[first_lost]:
            raise error
        return make_outcome(planned)

    first_lost = 2
    measured = run(plan, lose)
    assert (len(measured.outcomes), measured.ended_by) == (2, f"the loss of the cluster ({error})")
    first_lost = 0
    with pytest.raises(type(error)):
        run(plan, lose)


def test_what_is_raised_in_the_loop_stops_the_cells_and_runs_their_clean_up(make_plan: MakePlan) -> None:
    plan = make_plan()
    cleaned: list[str] = []
    under_way = threading.Barrier(3, timeout=30)

    def measure(planned: PlannedCell) -> CellOutcome:
        try:
            under_way.wait()
            while True:
                time.sleep(0.01)
        except CellStoppedError:
            cleaned.append(planned.cell_id)
            raise

    def cancel() -> None:
        under_way.wait()
        signal.raise_signal(signal.SIGINT)
        while not interrupts.requested:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    with catch_interrupts() as interrupts:
        threading.Thread(target=cancel).start()
        with pytest.raises(KeyboardInterrupt):
            run(plan, measure, at_once=2, interrupts=interrupts)
    assert sorted(cleaned) == sorted(planned.cell_id for planned in plan.cells[:2])


def test_ctrl_c_means_what_it_meant_after_the_block() -> None:
    before = signal.getsignal(signal.SIGINT)
    with catch_interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_cell_whose_task_never_ran_it_is_measured_all_the_same(make_plan: MakePlan) -> None:
    def break_down(planned: PlannedCell, run: Callable[[], CellOutcome]) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_exception(ConnectionError("the API of the pages is away"))
        return future

    assert len(run(make_plan(), make_outcome, submit=break_down).outcomes) == 8


def test_batches_are_chosen_by_what_came_of_those_before(make_plan: MakePlan) -> None:
    plan = make_plan()
    counts: list[int] = []

    def choose(outcomes: Any) -> list[PlannedCell]:
        counts.append(len(outcomes))
        return list(plan.cells[len(outcomes) : len(outcomes) + 2]) if len(outcomes) < 6 else []

    measured = run(plan, make_outcome, choose=choose, at_once=2)
    assert len(measured.outcomes) == 6
    assert sorted(set(counts)) == [0, 2, 4, 6]


def test_a_cell_that_was_refused_here_before_is_not_tried_again(
    tmp_path: Path, probe: Callable[[str], ProbeReport]
) -> None:
    values = {"name": "a", "models": ["mlp"], "precisions": ["fp32"], "gpus": [1, 2], "batch_sizes": [8]}
    spec = CampaignSpec.model_validate(values | {"data": str(tmp_path / "data")})
    first, other = plan_campaign(spec, probe=probe).cells
    dataset = TimingsDataset(spec.data)
    dataset.record_outcome(make_outcome(first, cause="precision-unsupported"))
    dataset.record_outcome(make_outcome(other, cause="signal 9"))
    plan = plan_campaign(spec, probe=probe)
    assert plan.missing == [plan.cells[1]]
    assert [planned.state for planned in plan.cells] == ["refused", "missing"]
    result = summarise(plan, {}, rows={}, duration_s=1.0)
    assert [(cell.status, cell.cause) for cell in result.failed] == [("refused", "precision-unsupported")]
    assert result.end == ""
    again = summarise(plan, {other.cell_id: make_outcome(other)}, rows={}, duration_s=1.0)
    assert (again.status, again.cells_left) == ("partial", 0)
    refused = "nothing is left to measure: the cells without timings were refused and are not tried again (cells: 1)"
    assert again.end == refused
    assert "This run: nothing is left to measure" in markdown_report(again, [])


def test_cells_that_need_no_try_to_be_refused_take_no_time_and_come_last(
    tmp_path: Path, probe: Callable[[str], ProbeReport]
) -> None:
    values = {"name": "a", "models": ["mlp"], "precisions": ["fp32"], "gpus": [1, 2], "batch_sizes": [8]}
    options = {"strategies": ["fsdp", "ddp"], "compression": ["none", "bf16"], "data": str(tmp_path / "data")}
    plan = plan_campaign(CampaignSpec.model_validate(values | options), probe=probe)
    runs = [
        planned.cell.strategy == "ddp" and (planned.cell.compression == "none" or planned.cell.world_size == 2)
        for planned in plan.cells
    ]
    assert [planned.state for planned in plan.cells] == ["missing" if can else "will be refused" for can in runs]
    assert [planned.estimated_s > 0 for planned in plan.cells] == runs
    assert sorted(planned.place for planned in plan.cells if planned in plan.missing) == [0, 1, 2]
    assert (plan.cells_to_measure, plan.to_dict()["cells_to_refuse"]) == (3, 5)
    assert plan.estimated_s == pytest.approx(sum(planned.estimated_s for planned in plan.missing))

    dataset = TimingsDataset(plan.spec.data)
    assert campaign._refuse_unstarted(plan, dataset) == 5
    again = plan_campaign(plan.spec, probe=probe)
    assert [planned.state for planned in again.cells] == ["missing" if can else "refused" for can in runs]
    assert {outcome.cause for outcome in dataset.outcomes()} == {"strategy-unsupported", "option-unsupported"}
