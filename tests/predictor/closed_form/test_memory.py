"""Memory of a training step, against published figures, hand counts and public rows, which all ran."""

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from precision_time.predictor.closed_form.memory import (
    GPU_WORKSPACE_BYTES,
    estimate_memory,
    explain_memory,
    largest_batch,
)
from precision_time.predictor.rows.observations import observe_table
from precision_time.predictor.rows.public_table import load_public_table
from precision_time.predictor.setup.hardware import find_hardware
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism
from precision_time.predictor.setup.precision import parse_precision
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.predictor.workloads.walk import Walk
from precision_time.predictor.workloads.workload import WorkloadFeatures, find_workload
from precision_time.storage.errors import UnknownNameError

GB = 1e9
MEGABYTE = 10**6


def walk_of(**changes: float) -> Walk:
    """1 GB of gradients; a sample saves 100 MB and takes 120 MB at the peak, where half of the gradients live too."""
    values: dict[str, Any] = {
        "counts": {}, "roof_forward": (0.0,) * 5, "roof_backward": (0.0,) * 5, "ready": (0.0,) * 16,
        "saved": 100.0 * MEGABYTE, "saved_fixed": 0.0, "peak": 120.0 * MEGABYTE, "peak_fixed": 500.0 * MEGABYTE,
        "scores": 1.0 * MEGABYTE, "narrow_flops_share": 0.0, "aligned_flops_share": 1.0, "serial_steps": 0.0,
        "gradient_bytes": 1.0 * GB, "gradient_tensors": 100.0,
    }  # fmt: skip
    return Walk(**(values | changes))


def work_of(params: float = 250e6, *, walk: Walk | None = None, **changes: Any) -> WorkloadFeatures:
    """A transformer of 20 layers; with ``walk`` its walks, the one under autocast with 500 MB of casts."""
    walks = None
    if walk is not None:
        casts = {"saved_fixed": 2 * params, "peak_fixed": walk.peak_fixed + 2 * params}
        walks = {"fp32": walk, "amp": dataclasses.replace(walk, saved=0.7 * walk.saved, peak=0.7 * walk.peak, **casts)}
    gpt2 = find_workload("gpt2")
    sizes = {"layers": 20, "hidden_size": 512, "heads": 8, "kv_heads": 8, "ffn_size": 2048, "sequence_length": 256}
    sizes |= {"vocab": 0, "params": round(params), "active_params": round(params), "parameter_tensors": 240}
    return dataclasses.replace(gpt2, **{"walks": walks, "optimizer": "adamw"} | sizes | changes)


def setup_of(
    workload: WorkloadFeatures,
    *,
    precision: str = "fp32",
    layout: Parallelism | None = None,
    batch: int = 8,
    micro_steps: int = 1,
    gpu: str = "A100-SXM4-80GB",
    **facts: Any,
) -> TrainingSetup:
    world_size = layout.world_size if layout else 1
    return TrainingSetup(
        workload=workload,
        hardware=find_hardware(gpu),
        precision=parse_precision(precision),
        world_size=world_size,
        nodes=max(1, world_size // 8),
        batch_size=batch,
        gradient_accumulation_steps=micro_steps,
        parallelism=layout,
        implementation=Implementation(**facts),
    )


def model_states(setup: TrainingSetup) -> float:
    estimate = estimate_memory(setup)
    return estimate.parameters_bytes + estimate.gradients_bytes + estimate.optimizer_bytes


@pytest.mark.parametrize(
    ("sharding", "gigabytes"), [("none", 120.0), ("optimizer", 31.4), ("gradients", 16.6), ("parameters", 1.9)]
)
def test_model_states_are_those_of_the_zero_paper(sharding: Any, gigabytes: float) -> None:
    # Rajbhandari et al. (2020), figure 1: 7.5 billion parameters, Adam, 64 ranks
    setup = setup_of(work_of(7.5e9), precision="amp_fp16", layout=Parallelism(data=64, sharding=sharding))
    assert model_states(setup) / GB == pytest.approx(gigabytes, abs=0.05)


def test_adam_takes_16_bytes_a_parameter_in_fp32_and_8_in_pure_bf16() -> None:
    assert model_states(setup_of(work_of(7e9))) == 112e9
    assert model_states(setup_of(work_of(7e9), precision="bf16")) == 56e9


def test_optimizers_keep_their_states() -> None:
    state_bytes = {
        name: estimate_memory(setup_of(work_of(1e9, optimizer=name))).optimizer_bytes
        for name in ("sgd", "sgd_momentum", "adam", "lamb", "adafactor")
    }
    assert state_bytes["sgd"] == 0
    assert state_bytes["sgd_momentum"] == 4e9
    assert state_bytes["adam"] == state_bytes["lamb"] == 8e9
    assert 0 < state_bytes["adafactor"] < 0.1e9


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="adamv"):
        estimate_memory(setup_of(work_of(optimizer="adamv")))


