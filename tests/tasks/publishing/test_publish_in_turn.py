"""Publishing while others do: one version per run, only against the champion that was judged, and safe to repeat."""

import functools
import threading
from pathlib import Path

import pytest

from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.rows.observations import observe
from precision_time.storage.errors import StorageError
from precision_time.storage.registry import Registry
from precision_time.tasks.publishing import publish_in_turn as publication
from precision_time.tasks.publishing.champion import PublishedState, find_published_state
from precision_time.tasks.publishing.publish import publish_predictor
from precision_time.tasks.publishing.publish_in_turn import publish_in_turn
from precision_time.tasks.publishing.retraining_memory import RetrainingMemory
from precision_time.tests.tasks.publishing.made_up import NOT_VALIDATED, make_snapshot

MODELS = ("mlp", "vit_tiny", "bert_mini")


_fitted: dict[int, HierarchicalPredictor] = {}


def fit(observations) -> HierarchicalPredictor:
    """A predictor, fitted once per number of rows: these tests are about publishing it."""
    if len(observations) not in _fitted:
        _fitted[len(observations)] = HierarchicalPredictor.fit(observations)
    return _fitted[len(observations)]


class Night:
    """A retraining that has passed the gate against the champion of its start."""

    def __init__(self, url: Path, rows, sha256: str, token: str) -> None:
        self.url, self.token = str(url), token
        observations = tuple(observe(rows))
        self.predictor = fit(observations)
        self.snapshot = make_snapshot(observations, sha256=sha256 * 64)
        self.state = self.look_up()

    def look_up(self) -> PublishedState:
        return find_published_state(
            self.snapshot, registry=self.url, name="default", alias="champion", holdout_models=(),
            settings_sha256="told",
        )  # fmt: skip

    def hold_back(self) -> None:
        RetrainingMemory(self.url, name="default", alias="champion").remember_held_back(
            self.snapshot.sha256, champion=self.state.champion, settings_sha256="told", reasons=("worse", "slower")
        )

    def publish(self):
        publish = functools.partial(
            publish_predictor,
            self.predictor,
            self.snapshot,
            NOT_VALIDATED,
            report="card",
            registry=self.url,
            name="default",
            holdout_models=(),
            seed=0,
        )
        return publish_in_turn(
            publish, registry=self.url, name="default", alias="champion", champion=self.state.champion,
            sha256=self.snapshot.sha256, token=self.token,
        )  # fmt: skip


@pytest.fixture(scope="module")
def rows(measure):
    return measure(models=MODELS)


def test_two_at_once_publish_one_after_the_other_and_the_second_judges_again(tmp_path: Path, rows) -> None:
    nights = [Night(tmp_path, rows[:24], "a", "first"), Night(tmp_path, rows, "b", "second")]
    published: dict[str, object] = {}

    def work(night: Night) -> None:
        published[night.token] = night.publish()

    threads = [threading.Thread(target=work, args=(night,)) for night in nights]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    shelf = Registry(tmp_path)
    assert shelf.versions("default") == [1]
    assert shelf.aliases("default") == {"champion": 1}
    (overtaken,) = [night for night in nights if published[night.token] is None]
    overtaken.state = overtaken.look_up()
    assert overtaken.state.skip_reason is None
    assert overtaken.publish().version == 2
    assert shelf.versions("default") == [1, 2]
    assert shelf.aliases("default") == {"champion": 2}
    assert {path.name for path in (tmp_path / "default").iterdir() if path.name.startswith(".")} == set()


def test_two_of_the_same_data_make_one_version(tmp_path: Path, rows) -> None:
    first, second = Night(tmp_path, rows, "a", "first"), Night(tmp_path, rows, "a", "second")
    assert first.publish().version == 1
    assert second.publish() is None
    assert second.look_up().skip_reason == "no data is new since default@1"
    assert Registry(tmp_path).versions("default") == [1]


@pytest.mark.parametrize("broken", ["trees.npz", "manifest.json", "champion.json"])
def test_a_store_that_fails_in_the_middle_leaves_the_champion_and_one_version_after_another_try(
    tmp_path: Path, rows, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precision_time.storage.local import LocalStore

    Night(tmp_path, rows[:24], "a", "first").publish()
    night = Night(tmp_path, rows, "b", "second")

    def away(self: LocalStore, path: str, data: bytes, *, was) -> None:
        if path.endswith(broken):
            raise StorageError("the file cannot be written", got=path)
        was(self, path, data)

    with monkeypatch.context() as patch:
        for name in ("write_bytes", "create_bytes"):
            patch.setattr(LocalStore, name, functools.partialmethod(away, was=getattr(LocalStore, name)))
        for _ in range(2):
            with pytest.raises(StorageError):
                night.publish()
    shelf = Registry(tmp_path)
    assert shelf.aliases("default") == {"champion": 1}
    for version in shelf.versions("default"):
        shelf.verify(f"default@{version}")

    next_night = Night(tmp_path, rows, "b", "third")
    assert next_night.state.skip_reason is None
    manifest = next_night.publish()
    assert shelf.aliases("default") == {"champion": manifest.version}
    assert shelf.versions("default") == [1, manifest.version]


def test_a_night_after_a_roll_back_does_not_undo_it(tmp_path: Path, rows) -> None:
    Night(tmp_path, rows[:24], "a", "first").publish()
    Night(tmp_path, rows, "b", "second").publish()
    Registry(tmp_path).roll_back("default")
    skip_reason = Night(tmp_path, rows, "b", "third").state.skip_reason
    assert skip_reason is not None
    assert "since default@2, which was taken out of use" in skip_reason
    assert Night(tmp_path, rows, "c", "fourth").state.skip_reason is None


def test_what_was_held_back_is_not_judged_again_until_something_that_the_gate_sees_differs(
    tmp_path: Path, rows
) -> None:
    Night(tmp_path, rows[:24], "a", "first").publish()
    held_back = Night(tmp_path, rows, "b", "second")
    assert held_back.state.skip_reason is None
    held_back.hold_back()
    assert held_back.look_up().skip_reason == "held back before on the same data, because worse; slower"
    assert Night(tmp_path, rows, "c", "of other data").state.skip_reason is None

    Night(tmp_path, rows, "c", "another champion").publish()
    assert held_back.look_up().skip_reason is None


def test_before_the_first_version_too_what_was_held_back_is_not_judged_again(tmp_path: Path, rows) -> None:
    night = Night(tmp_path, rows, "a", "first")
    night.hold_back()
    skip_reason = night.look_up().skip_reason
    assert skip_reason is not None
    assert "held back before" in skip_reason
    assert Registry(tmp_path).names() == []


def test_what_takes_longer_than_the_lock_holds_does_not_move_the_alias(
    tmp_path: Path, rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication, "LOCK_STALE_S", -1.0)
    with pytest.raises(StorageError, match="publishing took too long"):
        Night(tmp_path, rows, "a", "first").publish()
    assert Registry(tmp_path).aliases("default") == {}
