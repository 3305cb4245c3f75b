"""Publish beside others: one at a time, only against the champion that was judged, and at most one version a run."""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.storage.errors import NotFoundError, StorageError
from precision_time.storage.exclusive import hold_exclusively
from precision_time.storage.filesystem import open_store
from precision_time.storage.manifests import ArtifactManifest, check_alias, check_name
from precision_time.storage.registry import Registry
from precision_time.storage.store import Store
from precision_time.tasks.publishing.publish import find_champion, is_trained_on, trained_rows
from precision_time.tasks.publishing.retraining_memory import Notes
from precision_time.tasks.publishing.train import Snapshot

__all__ = ["Standing", "find_standing", "publish_in_turn"]

#: Writing an artifact takes seconds; what is not done by then was stopped, and the next run may go on.
LOCK_STALE_S = 300.0
LOCK_WAIT_S = 900.0
_MAX_NOTE_BYTES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The artifact in use (None before the first), the rows that taught it (see ``trained_rows``), and in words why
    a retraining is not needed; None where it is."""

    champion: PublishedPredictor | None
    trained: Mapping[str, float | None]
    unneeded: str | None


def publish_in_turn(
    publish: Callable[..., ArtifactManifest],
    *,
    registry: str,
    name: str,
    alias: str,
    champion: PublishedPredictor | None,
    sha256: str,
    token: str,
) -> ArtifactManifest | None:
    """Publish by ``publish(after=the champion's version, else 0)`` and move ``alias``; None where it has moved.

    ``publish`` must make a version without an alias, or find the one that an earlier attempt has made. ``champion`` is
    what the gate has judged against: when ``alias`` points elsewhere by now, nothing is published and the caller judges
    again. All of it happens under a lock, so that of several runs each sees what the one before has done and an alias
    never moves to a predictor that was not compared with the one in use. ``token`` is the caller's, the same in each of
    its attempts. Raises ``StorageError`` when the store does not answer, or not in time.
    """
    store, shelf = open_store(registry), Registry(registry)
    judged = 0 if champion is None else champion.manifest.version
    with hold_exclusively(
        store, _lock_path(name, alias), token=token, stale_after_s=LOCK_STALE_S, wait_s=LOCK_WAIT_S
    ) as held_until:
        if _current(shelf, name, alias) != judged:
            return None
        # Whoever finds a version without its alias learns from this that nobody took it out of use.
        store.write_bytes(_note_path(name, alias), json.dumps({"training_data_sha256": sha256}).encode())
        manifest = publish(after=judged)
        if time.monotonic() > held_until:
            raise StorageError(
                "publishing took too long",
                got=f"{manifest.artifact_id} is written, {name}@{alias} was not moved",
                expected=f"at most {LOCK_STALE_S:g} s",
                fix="run it again: it goes on from there",
            )
        shelf.set_alias(name, alias, manifest.version)
        with contextlib.suppress(NotFoundError):
            store.remove(_note_path(name, alias))
    return manifest


def find_standing(
    snapshot: Snapshot, *, registry: str, name: str, alias: str, holdout_models: tuple[str, ...], settings_sha256: str
) -> Standing:
    """What ``name@alias`` is now, what taught it, and whether ``snapshot`` has anything for it.

    It has nothing when it made the champion, or a version that was taken out of use, or a challenger that was held
    back with the same settings (their digest is ``settings_sha256``, see ``Notes``): the gate would say the same.
    """
    champion = find_champion(registry, f"{name}@{alias}")
    withdrawn = _find_withdrawn(
        snapshot, registry=registry, name=name, alias=alias, champion=champion, holdout_models=holdout_models
    )
    held_back = Notes(registry, name=name, alias=alias).find_held_back(
        snapshot.sha256, champion=champion, settings_sha256=settings_sha256
    )
    unneeded = None
    if champion is not None and is_trained_on(champion.manifest, snapshot, holdout_models=holdout_models):
        unneeded = f"no data is new since {champion.manifest.artifact_id}"
    elif withdrawn is not None:
        unneeded = (
            f"no data is new since {withdrawn.artifact_id}, which was taken out of use: "
            f"`precision-time registry alias {name} {alias} {withdrawn.version}` brings it back"
        )
    elif held_back is not None:
        unneeded = f"held back before on the same data, because {held_back}"
    return Standing(
        champion=champion, trained={} if champion is None else trained_rows(registry, champion), unneeded=unneeded
    )


def _find_withdrawn(
    snapshot: Snapshot,
    *,
    registry: str,
    name: str,
    alias: str,
    champion: PublishedPredictor | None,
    holdout_models: tuple[str, ...],
) -> ArtifactManifest | None:
    """A version above the champion that the same data has made and that somebody took out of use, if there is one.

    To train on its data again would undo a roll back. A version whose alias could not be moved is none of these.
    """
    store, shelf = open_store(registry), Registry(registry)
    if _read_note(store, name, alias) == snapshot.sha256:
        return None
    above = 0 if champion is None else champion.manifest.version
    newer = (shelf.manifest(f"{name}@{version}") for version in shelf.versions(name) if version > above)
    same = (manifest for manifest in newer if is_trained_on(manifest, snapshot, holdout_models=holdout_models))
    return next(same, None)


def _current(shelf: Registry, name: str, alias: str) -> int:
    """The version that ``alias`` points to, 0 where there is none."""
    try:
        return shelf.resolve(f"{name}@{alias}")[1]
    except NotFoundError:
        return 0


def _read_note(store: Store, name: str, alias: str) -> str | None:
    try:
        values = json.loads(store.read_bytes(_note_path(name, alias), max_bytes=_MAX_NOTE_BYTES))
    except (NotFoundError, ValueError):
        return None
    return str(values.get("training_data_sha256")) if isinstance(values, dict) else None


def _lock_path(name: str, alias: str) -> str:
    return f"{check_name(name)}/.publishing-{check_alias(alias)}"


def _note_path(name: str, alias: str) -> str:
    return f"{check_name(name)}/.unfinished-{check_alias(alias)}"
