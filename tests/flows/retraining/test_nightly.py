"""A night retrains once, retries while storage does not answer, and fails with the reason when it never does."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from precision_time.flows.retraining.catch_up import CatchUp
from precision_time.flows.retraining.spec import NightlySpec, RetrainSpec, RollBackSpec
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.storage.errors import NotFoundError, StorageError
from precision_time.storage.local import LocalStore
from precision_time.storage.registry import Registry

pytestmark = pytest.mark.usefixtures("prefect_server")


def make_spec(folder: Path, **changes: object) -> NightlySpec:
    values = {"data": str(folder / "timings"), "registry": str(folder / "registry"), "publish_wait_s": 0.0}
    return NightlySpec.model_validate(values | changes)


@pytest.fixture
def folder(tmp_path: Path, passing_gate: None, measure, record) -> Path:
    """Recorded timings, and a gate that lets every challenger through."""
    record(str(tmp_path / "timings"), measure(models=("mlp",)))
    return tmp_path


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events that nights send, in order."""
    from precision_time.flows.retraining import nightly, retrain

    sent: list[str] = []
    for module in (nightly, retrain):
        monkeypatch.setattr(module, "announce", lambda event, **parts: sent.append(event))
    return sent


@pytest.fixture
def hold_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After this is called the gate lets nothing through."""
    from precision_time.flows.retraining import retrain
    from precision_time.tasks.publishing.gate import GateDecision

    decision = GateDecision(passed=False, reasons=("worse on all 24 rows",))
    return lambda: monkeypatch.setattr(retrain, "judge_challenger", lambda *parts, **settings: decision)


def night(spec: NightlySpec) -> Any:
    """The result of a night that ended Completed."""
    from precision_time.flows.retraining.nightly import nightly_retrain

    state = nightly_retrain(spec, return_state=True)
    assert state.is_completed()
    return state.result()


def fail_writes(monkeypatch: pytest.MonkeyPatch, *, times: int) -> list[str]:
    """Let the first ``times`` writes of an artifact's trees fail like an unreachable store; returns the attempts."""
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
    from precision_time.flows.retraining.nightly import nightly_retrain

    tried = fail_writes(monkeypatch, times=2)
    result = nightly_retrain(make_spec(folder, publish_attempts=3))
    assert result.retraining is not None
    assert (result.retraining.status, result.retraining.artifact_id) == ("published", "default@1")
    assert len(tried) == 3
    assert Registry(folder / "registry").versions("default") == [1]