def test_the_total_of_a_walk_is_parameters_states_and_its_peak() -> None:
    estimate = estimate_memory(setup_of(work_of(walk=walk_of()), batch=200))
    batch = 200 * 16 * 256
    assert estimate.how_known == "walk"
    assert estimate.activations_bytes == 200 * 100 * MEGABYTE
    assert estimate.total_bytes == pytest.approx(
        1 * GB + 2 * GB + 200 * 120 * MEGABYTE + 500 * MEGABYTE + batch + GPU_WORKSPACE_BYTES
    )


def test_small_batches_are_fullest_later_in_the_backward_pass() -> None:
    late = walk_of(peak_small=60.0 * MEGABYTE, peak_small_fixed=2000.0 * MEGABYTE)
    few, many = (estimate_memory(setup_of(work_of(walk=late), batch=batch)).total_bytes for batch in (10, 100))
    standing = 3 * GB + GPU_WORKSPACE_BYTES
    assert few == pytest.approx(standing + 10 * (60 * MEGABYTE + 16 * 256) + 2000 * MEGABYTE)
    assert many == pytest.approx(standing + 100 * (120 * MEGABYTE + 16 * 256) + 500 * MEGABYTE)


def test_the_step_of_the_optimizer_is_the_fullest_moment_of_a_small_batch() -> None:
    # torch's multi-tensor loops make one list as large as the gradients
    estimate = estimate_memory(setup_of(work_of(walk=walk_of()), batch=1))
    assert estimate.total_bytes == pytest.approx(1 * GB + 2 * GB + 1 * GB + 1 * GB + GPU_WORKSPACE_BYTES, rel=1e-4)


def test_accumulation_keeps_gradients_and_multiplies_nothing() -> None:
    work = work_of(walk=walk_of())
    once, often = (estimate_memory(setup_of(work, batch=200, micro_steps=number)) for number in (1, 16))
    assert often.activations_bytes == once.activations_bytes
    # half of the gradients live at the walk's peak already
    assert often.total_bytes - once.total_bytes == pytest.approx(0.5 * GB)


def test_sharded_optimizers_cast_nothing() -> None:
    work = work_of(walk=walk_of())
    plain = estimate_memory(setup_of(work, precision="amp_bf16", layout=Parallelism(data=8)))
    sharded = estimate_memory(setup_of(work, precision="amp_bf16", layout=Parallelism(data=8, sharding="optimizer")))
    assert plain.activations_bytes - sharded.activations_bytes == 2 * 250e6


def test_ddp_keeps_gradients_twice_and_one_device_does_not() -> None:
    work = work_of(walk=walk_of())
    alone, two = (estimate_memory(setup_of(work, layout=Parallelism(data=ranks))) for ranks in (1, 2))
    fused = estimate_memory(setup_of(work, layout=Parallelism(data=2), framework="megatron"))
    assert alone.communication_bytes == fused.communication_bytes == 0
    assert two.communication_bytes == two.gradients_bytes == 1 * GB


def test_fsdp_gathers_a_layer_and_the_next_one() -> None:
    estimate = estimate_memory(
        setup_of(work_of(), precision="amp_bf16", layout=Parallelism(data=8, sharding="parameters"))
    )
    layer = 250e6 / 20
    assert estimate.communication_bytes == pytest.approx(2 * 2 * layer + 4 * layer)


def test_tensor_ranks_divide_parameters_and_activations() -> None:
    work = work_of(walk=walk_of())
    whole, half = (estimate_memory(setup_of(work, layout=Parallelism(tensor=ranks))) for ranks in (1, 2))
    assert half.parameters_bytes == whole.parameters_bytes / 2
    assert half.activations_bytes == whole.activations_bytes / 2


def test_a_pipeline_keeps_a_whole_network_of_activations_in_flight() -> None:
    # Korthikanti et al. (2022): p micro-batches of 1/p of the layers, whatever p is; (1 + (p-1)/(p m)) interleaved
    work = work_of(walk=walk_of())
    whole = estimate_memory(setup_of(work)).activations_bytes
    deep = estimate_memory(setup_of(work, layout=Parallelism(pipeline=4), micro_steps=16))
    short = estimate_memory(setup_of(work, layout=Parallelism(pipeline=4), micro_steps=2))
    chunked = estimate_memory(setup_of(work, layout=Parallelism(pipeline=4, virtual_stages=2), micro_steps=16))
    assert deep.activations_bytes == pytest.approx(whole)
    assert short.activations_bytes == pytest.approx(whole / 2)
    assert chunked.activations_bytes == pytest.approx(whole * (1 + 3 / 8))
    assert deep.parameters_bytes == 4 * 250e6 / 4


