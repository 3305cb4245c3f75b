"""The artifact that comes with the package answers when nothing else is configured, and passes the same checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from precision_time import predict_time
from precision_time.predictor import artifact
from precision_time.predictor.artifact import load_artifact, load_bundled, pack_artifact, standing_artifact
from precision_time.predictor.hierarchy import HierarchicalPredictor
from precision_time.predictor.observations import observe
from precision_time.storage.errors import IntegrityError, NotFoundError
from precision_time.storage.registry import Registry
from precision_time.tasks.publish import export_bundle

NEVER_LOADED = {"torch", "prefect", "dask", "xgboost", "pandas", "fsspec", "sklearn", "scipy", "matplotlib"}


@pytest.fixture(scope="module")
def registry(measure, publish_made_up, tmp_path_factory) -> str:
    """A registry with one published predictor of a made-up world."""
    url = str(tmp_path_factory.mktemp("registry"))
    publish_made_up(url, measure())
    return url


@pytest.fixture
def bundle(registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for what comes with the package, and nothing else that could answer."""
    monkeypatch.setattr(artifact, "BUNDLE", tmp_path / "bundled")
    for name in ("PRECISION_TIME_ARTIFACT", "PRECISION_TIME_REGISTRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    export_bundle(registry, "default", into=tmp_path / "bundled")
    load_artifact.cache_clear()
    return tmp_path / "bundled"


def test_the_bundle_answers_when_nothing_else_is_configured_and_says_so(bundle: Path, registry: str) -> None:
    question = {"model": "mlp", "precision": "fp32", "batch_size": 16, "gpu": "A100-SXM4-80GB"}
    estimate = predict_time(**question)
    assert estimate.artifact_id == "bundled@1"
    named = predict_time(**question, artifact=f"{registry}/default@1")
    assert named.artifact_id == "default@1"
    assert (estimate.iteration_time_s, estimate.low_s) == (named.iteration_time_s, named.low_s)
    assert predict_time(**question, artifact=estimate.artifact_id) == estimate
    assert predict_time(**question, artifact="bundled") == estimate


def test_what_is_configured_comes_before_the_bundle(
    bundle: Path, registry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def standing() -> tuple[str, str]:
        published, why = standing_artifact()
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


def test_without_a_bundle_none_stands_and_the_name_leads_nowhere(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFoundError, match="bundled@1"):
        load_artifact("bundled@2")
    monkeypatch.setattr(artifact, "BUNDLE", tmp_path / "nothing" / "bundled")
    assert load_bundled() is None
    assert standing_artifact() == (None, "no artifact was given and no registry is configured")
    with pytest.raises(NotFoundError, match="no bundled artifact"):
        load_artifact("bundled")


@pytest.mark.parametrize("file", ["trees.npz", "predictor.json", "manifest.json"])
def test_a_bundle_that_was_tampered_with_is_refused(bundle: Path, file: str) -> None:
    path = bundle / "1" / file
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(IntegrityError, match="comes with the package cannot be used"):
        predict_time("mlp", "fp32", batch_size=16)


def test_a_bundle_with_a_file_too_many_or_too_few_is_refused(bundle: Path) -> None:
    (bundle / "1" / "extra.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"extra\.json is not in the manifest"):
        load_bundled()
    (bundle / "1" / "extra.json").unlink()
    (bundle / "1" / "trees.npz").unlink()
    with pytest.raises(IntegrityError, match=r"trees\.npz is missing"):
        load_bundled()


def test_a_cold_answer_from_the_bundle_loads_no_heavy_library(bundle: Path, tmp_path: Path) -> None:
    program = (
        "import json, pathlib, sys\n"
        "from precision_time.predictor import artifact\n"
        f"artifact.BUNDLE = pathlib.Path({str(bundle)!r})\n"
        "from precision_time import predict_time\n"
        "estimate = predict_time(model='mlp', precision='mixed_fp16_fp32', gpus=2, batch_size=16)\n"
        "loaded = sorted({name.partition('.')[0] for name in sys.modules})\n"
        "print(json.dumps([estimate.artifact_id, loaded]))"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PRECISION_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=environment | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    artifact_id, loaded = json.loads(done.stdout)
    assert artifact_id == "bundled@1"
    assert not NEVER_LOADED & set(loaded)


def test_cards_are_packed_only_where_a_campaign_measured_them(measure, registry: str) -> None:
    rows = observe(measure(models=("mlp",)))
    predictor = HierarchicalPredictor.fit(rows)
    setup = rows[0].setup
    assert not {"workloads.json", "hardware.json"} & set(pack_artifact(predictor, workloads=(), hardware=()))
    packed = pack_artifact(predictor, workloads=(setup.workload,), hardware=(setup.hardware,))
    assert json.loads(packed["workloads.json"])[0]["name"] == "mlp"
    assert json.loads(packed["hardware.json"])[0]["name"] == "A100-SXM4-80GB"
    # The made-up artifact carries one card and no hardware: what is not there reads as none.
    assert "hardware.json" not in Registry(registry).load("default")[1]
    assert load_artifact(f"{registry}/default").hardware == ()


def test_a_bundle_without_its_manifest_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bundled" / "1").mkdir(parents=True)
    (tmp_path / "bundled" / "1" / "trees.npz").write_bytes(b"x")
    monkeypatch.setattr("precision_time.predictor.artifact.BUNDLE", tmp_path / "bundled")
    with pytest.raises(IntegrityError, match="incomplete"):
        load_bundled()
