"""The bucket timeline of data-parallel training: which part of the gradient all-reduce the backward pass hides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from precision_time.predictor.hardware import HardwareSpec
from precision_time.predictor.network import all_reduce_time_s
from precision_time.predictor.precision import FORMAT_BYTES, Precision
from precision_time.predictor.workload import WorkloadFeatures
from precision_time.storage.errors import InputError

__all__ = ["BUCKET_BYTES", "FIRST_BUCKET_BYTES", "OverlapEstimate", "estimate_overlap", "fill_buckets",
           "finish_last_bucket"]  # fmt: skip

#: Defaults of torch.nn.parallel.DistributedDataParallel: ``bucket_cap_mb`` and the smaller first bucket.
BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapEstimate:
    """Seconds in which a bucket is in flight, the part of them after the backward pass, and the number of buckets."""

    communication_time_s: float
    exposed_communication_s: float
    bucket_count: int


def fill_buckets(gradient_bytes: float, tensors: int) -> list[float]:
    """Bytes of each bucket in the order of sending.

    A bucket closes with the tensor that reaches its cap, and a tensor is never split; without a walk over the
    module the tensors are taken as equally large.
    """
    tensor_bytes = gradient_bytes / tensors
    buckets: list[float] = []
    left = tensors
    while left > 0:
        cap = BUCKET_BYTES if buckets else FIRST_BUCKET_BYTES
        taken = min(left, max(1, math.ceil(cap / tensor_bytes)))
        buckets.append(taken * tensor_bytes)
        left -= taken
    return buckets


def finish_last_bucket(ready_s: Sequence[float], transfer_s: Sequence[float]) -> float:
    """When the last bucket arrives on one communication stream: end_k = max(end_(k-1), ready_k) + t_k."""
    end_s = 0.0
    for ready, transfer in zip(ready_s, transfer_s, strict=True):
        end_s = max(end_s, ready) + transfer
    return end_s


def estimate_overlap(
    workload: WorkloadFeatures,
    hardware: HardwareSpec,
    precision: Precision,
    *,
    backward_s: float,
    ranks: int,
    nodes: int,
) -> OverlapEstimate:
    """Lay the all-reduce of the gradient buckets over a backward pass of ``backward_s`` seconds.

    Gradients are sent in the policy's wire format and, without a walk over the module, become ready evenly over the
    backward pass: bucket k is ready when its share of the bytes is. exposed = max(0, end of the last bucket -
    backward_s). A narrower compute format shortens the backward pass and not the message (autocast keeps fp32
    gradients), so it exposes more. All zero for one rank. Slow-down of compute by communication is left out.

    Raises ``InputError`` for a time that is negative or not finite, and as ``all_reduce_time_s`` does.
    """
    if not (math.isfinite(backward_s) and backward_s >= 0):
        raise InputError("backward_s is not usable", got=repr(backward_s), expected="seconds, zero or more")
    if ranks == 1 and nodes == 1:
        return OverlapEstimate(communication_time_s=0.0, exposed_communication_s=0.0, bucket_count=0)
    gradient_bytes = workload.params * FORMAT_BYTES[precision.communicate]
    buckets = fill_buckets(gradient_bytes, workload.parameter_tensors)
    ready_s: list[float] = []
    sent_bytes = 0.0
    for bucket in buckets:
        sent_bytes += bucket
        ready_s.append(backward_s * min(1.0, sent_bytes / gradient_bytes))
    ready_s[-1] = backward_s
    transfer_s = [all_reduce_time_s(bucket, ranks=ranks, nodes=nodes, hardware=hardware) for bucket in buckets]
    return OverlapEstimate(
        communication_time_s=sum(transfer_s),
        exposed_communication_s=max(0.0, finish_last_bucket(ready_s, transfer_s) - backward_s),
        bucket_count=len(buckets),
    )
