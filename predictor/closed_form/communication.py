"""Seconds of communication between the ranks of a job under every kind of parallelism."""

import copy
import math
from dataclasses import dataclass
from typing import NamedTuple

from precision_time.predictor.closed_form.collectives import collective_time_s
from precision_time.predictor.closed_form.roofline import ComputeEstimate
from precision_time.predictor.closed_form.timelines import (
    estimate_overlap,
    expose_pieces,
    time_bubble,
    weigh_last_stage,
)
from precision_time.predictor.closed_form.transformer_sizes import expert_params, size_transformer
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism
from precision_time.predictor.setup.precision import FORMAT_BYTES, Precision
from precision_time.predictor.workloads.workload import WorkloadFeatures

__all__ = [
    "CommunicationEstimate",
    "Group",
    "count_crossings",
    "estimate_communication",
    "place_group",
    "time_replication",
]

#: Shares of the time in flight that compute does not hide. A tensor-parallel layer waits for its sum; the ring of keys
#: and values overlaps a part of attention; a plain 1F1B schedule waits for its neighbours, while an interleaved one
#: posts its transfers ahead (Narayanan et al., 2021): set by reasoning, not fitted. With the share of the exchange of
#: tokens, expert groups of one and of several nodes have equal errors on the mixtures of experts of
#: NVIDIA-NeMo/Megatron-Bridge.
TENSOR_EXPOSED_SHARE = 1.0
CONTEXT_EXPOSED_SHARE = 0.5
EXPERT_EXPOSED_SHARE = 0.5
PIPELINE_EXPOSED_SHARE = 1.0
INTERLEAVED_EXPOSED_SHARE = 0.2

#: Parameters of a gradient bucket of Megatron-LM: max(40 million, 1 million x data-parallel ranks)
#: (megatron/core/distributed/distributed_data_parallel_config.py).
MEGATRON_BUCKET_PARAMS = 40_000_000
MEGATRON_BUCKET_PARAMS_PER_RANK = 1_000_000

#: Seconds of the interpreter of ``nn.DataParallel`` for one parameter tensor and one device: it builds replicas and
#: sums gradients tensor by tensor. Over 13 networks of 32 to 484 tensors on A100 the second device adds 0.14 to
#: 0.29 ms a tensor (median 0.19) and each further one 0.07 to 0.15 (median 0.10); other cards agree where the link is
#: not the limit (ryujaehun/pytorch-gpu-benchmark 3f47a9e).
REPLICATION_HOST_S = 1e-4


class Group(NamedTuple):
    """The ranks of one communicator, the nodes that they lie on, and their share of each node's network."""

    ranks: int
    nodes: int
    network_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationEstimate:
    """Seconds of one optimizer step on one rank.

    ``model_s`` is the time in flight between tensor, context, expert and pipeline ranks, ``data_s`` between the
    replicas; ``exposed_s`` is the part of both that compute does not hide. ``bubble_s`` is the idle time of a pipeline
    rank. ``bucket_count`` is the number of messages between the replicas.
    """

    model_s: float
    data_s: float
    exposed_s: float
    bubble_s: float
    bucket_count: int


