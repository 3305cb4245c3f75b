"""An answer reads well, converts to plain JSON, and escapes what came from outside."""

import dataclasses
import json

import pytest

from precision_time.predictor.answering.estimate import TimeEstimate, format_duration

ESTIMATE = TimeEstimate(
    iteration_time_s=0.25,
    low_s=0.2,
    high_s=0.3,
    level=0.9,
    compute_time_s=0.24,
    communication_time_s=0.05,
    exposed_communication_s=0.01,
    optimizer_time_s=0.004,
    samples_per_s=8192.0,
    global_batch_size=2048,
    world_size=8,
    model="resnet50",
    requested_precision="mixed_fp16_fp32",
    effective_precision="amp_fp16",
    gpu="A100-SXM4-80GB",
    regime="known",
    reasons=("no gpu was given: assumed A100-SXM4-80GB", "second"),
    artifact_id="default@3",
    steps=1000,
    total_time_s=250.0,
    total_low_s=200.0,
    total_high_s=300.0,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5e-6, "2.5 us"),
        (0.0123, "12.3 ms"),
        (0.99951, "1 s"),
        (4.561, "4.56 s"),
        (59.999, "1 m 0 s"),
        (3600.0, "1 h 0 m 0 s"),
        (152000 * 4, "7 d 0 h 53 m 20 s"),
    ],
)
def test_durations_are_printed_in_readable_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_the_readable_form_names_precision_interval_parts_and_source() -> None:
    text = repr(ESTIMATE)
    for piece in (
        "mixed_fp16_fp32, run as amp_fp16",
        "8 x A100-SXM4-80GB",
        "global batch 2048",
        "250 ms",
        "200 ms .. 300 ms at 90%",
        "1,000 steps",
        "4 m 10 s",
        "default@3",
        "assumed A100",
    ):
        assert piece in text


def test_the_dictionary_is_plain_json_and_complete() -> None:
    values = json.loads(json.dumps(ESTIMATE.to_dict(), allow_nan=False))
    assert values["reasons"] == list(ESTIMATE.reasons)
    assert set(values) == {entry.name for entry in dataclasses.fields(TimeEstimate)}


def test_the_notebook_form_escapes_names() -> None:
    page = dataclasses.replace(ESTIMATE, model="<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert page.startswith("<table>")
