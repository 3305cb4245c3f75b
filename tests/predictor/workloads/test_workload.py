"""Workloads: counted, from a card of sizes, or estimated from parameters and FLOPs, at the input of the question."""

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from precision_time.predictor.rows.observations import describe_row
from precision_time.predictor.workloads.cards import Card
from precision_time.predictor.workloads.workload import (
    WorkloadFeatures,
    describe_card,
    describe_entry,
    find_workload,
    known_workloads,
)
from precision_time.predictor.workloads.zoo import ZooEntry, find_entry
from precision_time.storage.errors import InputError, UnknownNameError


def test_the_nine_workloads_have_cards():
    names = {"resnet18", "resnet50", "vit_b16", "vit_tiny", "bert_base", "bert_mini", "gpt2", "gpt2_mini", "mlp"}
    assert set(known_workloads()) == names


@pytest.mark.parametrize("name", ["resnet50", "mlp"])
def test_a_card_survives_its_dictionary(name):
    card = find_workload(name)
    assert WorkloadFeatures.from_dict(card.to_dict()) == card


def test_a_measured_card_comes_before_the_shipped_one():
    measured = replace(find_workload("mlp"), params=1)
    assert find_workload("mlp", measured=[measured]) is measured


def test_an_unknown_model_is_answered_with_the_nearest():
    with pytest.raises(UnknownNameError, match="nearest are resnet50,"):
        find_workload("resnet5")


@pytest.mark.parametrize("values", [{"name": "x"}, {**find_workload("mlp").to_dict(), "colour": "red"}])
def test_a_card_with_wrong_fields_is_bad_input(values):
    with pytest.raises(InputError, match="workload card"):
        WorkloadFeatures.from_dict(values)


def test_a_card_of_no_work_is_bad_input():
    with pytest.raises(InputError, match="forward_flops_per_sample of workload mlp"):
        replace(find_workload("mlp"), forward_flops_per_sample=0.0)


def test_cards_are_read_without_torch():
    code = "import sys; from precision_time.predictor.workloads.workload import find_workload; find_workload('gpt2'); "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def card(model: str, **values: Any) -> Card:
    blank: dict[str, Any] = dict.fromkeys(field.name for field in fields(Card))
    return Card(**blank | {"model": model, "task_input": "", "optimizer": "", "how_known": ""} | values)


def test_the_counts_of_an_unknown_convolutional_network_are_estimated_after_resnets():
    work = describe_card("some_resnet", params=10**6, forward_flops_per_sample=1e9)
    assert (work.family, work.kind, work.source) == ("resnet", "cnn", "card")
    assert work.backward_flops_per_sample == 2e9
    assert work.forward_bytes_per_sample == pytest.approx(0.040e9)
    assert work.backward_bytes_per_sample == pytest.approx(1.4 * 0.040e9)
    assert (work.forward_bytes_fixed, work.backward_bytes_fixed) == (4e6, 8e6)
    assert (work.parameter_tensors, work.forward_ops, work.backward_ops) == (160, 224, 179)
    assert (work.convolution_flops_share, work.attention_flops_share) == (1.0, 0.0)
    assert work.optimizer == "sgd_momentum"
    assert work.walks is None


def test_the_counts_of_an_unknown_transformer_are_estimated_after_transformers():
    work = describe_card("some_bert", params=10**6, forward_flops_per_sample=1e9)
    assert work.kind == "language_encoder"
    assert work.forward_bytes_per_sample == pytest.approx(0.008e9)
    assert work.backward_bytes_per_sample == pytest.approx(2.1 * 0.008e9)
    assert (work.parameter_tensors, work.forward_ops, work.backward_ops) == (160, 128, 243)
    assert (work.convolution_flops_share, work.attention_flops_share) == (0.0, 0.03)
    assert work.optimizer == "adamw"


@pytest.mark.parametrize("name", ["my_lstm", "my_tacotron"])
def test_recurrent_and_speech_networks_launch_as_few_kernels_a_tensor_as_transformers(name: str):
    work = describe_card(name, params=10**6, forward_flops_per_sample=1e9)
    assert (work.forward_ops, work.backward_ops) == (128, 243)
    assert work.convolution_flops_share == 1.0


@pytest.mark.parametrize(
    ("name", "values", "moved"),
    [
        ("some_resnet", {"outputs_per_sample": 1e6, "activations_per_sample": 5e5}, 4 * 2.17e6),
        ("some_resnet", {"activations_per_sample": 5e5}, 4 * 7.3 * 5e5),
        ("some_bert", {"outputs_per_sample": 1e6}, 4 * 1.3e6),
        ("some_bert", {"activations_per_sample": 5e5}, 4 * 3.8 * 5e5),
    ],
)
def test_the_traffic_follows_the_most_exact_count_that_the_card_has(name: str, values: dict, moved: float):
    work = describe_card(name, params=10**6, forward_flops_per_sample=1e9, card=card(name, **values))
    assert work.forward_bytes_per_sample == pytest.approx(moved)
    assert work.activations_per_sample == values.get("activations_per_sample")


