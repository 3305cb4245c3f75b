"""The closed form of whole setups: parts that add up, ranks that help, and a finite answer for every layout."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_time.predictor.closed_form.roofline import estimate_compute
from precision_time.predictor.closed_form.solve import ClosedForm, solve_closed_form
from precision_time.predictor.setup.hardware import find_hardware
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism, parse_parallelism
from precision_time.predictor.setup.precision import parse_precision
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.predictor.workloads.workload import find_workload
from precision_time.storage.errors import InputError


def setup(
    model: str = "llama2_7b", strategy: str = "ddp", *, gpus: int = 1, gpu: str = "A100-SXM4-80GB",
    precision: str = "amp_bf16", nodes: int | None = None, batch_size: int = 8, **changes: Any,
) -> TrainingSetup:  # fmt: skip
    return TrainingSetup(
        workload=find_workload(model),
        hardware=find_hardware(gpu),
        precision=parse_precision(precision),
        world_size=gpus,
        nodes=nodes or max(1, gpus // 8),
        batch_size=batch_size,
        parallelism=parse_parallelism(strategy, world_size=gpus),
        **changes,
    )


def solve(*positional: str, **named: Any) -> ClosedForm:
    return solve_closed_form(setup(*positional, **named))


def test_one_gpu_takes_its_roofline_and_nothing_else() -> None:
    single = setup("resnet50")
    closed = solve_closed_form(single)
    alone = estimate_compute(single.workload, single.hardware, single.precision, batch_size=8)
    assert closed.iteration_time_s == closed.compute_time_s == alone.total_s
    assert closed.communication_time_s == closed.pipeline_bubble_s == closed.host_copy_s == 0
    assert closed.bucket_count == 0


layouts = st.sampled_from(
    ["ddp", "fsdp", "zero1", "zero2", "tp2", "tp8", "pp2", "pp4-vp2", "tp2-pp2", "tp2-pp2-zero1", "tp4-fsdp2", "cp2",
     "cp2-tp2", "ep4", "nn.DataParallel"]
)  # fmt: skip


@given(
    model=st.sampled_from(["resnet50", "bert_base", "llama2_7b", "mixtral_8x7b", "gnmt"]),
    strategy=layouts,
    precision=st.sampled_from(["fp32", "tf32", "amp_fp16", "bf16"]),
    batch_size=st.integers(1, 512),
    micro_steps=st.integers(1, 32),
    nodes=st.sampled_from([1, 2]),
    checkpointing=st.sampled_from([None, "none", "selective", "full"]),
    host_copy=st.booleans(),
)
def test_the_parts_of_every_layout_are_finite_and_add_up(
    model, strategy, precision, batch_size, micro_steps, nodes, checkpointing, host_copy
) -> None:
    closed = solve(
        model, strategy, gpus=8, nodes=nodes, precision=precision, batch_size=batch_size,
        gradient_accumulation_steps=micro_steps,
        implementation=Implementation(checkpointing=checkpointing, host_copy=host_copy),
    )  # fmt: skip
    parts = [getattr(closed, field.name) for field in dataclasses.fields(ClosedForm)]
    assert all(math.isfinite(part) and part >= 0 for part in parts)
    assert closed.iteration_time_s > 0
    compute = (closed.forward_time_s, closed.recompute_time_s, closed.backward_time_s, closed.optimizer_time_s,
               closed.pipeline_bubble_s, closed.host_copy_s)  # fmt: skip
    assert closed.compute_time_s == pytest.approx(sum(compute))
    assert closed.communication_time_s == pytest.approx(closed.tensor_communication_s + closed.data_communication_s)
    assert closed.iteration_time_s == closed.compute_time_s + closed.exposed_communication_s


def test_degrees_that_do_not_give_the_world_are_refused() -> None:
    with pytest.raises(InputError, match="do not give the world size"):
        solve_closed_form(dataclasses.replace(setup(gpus=8), parallelism=Parallelism(tensor=4)))


@pytest.mark.parametrize("model", ["llama2_7b", "bert_base", "resnet50"])
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_more_tensor_ranks_never_compute_longer_and_communicate_more(
    model: str, precision: str, batch_size: int
) -> None:
    solved = [
        solve(model, f"tp{ranks}", gpus=ranks, nodes=1, precision=precision, batch_size=batch_size)
        for ranks in (1, 2, 4, 8)
    ]
    compute = [closed.compute_time_s for closed in solved]
    assert compute == sorted(compute, reverse=True)
    assert compute[3] < compute[0]
    communication = [closed.tensor_communication_s for closed in solved]
    assert communication[0] == 0
    assert communication == sorted(communication)
    assert all(closed.exposed_communication_s == closed.tensor_communication_s for closed in solved)


def test_eight_tensor_ranks_take_an_eighth_of_the_products() -> None:
    whole, eighth = solve(batch_size=64), solve("llama2_7b", "tp8", gpus=8, batch_size=64)
    assert eighth.forward_time_s == pytest.approx(whole.forward_time_s / 8)
    assert eighth.optimizer_time_s == pytest.approx(whole.optimizer_time_s / 8, rel=1e-3)


def test_the_share_of_the_bubble_shrinks_with_more_micro_steps() -> None:
    shares = []
    for micro_steps in (1, 2, 4, 8, 32, 128):
        closed = solve("llama2_7b", "pp8", gpus=8, batch_size=1, gradient_accumulation_steps=micro_steps)
        shares.append(closed.pipeline_bubble_s / closed.iteration_time_s)
    assert shares == sorted(shares, reverse=True)
    # one micro-step keeps one of eight stages busy at a time
    assert shares[0] > 0.8
    assert shares[-1] < 0.2


def test_the_bubble_of_one_micro_step_is_the_other_stages() -> None:
    closed = solve("resnet50", "pp4", gpus=4, nodes=1)
    # no vocabulary, so equal stages: each of the other three takes what this one does, with its transfers
    waits = closed.forward_time_s + closed.backward_time_s + closed.tensor_communication_s
    assert closed.pipeline_bubble_s == pytest.approx(3 * waits)


def test_chunks_of_the_model_shorten_the_bubble() -> None:
    plain = solve("llama2_7b", "pp4", gpus=4, gradient_accumulation_steps=8)
    interleaved = solve("llama2_7b", "pp4-vp4", gpus=4, gradient_accumulation_steps=8)
    assert interleaved.pipeline_bubble_s < plain.pipeline_bubble_s
    assert interleaved.iteration_time_s < plain.iteration_time_s


def test_stages_divide_the_work_of_a_replica() -> None:
    whole = solve(gradient_accumulation_steps=64, batch_size=2)
    staged = solve("llama2_7b", "pp8", gpus=8, gradient_accumulation_steps=64, batch_size=2)
    assert whole.iteration_time_s / 8 < staged.iteration_time_s < whole.iteration_time_s / 4


def test_sharding_divides_the_optimizer_and_costs_traffic() -> None:
    ddp, zero1, fsdp = (solve("llama2_7b", strategy, gpus=8) for strategy in ("ddp", "zero1", "fsdp"))
    assert zero1.optimizer_time_s == pytest.approx(ddp.optimizer_time_s / 8, rel=1e-3)
    assert fsdp.optimizer_time_s == pytest.approx(ddp.optimizer_time_s / 8, rel=1e-3)
    # parameters are gathered twice, where ZeRO-1 gathers them once
    assert fsdp.communication_time_s > zero1.communication_time_s
    assert fsdp.forward_time_s <= ddp.forward_time_s
    assert fsdp.pipeline_bubble_s == fsdp.tensor_communication_s == 0


def test_sharded_parameters_are_gathered_in_each_micro_step_and_an_optimizer_shard_once() -> None:
    def communication_s(strategy: str, micro_steps: int) -> float:
        return solve("llama2_7b", strategy, gpus=8, gradient_accumulation_steps=micro_steps).communication_time_s

    assert communication_s("fsdp", 4) == pytest.approx(4 * communication_s("fsdp", 1))
    assert communication_s("zero1", 4) == pytest.approx(communication_s("zero1", 1))
    assert communication_s("zero1", 1) < communication_s("zero2", 4) < 4 * communication_s("zero1", 1)


def test_micro_steps_repeat_the_passes_and_not_the_optimizer() -> None:
    once, four = solve("resnet50", gpus=8), solve("resnet50", gpus=8, gradient_accumulation_steps=4)
    assert four.forward_time_s == pytest.approx(4 * once.forward_time_s)
    assert four.backward_time_s == pytest.approx(4 * once.backward_time_s)
    assert four.optimizer_time_s == once.optimizer_time_s
    assert four.communication_time_s == once.communication_time_s


def test_checkpointing_runs_the_forward_pass_again_or_its_attention_alone() -> None:
    times = {
        kind: solve("bert_base", implementation=Implementation(checkpointing=kind), batch_size=64)
        for kind in (None, "none", "selective", "full")
    }
    assert times[None] == times["none"]
    assert times["none"].recompute_time_s == 0
    assert times["full"].recompute_time_s == pytest.approx(times["full"].forward_time_s)
    assert 0 < times["selective"].recompute_time_s < times["full"].recompute_time_s


def test_ranks_of_one_host_share_its_cores_and_memory() -> None:
    alone, four = solve("mlp", gpu="cpu", precision="fp32"), solve("mlp", gpus=4, nodes=1, gpu="cpu", precision="fp32")
    assert four.forward_time_s > alone.forward_time_s
    spread = solve("mlp", gpus=4, nodes=4, gpu="cpu", precision="fp32")
    assert spread.forward_time_s == alone.forward_time_s
    # a rank has a whole GPU
    assert solve("resnet50", gpus=4).forward_time_s == solve("resnet50").forward_time_s


def test_inputs_copied_from_the_host_take_their_bytes_over_its_link() -> None:
    copied = Implementation(host_copy=True)
    closed = solve("resnet50", implementation=copied, gradient_accumulation_steps=2)
    # 8 images of 3 x 224 x 224 in fp32, twice, at 12.6 GB/s
    assert closed.host_copy_s == pytest.approx(2 * 8 * 12 * 224**2 / 12.6e9)
    # one process feeds all devices of nn.DataParallel
    four = solve("resnet50", "nn.DataParallel", gpus=4, nodes=1, implementation=copied)
    assert four.host_copy_s == pytest.approx(4 * 8 * 12 * 224**2 / 12.6e9)
    assert solve("resnet50").host_copy_s == 0


def test_one_process_for_all_devices_hides_none_of_its_copies() -> None:
    single, ddp = solve("resnet50", "nn.DataParallel", gpus=4), solve("resnet50", gpus=4)
    assert single.exposed_communication_s == single.communication_time_s > ddp.exposed_communication_s
    assert single.bucket_count == 0 < ddp.bucket_count
