"""Put a validated predictor into the registry, with what a later reader and a later gate must know."""

import datetime
import importlib.metadata
import json
import platform

from precision_time.predictor.artifact import PublishedPredictor, load_artifact, pack_artifact
from precision_time.predictor.hierarchy import PARAMETERS, STAGE_FEATURES, HierarchicalPredictor
from precision_time.storage.errors import IntegrityError, NotFoundError
from precision_time.storage.registry import Registry
from precision_time.storage.schema import ArtifactFile, ArtifactManifest
from precision_time.tasks.train import Snapshot
from precision_time.tasks.validate import Validation

__all__ = ["find_champion", "is_trained_on", "publish_predictor", "trained_cells"]

_RECORDED_PACKAGES = ("precision-time", "numpy", "pyarrow", "xgboost-cpu")


def find_champion(registry: str, reference: str) -> PublishedPredictor | None:
    """The artifact in use, or None before the first publication."""
    try:
        # By version: an alias that was loaded once stays what it was for the life of this process.
        name, version = Registry(registry).resolve(reference)
    except NotFoundError:
        return None
    return load_artifact(f"{registry.rstrip('/')}/{name}@{version}")


def is_trained_on(champion: PublishedPredictor, snapshot: Snapshot, *, holdout_models: tuple[str, ...]) -> bool:
    """Whether the same data, with the same models held out, has made ``champion``: nothing new could come of it."""
    manifest = champion.manifest
    return manifest.training_data_sha256 == snapshot.sha256 and manifest.holdout_models == list(holdout_models)


def trained_cells(registry: str, champion: PublishedPredictor) -> frozenset[str]:
    """The cells whose rows ``champion`` learned from; raises ``IntegrityError`` when its list cannot be read."""
    _, files = Registry(registry).load(champion.manifest.artifact_id)
    try:
        return frozenset(str(cell) for cell in json.loads(files["training.json"])["cells"])
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            "training.json of the artifact cannot be read", got=repr(error), expected="the list of trained cells"
        ) from error


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _most_measured_gpu(snapshot: Snapshot) -> str:
    names = [seen.measurement.gpu for seen in snapshot.training]
    return max(sorted(set(names)), key=names.count)


def publish_predictor(
    predictor: HierarchicalPredictor,
    snapshot: Snapshot,
    validation: Validation,
    *,
    report: str,
    registry: str,
    name: str,
    alias: str,
    holdout_models: tuple[str, ...],
    seed: int,
) -> ArtifactManifest:
    """Publish files, manifest, then ``alias``; the version is the next free one."""
    cells = sorted(seen.measurement.cell_id for seen in snapshot.training)
    files = pack_artifact(predictor, workloads=snapshot.workloads, hardware=snapshot.hardware) | {
        "training.json": (json.dumps({"cells": cells, "sha256": snapshot.sha256}) + "\n").encode(),
        "report.md": report.encode(),
    }

    def describe(version: int, listed: tuple[ArtifactFile, ...]) -> ArtifactManifest:
        return ArtifactManifest(
            name=name,
            version=version,
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            files=listed,
            feature_names={stage: list(STAGE_FEATURES[stage]) for stage in predictor.forests},
            hardware=list(predictor.domain.gpus),
            default_gpu=_most_measured_gpu(snapshot),
            precisions=list(predictor.domain.precisions),
            training_data_sha256=snapshot.sha256,
            training_rows=len(snapshot.training),
            training_configurations=len({seen.measurement.configuration for seen in snapshot.training}),
            holdout_models=list(holdout_models),
            seed=seed,
            parameters=PARAMETERS,
            accuracy=validation.accuracy,
            package_versions=_versions(),
        )

    return Registry(registry).publish(name, files, describe=describe, alias=alias)
