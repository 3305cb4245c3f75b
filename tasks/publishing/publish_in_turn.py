"""Publish while other runs may: one at a time, only against the champion that was judged, at most one version a run."""

import time
from collections.abc import Callable

from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.storage.errors import NotFoundError, StorageError
from precision_time.storage.exclusive import hold_exclusively
from precision_time.storage.filesystem import open_store
from precision_time.storage.manifests import ArtifactManifest, check_alias, check_name
from precision_time.storage.registry import Registry
from precision_time.tasks.publishing.retraining_memory import RetrainingMemory

__all__ = ["publish_in_turn"]

#: Writing an artifact takes seconds; a run that takes longer was stopped, and the next one may go on.
LOCK_STALE_S = 300.0
LOCK_WAIT_S = 900.0


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

    ``publish`` must make a version without an alias, or find the version that an earlier attempt made. ``champion`` is
    the artifact that the gate compared with: when ``alias`` points elsewhere by now, nothing is published and the
    caller judges again. All of it happens under a lock, so each of several runs sees what the run before it did, and an
    alias never moves to a predictor that was not compared with the one in use. ``token`` names the caller, the same in
    each of its attempts. Raises ``StorageError`` when the store does not answer, or not in time.
    """
    store, shelf = open_store(registry), Registry(registry)
    memory = RetrainingMemory(registry, name=name, alias=alias)
    judged_version = 0 if champion is None else champion.manifest.version
    with hold_exclusively(
        store,
        f"{check_name(name)}/.publishing-{check_alias(alias)}",
        token=token,
        stale_after_s=LOCK_STALE_S,
        wait_s=LOCK_WAIT_S,
    ) as held_until:
        if _current_version(shelf, name, alias) != judged_version:
            return None
        # A version without its alias is then known to be unfinished, not taken out of use.
        memory.remember_unfinished(sha256)
        manifest = publish(after=judged_version)
        if time.monotonic() > held_until:
            raise StorageError(
                "publishing took too long",
                got=f"{manifest.artifact_id} is written, {name}@{alias} was not moved",
                expected=f"at most {LOCK_STALE_S:g} s",
                fix="run it again: it goes on from there",
            )
        shelf.set_alias(name, alias, manifest.version)
        memory.forget_unfinished()
    return manifest


def _current_version(shelf: Registry, name: str, alias: str) -> int:
    """The version that ``alias`` points to, 0 where there is none."""
    try:
        return shelf.resolve(f"{name}@{alias}")[1]
    except NotFoundError:
        return 0
