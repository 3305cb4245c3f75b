"""Seconds of one collective, inside a node and across nodes, by kind, size, ranks and link.

The constants stand in ``predictor/data/links.toml``. ``fit_links`` of ``predictor/closed_form/fit_links.py`` fits them
on the public nccl-tests curves of ``predictor/data/collectives.parquet``, and ``format_links`` writes them.
"""

import functools
import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.links import LINK_KINDS
from precision_time.predictor.shipped import shipped_text
from precision_time.storage.errors import InputError

__all__ = ["COLLECTIVES", "NETWORKS", "CollectiveLaw", "LinkLaw", "Links", "NetworkLaw", "all_reduce_time_s",
           "collective_time_s", "parse_links", "shipped_links", "time_collective"]  # fmt: skip

#: Kinds of collective. Message bytes are those that nccl-tests prints: the whole result of an all_gather, the whole
#: input of one rank for reduce_scatter and all_to_all, the bytes that each rank sends for point_to_point ("sendrecv",
#: every rank to its neighbour at the same time).
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "point_to_point")

#: Kinds of network between nodes. ``common`` is for an unknown network; the fit shrinks the others towards it.
#: ``ethernet`` is without RDMA, ``roce`` with it.
NETWORKS = ("common", "infiniband", "roce", "efa", "slingshot", "ethernet")

#: Transfer time at which half of the cost of the large-message protocol is paid.
HANDOVER_AT_S = 8e-6

#: Smallest number of GPUs of a node with an NVLink switch: nodes of four are wired directly.
SWITCHED_RANKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLaw:
    """How collectives use one kind of link inside a node.

    ``latency`` is the size-independent time of two ranks over the device's ``all_reduce_latency_s``; it grows with
    (ranks - 1) to the power ``growth``. ``handover_s`` is added for large messages. ``efficiency`` is the bus bandwidth
    of eight ranks over the nominal link rate. For n ranks it is multiplied by ``shares`` (ranks, share; linear in
    between) or, without them, for an all-reduce by (1 - pair_loss / n) / (1 - pair_loss / 8). ``in_switch`` is the bus
    bandwidth of an all-reduce that the switch sums (NVLS) over the nominal rate, 0 where no switch does. ``tree`` is
    the efficiency of a tree over that of a ring.
    """

    latency: float
    growth: float
    efficiency: float
    handover_s: float
    pair_loss: float = 0.0
    in_switch: float = 0.0
    tree: float = 1.0
    shares: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLaw:
    """How collectives use one kind of network.

    ``latency_s`` is the time of a step between nodes of eight ranks; it grows with the ranks of a node to the power
    ``growth``. ``efficiency`` is the share of the nominal rate that is reached. ``handover_s`` is added for large
    messages.
    """

    latency_s: float
    growth: float
    efficiency: float
    handover_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLaw:
    """Factors of one kind of collective on latency, link efficiency and network efficiency; all_reduce has ones."""

    latency: float
    efficiency: float
    network: float


@dataclass(frozen=True, slots=True)
class Links:
    """All constants of the closed forms, by name of link, network and collective."""

    links: Mapping[str, LinkLaw]
    networks: Mapping[str, NetworkLaw]
    collectives: Mapping[str, CollectiveLaw]


def _interpolate_share(shares: Sequence[tuple[int, float]], ranks: float) -> float:
    if ranks <= shares[0][0]:
        return shares[0][1]
    for (low, at_low), (high, at_high) in itertools.pairwise(shares):
        if ranks <= high:
            return at_low + (at_high - at_low) * (ranks - low) / (high - low)
    return shares[-1][1]


def _ring_efficiency(link: LinkLaw, kind: str, ranks: float) -> float:
    """Share of the nominal link rate that a ring over ``ranks`` devices of a node reaches."""
    if link.shares:
        return link.efficiency * _interpolate_share(link.shares, ranks)
    if kind == "all_reduce" and link.pair_loss:
        return link.efficiency * (1 - link.pair_loss / ranks) / (1 - link.pair_loss / 8)
    return link.efficiency


