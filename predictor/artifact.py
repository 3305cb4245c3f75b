"""A published predictor in memory: which registry and version it came from, its trees, cards and hardware."""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precision_time.predictor.hardware import HardwareSpec
from precision_time.predictor.hierarchy import HierarchicalPredictor
from precision_time.predictor.workload import WorkloadFeatures
from precision_time.storage.errors import IntegrityError, NotFoundError
from precision_time.storage.manifests import ArtifactManifest
from precision_time.storage.registry import Registry, configured_registry_url

__all__ = [
    "SERVING_FILES",
    "PublishedPredictor",
    "load_artifact",
    "load_bundled",
    "pack_artifact",
    "split_reference",
    "standing_artifact",
]

#: The name under which retraining publishes and ``predict_time`` looks when no other is given.
DEFAULT_NAME = "default"
#: The artifact that comes with the package: the one version in this folder, which has the shape of a registry's.
#: Opened by its path rather than as a package resource, so that it passes the checks of any other artifact.
BUNDLE = Path(__file__).parent / "data" / "bundled"
#: What of an artifact answers; an artifact may lack the last two. What else it holds is for people and later gates.
SERVING_FILES = ("predictor.json", "trees.npz", "workloads.json", "hardware.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPredictor:
    """A verified artifact, ready to answer."""

    manifest: ArtifactManifest
    predictor: HierarchicalPredictor
    workloads: tuple[WorkloadFeatures, ...]
    hardware: tuple[HardwareSpec, ...]


def pack_artifact(
    predictor: HierarchicalPredictor, *, workloads: Sequence[WorkloadFeatures], hardware: Sequence[HardwareSpec]
) -> dict[str, bytes]:
    """The files an artifact needs to answer: the predictor's, and the cards and hardware that campaigns measured.

    Cards and hardware that the package ships are found without the artifact, so there may be none to write.
    """
    cards = {
        "workloads.json": [card.to_dict() for card in workloads],
        "hardware.json": [spec.to_dict() for spec in hardware],
    }
    return predictor.to_files() | {name: _encode(records) for name, records in cards.items() if records}


def _encode(records: list[dict[str, Any]]) -> bytes:
    ordered = sorted(records, key=lambda record: str(record["name"]))
    return (json.dumps(ordered, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _decode(files: Mapping[str, bytes], name: str) -> list[dict[str, Any]]:
    if name not in files:
        return []
    try:
        values = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{name} of the artifact cannot be read", got=repr(error), expected="a JSON list"
        ) from error
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise IntegrityError(
            f"{name} of the artifact cannot be read", got=type(values).__name__, expected="a JSON list of objects"
        )
    return values


def split_reference(reference: str) -> tuple[str | None, str]:
    """``url/name@version`` as (url, ``name@version``); the url is None when only a name is given."""
    url, slash, name = reference.rpartition("/")
    return (url or "/") if slash else None, name


@functools.lru_cache(maxsize=4)
def load_artifact(reference: str) -> PublishedPredictor:
    """Load and verify ``reference``: ``name``, ``name@3`` or ``name@alias``, with the registry's URL before it or
    taken from ``PRECISION_TIME_REGISTRY`` or the configuration file; ``bundled`` is what comes with the package.

    The artifact stays in memory for the life of the process. Raises ``NotFoundError`` when there is none and
    ``IntegrityError`` when a file is not what was published.
    """
    url, name = split_reference(reference)
    if url is None and name.partition("@")[0] == BUNDLE.name:
        bundled = load_bundled()
        if bundled is None or name not in (BUNDLE.name, bundled.manifest.artifact_id):
            raise NotFoundError(
                "this artifact does not come with the package",
                got=name,
                expected="no bundled artifact at all" if bundled is None else bundled.manifest.artifact_id,
                fix=f"write {BUNDLE.name} for the one that does",
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
    return _load(Registry(url), name)


def load_bundled() -> PublishedPredictor | None:
    """The artifact that comes with the package, verified as any other; None when it was built without one.

    Raises ``IntegrityError`` when a file is not what was bundled, or of another version than this code.
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
        return _load(registry, f"{folder.name}@{versions[-1]}")
    except IntegrityError as error:
        raise IntegrityError(
            f"the artifact that comes with the package cannot be used: {error.what}",
            got=error.got,
            expected=error.expected,
            fix="install precision-time again, or name another artifact",
        ) from error


def _load(registry: Registry, name: str) -> PublishedPredictor:
    manifest, files = registry.load(name)
    return PublishedPredictor(
        manifest=manifest,
        predictor=HierarchicalPredictor.from_files(files),
        workloads=tuple(WorkloadFeatures.from_dict(values) for values in _decode(files, "workloads.json")),
        hardware=tuple(HardwareSpec.from_dict(values) for values in _decode(files, "hardware.json")),
    )


def standing_artifact() -> tuple[PublishedPredictor | None, str]:
    """What answers when no artifact is named, and in words why.

    ``PRECISION_TIME_ARTIFACT`` first, then the champion called ``default`` of the configured registry, then the
    artifact that comes with the package, then none.
    """
    named = os.environ.get("PRECISION_TIME_ARTIFACT")
    if named:
        return load_artifact(named), "PRECISION_TIME_ARTIFACT names the artifact"
    url = configured_registry_url()
    if url is None:
        missing = "no artifact was given and no registry is configured"
    else:
        try:
            return load_artifact(f"{url.rstrip('/')}/{DEFAULT_NAME}"), "the configured registry's champion"
        except NotFoundError:
            missing = f"the configured registry holds no artifact called {DEFAULT_NAME!r}"
    bundled = load_bundled()
    return bundled, missing if bundled is None else f"{missing}: the artifact that comes with the package answers"