def test_experts_divide_over_their_ranks_alone() -> None:
    mixture = work_of(1000e6, active_params=300e6, experts=8, active_experts=1)
    plain, spread = (
        estimate_memory(setup_of(mixture, layout=Parallelism(data=8, expert=expert))).parameters_bytes
        for expert in (1, 8)
    )
    # 700e6 = 7/8 of the experts are not at work: 800e6 parameters inside them
    assert plain == 4 * 1000e6
    assert spread == pytest.approx(4 * (200e6 + 100e6))


def test_full_checkpointing_keeps_one_tensor_a_layer_and_one_layer_at_work() -> None:
    estimate = estimate_memory(setup_of(work_of(walk=walk_of()), batch=1, checkpointing="full"))
    boundaries = 20 * 256 * 512 * 4
    assert estimate.activations_bytes == pytest.approx(boundaries + 100 * MEGABYTE / 20)


def test_checkpointing_a_network_of_unknown_layers_follows_the_square_root() -> None:
    work = dataclasses.replace(find_workload("resnet50"), parameter_tensors=3 * 64, walks=None)
    plain, checkpointed = (estimate_memory(setup_of(work, checkpointing=kind)) for kind in (None, "full"))
    assert checkpointed.activations_bytes == pytest.approx(2 / 8 * plain.activations_bytes)


def test_math_attention_adds_its_scores_and_selective_checkpointing_takes_them_away() -> None:
    work = work_of(walk=walk_of())
    fused, written, selective = (
        estimate_memory(setup_of(work, batch=1, precision="amp_bf16", **facts)).activations_bytes
        for facts in (
            {},
            {"flash_attention": False},
            {"flash_attention": False, "checkpointing": "selective"},
        )
    )
    assert written - fused == pytest.approx(MEGABYTE * (4 + 2))
    # one layer's scores are alive at a time
    assert selective - fused == pytest.approx(MEGABYTE * (4 + 2) / 20)


def test_a_card_follows_the_count_of_korthikanti() -> None:
    # 34 s b h bytes a layer in 16 bit, 2 of them for the dropout that we leave out, and fp32 log-probabilities
    params = 20 * 12 * 512**2 + 2 * 1000 * 512
    sizes = {"vocab": 1000, "active_params": params, "activations_per_sample": 1.0}
    estimate = estimate_memory(setup_of(work_of(params, **sizes), precision="bf16", batch=2))
    assert estimate.how_known == "card"
    assert estimate.activations_bytes == pytest.approx(2 * 256 * (20 * 32 * 512 + 4 * 1000))


def test_fused_kernels_keep_no_more_than_the_sizes_of_a_transformer_need() -> None:
    work = work_of(walk=walk_of(saved=1.0 * GB, peak=1.2 * GB))
    eager, compiled = (estimate_memory(setup_of(work, batch=1, compiled=fused)) for fused in (False, True))
    card = estimate_memory(setup_of(dataclasses.replace(work, walks=None), batch=1))
    assert compiled.activations_bytes == pytest.approx(card.activations_bytes)
    assert card.activations_bytes < eager.activations_bytes


def test_frozen_weights_have_neither_gradients_nor_states() -> None:
    work = work_of(walk=walk_of())
    whole, adapters = (
        estimate_memory(setup_of(work, precision="amp_bf16", trainable_share=share)) for share in (1.0, 0.01)
    )
    assert adapters.gradients_bytes == pytest.approx(0.01 * whole.gradients_bytes)
    assert adapters.optimizer_bytes == pytest.approx(0.01 * whole.optimizer_bytes)
    assert adapters.parameters_bytes == pytest.approx(250e6 * (0.99 * 2 + 0.01 * 4))
    assert adapters.activations_bytes < whole.activations_bytes


