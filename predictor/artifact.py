"""A published predictor in memory: which registry and version it came from, its trees, cards and hardware."""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precision_time.predictor.hardware import HardwareSpec
from precision_time.predictor.hierarchy import HierarchicalPredictor
from precision_time.predictor.workload import WorkloadFeatures
from precision_time.storage.errors import IntegrityError, NotFoundError
from precision_time.storage.registry import Registry, configured_registry_url
from precision_time.storage.schema import ArtifactManifest

__all__ = ["PublishedPredictor", "load_artifact", "pack_artifact", "split_reference", "standing_artifact"]

#: The name under which retraining publishes and ``predict_time`` looks when no other is given.
DEFAULT_NAME = "default"


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
    """The files an artifact needs to answer: the predictor's, and the cards and hardware it was trained with."""

    return predictor.to_files() | {
        "workloads.json": _encode([card.to_dict() for card in workloads]),
        "hardware.json": _encode([spec.to_dict() for spec in hardware]),
    }


def _encode(records: list[dict[str, Any]]) -> bytes:
    ordered = sorted(records, key=lambda record: str(record["name"]))
    return (json.dumps(ordered, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _decode(files: Mapping[str, bytes], name: str) -> list[dict[str, Any]]:
    try:
        values = json.loads(files[name])
    except (KeyError, ValueError, RecursionError) as error:
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
    taken from ``PRECISION_TIME_REGISTRY`` or the configuration file.

    The artifact stays in memory for the life of the process. Raises ``NotFoundError`` when there is none and
    ``IntegrityError`` when a file is not what was published.
    """
    url, name = split_reference(reference)
    url = url or configured_registry_url()
    if url is None:
        raise NotFoundError(
            "no registry is configured",
            got=f"artifact {reference!r}",
            expected="a registry URL before the name, PRECISION_TIME_REGISTRY, or a configuration file",
            fix="write artifact='<url or folder>/name@champion'",
        )
    manifest, files = Registry(url).load(name)
    predictor = HierarchicalPredictor.from_files(files)
    return PublishedPredictor(
        manifest=manifest,
        predictor=predictor,
        workloads=tuple(WorkloadFeatures.from_dict(values) for values in _decode(files, "workloads.json")),
        hardware=tuple(HardwareSpec.from_dict(values) for values in _decode(files, "hardware.json")),
    )


def standing_artifact() -> tuple[PublishedPredictor | None, str]:
    """What answers when no artifact is named, and in words why.

    ``PRECISION_TIME_ARTIFACT`` first, then the champion called ``default`` of the configured registry, then none.
    """
    named = os.environ.get("PRECISION_TIME_ARTIFACT")
    if named:
        return load_artifact(named), "PRECISION_TIME_ARTIFACT names the artifact"
    url = configured_registry_url()
    if url is None:
        return None, "no artifact was given and no registry is configured"
    try:
        return load_artifact(f"{url.rstrip('/')}/{DEFAULT_NAME}"), "the configured registry's champion"
    except NotFoundError:
        return None, f"the configured registry holds no artifact called {DEFAULT_NAME!r}"
