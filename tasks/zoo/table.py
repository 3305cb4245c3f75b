"""Write the zoo's table: a row for each name and input in zoo.parquet, and what has no walk in zoo_missing.csv."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from precision_time.predictor.workloads.walk import POLICIES
from precision_time.predictor.workloads.zoo import COUNTS, SIZES
from precision_time.storage.columns import encode_columns
from precision_time.tasks.zoo.networks import Missing, Network

__all__ = ["make_columns", "write_zoo"]

_MISSING = ("name", "task_input", "rows", "reason")


def write_zoo(
    networks: Iterable[Network],
    *,
    walks: Mapping[str, Mapping[str, Any]],
    missing: Sequence[Missing],
    usual: Mapping[str, str],
    folder: Path,
) -> str:
    """Write both files into ``folder``; returns a line that says what is in them. See ``make_columns``."""
    networks = list(networks)
    failed = [
        Missing(network.name, network.task_input, 0, walks.get(network.builds, {}).get("failure", "not walked yet"))
        for network in networks
        if "fp32" not in walks.get(network.builds, {})
    ]
    columns = make_columns(networks, walks=walks, usual=usual)
    data = encode_columns(columns)
    (folder / "zoo.parquet").write_bytes(data)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_MISSING)
    writer.writerows(sorted([*missing, *failed]))
    (folder / "zoo_missing.csv").write_text(text.getvalue(), encoding="utf-8")
    names, walked = len(set(columns["name"])), sum(place < 0 for place in columns["same_as"])
    return (
        f"{names} names, {len(columns['name'])} rows, {walked} walks, {len(columns)} columns, {len(data)} bytes;"
        f" {len(missing)} without a network, {len(failed)} failed"
    )


def make_columns(
    networks: Sequence[Network], *, walks: Mapping[str, Mapping[str, Any]], usual: Mapping[str, str]
) -> dict[str, list[Any]]:
    """The table by column, rows sorted by name and input.

    Names of one network share a walk: ``same_as`` is the row that has it, -1 in that row itself; the others hold zeros
    in its columns. ``usual`` is 1 in the row that stands for a name when no input is told. Sizes are 0
    where they are not known.
    """
    ready = [network for network in networks if "fp32" in walks.get(network.builds, {})]
    ready.sort(key=lambda network: (network.name, network.task_input))
    place_of: dict[str, int] = {}
    rows: list[Mapping[str, Any]] = []
    columns: dict[str, list[Any]] = {
        name: [] for name in ("name", "task_input", "source", "builds", "note", "usual", "same_as", "expected_params")
    }
    for place, network in enumerate(ready):
        first = place_of.setdefault(network.builds, place)
        walk = walks[network.builds]
        rows.append(walk if first == place else {})
        columns["name"].append(network.name)
        columns["task_input"].append(network.task_input)
        columns["source"].append(network.source)
        columns["builds"].append(network.builds if first == place else "")
        columns["note"].append(network.note)
        columns["usual"].append(int(usual.get(network.name) == network.task_input))
        columns["same_as"].append(-1 if first == place else first)
        columns["expected_params"].append(int(network.params or 0))
    for name in COUNTS:
        columns[name] = [int(row.get(name, 0)) for row in rows]
    for name in SIZES:
        columns[name] = [int(row.get("sizes", {}).get(name, 0)) for row in rows]
    for policy in POLICIES:
        # of the counts, only those that some network has
        found = {
            name
            for row in rows
            for name, value in row.get(policy, {}).items()
            if value or not name.startswith(("forward_", "backward_"))
        }
        for name in sorted(found):
            columns[f"{policy}_{name}"] = [float(row.get(policy, {}).get(name, 0.0)) for row in rows]
    return columns
