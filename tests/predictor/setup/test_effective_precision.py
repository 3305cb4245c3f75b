"""Effective precision: a format that a device lacks is refused or replaced by name, and losses are reported."""

import json
from pathlib import Path

import pytest

from precision_time import predict_time
from precision_time.__main__ import run
from precision_time.predictor.setup.hardware import choose_precision, known_hardware, supported_precisions
from precision_time.predictor.setup.precision import PRECISIONS, parse_precision
from precision_time.storage.errors import OutOfDomainError, PrecisionUnsupportedError

H100 = "H100-SXM5-80GB"

pytestmark = pytest.mark.usefixtures("nothing_published")

LACKING = [
    ("V100-SXM2-16GB", "bf16-mixed", "amp_fp16", "compute capability 7.0"),
    ("T4-16GB", "bf16-mixed", "amp_fp16", "compute capability 7.5"),
    ("T4-16GB", "tf32", "fp32", "8.0 (Ampere)"),
    ("T4-16GB", "fp8", "amp_fp16", "8.9 (Ada) or 9.0 (Hopper)"),
    ("GTX1080Ti-11GB", "tf32", "fp32", "compute capability 6.1"),
    ("A100-SXM4-80GB", "fp8", "amp_bf16", "8.9 (Ada) or 9.0 (Hopper)"),
    (H100, "nvfp4", "fp8", "10.0 (Blackwell)"),
    ("cpu", "tf32", "fp32", "GPU tensor cores"),
    ("cpu", "fp8", "amp_bf16", "no fp8 rate is known for this CPU"),
    ("cpu", "nvfp4", "amp_bf16", "no nvfp4 rate is known for this CPU"),
    ("cpu", "16-mixed", "amp_bf16", "no fp16 rate is known for this CPU"),
]


@pytest.mark.parametrize(("gpu", "requested", "offered", "reason"), LACKING)
def test_a_lacking_format_is_refused_with_the_reason_and_the_nearest_policy(
    gpu: str, requested: str, offered: str, reason: str
) -> None:
    with pytest.raises(PrecisionUnsupportedError) as caught:
        predict_time("resnet50", requested, batch_size=8, gpu=gpu)
    assert caught.value.exit_code == 2
    assert f"{gpu} does not support {parse_precision(requested).name}" in caught.value.what
    assert reason in caught.value.what
    assert (caught.value.fix or "").startswith(f"use {offered}")


@pytest.mark.parametrize(("gpu", "requested", "offered", "reason"), LACKING)
def test_an_allowed_fallback_answers_for_the_nearest_policy_and_names_both(
    gpu: str, requested: str, offered: str, reason: str
) -> None:
    estimate = predict_time("resnet50", requested, batch_size=8, gpu=gpu, allow_fallback=True)
    assert (estimate.requested_precision, estimate.effective_precision) == (requested, offered)
    [stated] = [text for text in estimate.reasons if "fallback" in text]
    assert reason in stated
    assert f"{gpu} does not support {parse_precision(requested).name}" in stated
    assert f"answered for {offered}" in stated
    assert estimate.iteration_time_s == predict_time("resnet50", offered, batch_size=8, gpu=gpu).iteration_time_s


def test_a_fallback_that_is_not_needed_changes_nothing() -> None:
    question = {"model": "resnet50", "precision": "bf16-mixed", "batch_size": 8, "gpu": H100}
    assert predict_time(**question, allow_fallback=True) == predict_time(**question)


@pytest.mark.parametrize("spec", known_hardware().values(), ids=lambda spec: spec.name)
def test_on_every_device_a_policy_stands_or_is_replaced_by_a_supported_one_with_a_reason(spec) -> None:
    for policy in PRECISIONS.values():
        effective, reason = choose_precision(spec, policy, allow_fallback=True)
        assert effective.name in supported_precisions(spec)
        assert (effective == policy) == (reason is None)
        if reason is not None:
            assert policy.name in reason
            assert effective.name in reason
            with pytest.raises(PrecisionUnsupportedError):
                choose_precision(spec, policy)


def test_a_device_whose_file_gives_no_rate_is_not_called_too_old(tmp_path: Path) -> None:
    spec = known_hardware()[H100]
    values = spec.to_dict() | {"peak_flops_per_s": {"fp32": 60e12}}
    with pytest.raises(PrecisionUnsupportedError, match="no bf16 rate is known for this GPU"):
        choose_precision(type(spec).from_dict(values | {"achieved_flops_per_s": {}}), PRECISIONS["bf16"])


def test_strict_mode_judges_the_policy_that_answers(measure, publish_made_up, tmp_path: Path) -> None:
    url = str(tmp_path / "registry")
    publish_made_up(url, measure(precisions=("fp32", "amp_bf16")))
    question = {"model": "mlp", "batch_size": 16, "artifact": f"{url}/default", "strict": True, "allow_fallback": True}
    assert predict_time(precision="fp8", **question).effective_precision == "amp_bf16"
    with pytest.raises(OutOfDomainError):
        predict_time(precision="tf32", **question)


