"""The networks of the public table: one of the zoo for each name and input, or the reason why there is none."""

import csv
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from precision_time.predictor.rows.public_table import load_public_table
from precision_time.predictor.workloads.families import find_family
from precision_time.predictor.workloads.input_sizes import parse_input_size
from precision_time.tasks.zoo.libraries.detectors import find_detector, image_size
from precision_time.tasks.zoo.libraries.timm_networks import find_timm
from precision_time.tasks.zoo.libraries.torchvision_networks import find_torchvision
from precision_time.tasks.zoo.libraries.transformers_networks import find_transformers
from precision_time.tasks.zoo.network import Missing, Network
from precision_time.tasks.zoo.own_networks import find_own

__all__ = ["TablePair", "find_network", "list_table_networks", "table_pairs"]

#: The source whose names are those of timm in 2022, and whose inputs are sides of images.
_TIMM_TABLE = "pytorch-image-models"

#: Names without a network in the zoo.
_UNKNOWN = {
    "amoebanet_d_18_256": "AmoebaNet-D is in none of the libraries",
    **dict.fromkeys(("faster_rcnn_fbnet_chamv1a", "faster_rcnn_fbnet_default", "mask_rcnn_fbnet_default",
                     "mask_rcnn_fbnet_xirb16d"),
                    "FBNet backbones of maskrcnn-benchmark are in none of the libraries"),
    **dict.fromkeys(("gpunet_0", "gpunet_1", "gpunet_2", "gpunet_d1"),
                    "the searched architecture is only in its checkpoint's description"),
    "nemotron_3_ultra": "its sizes are not published",
}  # fmt: skip


class TablePair(NamedTuple):
    """A name of the public table at one input; ``params`` as the table counts them, None where it does not."""

    name: str
    task_input: str
    source: str
    params: float | None
    rows: int


@functools.cache
def _same_networks() -> dict[str, tuple[str, str, str]]:
    text = Path(__file__).with_name("table_names.csv").read_text(encoding="utf-8")
    return {row["name"]: (row["network"], row["task_input"], row["note"]) for row in csv.DictReader(text.splitlines())}


def table_pairs() -> list[TablePair]:
    """Every (name, input) of the public table, those set aside included, most rows first.

    Parameters come from a row that is not set aside, where there is one.
    """
    import pandas as pd

    table = load_public_table()
    frame = pd.concat([table.kept, table.quarantined])
    pairs = []
    for (name, task_input), rows in frame.groupby(["model", "task_input"], sort=True):
        params = rows["model_params"].dropna()
        pairs.append(
            TablePair(
                name=str(name),
                task_input=str(task_input),
                source=str(rows["source_repo"].iloc[0]),
                params=float(params.iloc[0]) if len(params) else None,
                rows=len(rows),
            )
        )
    return sorted(pairs, key=lambda pair: -pair.rows)


def list_table_networks() -> tuple[list[Network], list[Missing]]:
    """The networks of the public table, and the pairs without one."""
    networks, missing = [], []
    for pair in table_pairs():
        network = find_network(pair)
        if network is None:
            reason = _UNKNOWN.get(pair.name, "in none of the libraries, and no stand-in was written")
            missing.append(Missing(pair.name, pair.task_input, pair.rows, reason))
        else:
            networks.append(network)
    return networks, missing


def find_network(pair: TablePair) -> Network | None:
    """The network for a pair of the public table; None without one."""
    name, task_input = pair.name, pair.task_input
    size = parse_input_size(task_input)
    side = None if math.isnan(size) else size
    if _TIMM_TABLE in pair.source:
        return find_timm(name, side, task_input=task_input, params=pair.params)
    library_name, usual_input, note = _same_networks().get(name, (name, "", ""))
    if usual_input and (side is None or name.startswith(("bert", "biobert"))):
        side = float(usual_input)
    family = find_family(name)
    canonical = family.canonical if family else name
    network = find_own(name, task_input) or find_detector(
        canonical, called=name, task_input=task_input, size=image_size(task_input)
    )
    if network is None and family and family.kind in ("cnn", "vision_transformer", "hybrid_vision", "mlp_vision"):
        network = (
            find_torchvision(library_name, side, task_input=task_input, params=pair.params)
            or find_timm(library_name, side, task_input=task_input, params=pair.params)
            or find_timm(canonical, side, task_input=task_input, params=pair.params)
        )
    if network is None:
        network = find_transformers(library_name, side, task_input=task_input) or find_transformers(
            canonical, side, task_input=task_input
        )
    if network is None:
        return None
    notes = "; ".join(part for part in (network.note, note) if part)
    # sources other than timm's round more coarsely
    return replace(network, name=name, note=notes, tolerance=max(network.tolerance, 0.01))
