"""The commands campaign and probe: their output, their exit codes, and the libraries that they do not load."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from precision_time.__main__ import run
from precision_time.flows.campaigns import campaign as campaign_flow
from precision_time.flows.campaigns.summary import CampaignResult, FailedCell
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.predictor.answering.artifact import StandingArtifact
from precision_time.tasks.probing.probe_device import ProbeReport

FILE = """\
name: trial
models: [mlp]
precisions: [fp32, bf16-mixed]
gpus: [1, 2]
batch_sizes: [8]
"""


@pytest.fixture
def file(tmp_path: Path, probe: Callable[[str], ProbeReport], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good campaign file, on a made-up machine."""
    monkeypatch.setattr(
        "precision_time.flows.planning.plan._probe_once", lambda cluster, device, settings: probe(device)
    )
    path = tmp_path / "campaign.yaml"
    path.write_text(f"{FILE}data: {tmp_path / 'data'}\n", encoding="utf-8")
    return path


@pytest.fixture
def without_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precision_time.flows.ground.prefect_settings.prefect_api", contextlib.nullcontext)


def answer_with(result: CampaignResult, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_campaign(spec: CampaignSpec, *, report: Callable[[CampaignResult], None]) -> CampaignResult:
        completed = result.model_copy(update={"data": spec.data})
        report(completed)
        return completed

    monkeypatch.setattr(campaign_flow, "run_campaign", run_campaign)


def make_result(*, recorded: int) -> CampaignResult:
    failed = tuple(
        FailedCell(cell_id=str(i), label=f"cell {i}", attempt=2, status="failed", cause="signal 9", message="")
        for i in range(4 - recorded)
    )
    return CampaignResult(
        name="trial", data="", gpu="cpu-test-2c", cells_planned=4, cells_recorded=recorded, cells_measured=recorded,
        rows=recorded * 40, rows_added=recorded * 40, failed=failed, duration_s=1.0,
    )  # fmt: skip


def test_a_dry_run_prints_the_grid_and_its_duration_and_stops(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign_flow, "run_campaign", lambda spec: pytest.fail("it ran"))
    assert run(["campaign", str(file), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("missing") == 4
    assert "amp_bf16" in out
    assert "trial on cpu-test-2c: 4 cells, 0 recorded, 4 to measure, about" in out


def test_a_dry_run_as_json_is_nothing_but_json_on_stdout(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["campaign", str(file), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["cells_planned"], len(plan["cells"]), plan["cells"][0]["state"]) == (4, 4, "missing")
    assert plan["estimated_s"] > 0


def test_options_replace_what_the_file_says(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    assert run(["campaign", str(file), "--dry-run", "--json", "--data", elsewhere]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == elsewhere
    assert run(["campaign", str(file), "--device", "tpu"]) == 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("models: [resnet5]", ["resnet5", "resnet50"]),
        ("gpus: [0]", ["gpus[0]", "got: 0"]),
        ("gpus: [3]", ["got: 3", "at most 2"]),
        ("precisions: [fp8]", ["E-PRECISION-UNSUPPORTED", "fp8 (needs Hopper"]),
        ("seconds_per_cell: 12:30:00", ["12:30:00", "12h30m"]),
        ("data: ftp://host/x", ["ftp"]),
    ],
)
def test_a_bad_campaign_ends_with_two_before_anything_runs(
    file: Path, changed: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign_flow, "run_campaign", lambda spec: pytest.fail("it ran"))
    key = changed.split(":")[0]
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith(key)]
    file.write_text("\n".join([*lines, changed]), encoding="utf-8")
    assert run(["campaign", str(file)]) == 2
    captured = capsys.readouterr()
    assert all(word in captured.err for word in words), captured.err
    assert captured.out == ""


def test_a_missing_file_ends_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["campaign", str(tmp_path / "none.yaml")]) == 2
    assert "E-NOT-FOUND" in capsys.readouterr().err


@pytest.mark.usefixtures("without_prefect")
def test_a_complete_campaign_ends_with_zero_and_its_table(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(make_result(recorded=4), monkeypatch)
    assert run(["campaign", str(file)]) == 0
    assert "trial: complete; 4 of 4 cells are recorded, 4 by this run (160 rows)" in capsys.readouterr().out


@pytest.mark.usefixtures("without_prefect")
@pytest.mark.parametrize(("recorded", "status"), [(3, "partial"), (0, "failed")])
def test_a_campaign_with_failed_cells_ends_with_five_and_names_them(
    file: Path, recorded: int, status: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(make_result(recorded=recorded), monkeypatch)
    assert run(["campaign", str(file), "--json"]) == 5
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == status
    error = json.loads(captured.err.splitlines()[-1])
    assert error["code"] == "E-PARTIAL"
    assert "cell 0: signal 9" in error["got"]


@pytest.mark.usefixtures("without_prefect")
def test_a_campaign_that_a_limit_ended_ends_with_five_and_says_what_is_left(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[object] = []
    result = make_result(recorded=1).model_copy(update={"failed": (), "ended_by": "max_cells 1", "cells_left": 3})

    def run_campaign(spec: CampaignSpec, *, report: Callable[[CampaignResult], None]) -> CampaignResult:
        options.extend([spec.max_hours, spec.max_cells, spec.max_failures, spec.budget_cells, spec.accept_changes])
        report(result)
        return result

    monkeypatch.setattr(campaign_flow, "run_campaign", run_campaign)
    limits = "--max-hours 2.5 --max-cells 1 --max-failures 7 --budget-cells 3 --accept-changes"
    assert run(["campaign", str(file), *limits.split()]) == 5
    assert options == [2.5, 1, 7, 3, True]
    captured = capsys.readouterr()
    assert "ended by max_cells 1; 3 cells were not tried" in captured.out
    assert "ended by max_cells 1; 3 cells were not tried" in captured.err


@pytest.mark.usefixtures("without_prefect")
def test_an_interrupted_campaign_ends_with_130(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = make_result(recorded=1).model_copy(update={"ended_by": "interrupted"})
    monkeypatch.setattr(campaign_flow, "_run_flow", lambda spec: finished)
    assert run(["campaign", str(file)]) == 130
    assert "recorded cells are kept" in capsys.readouterr().err


def test_a_prefect_api_that_does_not_answer_is_bad_input(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    url = "http://user:secret@127.0.0.1:9/api"
    with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}):
        assert run(["campaign", str(file)]) == 2
    error = capsys.readouterr().err
    assert "Prefect API does not answer" in error
    assert "127.0.0.1:9" in error
    assert "secret" not in error


def test_probe_prints_the_device_as_text_and_as_json(
    device: ProbeReport, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precision_time.tasks.probing.probe_device.probe_device", lambda wanted: device)
    assert run(["probe", "--device", "cpu"]) == 0
    assert "not supported: fp8 (needs Hopper or newer)" in capsys.readouterr().out
    assert run(["probe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"]["name"] == "cpu-test-2c"


@pytest.fixture
def timed(device: ProbeReport, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[tuple[str, int]], int, int]]:
    """The calls in which a model's probe timed settings on the made-up machine: 0.1 s for 8 samples, half in bf16."""
    timings: list[tuple[str, list[tuple[str, int]], int, int]] = []

    def time_settings(
        model: str, settings: list[tuple[str, int]], *, report: ProbeReport, steps: int, rounds: int
    ) -> tuple[dict[tuple[str, int], list[float]], dict[tuple[str, int], str]]:
        timings.append((model, list(settings), steps, rounds))
        return {(name, batch): [batch / 80 / (2 if name != "fp32" else 1)] * steps for name, batch in settings}, {}

    monkeypatch.setattr("precision_time.tasks.probing.probe_model.time_settings", time_settings)
    monkeypatch.setattr("precision_time.tasks.probing.probe_model.probe_device", lambda wanted: device)
    for module in ("tasks.probing.probe_model", "predictor.answering.calibration"):
        monkeypatch.setattr(f"precision_time.{module}.standing_artifact", lambda: StandingArtifact(None, ""))
    return timings


def test_probe_of_a_model_prints_measured_beside_predicted_and_saves_the_calibration(
    timed: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "kept.json"
    arguments = ["probe", "--model", "bert_mini", "--gpus", "1", "--gpus", "2", "--gpu", "A100", "--save", str(saved)]
    assert run(arguments) == 0
    assert timed == [("bert_mini", [("fp32", 8), ("fp32", 32), ("amp_bf16", 8)], 20, 1)]
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if line.split()[:1] in (["fp32"], ["amp_bf16"])]
    assert len(lines) == 2 * 2 * 2 * 2  # precisions, batches, counts, GPUs
    assert lines[0].split()[:6] == ["fp32", "8", "1", "cpu-test-2c", "100", "ms"]
    assert "measured; without it calibrated by 2 measured rows: x" in lines[0]
    assert any(line.split()[:4] == ["amp_bf16", "32", "2", "A100-SXM4-80GB"] for line in lines)
    assert "answered by the closed forms, calibrated by 3 measured rows; load of the machine" in out
    assert f"saved the calibration to {saved}" in err
    assert json.loads(saved.read_text(encoding="utf-8"))["artifact_id"] is None


def test_options_of_a_models_probe_reach_it_and_json_is_all_of_stdout(
    timed: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "probe --model bert_mini --precision bf16-mixed --batch-size 4 --batch-size 16 --measure fp32:4 --steps 3 "
        "--rounds 2 --check --json"
    )
    assert run(arguments.split()) == 0
    assert timed == [("bert_mini", [("fp32", 4), ("amp_bf16", 4), ("amp_bf16", 16)], 3, 2)]
    probe = json.loads(capsys.readouterr().out)
    assert [(time["precision"], time["batch_size"], time["is_calibrating"]) for time in probe["times"]] == [
        ("fp32", 4, True), ("amp_bf16", 4, False), ("amp_bf16", 16, False),
    ]  # fmt: skip
    assert len(probe["calibration"]["rows"]) == 1
    assert probe["device"]["hardware"]["name"] == "cpu-test-2c"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch-size", "8", "--save", "x.json"], "batch_sizes, save"),
        (["--check"], "check"),
        (["--model", "bert_mini", "--measure", "fp32"], "precision:batch"),
        (["--model", "bert_mini", "--measure", "fp32:many"], "precision:batch"),
        (["--model", "bert_mimi"], "bert_mini"),
        (["--model", "bert_mini", "--batch-size", "0"], "batch_sizes"),
    ],
)
def test_a_probe_that_makes_no_sense_is_bad_input_and_times_nothing(
    arguments: list[str], words: str, timed: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["probe", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert timed == []


@pytest.mark.parametrize("arguments", [["campaign", "--help"], ["probe", "--help"], ["campaign", "none.yaml"]])
def test_help_and_bad_files_load_no_heavy_library(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom precision_time.__main__ import run\nrun(sys.argv[1:])\n"
        "print([name for name in ('prefect', 'torch', 'distributed', 'pandas', 'xgboost') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
