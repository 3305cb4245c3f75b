"""Networks for tests of the builder: two small ones, one that raises, one that kills its process, one that hangs."""

import os
import time
from functools import partial

import torch
from torch import nn

from precision_time.storage.errors import InputError
from precision_time.tasks.zoo.network import Built, Network, build_light, classify


def _build(width: int) -> Built:
    return Built(
        module=build_light(lambda: nn.Sequential(nn.Linear(8, width), nn.Linear(width, 10))),
        make_batch=lambda samples: (torch.zeros(samples, 8), torch.zeros(samples, dtype=torch.long)),
        loss_of=classify,
        sizes={"hidden_size": width},
    )


def _fail() -> Built:
    raise InputError("this network cannot be built", got="nothing")


def _die() -> Built:
    os._exit(9)


def _hang() -> Built:
    time.sleep(60)
    raise AssertionError


def list_networks() -> list[Network]:
    builders = {"narrow": partial(_build, 4), "raises": _fail, "dies": _die, "wide": partial(_build, 16)}
    networks = [
        Network(name=name, task_input="8", source="test", builds=name, build=build) for name, build in builders.items()
    ]
    twin = Network(name="narrow_twin", task_input="8", source="test", builds="narrow", build=builders["narrow"])
    return [*networks, twin]


def list_slow() -> list[Network]:
    return [Network(name="hangs", task_input="", source="test", builds="hangs", build=_hang), list_networks()[0]]
