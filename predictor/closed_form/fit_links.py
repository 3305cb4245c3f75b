"""The fit of the closed forms of collectives to public curves, and its errors in and out of the sites it saw.

To rebuild ``predictor/data/links.toml`` after the curves, the forms or the hardware changed:
``links = fit_links(shipped_collectives())`` and write ``format_links(links)`` to that file.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
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

__all__ = ["cross_validate_collectives", "evaluate_collectives", "fit_links", "format_links", "score_collectives"]

Floats = npt.NDArray[np.float64]


def _time_point(links: Links, point: CurvePoint) -> float:
    return time_collective(
        links, point.kind, point.message_bytes, point.ranks, point.nodes, point.hardware, point.network
    )


# The fit. Every constant is exp(sum of its parameters): one of its family plus its own deviation, which the prior
# draws to zero. Constants without a curve stay at the family's.


def _priors() -> dict[str, tuple[float, float]]:
    """Centre and log standard deviation of each parameter.

    The centres are round figures of the order that NCCL's own tuning tables and data sheets suggest; the deviations
    were chosen on left-out sites, in steps of three.
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
        # Without RDMA hardware of its own a network is slower and differs more.
        far = network in ("efa", "ethernet")
        priors |= {f"{network}.latency": (3.0 if far else 1.0, 0.8 if far else 0.4),
                   f"{network}.efficiency": (0.8 if far else 1.0, 0.3 if far else 0.15),
                   f"{network}.handover": (1.0, 0.8)}  # fmt: skip
    return priors


@functools.cache
def _nominal_latencies() -> dict[str, float]:
    """``all_reduce_latency_s`` of the shipped devices by link: latencies are fitted in seconds and kept as shares."""
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


@dataclass(frozen=True, slots=True)
class _Fit:
    """Hyperparameters: log error at which the loss turns from squares to absolute values, weight of the data against
    the prior, and the power of a site's row count by which each of its rows counts less."""

    turn: float = 0.1
    trust: float = 0.1
    site_power: float = 0.5
    rounds: int = 12


def _fit_points(points: Sequence[CurvePoint], fit: _Fit) -> Links:
    """The constants of highest posterior, by Levenberg-Marquardt steps on reweighted log errors (pseudo-Huber loss)."""
    priors = _priors()
    names = list(priors)
    centre = np.log([priors[name][0] for name in names])
    precision = np.array([priors[name][1] for name in names]) ** -2.0
    counts: dict[str, int] = {}
    for point in points:
        counts[point.site] = counts.get(point.site, 0) + 1
    weight = np.array([counts[point.site] ** -fit.site_power for point in points])
    weight *= fit.trust / fit.turn / weight.mean()
    measured = np.log([point.seconds for point in points])
    touched = [[index for index, point in enumerate(points) if _touches(name, point)] for name in names]

    def links_at(theta: Floats) -> Links:
        return _build(dict(zip(names, np.exp(theta).tolist(), strict=True)))

    def errors_at(theta: Floats) -> Floats:
        links = links_at(theta)
        return np.log([_time_point(links, point) for point in points]) - measured

    def loss(theta: Floats, error: Floats) -> float:
        data = 2 * weight * fit.turn**2 * (np.sqrt(1 + (error / fit.turn) ** 2) - 1)
        return float(data.sum() + (precision * (theta - centre) ** 2).sum())

    theta, damping, step = centre.copy(), 1e-2, 1e-4
    error = errors_at(theta)
    for _ in range(fit.rounds):
        slope = np.zeros((len(points), len(names)))
        for column, rows in enumerate(touched):
            moved = theta.copy()
            moved[column] += step
            links = links_at(moved)
            for row in rows:
                slope[row, column] = (math.log(_time_point(links, points[row])) - measured[row] - error[row]) / step
        pull = weight / np.sqrt(1 + (error / fit.turn) ** 2)
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


def fit_links(frame: "pd.DataFrame") -> Links:
    """The constants that fit the healthy NVIDIA curves of ``frame`` (columns of ``collectives.parquet``).

    A row of a site with many rows counts less, errors are logarithmic and beyond 10 % count by their size, not its
    square, and constants with few curves are drawn to those of their family. Raises ``InputError`` without a row.
    """
    points, refused = read_points(frame)
    if not points:
        raise InputError("no curve can be fitted", got=f"{refused}", expected="healthy curves of known devices")
    return _fit_points(points, _Fit())


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


