"""Put a validated predictor into the registry with its accuracy card and training rows, or export it as a bundle."""

import contextlib
import datetime
import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from precision_time.predictor.answering.artifact import SERVING_FILES, WALKS, pack_artifact, zoo_digest
from precision_time.predictor.answering.question import DEFAULT_GPU
from precision_time.predictor.learning.boosting import choose_parameters
from precision_time.predictor.learning.hierarchy import STAGE_FEATURES, HierarchicalPredictor
from precision_time.predictor.learning.regimes import REGIMES
from precision_time.predictor.setup.hardware import known_hardware
from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.predictor.workloads.zoo import pack_entries, zoo_names
from precision_time.storage.errors import InputError, IntegrityError
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
from precision_time.tasks.publishing.champion import OUT_OF_FOLD, TRAINING_ROWS
from precision_time.tasks.publishing.snapshot import Snapshot
from precision_time.tasks.publishing.validate import Validation

__all__ = ["ACCURACY_CARD", "MAX_BUNDLE_BYTES", "export_bundle", "publish_predictor"]

#: The file of an artifact that tells people how accurate it is.
ACCURACY_CARD = "report.md"
#: Most bytes of a bundle: every installation carries it.
MAX_BUNDLE_BYTES = 5 * 10**6
#: Fields of a manifest that differ between two artifacts that answer alike.
_OCCASION = {"version", "created_at", "package_versions", "manifest_sha256"}
_RECORDED_PACKAGES = ("precision-time", "numpy", "pyarrow", "xgboost-cpu")


