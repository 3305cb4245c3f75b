"""Counting the model of a Hugging Face configuration: every kind of input, no weights, no network."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from precision_time import predict_time
from precision_time.predictor.answering.user_models import resolve_model
from precision_time.predictor.walking import huggingface
from precision_time.predictor.walking.huggingface import build_model, count_config, spread_evenly
from precision_time.storage.errors import InputError, UnknownNameError

pytestmark = pytest.mark.usefixtures("nothing_published")

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
BERT = {"model_type": "bert", "vocab_size": 99, "max_position_embeddings": 64, **SMALL}
LLAMA = {"model_type": "llama", "vocab_size": 99, "max_position_embeddings": 64, "num_key_value_heads": 1, **SMALL}
MOE = LLAMA | {
    "model_type": "qwen3_moe", "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
CLIP = {
    "model_type": "clip", "projection_dim": 16, "architectures": ["CLIPModel"],
    "text_config": SMALL | {"vocab_size": 99, "max_position_embeddings": 20},
    "vision_config": SMALL | {"image_size": 32, "patch_size": 8},
}  # fmt: skip
T5 = {"model_type": "t5", "vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2,
      "n_positions": 64, "architectures": ["T5ForConditionalGeneration"]}  # fmt: skip
WHISPER = {"model_type": "whisper", "vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
           "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
           "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 12, "pad_token_id": 0,
           "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}  # fmt: skip
WAVEFORM = {"model_type": "wav2vec2", "vocab_size": 32, "conv_dim": [16, 16], "conv_stride": [5, 4],
            "conv_kernel": [10, 4], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
            "num_conv_pos_embedding_groups": 2, "architectures": ["Wav2Vec2ForCTC"], **SMALL}  # fmt: skip
VIT = {"model_type": "vit", "image_size": 32, "patch_size": 8, **SMALL}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRECISION_TIME_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a configuration reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def write(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize(
    ("values", "kind", "task_input"),
    [
        (BERT, "language_encoder", "64"),
        (BERT | {"architectures": ["BertForPreTraining"]}, "language_encoder", "64"),
        (BERT | {"architectures": ["BertForSequenceClassification"]}, "language_encoder", "64"),
        (BERT | {"architectures": ["BertForQuestionAnswering"]}, "language_encoder", "64"),
        (LLAMA, "language_decoder", "64"),
        (MOE, "mixture_of_experts", "64"),
        (T5, "sequence_to_sequence", "64"),
        (VIT, "", "32"),
        (CLIP, "vision_transformer", "32"),
        (WHISPER, "speech", "40"),
        (WAVEFORM, "speech", "160000"),
    ],
    ids=lambda value: value.get("architectures", [value["model_type"]])[0] if isinstance(value, dict) else None,
)
def test_every_kind_of_model_is_walked_with_its_kind_of_input(
    values: dict[str, Any], kind: str, task_input: str
) -> None:
    work = count_config(values, name="theirs").workload
    assert (work.name, work.kind, work.task_input) == ("theirs", kind, task_input)
    assert work.walks is not None
    assert 1.5 < work.backward_flops_per_sample / work.forward_flops_per_sample < 2.6
    assert work.attention_flops_share > 0


def test_the_counts_of_a_decoder_are_those_of_its_sizes() -> None:
    work = count_config(LLAMA, name="theirs").workload
    length, width, inner, words = 64, 32, 48, 99
    # queries and output 32 x 32, one key-value head of 16; three products of the gated part
    layer = 2 * width * width + 2 * width * 16 + 3 * width * inner
    assert work.params == layer + 2 * width + width + 2 * words * width
    attention = 4 * length * length * width
    assert work.forward_flops_per_sample == length * 2 * (layer + width * words) + attention
    assert (work.layers, work.hidden_size, work.heads, work.kv_heads, work.ffn_size) == (1, 32, 2, 1, 48)
    assert (work.vocab, work.sequence_length, work.family) == (99, 64, "llama")


def test_tied_weights_count_once() -> None:
    apart = count_config(LLAMA, name="a").workload.params
    assert count_config(LLAMA | {"tie_word_embeddings": True}, name="b").workload.params == apart - 99 * 32


def test_experts_work_on_their_share_of_the_tokens() -> None:
    work = count_config(MOE, name="theirs").workload
    inside = 8 * 3 * 32 * 24
    assert (work.experts, work.active_experts) == (8, 2)
    assert work.params - work.active_params == inside * 6 // 8
    products = 64 * 2 * 3 * 2 * 32 * 24
    assert work.forward_flops_per_sample > products
    dense = count_config(MOE | {"num_experts_per_tok": 4}, name="theirs").workload
    assert dense.forward_flops_per_sample - work.forward_flops_per_sample == products


def test_evenly_spread_experts_compute_the_same_as_an_even_router() -> None:
    torch.manual_seed(0)
    model = build_model(MOE, name="theirs")
    experts = next(part for part in model.modules() if hasattr(part, "_is_expert_parallel")).to_empty(device="cpu")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    hidden, weights = torch.randn(4, 32), torch.rand(4, 2)
    even = spread_evenly(experts, hidden, torch.arange(8).view(4, 2), weights)
    experts.config._experts_implementation = "eager"
    assert torch.allclose(even, experts(hidden, torch.arange(8).view(4, 2), weights), rtol=1e-4, atol=1e-4)


def test_the_question_chooses_the_size_of_the_input(tmp_path: Path) -> None:
    short, long = (resolve_model(write(tmp_path / "bert", BERT), task_input=size).workload for size in ("16", "32"))
    assert (short.sequence_length, long.sequence_length) == (16, 32)
    assert long.forward_flops_per_sample > 2 * short.forward_flops_per_sample
    vision = resolve_model(write(tmp_path / "vit", VIT | {"image_size": [32, 48]}), task_input="32x48").workload
    assert vision.task_input == "32x48"
    for wrong in ("16x16", "long"):
        with pytest.raises(InputError, match="is not a length"):
            resolve_model(write(tmp_path / "bert", BERT), task_input=wrong)


def test_assumptions_are_reasons_of_the_answer(tmp_path: Path) -> None:
    reasons = resolve_model(write(tmp_path / "bert", BERT)).reasons
    assert any("built BertForMaskedLM" in reason for reason in reasons)
    assert any("assumed sequences of 64 tokens" in reason for reason in reasons)
    assert not any("assumed seq" in reason for reason in resolve_model(tmp_path / "bert", task_input="16").reasons)


def test_a_file_of_any_name_or_its_folder_predicts_and_is_walked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "tiny_vit", VIT)
    (tmp_path / "another.json").write_text(json.dumps(VIT))
    first = predict_time(str(folder), "fp32", batch_size=8)
    assert first.model == "tiny_vit"
    assert predict_time(str(tmp_path / "another.json"), "fp32", batch_size=8).model == "another"
    monkeypatch.setattr(huggingface, "count_config", None)
    assert predict_time(folder / "config.json", "fp32", batch_size=8) == first
    assert resolve_model(folder).workload.kind == "vision_transformer"


def test_a_known_configuration_is_answered_without_torch(tmp_path: Path) -> None:
    folder = write(tmp_path / "tiny_vit", VIT)
    workload = resolve_model(folder).workload
    program = (
        "import sys\nfrom precision_time.predictor.answering.user_models import resolve_model\n"
        f"work = resolve_model({str(folder)!r}).workload\n"
        f"assert work.forward_flops_per_sample == {workload.forward_flops_per_sample}\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=dict(os.environ), check=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (BERT | {"auto_map": {"AutoModel": "modeling_mine.Mine"}}, "names code that comes with the model"),
        (BERT | {"hidden_size": "wide"}, "transformers cannot build"),
        (BERT | {"num_attention_heads": 5}, "transformers cannot build"),
    ],
)
def test_a_configuration_that_cannot_be_built_says_why(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_model(values, name="theirs")


def test_a_type_that_transformers_does_not_know_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=f"llama.*{transformers.__version__}"):
        build_model(LLAMA | {"model_type": "llamaa"}, name="theirs")


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"model_type": 3}', "[" * 100_000])
def test_a_file_that_is_not_a_configuration_is_bad_input(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match="configuration"):
        resolve_model(tmp_path)
