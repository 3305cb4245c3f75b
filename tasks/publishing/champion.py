"""The champion: the predictor that an alias points to, the rows it was trained on, and whether data is new since."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from precision_time.predictor.answering.artifact import PublishedPredictor, load_artifact
from precision_time.storage.errors import IntegrityError, NotFoundError
from precision_time.storage.manifests import ArtifactManifest
from precision_time.storage.registry import Registry
from precision_time.tasks.publishing.retraining_memory import RetrainingMemory
from precision_time.tasks.publishing.snapshot import Snapshot

__all__ = [
    "OUT_OF_FOLD", "TRAINING_ROWS", "PublishedState", "find_champion", "find_published_state", "trained_cells",
    "trained_rows",
]  # fmt: skip

#: The file of an artifact that lists its training rows, and the key of their out-of-fold predictions in it.
TRAINING_ROWS, OUT_OF_FOLD = "training.json", "out_of_fold_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedState:
    """What an alias points to when a retraining looks.

    ``champion`` is None before the first publication, ``trained`` holds its rows (see ``trained_rows``).
    ``skip_reason`` says why a retraining would bring nothing new; None where it may.
    """

    champion: PublishedPredictor | None
    trained: Mapping[str, float | None]
    skip_reason: str | None


def find_champion(registry: str, reference: str) -> PublishedPredictor | None:
    """The artifact in use, or None before the first publication."""
    try:
        # By version: a process keeps what it has loaded under an alias, also after the alias has moved.
        name, version = Registry(registry).resolve(reference)
    except NotFoundError:
        return None
    return load_artifact(f"{registry.rstrip('/')}/{name}@{version}")


def trained_rows(registry: str, champion: PublishedPredictor) -> dict[str, float | None]:
    """The cells that ``champion`` was trained on, each with its out-of-fold prediction in seconds.

    That prediction is the one of the champion's method from before it was trained on the row; None where the artifact
    keeps none. Raises ``IntegrityError`` when the artifact's list cannot be read.
    """
    _, files = Registry(registry).load(champion.manifest.artifact_id)
    try:
        training = json.loads(files[TRAINING_ROWS])
        cells = [str(cell) for cell in training["cells"]]
        times = [None if time_s is None else float(time_s) for time_s in training.get(OUT_OF_FOLD, [None] * len(cells))]
        return dict(zip(cells, times, strict=True))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"{TRAINING_ROWS} of the artifact cannot be read", got=repr(error), expected="the list of trained cells"
        ) from error


def trained_cells(registry: str, champion: PublishedPredictor) -> frozenset[str]:
    """The cells that ``champion`` was trained on; raises ``IntegrityError`` when its list cannot be read."""
    return frozenset(trained_rows(registry, champion))


def find_published_state(
    snapshot: Snapshot, *, registry: str, name: str, alias: str, holdout_models: tuple[str, ...], settings_sha256: str
) -> PublishedState:
    """What ``name@alias`` points to now, the rows it was trained on, and whether ``snapshot`` brings anything new.

    It brings nothing new if the champion was trained on it, or a version that was taken out of use, or a challenger
    that the gate held back under the same settings (digest ``settings_sha256``): the gate would decide the same again.
    """
    champion = find_champion(registry, f"{name}@{alias}")
    memory = RetrainingMemory(registry, name=name, alias=alias)
    skip_reason = None
    if champion is not None and _is_trained_on(champion.manifest, snapshot, holdout_models=holdout_models):
        skip_reason = f"no data is new since {champion.manifest.artifact_id}"
    elif withdrawn := _find_withdrawn(
        snapshot, registry=registry, name=name, memory=memory, champion=champion, holdout_models=holdout_models
    ):
        skip_reason = (
            f"no data is new since {withdrawn.artifact_id}, which was taken out of use: "
            f"`precision-time registry alias {name} {alias} {withdrawn.version}` brings it back"
        )
    else:
        held_back = memory.recall_held_back(snapshot.sha256, champion=champion, settings_sha256=settings_sha256)
        if held_back is not None:
            skip_reason = f"held back before on the same data, because {held_back}"
    return PublishedState(
        champion=champion, trained={} if champion is None else trained_rows(registry, champion), skip_reason=skip_reason
    )


def _is_trained_on(manifest: ArtifactManifest, snapshot: Snapshot, *, holdout_models: tuple[str, ...]) -> bool:
    """Whether the artifact was trained on the same data with the same models held out."""
    return manifest.training_data_sha256 == snapshot.sha256 and manifest.holdout_models == list(holdout_models)


def _find_withdrawn(
    snapshot: Snapshot,
    *,
    registry: str,
    name: str,
    memory: RetrainingMemory,
    champion: PublishedPredictor | None,
    holdout_models: tuple[str, ...],
) -> ArtifactManifest | None:
    """A version above the champion that was trained on the same data and taken out of use by a roll back, if any.

    Publishing its data again would undo the roll back. An unfinished publication is not meant: its alias never moved.
    """
    if memory.is_unfinished(snapshot.sha256):
        return None
    shelf, above = Registry(registry), 0 if champion is None else champion.manifest.version
    newer = (shelf.manifest(f"{name}@{version}") for version in shelf.versions(name) if version > above)
    return next(
        (manifest for manifest in newer if _is_trained_on(manifest, snapshot, holdout_models=holdout_models)), None
    )
