"""Sizes that a card does not name follow from its parameters and FLOPs; sizes that it names are kept."""

import dataclasses

import pytest

from precision_time.predictor.closed_form.transformer_sizes import expert_params, size_transformer
from precision_time.predictor.workloads.workload import find_workload

NAMELESS = dataclasses.replace(
    find_workload("gpt2"), active_params=None, layers=None, hidden_size=None, heads=None, kv_heads=None,
    sequence_length=None,
)  # fmt: skip


def test_sizes_that_a_card_names_are_kept():
    named = dataclasses.replace(NAMELESS, layers=24, hidden_size=2048, heads=16, kv_heads=4, sequence_length=1024)
    sizes = size_transformer(named)
    # 4 of 16 heads for keys and values, twice.
    assert sizes == (24, 2048, 2 * 2048 / 4, 1024, 1)


def test_unknown_sizes_follow_from_the_parameters():
    gpt3 = size_transformer(dataclasses.replace(NAMELESS, params=175_000_000_000, forward_flops_per_sample=7e14))
    # GPT-3: 96 layers, width 12288.
    assert gpt3.hidden == pytest.approx(12288, rel=0.01)
    assert gpt3.layers == pytest.approx(96, rel=0.01)
    assert gpt3.tokens == pytest.approx(2000)
    body = 12 * 24 * 2048**2
    by_layers = size_transformer(dataclasses.replace(NAMELESS, params=body, layers=24))
    assert by_layers.hidden == pytest.approx(2048)
    # The width of a mixture of experts follows from its active parameters.
    mixture = size_transformer(dataclasses.replace(NAMELESS, params=10**12, active_params=body, layers=24))
    assert mixture.hidden == pytest.approx(2048)


def test_parameters_inside_experts_follow_from_those_at_work():
    # 100 million parameters outside the experts, 16 experts of 100 million, two at work
    mixture = dataclasses.replace(
        NAMELESS, params=1_700_000_000, active_params=300_000_000, experts=16, active_experts=2
    )
    assert expert_params(mixture) == pytest.approx(1_600_000_000)
    assert expert_params(dataclasses.replace(mixture, active_experts=16)) == 0.0
    assert expert_params(NAMELESS) == 0.0
