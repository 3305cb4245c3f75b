"""Cards: a model by a few sizes, what is assumed beside them, and which cards are refused."""

import math
from dataclasses import dataclass
from typing import Any

import pytest

from precision_time import predict_time
from precision_time.predictor.answering.user_cards import parse_quantity
from precision_time.predictor.answering.user_models import resolve_model
from precision_time.storage.errors import InputError

pytestmark = pytest.mark.usefixtures("nothing_published")

RESNET_50 = {"params": 25.6e6, "forward_flops": 8.2e9, "convolution_share": 1.0}


@dataclass
class MyCard:
    params: float = 25.6e6
    forward_flops: float = 8.2e9
    convolution_share: float | None = 1.0
    attention_share: float | None = None


def test_a_card_of_a_known_network_gives_about_its_time() -> None:
    real = predict_time("resnet50", "fp32", batch_size=64).iteration_time_s
    by_card = predict_time(RESNET_50 | {"activations": 11.1e6}, "fp32", batch_size=64).iteration_time_s
    assert abs(math.log(by_card / real)) < math.log(1.25)
    # the base model of BERT at 512 tokens, by its published sizes
    card = {"params": 110e6, "forward_flops": 121e9, "attention_share": 0.08, "sequence_length": 512}
    by_card = predict_time(card, "fp32", batch_size=8).iteration_time_s
    real = predict_time("bert_base", "fp32", batch_size=8, task_input="512").iteration_time_s
    assert abs(math.log(by_card / real)) < math.log(1.25)


def test_a_dataclass_is_a_card_and_numbers_may_have_suffixes() -> None:
    assert resolve_model(MyCard()) == resolve_model(RESNET_50)
    assert resolve_model({"params": "25.6M", "forward_flops": "8.2G", "convolution_share": 1}) == resolve_model(
        RESNET_50
    )


def test_a_card_reports_its_assumptions_and_keeps_given_values() -> None:
    bare = resolve_model({"params": 1e6, "forward_flops": 1e9})
    assert any("assumed a network of convolutions" in reason for reason in bare.reasons)
    assert (bare.workload.name, bare.workload.kind, bare.workload.walks) == ("my model", "cnn", None)
    given = resolve_model(
        {"params": 1e6, "forward_flops": 1e9, "kind": "language_decoder", "name": "bert_base"}
    ).workload
    assert (given.kind, given.name, given.network, given.family) == (
        "language_decoder",
        "bert_base",
        "own:bert_base",
        "",
    )
    assert given.optimizer == "adamw"
    assert given.convolution_flops_share == 0


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ({}, "lacks params"),
        ({"params": 1e6}, "lacks forward_flops"),
        ({"params": -1, "forward_flops": 1e9}, "params of the card of my model is not usable; got: -1"),
        ({"params": 0.5, "forward_flops": 1e9}, "at least 1"),
        ({"params": 1e6, "forward_flops": 0}, "forward_flops .* is not usable"),
        ({"params": 1e6, "forward_flops": math.inf}, "is not usable"),
        ({"params": math.nan, "forward_flops": 1}, "is not usable"),
        ({"params": True, "forward_flops": 1}, "is not usable; got: True"),
        ({"params": [1], "forward_flops": 1}, "is not usable"),
        ({"params": "many", "forward_flops": 1}, "params is not a number"),
        (RESNET_50 | {"attention_share": 0.2}, "are too large"),
        (RESNET_50 | {"convolution_share": 1.5}, "share from 0 to 1"),
        (RESNET_50 | {"activations": -4}, "activations"),
        (RESNET_50 | {"foward_flops": 1e9}, "unknown key of a model card.*forward_flops"),
        (RESNET_50 | {"kind": "transformer"}, "unknown kind of model.*vision_transformer"),
    ],
)
def test_an_unusable_card_is_refused_with_the_reason(card: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_model(card)


@pytest.mark.parametrize(
    ("text", "value"),
    [("25.6M", 25.6e6), ("7B", 7e9), ("8.2 g", 8.2e9), ("1e9", 1e9), ("3", 3.0), ("1.5e3k", 1.5e6), (".5T", 5e11)],
)
def test_a_number_may_have_a_suffix(text: str, value: float) -> None:
    assert parse_quantity("params", text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "M", "-3", "1,000", "3 apples", "0x10", "nan"])
def test_other_text_is_refused_as_a_number(text: str) -> None:
    with pytest.raises(InputError, match="is not a number"):
        parse_quantity("params", text)
