"""What the page of a running campaign shows: a table that fills, a bar, a report with pictures, a log and a name."""

import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from precision_time.flows.campaigns import live_grid
from precision_time.flows.campaigns.live_grid import LiveGrid
from precision_time.flows.ground.prefect_artifacts import LiveTable, ProgressArtifact
from precision_time.flows.planning.plan import CampaignPlan, PlannedCell, plan_campaign
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.storage.schema import CellOutcome, Measurement
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tests.flows.made_up import make_outcome, measure_by

Record = Callable[[str, Sequence[Measurement]], None]
WAIT_S = 60


def make_spec(folder: Path, **changes: object) -> CampaignSpec:
    values = {
        "name": "live", "models": ["mlp"], "precisions": ["fp32", "amp_bf16"], "gpus": [1, 2], "batch_sizes": [8],
        "data": str(folder / "data"), "max_attempts": 1,
    }  # fmt: skip
    return CampaignSpec.model_validate(values | changes)


def make_measurement(planned: PlannedCell, *, seconds: float) -> Measurement:
    cell = planned.cell
    return Measurement(
        source="campaign", model=cell.model, task_input="", gpu="cpu-test-2c", nodes=1, world_size=cell.world_size,
        precision=cell.precision, strategy="ddp", per_gpu_batch_size=cell.per_gpu_batch_size,
        gradient_accumulation_steps=1, framework="pytorch", iteration_time_s=seconds, cell_id=planned.cell_id,
        compute_time_s=seconds, communication_time_s=0.0, exposed_communication_s=0.0,
    )  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path, device: ProbeReport) -> CampaignPlan:
    return plan_campaign(make_spec(tmp_path), probe=lambda wanted: device)


@pytest.fixture
def live(plan: CampaignPlan) -> LiveGrid:
    """A grid outside a run, so that no page is written."""
    return LiveGrid(
        plan, dataset=TimingsDataset(plan.spec.data), table=LiveTable("t", description=""),
        bar=ProgressArtifact("b", description=""), fraction=lambda: 0.0,
    )  # fmt: skip


def test_a_cell_goes_from_waiting_over_measuring_to_what_came_of_it(
    plan: CampaignPlan, live: LiveGrid, record: Record
) -> None:
    first, second, third, _ = plan.cells
    states = []
    with live.show_cell(first) as show_outcome:
        states.append([row.state for row in live.rows()])
        record(plan.spec.data, [make_measurement(first, seconds=0.2)])
        show_outcome(make_outcome(first))
    with live.show_cell(second) as show_outcome:
        record(plan.spec.data, [make_measurement(second, seconds=0.1)])
        show_outcome(make_outcome(second))
    with live.show_cell(third) as show_outcome:
        show_outcome(make_outcome(third, cause="signal 9"))
    live.read_times()
    assert states[0] == ["measuring", "waiting", "waiting", "waiting"]
    assert (first.cell.precision, second.cell.precision) == ("fp32", "amp_bf16")
    shown = [(row.state, row.speedup_over_fp32, row.cause) for row in live.rows()]
    assert shown == [("recorded", 1.0, ""), ("recorded", 2.0, ""), ("failed", None, "signal 9"), ("waiting", None, "")]


def test_a_cell_that_was_stopped_waits_again(plan: CampaignPlan, live: LiveGrid) -> None:
    with contextlib.suppress(KeyboardInterrupt), live.show_cell(plan.missing[0]):
        raise KeyboardInterrupt
    assert {row.state for row in live.rows()} == {"waiting"}


