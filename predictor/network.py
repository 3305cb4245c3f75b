"""Closed forms of collectives: seconds of an all-reduce inside a node and across nodes."""

import itertools
import math
from dataclasses import dataclass

from precision_time.predictor.hardware import HardwareSpec
from precision_time.storage.errors import InputError

__all__ = ["LINK_CLASSES", "LinkClass", "all_reduce_time_s"]


@dataclass(frozen=True, slots=True)
class LinkClass:
    """How an all-reduce uses one kind of link inside a node.

    ``efficiency`` maps a number of ranks to bus bandwidth over nominal link rate, linear in between and constant
    outside; ``latency_growth`` is what each rank past the second adds to the latency of two, as a share of it.
    """

    efficiency: dict[int, float]
    latency_growth: float


# Fits of t = alpha(n) + 2(n-1)/n S/B, weighted by 1/t. The V100 and A100 curves are those of VIA-Research/vTrain
# f8dda84 (trace/v100, trace/a100; 40 sizes from 1 MiB to 1 GiB, 2 to 8 GPUs): the median error of a fit is 0.1 to
# 3.6 %, the largest 24 % (V100, 8 GPUs, at the small end). The others are single public nccl-tests curves.
LINK_CLASSES: dict[str, LinkClass] = {
    # The mesh of DGX-1 gives each number of GPUs its own rings, hence no order in the figures: 22.6, 45.8, 87.6, 37.2,
    # 46.8, 88.8 and 137.5 GB/s of 150 for 2 to 8 V100. P100 is taken as the same share of NVLink 1, not measured.
    "nvlink1-mesh": LinkClass({2: 0.15, 3: 0.31, 4: 0.58, 5: 0.25, 6: 0.31, 7: 0.59, 8: 0.92}, 0.42),
    "nvlink2-mesh": LinkClass({2: 0.15, 3: 0.31, 4: 0.58, 5: 0.25, 6: 0.31, 7: 0.59, 8: 0.92}, 0.42),
    # DGX-2: no curve found; the shares of the A100 switch.
    "nvlink2-switch": LinkClass({2: 0.63, 3: 0.69, 4: 0.70, 8: 0.74}, 0.12),
    # 187.6, 208.2, 211.2 and 223.0 GB/s of 300 for 2, 3, 4 and 8 A100.
    "nvlink3-switch": LinkClass({2: 0.63, 3: 0.69, 4: 0.70, 8: 0.74}, 0.12),
    # 310 GB/s of 450 for 4 H100 without a switch (odissei-benchmarks/nccl-tests 6df4cb5), 404 and 410 for 8 with one
    # (aws-samples/awsome-distributed-training 7217859, NVIDIA/dgxc-benchmarking 841f546).
    "nvlink4-switch": LinkClass({4: 0.69, 8: 0.90}, 0.12),
    # 707 GB/s of 900 for 8 B200 (one public report).
    "nvlink5-switch": LinkClass({8: 0.79}, 0.12),
    # 5.3 GB/s of 15.8 for 8 T4 (AWS ParallelCluster workshop).
    "pcie3": LinkClass({8: 0.34}, 0.28),
    # 9.0 and 16.3 GB/s of 31.5 for 2 and 8 RTX 4090, 13.1 for 8 A100 PCIe (Panlichen/nccl-tests 2c51b1b).
    "pcie4": LinkClass({2: 0.29, 8: 0.47}, 0.28),
    # No curve of one node found; the shares of PCIe 4.
    "pcie5": LinkClass({2: 0.29, 8: 0.47}, 0.28),
    # gloo over the loopback of one host: the rate of two ranks is the link rate itself, and more ranks share the same
    # cores (0.64 of it was measured for 4 ranks on 2 cores); a ring of n ranks takes n - 1 times the steps of two.
    "shared-memory": LinkClass({2: 1.0, 4: 0.64, 8: 0.32, 16: 0.16, 32: 0.08}, 1.0),
}
#: Share of the nominal network rate that collectives reach. Three and more nodes: 0.78 on 8 x 400 Gbit/s (4 nodes,
#: NVIDIA/nccl-tests issue 309), 0.87 on 4 x 200 Gbit/s (3 nodes, issue 119). Clouds without InfiniBand were seen lower.
NETWORK_EFFICIENCY = 0.8

#: Seconds of one step between nodes. 8 H100 need 31 us for the latency of an all-reduce in one node, 74 to 95 in two
#: and 109 in four (fits of NVIDIA/nccl-tests issue 309 and public two-node curves), which is 2 log2(N) times this.
NETWORK_STEP_S = 25e-6


def _efficiency(link: LinkClass, ranks: int) -> float:
    points = sorted(link.efficiency.items())
    if ranks <= points[0][0]:
        return points[0][1]
    for (low, at_low), (high, at_high) in itertools.pairwise(points):
        if ranks <= high:
            return at_low + (at_high - at_low) * (ranks - low) / (high - low)
    return points[-1][1]


def _intra_node(hardware: HardwareSpec, ranks: int) -> tuple[float, float]:
    """Latency (s) and bus bandwidth (bytes/s) of an all-reduce over ``ranks`` devices of one node."""
    link = LINK_CLASSES[hardware.link]
    latency_s = hardware.all_reduce_latency_s * (1.0 + link.latency_growth * (ranks - 2))
    return latency_s, hardware.link_bytes_per_s * _efficiency(link, ranks)


def all_reduce_time_s(message_bytes: float, *, ranks: int, nodes: int, hardware: HardwareSpec) -> float:
    """Seconds to sum ``message_bytes`` over ``ranks`` devices on ``nodes`` nodes, an equal number on each.

    One node: t = alpha(n) + 2(n-1)/n S/B. N nodes of g: the faster of one flat ring, whose bandwidth is that of its
    slowest link and whose latency grows with N, and of three phases (reduce-scatter inside, all-reduce of S/g between
    the nodes on each device's share of the network, all-gather inside) with the 2 log2(N) latency of a tree.
    Zero for one rank. Raises ``InputError`` when the ranks do not divide over the nodes or the bytes are negative.

    Source: ring all-reduce after Patarasuk and Yuan (2009); constants of this file.
    """
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise InputError("the ranks do not divide over the nodes", got=f"{ranks} ranks / {nodes} nodes",
                         expected="a whole number of ranks per node")  # fmt: skip
    if not (math.isfinite(message_bytes) and message_bytes >= 0):
        raise InputError("message_bytes is not usable", got=repr(message_bytes), expected="bytes, zero or more")
    if ranks == 1:
        return 0.0
    per_node = ranks // nodes
    intra_latency_s, intra_bytes_per_s = _intra_node(hardware, per_node) if per_node > 1 else (0.0, math.inf)
    if nodes == 1:
        return intra_latency_s + 2 * (ranks - 1) / ranks * message_bytes / intra_bytes_per_s

    network_bytes_per_s = NETWORK_EFFICIENCY * hardware.network_bytes_per_s
    base_s = intra_latency_s or hardware.all_reduce_latency_s
    flat_ring_s = (
        base_s
        + 2 * (nodes - 1) * NETWORK_STEP_S
        + 2 * (ranks - 1) / ranks * message_bytes / min(intra_bytes_per_s, network_bytes_per_s)
    )
    # Each device sends S/g over 1/g of the node's network, so g cancels.
    three_phases_s = (
        base_s
        + 2 * math.log2(nodes) * NETWORK_STEP_S
        + 2 * (per_node - 1) / per_node * message_bytes / intra_bytes_per_s
        + 2 * (nodes - 1) / nodes * message_bytes / network_bytes_per_s
    )
    return min(flat_ring_s, three_phases_s)
