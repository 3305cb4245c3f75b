"""The size card of a model by its name: its parameters and the work of one forward pass."""

import functools
import math
from dataclasses import dataclass, fields, replace
from typing import Any

from precision_time.predictor.shipped import shipped_rows
from precision_time.predictor.workloads.families import Family, find_family
from precision_time.predictor.workloads.input_sizes import read_image_side, read_sequence_length
from precision_time.storage.errors import InputError, IntegrityError

__all__ = ["Card", "find_card", "listed_models", "transformer_flops"]

#: Kinds whose work grows with the area of the input image.
_IMAGE_KINDS = frozenset(
    {"cnn", "vision_transformer", "hybrid_vision", "mlp_vision", "detection", "segmentation", "diffusion"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Sizes of one model at one input; ``None`` = not known.

    FLOPs count 2 per multiply-add of the forward pass of one sample, attention scores in full (not halved for a
    causal mask). ``how_known`` also says what one sample is where it is neither an image nor a sequence (a sentence
    pair, a token, a record). ``active_params`` are those that one token passes through; ``ffn_size`` is that of one
    expert where there are experts.
    """

    model: str
    task_input: str
    params: int | None
    active_params: int | None
    forward_flops_per_sample: float | None
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    ffn_size: int | None
    vocab: int | None
    sequence_length: int | None
    experts: int | None
    active_experts: int | None
    optimizer: str
    how_known: str
    #: elements written by convolutions, dense products and fused attention in the forward pass of one sample
    activations_per_sample: float | None
    #: elements written by all operations of the forward pass of one sample (unfused, as an eager framework runs them)
    outputs_per_sample: float | None
    parameter_tensors: int | None
    forward_operations: int | None
    convolution_share: float | None
    attention_share: float | None
    #: mean of the score and value widths of a head
    head_size: int | None
    #: layers with attention over the whole sequence
    attention_layers: int | None
    #: weights that multiply every token, output head included
    matmul_params: int | None


_TEXT = ("model", "task_input", "optimizer", "how_known")
_FLOAT = (
    "forward_flops_per_sample",
    "activations_per_sample",
    "outputs_per_sample",
    "convolution_share",
    "attention_share",
)


def _read_card(row: dict[str, str]) -> Card:
    values: dict[str, Any] = {}
    try:
        for field in fields(Card):
            text = row[field.name]
            if field.name in _TEXT:
                values[field.name] = text
            else:
                number = float if field.name in _FLOAT else int
                values[field.name] = number(text) if text else None
    except (KeyError, ValueError) as error:
        raise IntegrityError(
            f"the card of {row.get('model')} cannot be read",
            got=repr(error),
            expected="the columns of Card with numbers or blanks",
        ) from error
    return Card(**values)


@functools.cache
def _card_rows() -> dict[str, list[dict[str, str]]]:
    """Rows of models.csv by model, and all rows of a network under "network " and its canonical name."""
    rows_of: dict[str, list[dict[str, str]]] = {}
    for row in shipped_rows("models.csv"):
        rows_of.setdefault(row["model"], []).append(row)
        if family := find_family(row["model"]):
            rows_of.setdefault(f"network {family.canonical}", []).append(row)
    return rows_of


def listed_models() -> set[str]:
    """Every name with a card of its own."""
    return {name for name in _card_rows() if not name.startswith("network ")}


def transformer_flops(card: Card, sequence_length: int, *, causal: bool = False) -> float:
    """Forward FLOPs of one sequence of ``sequence_length`` tokens: dense products plus attention scores and values.

    Attention counts in full, as operation counters have it; ``causal`` halves it, as fused causal kernels run it and
    Megatron-Bridge reports it. Raises ``InputError`` for a card without transformer sizes.
    """
    if not sequence_length > 0:
        raise InputError("the sequence has no tokens", got=sequence_length, expected="a positive length")
    if card.matmul_params is None:
        raise InputError(
            f"the card of {card.model} has no transformer sizes",
            got="no matmul_params",
            expected="a transformer",
            fix="use the card's forward_flops_per_sample",
        )
    width = (card.heads or 0) * (card.head_size or 0)
    attention = 4.0 * sequence_length**2 * width * (card.attention_layers or 0)
    return 2.0 * sequence_length * card.matmul_params + (attention / 2 if causal else attention)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _at_sequence(card: Card, task_input: str) -> Card:
    length = read_sequence_length(task_input) or card.sequence_length
    if length is None or card.sequence_length is None:
        return card
    factor = length / card.sequence_length
    share = card.attention_share
    if card.matmul_params is None:
        flops = _times(card.forward_flops_per_sample, factor)
    else:
        flops = transformer_flops(card, length)
        share = 1.0 - 2.0 * length * card.matmul_params / flops
    return replace(
        card,
        task_input=task_input or card.task_input,
        forward_flops_per_sample=flops,
        attention_share=share,
        activations_per_sample=_times(card.activations_per_sample, factor),
        sequence_length=length,
    )


def _at_image(card: Card, family: Family, task_input: str) -> Card:
    side, card_side = read_image_side(task_input), read_image_side(card.task_input)
    if side is None or card_side is None or side == card_side:
        return card
    area = (side / card_side) ** 2
    share = card.attention_share or 0.0
    # Attention over all patches grows with the square of the area; windowed attention does not.
    attention = share * (area if family.family == "vit" else 1.0)
    return replace(
        card,
        task_input=task_input,
        forward_flops_per_sample=_times(card.forward_flops_per_sample, area * (1.0 - share + attention)),
        activations_per_sample=_times(card.activations_per_sample, area),
        outputs_per_sample=_times(card.outputs_per_sample, area),
    )


def _distance(row: dict[str, str], task_input: str) -> float:
    """How far the card's image is from ``task_input``, as a log ratio of sides; 0 where either names no size."""
    side, card_side = read_image_side(task_input), read_image_side(row["task_input"])
    return abs(math.log(side / card_side)) if side and card_side else 0.0


@functools.lru_cache(maxsize=4096)
def find_card(model: str, task_input: str = "") -> Card | None:
    """The card of ``model`` at ``task_input``, scaled from the nearest known input; ``None`` for an unknown model.

    A name without a card of its own gets the card of the same network under another name. Networks for images scale
    with the area of the image, transformers for language by ``transformer_flops`` at the sequence length of
    ``task_input`` (without one, that of the card).
    """
    family = find_family(model)
    if family is None:
        return None
    rows = _card_rows().get(model) or _card_rows().get(f"network {family.canonical}")
    if not rows:
        return None
    nearest = min(
        rows,
        key=lambda row: (row["task_input"] != task_input, _distance(row, task_input), row["model"] != family.canonical),
    )
    card = _read_card(nearest)
    return _at_image(card, family, task_input) if family.kind in _IMAGE_KINDS else _at_sequence(card, task_input)