def _list_training_rows(snapshot: Snapshot, validation: Validation) -> bytes:
    folds = validation.cross_validations.get("configuration")
    times: dict[str, float] = {}
    if folds is not None:
        times = {
            snapshot.training[row].measurement.cell_id: float(f"{time_s:.6g}")
            for row, time_s in zip(folds.rows, folds.predicted_s["predictor"], strict=True)
        }
    cells = sorted(row.measurement.cell_id for row in snapshot.training)
    rows = {"cells": cells, OUT_OF_FOLD: [times.get(cell) for cell in cells], "sha256": snapshot.sha256}
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
    """The device that campaigns measured most; rows of tables decide only where there are no campaigns."""
    names = [row.measurement.gpu for row in snapshot.training if row.index < 0]
    if not names:
        names = [row.measurement.gpu for row in snapshot.training]
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
    holdout_models: tuple[str, ...],
    seed: int,
    after: int = 0,
    plots: Mapping[str, bytes] | None = None,
) -> ArtifactManifest:
    """Publish files and manifest as the next free version, without moving an alias.

    A version above ``after`` that has exactly these files is returned as it is: an earlier attempt made it.

    The artifact holds the flat trees and XGBoost's JSON, the cards of models and devices that campaigns measured and
    the package does not ship, the zoo's walks of the training models, ``report`` with the known limits, the training
    rows, and ``plots`` (PNG or SVG by file name).
    """
    limits = _list_limits(predictor, holdout_models=holdout_models)
    walks = pack_entries(row.measurement.model for row in snapshot.training)
    files = pack_artifact(predictor, workloads=snapshot.workloads, hardware=snapshot.hardware) | {
        **({} if walks is None else {WALKS: walks}),
        TRAINING_ROWS: _list_training_rows(snapshot, validation),
        ACCURACY_CARD: _complete_card(report, limits=limits, data_sha256=snapshot.sha256).encode(),
        **_place_plots(plots or {}),
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
            training_configurations=len({row.measurement.configuration for row in snapshot.training}),
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
    return _find_same(shelf, name, files, after=after) or shelf.publish(name, files, describe=describe, alias=None)


def _find_same(shelf: Registry, name: str, files: Mapping[str, bytes], *, after: int) -> ArtifactManifest | None:
    """A version above ``after`` with exactly these files."""
    listed = list_contents(files)
    newer = (shelf.manifest(f"{name}@{version}") for version in shelf.versions(name) if version > after)
    return next((manifest for manifest in newer if manifest.files == listed), None)


def export_bundle(registry: str, reference: str, *, into: str | Path) -> ArtifactManifest:
    """Copy what a published artifact needs to answer questions into the folder ``into``, under its own manifest.

    The bundle is named after the folder and lies in ``<into>/<version>/``, so the parent folder reads as a registry.
    XGBoost's own models, plots, walks (the zoo lies beside it) and the list of training rows are left out. An earlier
    bundle is kept when the new one would differ in version, time and packages only, else the next version replaces it.

    Raises ``NotFoundError`` for an unknown reference, ``IntegrityError`` for an artifact that is not what was
    published, ``InputError`` above ``MAX_BUNDLE_BYTES`` and for a folder in which a registry keeps its versions.
    """
    folder = Path(into).expanduser().resolve()
    name = check_name(folder.name)
    source, files = Registry(registry).load(reference)
    files = {path: data for path, data in files.items() if path in {*SERVING_FILES, ACCURACY_CARD} - {WALKS}}
    if ACCURACY_CARD in files:
        files[ACCURACY_CARD] = _drop_plots(files[ACCURACY_CARD].decode()).encode()
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
        # A damaged bundle is replaced like one of other content.
        with contextlib.suppress(IntegrityError):
            existing = shelf.verify(f"{name}@{old}")
            if existing.model_dump(exclude=_OCCASION) == manifest.model_dump(exclude=_OCCASION):
                return existing
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


def _list_limits(predictor: HierarchicalPredictor, *, holdout_models: tuple[str, ...]) -> list[str]:
    """In words, what ``predictor`` was never trained on, and which regimes have no interval of their own.

    Models and devices of the package without a training row are counted, not listed: there are thousands.
    """
    domain = predictor.domain
    limits = []
    if blind := [regime for regime in REGIMES if regime not in predictor.radii]:
        limits.append(f"no interval was fitted for these regimes, which get the widest one: {', '.join(blind)}")
    if holdout_models:
        limits.append(f"held out, so never trained on: {', '.join(holdout_models)}")
    limits.append(f"trained on {len(domain.networks)} networks, of {len(zoo_names())} names in the zoo")
    devices = set(known_hardware())
    unseen = len(devices - set(domain.gpus))
    limits.append(f"never trained on {unseen} of the {len(devices)} devices that come with the package")
    for kind, is_cpu in (("CPU", True), ("GPU", False)):
        if not any(name.startswith("cpu") == is_cpu for name in domain.gpus):
            limits.append(f"no {kind} was measured: the closed forms answer for one")
    if untrained := [name for name in PRECISIONS if name not in domain.precisions]:
        limits.append(f"never trained on these precisions: {', '.join(untrained)}")
    limits.append(
        f"at most {domain.max_world_size} ranks and {domain.max_accumulation_steps} micro-steps in an iteration were "
        "measured"
    )
    return limits


def _complete_card(report: str, *, limits: list[str], data_sha256: str) -> str:
    """The accuracy card: the report, then the known limits and where the data and the zoo come from."""
    lines = [
        report.rstrip("\n"),
        "",
        "## Known limits",
        "",
        *(f"- {limit}" for limit in limits),
        "",
        f"Training data: SHA-256 `{data_sha256}`. Features of named models: the zoo with SHA-256 `{zoo_digest()}`; "
        f"`{WALKS}` holds its walks of the training networks, except in a bundle, which is shipped beside the zoo.",
    ]
    return "\n".join(lines) + "\n"


def _drop_plots(card: str) -> str:
    """``card`` without the lines that show plots: a bundle leaves the plots out."""
    return re.sub(r"^!\[[^\]]*\]\(plots/[^)]*\)\n\n?", "", card, flags=re.MULTILINE)


def _place_plots(plots: Mapping[str, bytes]) -> dict[str, bytes]:
    """``plots`` under their names in the artifact; raises ``InputError`` unless the content is that of a PNG or SVG."""
    for name, data in plots.items():
        is_plot = (name.endswith(".png") and data.startswith(b"\x89PNG\r\n\x1a\n")) or (
            name.endswith(".svg") and data.lstrip().startswith((b"<?xml", b"<svg"))
        )
        if not is_plot or "/" in name:
            raise InputError("this plot cannot be published", got=repr(name)[:300], expected="a PNG or SVG, so named")
    return {f"plots/{name}": data for name, data in plots.items()}
