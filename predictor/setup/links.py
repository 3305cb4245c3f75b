"""Kinds of link between the devices of one node, one row each.

To add a kind: add its row here, give it to a device in ``predictor/data/gpus.toml`` (the fit reads the latency there),
and write ``format_links(fit_links(shipped_collectives()))`` of ``predictor/closed_form/fit_links.py`` to
``predictor/data/links.toml``. ``tests/predictor/closed_form/test_fit_links.py`` fails until that file is the fit.
"""

import math
from dataclasses import dataclass

__all__ = ["LINK_KINDS", "LinkKind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKind:
    """What the closed forms of collectives and their fit know about one kind of link.

    ``device_bytes_per_s`` is the rate of one device to its network card, one way: the PCIe of its time.
    ``family`` (``mesh``, ``nvlink``, ``pcie``) says whose constants the fit starts from; None for a link that is not
    fitted, whose nominal rate and latency are measured ones. ``curves`` is the kind whose public curves move its
    constants away from the family's: as a rule the kind itself, None where no curve is known.
    ``switch_sums`` is true where the switch adds up an all-reduce (NVLS). ``shares`` are the rates of fewer ranks over
    that of the family's ``efficiency``, as (ranks, share), where ranks alone do not decide them.
    ``bridge_bytes_per_s`` is the rate of one device over a bridge between two cards of this NVLink generation, one way.
    """

    name: str
    device_bytes_per_s: float
    family: str | None = None
    curves: str | None = None
    switch_sums: bool = False
    shares: tuple[tuple[int, float], ...] = ()
    bridge_bytes_per_s: float | None = None


#: Bytes per second of 16 lanes, one way.
_PCIE3, _PCIE4, _PCIE5 = 15.8e9, 31.5e9, 63e9

#: Bus bandwidth of 2 to 8 V100 of a DGX-1 over that of 8: 22.6, 45.8, 87.6, 37.2, 46.8, 88.8 and 137.5 GB/s
#: (VIA-Research/vTrain f8dda84, trace/v100). Each number of GPUs finds its own rings in the mesh, hence no order.
_DGX1_SHARES = ((2, 0.164), (3, 0.333), (4, 0.637), (5, 0.271), (6, 0.34), (7, 0.646), (8, 1.0))
#: gloo over the loopback of one host: the rate of two ranks is the link rate itself, and more ranks share the same
#: cores (0.64 of it was measured for 4 ranks on 2 cores).
_LOOPBACK_SHARES = ((2, 1.0), (4, 0.64), (8, 0.32), (16, 0.16), (32, 0.08))

LINK_KINDS: dict[str, LinkKind] = {
    kind.name: kind
    for kind in (
        LinkKind(name="nvlink1-mesh", device_bytes_per_s=_PCIE3, family="mesh", curves="nvlink2-mesh",
                 shares=_DGX1_SHARES),
        LinkKind(name="nvlink2-mesh", device_bytes_per_s=_PCIE3, family="mesh", curves="nvlink2-mesh",
                 shares=_DGX1_SHARES),
        LinkKind(name="nvlink2-switch", device_bytes_per_s=_PCIE3, family="nvlink", bridge_bytes_per_s=50e9),
        LinkKind(name="nvlink3-switch", device_bytes_per_s=_PCIE4, family="nvlink", curves="nvlink3-switch",
                 bridge_bytes_per_s=300e9),
        LinkKind(name="nvlink4-switch", device_bytes_per_s=_PCIE5, family="nvlink", curves="nvlink4-switch",
                 switch_sums=True, bridge_bytes_per_s=300e9),
        LinkKind(name="nvlink5-switch", device_bytes_per_s=_PCIE5, family="nvlink", curves="nvlink5-switch",
                 switch_sums=True),
        LinkKind(name="pcie3", device_bytes_per_s=_PCIE3, family="pcie", curves="pcie3"),
        LinkKind(name="pcie4", device_bytes_per_s=_PCIE4, family="pcie", curves="pcie4"),
        LinkKind(name="pcie5", device_bytes_per_s=_PCIE5, family="pcie", curves="pcie5"),
        LinkKind(name="shared-memory", device_bytes_per_s=math.inf, shares=_LOOPBACK_SHARES),
    )
}  # fmt: skip
