"""Counts kept by content: recalled whole, harmless when damaged, never too many, and dropped once the code changes."""

import ast
import json
import os
from pathlib import Path

import pytest

from precision_time.predictor.workloads import walk_cache
from precision_time.predictor.workloads.walk import READY_POINTS, RIDGES, OpCount, Walk
from precision_time.predictor.workloads.walk_cache import (
    CountedModel,
    counting_version,
    hash_content,
    recall_count,
    remember_count,
)
from precision_time.predictor.workloads.workload import WorkloadFeatures

KEY = "0" * 64


def make_walk(flops: float) -> Walk:
    return Walk(
        counts={("forward", "dense", "wide"): OpCount(flops=flops, bytes=8.0, ops=1.0)},
        roof_forward=tuple(100.0 / ridge for ridge in RIDGES),
        roof_backward=tuple(200.0 / ridge for ridge in RIDGES),
        saved=4.0, saved_fixed=0.0, peak=5.0, peak_fixed=1.0, scores=0.0, narrow_flops_share=0.5,
        aligned_flops_share=0.25, serial_steps=0.0, gradient_bytes=40.0, gradient_tensors=2.0,
        ready=tuple(point / READY_POINTS for point in range(1, READY_POINTS + 1)),
    )  # fmt: skip


@pytest.fixture
def counted() -> CountedModel:
    work = WorkloadFeatures(
        name="mine", family="", task_input="8", optimizer="", params=10, parameter_tensors=2,
        forward_flops_per_sample=20.0, backward_flops_per_sample=40.0, convolution_flops_share=0.0,
        attention_flops_share=0.0, forward_bytes_per_sample=8.0, forward_bytes_fixed=4.0,
        backward_bytes_per_sample=16.0, backward_bytes_fixed=8.0, forward_ops=3, backward_ops=5,
        walks={"fp32": make_walk(20.0), "amp": make_walk(21.0)},
    )  # fmt: skip
    return CountedModel(workload=work, trainable_share=0.5, reasons=("it was walked",))


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PRECISION_TIME_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "walks"


def test_a_remembered_count_is_recalled_whole(counted: CountedModel, folder: Path) -> None:
    assert recall_count(KEY) is None
    remember_count(KEY, counted)
    assert recall_count(KEY) == counted
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.json"]
    assert recall_count("1" * 64) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"params": 10', '"params": -1'),
        lambda text: text.replace('"params"', '"parms"'),
        lambda text: text.replace(KEY, "1" * 64),
        lambda text: text.replace('"trainable_share": 0.5', '"trainable_share": "half"'),
    ],
)
def test_a_damaged_entry_is_none_and_the_next_count_mends_it(counted: CountedModel, folder: Path, damage) -> None:
    remember_count(KEY, counted)
    path = folder / f"{KEY}.json"
    path.write_text(damage(path.read_text()))
    assert recall_count(KEY) is None
    remember_count(KEY, counted)
    assert recall_count(KEY) == counted


def test_without_a_writable_folder_nothing_is_kept(
    counted: CountedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        monkeypatch.setenv("PRECISION_TIME_CACHE", str(place))
        remember_count(KEY, counted)
        assert recall_count(KEY) is None


def test_off_keeps_and_finds_nothing(counted: CountedModel, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    remember_count(KEY, counted)
    monkeypatch.setenv("PRECISION_TIME_CACHE", "OFF")
    assert recall_count(KEY) is None
    remember_count("1" * 64, counted)
    assert len(list(folder.iterdir())) == 1


def test_the_oldest_go_when_there_are_too_many(
    counted: CountedModel, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(walk_cache, "_MOST_ENTRIES", 3)
    keys = [f"{number:064x}" for number in range(5)]
    for age, key in enumerate(keys):
        remember_count(key, counted)
        os.utime(folder / f"{key}.json", (age, age))
    (folder / "notes.txt").write_text("not an entry")
    remember_count("f" * 64, counted)
    assert {path.stem for path in folder.iterdir()} == {*keys[3:], "f" * 64, "notes"}


def test_an_entry_is_small_enough_for_a_thousand_of_them(counted: CountedModel, folder: Path) -> None:
    remember_count(KEY, counted)
    data = (folder / f"{KEY}.json").read_bytes()
    assert len(data) < 50_000
    assert json.loads(data)["key"] == KEY


def test_parts_with_the_same_joined_text_have_different_hashes() -> None:
    assert hash_content(["ab", "c"]) != hash_content(["a", "bc"]) != hash_content(["abc"])
    assert hash_content(["ab", "c"]) == hash_content(iter(["ab", "c"]))


def test_another_version_of_a_package_is_another_count(monkeypatch: pytest.MonkeyPatch) -> None:
    counting_version.cache_clear()
    before = counting_version("numpy")
    assert before != counting_version("numpy", "no-such-package")
    monkeypatch.setattr(walk_cache.metadata, "version", lambda name: "0.0.1")
    counting_version.cache_clear()
    assert counting_version("numpy") != before
    counting_version.cache_clear()


def test_every_file_that_counts_makes_the_version() -> None:
    """Every file of this package that a walk imports decides counts, except for names and errors."""
    folder = Path(walk_cache.__file__).parents[1]
    counting = {file for pattern in walk_cache._COUNTING_FILES for file in folder.glob(pattern)}
    # these describe other networks than the counted one
    names = ("cards", "families", "input_sizes", "walk_cache", "module_content", "zoo")
    harmless = {folder / "shipped.py", *(folder / "workloads" / f"{name}.py" for name in names)}
    waiting, imported = [folder / "walking" / f"{name}.py" for name in ("count_module", "huggingface")], set()
    while waiting:
        file = waiting.pop()
        if file in imported or file in harmless:
            continue
        imported.add(file)
        modules = [node.module or "" for node in ast.walk(ast.parse(file.read_text()))
                   if isinstance(node, ast.ImportFrom)]  # fmt: skip
        ours = "precision_time.predictor."
        waiting += [folder / f"{module.removeprefix(ours).replace('.', '/')}.py" for module in modules
                    if module.startswith(ours)]  # fmt: skip
    assert imported == counting - {folder / "walking" / "__init__.py"}
