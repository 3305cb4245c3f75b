"""Retraining publishes what passes the gate, keeps the champion otherwise, and says why; both runs end well."""

import json
from pathlib import Path

import pytest

from precision_time.flows.retraining.spec import RetrainSpec
from precision_time.predictor.answering.artifact import load_artifact
from precision_time.predictor.api import predict_time
from precision_time.storage.errors import InputError, UnknownNameError
from precision_time.storage.registry import Registry

pytestmark = pytest.mark.usefixtures("prefect_server")

MODELS = ("mlp", "vit_tiny", "bert_mini", "gpt2_mini")


def make_spec(folder: Path, **changes: object) -> RetrainSpec:
    values = {"data": str(folder / "timings"), "registry": str(folder / "registry"), "holdout_models": ["gpt2_mini"]}
    return RetrainSpec.model_validate(values | changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, measure, record) -> Path:
    folder = tmp_path_factory.mktemp("retrain")
    record(str(folder / "timings"), measure(models=MODELS))
    return folder


@pytest.fixture(scope="module")
def first(folder, prefect_server):
    from precision_time.flows.retraining.retrain import run_retraining

    return run_retraining(make_spec(folder))


def test_a_first_retraining_publishes_and_the_artifact_answers(folder, first) -> None:
    assert first.status == "published"
    assert first.artifact_id == "default@1"
    assert Registry(str(folder / "registry")).aliases("default") == {"champion": 1}
    estimate = predict_time("mlp", "fp32", batch_size=16, artifact=f"{folder / 'registry'}/default@champion")
    assert estimate.artifact_id == "default@1"
    assert estimate.regime == "known"
    assert estimate.gpu == "A100-SXM4-80GB"


def test_the_manifest_and_report_carry_accuracy_baselines_and_what_was_held_out(folder, first) -> None:
    manifest, files = Registry(str(folder / "registry")).load("default@1")
    assert manifest.holdout_models == ["gpt2_mini"]
    assert manifest.training_data_sha256 == first.training_data_sha256
    assert {"configuration", "source-model-gpu", "leave-family-out", "precision-transfer"} < set(manifest.accuracy)
    assert set(manifest.accuracy_by_precision) == {"fp32", "amp_bf16"}
    assert set(manifest.accuracy["holdout"]) == {"predictor", "precision_blind", "roofline", "closed_form"}
    trained = json.loads(files["training.json"])["cells"]
    assert len(trained) == manifest.training_rows == first.rows == 36
    assert b"held-out models | predictor" in files["report.md"]
    assert files["plots/predicted.png"].startswith(b"\x89PNG")
    assert files["plots/precision.png"].startswith(b"\x89PNG")
    assert "gpt2_mini" not in load_artifact(f"{folder / 'registry'}/default@1").predictor.domain.networks


def test_the_same_data_again_has_nothing_new(folder, first) -> None:
    from precision_time.flows.retraining.retrain import run_retraining

    again = run_retraining(make_spec(folder))
    assert again.status == "nothing new"
    assert again.artifact_id == "default@1"
    assert again.accuracy == first.accuracy
    assert Registry(str(folder / "registry")).versions("default") == [1]


def test_a_challenger_that_fails_the_gate_leaves_the_champion(tmp_path, measure, record) -> None:
    from precision_time.flows.retraining.retrain import run_retraining

    record(str(tmp_path / "timings"), measure(models=("mlp", "vit_tiny"), noise=2.0))
    result = run_retraining(make_spec(tmp_path, holdout_models=[]))
    assert result.status == "held back"
    assert result.artifact_id is None
    assert Registry(str(tmp_path / "registry")).names() == []


def test_the_page_of_the_run_has_a_table_a_report_and_full_progress(first) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    keys = ["retrain-accuracy", "retrain-accuracy-report", "retrain-progress"]
    with get_client(sync_client=True) as client:
        artifacts = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=keys)))
    assert {artifact.key: artifact.type for artifact in artifacts} == {
        "retrain-accuracy": "table",
        "retrain-accuracy-report": "markdown",
        "retrain-progress": "progress",
    }


