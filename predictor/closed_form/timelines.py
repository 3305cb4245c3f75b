"""Timelines of a training step: the communication that compute does not hide, and the idle time of a pipeline."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from precision_time.predictor.closed_form.collectives import all_reduce_time_s
from precision_time.predictor.closed_form.walked_time import choose_walk
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.parallelism import Parallelism
from precision_time.predictor.setup.precision import FORMAT_BYTES, Precision
from precision_time.predictor.workloads.workload import WorkloadFeatures
from precision_time.storage.errors import InputError

__all__ = ["BUCKET_BYTES", "FIRST_BUCKET_BYTES", "OverlapEstimate", "estimate_overlap", "expose_pieces", "fill_buckets",
           "finish_last_bucket", "time_bubble", "weigh_last_stage"]  # fmt: skip

#: Defaults of torch.nn.parallel.DistributedDataParallel: ``bucket_cap_mb`` and the smaller first bucket.
BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20

#: Share of the last stage's excess work that layouts do not balance. Pipelines of 2, 4 and 8 stages over 24 layers of
#: width 2048 took 3, 10 and 28 % longer than one stage, where the excess is 7, 20 and 48 % (GPT of 1.3 billion
#: parameters on 8 V100, micro-batch 1; bigscience-workshop/bigscience).
UNBALANCED_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapEstimate:
    """Seconds with a bucket in flight, the part of them after the backward pass, and the number of buckets."""

    communication_time_s: float
    exposed_communication_s: float
    bucket_count: int


def fill_buckets(gradient_bytes: float, tensors: int) -> list[float]:
    """Bytes of each bucket in the order of sending, for ``tensors`` gradients of equal size.

    A bucket closes with the tensor that reaches its cap, and a tensor is never split.
    """
    tensor_bytes = gradient_bytes / tensors
    buckets: list[float] = []
    remaining = tensors
    while remaining > 0:
        cap = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
        count = min(remaining, max(1, math.ceil(cap / tensor_bytes)))
        buckets.append(count * tensor_bytes)
        remaining -= count
    return buckets


def finish_last_bucket(ready_s: Sequence[float], transfer_s: Sequence[float]) -> float:
    """Seconds until the last bucket arrives on one communication stream: end_k = max(end_(k-1), ready_k) + t_k."""
    end_s = 0.0
    for ready, transfer in zip(ready_s, transfer_s, strict=True):
        end_s = max(end_s, ready) + transfer
    return end_s


def expose_pieces(transfer_s: float, *, hidden_by_s: float, pieces: float) -> float:
    """Seconds that a transfer in ``pieces`` equal parts adds to a pass of ``hidden_by_s`` seconds that makes the parts.

    With K parts of t seconds, ready evenly over a pass of T seconds, on the timeline of ``finish_last_bucket``:

        exposed = max(t, K t - (1 - 1/K) T)

    The last part is always exposed, and a stream that never idles ends at T/K + K t. The same holds for a pass that
    needs its parts one after the other (parameters gathered ahead of their layers), read backwards in time. Zero for
    nothing to send.
    """
    return max(transfer_s / pieces, transfer_s - (1.0 - 1.0 / pieces) * hidden_by_s)


def estimate_overlap(
    workload: WorkloadFeatures,
    hardware: HardwareSpec,
    precision: Precision,
    *,
    backward_s: float,
    ranks: int,
    nodes: int,
    trainable_share: float = 1.0,
) -> OverlapEstimate:
    """Lay the all-reduce of the gradient buckets over a backward pass of ``backward_s`` seconds.

        exposed = max(0, end of the last bucket - backward_s)

    Bucket k is ready when its share of the gradient bytes is: at the times that the walk over the module found, or
    without a walk evenly over the backward pass. Gradients are sent in the policy's wire format. A narrower compute
    format shortens the backward pass but not the message (autocast keeps fp32 gradients), so it exposes more.
    ``trainable_share`` of the parameters have gradients. All zero for one rank. Left out: communication that slows
    compute down.

    Raises ``InputError`` for a time that is negative or not finite, and as ``all_reduce_time_s`` does.
    """
    if not (math.isfinite(backward_s) and backward_s >= 0):
        raise InputError("backward_s is not usable", got=repr(backward_s), expected="seconds, zero or more")
    if ranks == 1 and nodes == 1:
        return OverlapEstimate(communication_time_s=0.0, exposed_communication_s=0.0, bucket_count=0)
    gradient_bytes = workload.params * FORMAT_BYTES[precision.communicate] * trainable_share
    buckets = fill_buckets(gradient_bytes, workload.parameter_tensors)
    walk = None if workload.walks is None else choose_walk(workload.walks, precision)[0]
    ready_s: list[float] = []
    sent_bytes = 0.0
    for bucket in buckets:
        sent_bytes += bucket
        share = min(1.0, sent_bytes / gradient_bytes)
        ready_s.append(backward_s * (share if walk is None else walk.ready_at(share)))
    ready_s[-1] = backward_s
    # All but the first and the last bucket are equally large.
    seconds = {size: all_reduce_time_s(size, ranks=ranks, nodes=nodes, hardware=hardware) for size in set(buckets)}
    transfer_s = [seconds[size] for size in buckets]
    return OverlapEstimate(
        communication_time_s=sum(transfer_s),
        exposed_communication_s=max(0.0, finish_last_bucket(ready_s, transfer_s) - backward_s),
        bucket_count=len(buckets),
    )


def time_bubble(stage_s: float, parallelism: Parallelism, *, micro_steps: int, last_stage_excess: float = 0.0) -> float:
    """Seconds that a pipeline rank waits, when its share of one micro-step takes ``stage_s`` seconds.

    With p stages, v chunks a rank and m micro-steps it waits for (p - 1) / v micro-steps where m >= p. Where m < p the
    first micro-step still passes all p stages and each later one ends 1/v after it, so the whole takes
    p + (m - 1) / v. In each micro-step the last stage takes 1 + ``last_stage_excess`` of the time of the others, which
    wait for it.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), section 2.2.
    """
    stages, chunks = parallelism.pipeline, parallelism.virtual_stages
    idle = max((stages - 1) / chunks, stages - micro_steps + (micro_steps - 1) / chunks)
    return stage_s * (idle + micro_steps * last_stage_excess)


def weigh_last_stage(workload: WorkloadFeatures, *, stages: int) -> float:
    """Work of the last stage over that of an average one, less one: it also projects onto the vocabulary.

        excess = UNBALANCED_SHARE h (p - 1)

    With h the share of that projection in the forward FLOPs (2 V H a token), the last of p stages does (1 - h) / p + h,
    which is 1 + h (p - 1) times the average. Half of the excess counts, as many scripts give the last stage fewer
    layers. Zero where vocabulary or width is not known.
    """
    if not workload.vocab or not workload.hidden_size or not workload.sequence_length:
        return 0.0
    projection = 2 * workload.vocab * workload.hidden_size * workload.sequence_length
    return UNBALANCED_SHARE * min(1.0, projection / workload.forward_flops_per_sample) * (stages - 1)
