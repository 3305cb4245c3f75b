"""Put a validated predictor into the registry, with what a later reader and a later gate must know."""

import contextlib
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path

from precision_time.predictor.answering.artifact import (
    SERVING_FILES,
    WALKS,
    PublishedPredictor,
    load_artifact,
    pack_artifact,
    zoo_digest,
)
from precision_time.predictor.answering.question import DEFAULT_GPU
from precision_time.predictor.learning.boosting import choose_parameters
from precision_time.predictor.learning.hierarchy import STAGE_FEATURES, HierarchicalPredictor
from precision_time.predictor.workloads.zoo import pack_entries
from precision_time.storage.errors import InputError, IntegrityError, NotFoundError
from precision_time.storage.filesystem import open_store
from precision_time.storage.manifests import (
    MANIFEST,
    ArtifactFile,
    ArtifactManifest,
    check_name,
    list_contents,
    pack_manifest,
    seal_manifest,
)
from precision_time.storage.registry import Registry
from precision_time.tasks.publishing.accuracy_card import complete_card, drop_plots, list_limits, place_plots
from precision_time.tasks.publishing.train import Snapshot
from precision_time.tasks.publishing.validate import Validation

__all__ = [
    "ACCURACY_CARD", "MAX_BUNDLE_BYTES", "export_bundle", "find_champion", "is_trained_on", "publish_predictor",
    "trained_cells", "trained_rows",
]  # fmt: skip

#: How well the predictor did, for people.
ACCURACY_CARD = "report.md"
#: What taught the predictor, for later gates.
TRAINING_ROWS = "training.json"
_OUT_OF_FOLD = "out_of_fold_s"
#: What a bundle may weigh: it travels with every installation.
MAX_BUNDLE_BYTES = 5 * 10**6
#: Fields of a manifest that differ between two artifacts that answer alike.
_OCCASION = {"version", "created_at", "package_versions", "manifest_sha256"}
_RECORDED_PACKAGES = ("precision-time", "numpy", "pyarrow", "xgboost-cpu")


def find_champion(registry: str, reference: str) -> PublishedPredictor | None:
    """The artifact in use, or None before the first publication."""
    try:
        # By version: an alias that was loaded once stays what it was for the life of this process.
        name, version = Registry(registry).resolve(reference)
    except NotFoundError:
        return None
    return load_artifact(f"{registry.rstrip('/')}/{name}@{version}")


def is_trained_on(manifest: ArtifactManifest, snapshot: Snapshot, *, holdout_models: tuple[str, ...]) -> bool:
    """Whether the same data, with the same models held out, has made the artifact: nothing new could come of it."""
    return manifest.training_data_sha256 == snapshot.sha256 and manifest.holdout_models == list(holdout_models)


def trained_rows(registry: str, champion: PublishedPredictor) -> dict[str, float | None]:
    """The cells whose rows ``champion`` learned from, each with its out-of-fold prediction in seconds.

    That is what the champion's method said to the row before it had learned from it; None where the artifact keeps
    none. Raises ``IntegrityError`` when its list cannot be read.
    """
    _, files = Registry(registry).load(champion.manifest.artifact_id)
    try:
        training = json.loads(files[TRAINING_ROWS])
        cells = [str(cell) for cell in training["cells"]]
        told = training.get(_OUT_OF_FOLD, [None] * len(cells))
        times = [None if time_s is None else float(time_s) for time_s in told]
        return dict(zip(cells, times, strict=True))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"{TRAINING_ROWS} of the artifact cannot be read", got=repr(error), expected="the list of trained cells"
        ) from error


def trained_cells(registry: str, champion: PublishedPredictor) -> frozenset[str]:
    """The cells whose rows ``champion`` learned from; raises ``IntegrityError`` when its list cannot be read."""
    return frozenset(trained_rows(registry, champion))


def _list_training_rows(snapshot: Snapshot, validation: Validation) -> bytes:
    folds = validation.cross_validations.get("configuration")
    times: dict[str, float] = {}
    if folds is not None:
        times = {
            snapshot.training[row].measurement.cell_id: float(f"{time_s:.6g}")
            for row, time_s in zip(folds.rows, folds.predicted_s["predictor"], strict=True)
        }
    cells = sorted(seen.measurement.cell_id for seen in snapshot.training)
    rows = {"cells": cells, _OUT_OF_FOLD: [times.get(cell) for cell in cells], "sha256": snapshot.sha256}
    return (json.dumps(rows) + "\n").encode()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _choose_default_gpu(snapshot: Snapshot) -> str:
    """The device that campaigns measured most; tables of others say nothing about whose question it will be."""
    names = [seen.measurement.gpu for seen in snapshot.training if seen.index < 0]
    if not names:
        names = [seen.measurement.gpu for seen in snapshot.training]
        if DEFAULT_GPU in names:
            return DEFAULT_GPU
    return max(sorted(set(names)), key=names.count)


