import math
import subprocess
import sys

import pytest

from precision_time.predictor.rows.public_table import load_public_table
from precision_time.predictor.shipped import shipped_bytes, shipped_rows
from precision_time.predictor.workloads import zoo
from precision_time.predictor.workloads.zoo import ZooTable, find_entry, find_name, zoo_names
from precision_time.storage.errors import IntegrityError


@pytest.fixture(scope="module")
def shipped():
    return shipped_bytes("zoo.parquet")


@pytest.fixture(scope="module")
def missing():
    return shipped_rows("zoo_missing.csv")


def test_the_zoo_is_one_file_of_many_names(shipped):
    assert len(shipped) < 4_000_000
    assert len(zoo_names()) >= 1_400


def test_every_number_of_every_walk_is_usable(shipped):
    table = ZooTable(shipped, name="the zoo")
    walked = 0
    for row, name in enumerate(table.names):
        entry = table.read_entry(row, network=name)
        if not entry.builds or entry.walked_at != table.inputs[row]:
            continue
        walked += 1
        assert entry.params >= entry.trained_params > 0, name
        for walk in (entry.fp32, entry.amp):
            assert walk.total("flops", phase="forward") > 0, name
            assert walk.total("flops", phase="backward") > 0, name
            assert all(math.isfinite(value) and value >= 0 for value in walk.to_columns().values()), name
        # autocast changes formats, not work
        assert entry.amp.total("flops") == pytest.approx(entry.fp32.total("flops"), rel=0.02), name
    assert walked > 1_400


def test_every_name_of_the_public_table_is_resolved_or_listed_with_its_reason(missing):
    listed = {row["name"]: row["reason"] for row in missing}
    assert all(listed.values())
    assert "not walked yet" not in listed.values()
    table = load_public_table()
    names = set(table.kept["model"]) | set(table.quarantined["model"])
    unresolved = {name for name in names if find_entry(name) is None}
    assert unresolved <= set(listed)
    rows = sum(int(row["rows"]) for row in missing)
    assert rows < 0.02 * (len(table.kept) + len(table.quarantined))


@pytest.mark.parametrize(
    ("name", "task_input", "params", "forward_flops"),
    [
        ("resnet50", "224", 25_557_032, 8.178e9),
        ("gpt2", "1024", 124_439_808, 291.65e9),
        ("llama2_7b", "4096", 6_738_415_616, None),
        ("vit_base_patch16_224", "224", 86_567_656, 35.13e9),
        ("swin_base_patch4_window7_224", "224", 87_768_224, None),
        ("llama3_405b", "8192", 405_853_388_800, None),
        ("t5_v1_1_xl", "512", 2_849_757_184, None),
        ("maskrcnn_resnet50_fpn", "", 44_347_316, None),
        ("gnmt", "", 160_671_297, None),
    ],
)
def test_well_known_networks_have_their_published_parameters_and_work(name, task_input, params, forward_flops):
    entry = find_entry(name, task_input)
    assert entry is not None
    assert entry.params == params
    if forward_flops:
        assert entry.fp32.total("flops", phase="forward") == pytest.approx(forward_flops, rel=2e-4)


def test_experts_have_the_parameters_that_one_token_passes_through():
    entry = find_entry("mixtral_8x7b")
    assert entry is not None
    assert entry.sizes["experts"] == 8
    # published: 12.9 billion active of 46.7
    assert entry.sizes["active_params"] == pytest.approx(12.9e9, rel=0.01)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama2_7b"),
        ("bert-base-uncased", "bert_base"),
        ("facebook/opt-1.3b", "opt_1_3b"),
        ("timm/resnet50.a1_in1k", "resnet50"),
        ("ResNet-50", "resnet50"),
        ("google/flan-t5-xl", "flan_t5_xl"),
        ("mosaicml/mpt-7b", "mosaicml_mpt_7b"),
        ("vit_b_16", "vit_b_16"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2_5_7b"),
        ("mask_rcnn", "maskrcnn_r50_fpn"),
        ("mask_rcnn_R_50_FPN_3x", "mask_rcnn_R_50_FPN_3x"),
        ("microsoft/swin-tiny-patch4-window7-224", "swin_tiny_patch4_window7_224"),
        ("no_such_network", None),
    ],
)
def test_published_spellings_are_found(spelling, name):
    assert find_name(spelling) == name


def test_every_alias_leads_to_a_name():
    rows = shipped_rows("aliases.csv")
    assert len(rows) > 300
    assert not {row["name"] for row in rows} - zoo_names()


def test_another_input_is_scaled_from_the_nearest():
    small, large = find_entry("resnet50", "224"), find_entry("resnet50", "448")
    assert small is not None
    assert large is not None
    assert (large.task_input, large.walked_at) == ("448", "224")
    assert large.fp32.total("flops") == pytest.approx(4 * small.fp32.total("flops"))
    assert large.fp32.total("ops") == small.fp32.total("ops")
    assert large.params == small.params
    short, long = find_entry("gpt2", "1024"), find_entry("gpt2", "2048")
    assert short is not None
    assert long is not None
    dense = ("dense",)
    assert long.fp32.total("flops", families=dense) == pytest.approx(2 * short.fp32.total("flops", families=dense))
    scores = ("attention",)
    assert long.fp32.total("flops", families=scores) == pytest.approx(4 * short.fp32.total("flops", families=scores))
    assert long.sizes["sequence_length"] == 2048


def test_the_scaled_walk_of_a_transformer_is_near_the_one_at_that_length():
    walked, other = find_entry("mpt_125m", "4096"), find_entry("mpt_125m", "2048")
    assert walked is not None
    assert other is not None
    assert walked.walked_at == "4096"
    scaled = other.fp32.resize(2.0, attention_factor=4.0)
    assert scaled.total("flops") == pytest.approx(walked.fp32.total("flops"), rel=1e-3)
    assert scaled.total("bytes") == pytest.approx(walked.fp32.total("bytes"), rel=0.02)


def test_an_unknown_input_means_the_usual_one():
    usual, other = find_entry("resnet50"), find_entry("resnet50", "ImageNet at its usual size")
    assert usual is not None
    assert other is not None
    assert other.walked_at == usual.walked_at == "224"


def test_a_damaged_file_is_an_integrity_error(shipped, monkeypatch):
    broken = bytearray(shipped)
    broken[len(broken) // 2] ^= 1
    with pytest.raises(IntegrityError, match=r"zoo\.parquet is damaged"):
        ZooTable(bytes(broken), name="zoo.parquet")
    monkeypatch.setattr(zoo, "shipped_bytes", lambda name: bytes(broken))
    zoo._table.cache_clear()
    find_entry.cache_clear()
    find_name.cache_clear()
    try:
        with pytest.raises(IntegrityError):
            find_entry("resnet50")
    finally:
        zoo._table.cache_clear()


def test_a_table_of_other_columns_is_refused():
    from precision_time.storage.columns import encode_columns

    with pytest.raises(IntegrityError, match="not have the columns of the zoo"):
        ZooTable(encode_columns({"model": ["resnet50"]}), name="a test")
    table = ZooTable(encode_columns({"name": ["resnet50"], "task_input": ["224"]}), name="a test")
    with pytest.raises(IntegrityError, match="not have the columns of the zoo"):
        table.read_entry(0, network="resnet50")


def test_a_look_up_loads_neither_torch_nor_pandas():
    code = (
        "import sys; from precision_time.predictor.workloads.zoo import find_entry;"
        "assert find_entry('resnet50').params == 25557032;"
        "print([name for name in ('torch', 'pandas', 'timm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