def test_damaged_timings_are_named_and_too_few_cells_are_refused(tmp_path, measure, record) -> None:
    from precision_time.flows.retraining.retrain import run_retraining

    record(str(tmp_path / "timings"), measure(models=("mlp",)))
    damaged = next((tmp_path / "timings").rglob("cell-*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-40])
    with pytest.raises(InputError, match="11 cells"):
        run_retraining(make_spec(tmp_path, holdout_models=[]))
    record(str(tmp_path / "timings"), measure(models=("vit_tiny",)))
    result = run_retraining(make_spec(tmp_path, holdout_models=[]))
    assert result.rows == 23
    assert [line for line in result.left_out if damaged.name in line]


def test_no_data_and_an_unknown_model_to_hold_out_are_refused_before_the_run(folder, first, tmp_path) -> None:
    from precision_time.flows.retraining.retrain import run_retraining

    with pytest.raises(InputError, match="no measurements"):
        run_retraining(make_spec(tmp_path, holdout_models=[]))
    with pytest.raises(UnknownNameError, match="vit_tiny"):
        run_retraining(make_spec(folder, holdout_models=["vit_tinny"]))


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> str:
    """Every sixtieth row of the shipped table, as a file."""
    from precision_time.predictor.rows.public_table import shipped_measurements
    from precision_time.storage.tables import write_table

    path = str(tmp_path_factory.mktemp("table") / "some.parquet")
    write_table(path, shipped_measurements().iloc[::60])
    return path


@pytest.mark.usefixtures("passing_gate")
def test_tables_and_timings_make_one_artifact_and_new_cells_a_new_one(tmp_path, table, measure, record) -> None:
    from precision_time.flows.retraining.retrain import run_retraining

    registry = Registry(str(tmp_path / "registry"))
    public = make_spec(tmp_path, data=None, measurements=table, holdout_models=["resnet50"])
    result = run_retraining(public)
    assert (result.status, result.artifact_id) == ("published", "default@1")
    assert any("rows are set aside" in line for line in result.left_out)
    manifest, files = registry.load("default@1")
    assert manifest.holdout_models == ["resnet50"]
    assert not {"workloads.json", "hardware.json"} & set(files)
    assert run_retraining(public).status == "nothing new"

    record(str(tmp_path / "timings"), measure(models=("mlp",)))
    both = run_retraining(make_spec(tmp_path, measurements=table, holdout_models=["resnet50"]))
    assert both.rows == result.rows + 12
    cells = [set(json.loads(registry.load(f"default@{version}")[1]["training.json"])["cells"]) for version in (1, 2)]
    assert cells[0] < cells[1]
    assert len(cells[1] - cells[0]) == 12


@pytest.mark.usefixtures("passing_gate")
def test_the_command_exports_what_is_in_use(tmp_path, table, capsys) -> None:
    from precision_time.__main__ import run

    command = [
        "retrain", "--measurements", table, "--registry", str(tmp_path / "registry"),
        "--export", str(tmp_path / "shipped" / "bundled"),
    ]  # fmt: skip
    assert run(command) == 0
    assert "exported default@1 as bundled@1" in capsys.readouterr().err
    exported = {path.name for path in (tmp_path / "shipped" / "bundled" / "1").iterdir()}
    assert exported == {"manifest.json", "predictor.json", "trees.npz", "report.md"}
    assert run([*command, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == "nothing new"
    assert "exported default@1 as bundled@1" in captured.err


def test_a_retraining_on_nothing_is_bad_input(tmp_path, capsys) -> None:
    from precision_time.__main__ import run

    assert run(["retrain", "--registry", str(tmp_path)]) == 2
    assert "nothing to train on" in capsys.readouterr().err
