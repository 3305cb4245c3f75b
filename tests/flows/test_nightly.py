"""A night retrains once, waits for storage that is away, and fails with the reason when it stays away."""

import functools
from pathlib import Path

import pytest

from precision_time.flows.catch_up import CatchUp
from precision_time.flows.retrain_spec import NightlySpec, RetrainSpec, RollBackSpec
from precision_time.storage.errors import NotFoundError, StorageError
from precision_time.storage.local import LocalStore
from precision_time.storage.registry import Registry

pytestmark = pytest.mark.usefixtures("prefect_server")


def make_spec(folder: Path, **changes: object) -> NightlySpec:
    values = {"data": str(folder / "timings"), "registry": str(folder / "registry"), "publish_wait_s": 0.0}
    return NightlySpec.model_validate(values | changes)


@pytest.fixture
def folder(tmp_path: Path, measure, record, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recorded timings, and a quick validation that lets every challenger through."""
    from precision_time.flows import retrain
    from precision_time.tasks.gate import GateDecision
    from precision_time.tasks.validate import Validation

    validation = Validation(accuracy={}, cross_validations={}, radii={"known": 0.2}, level=0.9)
    monkeypatch.setattr(retrain, "validate_predictor", lambda snapshot, **settings: validation)
    monkeypatch.setattr(
        retrain, "judge_challenger", lambda snapshot, validation, **settings: GateDecision(passed=True, reasons=())
    )
    monkeypatch.setattr(retrain, "draw_retraining_plots", lambda *parts: {})
    monkeypatch.setattr(retrain, "write_report", lambda *parts, **settings: "# Accuracy\n")
    monkeypatch.setattr(retrain, "publish_pages", lambda **pages: None)
    record(str(tmp_path / "timings"), measure(models=("mlp",)))
    return tmp_path


def fail_writes(monkeypatch: pytest.MonkeyPatch, *, times: int) -> list[str]:
    """Let the first ``times`` writes of an artifact's trees fail as an unreachable store does; what was tried."""
    tried: list[str] = []

    def away(self: LocalStore, path: str, data: bytes, *, was) -> None:
        if path.endswith("trees.npz"):
            tried.append(path)
            if len(tried) <= times:
                raise StorageError("the file cannot be written", got=f"{path}: connection refused")
        was(self, path, data)

    monkeypatch.setattr(LocalStore, "create_bytes", functools.partialmethod(away, was=LocalStore.create_bytes))
    return tried


def test_a_night_waits_for_storage_that_comes_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from precision_time.flows.nightly import nightly_retrain

    tried = fail_writes(monkeypatch, times=2)
    result = nightly_retrain(make_spec(folder, publish_attempts=3))
    assert result.retraining is not None
    assert (result.retraining.status, result.retraining.artifact_id) == ("published", "default@1")
    assert len(tried) == 3
    assert Registry(folder / "registry").versions("default") == [1]


def test_storage_that_stays_away_fails_the_night_and_the_next_one_publishes(
    folder: Path, measure, record, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precision_time.flows.nightly import nightly_retrain

    nightly_retrain(make_spec(folder))
    record(str(folder / "timings"), measure(models=("vit_tiny",)))
    shelf = Registry(folder / "registry")
    with monkeypatch.context() as patch:
        tried = fail_writes(patch, times=100)
        state = nightly_retrain(make_spec(folder, publish_attempts=3), return_state=True)
        assert len(tried) == 3
    assert state.is_failed()
    assert "default@1 stays in use" in state.message
    assert "3 attempts" in state.message
    assert "connection refused" in state.message
    assert shelf.versions("default") == [1]
    assert shelf.aliases("default") == {"champion": 1}
    shelf.verify("default@champion")

    again = nightly_retrain(make_spec(folder))
    assert again.retraining is not None
    assert again.retraining.status == "published"
    assert shelf.aliases("default") == {"champion": shelf.versions("default")[-1]}
    assert len(shelf.versions("default")) == 2


def test_a_run_that_publishes_meanwhile_makes_the_gate_judge_again(
    folder: Path, measure, publish_made_up, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precision_time.flows import retrain

    judged: list[str | None] = []
    decide = retrain.judge_challenger

    def judge(snapshot, validation, *, champion, trained):
        judged.append(champion and champion.manifest.artifact_id)
        if len(judged) == 1:
            publish_made_up(str(folder / "registry"), measure(models=("vit_tiny",)))
        return decide(snapshot, validation)

    monkeypatch.setattr(retrain, "judge_challenger", judge)
    result = retrain.retrain_predictor(make_spec(folder).retraining())
    assert judged == [None, "default@1"]
    assert result.artifact_id == "default@2"
    assert Registry(folder / "registry").aliases("default") == {"champion": 2}


def test_a_run_that_was_caught_up_for_does_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from precision_time.flows import nightly

    asked: list[str] = []

    def skip(policy: str) -> CatchUp:
        asked.append(policy)
        return CatchUp(proceed=False, reason="another run does the work")

    monkeypatch.setattr(nightly, "apply_catch_up", skip)
    result = nightly.nightly_retrain(make_spec(folder, catch_up="none"))
    assert result.retraining is None
    assert result.catch_up.reason == "another run does the work"
    assert asked == ["none"]
    assert Registry(folder / "registry").names() == []


def test_a_roll_back_goes_one_back_or_to_a_named_version_and_says_so(tmp_path: Path, measure, publish_made_up) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    from precision_time.flows.roll_back import roll_back_predictor

    url = str(tmp_path)
    for models in (("mlp",), ("mlp", "vit_tiny"), ("mlp", "bert_mini")):
        publish_made_up(url, measure(models=models))
    result = roll_back_predictor(RollBackSpec(registry=url))
    assert (result.from_version, result.to_version) == (3, 2)
    named = roll_back_predictor(RollBackSpec(registry=url, to_version=1))
    assert (named.from_version, named.to_version) == (2, 1)
    assert Registry(url).aliases("default") == {"champion": 1}
    with get_client(sync_client=True) as client:
        pages = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["roll-back"])))
    assert any("default@champion was version 2 and is version 1" in str(page.data) for page in pages)
    with pytest.raises(NotFoundError):
        roll_back_predictor(RollBackSpec(registry=url, to_version=9))
    assert Registry(url).aliases("default") == {"champion": 1}


def test_a_nightly_spec_is_a_retraining_with_what_to_do_about_missed_nights(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, catch_up="all", holdout_models=["mlp"])
    retraining = spec.retraining()
    assert type(retraining) is RetrainSpec
    assert retraining.model_dump() == spec.model_dump(exclude={"catch_up"})


def test_a_night_with_too_little_data_ends_well_and_says_so(tmp_path: Path, measure, record) -> None:
    from precision_time.flows.nightly import nightly_retrain

    record(str(tmp_path / "timings"), measure(models=("mlp",))[:2])
    state = nightly_retrain(make_spec(tmp_path), return_state=True)
    assert state.is_completed()
    result = state.result()
    assert result.retraining.status == "too little data"
    assert "2 cells" in result.retraining.reasons[0]
    assert not Registry(tmp_path / "registry").names()
