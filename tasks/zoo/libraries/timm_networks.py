"""Networks of timm: all of the installed release, and those that the public table has under older names."""

import csv
import functools
import json
import math
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from precision_time.tasks.zoo.libraries.torchvision_door import load_timm
from precision_time.tasks.zoo.network import (
    CLASSES,
    Built,
    Network,
    build_light,
    classify,
    image_batches,
)

__all__ = ["find_timm", "list_timm", "older_names"]

SOURCE = "timm"


class _Rename(NamedTuple):
    timm_name: str
    options: dict[str, Any]
    match: str


@functools.cache
def older_names() -> dict[str, _Rename]:
    """Names that timm has dropped or given to another network: today's name and options, and how well they match."""
    text = Path(__file__).with_name("timm_renames.csv").read_text(encoding="utf-8")
    return {
        row["name"]: _Rename(row["timm_name"], json.loads(row["options"] or "{}"), row["match"])
        for row in csv.DictReader(text.splitlines())
    }


def list_timm() -> list[Network]:
    """Every architecture of the installed timm at its default input, then every older name likewise."""
    names = dict.fromkeys([*load_timm().list_models(), *older_names()])
    return [network for name in names if (network := find_timm(name)) is not None]


def find_timm(
    name: str, side: float | None = None, *, task_input: str = "", params: float | None = None
) -> Network | None:
    """The network called ``name`` for square images of ``side`` pixels (its default input); None for an unknown name.

    ``task_input`` names the input in the zoo (default: the side).
    """
    timm = load_timm()
    rename = older_names().get(name, _Rename(name, {}, ""))
    if not timm.is_model(rename.timm_name):
        return None
    config = timm.get_pretrained_cfg(rename.timm_name)
    channels, height, width = config.input_size if config is not None else (3, 224, 224)
    options = {"num_classes": CLASSES, **rename.options}
    height, width = (options.get("img_size", pixels) for pixels in (height, width))
    if side is not None and (height, width) != (side, side):
        height = width = round(side)
        if config is not None and config.fixed_input_size:
            options.setdefault("img_size", height)
    shape = (channels, height, width)
    arguments = ", ".join(f"{key}={value}" for key, value in options.items())
    return Network(
        name=name,
        task_input=task_input or (str(height) if height == width else f"{height}x{width}"),
        source=SOURCE,
        builds=f"timm {metadata.version('timm')} {rename.timm_name}({arguments}) at {'x'.join(map(str, shape))}",
        build=functools.partial(_build, rename.timm_name, options, shape),
        params=params,
        tolerance=0.0 if params is None else _rounding(params),
        note=rename.match,
    )


def _rounding(params: float) -> float:
    """The relative tolerance of ``params``, which the public table rounds to 0.01 M."""
    return max(0.002, 0.0051e6 / params) if params and math.isfinite(params) else 0.0


def _build(timm_name: str, options: dict[str, Any], shape: tuple[int, ...]) -> Built:
    timm = load_timm()
    holders = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "timm"]
    make = functools.partial(timm.create_model, timm_name, pretrained=False, **options)
    # Pruning channels on the meta device has crashed the process.
    module = build_light(make, holders=holders, for_real="pruned" in timm_name)
    return Built(module=module, make_batch=image_batches(*shape), loss_of=classify)
