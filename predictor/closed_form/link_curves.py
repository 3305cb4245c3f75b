"""Rows of public collective curves: the hardware, network and site of each, or the reason why it cannot be used."""

import math
import numbers
import re
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from precision_time.predictor.closed_form.collectives import COLLECTIVES
from precision_time.predictor.setup.hardware import HardwareSpec, find_hardware
from precision_time.predictor.setup.links import LINK_KINDS
from precision_time.storage.errors import PrecisionTimeError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["CurvePoint", "curve_site", "describe_curve_hardware", "describe_curve_network", "read_points"]

#: Our names of collectives that nccl-tests names differently.
_KINDS = {"alltoall": "all_to_all", "sendrecv": "point_to_point"}

#: Operators of machines, by words in source, network or notes: several repositories measure one operator's machines.
_OPERATORS = (
    ("aws", r"\bEFA\b|\baws|KeitaW|cybertronai|\bAWS\b|nccl issue 527"),
    ("google", r"TCPX|GKE|GoogleCloud|/gcp\.md"),
    ("azure", r"Azure|AKS"),
    ("oracle", r"\bOCI\b|oracle"),
    ("coreweave", r"[Cc]ore[Ww]eave|exps/cw"),
    ("nebius", r"[Nn]ebius"),
)
_NETWORK_WORDS = (
    ("infiniband", r"InfiniBand"),
    ("roce", r"RoCE|ConnectX|mlx5|TCPXO"),
    ("efa", r"EFA"),
    ("slingshot", r"Slingshot"),
    ("ethernet", r"TCPX\b|Ethernet|TCP\b"),
)
#: One port for each GPU where a row names the network without a count: Slingshot-11 of 200 Gb/s, and 400 Gb/s a GPU of
#: servers with ConnectX-8 (vendor sheets, not re-checked).
_PORT_PER_GPU = (("Slingshot-11", 25e9), ("ConnectX-8", 50e9))


class CurvePoint(NamedTuple):
    """One measured time: its row number in the table, its site, and the arguments of ``collective_time_s``."""

    row: int
    site: str
    kind: str
    message_bytes: float
    ranks: int
    nodes: int
    hardware: HardwareSpec
    network: str
    seconds: float


def _text(row: Mapping[Hashable, Any], column: str) -> str:
    value = row.get(column)
    return value if isinstance(value, str) else ""


def _number(row: Mapping[Hashable, Any], column: str) -> float | None:
    """The cell of ``column`` as a positive finite number, else None."""
    value = row.get(column)
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return None
    number = float(value)
    return number if math.isfinite(number) and number > 0 else None


def curve_site(row: Mapping[Hashable, Any]) -> str:
    """The operator of the machine, where words of the row name one, else the owner of the source's repository.

    Sources with many authors (issues, texts outside a repository) are a site each.
    """
    source = _text(row, "source")
    words = " ".join((source, _text(row, "inter_link"), _text(row, "notes")))
    for operator, pattern in _OPERATORS:
        if re.search(pattern, words):
            return operator
    many_authors = "issue" in source or not re.match(r"[\w.-]+/", source)
    return source if many_authors else source.split("/")[0]


def describe_curve_network(row: Mapping[Hashable, Any]) -> str:
    """The kind of network that the row's ``inter_link`` names, one of ``NETWORKS``; ``common`` where it names none.

    ``ethernet`` where the notes say that RDMA was off.
    """
    if "NCCL_IB_DISABLE=1" in _text(row, "notes"):
        return "ethernet"
    return next(
        (network for network, pattern in _NETWORK_WORDS if re.search(pattern, _text(row, "inter_link"))), "common"
    )


def describe_curve_hardware(row: Mapping[Hashable, Any]) -> HardwareSpec:
    """The device of a row in the node that the row describes.

    Figures of the row replace those of the device's usual node: ``gpus_per_node``, a link rate such as
    ``200 GB/s/dir/GPU`` or an NVLink bridge in ``intra_link``, and a network such as ``8x400 Gb/s per node`` in
    ``inter_link``. Slingshot-11 without a count is taken as one port of 200 Gb/s per GPU.

    Raises ``UnknownNameError`` for an unknown GPU.
    """
    hardware = find_hardware(_text(row, "gpu"))
    changes: dict[str, Any] = {}
    per_node = _number(row, "gpus_per_node")
    if per_node is not None and per_node >= 1:
        changes["gpus_per_node"] = int(per_node)
    inside, between = _text(row, "intra_link"), _text(row, "inter_link")
    if rate := re.search(r"(\d+) GB/s/dir/GPU", inside):
        changes["link_bytes_per_s"] = int(rate[1]) * 1e9
    elif bridge := re.search(r"NVLink(\d) bridge", inside):
        kind = LINK_KINDS.get(f"nvlink{bridge[1]}-switch")
        if kind and kind.bridge_bytes_per_s:
            changes |= {"link": kind.name, "link_bytes_per_s": kind.bridge_bytes_per_s}
    if ports := re.search(r"(?:(\d+)x)?(\d+) Gb/s", between):
        changes["network_bytes_per_s"] = int(ports[1] or 1) * int(ports[2]) * 1e9 / 8
    elif "single" in between:
        changes["network_bytes_per_s"] = hardware.network_bytes_per_s / hardware.gpus_per_node
    else:
        for port, bytes_per_s in _PORT_PER_GPU:
            if port in between:
                changes["network_bytes_per_s"] = bytes_per_s * changes.get("gpus_per_node", hardware.gpus_per_node)
    return replace(hardware, **changes)


def _refuse(row: Mapping[Hashable, Any]) -> str:
    """The reason why a row cannot be predicted; empty where it can."""
    gpu = _text(row, "gpu")
    if re.match(r"MI\d|AMD", gpu):
        return "no data of AMD devices"
    if row.get("healthy") in (0, "0"):
        return "reported as slow or broken"
    collective = _text(row, "collective")
    if _KINDS.get(collective, collective) not in COLLECTIVES:
        return "collective unknown"
    for column in ("bytes", "seconds", "num_gpus", "num_nodes"):
        value = _number(row, column)
        if value is None or (column.startswith("num_") and not value.is_integer()):
            return f"{column} unusable"
    if row["num_gpus"] < 2 or row["num_gpus"] % row["num_nodes"]:
        return "num_gpus unusable"
    return ""


def read_points(frame: "pd.DataFrame") -> tuple[list[CurvePoint], dict[str, int]]:
    """The rows of ``frame`` that can be predicted, and the number of refused rows by reason.

    Refused are AMD devices, rows reported as slow or broken (``healthy`` 0), unknown collectives and devices, and
    numbers that are missing, not positive or do not divide.
    """
    points: list[CurvePoint] = []
    refused: dict[str, int] = {}
    described: dict[tuple[str, ...], HardwareSpec | None] = {}
    for number, row in enumerate(frame.to_dict("records")):
        reason = _refuse(row)
        key = tuple(str(row.get(column)) for column in ("gpu", "gpus_per_node", "intra_link", "inter_link"))
        if not reason and key not in described:
            try:
                described[key] = describe_curve_hardware(row)
            except PrecisionTimeError:
                described[key] = None
        hardware = None if reason else described[key]
        if hardware is None:
            reason = reason or "hardware unknown"
            refused[reason] = refused.get(reason, 0) + 1
            continue
        kind = _text(row, "collective")
        points.append(
            CurvePoint(number, curve_site(row), _KINDS.get(kind, kind), float(row["bytes"]), int(row["num_gpus"]),
                   int(row["num_nodes"]), hardware, describe_curve_network(row), float(row["seconds"]))
        )  # fmt: skip
    return points, refused
