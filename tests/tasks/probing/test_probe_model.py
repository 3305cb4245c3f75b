"""The probe of a model: its measurements and predictions, on a made-up machine and (``long``) against real runs."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from precision_time.predictor.answering.artifact import StandingArtifact
from precision_time.predictor.answering.calibration import load_calibration
from precision_time.predictor.closed_form.solve import solve_closed_form
from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.predictor.workloads.workload import find_workload
from precision_time.storage.errors import InputError, PrecisionTimeError, PrecisionUnsupportedError, UnknownNameError
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tasks.probing.probe_model import ModelProbe, ProbedTime, choose_measured, probe_model, time_settings
from precision_time.tests.made_up_machine import make_machine

MACHINE = make_machine(2)
HARDWARE = replace(MACHINE.hardware, peak_flops_per_s={"fp32": 1e11, "bf16": 2e11, "fp16": 1e10})
# No version is stated, so that real ranks may have any.
REPORT = replace(MACHINE, environment=replace(MACHINE.environment, framework_version=""), hardware=HARDWARE)
#: How much slower than the closed forms the made-up machine is, by precision.
SLOWER = {"fp32": 1.5, "bf16": 1.8, "amp_bf16": 2.0, "amp_fp16": 1.7}


@pytest.fixture(autouse=True)
def _nothing_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """The closed forms answer."""
    monkeypatch.setattr(
        "precision_time.tasks.probing.probe_model.standing_artifact", lambda: StandingArtifact(None, "")
    )
    monkeypatch.setattr(
        "precision_time.predictor.answering.calibration.standing_artifact", lambda: StandingArtifact(None, "")
    )


def true_s(precision: str, batch: int) -> float:
    """Seconds of an iteration of bert_mini on the made-up machine."""
    setup = TrainingSetup(
        workload=find_workload("bert_mini"), hardware=HARDWARE, precision=PRECISIONS[precision], world_size=1, nodes=1,
        batch_size=batch,
    )  # fmt: skip
    return SLOWER[precision] * solve_closed_form(setup).iteration_time_s


class FakeTimer:
    """Replaces the measuring: three steps of each setting, whose median is the true time; some settings may fail."""

    def __init__(self, failing: tuple[tuple[str, int], ...] = ()) -> None:
        self.failing, self.asked = failing, []

    def __call__(self, model: str, settings: Any, *, report: ProbeReport, steps: int, rounds: int) -> Any:
        self.asked = list(settings)
        timed = {setting: [true_s(*setting) * factor for factor in (3.0, 0.9, 1.0)] for setting in settings}
        return (
            {setting: seconds for setting, seconds in timed.items() if setting not in self.failing},
            dict.fromkeys(self.failing, "memory-limit: too large"),
        )


def probe(timer: FakeTimer | None = None, **options: Any) -> ModelProbe:
    return probe_model("bert_mini", report=REPORT, timer=timer or FakeTimer(), **options)


def line_of(result: ModelProbe, precision: str, batch: int, gpus: int = 1, gpu: str = "cpu-test-2c") -> ProbedTime:
    (line,) = [
        line
        for line in result.times
        if (line.precision, line.batch_size, line.gpus, line.gpu) == (precision, batch, gpus, gpu)
    ]
    return line


def test_one_precision_is_measured_at_both_ends_and_each_other_at_the_smallest_batch() -> None:
    assert choose_measured(["fp32", "bf16", "amp_bf16"], [32, 8, 16]) == (
        ("fp32", 8), ("fp32", 32), ("bf16", 8), ("amp_bf16", 8),
    )  # fmt: skip
    assert choose_measured(["fp32"], [8]) == (("fp32", 8),)


def test_what_was_not_measured_is_predicted_from_what_was() -> None:
    result = probe(batch_sizes=[8, 16, 32, 64])
    assert {(line.precision, line.batch_size) for line in result.times} == {
        (name, batch) for name in ("fp32", "amp_bf16") for batch in (8, 16, 32, 64)
    }
    for line in result.times:
        truth = true_s(line.precision, line.batch_size)
        if line.is_calibrating:
            assert line.measured_s == truth  # the median, not the mean
            assert line.steps == 3
        else:
            assert (line.measured_s, line.steps, line.error) == (None, 0, None)
            assert line.predicted_s == pytest.approx(truth, rel=0.1)
            assert line.low_s < truth < line.high_s
            assert line.known_by.startswith("calibrated by")
    assert result.calibration.artifact_id is None
    assert len(result.calibration.rows) == 3
    assert result.left_out == ()


def test_a_measured_setting_is_predicted_from_the_others_alone() -> None:
    class Odd(FakeTimer):
        def __call__(self, *values: Any, **options: Any) -> Any:
            timed, failed = super().__call__(*values, **options)
            return timed | {("amp_bf16", 8): [5.0 * true_s("amp_bf16", 8)]}, failed

    usual, odd = line_of(probe(), "amp_bf16", 8), line_of(probe(Odd()), "amp_bf16", 8)
    assert odd.is_calibrating
    assert odd.measured_s == pytest.approx(5.0 * usual.measured_s)
    assert (odd.predicted_s, odd.low_s, odd.high_s) == (usual.predicted_s, usual.low_s, usual.high_s)
    assert usual.error == usual.predicted_s / usual.measured_s - 1


def test_a_check_measures_the_rest_and_leaves_the_predictions_as_they_are() -> None:
    timer = FakeTimer()
    plain, checked = probe(), probe(timer, check=True)
    assert timer.asked == [("fp32", 8), ("fp32", 32), ("amp_bf16", 8), ("amp_bf16", 32)]
    assert line_of(plain, "amp_bf16", 32).error is None
    line = line_of(checked, "amp_bf16", 32)
    assert not line.is_calibrating
    assert line.measured_s == true_s("amp_bf16", 32)
    assert abs(line.error or math.inf) < 0.1
    assert [line.predicted_s for line in plain.times] == [line.predicted_s for line in checked.times]


def test_what_is_measured_can_be_said() -> None:
    timer = FakeTimer()
    result = probe(timer, measure=[("bf16-mixed", 8)], precisions=["fp32", "amp_bf16"])
    assert timer.asked == [("amp_bf16", 8)]
    alone = line_of(result, "amp_bf16", 8)
    assert alone.known_by == "nothing else was measured"  # the closed form itself
    assert alone.predicted_s == pytest.approx(true_s("amp_bf16", 8) / SLOWER["amp_bf16"])


def test_more_devices_and_other_ones_are_predicted_for_what_they_can_run() -> None:
    result = probe(precisions=["fp32", "bf16"], batch_sizes=[8], gpus=[1, 2, 3, 8], other_gpus=["A100", "V100"])
    assert {line.gpus for line in result.times if line.gpu == "cpu-test-2c"} == {1, 2, 8}
    assert line_of(result, "fp32", 8, gpus=2).predicted_s > line_of(result, "fp32", 8).predicted_s
    others = [line.gpu for line in result.times if line.gpu != "cpu-test-2c"]
    assert others
    assert all(line.measured_s is None for line in result.times if line.gpu != "cpu-test-2c" or line.gpus > 1)
    (v100,) = {gpu for gpu in others if "V100" in gpu}
    assert {line.precision for line in result.times if line.gpu == v100} == {"fp32"}
    assert f"{v100} cannot run bf16" in result.left_out
    assert "3 x cpu-test-2c do not divide over nodes of 2" in result.left_out


def test_measured_lines_are_of_one_device_even_where_only_more_were_asked_for() -> None:
    result = probe(batch_sizes=[8, 32], gpus=[2])
    assert {(line.gpus, line.precision, line.batch_size) for line in result.times if line.measured_s is not None} == {
        (1, "fp32", 8), (1, "fp32", 32), (1, "amp_bf16", 8),
    }  # fmt: skip
    assert not any(line.gpus == 1 and line.measured_s is None for line in result.times)


def test_a_precision_that_does_not_pay_is_only_probed_when_it_is_asked_for() -> None:
    assert not any(line.precision == "amp_fp16" for line in probe().times)  # a tenth of the rate of fp32 products
    assert any(line.precision == "amp_fp16" for line in probe(precisions=["fp32", "amp_fp16"]).times)


def test_a_setting_that_fails_is_told_of_and_the_others_calibrate() -> None:
    result = probe(FakeTimer(failing=(("fp32", 32),)))
    assert result.left_out == ("fp32 at batch 32 was not measured: memory-limit: too large",)
    assert len(result.calibration.rows) == 2
    assert line_of(result, "fp32", 32).measured_s is None
    with pytest.raises(PrecisionTimeError, match=r"no iteration of bert_mini could be measured.*memory-limit"):
        probe(FakeTimer(failing=(("fp32", 8), ("fp32", 32), ("amp_bf16", 8))))


def test_a_saved_calibration_corrects_later_answers(tmp_path: Path) -> None:
    result = probe()
    result.calibration.save(tmp_path / "probe.json")
    loaded = load_calibration(tmp_path / "probe.json")
    assert loaded == result.calibration
    assert loaded.hardware == (HARDWARE,)
    assert [work.name for work in loaded.workloads] == ["bert_mini"]


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"model": "berd_mini"}, UnknownNameError, "bert_mini"),
        ({"batch_sizes": [0]}, InputError, "batch_sizes"),
        ({"batch_sizes": []}, InputError, "batch_sizes"),
        ({"gpus": [-1]}, InputError, "gpus"),
        ({"steps": 0}, InputError, "steps"),
        ({"rounds": 0}, InputError, "rounds"),
        ({"precisions": ["fp8"]}, PrecisionUnsupportedError, "needs Hopper"),
        ({"measure": [("fp8", 8)]}, PrecisionUnsupportedError, "needs Hopper"),
        ({"measure": [("fp32", 0)]}, InputError, "batch_sizes"),
        ({"other_gpus": ["A1000000"]}, UnknownNameError, "A1000000"),
    ],
)
def test_what_cannot_be_probed_is_refused_before_anything_is_timed(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    timer = FakeTimer()
    with pytest.raises(kind, match=words):
        probe_model(options.pop("model", "bert_mini"), report=REPORT, timer=timer, **options)
    assert timer.asked == []


def test_real_iterations_are_timed_in_a_process_of_their_own() -> None:
    settings = [("fp32", 2), ("tf32", 2)]
    timed, failed = time_settings("mlp", settings, report=REPORT, steps=3, rounds=1)
    assert list(timed) == [("fp32", 2)]
    assert len(timed["fp32", 2]) >= 3
    assert all(0 < seconds < 60 for seconds in timed["fp32", 2])
    assert failed[("tf32", 2)].startswith("precision-unsupported: rank 0: ")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_bert_mini_on_this_cpu_is_predicted_within_a_tenth() -> None:
    """Its other precision and batches, from fp32 at batches 8 and 32 and amp_bf16 at batch 8; needs a quiet machine."""
    result = probe_model(
        "bert_mini", "cpu", precisions=["fp32", "amp_bf16"], batch_sizes=[8, 16, 32], steps=5, rounds=5, check=True,
    )  # fmt: skip
    errors = {(line.precision, line.batch_size): line.error for line in result.times if not line.is_calibrating}
    assert set(errors) == {("fp32", 16), ("amp_bf16", 16), ("amp_bf16", 32)}
    assert all(error is not None and abs(error) <= 0.10 for error in errors.values()), result.to_dict()["times"]