def place_group(size: int, *, stride: int, ranks_per_node: int) -> Group:
    """The nodes of a group of ``size`` ranks that are ``stride`` apart, when each node holds ``ranks_per_node``.

    The groups of one kind that share a node send at the same time, so each has its members' share of the node's
    network. Ranks are rounded up to the same number on each node.
    """
    inside = max(1, min(size, ranks_per_node // stride))
    nodes = -(-size // inside)
    inside = -(-size // nodes)
    return Group(inside * nodes, nodes, min(1.0, inside / ranks_per_node) if nodes > 1 else 1.0)


def _narrow(hardware: HardwareSpec, **changes: float | None) -> HardwareSpec:
    """``hardware`` with ``changes`` that need no check."""
    # dataclasses.replace would check every field again, which takes as long as all other closed forms together.
    changed = copy.copy(hardware)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed


def _join_domains(hardware: HardwareSpec, *, world: int, nodes: int) -> tuple[HardwareSpec, int]:
    """The hardware and the number of nodes, with all nodes that share NVLink counted as one.

    A group of ranks far apart may cross domains although it would fit into one, so the collective cannot decide this.
    """
    if hardware.nvlink_domain is None:
        return hardware, nodes
    domains = min(nodes, -(-world // hardware.nvlink_domain))
    joined = _narrow(
        hardware,
        nvlink_domain=None,
        gpus_per_node=hardware.nvlink_domain,
        network_bytes_per_s=hardware.network_bytes_per_s * nodes / domains,
    )
    return joined, domains


def _share_network(hardware: HardwareSpec, group: Group) -> HardwareSpec:
    """The hardware with the group's share of each node's network."""
    if group.network_share == 1.0:
        return hardware
    return _narrow(hardware, network_bytes_per_s=hardware.network_bytes_per_s * group.network_share)


def _time_collective(kind: str, message_bytes: float, group: Group, hardware: HardwareSpec) -> float:
    if message_bytes == 0:
        return 0.0
    return collective_time_s(kind, message_bytes, ranks=group.ranks, nodes=group.nodes, hardware=hardware)


def count_crossings(active_experts: int, *, nodes: int) -> float:
    """Copies of a token that cross nodes, over those that would cross if each expert got a copy of its own.

        crossings = (N - 1) (1 - (1 - 1/N)^k) / (k (1 - 1/N))

    The k ``active_experts`` of a token are drawn evenly over N ``nodes``, and a node gets one copy for all its experts.
    1 for a single node.

    Source: the dispatch of deepseek-ai/DeepEP, which sends a token to each node once.
    """
    if nodes == 1:
        return 1.0
    return (nodes - 1) * (1 - (1 - 1 / nodes) ** active_experts) / (active_experts * (1 - 1 / nodes))


def _time_layers(
    workload: WorkloadFeatures,
    hardware: HardwareSpec,
    precision: Precision,
    parallelism: Parallelism,
    *,
    batch_size: int,
    ranks_per_node: int,
    recomputes: bool,
) -> tuple[float, float]:
    """Seconds in flight, and exposed, between the ranks of one replica in one micro-step.

    A layer's output has B S/c H values of b bytes.
    - Tensor ranks sum it twice forward and twice backward; scatter and gather (sequence parallelism) move the same.
    - Context ranks gather keys and values forward; backward they gather them again and scatter their gradients.
    - Expert ranks exchange the tokens before and after the experts, in both passes, once for each active expert or
      each node with active experts.
    - Each chunk of a pipeline sends one output forward and its gradient backward, divided over the tensor ranks.

    A full recomputation repeats the forward part.
    """
    sizes = size_transformer(workload)
    tensor, context, expert = parallelism.tensor, parallelism.context, parallelism.expert
    layers = sizes.layers / parallelism.pipeline
    passes = 3 if recomputes else 2
    row_bytes = batch_size * sizes.tokens * FORMAT_BYTES[precision.activations]
    output_bytes = row_bytes * sizes.hidden / context
    # kind, bytes, times, ranks, stride between neighbours, exposed share
    calls: list[tuple[str, float, float, int, int, float]] = []
    if tensor > 1:
        calls.append(("all_reduce", output_bytes, layers * passes * 2, tensor, 1, TENSOR_EXPOSED_SHARE))
    if context > 1:
        gathered = row_bytes * sizes.key_value / tensor
        calls.append(("all_gather", gathered, layers * (passes + 1), context, tensor, CONTEXT_EXPOSED_SHARE))
    if expert > 1:
        nodes = place_group(expert, stride=1, ranks_per_node=ranks_per_node).nodes
        active = sizes.active_experts
        sent = output_bytes * active * count_crossings(active, nodes=nodes) / tensor
        calls.append(("all_to_all", sent, layers * passes * 2, expert, 1, EXPERT_EXPOSED_SHARE))
    if parallelism.pipeline > 1:
        chunks = parallelism.virtual_stages
        share = PIPELINE_EXPOSED_SHARE if chunks == 1 else INTERLEAVED_EXPOSED_SHARE
        stride = tensor * context * parallelism.data
        calls.append(("point_to_point", output_bytes / tensor, 2 * chunks, 2, stride, share))
    in_flight = exposed = 0.0
    for kind, message_bytes, times, ranks, stride, share in calls:
        group = place_group(ranks, stride=stride, ranks_per_node=ranks_per_node)
        seconds = times * _time_collective(kind, message_bytes, group, _share_network(hardware, group))
        in_flight += seconds
        exposed += share * seconds
    return in_flight, exposed


def _time_replicas(
    workload: WorkloadFeatures,
    hardware: HardwareSpec,
    precision: Precision,
    parallelism: Parallelism,
    *,
    forward_s: float,
    backward_s: float,
    micro_steps: int,
    ranks_per_node: int,
    trainable_share: float,
) -> tuple[float, float, int]:
    """Seconds in flight, and exposed, between replicas in one step, and the number of pieces.

    - Without sharding the last backward pass hides the all-reduce of the gradients.
    - Sharded optimizers scatter the gradients behind the backward pass (each micro-step where gradients are sharded
      too) and gather the updated parameters behind the next forward pass.
    - Sharded parameters are gathered for the forward and for the backward pass of each micro-step, ahead of their
      layer.

    Gradients are sent in the policy's wire format (fp32 for autocast and fp8, as Megatron-LM and FSDP sum them by
    default), parameters in the compute format, at least one byte each. Experts have fewer replicas than the other
    parameters, on ranks an expert group apart.

    Source: Rajbhandari et al., "ZeRO" (2020); Zhao et al., "PyTorch FSDP" (2023).
    """
    tensor, pipeline, expert = parallelism.tensor, parallelism.pipeline, parallelism.expert
    replicas = parallelism.data * parallelism.context
    in_experts = expert_params(workload) if expert > 1 else 0.0
    # parameters, ranks, stride between neighbours
    parts = [((workload.params - in_experts) / (tensor * pipeline), replicas, tensor)]
    if in_experts:
        split = max(expert, tensor)
        parts.append((in_experts / (split * pipeline), max(1, replicas * tensor // split), split))
    wire, gathered = FORMAT_BYTES[precision.communicate], max(1.0, FORMAT_BYTES[precision.compute])
    divides = parallelism.divides
    reduce_kind = "reduce_scatter" if divides.optimizer else "all_reduce"
    reduce_s = gather_s = 0.0
    pieces = 0
    for params, ranks, stride in parts:
        if ranks == 1:
            continue
        group = place_group(ranks, stride=stride, ranks_per_node=ranks_per_node)
        if divides.parameters:
            count = max(1, round(size_transformer(workload).layers / pipeline))
        else:
            bucket = max(MEGATRON_BUCKET_PARAMS, MEGATRON_BUCKET_PARAMS_PER_RANK * ranks)
            count = max(1, math.ceil(params * trainable_share / bucket))
        piece = params / count
        shared = _share_network(hardware, group)
        reduce_s += count * _time_collective(reduce_kind, piece * wire * trainable_share, group, shared)
        if divides.optimizer:
            message_bytes = piece * gathered * (1.0 if divides.parameters else trainable_share)
            gather_s += count * _time_collective("all_gather", message_bytes, group, shared)
        pieces += count
    if not pieces:
        return 0.0, 0.0, 0
    if divides.parameters:
        forward = expose_pieces(gather_s, hidden_by_s=forward_s, pieces=pieces)
        backward = expose_pieces(gather_s + reduce_s, hidden_by_s=backward_s, pieces=pieces)
        return micro_steps * (2 * gather_s + reduce_s), micro_steps * (forward + backward), pieces
    times = micro_steps if divides.gradients else 1
    exposed = times * expose_pieces(reduce_s, hidden_by_s=backward_s, pieces=pieces)
    exposed += expose_pieces(gather_s, hidden_by_s=forward_s, pieces=pieces)
    return times * reduce_s + gather_s, exposed, pieces


def time_replication(workload: WorkloadFeatures, hardware: HardwareSpec, precision: Precision, *, ranks: int) -> float:
    """Seconds of one step that ``nn.DataParallel`` copies the parameters to all devices and sums gradients on one.

        t = REPLICATION_HOST_S tensors ranks + 2 t_broadcast(parameter bytes)

    Copies and sum each move the parameters once, in their storage format. Neither overlaps with compute: the copies
    precede the forward pass and the sum follows the backward pass. The interpreter handles every tensor of every
    replica.
    """
    if ranks == 1:
        return 0.0
    group = Group(ranks, 1, 1.0)
    message_bytes = workload.params * FORMAT_BYTES[precision.storage]
    host_s = REPLICATION_HOST_S * workload.parameter_tensors * ranks
    return host_s + 2 * _time_collective("broadcast", message_bytes, group, hardware)


def estimate_communication(
    workload: WorkloadFeatures,
    hardware: HardwareSpec,
    precision: Precision,
    *,
    compute: ComputeEstimate,
    parallelism: Parallelism,
    implementation: Implementation,
    batch_size: int,
    micro_steps: int,
    nodes: int,
) -> CommunicationEstimate:
    """Communication between the ranks of ``parallelism`` in one optimizer step of ``micro_steps`` micro-steps.

    ``compute`` holds the seconds of one rank for one micro-step of ``batch_size`` samples of a replica. A narrower
    precision shortens them, so less is hidden, while the bytes stay. Ranks lie tensor first, then context, then data,
    then pipeline, on ``nodes`` nodes. Plain data parallelism follows the bucket timeline of ``estimate_overlap``.

    Raises ``InputError`` as ``collective_time_s`` does.
    """
    world = parallelism.world_size
    backward_s = compute.recompute_s + compute.backward_s
    if parallelism.single_process:
        seconds = time_replication(workload, hardware, precision, ranks=world)
        return CommunicationEstimate(model_s=0.0, data_s=seconds, exposed_s=seconds, bubble_s=0.0, bucket_count=0)
    plain = parallelism.data == world and parallelism.expert == 1
    if plain and not parallelism.divides.optimizer:
        overlap = estimate_overlap(
            workload,
            hardware,
            precision,
            backward_s=backward_s,
            ranks=world,
            nodes=nodes,
            trainable_share=implementation.trainable_share,
        )
        return CommunicationEstimate(
            model_s=0.0,
            data_s=overlap.communication_time_s,
            exposed_s=overlap.exposed_communication_s,
            bubble_s=0.0,
            bucket_count=overlap.bucket_count,
        )
    hardware, nodes = _join_domains(hardware, world=world, nodes=nodes)
    ranks_per_node = -(-world // nodes)
    model_s, exposed_s = 0.0, 0.0
    if not plain:
        model_s, exposed_s = _time_layers(
            workload,
            hardware,
            precision,
            parallelism,
            batch_size=batch_size,
            ranks_per_node=ranks_per_node,
            recomputes=implementation.checkpointing == "full",
        )
    stage_s = compute.forward_s + backward_s + exposed_s
    bubble_s = 0.0
    if parallelism.pipeline > 1:
        excess = weigh_last_stage(workload, stages=parallelism.pipeline)
        bubble_s = time_bubble(stage_s, parallelism, micro_steps=micro_steps, last_stage_excess=excess)
    data_s, data_exposed_s, pieces = _time_replicas(
        workload,
        hardware,
        precision,
        parallelism,
        forward_s=compute.forward_s,
        backward_s=backward_s,
        micro_steps=micro_steps,
        ranks_per_node=ranks_per_node,
        trainable_share=implementation.trainable_share,
    )
    return CommunicationEstimate(
        model_s=micro_steps * model_s,
        data_s=data_s,
        exposed_s=micro_steps * exposed_s + data_exposed_s,
        bubble_s=bubble_s,
        bucket_count=pieces,
    )
