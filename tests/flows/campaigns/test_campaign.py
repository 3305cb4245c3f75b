"""A campaign: refusals before measuring, the cells and their order, and the results of a run."""

import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from precision_time.flows.campaigns.cell_loop import measure_missing
from precision_time.flows.campaigns.progress import CampaignProgress
from precision_time.flows.campaigns.summary import (
    CampaignResult,
    FailedCell,
    grid_rows,
    markdown_report,
    summarise,
    table_rows,
)
from precision_time.flows.planning.order import order_cells
from precision_time.flows.planning.plan import CampaignPlan, PlannedCell, plan_campaign
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.storage.errors import (
    InputError,
    PrecisionUnsupportedError,
    StorageFullError,
    printable,
)
from precision_time.storage.schema import CellOutcome
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tests.flows.campaigns.made_up import make_measurement, make_outcome, make_plan, make_spec

Probe = Callable[[str], ProbeReport]
Measure = Callable[[PlannedCell], CellOutcome]


class RecordingMeasure:
    """Notes the measured cells; those in ``failing`` fail with a cause."""

    def __init__(self, failing: dict[str, str] | None = None) -> None:
        self.asked: list[str] = []
        self.failing = failing or {}

    def __call__(self, planned: PlannedCell) -> CellOutcome:
        self.asked.append(planned.cell.label)
        return make_outcome(planned, cause=self.failing.get(planned.cell.label, ""))


def run_core(plan: CampaignPlan, measure: Measure, stream: io.StringIO | None = None) -> dict[str, CellOutcome]:
    with CampaignProgress(plan, stream=stream or io.StringIO()) as progress:
        return measure_missing(plan, measure=measure, progress=progress).outcomes


def test_the_plan_holds_the_whole_grid_with_durations(tmp_path: Path, probe: Probe) -> None:
    plan = plan_campaign(make_spec(tmp_path), probe=probe)
    assert len(plan.cells) == len(plan.missing) == 8
    assert all(planned.estimated_s > 0 for planned in plan.cells)
    assert plan.estimated_s == pytest.approx(sum(planned.estimated_s for planned in plan.cells))
    values = plan.to_dict()
    assert (values["cells_planned"], values["cells_missing"]) == (8, 8)
    assert {cell["state"] for cell in values["cells"]} == {"missing"}


def test_a_cell_is_expected_to_take_no_longer_than_its_cap(tmp_path: Path, probe: Probe) -> None:
    short, long = (
        plan_campaign(make_spec(tmp_path, models=["resnet50"], seconds_per_cell=cap), probe=probe) for cap in (1, 2)
    )
    for a, b in zip(short.cells, long.cells, strict=True):
        assert b.estimated_s - a.estimated_s == pytest.approx(1.0)


def test_recorded_cells_of_this_environment_are_not_missing(
    tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_campaign(make_spec(tmp_path), probe=probe)
    known = {plan.cells[0].cell_id, plan.cells[3].cell_id, "0" * 16}
    monkeypatch.setattr(TimingsDataset, "recorded_cells", lambda self: known)
    again = plan_campaign(make_spec(tmp_path), probe=probe)
    assert [planned.is_recorded for planned in again.cells] == [True, False, False, True, False, False, False, False]
    assert again.estimated_s < plan.estimated_s


def test_more_ranks_than_the_machine_has_are_refused(tmp_path: Path, probe: Probe) -> None:
    with pytest.raises(InputError, match=r"got: 3, 64.*at most 2"):
        plan_campaign(make_spec(tmp_path, gpus=[1, 3, 64]), probe=probe)


def test_every_precision_that_the_device_lacks_is_named_at_once(tmp_path: Path, probe: Probe) -> None:
    with pytest.raises(PrecisionUnsupportedError, match=r"2 precisions.*fp8 \(needs Hopper.*tf32 \(needs Ampere"):
        plan_campaign(make_spec(tmp_path, precisions=["fp32", "tf32", "fp8"]), probe=probe)


def test_a_precision_that_is_lacking_may_be_excluded(tmp_path: Path, probe: Probe) -> None:
    spec = make_spec(tmp_path, precisions=["fp32", "fp8"], exclude=[{"precision": "fp8"}])
    assert len(plan_campaign(spec, probe=probe).cells) == 4


def test_a_full_disk_is_found_before_the_device_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: TimingsDataset, *, required_bytes: int) -> None:
        assert required_bytes > 100_000
        raise StorageFullError("no room")

    monkeypatch.setattr(TimingsDataset, "check_writable", refuse)
    with pytest.raises(StorageFullError):
        plan_campaign(make_spec(tmp_path), probe=lambda wanted: pytest.fail("the device was looked at"))


