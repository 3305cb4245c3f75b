"""Which artifact answers, that the one in the package is the last choice, and which artifacts are refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from precision_time import predict_time
from precision_time.predictor.answering import artifact
from precision_time.predictor.answering.artifact import (
    load_artifact,
    load_bundled,
    pack_artifact,
    standing_artifact,
    zoo_digest,
)
from precision_time.predictor.answering.estimate import TimeEstimate
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.rows.observations import observe
from precision_time.predictor.workloads import workload
from precision_time.predictor.workloads.zoo import ZooEntry, pack_entries
from precision_time.storage.errors import IntegrityError, NotFoundError, UnreachableError
from precision_time.storage.manifests import ArtifactManifest
from precision_time.storage.registry import Registry
from precision_time.tasks.publishing.publish import export_bundle

QUESTION = {"model": "mlp", "precision": "fp32", "batch_size": 16, "gpu": "A100-SXM4-80GB"}


@pytest.fixture(scope="module")
def registry(measure, publish_made_up, tmp_path_factory) -> str:
    """A registry with one published predictor of a made-up world."""
    url = str(tmp_path_factory.mktemp("registry"))
    publish_made_up(url, measure())
    return url


@pytest.fixture
def bundle(registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the artifact that comes with the package, with no other artifact configured."""
    monkeypatch.setattr(artifact, "BUNDLE", tmp_path / "bundled")
    for name in ("PRECISION_TIME_ARTIFACT", "PRECISION_TIME_REGISTRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    export_bundle(registry, "default", into=tmp_path / "bundled")
    load_artifact.cache_clear()
    return tmp_path / "bundled"


def test_the_bundle_answers_when_nothing_else_is_configured_and_says_so(bundle: Path, registry: str) -> None:
    estimate = predict_time(**QUESTION)
    assert estimate.artifact_id == "bundled@1"
    named = predict_time(**QUESTION, artifact=f"{registry}/default@1")
    assert named.artifact_id == "default@1"
    assert (estimate.iteration_time_s, estimate.low_s) == (named.iteration_time_s, named.low_s)
    assert predict_time(**QUESTION, artifact=estimate.artifact_id) == estimate
    assert predict_time(**QUESTION, artifact="bundled") == estimate


def test_a_configured_artifact_comes_before_the_bundle(
    bundle: Path, registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def standing() -> tuple[str, str]:
        published, why, _ = standing_artifact()
        assert published is not None
        return published.manifest.artifact_id, why

    assert standing()[0] == "bundled@1"
    monkeypatch.setenv("PRECISION_TIME_REGISTRY", str(tmp_path / "empty"))
    assert standing()[0] == "bundled@1"
    assert "holds no artifact called 'default'" in standing()[1]
    monkeypatch.setenv("PRECISION_TIME_REGISTRY", registry)
    assert standing()[0] == "default@1"
    monkeypatch.setenv("PRECISION_TIME_ARTIFACT", "bundled@1")
    assert standing()[0] == "bundled@1"


def test_without_a_bundle_no_artifact_stands_and_its_name_is_refused(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFoundError, match="bundled@1"):
        load_artifact("bundled@2")
    monkeypatch.setattr(artifact, "BUNDLE", tmp_path / "nothing" / "bundled")
    assert load_bundled() is None
    assert standing_artifact()[:2] == (None, "no artifact was given and no registry is configured")
    with pytest.raises(NotFoundError, match="no bundled artifact"):
        load_artifact("bundled")


@pytest.mark.parametrize("file", ["trees.npz", "predictor.json", "manifest.json"])
def test_a_bundle_that_was_tampered_with_is_refused(bundle: Path, file: str) -> None:
    path = bundle / "1" / file
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(IntegrityError, match="comes with the package cannot be used"):
        predict_time("mlp", "fp32", batch_size=16)


def test_a_bundle_with_a_file_too_many_or_too_few_or_without_a_manifest_is_refused(bundle: Path) -> None:
    (bundle / "1" / "extra.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"extra\.json is not in the manifest"):
        load_bundled()
    (bundle / "1" / "extra.json").unlink()
    (bundle / "1" / "trees.npz").unlink()
    with pytest.raises(IntegrityError, match=r"trees\.npz is missing"):
        load_bundled()
    (bundle / "1" / "manifest.json").unlink()
    with pytest.raises(IntegrityError, match="incomplete"):
        load_bundled()


def test_cards_are_packed_only_where_a_campaign_measured_them(measure, registry: str) -> None:
    rows = observe(measure(models=("mlp",)))
    predictor = HierarchicalPredictor.fit(rows)
    setup = rows[0].setup
    assert not {"workloads.json", "hardware.json"} & set(pack_artifact(predictor, workloads=(), hardware=()))
    packed = pack_artifact(predictor, workloads=(setup.workload,), hardware=(setup.hardware,))
    assert json.loads(packed["workloads.json"])[0]["name"] == "mlp"
    assert json.loads(packed["hardware.json"])[0]["name"] == "A100-SXM4-80GB"
    # The made-up artifact carries one card and no hardware: a missing file reads as empty.
    assert "hardware.json" not in Registry(registry).load("default")[1]
    assert load_artifact(f"{registry}/default").hardware == ()


def test_the_configuration_file_names_the_artifact_after_the_environment(
    bundle: Path, registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".config" / "precision_time"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f'[artifact]\nreference = "{registry}/default@1"\n')
    monkeypatch.setenv("PRECISION_TIME_REGISTRY", str(tmp_path / "empty"))
    assert predict_time(**QUESTION).artifact_id == "default@1"
    monkeypatch.setenv("PRECISION_TIME_ARTIFACT", "bundled")
    assert predict_time(**QUESTION).artifact_id == "bundled@1"


def test_a_process_keeps_its_artifact_until_a_refresh(bundle: Path, tmp_path: Path, measure, publish_made_up) -> None:
    url = str(tmp_path / "registry")
    publish_made_up(url, measure(models=("mlp",)))
    named = {"artifact": f"{url}/default@champion"}
    assert predict_time(**QUESTION, **named).artifact_id == "default@1"
    publish_made_up(url, measure(models=("mlp", "vit_tiny")))
    assert predict_time(**QUESTION, **named).artifact_id == "default@1"
    newer = predict_time(**QUESTION, **named, refresh=True)
    assert newer.artifact_id == "default@2"
    assert f"default@2: loaded from {url}" in newer.reasons
    assert predict_time(**QUESTION, **named).artifact_id == "default@2"


def test_answers_of_a_local_copy_say_so_and_a_refresh_refuses_it(
    registry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precision_time.storage.artifact_cache import FetchedArtifact

    manifest, files = Registry(registry).load("default")
    local_copy = FetchedArtifact(manifest=manifest, files=files, origin="the registry did not answer", is_current=False)
    monkeypatch.setattr(artifact, "fetch_artifact", lambda *_, **__: local_copy)
    load_artifact.cache_clear()
    named = {"artifact": f"{registry}/default"}
    for _ in range(2):
        assert "default@1: the registry did not answer" in predict_time(**QUESTION, **named).reasons
    with pytest.raises(UnreachableError, match="the registry did not answer"):
        predict_time(**QUESTION, **named, refresh=True)
    load_artifact.cache_clear()


def _republish(url: str, files: dict[str, bytes], source: ArtifactManifest) -> None:
    """Publish other files under the manifest of a valid artifact, with correct digests."""
    Registry(url).publish(
        "default",
        files,
        describe=lambda version, listed: source.model_copy(update={"version": version, "files": listed}),
    )


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("predictor.json", b'"level": 0.9', b'"level": NaN'),
        ("predictor.json", b'"known": 0.1', b'"known": 1e400'),
        ("predictor.json", None, b"[" * 100_000),
        ("workloads.json", None, b"[Infinity]"),
        ("workloads.json", None, b"{}"),
        ("trees.npz", None, b"\x80\x04K\x01."),
        ("trees.npz", None, None),
    ],
    ids=["NaN level", "huge radius", "deep", "infinite card", "no list", "pickle", "no trees"],
)
def test_unusable_content_with_correct_digests_is_refused(
    file: str, old: bytes | None, new: bytes | None, registry: str, tmp_path: Path
) -> None:
    source, files = Registry(registry).load("default")
    crafted = {name: data for name, data in files.items() if name != file}
    if new is not None:
        crafted[file] = new if old is None else files[file].replace(old, new)
    assert crafted != files
    _republish(str(tmp_path), crafted, source)
    with pytest.raises(IntegrityError):
        predict_time(**QUESTION, artifact=f"{tmp_path}/default")


def test_with_another_zoo_installed_the_walks_of_the_artifact_are_used(
    tmp_path: Path, registry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later zoo counts twice the work; the artifact was trained on the work that the earlier zoo counted."""
    source, files = Registry(registry).load("default")
    walks = pack_entries(["resnet50", "mlp"])
    assert walks is not None
    _republish(str(tmp_path), files | {"walks.parquet": walks}, source.model_copy(update={"zoo_sha256": zoo_digest()}))
    _republish(str(tmp_path / "without"), files, source.model_copy(update={"zoo_sha256": zoo_digest()}))

    def ask(model: str, folder: Path = tmp_path, *, task_input: str = "") -> TimeEstimate:
        return predict_time(
            model, "fp32", batch_size=32, gpu="A100", artifact=f"{folder}/default", task_input=task_input
        )

    # a name in the zoo, another spelling, an input by name, and a model whose card the artifact carries
    questions = [("resnet50", ""), ("ResNet-50", ""), ("resnet50", "224"), ("mlp", "")]
    before = [ask(model, task_input=size) for model, size in questions]
    assert not any("another zoo" in reason for estimate in before for reason in estimate.reasons)
    find_entry = workload.find_entry

    def find_doubled(name: str, task_input: str = "") -> ZooEntry | None:
        entry = find_entry(name, task_input)
        return None if entry is None else dataclasses.replace(entry, fp32=entry.fp32.resize(2.0, attention_factor=2.0))

    monkeypatch.setattr(workload, "find_entry", find_doubled)
    monkeypatch.setattr(artifact, "zoo_digest", lambda: "0" * 64)
    load_artifact.cache_clear()
    after = [ask(model, task_input=size) for model, size in questions]
    assert [estimate.iteration_time_s for estimate in after] == [estimate.iteration_time_s for estimate in before]
    assert any(
        "was trained on another zoo" in reason and "it carries the walks" in reason for reason in after[0].reasons
    )
    without = ask("resnet50", tmp_path / "without")
    assert without.iteration_time_s > 1.5 * before[0].iteration_time_s
    assert any("models of the zoo may be off" in reason for reason in without.reasons)


def test_damaged_walks_are_refused_where_they_are_needed(tmp_path: Path, registry: str) -> None:
    source, files = Registry(registry).load("default")
    walks = pack_entries(["mlp"])
    assert walks is not None
    crafted = files | {"walks.parquet": walks[:-20]}
    _republish(str(tmp_path), crafted, source.model_copy(update={"zoo_sha256": "0" * 64}))
    with pytest.raises(IntegrityError, match=r"walks\.parquet"):
        predict_time(**QUESTION, artifact=f"{tmp_path}/default")
