"""Compute times: coherent over precisions, monotone, and slower with mixed precision where launches are the limit."""

import dataclasses

import pytest

from precision_time.predictor.closed_form.roofline import (
    GPU_ATTENTION_EFFICIENCY,
    GPU_COMPUTE_EFFICIENCY,
    HOST_COPY_BYTES_PER_S,
    RankShare,
    cast_bytes,
    describe_passes,
    divide_work,
    estimate_compute,
    scale_activation_bytes,
    time_host_copy,
)
from precision_time.predictor.closed_form.walked_time import describe_nominal, time_pass
from precision_time.predictor.setup.hardware import find_hardware, known_hardware, supported_precisions
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism
from precision_time.predictor.setup.precision import PRECISIONS, parse_precision
from precision_time.predictor.workloads.walk import PRODUCTS
from precision_time.predictor.workloads.workload import find_workload, known_workloads
from precision_time.storage.errors import InputError, PrecisionUnsupportedError, UnknownNameError


def estimate(model, device, precision, *, batch_size, share=None, **facts):
    workload = find_workload(model) if isinstance(model, str) else model
    return estimate_compute(
        workload,
        find_hardware(device),
        parse_precision(precision),
        batch_size=batch_size,
        share=share or RankShare(),
        implementation=Implementation(**facts),
    )


def unwalked(model, **changes):
    """A network described by its sizes alone, without a walk."""
    return dataclasses.replace(find_workload(model), walks=None, **changes)


