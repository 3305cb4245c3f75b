"""OperatorProfile: what sort of operations a network is made of, and its traffic as a function of machine balance."""

import csv
import functools
import itertools
import math
from dataclasses import asdict, dataclass, fields
from importlib import resources
from typing import Any

from precision_time.predictor.cards import Card, find_card, find_family
from precision_time.storage.errors import InputError, IntegrityError

__all__ = ["BALANCES", "OperatorProfile", "find_profile", "profile_transformer"]

#: Machine balances, FLOPs per element moved, at which a profile knows the traffic; fp32 on V100 is 70, fp16 280.
BALANCES = (4.0, 16.0, 64.0, 256.0, 1024.0)

#: Products whose inner or outer dimension is below this fill a tile of a tensor core badly.
NARROW = 64

#: Log ratio of FLOPs up to which two counts are of the same input.
_SAME_WORK = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorProfile:
    """The forward pass of one sample by operation, weights not counted.

    ``elements`` are read and written by all operations one by one (eager execution). ``elements_at`` holds, for each
    of ``BALANCES``, the sum over operations of max(FLOPs / balance, elements): the roofline summed over operations, as
    traffic. Shares of the FLOPs are in ``pointwise`` (1 x 1), ``grouped`` and ``depthwise`` convolutions, ``dense``
    products and ``attention``, the rest in full convolutions; ``narrow`` ones have an inner or outer dimension below
    64, ``unaligned`` ones one that is no multiple of 8. Shares of the elements are in grouped and depthwise
    convolutions, in normalisation, and in all that is no product and no normalisation (``elementwise``).
    """

    products: int
    operations: int
    elements: float
    pointwise_flops_share: float
    grouped_flops_share: float
    depthwise_flops_share: float
    dense_flops_share: float
    attention_flops_share: float
    grouped_elements_share: float
    normalization_elements_share: float
    elementwise_elements_share: float
    narrow_flops_share: float
    unaligned_flops_share: float
    elements_at: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.elements_at) != len(BALANCES) or not all(value > 0 for value in (self.elements, *self.elements_at)):
            raise InputError(
                "an operator profile is not usable",
                got=f"elements {self.elements}, at balances {self.elements_at}",
                expected=f"positive elements, at {len(BALANCES)} balances",
            )

    def move_at(self, balance: float) -> float:
        """Elements moved, or waited for, at ``balance`` FLOPs per element; linear in logs between the known ones."""
        known = self.elements_at
        if balance <= BALANCES[0]:
            # bound by compute there, so in proportion to 1 / balance
            return known[0] * BALANCES[0] / balance
        for (low, at_low), (high, at_high) in itertools.pairwise(zip(BALANCES, known, strict=True)):
            if balance <= high:
                part = math.log(balance / low) / math.log(high / low)
                return at_low * float((at_high / at_low) ** part)
        return known[-1]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"elements_at": list(self.elements_at)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "OperatorProfile":
        """The inverse of ``to_dict``; raises ``InputError`` for missing or unknown fields."""
        try:
            return cls(**{**values, "elements_at": tuple(values["elements_at"])})
        except (TypeError, KeyError) as error:
            raise InputError(
                "an operator profile does not fit", got=repr(error), expected="the fields of OperatorProfile"
            ) from error

    def scale(self, factor: float) -> "OperatorProfile":
        """The profile of ``factor`` times as large an input: every operation on so many times the elements."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return OperatorProfile(
            **values
            | {
                "elements": self.elements * factor,
                "elements_at": tuple(value * factor for value in self.elements_at),
            }
        )


@functools.cache
def _rows() -> tuple[dict[tuple[str, str], dict[str, str]], dict[str, list[dict[str, str]]]]:
    """Rows of profiles.csv by model and input, and by the canonical name of the network."""
    text = resources.files("precision_time.predictor").joinpath("data/profiles.csv").read_text(encoding="utf-8")
    exact: dict[tuple[str, str], dict[str, str]] = {}
    by_network: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader(text.splitlines()):
        exact[row["model"], row["task_input"]] = row
        family = find_family(row["model"])
        by_network.setdefault(family.canonical if family else row["model"], []).append(row)
    return exact, by_network


@functools.lru_cache(maxsize=4096)
def _read(model: str, task_input: str) -> OperatorProfile:
    row = _rows()[0][model, task_input]
    try:
        counts = {name: int(row[name]) for name in ("products", "operations")}
        shares = {
            field.name: float(row[field.name])
            for field in fields(OperatorProfile)
            if field.name not in (*counts, "elements_at")
        }
        curve = tuple(float(row[f"elements_at_{balance:.0f}"]) for balance in BALANCES)
    except (KeyError, ValueError) as error:
        raise IntegrityError(
            f"the profile of {model} cannot be read", got=repr(error), expected="the columns of OperatorProfile"
        ) from error
    return OperatorProfile(**counts, **shares, elements_at=curve)  # type: ignore[arg-type]


def _counted_flops(row: dict[str, str]) -> float:
    """Forward FLOPs of one sample of the network that ``row`` of profiles.csv was counted on."""
    counted = find_card(row["model"], row["task_input"])
    if counted is not None and counted.task_input == row["task_input"] and counted.forward_flops_per_sample:
        return counted.forward_flops_per_sample
    # At the lowest balance nearly all traffic is the FLOPs over it.
    return _read(row["model"], row["task_input"]).elements_at[0] * BALANCES[0]


def find_profile(card: Card) -> OperatorProfile | None:
    """The profile of the network of ``card`` at its input, scaled from a counted input by the FLOPs of both.

    A network that was counted on itself comes first, then the same network under another name; a transformer for
    language is derived from its sizes. None where nothing is known.
    """
    exact, by_network = _rows()
    if (card.model, card.task_input) in exact:
        return _read(card.model, card.task_input)
    family = find_family(card.model)
    network = family.canonical if family else card.model
    rows = by_network.get(network, [])
    own = [row for row in rows if row["model"] == card.model] or rows
    if own and card.forward_flops_per_sample:
        factors = [card.forward_flops_per_sample / _counted_flops(row) for row in own]
        factor, row = min(zip(factors, own, strict=True), key=lambda pair: abs(math.log(pair[0])))
        nearest = _read(row["model"], row["task_input"])
        return nearest.scale(factor) if abs(math.log(factor)) > _SAME_WORK else nearest
    return profile_transformer(card)


def profile_transformer(card: Card) -> OperatorProfile | None:
    """The profile of a language transformer of the sizes of ``card``, layer by layer; None without sizes.

    A pre-norm layer: normalisation, projections, scores, softmax and values (one fused operation in a decoder, whose
    scores are never written), output projection, two or three dense products of the feed-forward part, residual sums;
    then the output head and its softmax.
    """
    length, hidden = card.sequence_length, card.hidden_size
    if not (length and hidden and card.layers and card.ffn_size):
        return None
    heads, key_width = card.heads or max(1, hidden // 64), hidden
    if card.heads and card.kv_heads:
        key_width = hidden * card.kv_heads // card.heads
    family = find_family(card.model)
    decodes = family is not None and family.kind in ("language_decoder", "mixture_of_experts")
    gated = decodes and family is not None and family.family not in ("gpt", "mpt", "transformer_xl")
    inner = card.ffn_size * (card.active_experts or 1)

    products: list[tuple[float, float]] = []  # FLOPs, elements
    attention: list[tuple[float, float]] = []
    norms = [2.0 * length * hidden] * 2
    others = [3.0 * length * hidden, 3.0 * length * hidden, 2.0 * length * inner]
    products.append((2.0 * length * hidden * (hidden + 2 * key_width), length * (2.0 * hidden + 2 * key_width)))
    products.append((2.0 * length * hidden * hidden, 2.0 * length * hidden))
    up = 2 if gated else 1
    products += [(2.0 * length * hidden * inner, length * float(hidden + inner))] * (up + 1)
    if gated:
        others += [3.0 * length * inner, 4.0 * length * (hidden + key_width)]
    if decodes:
        attention.append((4.0 * length * length * hidden, 4.0 * length * hidden))
    else:
        scores = float(heads) * length * length
        attention += [(2.0 * length * length * hidden, 2.0 * length * hidden + scores)] * 2
        others += [2.0 * scores, 2.0 * scores, 2.0 * length * hidden]  # softmax, dropout
    vocab = card.vocab or 0
    head = (2.0 * length * hidden * vocab, float(length) * (hidden + vocab)) if vocab else None
    tail = [2.0 * length * vocab] * 2 if vocab else []

    each = card.layers
    weighed = [(flops, elements, each) for flops, elements in (*products, *attention)]
    weighed += [(0.0, elements, each) for elements in (*norms, *others)]
    if head is not None:
        weighed.append((*head, 1))
    weighed += [(0.0, elements, 1) for elements in tail]
    flops = sum(times * work for work, _, times in weighed)
    elements = sum(times * moved for _, moved, times in weighed)
    attended = each * sum(work for work, _ in attention)
    return OperatorProfile(
        products=each * (len(products) + len(attention)) + bool(vocab),
        operations=each * (len(products) + len(attention) + len(norms) + len(others)) + 3 * bool(vocab),
        elements=elements,
        pointwise_flops_share=0.0,
        grouped_flops_share=0.0,
        depthwise_flops_share=0.0,
        dense_flops_share=1.0 - attended / flops,
        attention_flops_share=attended / flops,
        grouped_elements_share=0.0,
        normalization_elements_share=each * sum(norms) / elements,
        elementwise_elements_share=(each * sum(others) + sum(tail)) / elements,
        narrow_flops_share=attended / flops if hidden / heads < NARROW else 0.0,
        unaligned_flops_share=head[0] / flops if head is not None and vocab % 8 else 0.0,
        elements_at=tuple(
            sum(times * max(work / balance, moved) for work, moved, times in weighed) for balance in BALANCES
        ),
    )
