import subprocess
import sys

import pytest

from precision_time.predictor.rows.public_table import shipped_measurements
from precision_time.predictor.shipped import shipped_rows
from precision_time.predictor.workloads import cards as cards_module
from precision_time.predictor.workloads.cards import find_card, transformer_flops
from precision_time.predictor.workloads.workload import known_workloads
from precision_time.storage.errors import InputError, IntegrityError


@pytest.fixture(scope="module")
def measurements():
    columns = ["source_repo", "model", "model_params", "fwd_flops_per_sample", "task_input"]
    return shipped_measurements()[columns].drop_duplicates()


@pytest.mark.parametrize(
    ("model", "task_input", "params_m", "giga_flops"),
    [
        ("resnet50", "224", 25.557, 8.178),
        ("resnet18", "224x224 images", 11.690, 3.628),
        ("vgg16", "224", 138.358, 30.94),
        ("densenet121", "224", 7.979, 5.668),
        ("mobilenet_v2", "224", 3.505, 0.6015),
        ("vit_b16", "224", 86.568, 35.13),
        ("nnunet_3d", "128x128x128", 31.19, 965.6),
        ("insightface_resnet100", "112", 109.06, 24.27),
        ("retinanet_R_50_FPN_1x", "~800x1333", 33.8, 403.7),
        ("gpt2", "1024", 124.44, 291.65),
    ],
)
def test_cards_hold_the_known_sizes(model, task_input, params_m, giga_flops):
    card = find_card(model, task_input)
    assert card.params / 1e6 == pytest.approx(params_m, rel=0.002)
    assert card.forward_flops_per_sample / 1e9 == pytest.approx(giga_flops, rel=0.001)


@pytest.mark.parametrize("model", ["resnet18", "resnet50", "vit_b16", "gpt2"])
def test_cards_agree_with_the_counted_workloads(model):
    counted = known_workloads()[model]
    card = find_card(model, counted.task_input)
    assert card.forward_flops_per_sample == pytest.approx(counted.forward_flops_per_sample, rel=1e-6)
    assert card.params == counted.params


def test_bert_with_a_head_on_every_position_is_the_counted_workload():
    card = find_card("bert_base", "128")
    head = 30522 * 768 + 768**2
    every_position = card.forward_flops_per_sample + 2 * (128 - 20) * head
    assert every_position == pytest.approx(known_workloads()["bert_base"].forward_flops_per_sample, rel=0.002)


@pytest.mark.parametrize(
    ("model", "billions", "active_billions"),
    [
        ("llama2_7b", 6.738, 6.738),
        ("llama2_13b", 13.016, 13.016),
        ("llama2_70b", 68.98, 68.98),
        ("llama3_8b", 8.03, 8.03),
        ("llama3_70b", 70.55, 70.55),
        ("llama3_405b", 405.85, 405.85),
        ("gpt3_175b", 174.6, 174.6),
        ("mixtral_8x7b", 46.70, 12.88),
        ("qwen3_30b_a3b", 30.53, 3.35),
        ("qwen3_235b_a22b", 235.1, 22.2),
        ("deepseekv3", 671.0, 37.55),
        ("gpt_oss_120b", 116.8, 5.71),
        ("nemotron_3_nano", 31.58, 3.58),
        ("t5_v1_1_large", 0.7832, None),
        ("mpt_7b", 6.65886, 6.65886),
    ],
)
def test_language_models_have_their_published_parameter_counts(model, billions, active_billions):
    card = find_card(model)
    assert card.params / 1e9 == pytest.approx(billions, rel=0.001)
    if active_billions is not None:
        assert card.active_params / 1e9 == pytest.approx(active_billions, rel=0.002)


# Forward FLOPs of a sequence behind the TFLOP/s/GPU that the sources print (printed rate x time x GPUs / batch / 3).
@pytest.mark.parametrize(
    ("model", "length", "causal", "printed"),
    [
        ("gpt3_5b", 2048, False, 2.231e13),  # NVIDIA/NeMo performance summary
        ("gpt3_175b", 2048, False, 7.35e14),
        ("llama2_13b", 4096, False, 1.191e14),
        ("nemotron_340b", 4096, False, 2.875e15),
        ("llama3_8b", 8192, True, 1.406e14),  # NVIDIA-NeMo/Megatron-Bridge performance summary
        ("llama3_405b", 8192, True, 6.893e15),
        ("qwen3_30b_a3b", 4096, True, 3.141e13),
        ("qwen3_235b_a22b", 4096, True, 2.02e14),
        ("kimi_k2", 4096, True, 2.79e14),
    ],
)
def test_transformer_work_is_that_of_the_printed_rates(model, length, causal, printed):
    assert transformer_flops(find_card(model), length, causal=causal) == pytest.approx(printed, rel=0.006)