@pytest.mark.parametrize(
    "device", [name for name, spec in known_hardware().items() if (spec.compute_capability or 0) >= 7]
)
@pytest.mark.parametrize("model", ["resnet50", "vit_b16", "bert_base"])
def test_a_narrower_policy_is_not_slower_when_the_batch_is_large(device, model):
    supported = supported_precisions(find_hardware(device))
    times = [
        estimate(model, device, name, batch_size=256).total_s
        for name in ("fp32", "tf32", "amp_fp16", "fp16")
        if name in supported
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_tensor_cores_speed_up_a_compute_bound_model_and_a_p100_has_none():
    model = unwalked("vit_b16", forward_bytes_per_sample=0.0, backward_bytes_per_sample=0.0)
    passes = {}
    for device in ("p100", "v100"):
        for name in ("fp32", "amp_fp16"):
            times = estimate(model, device, name, batch_size=256)
            passes[device, name] = times.forward_s + times.backward_s
    assert passes["v100", "fp32"] / passes["v100", "amp_fp16"] > 4
    assert passes["p100", "fp32"] == passes["p100", "amp_fp16"]


def test_mixed_precision_is_slower_when_the_host_cannot_launch_fast_enough():
    # NVIDIA/apex issue 297: a small network on small images ran 15 minutes in fp32 and 21 with mixed precision.
    small = unwalked(
        "resnet18",
        params=270_000,
        forward_flops_per_sample=81e6,
        backward_flops_per_sample=160e6,
        forward_bytes_per_sample=6e6,
        forward_bytes_fixed=1.1e6,
        backward_bytes_per_sample=9e6,
        backward_bytes_fixed=2.2e6,
    )
    fp32, amp = (estimate(small, "v100", name, batch_size=8) for name in ("fp32", "amp_fp16"))
    assert fp32.launch_bound
    assert amp.launch_bound
    assert 1.0 < amp.total_s / fp32.total_s < 2.0
    assert not estimate("resnet50", "v100", "fp32", batch_size=64).launch_bound


@pytest.mark.parametrize("model", known_workloads())
@pytest.mark.parametrize("device", ["v100", "a100", "rtx-4090", "b200", "cpu"])
def test_a_larger_batch_or_more_flops_never_take_less_time(model, device):
    workload = find_workload(model)
    doubled = dataclasses.replace(
        workload,
        forward_flops_per_sample=2 * workload.forward_flops_per_sample,
        backward_flops_per_sample=2 * workload.backward_flops_per_sample,
    )
    for name in supported_precisions(find_hardware(device)):
        times = [estimate(workload, device, name, batch_size=size).total_s for size in (1, 2, 32, 256)]
        assert times == sorted(times)
        assert times[0] > 0
        assert estimate(doubled, device, name, batch_size=32).total_s >= times[2]


def test_passes_match_the_roofline_worked_by_hand():
    model = dataclasses.replace(
        known_workloads()["mlp"],
        forward_flops_per_sample=0.55e12,
        backward_flops_per_sample=1.1e12,
        forward_bytes_per_sample=0.0,
        backward_bytes_per_sample=0.0,
        forward_bytes_fixed=0.0,
        backward_bytes_fixed=0.0,
    )
    hardware = dataclasses.replace(find_hardware("v100"), peak_flops_per_s={"fp32": 1e12}, memory_bytes_per_s=1e9)
    compute_bound = estimate_compute(model, hardware, parse_precision("fp32"), batch_size=3)
    assert (compute_bound.forward_s, compute_bound.backward_s) == pytest.approx((3.0, 6.0))
    memory_bound = estimate_compute(
        dataclasses.replace(model, forward_bytes_per_sample=0.4e9, forward_bytes_fixed=1.2e9, backward_ops=10**9),
        hardware,
        parse_precision("fp32"),
        batch_size=3,
    )
    # (3 x 0.4 + 1.2) GB over 0.4 x 1 GB/s; 10^9 launches of 6 us in the backward pass.
    assert (memory_bound.forward_s, memory_bound.backward_s) == pytest.approx((6.0, 6000.0))
    assert memory_bound.launch_bound
    assert memory_bound.total_s == memory_bound.forward_s + memory_bound.backward_s + memory_bound.optimizer_s


def test_autocast_pays_six_bytes_a_parameter_in_each_pass_and_pure_formats_none():
    assert cast_bytes(1000, PRECISIONS["amp_fp16"]) == (6000, 6000)
    for name in ("fp32", "tf32", "fp16", "bf16"):
        assert cast_bytes(1000, PRECISIONS[name]) == (0, 0)


def test_attention_keeps_more_of_the_activations_wide_under_autocast():
    amp = PRECISIONS["amp_bf16"]
    assert scale_activation_bytes(find_workload("resnet50"), amp) == 0.5
    assert 0.5 < scale_activation_bytes(find_workload("bert_base"), amp) < 1
    assert scale_activation_bytes(find_workload("bert_base"), PRECISIONS["bf16"]) == 0.5


def test_the_optimizer_pays_for_loss_scaling_and_half_for_pure_formats():
    model = dataclasses.replace(find_workload("bert_base"), parameter_tensors=1, optimizer="adamw")
    times = {name: estimate(model, "a100", name, batch_size=1).optimizer_s for name in ("fp32", "amp_fp16", "fp16")}
    assert times["amp_fp16"] / times["fp32"] == pytest.approx((28 + 8) / 28)
    assert times["fp16"] / times["fp32"] == pytest.approx(0.5)
    assert estimate(model, "a100", "amp_bf16", batch_size=1).optimizer_s == times["fp32"]
    sgd = dataclasses.replace(model, optimizer="sgd_momentum")
    assert estimate(sgd, "a100", "fp32", batch_size=1).optimizer_s / times["fp32"] == pytest.approx(20 / 28)


def test_unsupported_arguments_are_refused_by_name():
    with pytest.raises(PrecisionUnsupportedError, match="V100"):
        estimate("resnet50", "v100", "bf16", batch_size=1)
    for size in (0, -1, 1.5, True, "8"):
        with pytest.raises(InputError, match="batch_size"):
            estimate("resnet50", "a100", "fp32", batch_size=size)
    with pytest.raises(UnknownNameError, match=r"optimizer.*'adamz'.*adam"):
        estimate(dataclasses.replace(find_workload("mlp"), optimizer="adamz"), "a100", "fp32", batch_size=1)


def test_a_rank_does_its_share_of_the_work_and_holds_its_share_of_the_parameters():
    layout = Parallelism(data=4, tensor=2, pipeline=4, context=2)
    assert divide_work(find_workload("bert_base"), layout) == RankShare(
        work=1 / 16, parameters=1 / 8, cast=1 / 8, updated=1 / 8, layers=1 / 4
    )
    for sharding, cast in (("optimizer", 1 / 8), ("gradients", 1 / 8), ("parameters", 1 / 64)):
        share = divide_work(find_workload("bert_base"), dataclasses.replace(layout, sharding=sharding))
        assert (share.updated, share.cast, share.parameters) == (1 / 64, cast, 1 / 8)
    assert divide_work(find_workload("resnet50"), Parallelism(data=64)) == RankShare()


def test_experts_divide_over_their_ranks_and_the_rest_does_not():
    # 100 million parameters outside the experts and 1600 million inside
    mixture = dataclasses.replace(
        find_workload("bert_base"), params=1_700_000_000, active_params=300_000_000, experts=16, active_experts=2
    )
    share = divide_work(mixture, Parallelism(data=8, expert=8))
    assert share.parameters * 1_700_000_000 == pytest.approx(100_000_000 + 200_000_000)
    assert share.work == 1.0
    wide = divide_work(mixture, Parallelism(data=4, tensor=2, expert=8))
    assert wide.parameters * 1_700_000_000 == pytest.approx(50_000_000 + 200_000_000)


def test_halving_the_work_halves_a_pass_that_the_device_bounds_but_not_its_launches():
    whole = estimate("vit_b16", "a100", "amp_bf16", batch_size=512)
    half = estimate("vit_b16", "a100", "amp_bf16", batch_size=512, share=RankShare(work=0.5))
    assert half.forward_s == pytest.approx(whole.forward_s / 2, rel=0.02)
    eighth = estimate("vit_b16", "a100", "amp_bf16", batch_size=1, share=RankShare(work=1 / 8))
    assert eighth.launch_bound
    stage = estimate(
        "vit_b16",
        "a100",
        "amp_bf16",
        batch_size=1,
        share=divide_work(find_workload("vit_b16"), Parallelism(pipeline=8)),
    )
    assert stage.forward_s < 0.5 * eighth.forward_s


def test_checkpointing_runs_the_forward_pass_or_its_attention_again():
    plain = estimate("bert_base", "a100", "amp_bf16", batch_size=32)
    full = estimate("bert_base", "a100", "amp_bf16", batch_size=32, checkpointing="full")
    selective = estimate("bert_base", "a100", "amp_bf16", batch_size=32, checkpointing="selective")
    assert plain.recompute_s == 0.0
    assert full.recompute_s == full.forward_s == plain.forward_s
    assert full.total_s == pytest.approx(plain.total_s + plain.forward_s)
    assert 0.0 < selective.recompute_s < 0.2 * full.recompute_s
    assert estimate("resnet50", "a100", "amp_bf16", batch_size=32, checkpointing="selective").recompute_s == 0.0


def test_adapters_leave_out_weight_gradients_and_most_of_the_optimizer():
    model = unwalked(
        "bert_base",
        attention_flops_share=0.2,
        forward_bytes_per_sample=0.0,
        backward_bytes_per_sample=0.0,
    )
    plain = estimate(model, "a100", "bf16", batch_size=512)
    frozen = estimate(model, "a100", "bf16", batch_size=512, trainable_share=0.0)
    assert frozen.forward_s == plain.forward_s
    # Attention has no weights; of the other 80 % half are weight gradients.
    assert frozen.backward_s / plain.backward_s == pytest.approx(0.6)
    assert estimate(model, "a100", "bf16", batch_size=512, trainable_share=0.01).optimizer_s < plain.optimizer_s
    assert estimate(model, "a100", "bf16", batch_size=512, optimizer_step=False).optimizer_s == 0.0


def test_sharding_divides_the_optimizer_traffic():
    model = dataclasses.replace(find_workload("bert_base"), parameter_tensors=1)
    whole, eighth = (
        estimate(model, "a100", "amp_fp16", batch_size=1, share=RankShare(updated=share)).optimizer_s
        for share in (1.0, 1 / 8)
    )
    assert eighth == pytest.approx(whole / 8)


def test_attention_stays_in_the_format_of_the_activations_when_products_narrow_to_fp8():
    model = unwalked("vit_b16", attention_flops_share=0.5, forward_bytes_per_sample=0.0, backward_bytes_per_sample=0.0)
    hardware = find_hardware("h100")
    speed_up = (
        estimate(model, "h100", "bf16", batch_size=512).forward_s
        / estimate(model, "h100", "fp8", batch_size=512).forward_s
    )
    ratio = hardware.peak_flops_per_s["fp8"] / hardware.peak_flops_per_s["bf16"]
    # Half of the work gains the ratio of the peaks (about 2) and half nothing.
    attention = GPU_COMPUTE_EFFICIENCY / GPU_ATTENTION_EFFICIENCY
    assert speed_up == pytest.approx((1 + attention) / (1 / ratio + attention), rel=0.01)
    assert speed_up < ratio


def test_the_copied_inputs_are_tokens_images_or_of_unknown_size():
    text = dataclasses.replace(find_workload("bert_base"), sequence_length=2048)
    assert time_host_copy(text, samples=10) == pytest.approx(10 * 8 * 2048 / HOST_COPY_BYTES_PER_S)
    assert time_host_copy(find_workload("resnet50"), samples=1) == pytest.approx(12 * 224**2 / HOST_COPY_BYTES_PER_S)
    assert time_host_copy(dataclasses.replace(find_workload("resnet50"), task_input="LJSpeech"), samples=1) == 0.0


def walked_passes(model, device, precision, *, batch_size, share=None, **facts):
    return describe_passes(
        find_workload(model) if isinstance(model, str) else model,
        find_hardware(device),
        parse_precision(precision),
        batch_size=batch_size,
        share=share or RankShare(),
        implementation=Implementation(**facts),
    )


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16", "bf16", "fp8"])
def test_a_walked_network_is_timed_by_its_walk_on_a_gpu(precision):
    model, hardware = find_workload("bert_base"), find_hardware("h100")
    times = estimate(model, "h100", precision, batch_size=24)
    forward, backward = (
        describe_nominal(model.walks, hardware, parse_precision(precision), phase=phase, samples=24)
        for phase in ("forward", "backward")
    )
    assert (times.forward_s, times.backward_s) == (time_pass(forward).seconds, time_pass(backward).seconds)
    bare = estimate(unwalked("bert_base"), "h100", precision, batch_size=24)
    assert bare.forward_s != times.forward_s
    assert bare.optimizer_s == times.optimizer_s


def test_a_cpu_is_timed_by_the_whole_network_whether_it_was_walked_or_not():
    for name in supported_precisions(find_hardware("cpu")):
        assert estimate("resnet50", "cpu", name, batch_size=4) == estimate(
            unwalked("resnet50"), "cpu", name, batch_size=4
        )


def test_one_image_is_launch_bound_and_many_are_not():
    single, many = (estimate("resnet50", "h100", "amp_bf16", batch_size=size) for size in (1, 512))
    assert single.launch_bound
    assert not many.launch_bound
    # autocast launches casts beside what fp32 does, so where launches are the limit it is slower
    assert single.total_s > estimate("resnet50", "h100", "fp32", batch_size=1).total_s


def test_a_walk_divides_as_the_rank_does():
    whole = walked_passes("bert_base", "a100", "amp_bf16", batch_size=32)
    share = RankShare(work=1 / 4, parameters=1 / 2, layers=1 / 8)
    part = walked_passes("bert_base", "a100", "amp_bf16", batch_size=32, share=share)
    for before, after in zip(whole[:2], part[:2], strict=True):
        assert after.products == pytest.approx([seconds / 4 for seconds in before.products])
        assert after.traffic == pytest.approx([seconds / 4 for seconds in before.traffic])
        assert (after.weights, after.launches) == pytest.approx((before.weights / 2, before.launches / 8))


def test_a_walked_network_recomputes_the_share_that_is_checkpointed():
    assert walked_passes("bert_base", "a100", "bf16", batch_size=8)[2] == 0.0
    assert walked_passes("bert_base", "a100", "bf16", batch_size=8, checkpointing="full")[2] == 1.0
    share = find_workload("bert_base").attention_flops_share
    assert walked_passes("bert_base", "a100", "bf16", batch_size=8, checkpointing="selective")[2] == share
    times = estimate("bert_base", "a100", "bf16", batch_size=8, checkpointing="selective")
    assert times.recompute_s == pytest.approx(share * times.forward_s)


def test_frozen_parameters_take_weight_gradients_out_of_a_walked_backward_pass():
    attention = PRODUCTS.index("attention")
    plain = walked_passes("bert_base", "a100", "bf16", batch_size=32)
    frozen = walked_passes("bert_base", "a100", "bf16", batch_size=32, trainable_share=0.25)
    assert frozen[0] == plain[0]
    # three quarters of the weight gradients, which are half of the products; attention has no weights
    for family, (some, every) in enumerate(zip(frozen[1].products, plain[1].products, strict=True)):
        assert some == pytest.approx(every * (1.0 if family == attention else 1 - 0.5 * 0.75))
    assert frozen[1].weights == pytest.approx(plain[1].weights * (1 - 0.5 * 0.75))
    assert frozen[1].traffic == plain[1].traffic


def test_parameters_frozen_before_the_walk_are_not_left_out_twice():
    model = find_workload("bert_base")
    walks = {
        policy: dataclasses.replace(walk, gradient_bytes=model.params * 4 * 0.25)
        for policy, walk in model.walks.items()
    }
    adapted = dataclasses.replace(model, walks=walks)
    whole, quarter, eighth = (
        walked_passes(adapted, "a100", "bf16", batch_size=32, trainable_share=trained)[1]
        for trained in (1.0, 0.25, 0.125)
    )
    assert quarter == whole
    assert eighth.weights == pytest.approx(whole.weights * (1 - 0.5 * 0.5))


def test_attention_that_is_not_fused_writes_its_scores():
    plain = estimate("gpt2", "a100", "amp_bf16", batch_size=8)
    written = estimate("gpt2", "a100", "amp_bf16", batch_size=8, flash_attention=False)
    assert written.forward_s > 1.1 * plain.forward_s
    assert estimate("gpt2", "a100", "amp_bf16", batch_size=8, flash_attention=True) == plain
    assert estimate("resnet50", "a100", "amp_bf16", batch_size=8, flash_attention=False) == estimate(
        "resnet50", "a100", "amp_bf16", batch_size=8
    )


def test_a_p100_has_no_unit_that_makes_16_bit_products_faster():
    full, mixed = (walked_passes("vit_b16", "p100", name, batch_size=256)[0] for name in ("fp32", "fp16"))
    assert (full.unit, mixed.unit) == (None, None)
    assert mixed.products == full.products
    assert time_pass(mixed).seconds < time_pass(full).seconds
    v100 = [estimate("vit_b16", "v100", name, batch_size=256).forward_s for name in ("fp32", "amp_fp16")]
    p100 = [estimate("vit_b16", "p100", name, batch_size=256).forward_s for name in ("fp32", "amp_fp16")]
    assert v100[0] / v100[1] > 2.5 > 1.3 > p100[0] / p100[1]


def test_a_network_that_was_never_walked_has_no_passes_to_describe():
    with pytest.raises(InputError, match="never walked"):
        walked_passes(unwalked("resnet50"), "a100", "fp32", batch_size=8)