def test_a_narrower_precision_takes_less_at_large_batches_and_autocast_copies_weights() -> None:
    work = work_of(walk=walk_of())
    totals = [
        estimate_memory(setup_of(work, precision=name, batch=256)).total_bytes for name in ("fp32", "amp_bf16", "bf16")
    ]
    assert totals == sorted(totals, reverse=True)
    assert estimate_memory(setup_of(work, precision="amp_bf16", batch=1)).activations_bytes > 2 * 250e6


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "bf16", "fp8"])
@pytest.mark.parametrize(
    "layout",
    [None, Parallelism(data=8), Parallelism(data=8, sharding="parameters"), Parallelism(tensor=2, pipeline=2)],
)
@pytest.mark.parametrize("facts", [{}, {"checkpointing": "full"}, {"flash_attention": False}])
def test_the_largest_batch_fits_and_one_sample_more_does_not(
    precision: str, layout: Parallelism | None, facts: dict[str, Any]
) -> None:
    setup = setup_of(work_of(walk=walk_of()), precision=precision, layout=layout, gpu="H100-SXM5-80GB", **facts)
    batch = largest_batch(setup)
    assert batch is not None
    assert estimate_memory(setup).largest_batch == batch
    # of a full pipeline, also with fewer micro-steps
    full = dataclasses.replace(setup, gradient_accumulation_steps=setup.layout.pipeline)
    assert largest_batch(full) == batch
    assert estimate_memory(dataclasses.replace(full, batch_size=batch)).fits
    assert not estimate_memory(dataclasses.replace(full, batch_size=batch + 1)).fits


def test_no_batch_fits_a_model_that_is_too_large() -> None:
    setup = setup_of(work_of(7e9, walk=walk_of(gradient_bytes=28 * GB)), gpu="A100-SXM4-80GB")
    estimate = estimate_memory(setup)
    assert largest_batch(setup) is None
    assert not estimate.fits
    assert "not even a batch of 1 fits" in str(explain_memory(setup, estimate))


def test_ranks_on_one_host_share_its_memory() -> None:
    work = work_of(walk=walk_of())
    alone, four = (estimate_memory(setup_of(work, layout=Parallelism(data=ranks), gpu="cpu")) for ranks in (1, 4))
    assert four.device_bytes == alone.device_bytes / 4
    assert alone.workspace_bytes == 0


def test_a_setup_that_fits_well_has_no_warning() -> None:
    setup = setup_of(work_of(walk=walk_of()))
    assert explain_memory(setup, estimate_memory(setup)) is None


def test_a_setup_that_nearly_fills_the_device_has_a_warning() -> None:
    setup = setup_of(work_of(walk=walk_of()))
    setup = dataclasses.replace(setup, batch_size=largest_batch(setup))
    warning = str(explain_memory(setup, estimate_memory(setup)))
    assert "may run out of memory" in warning
    assert f"the largest batch that fits is {setup.batch_size}" in warning


def test_the_warning_gives_the_numbers_and_only_changes_that_help() -> None:
    setup = setup_of(work_of(walk=walk_of()), batch=800)
    estimate = estimate_memory(setup)
    warning = str(explain_memory(setup, estimate))
    assert f"about {estimate.total_bytes / GB:.3g} GB" in warning
    assert "the 85.9 GB of A100-SXM4-80GB" in warning
    assert f"the largest batch that fits is {estimate.largest_batch}" in warning
    # one rank has no others to shard over, and its attention is fused already
    assert "fsdp" not in warning
    assert "fused" not in warning
    assert warning.endswith("amp_bf16 (71.7 GB) or activation checkpointing (31.9 GB) would fit")


def test_changes_that_help_but_are_not_enough_are_named_separately() -> None:
    setup = setup_of(work_of(7e9, walk=walk_of(gradient_bytes=28 * GB)), layout=Parallelism(data=2))
    warning = str(explain_memory(setup, estimate_memory(setup)))
    assert "sharding (fsdp)" in warning
    assert "activation checkpointing" not in warning


def test_public_rows_that_ran_are_hardly_ever_refused() -> None:
    table = load_public_table().kept
    observations, _ = observe_table(table[table["source"].str.startswith(("huggingface/", "lambdal/"))].iloc[::10])
    over = [observation for observation in observations if not estimate_memory(observation.setup).fits]
    assert len(observations) > 500
    assert len(over) <= 0.03 * len(observations)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).parents[3] / "tests" / "benchmarks" / "bench_memory.py"
    spec = importlib.util.spec_from_file_location("bench_memory", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_a_real_step_has_the_peak_of_its_walk(bench: ModuleType) -> None:
    measured = bench.measure_apart("allocated", "bert_mini", "fp32", batch_size=8)
    assert bench.estimate_steps("bert_mini")["fp32", 8] == pytest.approx(measured, rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet18", "vit_tiny", "bert_mini", "gpt2_mini", "mlp"])
def test_real_steps_of_every_model_peak_within_15_percent(bench: ModuleType, name: str) -> None:
    for (precision, batch), estimate in bench.estimate_steps(name).items():
        measured = bench.measure_apart("allocated", name, precision, batch_size=batch)
        assert estimate == pytest.approx(measured, rel=0.15), (precision, batch)
