"""Timelines of buckets and pipelines, against examples worked by hand."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_time.predictor.closed_form.collectives import all_reduce_time_s
from precision_time.predictor.closed_form.roofline import estimate_compute
from precision_time.predictor.closed_form.timelines import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    estimate_overlap,
    expose_pieces,
    fill_buckets,
    finish_last_bucket,
    time_bubble,
)
from precision_time.predictor.setup.hardware import find_hardware
from precision_time.predictor.setup.parallelism import Parallelism
from precision_time.predictor.setup.precision import parse_precision
from precision_time.predictor.workloads.workload import find_workload
from precision_time.storage.errors import InputError

FP32 = parse_precision("fp32")
MIB = 2**20


def workload(*, params, tensors):
    return dataclasses.replace(find_workload("resnet50"), params=params, parameter_tensors=tensors)


@pytest.mark.parametrize(
    ("ready_s", "transfer_s", "end_s"),
    [
        ([1.0], [0.5], 1.5),
        # The second bucket waits for the first: max(1.5, 1.2) + 0.5.
        ([1.0, 1.2], [0.5, 0.5], 2.0),
        # The stream is idle before the second: max(0.6, 2.0) + 0.1.
        ([0.5, 2.0], [0.1, 0.1], 2.1),
        # 1 + 2 = 3, then 3 + 2 = 5, then 5 + 2 = 7, though all were ready by 3.
        ([1.0, 2.0, 3.0], [2.0, 2.0, 2.0], 7.0),
    ],
)
def test_a_bucket_starts_when_it_is_ready_and_the_stream_is_free(ready_s, transfer_s, end_s):
    assert finish_last_bucket(ready_s, transfer_s) == pytest.approx(end_s)


def test_the_first_bucket_is_small_and_tensors_are_not_split():
    # 100 tensors of 1 MiB: one fills the first bucket, then 25 a bucket, then the rest.
    assert [size / MIB for size in fill_buckets(100 * MIB, 100)] == [1, 25, 25, 25, 24]
    # 3 tensors of 100 MiB: each reaches the cap alone.
    assert [size / MIB for size in fill_buckets(300 * MIB, 3)] == [100, 100, 100]
    # 10 tensors of 1 KiB: all of them fit the first.
    assert fill_buckets(10 * 1024, 10) == [10 * 1024]
    assert (FIRST_BUCKET_BYTES, BUCKET_BYTES) == (MIB, 25 * MIB)


def test_a_single_bucket_is_exposed_whole():
    model, hardware = workload(params=50_000, tensors=2), find_hardware("a100")
    estimate = estimate_overlap(model, hardware, FP32, backward_s=0.01, ranks=8, nodes=1)
    whole = all_reduce_time_s(200_000, ranks=8, nodes=1, hardware=hardware)
    assert estimate.bucket_count == 1
    assert estimate.communication_time_s == pytest.approx(whole)
    assert estimate.exposed_communication_s == pytest.approx(whole)


def test_two_buckets_match_the_timeline_worked_by_hand():
    # 26 tensors of 1 MiB: buckets of 1 and 25 MiB, ready at 1/26 of the backward pass and at its end.
    model, hardware = workload(params=26 * MIB // 4, tensors=26), find_hardware("v100")
    first, second = (all_reduce_time_s(size * MIB, ranks=8, nodes=1, hardware=hardware) for size in (1, 25))
    slow = estimate_overlap(model, hardware, FP32, backward_s=1.0, ranks=8, nodes=1)
    assert slow.exposed_communication_s == pytest.approx(second)
    # With no backward pass at all nothing is hidden.
    none = estimate_overlap(model, hardware, FP32, backward_s=0.0, ranks=8, nodes=1)
    assert none.exposed_communication_s == pytest.approx(first + second)
    assert slow.communication_time_s == none.communication_time_s == pytest.approx(first + second)


def walked(model, ready):
    walks = {policy: dataclasses.replace(walk, ready=ready) for policy, walk in find_workload("resnet50").walks.items()}
    return dataclasses.replace(model, walks=walks)


def test_buckets_are_sent_when_the_walk_found_their_gradients_ready():
    # 26 tensors of 1 MiB: buckets of 1 and 25 MiB. Where 1/26 of the bytes is ready after 3/4 of the backward pass,
    # a quarter of a second is left for a first bucket that takes longer.
    model, hardware = workload(params=26 * MIB // 4, tensors=26), find_hardware("v100")
    first, second = (all_reduce_time_s(size * MIB, ranks=8, nodes=1, hardware=hardware) for size in (1, 25))
    backward_s = 2 * first
    late = walked(model, (0.9,) * 15 + (1.0,))
    overlap = estimate_overlap(late, hardware, FP32, backward_s=backward_s, ranks=8, nodes=1)
    # ready_at(1/26) = 0.9 x 16/26, linear from nothing to the first sixteenth
    first_ends = 0.9 * 16 / 26 * backward_s + first
    assert first_ends > backward_s
    assert overlap.exposed_communication_s == pytest.approx(first_ends + second - backward_s)
    even = estimate_overlap(
        dataclasses.replace(model, walks=None), hardware, FP32, backward_s=backward_s, ranks=8, nodes=1
    )
    assert even.exposed_communication_s == pytest.approx(second)
    assert overlap.communication_time_s == even.communication_time_s


def test_gradients_that_are_ready_late_expose_more_and_the_last_bucket_waits_for_the_pass():
    hardware = dataclasses.replace(find_hardware("v100"), link="pcie3", link_bytes_per_s=15.8e9)
    model = find_workload("bert_base")
    exposed = [
        estimate_overlap(walked(model, ready), hardware, FP32, backward_s=0.1, ranks=8, nodes=1).exposed_communication_s
        for ready in ((0.0,) * 16, tuple(point / 16 for point in range(1, 17)), (1.0,) * 16)
    ]
    assert exposed == sorted(exposed)
    assert 0 < exposed[0] < exposed[1] < exposed[2]


def test_autocast_follows_the_ready_curve_of_its_own_walk():
    model = find_workload("resnet50")
    late = dataclasses.replace(model.walks["amp"], ready=(1.0,) * 16)
    mixed = dataclasses.replace(model, walks={"fp32": model.walks["fp32"], "amp": late})
    hardware = dataclasses.replace(find_hardware("v100"), link="pcie3", link_bytes_per_s=15.8e9)
    options = {"backward_s": 0.05, "ranks": 8, "nodes": 1}
    for name, same in (("fp32", True), ("fp16", True), ("amp_fp16", False)):
        plain, changed = (estimate_overlap(work, hardware, parse_precision(name), **options) for work in (model, mixed))
        assert (plain == changed) is same


def test_an_infinitely_fast_link_exposes_nothing():
    hardware = dataclasses.replace(find_hardware("a100"), link_bytes_per_s=1e30, all_reduce_latency_s=1e-15)
    estimate = estimate_overlap(find_workload("resnet50"), hardware, FP32, backward_s=0.1, ranks=8, nodes=1)
    assert estimate.exposed_communication_s == pytest.approx(0.0, abs=1e-12)


def test_one_rank_has_no_communication():
    estimate = estimate_overlap(
        find_workload("resnet50"), find_hardware("a100"), FP32, backward_s=0.1, ranks=1, nodes=1
    )
    assert (estimate.communication_time_s, estimate.exposed_communication_s, estimate.bucket_count) == (0.0, 0.0, 0)


def test_a_shorter_backward_pass_exposes_more_of_the_same_bytes():
    model = find_workload("bert_base")
    hardware = dataclasses.replace(find_hardware("v100"), link="pcie3", link_bytes_per_s=15.8e9)
    exposed = [
        estimate_overlap(model, hardware, FP32, backward_s=t, ranks=8, nodes=1).exposed_communication_s
        for t in (1.0, 0.1, 0.05, 0.01)
    ]
    assert exposed == sorted(exposed)
    assert exposed[0] < exposed[-1]


def test_autocast_sends_the_bytes_of_fp32_and_hides_a_smaller_share_of_them():
    model = find_workload("bert_base")
    hardware = dataclasses.replace(find_hardware("v100"), link="pcie3", link_bytes_per_s=15.8e9)
    estimates = {}
    for name in ("fp32", "amp_fp16", "fp16"):
        precision = parse_precision(name)
        backward_s = estimate_compute(model, hardware, precision, batch_size=32).backward_s
        estimates[name] = estimate_overlap(model, hardware, precision, backward_s=backward_s, ranks=8, nodes=1)
    fp32, amp, pure = estimates.values()
    assert amp.communication_time_s == fp32.communication_time_s
    assert amp.exposed_communication_s > fp32.exposed_communication_s
    assert pure.communication_time_s < amp.communication_time_s


@pytest.mark.parametrize("backward_s", [-1.0, float("nan"), float("inf")])
def test_a_backward_time_that_is_not_a_time_is_refused(backward_s):
    with pytest.raises(InputError, match="backward_s"):
        estimate_overlap(
            find_workload("resnet50"), find_hardware("a100"), FP32, backward_s=backward_s, ranks=8, nodes=1
        )


@given(transfer_s=st.floats(0.0, 10.0), hidden_by_s=st.floats(0.0, 10.0), pieces=st.integers(1, 40))
def test_equal_pieces_follow_the_timeline_of_buckets(transfer_s, hidden_by_s, pieces):
    ready_s = [hidden_by_s * (k + 1) / pieces for k in range(pieces)]
    end_s = finish_last_bucket(ready_s, [transfer_s / pieces] * pieces)
    exposed_s = expose_pieces(transfer_s, hidden_by_s=hidden_by_s, pieces=pieces)
    assert exposed_s == pytest.approx(end_s - hidden_by_s, abs=1e-9)


def test_frozen_parameters_send_no_gradients():
    model, hardware = find_workload("bert_base"), find_hardware("v100")
    times = [
        estimate_overlap(
            model, hardware, FP32, backward_s=0.1, ranks=8, nodes=1, trainable_share=share
        ).communication_time_s
        for share in (1.0, 0.5, 0.01)
    ]
    assert times[0] > 1.5 * times[1] > 1.5 * times[2] > 0


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_steps", "idle"),
    [
        # 1F1B: p - 1 micro-steps, whatever their number.
        (4, 1, 4, 3),
        (4, 1, 64, 3),
        # Interleaved: divided by the chunks.
        (4, 2, 8, 1.5),
        # One micro-step passes all stages one after the other, in any number of chunks.
        (4, 1, 1, 3),
        (4, 8, 1, 3),
        # Two micro-steps over four stages of two chunks: 4 for the first, half a step more for the second, 2 of work.
        (4, 2, 2, 2.5),
    ],
)
def test_the_bubble_is_that_of_the_schedule(stages, chunks, micro_steps, idle):
    layout = Parallelism(pipeline=stages, virtual_stages=chunks)
    assert time_bubble(0.5, layout, micro_steps=micro_steps) == pytest.approx(0.5 * idle)


@given(stages=st.integers(2, 32), chunks=st.integers(1, 8), micro_steps=st.integers(1, 512), excess=st.floats(0.0, 1.0))
def test_a_pipeline_never_beats_one_micro_step_through_all_stages_nor_its_own_work(stages, chunks, micro_steps, excess):
    layout = Parallelism(pipeline=stages, virtual_stages=chunks)
    idle = time_bubble(1.0, layout, micro_steps=micro_steps)
    assert micro_steps + idle >= stages
    assert idle >= (stages - 1) / chunks
    uneven = time_bubble(1.0, layout, micro_steps=micro_steps, last_stage_excess=excess)
    assert uneven == pytest.approx(idle + micro_steps * excess)
