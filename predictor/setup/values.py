"""Checks of the values by which questions and measured rows describe a setup."""

import math
import operator
from typing import Any

from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.implementation import Checkpointing
from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["check_checkpointing", "check_compiled", "check_count", "count_nodes"]

_CHECKPOINTING = ("none", "selective", "full")
_LARGEST_COUNT = 10**15


def check_count(name: str, value: Any, *, at_most: int = _LARGEST_COUNT) -> int:
    """``value`` as an integer from 1 to ``at_most``; raises ``InputError``, which calls it ``name``."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InputError(
            f"{name} is not a count", got=repr(value), expected=f"an integer from 1 to {at_most}"
        ) from None
    if not 1 <= number <= at_most:
        raise InputError(f"{name} is out of range", got=number, expected=f"an integer from 1 to {at_most}")
    return number


def check_checkpointing(text: Any) -> Checkpointing | None:
    """``text`` as a kind of activation checkpointing, None where it is not known; raises ``UnknownNameError``."""
    if text is not None and text not in _CHECKPOINTING:
        raise UnknownNameError("activation checkpointing", str(text), _CHECKPOINTING)
    return text  # type: ignore[no-any-return]


def check_compiled(value: Any) -> bool | None:
    """``value`` as a truth value, None where it is not known; raises ``InputError``."""
    if value is not None and not isinstance(value, bool):
        raise InputError("compiled is not usable", got=repr(value), expected="True, False, or None for not known")
    return value


def count_nodes(world_size: int, nodes: Any, hardware: HardwareSpec) -> int:
    """The number of nodes: ``nodes``, or the fewest that hold the ranks where it is None.

    Raises ``InputError`` when the ranks do not divide evenly over the nodes.
    """
    if nodes is not None:
        number = check_count("nodes", nodes)
        if world_size % number:
            raise InputError(
                "the GPUs do not divide over the nodes",
                got=f"{world_size} / {number}",
                expected="a whole number of GPUs per node",
            )
        return number
    number = math.ceil(world_size / hardware.gpus_per_node)
    if world_size % number:
        raise InputError(
            "the GPUs do not divide over nodes of this kind",
            got=f"{world_size} GPUs on nodes of {hardware.gpus_per_node}: {world_size} / {number} nodes",
            expected="a whole number of GPUs per node",
            fix="give nodes= or another number of GPUs",
        )
    return number
