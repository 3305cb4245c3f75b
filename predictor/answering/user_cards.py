"""Cards: a model that its user describes by a few sizes, as WorkloadFeatures."""

import dataclasses
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from precision_time.predictor.workloads.cards import Card
from precision_time.predictor.workloads.families import ATTENTION_KINDS, KINDS, guess_kind
from precision_time.predictor.workloads.walk_cache import CountedModel
from precision_time.predictor.workloads.workload import describe_card
from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["CARD_KEYS", "describe_user_card", "parse_quantity"]

#: The keys of a card; the first two are required.
CARD_KEYS = (
    "params", "forward_flops", "activations", "convolution_share", "attention_share", "name", "kind", "optimizer",
    "parameter_tensors", "layers", "sequence_length", "task_input",
)  # fmt: skip
#: ``describe_card`` chooses its ratios by the family of a name: one with attention, one of convolutions.
_NAME_WITH_ATTENTION, _NAME_WITH_CONVOLUTIONS = "bert", "resnet"
_LARGEST_SIZE = 1e24
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(e[+-]?\d{1,2})?\s*([kmgbt]?)", re.IGNORECASE)
_EXPONENTS = {"": 0, "k": 3, "m": 6, "g": 9, "b": 9, "t": 12}


def parse_quantity(name: str, text: str) -> float:
    """A number with an optional suffix (``25.6M``, ``8.2G``, ``7B``, ``1e9``); raises ``InputError``."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"{name} is not a number",
            got=repr(text[:100]),
            expected="a number such as 25600000, 2.56e7 or 25.6M (K, M, G or B, T)",
        )
    # A decimal, so that 8.2G is 8.2e9 to the last bit.
    return float(Decimal(match[1] + (match[2] or "")).scaleb(_EXPONENTS[match[3].lower()]))


def describe_user_card(values: Mapping[str, Any]) -> CountedModel:
    """The workload that a card of ``CARD_KEYS`` describes, and what was assumed.

    Family and network stay empty, and so does the optimizer where the card names none. Raises ``InputError`` for a
    missing or unusable size, and ``UnknownNameError`` for an unknown key or kind.
    """
    for key in values:
        if key not in CARD_KEYS:
            raise UnknownNameError("key of a model card", str(key), CARD_KEYS)
    name = str(values.get("name") or "my model")
    params, flops = (_read_required(values, key, name=name) for key in CARD_KEYS[:2])
    if params < 1:
        raise InputError(f"params of the card of {name} is not usable", got=repr(params), expected="at least 1")
    convolutions, attention = (
        _read_number(values, key, name=name, is_share=True) for key in ("convolution_share", "attention_share")
    )
    if (convolutions or 0.0) + (attention or 0.0) > 1:
        raise InputError(
            f"the shares of the card of {name} are too large",
            got=f"convolution_share {convolutions} and attention_share {attention}",
            expected="shares of the forward FLOPs whose sum is at most 1; the rest is dense products",
        )
    kind = str(values.get("kind") or "")
    if kind and kind not in KINDS:
        raise UnknownNameError("kind of model", kind, KINDS)
    reasons = [f"{name} is described by a card of sizes alone: the bytes it moves are estimated from them"]
    if not kind and convolutions is None and attention is None:
        kind = "cnn"
        reasons.append("assumed a network of convolutions: give kind, convolution_share or attention_share")
    elif not kind:
        kind = guess_kind(convolution_share=convolutions or 0.0, attends=bool(attention))
    length, tensors, layers = (
        None if (number := _read_number(values, key, name=name)) is None else round(number)
        for key in ("sequence_length", "parameter_tensors", "layers")
    )
    card = Card(
        **{field.name: None for field in dataclasses.fields(Card)}  # type: ignore[arg-type]
        | {
            "model": name,
            "optimizer": "",
            "activations_per_sample": _read_number(values, "activations", name=name),
            "convolution_share": convolutions,
            "attention_share": attention,
            "parameter_tensors": tensors,
            "layers": layers,
        }
    )
    workload = describe_card(
        _NAME_WITH_ATTENTION if kind in ATTENTION_KINDS else _NAME_WITH_CONVOLUTIONS,
        params=round(params),
        forward_flops_per_sample=flops,
        card=card,
        task_input=str(values.get("task_input") or ""),
        sequence_length=length,
    )
    workload = dataclasses.replace(
        workload, name=name, family="", network="", kind=kind, optimizer=str(values.get("optimizer") or "")
    )
    return CountedModel(workload=workload, reasons=tuple(reasons))


def _read_required(values: Mapping[str, Any], key: str, *, name: str) -> float:
    number = _read_number(values, key, name=name)
    if number is None:
        raise InputError(
            f"the card of {name} lacks {key}",
            got=", ".join(map(str, values)) or "an empty card",
            expected="params, and forward_flops of one sample (2 per multiply-add)",
        )
    return number


def _read_number(values: Mapping[str, Any], key: str, *, name: str, is_share: bool = False) -> float | None:
    """The size or share under ``key`` of the card of ``name``; None where the card does not say."""
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, str):
        value = parse_quantity(key, value)
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    is_usable = 0 <= number <= 1 if is_share else 0 < number <= _LARGEST_SIZE
    if not is_usable:
        raise InputError(
            f"{key} of the card of {name} is not usable",
            got=repr(values[key]),
            expected="a share from 0 to 1" if is_share else "a number above 0",
        )
    return number