def test_storage_that_stays_away_fails_the_night_and_the_next_one_publishes(
    folder: Path, measure, record, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precision_time.flows.retraining.nightly import nightly_retrain

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


@pytest.mark.slow
def test_a_night_that_is_held_back_ends_well_with_its_reason_and_the_same_data_is_not_judged_again(
    folder: Path, measure, record, hold_back, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from precision_time.flows.retraining import retrain

    night(make_spec(folder))
    record(str(folder / "timings"), measure(models=("vit_tiny",)))
    with monkeypatch.context() as patch:
        decide = retrain.judge_challenger
        hold_back()
        held_back = night(make_spec(folder)).retraining
        assert (held_back.status, held_back.artifact_id) == ("held back", "default@1")
        assert held_back.reasons == ["worse on all 24 rows"]

        trained: list[object] = []
        fit = HierarchicalPredictor.fit
        patch.setattr(
            HierarchicalPredictor, "fit", lambda *rows, **settings: trained.append(rows) or fit(*rows, **settings)
        )
        for _ in range(2):
            again = night(make_spec(folder)).retraining
            assert (again.status, again.artifact_id) == ("nothing new", "default@1")
            assert again.reasons == ["held back before on the same data, because worse on all 24 rows"]
        assert trained == []
        assert events[2:] == ["held-back", "night-ended"] + 2 * ["nothing-new", "night-ended"]
        assert night(make_spec(folder, seed=1)).retraining.status == "held back"
        assert len(trained) == 1

    monkeypatch.setattr(retrain, "judge_challenger", decide)
    record(str(folder / "timings"), measure(models=("bert_mini",)))
    assert night(make_spec(folder)).retraining.artifact_id == "default@2"
    assert Registry(folder / "registry").aliases("default") == {"champion": 2}


def test_a_registry_that_takes_no_note_does_not_fail_a_night_that_is_held_back(
    folder: Path, hold_back, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_back()

    def refuse(self: LocalStore, path: str, data: bytes) -> None:
        raise StorageError("the file cannot be written", got=path)

    monkeypatch.setattr(LocalStore, "write_bytes", refuse)
    assert [night(make_spec(folder)).retraining.status for _ in range(2)] == ["held back", "held back"]


@pytest.mark.slow
def test_a_drift_is_told_by_one_event_until_other_rows_drift(
    folder: Path, measure, record, hold_back, events: list[str]
) -> None:
    def slow_down(seed: int) -> list[Any]:
        rows = measure(models=("mlp",), seed=seed)
        return [dataclasses.replace(row, iteration_time_s=3 * row.iteration_time_s) for row in rows]

    night(make_spec(folder))
    hold_back()
    for seed in (3, 4):
        record(str(folder / "timings"), slow_down(seed))
        for _ in range(2):
            assert night(make_spec(folder)).retraining.drift["verdict"] == "drifting"
    assert events.count("drifting") == 2
    # Other settings make another challenger, but the drift of these rows was already reported.
    assert night(make_spec(folder, seed=1)).retraining.drift["verdict"] == "drifting"
    assert events.count("drifting") == 2


def test_an_artifact_that_is_in_use_for_too_long_is_told_of_each_night(folder: Path, events: list[str]) -> None:
    assert night(make_spec(folder)).stale is None
    assert "stale" not in events
    old = night(make_spec(folder, stale_after_days=1e-6))
    assert old.retraining.status == "nothing new"
    assert old.stale.startswith("stale: default@1 is in use and was published 0.0 days ago, more than 1e-06")
    assert events.count("stale") == 1
    assert "stale" in night(make_spec(folder, stale_after_days=1e-6)).stale


def test_a_predictor_that_never_came_to_be_is_stale_too(tmp_path: Path, measure, record, events: list[str]) -> None:
    from prefect.client.orchestration import get_client
    from prefect.flow_engine import run_flow

    from precision_time.flows.retraining.nightly import nightly_retrain

    record(str(tmp_path / "timings"), measure(models=("mlp",))[:2])
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(nightly_retrain), "never")
        warnings = []
        for days in (30.0, 1e-6):
            run = client.create_flow_run_from_deployment(deployment)
            spec = make_spec(tmp_path, stale_after_days=days)
            warnings.append(run_flow(nightly_retrain, flow_run=run, parameters={"spec": spec}).stale)
        client.delete_deployment(deployment)
    assert warnings[0] is None
    never_published = "stale: default@champion was never published, and its retraining was set up 0.0 days ago"
    assert warnings[1].startswith(never_published)
    assert events == ["too-little-data", "night-ended", "too-little-data", "stale", "night-ended"]


def test_the_name_of_a_night_is_not_that_of_a_retraining_by_hand(tmp_path: Path, measure, record) -> None:
    from prefect.client.orchestration import get_client

    from precision_time.flows.retraining.nightly import nightly_retrain
    from precision_time.flows.retraining.retrain import retrain_predictor

    record(str(tmp_path / "timings"), measure(models=("mlp",))[:2])
    spec = make_spec(tmp_path)
    states = [nightly_retrain(spec, return_state=True), retrain_predictor(spec.retraining(), return_state=True)]
    with get_client(sync_client=True) as client:
        names = [client.read_flow_run(state.state_details.flow_run_id).name for state in states]
    assert names == ["nightly retrain default", "retrain default"]


def test_a_run_that_publishes_meanwhile_makes_the_gate_judge_again(
    folder: Path, measure, publish_made_up, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precision_time.flows.retraining import retrain

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
    from precision_time.flows.retraining import nightly

    policies: list[str] = []

    def skip(policy: str) -> CatchUp:
        policies.append(policy)
        return CatchUp(proceed=False, reason="another run does the work")

    monkeypatch.setattr(nightly, "apply_catch_up", skip)
    result = nightly.nightly_retrain(make_spec(folder, catch_up="none"))
    assert result.retraining is None
    assert result.catch_up.reason == "another run does the work"
    assert policies == ["none"]
    assert Registry(folder / "registry").names() == []


def test_a_roll_back_goes_one_back_or_to_a_named_version_and_says_so(tmp_path: Path, measure, publish_made_up) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

    from precision_time.flows.retraining.roll_back import roll_back_predictor

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
    spec = make_spec(tmp_path, catch_up="all", holdout_models=["mlp"], stale_after_days=7)
    retraining = spec.retraining()
    assert type(retraining) is RetrainSpec
    assert retraining.model_dump() == spec.model_dump(exclude={"catch_up", "stale_after_days"})
    assert make_spec(tmp_path).stale_after_days == 30
    form = NightlySpec.model_json_schema()["properties"]["stale_after_days"]
    assert form["title"] == "Stale after"
    with pytest.raises(ValueError, match="greater than 0"):
        make_spec(tmp_path, stale_after_days=0)


def test_a_night_with_too_little_data_ends_well_and_says_so(tmp_path: Path, measure, record) -> None:
    from precision_time.flows.retraining.nightly import nightly_retrain

    record(str(tmp_path / "timings"), measure(models=("mlp",))[:2])
    state = nightly_retrain(make_spec(tmp_path), return_state=True)
    assert state.is_completed()
    result = state.result()
    assert result.retraining.status == "too little data"
    assert "2 cells" in result.retraining.reasons[0]
    assert not Registry(tmp_path / "registry").names()