def test_cards_agree_with_the_sizes_in_rows(measurements):
    """Where a row has a number of parameters, its card is of the same network, up to documented exceptions."""
    other_network = {  # timm of that time built ConvNeXt-Base under these names
        f"convnext_{size}{side}_in22ft1k" for size in ("tiny", "small") for side in ("", "_384")
    }
    differing = set()
    for row in measurements[measurements["model_params"].notna()].itertuples():
        card = find_card(row.model, row.task_input)
        if card and card.params and not 0.9 < card.params / float(row.model_params) < 1.1:
            differing.add(row.model)
    # learned positions of long sequences, discriminators, and a quarter-million vocabulary in a rounded name
    expected = other_network | {"mpt_125m", "mpt_350m", "mpt_760m", "hifigan", "gpt_20b"}
    assert differing <= expected


def test_parameters_and_work_are_known_for_all_but_a_few_named_models(measurements):
    expected = {
        "amoebanet_d_18_256", "fastpitch", "fastspeech", "faster_rcnn_fbnet_chamv1a", "faster_rcnn_fbnet_default",
        "imagen_base_2b", "imagen_base_500m", "imagen_sr1_430m_unet", "imagen_sr1_600m_effunet",
        "imagen_sr2_600m_effunet", "mask_rcnn_fbnet_default", "mask_rcnn_fbnet_xirb16d", "moflow", "se3_transformer",
        "sim", "unet3plus", "unet_5_64",
    }  # fmt: skip
    unknown = set()
    for row in measurements.itertuples():
        card = find_card(row.model, row.task_input)
        if card is None or card.params is None or card.forward_flops_per_sample is None:
            unknown.add(row.model)
    assert unknown == expected


def test_work_and_activations_of_a_convolutional_net_follow_the_area():
    small, large = find_card("resnet50", "224"), find_card("resnet50", "448x448")
    assert large.forward_flops_per_sample == pytest.approx(4 * small.forward_flops_per_sample)
    assert large.activations_per_sample == pytest.approx(4 * small.activations_per_sample)
    assert large.params == small.params


def test_patch_attention_grows_faster_than_the_area():
    card = find_card("vit_large_patch14_224", "448")
    assert card.forward_flops_per_sample > 4.05 * find_card("vit_large_patch14_224", "224").forward_flops_per_sample


def test_the_card_at_the_asked_input_comes_before_a_scaled_one():
    assert find_card("vit_base_patch16_384", "384").how_known.startswith("counted")
    assert find_card("unet3d", "KiTS19 128x128x128").params != find_card("unet3d", "BraTS 128x128x128x4 volumes").params


def test_attention_counts_with_the_square_of_the_sequence():
    card = find_card("llama3_8b")
    scores = 4 * 8192**2 * 4096 * 32
    assert transformer_flops(card, 8192) == pytest.approx(2 * 8192 * card.matmul_params + scores)
    assert transformer_flops(card, 8192, causal=True) == pytest.approx(transformer_flops(card, 8192) - scores / 2)


def test_a_sequence_length_in_words_is_understood():
    card = find_card("bert_large_squad", "seq 384 (script default)")
    assert card.sequence_length == 384
    assert card.forward_flops_per_sample == pytest.approx(2.464e11, rel=0.005)
    assert card.attention_share == pytest.approx(4 * 384**2 * 1024 * 24 / card.forward_flops_per_sample)


def test_activations_of_a_language_model_follow_the_sequence():
    short, long = find_card("llama3_8b", "8192"), find_card("llama3_8b", "32768")
    assert long.activations_per_sample == pytest.approx(4 * short.activations_per_sample)


def test_transformer_flops_refuses_what_it_cannot_count():
    with pytest.raises(InputError, match="no transformer sizes"):
        transformer_flops(find_card("resnet50"), 128)
    with pytest.raises(InputError, match="no tokens"):
        transformer_flops(find_card("gpt2"), 0)


def test_a_damaged_card_is_refused(monkeypatch):
    rows = {"resnet50": [shipped_rows("models.csv")[0] | {"model": "resnet50", "params": "many"}]}
    monkeypatch.setattr(cards_module, "_card_rows", lambda: rows)
    with pytest.raises(IntegrityError, match="card of resnet50"):
        find_card.__wrapped__("resnet50", "224")


def test_every_card_can_be_read_and_says_how_it_is_known():
    for row in shipped_rows("models.csv"):
        card = find_card(row["model"], row["task_input"])
        assert card is not None
        assert card.how_known
        assert card.params is None or card.params > 0
        assert card.active_params is None or card.active_params <= card.params


def test_a_lookup_needs_no_numerical_library():
    code = (
        "import sys; from precision_time.predictor.workloads.cards import find_card; find_card('resnet50', '224');"
        "sys.exit(bool({'numpy', 'pandas', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