def test_only_the_times_of_new_cells_are_read(
    plan: CampaignPlan, live: LiveGrid, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[set[str]] = []
    real = TimingsDataset.measurements
    monkeypatch.setattr(
        TimingsDataset, "measurements", lambda self, *, cells: read.append(set(cells)) or real(self, cells=cells)
    )
    for planned in plan.missing[:2]:
        record(plan.spec.data, [make_measurement(planned, seconds=0.1)])
        with live.show_cell(planned) as show_outcome:
            show_outcome(make_outcome(planned))
        live.read_times()
        live.read_times()
    assert read == [{planned.cell_id} for planned in plan.missing[:2]]
    assert [row.iteration_time_s for row in live.rows() if row.iteration_time_s is not None] == [0.1, 0.1]


def read_artifact(key: str) -> Any:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    artifacts = get_client(sync_client=True).read_artifacts(
        artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
    )
    return artifacts[0] if artifacts else None


def read_states() -> list[tuple[str, str]]:
    page = read_artifact("campaign-live")
    return [] if page is None else [(row["state"], row["iteration"]) for row in json.loads(page.data)]


@pytest.mark.usefixtures("prefect_server")
def test_the_page_of_a_run_shows_one_table_that_fills_and_then_a_report_with_pictures(
    tmp_path: Path, device: ProbeReport, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client

    from precision_time.flows.campaigns import campaign

    shown_states: list[list[tuple[str, str]]] = []

    def measure_cell(planned: PlannedCell, *, dataset: TimingsDataset, **_: object) -> CellOutcome:
        number = len(shown_states)
        deadline = time.monotonic() + WAIT_S
        states: list[tuple[str, str]] = []
        # Each cell goes on only when the table shows it as measuring, and the outcomes of the cells before it.
        expected = {"waiting": 3 - number, "measuring": 1, "recorded": min(number, 2), "failed": int(number > 2)}
        while Counter(state for state, _ in states) != Counter(expected) or (
            sum(bool(shown) for _, shown in states) != min(number, 2)
        ):
            assert time.monotonic() < deadline, f"the table of cell {number} never came: {states}"
            time.sleep(0.05)
            states = read_states()
        shown_states.append(states)
        if number == 2:
            return make_outcome(planned, cause="signal 9", message="rank 1 got\na signal")
        record(dataset.url, [make_measurement(planned, seconds=0.2 / (1 + number))])
        return make_outcome(planned)

    monkeypatch.setattr(live_grid, "EVERY_S", 0.05)
    measure_by(measure_cell, device=device, monkeypatch=monkeypatch)
    result = campaign.run_campaign(make_spec(tmp_path))

    assert len(shown_states) == 4
    assert sorted(state for state, _ in read_states()) == ["failed", "recorded", "recorded", "recorded"]
    assert (result.status, result.cells_recorded) == ("partial", 3)

    table, bar, page = (read_artifact(f"campaign-live{tail}") for tail in ("", "-progress", "-report"))
    with get_client(sync_client=True) as client:
        run = client.read_flow_run(table.flow_run_id)
        artifacts = [artifact for artifact in client.read_artifacts() if artifact.flow_run_id == run.id]
    assert len(artifacts) == 3
    assert (table.type, bar.type, bar.data, page.type) == ("table", "progress", 100.0, "markdown")
    assert table.description == "Campaign live on cpu-test-2c: partial"
    assert run.name == "live: 4 cells of mlp, up to 2 ranks"
    assert run.state.name == "Completed with failures"

    folder = tmp_path / "data" / "campaigns" / "v1" / "live"
    report = (folder / "report.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[([^\]]+)\]\(plots/([a-z]+\.png)\)", report)
    assert [name for _, name in pictures] == ["predicted.png", "gpus.png", "speedup.png"]
    assert all((folder / "plots" / name).read_bytes().startswith(b"\x89PNG") for _, name in pictures)
    assert "Predictions are those of" in report
    assert "signal 9. rank 1 got a signal" in report
    assert page.data.count("](data:image/png;base64,") == 3
    assert "plots/" not in page.data


@pytest.mark.usefixtures("prefect_server")
def test_the_log_of_a_run_says_what_it_plans_and_what_came_of_each_cell(
    tmp_path: Path,
    device: ProbeReport,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from precision_time.flows.campaigns import campaign

    def measure_cell(planned: PlannedCell, *, dataset: TimingsDataset, **_: object) -> CellOutcome:
        if planned.cell.world_size == 2:
            return make_outcome(planned, cause="timed out", message="after 5 s")
        record(dataset.url, [make_measurement(planned, seconds=0.2)])
        return make_outcome(planned)

    measure_by(measure_cell, device=device, monkeypatch=monkeypatch)
    with caplog.at_level("INFO", logger="prefect"):
        campaign.run_campaign(make_spec(tmp_path, precisions=["fp32"]))
    loggers = ("prefect.flow_runs", "prefect.task_runs")
    messages = [entry.getMessage() for entry in caplog.records if entry.name in loggers]
    assert any(line.startswith("live on cpu-test-2c: 2 cells, 0 recorded, 2 to measure, about ") for line in messages)
    assert "mlp fp32 x1 b8: recorded, 3 rows in 1.5 s" in messages
    assert "mlp fp32 x2 b8: failed after 1.5 s, timed out: after 5 s" in messages
    assert any(line.startswith("live: partial; 1 of 2 cells are recorded, 1 by this run (3 rows)") for line in messages)
