"""Published predictors: which one answers, how it is loaded and verified, and how one is packed."""

import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.shipped import shipped_bytes, shipped_path
from precision_time.predictor.workloads.workload import WorkloadFeatures, describe_zoo
from precision_time.predictor.workloads.zoo import ZooTable
from precision_time.storage.artifact_cache import FetchedArtifact, fetch_artifact
from precision_time.storage.configuration import configured_registry_url, read_configuration
from precision_time.storage.errors import IntegrityError, NotFoundError
from precision_time.storage.manifests import ArtifactManifest
from precision_time.storage.registry import Registry

__all__ = [
    "SERVING_FILES",
    "WALKS",
    "PublishedPredictor",
    "load_artifact",
    "load_bundled",
    "pack_artifact",
    "refresh_artifacts",
    "split_reference",
    "standing_artifact",
    "zoo_digest",
]

#: The name under which retraining publishes and ``predict_time`` looks when no other is given.
DEFAULT_NAME = "default"
#: The artifact that comes with the package, in a folder of the same form as in a registry. It is opened by its path, so
#: that it passes the same checks as any other artifact.
BUNDLE = shipped_path("bundled")
#: The zoo's walks of the networks that the artifact was trained on, used where another zoo is installed.
WALKS = "walks.parquet"
#: The files that answers need; an artifact may lack the last three. Its other files are for people and later gates.
SERVING_FILES = ("predictor.json", "trees.npz", "workloads.json", "hardware.json", WALKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPredictor:
    """A verified artifact, ready to answer.

    Each of its answers carries ``notes`` among its reasons: where the artifact came from, and what does not fit this
    installation. ``is_current`` is False where its registry did not answer and an earlier copy is used.
    """

    manifest: ArtifactManifest
    predictor: HierarchicalPredictor
    workloads: tuple[WorkloadFeatures, ...]
    hardware: tuple[HardwareSpec, ...]
    notes: tuple[str, ...] = ()
    is_current: bool = True


def pack_artifact(
    predictor: HierarchicalPredictor, *, workloads: Sequence[WorkloadFeatures], hardware: Sequence[HardwareSpec]
) -> dict[str, bytes]:
    """The files an artifact needs to answer: the predictor's, and the cards and hardware that campaigns measured.

    Cards and hardware that the package ships need not be packed.
    """
    cards = {
        "workloads.json": [card.to_dict() for card in workloads],
        "hardware.json": [spec.to_dict() for spec in hardware],
    }
    return predictor.to_files() | {name: _encode(records) for name, records in cards.items() if records}


def _encode(records: list[dict[str, Any]]) -> bytes:
    ordered = sorted(records, key=lambda record: str(record["name"]))
    return (json.dumps(ordered, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _parse(data: bytes, name: str) -> Any:
    """The JSON document ``name``, of finite numbers only: NaN or 1e400 would reach the answer."""

    def refuse(text: str) -> float:
        raise ValueError(f"{text} is not a finite number")

    def parse_finite(text: str) -> float:
        return value if math.isfinite(value := float(text)) else refuse(text)

    try:
        return json.loads(data, parse_constant=refuse, parse_float=parse_finite)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{name} of the artifact cannot be read", got=repr(error), expected="JSON of finite numbers"
        ) from error


def _decode(files: Mapping[str, bytes], name: str) -> list[dict[str, Any]]:
    if name not in files:
        return []
    values = _parse(files[name], name)
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise IntegrityError(
            f"{name} of the artifact cannot be read", got=type(values).__name__, expected="a JSON list of objects"
        )
    return values


def split_reference(reference: str) -> tuple[str | None, str]:
    """``url/name`` as (url, name); the url is None when only a name is given."""
    url, slash, name = reference.rpartition("/")
    return (url or "/") if slash else None, name


@functools.cache
def zoo_digest() -> str:
    """SHA-256 of the installed zoo, from which the features of named models come."""
    return hashlib.sha256(shipped_bytes("zoo.parquet")).hexdigest()


@functools.lru_cache(maxsize=4)
def load_artifact(reference: str) -> PublishedPredictor:
    """Load and verify ``reference``: ``name``, ``name@3`` or ``name@alias``, also with a registry's URL before it.

    The default registry is that of ``PRECISION_TIME_REGISTRY`` or the configuration file. ``bundled`` is the artifact
    that comes with the package. The artifact stays in memory until ``refresh_artifacts``, also when an alias moves.
    Where a remote registry does not answer, the copy on this machine is used (``artifact_cache.fetch_artifact``), and
    ``notes`` say so. Raises ``NotFoundError`` when there is no such artifact, ``IntegrityError`` when a file differs
    from what was published, ``UnreachableError`` when the registry does not answer and there is no copy.
    """
    url, name = split_reference(reference)
    if url is None and name.partition("@")[0] == BUNDLE.name:
        bundled = load_bundled()
        if bundled is None or name not in (BUNDLE.name, bundled.manifest.artifact_id):
            raise NotFoundError(
                "this artifact does not come with the package",
                got=name,
                expected="no bundled artifact at all" if bundled is None else bundled.manifest.artifact_id,
                fix=f"write {BUNDLE.name} for the artifact that does",
            )
        return bundled
    url = url or configured_registry_url()
    if url is None:
        raise NotFoundError(
            "no registry is configured",
            got=f"artifact {reference!r}",
            expected="a registry URL before the name, PRECISION_TIME_REGISTRY, or a configuration file",
            fix="write artifact='<url or folder>/name@champion'",
        )
    return _unpack(fetch_artifact(url, name, only=SERVING_FILES))


def refresh_artifacts() -> None:
    """Forget the loaded artifacts, so that the next question asks its registry for the newest version."""
    load_artifact.cache_clear()


def load_bundled() -> PublishedPredictor | None:
    """The artifact that comes with the package, verified as any other; None when the package has none.

    Raises ``IntegrityError`` when a file differs from what was bundled, or belongs to another version of this code.
    """
    return _load_bundle(BUNDLE)


@functools.lru_cache(maxsize=1)
def _load_bundle(folder: Path) -> PublishedPredictor | None:
    registry = Registry(folder.parent)
    versions = registry.versions(folder.name)
    if not versions:
        if any(path.is_file() for path in folder.rglob("*")):
            raise IntegrityError(
                "the artifact that comes with the package is incomplete",
                got=f"files without a manifest in {folder.name}",
                expected="a manifest beside them",
                fix="install precision-time again, or name another artifact",
            )
        return None
    try:
        manifest, files = registry.load(f"{folder.name}@{versions[-1]}")
        return _unpack(FetchedArtifact(manifest=manifest, files=files, origin=""))
    except IntegrityError as error:
        raise IntegrityError(
            f"the artifact that comes with the package cannot be used: {error.what}",
            got=error.got,
            expected=error.expected,
            fix="install precision-time again, or name another artifact",
        ) from error


def _unpack(fetched: FetchedArtifact) -> PublishedPredictor:
    manifest, files = fetched.manifest, fetched.files
    for name in ("predictor.json", "trees.npz"):
        if name not in files:
            raise IntegrityError(
                f"{manifest.artifact_id} is no predictor", got=f"no {name}", expected="predictor.json and trees.npz"
            )
    _parse(files["predictor.json"], "predictor.json")
    notes = [f"{manifest.artifact_id}: {fetched.origin}"] if fetched.origin else []
    workloads = tuple(WorkloadFeatures.from_dict(values) for values in _decode(files, "workloads.json"))
    if manifest.zoo_sha256 not in ("", zoo_digest()):
        note = f"{manifest.artifact_id} was trained on another zoo than the installed one, so its answers for "
        if WALKS in files:
            workloads = describe_zoo(ZooTable(files[WALKS], name=f"{WALKS} of {manifest.artifact_id}"), workloads)
            note += "models or inputs that it was not trained on may be off (it carries the walks of the others)"
        else:
            note += "models of the zoo may be off"
        trained_by = manifest.package_versions.get("precision-time", "unknown")
        notes.append(f"{note}: install the version of precision-time that trained it ({trained_by}), or retrain")
    return PublishedPredictor(
        manifest=manifest,
        predictor=HierarchicalPredictor.from_files(files),
        workloads=workloads,
        hardware=tuple(HardwareSpec.from_dict(values) for values in _decode(files, "hardware.json")),
        notes=tuple(notes),
        is_current=fetched.is_current,
    )


class StandingArtifact(NamedTuple):
    """The artifact that answers when none is named, why it does, and a remark for the reasons of every answer."""

    published: PublishedPredictor | None
    why: str
    remark: str = ""


def standing_artifact() -> StandingArtifact:
    """The artifact that answers when none is named.

    ``PRECISION_TIME_ARTIFACT`` first, then ``[artifact] reference`` of the configuration file, then the champion
    called ``default`` of the configured registry, then the artifact that comes with the package, then none. A registry
    that does not answer is not skipped. Raises what ``load_artifact`` raises.
    """
    if reference := os.environ.get("PRECISION_TIME_ARTIFACT"):
        return StandingArtifact(load_artifact(reference), "PRECISION_TIME_ARTIFACT names the artifact")
    if reference := read_configuration().artifact_reference:
        return StandingArtifact(load_artifact(reference), "the configuration file names the artifact")
    url = configured_registry_url()
    fallback = "the artifact that comes with the package answers"
    if url is None:
        missing, remark = "no artifact was given and no registry is configured", ""
    else:
        try:
            champion = load_artifact(f"{url.rstrip('/')}/{DEFAULT_NAME}")
            return StandingArtifact(champion, "the configured registry's champion")
        except NotFoundError:
            missing = f"the configured registry holds no artifact called {DEFAULT_NAME!r}"
            remark = f"{missing}: {fallback}"
    published = load_bundled()
    if published is None:
        return StandingArtifact(None, missing)
    return StandingArtifact(published, f"{missing}: {fallback}", remark)
