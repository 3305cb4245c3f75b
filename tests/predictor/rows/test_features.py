"""The feature row: its columns in their order, each a number or NaN."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precision_time.predictor.answering.artifact import load_bundled
from precision_time.predictor.rows.features import (
    CLOSED_FORM_FEATURES,
    FEATURE_GROUPS,
    SETUP_FEATURES,
    WALK_FEATURES,
    Query,
    describe_walk,
    feature_matrix,
)
from precision_time.predictor.setup.hardware import find_hardware, supported_precisions
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism, parse_parallelism
from precision_time.predictor.setup.precision import parse_precision
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.predictor.workloads.workload import find_workload

MODELS = ("resnet50", "mlp", "bert_base", "llama2_7b", "mixtral_8x7b", "gnmt", "dlrm_small", "hifigan", "unet3d")


def make_setup(
    model: str = "resnet50", *, gpu: str = "A100-SXM4-80GB", precision: str = "fp32", **changes: Any
) -> TrainingSetup:
    values: dict[str, Any] = {"world_size": 1, "nodes": 1, "batch_size": 16} | changes
    return TrainingSetup(
        workload=find_workload(model), hardware=find_hardware(gpu), precision=parse_precision(precision), **values
    )


def describe(*positional: str, **changes: Any) -> dict[str, float]:
    return Query.of(make_setup(*positional, **changes)).row


implementations = st.builds(
    Implementation,
    framework=st.sampled_from(["pytorch", "jax", "megatron", "another"]),
    software_year=st.none() | st.floats(2016, 2026),
    channels_last=st.none() | st.booleans(),
    compiled=st.none() | st.booleans(),
    checkpointing=st.sampled_from([None, "none", "selective", "full"]),
    flash_attention=st.none() | st.booleans(),
    trainable_share=st.floats(0.001, 1.0),
    host_copy=st.booleans(),
    optimizer_step=st.booleans(),
)


@settings(deadline=None)
@given(
    model=st.sampled_from(MODELS),
    gpu=st.sampled_from(["A100-SXM4-80GB", "P100-PCIe-16GB", "GB200-186GB", "cpu"]),
    choice=st.integers(0, 20),
    strategy=st.sampled_from(
        ["ddp", "fsdp", "zero1", "zero2", "tp4", "pp2", "tp2-pp2-fsdp2", "cp2-ep2", "nn.DataParallel"]
    ),
    world_size=st.sampled_from([8, 16]),
    batch_size=st.integers(1, 4096),
    micro_steps=st.integers(1, 64),
    implementation=implementations,
)
def test_every_setup_has_every_column_in_order_and_each_is_a_number_or_missing(
    model, gpu, choice, strategy, world_size, batch_size, micro_steps, implementation
) -> None:
    supported = sorted(supported_precisions(find_hardware(gpu)))
    if strategy == "tp2-pp2-fsdp2":
        world_size = 8
    row = describe(
        model,
        gpu=gpu,
        precision=supported[choice % len(supported)],
        world_size=world_size,
        nodes=world_size // 8,
        batch_size=batch_size,
        gradient_accumulation_steps=micro_steps,
        parallelism=parse_parallelism(strategy, world_size=world_size),
        implementation=implementation,
    )
    assert tuple(row) == SETUP_FEATURES
    assert not any(math.isinf(value) for value in row.values())
    assert all(isinstance(value, float) for value in row.values())
    assert math.isfinite(row["log_closed_s"])


def test_one_rank_lacks_only_the_columns_between_ranks_and_unknown_facts() -> None:
    missing = {name for name, value in describe().items() if math.isnan(value)}
    between_ranks = {"log_closed_communication_s", "closed_exposed_share", "log_message_bytes", "log_link_bytes_per_s",
                     "log_network_bytes_per_s", "bucket_count"}  # fmt: skip
    assert between_ranks <= missing
    # the options of the script are unknown
    assert {"software_year", "channels_last", "compiled", "checkpointing", "flash_attention"} <= missing
    # a convolutional network has no number of layers and no hidden size
    assert {"log_layers", "log_hidden_size"} <= missing
    eight = describe(world_size=8)
    assert all(math.isfinite(eight[name]) for name in between_ranks - {"log_network_bytes_per_s"})
    assert math.isfinite(describe(world_size=16, nodes=2)["log_network_bytes_per_s"])


@pytest.mark.bundle
def test_the_shipped_trees_read_these_columns_in_this_order() -> None:
    shipped = load_bundled().manifest.feature_names
    assert (shipped["total"], shipped["compute"]) == (list(SETUP_FEATURES), list(SETUP_FEATURES))


def test_every_column_is_in_exactly_one_group() -> None:
    names = [name for members in FEATURE_GROUPS.values() for name in members]
    assert sorted(names) == sorted(SETUP_FEATURES)
    assert len(set(SETUP_FEATURES)) == len(SETUP_FEATURES)
    assert all(FEATURE_GROUPS.values())
    assert FEATURE_GROUPS["closed form"] == set(CLOSED_FORM_FEATURES)


@pytest.mark.parametrize(
    ("group", "members"),
    [
        ("precision", {"compute_bytes", "loss_scaling", "bytes_cast", "bytes_over_fp32"}),
        ("hardware", {"log_memory_bytes_per_s", "is_cpu"}),
        ("implementation", {"compiled", "checkpointing", "framework_megatron"}),
        ("ranks and links", {"log_world_size", "sharding", "log_link_bytes_per_s"}),
        ("network", {"log_params", "is_recurrent", "flops_depthwise", "roof_64", "bytes_gather"}),
        ("batch", {"log_batch", "log_accumulation", "log_walked_flops", "log_flops_per_operation"}),
        ("closed form", {"log_operation_roofline_s", "log_launch_over_roofline"}),
    ],
)
def test_columns_are_in_the_group_that_they_describe(group: str, members: set[str]) -> None:
    assert members <= FEATURE_GROUPS[group]


def test_times_and_sizes_are_natural_logs() -> None:
    query = Query.of(make_setup(precision="amp_fp16", world_size=8, gradient_accumulation_steps=4))
    work, closed = query.setup.workload, query.closed
    expected = {
        "log_closed_s": math.log(closed.iteration_time_s),
        "log_closed_compute_s": math.log(closed.compute_time_s),
        "optimizer_share": closed.optimizer_time_s / closed.iteration_time_s,
        "log_batch": math.log(16),
        "log_accumulation": math.log(4),
        "log_world_size": math.log(8),
        "log_data": math.log(8),
        "log_tensor": 0.0,
        "log_params": math.log(work.params),
        "log_flops": math.log(16 * (work.forward_flops_per_sample + work.backward_flops_per_sample)),
        "log_input_size": math.log(224),
        # autocast sums gradients in fp32
        "log_message_bytes": math.log(4 * work.params),
        "compute_bytes": 2.0,
        "storage_bytes": 4.0,
        "loss_scaling": 1.0,
        "log_peak_over_fp32": math.log(312 / 19.5),
        "is_attention": 0.0,
        "convolution_share": work.convolution_flops_share,
    }
    assert {name: query.row[name] for name in expected} == pytest.approx(expected)


def test_a_walked_network_has_the_columns_of_its_walk_for_its_batch_and_device() -> None:
    setup = make_setup(precision="amp_fp16", batch_size=48)
    walked = describe_walk(setup.workload.walks, setup.hardware, setup.precision, samples=48)
    row = Query.of(setup).row
    assert {name: row[name] for name in WALK_FEATURES} == walked
    assert all(math.isfinite(value) for name, value in walked.items() if name not in {"log_scores"})


def test_a_network_without_a_walk_has_no_values_in_its_columns() -> None:
    bare = dataclasses.replace(find_workload("resnet50"), walks=None)
    row = Query.of(dataclasses.replace(make_setup(), workload=bare)).row
    assert {name for name in WALK_FEATURES if math.isnan(row[name])} == set(WALK_FEATURES)
    assert math.isfinite(row["log_closed_s"])


@pytest.mark.parametrize(
    ("implementation", "expected"),
    [
        (Implementation(), {"checkpointing": math.nan, "compiled": math.nan, "framework_pytorch": 1.0}),
        (Implementation(checkpointing="none", compiled=False), {"checkpointing": 0.0, "compiled": 0.0}),
        (Implementation(checkpointing="selective", compiled=True), {"checkpointing": 1.0, "compiled": 1.0}),
        (Implementation(checkpointing="full"), {"checkpointing": 2.0}),
        (Implementation(framework="jax"), {"framework_jax": 1.0, "framework_pytorch": 0.0}),
        (Implementation(framework="caffe"), {"framework_jax": 0.0, "framework_pytorch": 0.0}),
        (Implementation(tuned=True, packed=True), {"tuned": 1.0, "packed": 1.0}),
    ],
)
def test_known_facts_of_the_script_have_values_and_unknown_ones_none(implementation, expected) -> None:
    row = describe(implementation=implementation)
    assert {name: row[name] for name in expected} == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Parallelism(data=8), {"sharding": 0.0, "single_process": 0.0}),
        (Parallelism(data=8, sharding="optimizer"), {"sharding": 1.0}),
        (Parallelism(data=8, sharding="parameters"), {"sharding": 3.0}),
        (Parallelism(data=8, single_process=True), {"single_process": 1.0}),
        (Parallelism(tensor=4, pipeline=2), {"log_tensor": math.log(4), "log_pipeline": math.log(2), "log_data": 0.0}),
        (Parallelism(data=4, context=2, expert=2), {"log_context": math.log(2), "log_expert": math.log(2)}),
    ],
)
def test_the_layout_is_described_by_its_degrees(layout: Parallelism, expected: dict[str, float]) -> None:
    row = describe("llama2_7b", world_size=8, parallelism=layout)
    assert {name: row[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        ("resnet50", set()),
        ("bert_base", {"is_attention"}),
        ("llama2_7b", {"is_attention", "is_language_decoder"}),
        ("mixtral_8x7b", {"is_attention", "is_mixture_of_experts"}),
        ("gnmt", {"is_recurrent"}),
        ("hifigan", {"is_speech"}),
        ("dlrm_small", {"is_recommendation"}),
        ("unet3d", {"is_segmentation"}),
    ],
)
def test_the_kind_of_a_network_is_a_flag(model: str, kinds: set[str]) -> None:
    row = describe(model)
    flags = {"is_attention", "is_detection", "is_segmentation", "is_language_decoder", "is_mixture_of_experts",
             "is_recurrent", "is_speech", "is_recommendation", "is_diffusion"}  # fmt: skip
    assert {name for name in flags if row[name]} == kinds


def test_a_mixture_of_experts_has_a_share_of_active_parameters() -> None:
    work = find_workload("mixtral_8x7b")
    assert work.active_params is not None
    assert describe("mixtral_8x7b")["log_active_share"] == pytest.approx(math.log(work.active_params / work.params))
    assert describe("llama2_7b")["log_active_share"] == 0.0


def test_the_matrix_has_the_named_columns_in_the_given_order() -> None:
    rows = [describe(), describe(world_size=8)]
    matrix = feature_matrix(rows, ("log_world_size", "log_batch"))
    assert matrix.dtype == np.float32
    np.testing.assert_allclose(matrix, [[0.0, math.log(16)], [math.log(8), math.log(16)]], rtol=1e-6)
    assert feature_matrix([], SETUP_FEATURES).shape == (0, len(SETUP_FEATURES))