def time_collective(
    links: Links, kind: str, message_bytes: float, ranks: int, nodes: int, hardware: HardwareSpec, network: str
) -> float:
    """``collective_time_s`` with the constants ``links``, for fits; the arguments are not checked (``ranks`` >= 2)."""
    link, factors = links.links[hardware.link], links.collectives[kind]
    network_bytes_per_s = hardware.network_bytes_per_s
    groups, switched = nodes, hardware.gpus_per_node >= SWITCHED_RANKS
    if hardware.nvlink_domain is not None:
        groups = min(nodes, max(1, math.ceil(ranks / hardware.nvlink_domain)))
        network_bytes_per_s *= nodes / groups
        switched = True
    inside = ranks / groups
    latency_s = hardware.all_reduce_latency_s * link.latency * factors.latency
    reduces = kind == "all_reduce"
    transfer_s = 0.0
    bytes_per_s = math.inf
    in_switch = False
    if inside > 1:
        if kind != "point_to_point":
            latency_s *= math.pow(inside - 1, link.growth)
        nominal = hardware.link_bytes_per_s
        bytes_per_s = nominal * factors.efficiency * _ring_efficiency(link, kind, inside)
        in_switch = reduces and switched and inside > 2 and link.in_switch > 0
        if in_switch:
            # No faster than a pair, so that more ranks never take less time.
            pair_s = message_bytes / (nominal * _ring_efficiency(link, kind, 2))
            transfer_s = max(pair_s, 2 * (1 - 1 / inside) * message_bytes / (nominal * link.in_switch))
    if groups == 1:
        if not in_switch:
            volume = 1.0 if kind in ("broadcast", "point_to_point") else 1 - 1 / inside
            transfer_s = (2 * volume if reduces else volume) * message_bytes / bytes_per_s
        return latency_s + transfer_s + link.handover_s * transfer_s / (transfer_s + HANDOVER_AT_S)

    network_law = links.networks[network]
    node_bytes_per_s = network_law.efficiency * factors.network * min(
        network_bytes_per_s, inside * LINK_KINDS[hardware.link].device_bytes_per_s
    )  # fmt: skip
    slowest_bytes_per_s = min(bytes_per_s, node_bytes_per_s)
    steps = groups - 1.0
    step_s = network_law.latency_s * math.pow(inside / 8, network_law.growth)
    if reduces:
        steps = math.log2(groups)
        # Each device of a tree inside a node sends all bytes up and all down.
        if not in_switch and inside > 1:
            transfer_s = 2 * message_bytes / (bytes_per_s * link.tree)
        tree_s = max(transfer_s, 2 * (1 - 1 / groups) * message_bytes / node_bytes_per_s)
        transfer_s = min(tree_s, 2 * (1 - 1 / ranks) * message_bytes / slowest_bytes_per_s)
    elif kind == "all_to_all":
        # Each device sends S (n - g)/n bytes over 1/g of the node's network.
        outside_s = (1 - 1 / groups) * message_bytes * inside / node_bytes_per_s
        transfer_s = max((1 - 1 / ranks) * message_bytes / bytes_per_s, outside_s)
    elif kind == "point_to_point":
        steps = 1.0
        transfer_s = message_bytes * max(1 / bytes_per_s, inside / node_bytes_per_s)
    elif kind == "broadcast":
        steps = math.log2(groups)
        transfer_s = message_bytes / slowest_bytes_per_s
    else:
        transfer_s = (1 - 1 / ranks) * message_bytes / slowest_bytes_per_s
    handover_s = link.handover_s + network_law.handover_s
    return latency_s + steps * step_s + transfer_s + handover_s * transfer_s / (transfer_s + HANDOVER_AT_S)