@pytest.mark.parametrize("url", ["http://169.254.169.254/x", "simplecache::s3://b/x", "ssh://host/x"])
def test_a_data_url_off_the_list_is_refused(tmp_path: Path, probe: Probe, url: str) -> None:
    with pytest.raises(InputError):
        plan_campaign(make_spec(tmp_path, data=url), probe=probe)


def test_an_own_model_is_imported_before_measuring_and_not_here(
    tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_nets.py").write_text("import sys\ndef make(): ...\nvalue = 3\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plan = plan_campaign(make_spec(tmp_path, models=["own_nets:make"], seconds_per_cell=9), probe=probe)
    assert all(planned.estimated_s > 9 for planned in plan.cells)
    for model, cause in [("own_nets:value", "not callable"), ("own_nets:other", "other"), ("no_nets:make", "no_nets")]:
        with pytest.raises(InputError, match=cause):
            plan_campaign(make_spec(tmp_path, models=[model]), probe=probe)


def test_ten_thousand_cells_are_planned(tmp_path: Path, probe: Probe) -> None:
    spec = make_spec(tmp_path, batch_sizes=list(range(1, 1251)))
    assert len(plan_campaign(spec, probe=probe).cells) == 10_000


def test_only_missing_cells_are_measured_and_in_order(tmp_path: Path, device: ProbeReport) -> None:
    plan = make_plan(make_spec(tmp_path), device, recorded=(0, 2))
    measure = RecordingMeasure()
    outcomes = run_core(plan, measure)
    assert measure.asked == [planned.cell.label for i, planned in enumerate(plan.cells) if i not in (0, 2)]
    assert set(outcomes) == {planned.cell_id for planned in plan.missing}


def test_missing_cells_come_in_their_order_and_the_grid_in_that_of_the_file(tmp_path: Path, probe: Probe) -> None:
    spec = make_spec(tmp_path, batch_sizes=[8, 16])
    plan = plan_campaign(spec, probe=probe)
    assert [planned.cell for planned in plan.cells] == spec.cells()
    assert [planned.cell for planned in plan.missing] == order_cells(spec.cells())
    first = [planned.cell for planned in plan.missing[:2]]
    assert {cell.model for cell in first} == {"mlp", "gpt2_mini"}
    assert {cell.precision for cell in first} == {"fp32", "amp_bf16"}


@pytest.mark.parametrize(
    ("device_type", "stated", "at_once"), [("cpu", None, 1), ("cuda", None, 2), ("cpu", 2, 2), ("cuda", 1, 1)]
)
def test_on_gpus_as_many_cells_run_as_fit_and_on_a_cpu_one(
    tmp_path: Path, device: ProbeReport, device_type: str, stated: int | None, at_once: int
) -> None:
    on = replace(device, environment=replace(device.environment, device_type=device_type))
    assert make_plan(make_spec(tmp_path, cells_at_once=stated), on).at_once == at_once


def test_with_an_adaptive_budget_the_campaign_is_complete_when_it_is_used_up(
    tmp_path: Path, device: ProbeReport
) -> None:
    plan = make_plan(make_spec(tmp_path, budget_cells=5), device, recorded=(0, 2))
    assert (plan.goal, plan.cells_to_measure, plan.estimated_s) == (5, 3, pytest.approx(30.0))
    outcomes = {planned.cell_id: make_outcome(planned) for planned in plan.missing[:3]}
    result = summarise(plan, outcomes, rows={}, duration_s=1.0)
    assert (result.status, result.cells_planned, result.cells_in_grid, result.cells_left) == ("complete", 5, 8, 0)
    assert "5 of 5 cells (chosen by a predictor from a grid of 8) are recorded" in markdown_report(result, [])


def test_a_result_that_prefect_cannot_be_asked_for_is_returned_all_the_same(
    tmp_path: Path, device: ProbeReport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from precision_time.flows.campaigns import campaign

    expected = summarise(make_plan(make_spec(tmp_path), device), {}, rows={}, duration_s=1.0)

    def lose_the_api(spec: CampaignSpec, *, return_state: bool) -> None:
        results = campaign._finished.get()
        assert results is not None
        results.append(expected)
        raise ConnectionError("all connection attempts failed")

    monkeypatch.setattr(campaign, "profiling_campaign", lose_the_api)
    assert campaign.run_campaign(make_spec(tmp_path)) == expected
    assert "Prefect has no result of the run" in capsys.readouterr().err


def test_a_failing_cell_is_tried_again_after_the_others_and_stops_none(tmp_path: Path, device: ProbeReport) -> None:
    plan = make_plan(make_spec(tmp_path, max_attempts=3), device)
    bad = plan.cells[1].cell.label
    measure = RecordingMeasure({bad: "signal 9"})
    outcomes = run_core(plan, measure)
    assert measure.asked == [*(planned.cell.label for planned in plan.cells), bad, bad]
    result = summarise(plan, outcomes, rows={}, duration_s=1.0)
    assert (result.status, result.cells_recorded, result.rows_added) == ("partial", 7, 280)
    assert [(cell.label, cell.cause) for cell in result.failed] == [(bad, "signal 9")]


def test_what_the_device_refuses_is_not_tried_again(tmp_path: Path, device: ProbeReport) -> None:
    plan = make_plan(make_spec(tmp_path), device)
    measure = RecordingMeasure({plan.cells[0].cell.label: "precision-unsupported"})
    run_core(plan, measure)
    assert len(measure.asked) == len(plan.cells)


def test_a_campaign_without_a_single_recorded_cell_is_no_success(tmp_path: Path, device: ProbeReport) -> None:
    plan = make_plan(make_spec(tmp_path, max_attempts=1), device)
    outcomes = run_core(plan, RecordingMeasure({planned.cell.label: "timed out" for planned in plan.cells}))
    assert summarise(plan, outcomes, rows={}, duration_s=1.0).status == "failed"


def test_the_grid_shows_times_speedups_and_causes(tmp_path: Path, device: ProbeReport) -> None:
    plan = make_plan(make_spec(tmp_path, models=["mlp"]), device)
    times = [make_measurement(planned, iteration_time_s=t) for planned, t in zip(plan.cells, (0.2, 0.1), strict=False)]
    failed = FailedCell(
        cell_id=plan.cells[2].cell_id, label="x", attempt=2, status="failed", cause="timed out", message="a|b\nc"
    )
    recorded = {planned.cell_id for planned in plan.cells[:2]}
    rows = grid_rows(plan, [failed], measurements=times, recorded=recorded)
    assert [row.state for row in rows] == ["recorded", "recorded", "failed", "missing"]
    assert [row.speedup_over_fp32 for row in rows] == [1.0, 2.0, None, None]
    assert rows[2].cause == "timed out"
    result = summarise(plan, {}, rows={}, duration_s=1.0).model_copy(update={"failed": (failed,)})
    report = markdown_report(result, rows)
    assert "| mlp | amp\\_bf16 | 1 | 8 | 1 | recorded | 100 ms | 2.00x |  |" in report
    assert "timed out. a\\|b c" in report


def test_options_of_the_run_have_a_column_only_where_a_cell_has_some(tmp_path: Path, device: ProbeReport) -> None:
    plain = grid_rows(make_plan(make_spec(tmp_path), device), [], measurements=[])
    assert "options" not in table_rows(plain)[0]
    spec = make_spec(tmp_path, compiled=[False, True], compression=["none", "fp16"], strategies=["ddp", "fsdp"])
    rows = table_rows(grid_rows(make_plan(spec, device), [], measurements=[]))
    assert {row["options"] for row in rows} >= {"", "compiled", "fsdp, compiled, compression fp16"}


def test_a_recorded_cell_whose_rows_give_no_time_is_not_called_missing(tmp_path: Path, device: ProbeReport) -> None:
    plan = make_plan(make_spec(tmp_path, models=["mlp"]), device)
    rows = grid_rows(plan, [], measurements=[], recorded={plan.cells[0].cell_id})
    assert [row.state for row in rows] == ["unusable", "missing", "missing", "missing"]


def test_the_result_travels_as_json(tmp_path: Path, device: ProbeReport) -> None:
    result = summarise(make_plan(make_spec(tmp_path), device), {}, rows={}, duration_s=1.0)
    assert CampaignResult.model_validate_json(result.model_dump_json()) == result


def test_without_a_terminal_each_cell_is_a_plain_line(tmp_path: Path, device: ProbeReport) -> None:
    plan = make_plan(make_spec(tmp_path, models=["mlp"], max_attempts=1), device)
    stream = io.StringIO()
    run_core(plan, RecordingMeasure({"mlp fp32 x2 b8": "signal 9"}), stream)
    lines = stream.getvalue().splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        "[1/4] mlp fp32 x1 b8: recorded",
        "[2/4] mlp amp_bf16 x1 b8: recorded",
        "[3/4] mlp fp32 x2 b8: failed, signal 9",
        "[4/4] mlp amp_bf16 x2 b8: recorded",
    ]
    assert "left" in lines[0]


def test_a_long_cell_shows_that_it_is_alive(
    tmp_path: Path, device: ProbeReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precision_time.flows.campaigns.progress.LINE_EVERY_S", 0.01)
    plan = make_plan(make_spec(tmp_path), device)
    stream = io.StringIO()
    with CampaignProgress(plan, stream=stream) as progress:
        progress.start_cell(plan.cells[0])
        while "mlp fp32 x1 b8: measuring for" not in stream.getvalue():
            time.sleep(0.01)


def test_the_time_left_is_unknown_before_the_first_cell_and_then_scales(
    tmp_path: Path, device: ProbeReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("precision_time.flows.campaigns.progress.time.monotonic", lambda: clock[0])
    plan = make_plan(make_spec(tmp_path), device)
    progress = CampaignProgress(plan, stream=io.StringIO())
    assert progress.seconds_left is None
    progress.start_cell(plan.cells[0])
    clock[0] = 20.0  # twice the expected time
    progress.finish_cell(plan.cells[0], make_outcome(plan.cells[0]), is_last_attempt=True)
    assert progress.seconds_left == pytest.approx(7 * 20.0)
    progress.start_cell(plan.cells[1])
    clock[0] = 25.0
    assert progress.seconds_left == pytest.approx(7 * 20.0 - 5.0)
    clock[0] = 1e6
    assert progress.seconds_left == 0.0


def test_the_deployment_names_this_flow_and_a_campaign_that_holds() -> None:
    import yaml
    from prefect.flows import load_flow_from_entrypoint

    from precision_time.flows.campaigns.campaign import profiling_campaign

    text = Path(__file__).parents[3].joinpath("deploy", "prefect.yaml").read_text(encoding="utf-8")
    (deployment,) = [entry for entry in yaml.safe_load(text)["deployments"] if entry["name"] == "profiling-campaign"]
    assert load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False) is profiling_campaign
    assert CampaignSpec.model_validate(deployment["parameters"]["spec"]).cells()
    assert profiling_campaign.parameters.properties["spec"]["title"] == "spec"


def test_escape_codes_of_a_rank_do_not_reach_the_terminal() -> None:
    assert printable("a\x1b[2J\nb") == "a\\x1b[2J\\nb"


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_real_campaign_is_recorded_resumed_and_shown(tmp_path: Path) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    from precision_time.flows.campaigns.campaign import run_campaign

    spec = make_spec(
        tmp_path, models=["mlp"], precisions=["fp32"], device="cpu", warmup_steps=3, measured_steps=3,
        seconds_per_cell=5, timeout_per_cell=120, traced_steps=2,
    )  # fmt: skip
    first = run_campaign(spec)
    assert (first.status, first.cells_measured, first.cells_recorded) == ("complete", 2, 2)
    again = run_campaign(spec)
    assert (again.status, again.cells_measured, again.rows, again.rows_added) == ("complete", 0, first.rows, 0)

    (damaged, *_) = Path(spec.data).glob("timings/**/*.parquet")
    damaged.write_bytes(damaged.read_bytes()[:-10])
    mended = run_campaign(spec)
    assert (mended.status, mended.cells_measured) == ("complete", 1)

    dataset = TimingsDataset(spec.data)
    assert dataset.read().num_rows == mended.rows > 0
    assert len(dataset.read_cards("hardware")) == 1
    traces = {path.name for path in Path(spec.data, "traces", "v1").iterdir()}
    assert traces == {f"cell-{cell}.json.gz" for cell in dataset.recorded_cells()}
    assert dataset.read().column("trace_truncated").to_pylist() == [False] * mended.rows
    assert all(measured.iteration_time_s > 0 for measured in dataset.measurements())
    with get_client(sync_client=True) as client:
        for key, kind in [
            ("campaign-trial", "table"), ("campaign-trial-report", "markdown"), ("campaign-trial-progress", "progress"),
        ]:  # fmt: skip
            (artifact, *_) = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[key])))
            assert artifact.type == kind


def test_ranks_cannot_be_spread_over_hosts_on_one_machine(tmp_path: Path, probe: Probe) -> None:
    with pytest.raises(InputError, match="gpus_per_node"):
        plan_campaign(make_spec(tmp_path, gpus=[2], gpus_per_node=1, cluster="local"), probe=probe)
