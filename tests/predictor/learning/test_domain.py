"""What the training data covers, how far a question is from it, and which gaps are listed in few words."""

import dataclasses

import pytest

from precision_time.predictor.learning.domain import TrainingDomain
from precision_time.predictor.rows.observations import Observation, observe
from precision_time.predictor.setup.hardware import find_hardware
from precision_time.predictor.setup.precision import parse_precision
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.predictor.workloads.workload import find_workload

KNOWN, SISTER, STRANGER = "vit_b16", "vit_base_patch32_224", "gnmt"


@pytest.fixture(scope="module")
def rows(measure) -> list[Observation]:
    return observe(measure(models=("resnet50", KNOWN), batches=(8, 32)))


@pytest.fixture(scope="module")
def domain(rows) -> TrainingDomain:
    return TrainingDomain.of(rows)


def ask(model: str = "resnet50", *, gpu: str = "A100-SXM4-80GB", world_size: int = 1, **facts: object) -> TrainingSetup:
    precision = parse_precision(str(facts.pop("precision", "fp32")))
    usual = {"nodes": 1, "batch_size": 16}
    workload = find_workload(model, task_input=str(facts.pop("task_input", "")))
    return TrainingSetup(
        workload=workload, hardware=find_hardware(gpu), precision=precision, world_size=world_size,
        **usual | facts,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "gpu", "world_size", "regime"),
    [
        (KNOWN, "A100-SXM4-80GB", 2, "known"),
        ("vit_base_patch16_224", "A100-SXM4-80GB", 2, "known"),  # another name of a known network
        (KNOWN, "A100-SXM4-80GB", 3, "beyond scale"),
        (KNOWN, "A100-PCIe-40GB", 2, "new gpu"),
        (KNOWN, "A100-PCIe-40GB", 64, "new gpu"),
        (SISTER, "A100-SXM4-80GB", 2, "new model"),
        (SISTER, "A100-SXM4-80GB", 64, "new model"),
        (STRANGER, "A100-SXM4-80GB", 2, "new family"),
        (STRANGER, "A100-SXM4-80GB", 64, "new family"),
        (SISTER, "V100-SXM2-16GB", 2, "new model and gpu"),
        (STRANGER, "V100-SXM2-16GB", 64, "new model and gpu"),
    ],
)
def test_the_regime_names_what_is_new(domain, model: str, gpu: str, world_size: int, regime: str) -> None:
    assert domain.regime_of(ask(model, gpu=gpu, world_size=world_size)).name == regime


def test_the_domain_covers_the_measurements(domain) -> None:
    assert domain.networks == ("resnet50", "vit_base_patch16")
    assert domain.precisions == ("amp_bf16", "fp32")
    assert domain.max_world_size == 2
    assert domain.batch_sizes["resnet50"] == (8, 32)


def test_inside_the_domain_there_are_no_gaps(domain, rows) -> None:
    assert all(domain.list_gaps(observation.setup) == [] for observation in rows)
    assert domain.list_gaps(ask("vit_base_patch16_224")) == []


@pytest.mark.parametrize(
    ("facts", "gap"),
    [
        ({"model": STRANGER}, "gnmt was never measured, only"),
        ({"gpu": "T4-16GB"}, "T4-16GB was never measured"),
        ({"world_size": 4}, "4 ranks were never measured, at most 2"),
        ({"precision": "tf32"}, "tf32 was never measured, only amp_bf16, fp32"),
        ({"batch_size": 7}, "batch 7 is outside the measured 8 to 32"),
        ({"batch_size": 33}, "batch 33 is outside the measured 8 to 32"),
        ({"gradient_accumulation_steps": 2}, "2 micro-steps were never measured, at most 1"),
        ({"task_input": "1024"}, "input 1024 takes 171 GFLOP a sample, outside the measured 8.18"),
        ({"task_input": "64"}, "outside the measured 8.18"),
    ],
)
def test_each_gap_is_listed(domain, facts: dict, gap: str) -> None:
    (listed,) = domain.list_gaps(ask(**facts))
    assert gap in listed


def test_a_slightly_different_resolution_is_no_gap(domain) -> None:
    assert domain.list_gaps(ask(task_input="256")) == []


def test_all_gaps_are_listed_at_once(domain) -> None:
    setup = ask(STRANGER, gpu="T4-16GB", world_size=4, precision="amp_fp16", gradient_accumulation_steps=2)
    assert len(domain.list_gaps(setup)) == 5


def test_a_batch_is_compared_with_those_of_the_same_network(domain, rows) -> None:
    wide = TrainingDomain.of([*rows, *observe_batch(rows, "resnet50", 512)])
    assert wide.list_gaps(ask("resnet50", batch_size=512)) == []
    assert len(wide.list_gaps(ask(KNOWN, batch_size=512))) == 1


def observe_batch(rows: list[Observation], model: str, batch_size: int) -> list[Observation]:
    (*_, last) = (observation for observation in rows if observation.measurement.model == model)
    return observe([dataclasses.replace(last.measurement, per_gpu_batch_size=batch_size)])


def test_few_names_are_listed_and_many_counted_with_the_nearest(domain) -> None:
    few = domain.list_gaps(ask(STRANGER))[0]
    assert few.endswith("only resnet50, vit_base_patch16")
    many = dataclasses.replace(
        domain,
        networks=tuple(f"net{number}" for number in range(1000)),
        gpus=(*(f"Card-{number}" for number in range(100)), "V100-SXM2-16GB"),
        batch_sizes={},
    )
    for gap in many.list_gaps(ask(STRANGER, gpu="V100-SXM2-32GB")):
        assert len(gap) < 150
    of_gpus = many.list_gaps(ask(gpu="V100-SXM2-32GB"))[1]
    assert "101 others, among them V100-SXM2-16GB" in of_gpus


def test_many_names_without_a_near_one_are_only_counted(domain) -> None:
    many = dataclasses.replace(domain, gpus=tuple(f"zzzz{number}" for number in range(10)))
    (gap,) = many.list_gaps(ask(gpu="T4-16GB"))
    assert gap == "T4-16GB was never measured, only 10 others"


def test_a_network_without_a_common_name_goes_by_its_own() -> None:
    assert ask("vit_b16").network == ask("vit_base_patch16_224").network == "vit_base_patch16"
    nameless = dataclasses.replace(find_workload("mlp"), network="", name="mine")
    assert dataclasses.replace(ask(), workload=nameless).network == "mine"


def test_a_domain_is_the_same_after_its_dictionary(domain) -> None:
    assert TrainingDomain.from_dict(domain.to_dict()) == domain


@pytest.mark.parametrize("missing", ["networks", "batch_sizes", "max_world_size"])
def test_a_dictionary_that_lacks_a_part_is_refused(domain, missing: str) -> None:
    values = domain.to_dict()
    del values[missing]
    with pytest.raises(KeyError, match=missing):
        TrainingDomain.from_dict(values)


def test_a_network_and_a_gpu_measured_apart_are_a_new_pair(measure) -> None:
    apart = TrainingDomain.of(
        observe(measure(models=("resnet50",)) + measure(models=(KNOWN,), gpu="V100-SXM2-16GB", precisions=("fp32",)))
    )
    assert apart.regime_of(ask("resnet50", world_size=2)).name == "known"
    assert apart.regime_of(ask(KNOWN, world_size=2)).name == "new pair"
    assert any(f"{KNOWN} was never measured on A100" in gap for gap in apart.list_gaps(ask(KNOWN, world_size=2)))
    assert TrainingDomain.from_dict(apart.to_dict()) == apart