def collective_time_s(
    kind: str, message_bytes: float, *, ranks: int, nodes: int, hardware: HardwareSpec, network: str = "common"
) -> float:
    """Seconds of one collective of ``message_bytes`` over ``ranks`` devices on ``nodes`` nodes, as many on each.

    ``kind`` is one of ``COLLECTIVES`` with the sizes of nccl-tests; ``network`` one of ``NETWORKS``. The time is

        alpha + x + h x / (x + 8 us)

    with x the transfer time of the slowest link on the way, alpha the latency, which grows with the ranks inside and
    the steps between nodes, and h the extra latency of the protocols for large messages. A device reaches the network
    no faster than its PCIe. An all-reduce over nodes is the faster of a flat ring and a tree. Two nodes of a tree
    exchange half of the bytes of a ring, so their bus bandwidth may exceed the network's. Nodes that share NVLink
    (``nvlink_domain``) count as one. Zero for one rank.

    Never decreases with the bytes, nor with the nodes at a fixed number of ranks on each. Inside a node it does not
    decrease with the ranks either, except on the mesh of DGX-1, where each number of GPUs has its own rings. More
    ranks a node may reach more of its network cards and so take less time.

    Raises ``InputError`` for an unknown kind or network, ranks that do not divide over the nodes, or unusable bytes.

    Source: ring after Patarasuk and Yuan (2009); tree after Sanders, Speck and Traeff (2009); constants in links.toml.
    """
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise InputError("the ranks do not divide over the nodes", got=f"{ranks} ranks / {nodes} nodes",
                         expected="a whole number of ranks per node")  # fmt: skip
    if not (math.isfinite(message_bytes) and message_bytes >= 0):
        raise InputError("message_bytes is not usable", got=repr(message_bytes), expected="bytes, zero or more")
    if kind not in COLLECTIVES or network not in NETWORKS:
        raise InputError("a collective cannot be timed", got=f"{kind} over {network}",
                         expected=f"one of {', '.join(COLLECTIVES)} over one of {', '.join(NETWORKS)}")  # fmt: skip
    if ranks == 1:
        return 0.0
    return time_collective(shipped_links(), kind, message_bytes, ranks, nodes, hardware, network)


def all_reduce_time_s(message_bytes: float, *, ranks: int, nodes: int, hardware: HardwareSpec) -> float:
    """Seconds to sum ``message_bytes`` over ``ranks`` devices; ``collective_time_s`` of an all_reduce."""
    return collective_time_s("all_reduce", message_bytes, ranks=ranks, nodes=nodes, hardware=hardware)


def _read_law(kind: type[Any], entry: Mapping[str, Any], *, where: str) -> Any:
    known = {field.name for field in fields(kind)}
    if entry.keys() - known:
        raise InputError(
            f"{where} is not usable",
            got=", ".join(sorted(entry.keys() - known)),
            expected=f"fields among {', '.join(sorted(known))}",
        )
    values = dict(entry)
    if "shares" in values:
        values["shares"] = tuple((int(ranks), float(share)) for ranks, share in values["shares"])
    try:
        return kind(**values)
    except TypeError as error:
        raise InputError(f"{where} is not usable", got=str(error), expected=", ".join(sorted(known))) from error


def parse_links(text: str) -> Links:
    """Constants from the text of a ``links.toml``.

    Raises ``InputError`` when a link, network or collective has no table, or a field is unknown or missing.
    """
    document = tomllib.loads(text)
    laws: dict[str, dict[str, Any]] = {}
    for table, kind, names in (
        ("link", LinkLaw, LINK_KINDS),
        ("network", NetworkLaw, NETWORKS),
        ("collective", CollectiveLaw, COLLECTIVES),
    ):
        entries = document.get(table, {})
        if set(entries) != set(names):
            raise InputError(f"the tables [{table}] are not usable", got=", ".join(entries), expected=", ".join(names))
        laws[table] = {name: _read_law(kind, entries[name], where=f"{table}.{name}") for name in names}
    return Links(laws["link"], laws["network"], laws["collective"])


@functools.cache
def shipped_links() -> Links:
    """The constants of ``predictor/data/links.toml``."""
    return parse_links(shipped_text("links.toml"))
