import pytest

from precision_time.predictor.rows.public_table import shipped_measurements
from precision_time.predictor.shipped import shipped_rows
from precision_time.predictor.workloads import families
from precision_time.predictor.workloads.cards import find_card
from precision_time.predictor.workloads.families import KINDS, find_family, guess_kind


def test_every_model_of_the_public_table_has_a_listed_family():
    listed = {row["model"]: row for row in shipped_rows("families.csv")}
    assert set(shipped_measurements()["model"]) <= set(listed)
    assert {row["kind"] for row in listed.values()} <= set(KINDS)
    assert all(row["family"] and row["canonical"] for row in listed.values())


def test_one_network_has_one_family_and_kind_whatever_it_is_called():
    labels = {}
    for row in shipped_rows("families.csv"):
        labels.setdefault(row["canonical"], set()).add((row["family"], row["kind"]))
    assert {name: several for name, several in labels.items() if len(several) > 1} == {}


@pytest.mark.parametrize(
    "names",
    [
        ("resnet50", "resnet-50", "resnet50_v1.5", "tv_resnet50", "swsl_resnet50"),
        ("bert-large", "bert_large_pretrain_seq512", "bert_large_squad"),
        ("llama2-70b-lora", "llama2_70b", "llama2_70b_lora"),
        ("llama3.1-405b", "llama3_405b", "llama3_1_405b"),
        ("gpt3-175b", "gpt3_175b", "gpt_175b"),
        ("maskrcnn-r50-fpn", "maskrcnn_resnet50_fpn", "mask_rcnn_R_50_FPN_3x", "detectron1_e2e_mask_r-50-fpn"),
        ("vit_b16", "vit_base_patch16_384", "deit_base_patch16_224"),
        ("regnetx-1.6gf", "regnetx_016"),
        ("efficientnet-b0", "tf_efficientnet_b0_ns"),
    ],
)
def test_synonyms_share_a_canonical_name(names):
    assert len({find_family(name).canonical for name in names}) == 1


@pytest.mark.parametrize(
    ("name", "lookalike"),
    [("densenet121", "resnet50"), ("gpt_oss_120b", "gpt2"), ("gpunet_0", "unet3d"), ("nemotron_3_nano", "nemotron_8b")],
)
def test_lookalike_names_are_different_families(name, lookalike):
    assert find_family(name).family != find_family(lookalike).family


@pytest.mark.parametrize(
    ("name", "family", "kind"),
    [
        ("seresnext200_64x4d", "resnet", "cnn"),
        ("densenet999", "densenet", "cnn"),
        ("vit_colossal_resnet50_384", "vit", "vision_transformer"),
        ("Llama-4-9B", "llama", "language_decoder"),
        ("mixtral_8x99b", "mixtral", "mixture_of_experts"),
        ("roberta_huge", "bert", "language_encoder"),
        ("maskrcnn_r999_fpn", "rcnn", "detection"),
    ],
)
def test_an_unlisted_name_is_guessed_from_its_pattern(name, family, kind):
    guessed = find_family(name)
    assert (guessed.family, guessed.kind) == (family, kind)


def test_a_name_without_any_pattern_has_no_family_and_no_card():
    assert find_family("qqq") is None
    assert find_card("qqq", "224") is None


def test_the_guess_agrees_with_the_list_on_nearly_all_names(monkeypatch):
    rows = shipped_rows("families.csv")
    monkeypatch.setattr(families, "_families", dict)
    guesses = [find_family(row["model"]) for row in rows]
    right = sum(guess is not None and guess.family == row["family"] for guess, row in zip(guesses, rows, strict=True))
    assert right >= 0.98 * len(rows)


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ({"convolution_share": 0.99, "attends": False}, "cnn"),
        ({"convolution_share": 0.02, "attends": True}, "vision_transformer"),
        ({"convolution_share": 0.7, "attends": True}, "hybrid_vision"),
        ({"convolution_share": 0.0, "attends": True, "takes_tokens": True}, "language_encoder"),
        ({"convolution_share": 0.1, "attends": False, "recurrent_share": 0.6}, "recurrent"),
        ({"convolution_share": 0.0, "attends": False}, "tabular/other"),
    ],
)
def test_the_kind_is_guessed_from_the_shares_of_the_work(counts: dict[str, object], kind: str) -> None:
    assert guess_kind(**counts) == kind
    assert kind in KINDS
