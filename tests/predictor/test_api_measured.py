"""predict_time with measured rows, its memory, and models of the user's own; the closed forms answer."""

import dataclasses
import math

import pytest

from precision_time import calibrate, predict_time
from precision_time.storage.errors import InputError

pytestmark = pytest.mark.usefixtures("nothing_published")

ASKED = {"model": "resnet50", "precision": "amp_fp16", "gpu": "A100-SXM4-80GB"}


def test_a_measured_row_of_the_question_itself_moves_the_answer_towards_it_and_narrows_it():
    plain = predict_time(**ASKED, batch_size=64)
    row = ASKED | {"batch_size": 64, "iteration_time_s": 1.5 * plain.iteration_time_s}
    told = predict_time(**ASKED, batch_size=64, measured=[row])
    assert plain.iteration_time_s < told.iteration_time_s <= 1.5 * plain.iteration_time_s
    assert told.iteration_time_s == pytest.approx(1.5 * plain.iteration_time_s, rel=0.2)
    assert told.high_s / told.low_s < plain.high_s / plain.low_s
    assert told.low_s < told.iteration_time_s < told.high_s
    assert any("calibrated by 1 measured row" in reason for reason in told.reasons)


def test_a_measured_row_reaches_other_batches_and_precisions_less_than_itself():
    plain = {batch: predict_time(**ASKED, batch_size=batch).iteration_time_s for batch in (64, 512)}
    row = ASKED | {"batch_size": 64, "iteration_time_s": 1.5 * plain[64]}
    moved = {
        batch: math.log(predict_time(**ASKED, batch_size=batch, measured=[row]).iteration_time_s / plain[batch])
        for batch in plain
    }
    fp32 = ASKED | {"precision": "fp32"}
    other = predict_time(**fp32, batch_size=64).iteration_time_s
    moved_other = math.log(predict_time(**fp32, batch_size=64, measured=[row]).iteration_time_s / other)
    assert moved[64] > moved[512] > 0
    assert moved[64] > moved_other > 0


def test_a_saved_calibration_answers_as_its_rows_do(tmp_path):
    plain = predict_time(**ASKED, batch_size=64).iteration_time_s
    row = ASKED | {"batch_size": 64, "iteration_time_s": 0.8 * plain}
    path = tmp_path / "calibration.json"
    calibration = calibrate([row])
    calibration.save(path)
    by_rows = predict_time(**ASKED, batch_size=128, measured=[row])
    assert predict_time(**ASKED, batch_size=128, measured=path) == by_rows
    assert predict_time(**ASKED, batch_size=128, measured=calibration) == by_rows


def test_a_calibration_brings_the_device_it_was_measured_on(tmp_path):
    from precision_time.predictor.setup.hardware import find_hardware

    device = dataclasses.replace(find_hardware("A100-SXM4-80GB"), name="My-A100")
    path = tmp_path / "calibration.json"
    calibrate([ASKED | {"gpu": "My-A100", "batch_size": 64, "iteration_time_s": 0.1}], hardware=[device]).save(path)
    assert predict_time(**ASKED | {"gpu": "My-A100"}, batch_size=64, measured=path).gpu == "My-A100"


def test_milliseconds_for_seconds_are_refused_with_the_row():
    plain = predict_time(**ASKED, batch_size=64).iteration_time_s
    with pytest.raises(InputError, match="measured row 1"):
        predict_time(**ASKED, batch_size=64, measured=[ASKED | {"batch_size": 64, "iteration_time_s": 1000 * plain}])


def test_an_answer_tells_memory_and_warns_first_of_a_batch_that_does_not_fit():
    fits = predict_time(**ASKED, batch_size=64)
    assert fits.memory_fits
    assert fits.memory_bytes is not None
    assert fits.largest_batch is not None
    assert "memory" in repr(fits)
    too_many = predict_time(**ASKED, batch_size=4 * fits.largest_batch)
    assert too_many.memory_fits is False
    assert too_many.largest_batch == fits.largest_batch
    assert "out of memory" in too_many.reasons[0]
    assert predict_time(**ASKED, batch_size=fits.largest_batch).memory_fits


def test_a_row_without_a_model_is_of_the_model_that_is_asked_about():
    card = {"params": 25.6e6, "forward_flops": 8.2e9, "name": "mine"}
    asked = {"model": card, "precision": "tf32", "gpu": "A100", "batch_size": 64}
    plain = predict_time(**asked).iteration_time_s
    row = {"gpu": "A100", "precision": "tf32", "batch_size": 64, "iteration_time_s": 2 * plain}
    told = predict_time(**asked, measured=[row])
    assert told.iteration_time_s == pytest.approx(2 * plain, rel=0.2)
    assert any("measured row of mine" in reason for reason in told.reasons)


def test_many_equal_rows_are_told_as_what_corrected_the_answer():
    plain = predict_time(**ASKED, batch_size=64).iteration_time_s
    told = predict_time(
        **ASKED, batch_size=64, measured=[ASKED | {"batch_size": 64, "iteration_time_s": 1.5 * plain}] * 60
    )
    assert told.iteration_time_s > 1.2 * plain
    assert any("calibrated by 60 measured rows of resnet50" in reason for reason in told.reasons)


def test_a_calibration_tells_its_rows_in_one_line():
    shown = repr(calibrate([ASKED | {"batch_size": 64, "iteration_time_s": 0.05}] * 5))
    assert shown.startswith("Calibration(5 rows against the closed forms: resnet50 on A100-SXM4-80GB: x")
    assert len(shown) < 300


def test_the_largest_batch_of_a_pipeline_is_of_a_micro_step_whatever_batch_is_asked():
    asked = {
        "model": "llama2_70b",
        "precision": "bf16-mixed",
        "gpu": "A100-SXM4-80GB",
        "gpus": 64,
        "strategy": "tp8-pp8",
    }
    assert len({predict_time(**asked, batch_size=batch).largest_batch for batch in (1, 3, 8, 64)}) == 1
