import pytest

from precision_time.tasks.zoo.build import walk_network
from precision_time.tasks.zoo.libraries.transformers_networks import (
    Configuration,
    find_transformers,
    network_of,
    read_configurations,
)
from precision_time.tasks.zoo.network import count_params


def _configuration(**changes):
    values = {
        "name": "tiny",
        "config": "GPT2Config",
        "model": "GPT2LMHeadModel",
        "batch": "tokens",
        "length": 16,
        "target": 0,
        "options": {"vocab_size": 96, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2},
        "separate_head": False,
        "params": None,
        "note": "",
    }
    return Configuration(**values | changes)


def test_a_decoder_of_transformers_is_walked_as_the_builder_walks_it():
    walk = walk_network(network_of(_configuration(), 16, task_input="16"))
    # GPT-2 by hand: embeddings, two layers with their norms and biases, the last norm; the head is the embedding
    layer = 12 * 32 * 32 + 13 * 32
    assert walk["params"] == 96 * 32 + 16 * 32 + 2 * layer + 2 * 32
    assert walk["sizes"] == {
        "layers": 2, "hidden_size": 32, "heads": 2, "kv_heads": 2, "vocab": 96, "sequence_length": 16,
    }  # fmt: skip
    forward = sum(value for name, value in walk["fp32"].items() if name.startswith("forward_") and "_flops" in name)
    products = 2 * 16 * (2 * 12 * 32 * 32 + 96 * 32)
    scores = 2 * 4 * 16 * 16 * 32
    assert forward == products + scores
    assert not any(name.startswith("forward_dense_wide") for name in walk["amp"])


def test_experts_get_even_shares_of_the_tokens():
    options = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 0,
    }  # fmt: skip
    tiny = _configuration(config="MixtralConfig", model="MixtralForCausalLM", options=options)
    walk = walk_network(network_of(tiny, 16, task_input="16"))
    forward = sum(value for name, value in walk["fp32"].items() if name.startswith("forward_") and "_flops" in name)
    attention = 2 * 16 * (32 * 32 * 2 + 32 * 16 * 2) + 4 * 16 * 16 * 32
    experts = 2 * 16 * 2 * 3 * 32 * 64
    router, head = 2 * 16 * 32 * 4, 2 * 16 * 32 * 96
    assert forward == pytest.approx(attention + experts + router + head, rel=1e-9)
    expert_params = 4 * 3 * 32 * 64
    assert walk["sizes"]["active_params"] == walk["params"] - expert_params // 2


def test_every_configuration_has_a_name_of_its_own_and_a_usual_input():
    configurations = read_configurations()
    assert len(configurations) > 400
    assert configurations["llama2_7b"].length == 4096
    assert configurations["llama2_7b"].params == 6_738_415_616
    # positions that are learned for each length
    assert configurations["mpt_125m"].at(512)["n_positions"] == 512
    network = find_transformers("mpt_125m", 512)
    assert network is not None
    assert network.params is None
    assert find_transformers("no_such_network") is None


def test_a_published_count_of_parameters_is_met_on_the_meta_device():
    for name in ("bert_base", "gpt2", "t5_v1_1_small"):
        network = find_transformers(name)
        assert network is not None
        assert count_params(network.build().module) == network.params