def test_values_of_a_card_are_not_estimated():
    sizes = {"layers": 6, "convolution_share": 0.2, "attention_share": 0.3, "optimizer": "lamb", "vocab": 100}
    work = describe_card("some_bert", params=10**6, forward_flops_per_sample=1e9, card=card("some_bert", **sizes))
    assert work.parameter_tensors == 12 * 6
    assert (work.layers, work.vocab, work.optimizer) == (6, 100, "lamb")
    assert (work.convolution_flops_share, work.attention_flops_share) == (0.2, 0.3)
    counted = card("some_bert", parameter_tensors=50, forward_operations=200)
    work = describe_card("some_bert", params=10**6, forward_flops_per_sample=1e9, card=counted)
    assert work.parameter_tensors == 50
    # three of four counted operations launch a kernel
    assert work.forward_ops == 150


def test_a_rank_holds_only_the_dense_part_of_a_recommender_with_sharded_tables():
    large = describe_card("dlrm_huge", params=2 * 10**9, forward_flops_per_sample=1e7)
    assert large.params == 5 * 10**6
    assert large.forward_bytes_fixed == 4 * large.params
    assert describe_card("dlrm_little", params=10**9, forward_flops_per_sample=1e7).params == 10**9
    assert describe_card("some_gpt", params=2 * 10**9, forward_flops_per_sample=1e7).params == 2 * 10**9


@pytest.mark.parametrize("numbers", [{"params": 0}, {"forward_flops_per_sample": 0.0}])
def test_a_network_of_no_size_or_no_work_is_bad_input(numbers: dict):
    with pytest.raises(InputError, match="is not usable"):
        describe_card("some_resnet", **{"params": 1, "forward_flops_per_sample": 1.0} | numbers)


def test_names_of_one_network_share_its_network_name():
    short, long = find_workload("vit_b16"), find_workload("vit_base_patch16_224")
    assert short.network == long.network == "vit_base_patch16"
    assert short.name != long.name


def test_another_resolution_takes_as_much_more_work_as_its_area():
    usual, doubled = find_workload("resnet50"), find_workload("resnet50", task_input="448")
    growth = doubled.forward_flops_per_sample / usual.forward_flops_per_sample
    assert growth == pytest.approx(4, rel=0.01)
    assert (usual.task_input, doubled.task_input) == ("224", "448")
    assert doubled.params == usual.params


def test_a_longer_sequence_takes_more_than_its_share_of_attention():
    short, long = find_workload("bert_base", task_input="128"), find_workload("bert_base", task_input="512")
    assert 4 < long.forward_flops_per_sample / short.forward_flops_per_sample < 4.5
    assert (short.sequence_length, long.sequence_length) == (128, 512)
    assert long.attention_flops_share > short.attention_flops_share


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit_b16", "bert_base", "gpt2"])
def test_a_network_is_described_as_rows_of_the_public_table_describe_it(name: str):
    # otherwise trees that learned from the table would meet blanks, and other FLOPs of BERT than in training
    work = find_workload(name)
    assert work == describe_row(name, work.task_input, None, None)
    assert work.walks is not None


def entry_of(name: str, task_input: str = "") -> ZooEntry:
    entry = find_entry(name, task_input)
    assert entry is not None
    return entry


def test_a_network_of_the_zoo_has_the_counts_of_its_walk():
    entry, work = entry_of("bert_base", "512"), find_workload("bert_base", task_input="512")
    ahead, back = (
        {quantity: entry.fp32.total(quantity, phase=phase) for quantity in ("flops", "bytes", "bytes_fixed", "ops")}
        for phase in ("forward", "backward")
    )
    assert work.walks == {"fp32": entry.fp32, "amp": entry.amp}
    assert (work.forward_flops_per_sample, work.backward_flops_per_sample) == (ahead["flops"], back["flops"])
    assert (work.forward_bytes_per_sample, work.backward_bytes_per_sample) == (ahead["bytes"], back["bytes"])
    assert (work.forward_bytes_fixed, work.backward_bytes_fixed) == (ahead["bytes_fixed"], back["bytes_fixed"])
    assert (work.forward_ops, work.backward_ops) == (ahead["ops"], back["ops"])
    assert (work.params, work.parameter_tensors) == (entry.params, entry.parameter_tensors)
    assert (
        work.attention_flops_share
        == entry.fp32.total("flops", phase="forward", families=["attention"]) / (ahead["flops"])
    )
    # BERT-base: 12 layers of 2 x 4 x 512^2 x 768 / 2 FLOPs of attention scores and their sums
    assert work.attention_flops_share * ahead["flops"] == pytest.approx(12 * 4 * 512**2 * 768, rel=1e-6)
    assert (work.convolution_flops_share, work.kind, work.source) == (0.0, "language_encoder", "zoo")
    assert (work.layers, work.hidden_size, work.heads, work.sequence_length) == (12, 768, 12, 512)


