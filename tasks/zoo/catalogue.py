"""The list of all networks of the zoo, in the order in which the builder walks them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from precision_time.tasks.zoo.libraries.detectors import list_detectors
from precision_time.tasks.zoo.libraries.timm_networks import list_timm
from precision_time.tasks.zoo.libraries.torchvision_detectors import list_torchvision_detectors
from precision_time.tasks.zoo.libraries.torchvision_networks import list_torchvision
from precision_time.tasks.zoo.libraries.transformers_networks import list_transformers
from precision_time.tasks.zoo.network import Missing, Network
from precision_time.tasks.zoo.own_networks import list_own
from precision_time.tasks.zoo.table_networks import list_table_networks

__all__ = ["Zoo", "list_networks", "list_zoo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Zoo:
    """Networks by name and input, pairs of the public table without one, and the usual input of each name."""

    networks: list[Network]
    missing: list[Missing]
    usual: dict[str, str]


def list_networks() -> list[Network]:
    """The networks of ``list_zoo``."""
    return list_zoo().networks


def list_zoo() -> Zoo:
    """One network for each name and input, those of the public table first.

    Where timm and torchvision have the same name, torchvision's network is listed as ``torchvision/NAME``.
    """
    table, missing = list_table_networks()
    others = list(_others())
    networks: dict[tuple[str, str], Network] = {}
    for network in (*table, *others):
        networks.setdefault((network.name, network.task_input), network)
    usual: dict[str, str] = {}
    for network in (*others, *table):
        usual.setdefault(network.name, network.task_input)
    return Zoo(networks=list(networks.values()), missing=missing, usual=usual)


def _others() -> Iterator[Network]:
    yield from list_transformers()
    yield from list_own()
    yield from list_detectors()
    yield from list_torchvision_detectors()
    timm = list_timm()
    names = {network.name for network in timm}
    for network in list_torchvision():
        if network.name in names:
            network = replace(network, name=f"torchvision/{network.name}")
        yield network
    yield from timm
