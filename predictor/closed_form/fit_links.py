"""The fit of the closed forms of collectives to public curves, and their errors on such curves.

After a change of the curves, the forms or the hardware, write ``format_links(fit_links(shipped_collectives()))`` to
``predictor/data/links.toml``.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.closed_form.collectives import (
    COLLECTIVES,
    NETWORKS,
    CollectiveLaw,
    LinkLaw,
    Links,
    NetworkLaw,
    shipped_links,
    time_collective,
)
from precision_time.predictor.closed_form.link_curves import CurvePoint, read_points
from precision_time.predictor.setup.hardware import known_hardware
from precision_time.predictor.setup.links import LINK_KINDS, LinkKind
from precision_time.storage.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["evaluate_collectives", "fit_links", "format_links", "time_point"]

Floats = npt.NDArray[np.float64]

#: Log error at which the loss of a fit turns from squares to absolute values.
TURNING_ERROR = 0.1
#: Weight of the curves against the prior.
DATA_WEIGHT = 0.1
#: A row weighs the row count of its site to the power of minus this.
SITE_POWER = 0.5
MOST_ROUNDS = 12


def time_point(links: Links, point: CurvePoint) -> float:
    """Seconds of a measured collective by the closed form with the constants ``links``."""
    return time_collective(
        links, point.kind, point.message_bytes, point.ranks, point.nodes, point.hardware, point.network
    )


def _priors() -> dict[str, tuple[float, float]]:
    """Centre and log standard deviation of each parameter.

    A constant is the product of its family's parameter and its own deviation, whose centre is 1; without a curve it
    stays at the family's. The centres are round figures of the order of NCCL's tuning tables and data sheets. The
    standard deviations were chosen on left-out sites, in steps of a factor of three.
    """
    priors = {
        "nvlink.latency": (9e-6, 1.0), "nvlink.efficiency": (0.8, 0.4), "nvlink.handover": (32e-6, 0.7),
        "mesh.latency": (9e-6, 1.0), "mesh.efficiency": (0.9, 0.2),
        "pcie.latency": (15e-6, 1.0), "pcie.efficiency": (0.4, 0.5), "pcie.handover": (32e-6, 0.7),
        "nvlink.growth": (0.5, 0.4), "switch.growth": (0.25, 0.5), "pcie.growth": (0.6, 0.4),
        "pair_loss": (0.3, 0.5), "tree": (0.85, 0.15),
        "common.latency": (10e-6, 0.7), "common.efficiency": (0.8, 0.2), "common.handover": (60e-6, 0.7),
        "common.growth": (0.5, 0.5),
        "all_to_all.network": (0.6, 0.3), "point_to_point.network": (0.7, 0.3),
    }  # fmt: skip
    for link in dict.fromkeys(kind.curves for kind in LINK_KINDS.values() if kind.curves):
        wide = 0.3 if LINK_KINDS[link].family == "pcie" else 0.15
        priors |= {f"{link}.latency": (1.0, 0.35), f"{link}.efficiency": (1.0, wide), f"{link}.handover": (1.0, 0.35)}
    priors |= {f"{kind.name}.in_switch": (1.0, 0.1) for kind in LINK_KINDS.values() if kind.switch_sums}
    for kind in COLLECTIVES[1:]:
        priors |= {f"{kind}.latency": (1.0, 0.25), f"{kind}.efficiency": (1.0, 0.12)}
    for network in NETWORKS[1:]:
        # Networks without RDMA hardware are slower and differ more from each other.
        slow = network in ("efa", "ethernet")
        priors |= {f"{network}.latency": (3.0 if slow else 1.0, 0.8 if slow else 0.4),
                   f"{network}.efficiency": (0.8 if slow else 1.0, 0.3 if slow else 0.15),
                   f"{network}.handover": (1.0, 0.8)}  # fmt: skip
    return priors


@functools.cache
def _nominal_latencies() -> dict[str, float]:
    """``all_reduce_latency_s`` by link, the median of the shipped devices.

    Latencies are fitted in seconds and stored as multiples of it.
    """
    specs = known_hardware().values()
    return {link: statistics.median(spec.all_reduce_latency_s for spec in specs if spec.link == link)
            for link, kind in LINK_KINDS.items() if kind.family}  # fmt: skip


def _build_link(kind: LinkKind, values: Mapping[str, float]) -> LinkLaw:
    family = kind.family
    if family is None:
        # A ring of n ranks takes n - 1 times the steps of two.
        return LinkLaw(latency=1.0, growth=1.0, efficiency=1.0, handover_s=0.0, shares=kind.shares)
    base = "nvlink" if family == "mesh" else family
    return LinkLaw(
        latency=values[f"{family}.latency"]
        * values.get(f"{kind.curves}.latency", 1.0)
        / _nominal_latencies()[kind.name],
        growth=values["switch.growth" if kind.switch_sums else f"{base}.growth"],
        efficiency=values[f"{family}.efficiency"] * values.get(f"{kind.curves}.efficiency", 1.0),
        handover_s=values[f"{base}.handover"] * values.get(f"{kind.curves}.handover", 1.0),
        pair_loss=values["pair_loss"] if family == "nvlink" else 0.0,
        in_switch=values[f"{kind.name}.in_switch"] if kind.switch_sums else 0.0,
        tree=values["tree"],
        shares=kind.shares,
    )


def _build(values: Mapping[str, float]) -> Links:
    networks = {
        network: NetworkLaw(
            latency_s=values["common.latency"] * (1.0 if network == "common" else values[f"{network}.latency"]),
            growth=values["common.growth"],
            efficiency=values["common.efficiency"] * (1.0 if network == "common" else values[f"{network}.efficiency"]),
            handover_s=values["common.handover"] * (1.0 if network == "common" else values[f"{network}.handover"]),
        )
        for network in NETWORKS
    }
    collectives = {
        kind: CollectiveLaw(
            latency=values.get(f"{kind}.latency", 1.0),
            efficiency=values.get(f"{kind}.efficiency", 1.0),
            network=values.get(f"{kind}.network", 1.0),
        )
        for kind in COLLECTIVES
    }
    return Links({name: _build_link(kind, values) for name, kind in LINK_KINDS.items()}, networks, collectives)


def _touches(name: str, point: CurvePoint) -> bool:
    """Whether the time of ``point`` can depend on the parameter ``name``."""
    subject, _, _ = name.partition(".")
    family = LINK_KINDS[point.hardware.link].family
    if subject in LINK_KINDS:
        return subject == point.hardware.link
    if subject in COLLECTIVES:
        return subject == point.kind
    if subject in NETWORKS:
        return point.nodes > 1 and subject in ("common", point.network)
    if subject == "nvlink":
        return family in ("nvlink", "mesh")
    if subject == "tree":
        return point.nodes > 1 and point.kind == "all_reduce"
    return subject in (family, "switch", "pair_loss")


def fit_links(frame: "pd.DataFrame") -> Links:
    """The constants that fit the healthy NVIDIA curves of ``frame`` (columns of ``collectives.parquet``).

    They have the highest posterior, found by Levenberg-Marquardt steps on reweighted log errors (pseudo-Huber loss).
    A row of a site with many rows counts less. Log errors beyond ``TURNING_ERROR`` count by their size, not its
    square. Constants with few curves stay near those of their family.

    Raises ``InputError`` for a frame without a usable row.
    """
    points, refused = read_points(frame)
    if not points:
        raise InputError("no curve can be fitted", got=f"{refused}", expected="healthy curves of known devices")
    priors = _priors()
    names = list(priors)
    centre = np.log([priors[name][0] for name in names])
    precision = np.array([priors[name][1] for name in names]) ** -2.0
    counts: dict[str, int] = {}
    for point in points:
        counts[point.site] = counts.get(point.site, 0) + 1
    weight = np.array([counts[point.site] ** -SITE_POWER for point in points])
    weight *= DATA_WEIGHT / TURNING_ERROR / weight.mean()
    measured = np.log([point.seconds for point in points])
    touched = [[index for index, point in enumerate(points) if _touches(name, point)] for name in names]

    def links_at(theta: Floats) -> Links:
        return _build(dict(zip(names, np.exp(theta).tolist(), strict=True)))

    def errors_at(theta: Floats) -> Floats:
        links = links_at(theta)
        return np.log([time_point(links, point) for point in points]) - measured

    def loss(theta: Floats, error: Floats) -> float:
        data = 2 * weight * TURNING_ERROR**2 * (np.sqrt(1 + (error / TURNING_ERROR) ** 2) - 1)
        return float(data.sum() + (precision * (theta - centre) ** 2).sum())

    theta, damping, step = centre.copy(), 1e-2, 1e-4
    error = errors_at(theta)
    for _ in range(MOST_ROUNDS):
        slope = np.zeros((len(points), len(names)))
        for column, rows in enumerate(touched):
            moved = theta.copy()
            moved[column] += step
            links = links_at(moved)
            for row in rows:
                slope[row, column] = (math.log(time_point(links, points[row])) - measured[row] - error[row]) / step
        pull = weight / np.sqrt(1 + (error / TURNING_ERROR) ** 2)
        normal = slope.T @ (pull[:, None] * slope) + np.diag(precision)
        gradient = slope.T @ (pull * error) + precision * (theta - centre)
        before = loss(theta, error)
        for _ in range(6):
            trial = theta - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            trial_error = errors_at(trial)
            if loss(trial, trial_error) < before:
                break
            damping *= 5
        else:
            break
        theta, error, damping = trial, trial_error, damping / 5
        if before - loss(theta, error) < 1e-4 * before:
            break
    return links_at(theta)


def format_links(links: Links) -> str:
    """The text of ``links.toml``, which ``parse_links`` reads back to the same constants at four digits."""
    lines = ["# Constants of predictor/closed_form/collectives.py: fits of the public curves in collectives.parquet,"]
    lines += ["# made by fit_links of predictor/closed_form/fit_links.py. Do not edit by hand."]
    tables: tuple[tuple[str, Mapping[str, LinkLaw | NetworkLaw | CollectiveLaw]], ...] = (
        ("link", links.links),
        ("network", links.networks),
        ("collective", links.collectives),
    )
    for table, laws in tables:
        for name, law in sorted(laws.items()):
            lines += ["", f'[{table}."{name}"]']
            for field in fields(law):
                value = getattr(law, field.name)
                if field.name == "shares":
                    lines += [f"shares = {[list(pair) for pair in value]}"] if value else []
                else:
                    lines.append(f"{field.name} = {float(f'{value:.4g}')!r}")
    return "\n".join(lines) + "\n"


def _size_band(point: CurvePoint) -> str:
    size = point.message_bytes
    return "< 1 MiB" if size < 2**20 else "1-64 MiB" if size <= 2**26 else "> 64 MiB"


#: Groups of curves that are no column of their table.
_DERIVED: dict[str, Callable[[CurvePoint], str]] = {"size_band": _size_band, "site": lambda point: point.site}


def _summarise(errors: Iterable[float]) -> dict[str, float | int | None]:
    values = np.array(list(errors))
    if not values.size:
        return {"n": 0, "median_ape": None, "p90_ape": None}
    return {"n": values.size, "median_ape": float(np.median(values)), "p90_ape": float(np.quantile(values, 0.9))}


def evaluate_collectives(
    frame: "pd.DataFrame",
    *,
    by: Sequence[str] = ("collective", "gpu", "num_nodes", "size_band"),
    links: Links | None = None,
) -> dict[str, Any]:
    """Errors of the closed forms on the curves of ``frame``, as fractions, overall and by columns.

    ``by`` names columns of the frame, ``size_band`` or ``site``; ``links`` replaces the shipped constants. Rows that
    cannot be predicted (AMD, an unknown device or collective, an unusable number) and rows reported as slow are
    counted by reason.

    Returns ``{"overall": {"n", "median_ape", "p90_ape"}, "by": {column: {value: {...}}}, "refused": {reason: rows}}``.
    Raises ``InputError`` for a column that does not exist.
    """
    points, refused = read_points(frame)
    constants = links or shipped_links()
    errors = [abs(time_point(constants, point) / point.seconds - 1) for point in points]
    groups: dict[str, dict[str, Any]] = {}
    for column in by:
        if column in _DERIVED:
            values: list[Any] = [_DERIVED[column](point) for point in points]
        elif column in frame.columns:
            cells = frame[column].tolist()
            values = [cells[point.row] for point in points]
        else:
            raise InputError("the curves lack a column", got=column, expected=", ".join([*frame.columns, *_DERIVED]))
        members: dict[str, list[float]] = {}
        for value, error in zip(values, errors, strict=True):
            whole = isinstance(value, float) and value.is_integer()
            members.setdefault(str(int(value) if whole else value), []).append(error)
        groups[column] = {value: _summarise(members[value]) for value in sorted(members)}
    return {"overall": _summarise(errors), "by": groups, "refused": dict(refused)}
