"""The bundled artifact answers the README's call, and its answers are ordered as physics demands."""

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from precision_time import predict_time
from precision_time.predictor.answering.artifact import BUNDLE, load_bundled, zoo_digest
from precision_time.storage.manifests import ArtifactManifest

pytestmark = pytest.mark.bundle

#: The name that the last `make bundle` gave it.
BUNDLED = "bundled@5"
A100 = {"gpu": "A100-SXM4-80GB", "batch_size": 128}


@pytest.fixture(autouse=True)
def _no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PRECISION_TIME_ARTIFACT", "PRECISION_TIME_REGISTRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")


@pytest.fixture
def manifest() -> ArtifactManifest:
    bundled = load_bundled()
    assert bundled is not None
    return bundled.manifest


def test_the_call_of_the_readme_is_answered_by_the_bundle() -> None:
    estimate = predict_time(model="resnet50", precision="mixed_fp16_fp32", gpus=8, batch_size=256)
    assert estimate.artifact_id == BUNDLED
    assert estimate.regime == "known"
    # Public runs of this configuration take 0.09 to 0.16 s.
    assert 0.07 < estimate.iteration_time_s < 0.2
    assert estimate.low_s < estimate.iteration_time_s < estimate.high_s


def test_it_is_smaller_than_five_megabytes_and_holds_the_serving_files() -> None:
    files = [path for path in BUNDLE.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 5e6
    assert {path.name for path in files} == {"manifest.json", "predictor.json", "trees.npz", "report.md"}


def test_its_manifest_and_report_name_its_data_and_its_limits(manifest: ArtifactManifest) -> None:
    table = (BUNDLE.parent / "measurements.parquet").read_bytes()
    assert manifest.zoo_sha256 == zoo_digest()
    assert manifest.training_data_sha256 == hashlib.sha256(table).hexdigest()
    assert any(limit.startswith("trained on 665 networks") for limit in manifest.known_limits)
    card = (BUNDLE / str(manifest.version) / "report.md").read_text(encoding="utf-8")
    limits = card.partition("\n## Known limits\n")[2]
    assert all(f"- {limit}\n" in limits for limit in manifest.known_limits)
    assert manifest.training_data_sha256 in limits
    assert manifest.zoo_sha256 in limits


def test_its_errors_are_listed_by_precision(manifest: ArtifactManifest) -> None:
    assert set(manifest.accuracy_by_precision) == set(manifest.precisions)
    methods = manifest.accuracy["configuration"]
    for method, metrics in methods.items():
        parts = [by_method[method] for by_method in manifest.accuracy_by_precision.values()]
        assert sum(part["n"] or 0.0 for part in parts) == metrics["n"] == manifest.training_rows
        mean = sum((part["n"] or 0.0) * (part["mape"] or 0.0) for part in parts) / manifest.training_rows
        assert mean == pytest.approx(metrics["mape"])


def test_its_intervals_have_their_coverage_on_every_split(manifest: ArtifactManifest) -> None:
    coverage = {split: methods["predictor"]["coverage"] for split, methods in manifest.accuracy.items()}
    # More than a quarter of the rows on many GPUs are contest entries, tuned as no row that was trained on is.
    covered = {"row", "configuration", "source-model-gpu", "leave-model-out", "leave-family-out", "leave-gpu-out",
               "scale without MLPerf"}  # fmt: skip
    assert all(0.85 <= (coverage[split] or 0.0) <= 0.95 for split in covered)
    assert (coverage["scale"] or 0.0) > 0.8


def test_it_beats_every_baseline_on_every_split(manifest: ArtifactManifest) -> None:
    for split, methods in manifest.accuracy.items():
        errors = {method: metrics["mape"] for method, metrics in methods.items()}
        assert min(errors, key=lambda method: errors[method] or math.inf) == "predictor", split


def test_a_narrower_precision_is_faster_where_tensor_cores_have_work() -> None:
    for model in ("resnet50", "vit_base_patch16_224", "bert_large"):
        times = [predict_time(model, policy, **A100).iteration_time_s for policy in ("fp32", "tf32", "amp_bf16")]
        assert times == sorted(times, reverse=True)


def test_more_work_takes_longer() -> None:
    for model in ("resnet50", "vit_b16", "bert_base"):
        times = [
            predict_time(model, "amp", gpu="A100", batch_size=batch).iteration_time_s for batch in (8, 32, 128, 512)
        ]
        assert times == sorted(times)
    plain, recomputed = (
        predict_time("gpt2", "amp_bf16", gpu="A100", batch_size=8, activation_checkpointing=kind).iteration_time_s
        for kind in ("none", "full")
    )
    assert recomputed > plain


def test_a_cpu_is_answered_by_the_closed_forms() -> None:
    estimate = predict_time("resnet50", "fp32", gpu="cpu", batch_size=32)
    assert estimate.artifact_id is None
    assert any(f"{BUNDLED} has no answer for cpu" in reason for reason in estimate.reasons)


def test_a_new_process_answers_without_any_heavy_library() -> None:
    code = (
        "import json, sys; from precision_time import predict_time; "
        "artifact = predict_time('resnet50', 'amp', gpus=8, batch_size=64).artifact_id; "
        "heavy = {'torch', 'prefect', 'dask', 'xgboost', 'pandas', 'fsspec', 'sklearn', 'scipy', 'matplotlib'}; "
        "print(json.dumps([artifact, sorted(heavy & set(sys.modules))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == [BUNDLED, []]


def test_a_new_process_without_a_network_is_answered(tmp_path: Path) -> None:
    """Every use of a socket, and every name looked up, ends the process: Python raises an audit event for each."""
    code = (
        "import os, sys\n"
        "def forbid(event, arguments):\n"
        "    if event.partition('.')[0] == 'socket': os.write(2, event.encode()); os._exit(9)\n"
        "sys.addaudithook(forbid)\n"
        "from precision_time import predict_time\n"
        "for question in ({'gpus': 8}, {'gpus': 16, 'gpu': 'H100', 'explain': True}, {'refresh': True}):\n"
        "    print(predict_time('resnet50', 'amp', batch_size=64, **question).artifact_id)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PRECISION_TIME_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [BUNDLED] * 3