def test_a_name_that_means_a_network_of_the_zoo_keeps_its_own_spelling():
    work = find_workload("meta-llama/Llama-2-7b-hf")
    assert work.name == "meta-llama/Llama-2-7b-hf"
    assert work.walks == find_workload("llama2_7b").walks
    assert work.network == find_workload("llama2_7b").network


def test_the_walk_of_a_recommender_of_the_zoo_leaves_out_its_sharded_tables():
    entry, work = entry_of("dlrm_large"), find_workload("dlrm_large")
    dense = work.forward_flops_per_sample / 2
    assert entry.params > 10**9 > work.params == round(dense)
    assert work.walks is not None
    for policy, whole in (("fp32", entry.fp32), ("amp", entry.amp)):
        walk = work.walks[policy]
        assert walk.total("flops") == whole.total("flops")
        assert walk.total("bytes") == whole.total("bytes")
        assert walk.gradient_bytes <= 4 * dense
        # both passes read the dense weights and one writes their gradients; no part of the tables is left
        assert walk.total("bytes_fixed") == pytest.approx(min(whole.total("bytes_fixed"), 12 * work.params))
        assert walk.total("bytes_fixed") > 8 * dense
    small = replace(entry, params=10**9)
    assert describe_entry(small, name="dlrm_large").walks == {"fp32": entry.fp32, "amp": entry.amp}


def test_a_workload_of_campaigns_has_the_same_counts_in_the_zoo():
    work = find_workload("mlp")
    assert replace(work, walks=None, source="counted") == known_workloads()["mlp"]
    assert work.walks is not None
    assert find_workload("mlp", task_input="1024") == work


def test_asking_for_the_usual_input_changes_nothing():
    assert find_workload("resnet50", task_input="224") == find_workload("resnet50")


def test_a_measured_workload_takes_the_walks_that_the_zoo_has_of_it():
    measured = replace(known_workloads()["resnet50"], params=25_000_000)
    assert measured.walks is None
    walks = find_workload("resnet50").walks
    assert find_workload("resnet50", measured=[measured]) == replace(measured, walks=walks)
    assert walks is not None
    walked = replace(measured, walks={name: walk.keep_weights(0.5) for name, walk in walks.items()})
    assert find_workload("resnet50", measured=[walked]) is walked


def test_a_measured_workload_answers_for_its_own_input_only():
    measured = replace(find_workload("mlp"), name="mine", task_input="32")
    assert find_workload("mine", task_input="32", measured=[measured]) is measured
    with pytest.raises(InputError, match=r"mine is known at one input only.*expected: 32"):
        find_workload("mine", task_input="64", measured=[measured])


@pytest.mark.parametrize("text", ["wide", "0", "00x0", "9" * 400, "9" * 5000, "224x9999999999"])
@pytest.mark.parametrize("name", ["resnet50", "bert_base"])
def test_an_input_that_names_no_size_is_bad_input(name: str, text: str):
    with pytest.raises(InputError, match="names no size"):
        find_workload(name, task_input=text)


@pytest.mark.parametrize("name", [None, 3, b"resnet50"])
def test_a_model_is_named_by_a_text(name: Any):
    with pytest.raises(InputError, match="not a model"):
        find_workload(name)


def test_a_card_without_flops_is_bad_input():
    with pytest.raises(InputError, match="work of amoebanet_d_18_256 is not known"):
        find_workload("amoebanet_d_18_256")


@pytest.mark.parametrize("text", ["448px", "448 x 448", "3x448x448x1", "1e3", "4", "-448", "99999999", "seq448"])
def test_an_input_that_would_be_misread_is_refused(text):
    with pytest.raises(InputError, match="names no size"):
        find_workload("resnet50", task_input=text)


def test_a_network_with_its_walks_survives_its_dictionary():
    work = find_workload("resnet101")
    assert work.walks is not None
    assert WorkloadFeatures.from_dict(work.to_dict()) == work
    with pytest.raises(InputError, match="workload card"):
        WorkloadFeatures.from_dict(work.to_dict() | {"walks": {"fp32": work.walks["fp32"].to_columns()}})


@pytest.mark.parametrize(
    ("name", "kind"),
    [("facebook/opt-125m", "language_decoder"), ("alexnet", "cnn"), ("qwen1_5_moe_a2_7b", "mixture_of_experts")],
)
def test_a_network_of_the_zoo_without_a_family_has_a_kind_by_its_counts(name, kind):
    work = find_workload(name)
    assert (work.family, work.kind) == ("", kind)
    assert work.optimizer == ("sgd_momentum" if kind == "cnn" else "adamw")


def test_the_twin_of_another_library_is_the_same_network():
    twin, usual = find_workload("torchvision/resnet50"), find_workload("resnet50")
    assert (twin.network, twin.family, twin.kind) == (usual.network, usual.family, usual.kind)