def publish_predictor(
    predictor: HierarchicalPredictor,
    snapshot: Snapshot,
    validation: Validation,
    *,
    report: str,
    registry: str,
    name: str,
    alias: str | None,
    holdout_models: tuple[str, ...],
    seed: int,
    after: int | None = None,
    plots: Mapping[str, bytes] | None = None,
) -> ArtifactManifest:
    """Publish files, manifest, then ``alias`` (None: no alias moves); the version is the next free one.

    With ``after``, a version above it that has exactly these files is taken as it is: an earlier attempt made it.

    The artifact holds the flat trees and XGBoost's JSON, the cards of models and devices that campaigns measured and
    the package does not ship, the zoo's walks of what was trained on, ``report`` with the known limits, the training
    rows, and ``plots`` (PNG or SVG by file name).
    """
    limits = list_limits(predictor, holdout_models=holdout_models)
    walks = pack_entries(seen.measurement.model for seen in snapshot.training)
    files = pack_artifact(predictor, workloads=snapshot.workloads, hardware=snapshot.hardware) | {
        **({} if walks is None else {WALKS: walks}),
        TRAINING_ROWS: _list_training_rows(snapshot, validation),
        ACCURACY_CARD: complete_card(report, limits=limits, data_sha256=snapshot.sha256).encode(),
        **place_plots(plots or {}),
    }

    def describe(version: int, listed: tuple[ArtifactFile, ...]) -> ArtifactManifest:
        return ArtifactManifest(
            name=name,
            version=version,
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            files=listed,
            feature_names={stage: list(STAGE_FEATURES[stage]) for stage in predictor.forests},
            hardware=list(predictor.domain.gpus),
            default_gpu=_choose_default_gpu(snapshot),
            precisions=list(predictor.domain.precisions),
            training_data_sha256=snapshot.sha256,
            training_rows=len(snapshot.training),
            training_configurations=len({seen.measurement.configuration for seen in snapshot.training}),
            holdout_models=list(holdout_models),
            seed=seed,
            parameters=choose_parameters(len(snapshot.training)),
            accuracy=validation.accuracy,
            accuracy_by_precision=validation.by_precision,
            package_versions=_versions(),
            zoo_sha256=zoo_digest(),
            known_limits=limits,
        )

    shelf = Registry(registry)
    made = None if after is None else _find_same(shelf, name, files, after=after)
    if made is None:
        return shelf.publish(name, files, describe=describe, alias=alias)
    if alias is not None:
        shelf.set_alias(name, alias, made.version)
    return made


def _find_same(shelf: Registry, name: str, files: Mapping[str, bytes], *, after: int) -> ArtifactManifest | None:
    listed = list_contents(files)
    newer = (shelf.manifest(f"{name}@{version}") for version in shelf.versions(name) if version > after)
    return next((manifest for manifest in newer if manifest.files == listed), None)


def export_bundle(registry: str, reference: str, *, into: str | Path) -> ArtifactManifest:
    """Put what of a published artifact answers questions into the folder ``into``, under a manifest of its own.

    The bundle is called like the folder and lies in ``<into>/<version>/``, so the parent folder reads as a registry;
    models in XGBoost's own form, plots, walks (the zoo lies beside it) and the list of training rows stay behind. One
    that is there already is kept when the new one would differ in its version, time and packages only, and else
    replaced by the next version.

    Raises ``NotFoundError`` for an unknown reference, ``IntegrityError`` for an artifact that is not what was
    published, ``InputError`` above ``MAX_BUNDLE_BYTES`` and for a folder in which a registry keeps its versions.
    """
    folder = Path(into).expanduser().resolve()
    name = check_name(folder.name)
    source, files = Registry(registry).load(reference)
    files = {path: data for path, data in files.items() if path in {*SERVING_FILES, ACCURACY_CARD} - {WALKS}}
    if ACCURACY_CARD in files:
        files[ACCURACY_CARD] = drop_plots(files[ACCURACY_CARD].decode()).encode()
    shelf = Registry(folder.parent)
    earlier = shelf.versions(name)
    if len(earlier) > 1 or shelf.aliases(name):
        raise InputError(
            "a registry keeps versions in this folder",
            got=f"{folder}: {len(earlier)} versions",
            expected="a folder for one bundle and nothing else",
        )
    version = max(earlier, default=0) + 1
    listed = list_contents(files)
    manifest = seal_manifest(source.model_copy(update={"name": name, "version": version, "files": listed}))
    document = pack_manifest(manifest, name=name, version=version, files=listed)
    size = len(document) + sum(file.size_bytes for file in listed)
    if size > MAX_BUNDLE_BYTES:
        raise InputError(
            "the bundle is too large to come with the package",
            got=f"{size} bytes",
            expected=f"at most {MAX_BUNDLE_BYTES} bytes",
            fix="grow fewer or shallower trees",
        )
    for old in earlier:
        # A damaged one is replaced like one of other content.
        with contextlib.suppress(IntegrityError):
            standing = shelf.verify(f"{name}@{old}")
            if standing.model_dump(exclude=_OCCASION) == manifest.model_dump(exclude=_OCCASION):
                return standing
    store = open_store(folder)
    for path, data in sorted(files.items()):
        store.write_bytes(f"{version}/{path}", data)
    store.write_bytes(f"{version}/{MANIFEST}", document)
    for old in earlier:
        for path in store.list_files(str(old)):
            store.remove(path)
        with contextlib.suppress(OSError):
            (folder / str(old)).rmdir()
    return shelf.verify(f"{name}@{version}")
