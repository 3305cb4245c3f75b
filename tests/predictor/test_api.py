"""predict_time answers on a bare install, from an artifact when there is one, and says which and why."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precision_time import predict_time
from precision_time.storage.errors import (
    InputError,
    IntegrityError,
    NotFoundError,
    OutOfDomainError,
    PrecisionUnsupportedError,
    UnknownNameError,
)

pytestmark = pytest.mark.usefixtures("nothing_published")


@pytest.fixture(scope="module")
def registry(measure, publish_made_up, tmp_path_factory) -> str:
    """A registry with one published predictor, trained on the made-up world on an A100."""
    url = str(tmp_path_factory.mktemp("registry"))
    publish_made_up(url, measure())
    return url


def test_the_call_of_the_readme_answers_without_an_artifact() -> None:
    estimate = predict_time(model="resnet50", precision="mixed_fp16_fp32", gpus=8, batch_size=256)
    assert estimate.effective_precision == "amp_fp16"
    assert estimate.requested_precision == "mixed_fp16_fp32"
    assert estimate.global_batch_size == 2048
    assert estimate.artifact_id is None
    assert estimate.low_s < estimate.iteration_time_s < estimate.high_s
    # ResNet-50 at 256 images takes an A100 something between a tenth of a second and half a second
    assert 0.05 < estimate.iteration_time_s < 0.8
    assert any("assumed A100" in reason for reason in estimate.reasons)
    assert any("closed forms" in reason for reason in estimate.reasons)


def test_an_artifact_answers_for_the_hardware_it_was_trained_on(registry, measure) -> None:
    measured = next(row for row in measure() if row.model == "mlp" and row.world_size == 2 and row.precision == "fp32")
    estimate = predict_time(
        model="mlp", precision="fp32", gpus=2, batch_size=measured.per_gpu_batch_size, artifact=f"{registry}/default"
    )
    assert estimate.artifact_id == "default@1"
    assert estimate.regime == "known"
    assert estimate.iteration_time_s == pytest.approx(measured.iteration_time_s, rel=0.1)
    assert math.log(estimate.high_s / estimate.iteration_time_s) == pytest.approx(0.1)
    parts = estimate.compute_time_s + estimate.exposed_communication_s
    assert parts == pytest.approx(estimate.iteration_time_s)


def test_other_hardware_is_answered_by_the_closed_forms_and_said_so(registry) -> None:
    bare = predict_time("mlp", "fp32", batch_size=16, gpu="H100-SXM5-80GB")
    estimate = predict_time("mlp", "fp32", batch_size=16, gpu="H100-SXM5-80GB", artifact=f"{registry}/default")
    assert estimate.artifact_id is None
    assert estimate.regime == "new gpu"
    assert estimate.iteration_time_s == bare.iteration_time_s
    assert any("default@1 has no answer for H100-SXM5-80GB" in reason for reason in estimate.reasons)


def test_an_unseen_model_gets_the_wider_interval_of_its_regime(registry) -> None:
    estimate = predict_time("gpt2_mini", "fp32", batch_size=16, artifact=f"{registry}/default")
    assert estimate.regime == "new family"
    assert math.log(estimate.high_s / estimate.iteration_time_s) == pytest.approx(0.5)
    assert not any("widest" in reason for reason in estimate.reasons)


@pytest.mark.parametrize("gap", [{"batch_size": 4096}, {"precision": "tf32"}, {"gradient_accumulation_steps": 8}])
def test_a_question_that_no_split_resembles_gets_the_widest_interval_and_says_so(registry, gap: dict) -> None:
    question = {"model": "mlp", "precision": "fp32", "batch_size": 16} | gap
    estimate = predict_time(**question, artifact=f"{registry}/default")
    assert math.log(estimate.high_s / estimate.iteration_time_s) == pytest.approx(math.log(2.5))
    assert any("widest" in reason for reason in estimate.reasons)


def test_strict_refuses_what_the_artifact_never_saw(registry) -> None:
    predict_time("mlp", "fp32", batch_size=16, artifact=f"{registry}/default", strict=True)
    for question in (
        {"model": "gpt2_mini"},
        {"gpu": "T4"},
        {"gpus": 8},
        {"precision": "tf32"},
        {"batch_size": 4096},
        {"gradient_accumulation_steps": 2},
    ):
        with pytest.raises(OutOfDomainError, match="outside the training data"):
            predict_time(
                **({"model": "mlp", "precision": "fp32", "batch_size": 16} | question),
                artifact=f"{registry}/default",
                strict=True,
            )
    with pytest.raises(OutOfDomainError):
        predict_time("mlp", "fp32", batch_size=16, strict=True)


def test_the_environment_names_the_registry_or_the_artifact(registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECISION_TIME_REGISTRY", registry)
    assert predict_time("mlp", "fp32", batch_size=16).artifact_id == "default@1"
    monkeypatch.delenv("PRECISION_TIME_REGISTRY")
    monkeypatch.setenv("PRECISION_TIME_ARTIFACT", f"{registry}/default@1")
    assert predict_time("mlp", "fp32", batch_size=16).artifact_id == "default@1"


def test_a_registry_without_a_default_is_said_and_a_named_artifact_must_exist(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PRECISION_TIME_REGISTRY", str(tmp_path))
    estimate = predict_time("mlp", "fp32", batch_size=16)
    assert any("holds no artifact called 'default'" in reason for reason in estimate.reasons)
    with pytest.raises(NotFoundError):
        predict_time("mlp", "fp32", batch_size=16, artifact=f"{tmp_path}/other@champion")


def test_a_changed_byte_is_refused_and_never_answers(registry, tmp_path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(registry, copy)
    trees = copy / "default" / "1" / "trees.npz"
    data = bytearray(trees.read_bytes())
    data[len(data) // 2] ^= 1
    trees.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"trees\.npz"):
        predict_time("mlp", "fp32", batch_size=16, artifact=f"{copy}/default")


def test_job_totals_count_steps_or_epochs_and_multiply() -> None:
    job = {"model": "resnet50", "precision": "tf32", "gpus": 8, "batch_size": 256}
    by_steps = predict_time(**job, steps=1000)
    assert by_steps.total_time_s == pytest.approx(1000 * by_steps.iteration_time_s)
    assert by_steps.total_low_s == pytest.approx(1000 * by_steps.low_s)
    by_epochs = predict_time(**job, epochs=90, dataset_size=1_281_167)
    assert by_epochs.steps == 90 * math.ceil(1_281_167 / 2048)
    assert predict_time(**job, epochs=np.int64(90), dataset_size=1_281_167).steps == by_epochs.steps
    assert by_epochs.epoch_time_s == pytest.approx(math.ceil(1_281_167 / 2048) * by_epochs.iteration_time_s)
    assert predict_time(**job).total_time_s is None


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ({"steps": 10, "epochs": 2, "dataset_size": 100}, "given twice"),
        ({"epochs": 2}, "size of the data"),
        ({"epochs": -1, "dataset_size": 100}, "epochs"),
        ({"epochs": float("nan"), "dataset_size": 100}, "epochs"),
        ({"epochs": "three", "dataset_size": 100}, "epochs"),
        ({"dataset_size": 0, "epochs": 1}, "dataset_size"),
        ({"steps": 0}, "steps"),
        ({"gpus": 0}, "gpus"),
        ({"gpus": -8}, "gpus"),
        ({"gpus": 2.5}, "gpus"),
        ({"gpus": True}, "gpus"),
        ({"gpus": None}, "gpus"),
        ({"gpus": "8"}, "gpus"),
        ({"gpus": 10**18}, "gpus"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 10**18}, "batch_size"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"gpus": 8, "nodes": 3}, "8 / 3"),
        ({"gpus": 9}, "9 / 2 nodes"),
        ({"strategy": "sideways"}, "sideways"),
        ({"model": None}, "model"),
        ({"model": b"resnet50"}, "model"),
        ({"precision": None}, "precision"),
        ({"precision": True}, "precision"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_by_name(job: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        predict_time(**({"model": "resnet50", "precision": "fp32", "batch_size": 32} | job))


@pytest.mark.parametrize(
    ("job", "offers"),
    [
        ({"model": "resnet5O"}, "resnet50"),
        ({"precision": "bf61-mixed"}, "bf16-mixed"),
        ({"gpu": "A10O-SXM4-80GB"}, "A100-SXM4-80GB"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(job: dict, offers: str) -> None:
    with pytest.raises(UnknownNameError, match=offers) as caught:
        predict_time(**({"model": "resnet50", "precision": "fp32", "batch_size": 32} | job))
    assert len(caught.value.nearest) == 3


def test_a_precision_the_device_lacks_is_refused_by_name() -> None:
    with pytest.raises(PrecisionUnsupportedError, match="V100"):
        predict_time("resnet50", "bf16-mixed", batch_size=32, gpu="V100-SXM2-16GB")


def test_the_network_between_nodes_decides_whether_a_second_node_pays() -> None:
    def per_sample(network: str, gpus: int) -> float:
        estimate = predict_time(
            "bert_base", "amp_fp16", batch_size=4, gpus=gpus, gpu="V100-SXM2-16GB", network_bandwidth=network
        )
        return estimate.iteration_time_s / estimate.global_batch_size

    assert per_sample("1 Gbit/s", 16) > per_sample("1 Gbit/s", 8)
    assert per_sample("400 Gbit/s", 16) < per_sample("400 Gbit/s", 8)
    with pytest.raises(InputError, match="25 Gbit/s"):
        per_sample("25", 16)


def test_a_device_of_ones_own_file_is_answered_for(tmp_path) -> None:
    figures = {
        "memory_bytes": 24_000_000_000, "memory_bytes_per_s": 1e12, "gpus_per_node": 4, "link_bytes_per_s": 31.5e9,
        "network_bytes_per_s": 12.5e9, "all_reduce_latency_s": 50e-6, "launch_overhead_s": 6e-6,
        "peak_flops_per_s.fp32": 40e12, "compute_capability": 9.0,
    }  # fmt: skip
    lines = [f'{name} = {{ value = {value}, source = "mine" }}' for name, value in figures.items()]
    head = ["[sources]", 'mine = "measured by me"', '[hardware."My Card"]', 'kind = "gpu"', 'architecture = "new"']
    file = tmp_path / "mine.toml"
    file.write_text("\n".join([*head, 'link = "pcie4"', *lines]))
    estimate = predict_time("resnet50", "fp32", batch_size=32, gpu="my card", hardware_file=file)
    assert estimate.gpu == "My Card"
    with pytest.raises(UnknownNameError):
        predict_time("resnet50", "fp32", batch_size=32, gpu="my card")


def test_numpy_integers_count_as_integers() -> None:
    estimate = predict_time("resnet50", "fp32", batch_size=np.int64(32), gpus=np.int32(2))
    assert estimate.global_batch_size == 64
    assert type(estimate.global_batch_size) is int


def test_more_micro_steps_take_longer_and_communicate_once() -> None:
    once = predict_time("resnet50", "fp32", batch_size=32, gpus=8)
    four = predict_time("resnet50", "fp32", batch_size=32, gpus=8, gradient_accumulation_steps=4)
    assert four.global_batch_size == 4 * once.global_batch_size
    assert 3 < four.compute_time_s / once.compute_time_s < 4
    assert four.communication_time_s == once.communication_time_s


anything = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers()))


@settings(max_examples=300, deadline=None)
@given(gpus=anything, batch_size=anything, steps=anything, nodes=anything)
def test_any_input_gives_a_positive_time_or_a_named_error(gpus, batch_size, steps, nodes) -> None:
    with contextlib.suppress(InputError):
        estimate = predict_time("mlp", "fp32", gpus=gpus, batch_size=batch_size, steps=steps, nodes=nodes)
        assert 0 < estimate.low_s < estimate.iteration_time_s < estimate.high_s < math.inf
