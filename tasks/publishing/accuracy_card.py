"""What an artifact says of itself to people: the accuracy card with its known limits, and its plots."""

import re
from collections.abc import Mapping

from precision_time.predictor.answering.artifact import WALKS, zoo_digest
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.learning.regimes import REGIMES
from precision_time.predictor.setup.hardware import known_hardware
from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.predictor.workloads.zoo import zoo_names
from precision_time.storage.errors import InputError

__all__ = ["complete_card", "drop_plots", "list_limits", "place_plots"]


def list_limits(predictor: HierarchicalPredictor, *, holdout_models: tuple[str, ...]) -> list[str]:
    """In words, what ``predictor`` was never trained on, and of which questions its interval says less than it could.

    Models and devices that the package knows and no row was of are counted, not listed: there are thousands.
    """
    domain = predictor.domain
    limits = []
    if blind := [regime for regime in REGIMES if regime not in predictor.radii]:
        limits.append(f"no interval was calibrated for these regimes, which get the widest at hand: {', '.join(blind)}")
    if holdout_models:
        limits.append(f"held out, so never trained on: {', '.join(holdout_models)}")
    networks = len(domain.networks)
    limits.append(f"trained on {networks} networks, of {len(zoo_names())} names in the zoo")
    devices = set(known_hardware())
    unseen = len(devices - set(domain.gpus))
    limits.append(f"never trained on {unseen} of the {len(devices)} devices that come with the package")
    for kind, is_cpu in (("CPU", True), ("GPU", False)):
        if not any(name.startswith("cpu") == is_cpu for name in domain.gpus):
            limits.append(f"no {kind} was measured: the closed forms answer for one")
    if strange := [name for name in PRECISIONS if name not in domain.precisions]:
        limits.append(f"never trained on these precisions: {', '.join(strange)}")
    limits.append(
        f"at most {domain.max_world_size} ranks and {domain.max_accumulation_steps} micro-steps in an iteration were "
        "measured"
    )
    return limits


def complete_card(report: str, *, limits: list[str], data_sha256: str) -> str:
    """The report and what else an accuracy card has to say."""
    lines = [
        report.rstrip("\n"),
        "",
        "## Known limits",
        "",
        *(f"- {limit}" for limit in limits),
        "",
        f"Training data: SHA-256 `{data_sha256}`. Features of named models: the zoo of SHA-256 `{zoo_digest()}`; "
        f"`{WALKS}` holds what it says of the networks trained on, except in a bundle, which lies beside the zoo.",
    ]
    return "\n".join(lines) + "\n"


def drop_plots(card: str) -> str:
    """``card`` without the lines that show plots, for where those stay behind."""
    return re.sub(r"^!\[[^\]]*\]\(plots/[^)]*\)\n\n?", "", card, flags=re.MULTILINE)


def place_plots(plots: Mapping[str, bytes]) -> dict[str, bytes]:
    """``plots`` under their names in the artifact; raises ``InputError`` for what is no PNG or SVG by its content."""
    for name, data in plots.items():
        is_plot = (name.endswith(".png") and data.startswith(b"\x89PNG\r\n\x1a\n")) or (
            name.endswith(".svg") and data.lstrip().startswith((b"<?xml", b"<svg"))
        )
        if not is_plot or "/" in name:
            raise InputError("this plot cannot be published", got=repr(name)[:300], expected="a PNG or SVG, so named")
    return {f"plots/{name}": data for name, data in plots.items()}