def _band(message_bytes: float) -> str:
    return "< 1 MiB" if message_bytes < 2**20 else "1-64 MiB" if message_bytes <= 2**26 else "> 64 MiB"


def _summarise(
    frame: "pd.DataFrame", points: Sequence[CurvePoint], predicted_s: Sequence[float], *, by: Sequence[str],
    refused: Mapping[str, int],
) -> dict[str, Any]:  # fmt: skip
    errors = [abs(predicted / point.seconds - 1) for predicted, point in zip(predicted_s, points, strict=True)]
    derived: dict[str, Callable[[CurvePoint], object]] = {
        "size_band": lambda point: _band(point.message_bytes),
        "site": lambda point: point.site,
    }

    def describe(values: Iterable[float]) -> dict[str, float | int | None]:
        chosen = np.array(list(values))
        if not chosen.size:
            return {"n": 0, "median_ape": None, "p90_ape": None}
        return {"n": chosen.size, "median_ape": float(np.median(chosen)), "p90_ape": float(np.quantile(chosen, 0.9))}

    groups: dict[str, dict[str, Any]] = {}
    for column in by:
        if column not in derived and column not in frame.columns:
            raise InputError("the curves lack a column", got=column, expected=", ".join([*frame.columns, *derived]))
        values = None if column in derived else frame[column].tolist()
        members: dict[str, list[float]] = {}
        for point, error in zip(points, errors, strict=True):
            value = derived[column](point) if values is None else values[point.row]
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            members.setdefault(str(value), []).append(error)
        groups[column] = {value: describe(members[value]) for value in sorted(members)}
    return {"overall": describe(errors), "by": groups, "refused": dict(refused)}


_BY = ("collective", "gpu", "num_nodes", "size_band")


def evaluate_collectives(
    frame: "pd.DataFrame", *, by: Sequence[str] = _BY, links: Links | None = None
) -> dict[str, Any]:
    """Errors of the closed forms on the curves of ``frame``, as fractions, overall and by columns.

    ``{"overall": {"n", "median_ape", "p90_ape"}, "by": {column: {value: {...}}}, "refused": {reason: rows}}``.
    ``by`` may name columns of the frame, ``size_band`` and ``site``. Rows that cannot be predicted (AMD, an unknown
    device or collective, an unusable number) or were reported as slow are counted by reason. ``links`` goes before
    the shipped constants. Raises ``InputError`` for a column that does not exist.
    """
    points, refused = read_points(frame)
    constants = links or shipped_links()
    return _summarise(frame, points, [_time_point(constants, point) for point in points], by=by, refused=refused)


def cross_validate_collectives(frame: "pd.DataFrame", *, by: Sequence[str] = _BY) -> dict[str, Any]:
    """The same errors when the curves of each site are predicted from those of all others (leave one site out).

    The order of the DGX-1 mesh is a constant from the VIA-Research curves, so V100 rows of that site are not wholly
    unseen; and the form and the priors were chosen with all curves in view.

    Raises ``InputError`` for fewer than two sites or a column that does not exist.
    """
    points, refused = read_points(frame)
    sites = sorted({point.site for point in points})
    if len(sites) < 2:
        raise InputError("too few sites to hold one out", got=", ".join(sites), expected="curves of two sites or more")
    predicted_s = [0.0] * len(points)
    for site in sites:
        links = _fit_points([point for point in points if point.site != site], _Fit())
        for index, point in enumerate(points):
            if point.site == site:
                predicted_s[index] = _time_point(links, point)
    return _summarise(frame, points, predicted_s, by=by, refused=refused)


def score_collectives(frame: "pd.DataFrame", *, by: Sequence[str] = _BY) -> dict[str, dict[str, Any]]:
    """Errors of a fit on all rows of ``frame`` (``in_sample``) and of fits without the row's site (``left_out``)."""
    return {
        "in_sample": evaluate_collectives(frame, by=by, links=fit_links(frame)),
        "left_out": cross_validate_collectives(frame, by=by),
    }