def test_the_command_refuses_and_falls_back_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["predict", "--model", "resnet50", "--batch-size", "8", "--precision", "bf16", "--gpu", "V100"]
    assert run(question) == 2
    assert "E-PRECISION-UNSUPPORTED" in capsys.readouterr().err
    assert run([*question, "--allow-fallback"]) == 0
    out = capsys.readouterr().out
    assert "bf16, run as amp_fp16" in out
    assert "does not support bf16" in out
    assert run([*question, "--allow-fallback", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["requested_precision"], answer["effective_precision"]) == ("bf16", "amp_fp16")


def gains(**question: object) -> str:
    [reason] = [text for text in predict_time(**question).reasons if text.startswith("by the closed forms")]
    return reason


def closed_time(model: str, precision: str, *, gpu: str, batch_size: int) -> float:
    estimate = predict_time(model, precision, batch_size=batch_size, gpu=gpu)
    assert estimate.artifact_id is None
    return estimate.iteration_time_s


def test_fp32_on_ampere_and_newer_warns_of_tf32_and_compares_with_both() -> None:
    question = {"model": "bert_base", "batch_size": 32, "gpu": "A40-48GB"}
    estimate = predict_time(precision="fp32", **question)
    assert any("may run fp32 products as tf32" in text and "'highest'" in text for text in estimate.reasons)
    times = {name: closed_time("bert_base", name, gpu="A40-48GB", batch_size=32) for name in ("tf32", "amp_bf16")}
    strict_s = estimate.iteration_time_s
    gain = gains(precision="fp32", **question)
    assert f"tf32 is {strict_s / times['tf32']:.2f} times as fast as strict fp32" in gain
    assert f"amp_bf16 is {times['tf32'] / times['amp_bf16']:.2f} times as fast as tf32" in gain
    assert f"{strict_s / times['amp_bf16']:.2f} times as fast as strict fp32" in gain
    assert strict_s > 1.2 * times["tf32"] > 1.2 * times["amp_bf16"]


def test_mixed_precision_on_ampere_is_compared_with_tf32_and_strict_fp32() -> None:
    gain = gains(model="bert_base", precision="16-mixed", batch_size=32, gpu="A40-48GB")
    times = {
        name: closed_time("bert_base", name, gpu="A40-48GB", batch_size=32) for name in ("fp32", "tf32", "amp_fp16")
    }
    assert f"is {times['tf32'] / times['amp_fp16']:.2f} times as fast as tf32" in gain
    assert f"is {times['fp32'] / times['amp_fp16']:.2f} times as fast as strict fp32" in gain


@pytest.mark.parametrize("gpu", ["V100-SXM2-16GB", "cpu"])
def test_reasons_do_not_mention_tf32_where_there_is_none(gpu: str) -> None:
    for precision in ("fp32", "fp16" if gpu != "cpu" else "bf16"):
        reasons = predict_time("resnet50", precision, batch_size=32, gpu=gpu).reasons
        assert not any("tf32" in text or "strict" in text for text in reasons)


@pytest.mark.parametrize("model", ["mlp", "resnet18"])
@pytest.mark.parametrize(("precision", "adds"), [("amp_fp16", "casts and loss scaling add"), ("amp_bf16", "casts add")])
def test_a_launch_bound_network_is_slower_in_mixed_precision_and_the_reasons_say_so(
    model: str, precision: str, adds: str
) -> None:
    fp32_s, mixed_s = (closed_time(model, name, gpu=H100, batch_size=1) for name in ("fp32", precision))
    assert mixed_s > 1.1 * fp32_s
    reasons = predict_time(model, precision, batch_size=1, gpu=H100).reasons
    gain = gains(model=model, precision=precision, batch_size=1, gpu=H100)
    assert f"takes {mixed_s / fp32_s:.2f} times as long as strict fp32" in gain
    assert "times as fast" not in gain
    assert any(text.startswith("launch-bound") for text in reasons)
    assert any(f"{precision} does not pay here: {adds} operations" in text for text in reasons)


def test_a_large_batch_of_the_same_network_gains_and_no_advice_against_it_is_given() -> None:
    reasons = predict_time("resnet18", "amp_bf16", batch_size=512, gpu=H100).reasons
    assert not any("does not pay" in text for text in reasons)
    assert "times as fast as strict fp32" in gains(model="resnet18", precision="amp_bf16", batch_size=512, gpu=H100)


def test_equal_times_are_reported_as_equal() -> None:
    """tf32 adds no operations, so a launch-bound step takes what it takes in fp32."""
    assert "tf32 is as fast as strict fp32 here" in gains(model="mlp", precision="tf32", batch_size=1, gpu=H100)


@pytest.mark.parametrize(
    ("gpu", "model", "precision", "cause"),
    [
        ("GTX1080Ti-11GB", "vgg16", "amp_fp16", "computes fp16 products no faster than fp32 ones"),
        ("cpu", "mlp", "amp_bf16", "cost more than the products save"),
    ],
)
def test_a_loss_that_launches_do_not_cause_names_its_own_cause(
    gpu: str, model: str, precision: str, cause: str
) -> None:
    reasons = predict_time(model, precision, batch_size=2, gpu=gpu).reasons
    assert "times as long as fp32 here" in gains(model=model, precision=precision, batch_size=2, gpu=gpu)
    assert any("does not pay" in text and cause in text for text in reasons)
