"""A profile says what a network is made of: counted by hand for small transformers, scaled with the work for others."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_time.predictor.cards import Card, find_card
from precision_time.predictor.profiles import BALANCES, OperatorProfile, find_profile, profile_transformer
from precision_time.storage.errors import InputError


def sizes(model: str, **told: Any) -> Card:
    """A card of two layers, four wide, with two heads, eight tokens and ten words."""
    blank = dict.fromkeys(field.name for field in dataclasses.fields(Card))
    small = {"layers": 2, "hidden_size": 4, "heads": 2, "ffn_size": 16, "vocab": 10, "sequence_length": 8}
    return Card(**blank | small | {"model": model, "task_input": "8", "optimizer": "", "how_known": ""} | told)


def profile_of(model: str, **told: Any) -> OperatorProfile:
    profile = profile_transformer(sizes(model, **told))
    assert profile is not None
    return profile


def found(model: str, task_input: str = "") -> OperatorProfile:
    card = find_card(model, task_input)
    assert card is not None
    profile = find_profile(card)
    assert profile is not None
    return profile


def test_a_decoder_of_two_layers_is_what_it_is_by_hand() -> None:
    profile = profile_of("gpt_two_layers")
    # A layer: QKV 2*8*4*12 = 768 FLOPs and 8*(4+12) = 128 elements; output 256 and 64; up and down 1024 and 160 each;
    # fused attention 4*8*8*4 = 1024 and 4*8*4 = 128; two norms of 64; two residuals of 96 and a GELU of 256.
    # Once: the head 2*8*4*10 = 640 and 8*(4+10) = 112, its softmax and loss 160 each.
    flops, elements = 2 * (768 + 256 + 2 * 1024 + 1024) + 640, 2 * (128 + 64 + 2 * 160 + 128 + 128 + 448) + 112 + 320
    assert profile.elements == elements == 2864
    assert profile.products == 2 * 5 + 1
    assert profile.operations == 2 * (5 + 2 + 3) + 3
    assert profile.attention_flops_share == pytest.approx(2 * 1024 / flops)
    assert profile.dense_flops_share == pytest.approx(1 - 2 * 1024 / flops)
    assert profile.normalization_elements_share == pytest.approx(2 * 128 / elements)
    assert profile.elementwise_elements_share == pytest.approx((2 * 448 + 320) / elements)
    assert profile.pointwise_flops_share == profile.grouped_flops_share == profile.depthwise_flops_share == 0
    # heads of 2 are narrow, 10 words are no multiple of 8
    assert profile.narrow_flops_share == profile.attention_flops_share
    assert profile.unaligned_flops_share == pytest.approx(640 / flops)
    # At 4 FLOPs an element QKV waits for 768/4 = 192, output for 64, up and down for 256 each, attention for 256, the
    # head for 160; from 16 on every operation waits for its elements.
    at_four = 2 * (192 + 64 + 2 * 256 + 256 + 128 + 448) + 160 + 320
    assert profile.elements_at == (at_four, elements, elements, elements, elements)


def test_an_encoder_writes_its_scores_and_a_decoder_does_not() -> None:
    encoder, decoder = profile_of("bert_two_layers"), profile_of("gpt_two_layers")
    scores = 2 * 8 * 8
    # two products of scores and values (64 + scores each), softmax and dropout over the scores (2 each), one over the
    # output (64), instead of one fused product of 128
    assert encoder.elements - decoder.elements == 2 * (2 * (64 + scores) + 4 * scores + 64 - 128)
    assert encoder.products == 2 * 6 + 1
    assert encoder.attention_flops_share == decoder.attention_flops_share


def test_a_gated_feed_forward_part_has_three_products_and_grouped_queries_narrower_keys() -> None:
    gated, plain = profile_of("llama_two_layers"), profile_of("gpt_two_layers")
    assert gated.products == plain.products + 2
    # a third product (160), the gate (3*8*16) and rotary positions of queries and keys (4*8*8)
    assert gated.elements - plain.elements == 2 * (160 + 384 + 256)
    grouped = profile_of("llama_two_layers", kv_heads=1)
    # keys and values are half as wide: 2*2*8 fewer elements out of QKV, 4*8*2 fewer under rotary positions
    assert gated.elements - grouped.elements == 2 * (32 + 64)


def test_experts_at_work_widen_the_feed_forward_part() -> None:
    two = profile_of("mixtral_two_layers", active_experts=2)
    assert two == profile_of("mixtral_two_layers", ffn_size=32)
    assert two.elements > profile_of("mixtral_two_layers").elements


@pytest.mark.parametrize("missing", ["sequence_length", "hidden_size", "layers", "ffn_size"])
def test_without_its_sizes_a_transformer_has_no_profile(missing: str) -> None:
    assert profile_transformer(sizes("gpt_two_layers", **{missing: None})) is None


def test_without_a_vocabulary_there_is_no_head() -> None:
    profile = profile_of("gpt_two_layers", vocab=None)
    assert profile.products == 10
    assert profile.unaligned_flops_share == 0


def test_traffic_is_known_at_the_balances_and_straight_in_logs_between_them() -> None:
    profile = found("resnet50")
    for balance, elements in zip(BALANCES, profile.elements_at, strict=True):
        assert profile.move_at(balance) == pytest.approx(elements)
    for (low, at_low), (high, at_high) in itertools.pairwise(zip(BALANCES, profile.elements_at, strict=True)):
        assert profile.move_at(math.sqrt(low * high)) == pytest.approx(math.sqrt(at_low * at_high))


def test_beyond_the_balances_compute_binds_below_and_memory_above() -> None:
    profile = found("resnet50")
    assert profile.move_at(2.0) == pytest.approx(2 * profile.elements_at[0])
    assert profile.move_at(10 * BALANCES[-1]) == profile.elements_at[-1]


@given(
    model=st.sampled_from(["resnet50", "mobilenetv2_100", "vit_b16", "bert_base", "llama2_7b"]),
    low=st.floats(0.1, 1e4),
    step=st.floats(1.0, 1e3),
)
def test_a_device_with_more_flops_an_element_never_waits_for_more_elements(model: str, low: float, step: float) -> None:
    profile = found(model)
    assert profile.move_at(low * step) <= profile.move_at(low) * (1 + 1e-12)
    assert profile.move_at(low) >= profile.elements * (1 - 1e-4)  # the shipped figures have five digits


def test_scaling_multiplies_traffic_and_keeps_shares_and_counts() -> None:
    profile = found("resnet50")
    scaled = profile.scale(4.0)
    assert scaled.elements == 4 * profile.elements
    assert scaled.move_at(100.0) == pytest.approx(4 * profile.move_at(100.0))
    assert dataclasses.replace(scaled, elements=profile.elements, elements_at=profile.elements_at) == profile


def test_a_profile_survives_its_dictionary() -> None:
    profile = found("resnet50")
    assert OperatorProfile.from_dict(profile.to_dict()) == profile


@pytest.mark.parametrize(
    "change",
    [
        {"elements": 0.0},
        {"elements": math.nan},
        {"elements_at": [1.0]},
        {"elements_at": [1.0, 1.0, 1.0, 1.0, -1.0]},
        {"elements_at": 3},
        {"colour": "red"},
    ],
)
def test_a_profile_that_cannot_be_is_bad_input(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="operator profile"):
        OperatorProfile.from_dict(found("resnet50").to_dict() | change)


def test_a_profile_without_a_curve_is_bad_input() -> None:
    values = found("resnet50").to_dict()
    del values["elements_at"]
    with pytest.raises(InputError, match="operator profile"):
        OperatorProfile.from_dict(values)


def test_the_same_network_under_another_name_has_the_same_profile() -> None:
    assert found("vit_b16") == found("vit_base_patch16_224")


@pytest.mark.parametrize("model", ["resnet50", "efficientnet_b0"])
def test_another_resolution_moves_as_many_times_the_elements_as_the_work_grows(model: str) -> None:
    usual, doubled = find_card(model, "224"), find_card(model, "448")
    assert usual is not None
    assert doubled is not None
    # also where operations beside the products are a good part of the traffic at every balance (EfficientNet: 15 %)
    growth = doubled.forward_flops_per_sample / usual.forward_flops_per_sample  # type: ignore[operator]
    assert found(model, "448").elements / found(model, "224").elements == pytest.approx(growth)
    assert growth == pytest.approx(4, rel=0.01)


def test_a_language_model_is_profiled_from_its_sizes_at_the_length_asked() -> None:
    card = find_card("llama2_7b", "1024")
    assert card is not None
    assert find_profile(card) == profile_transformer(card)
    assert found("llama2_7b", "2048").elements > 2 * found("llama2_7b", "1024").elements * 0.99


def test_a_network_of_which_nothing_is_known_has_no_profile() -> None:
    card = find_card("amoebanet_d_18_256")
    assert card is not None
    assert find_profile(card) is None
