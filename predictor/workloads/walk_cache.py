"""Keep counts of modules in a folder of JSON files by content, so that the same module is walked once."""

import functools
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from precision_time.predictor.workloads.workload import WorkloadFeatures
from precision_time.storage.configuration import cache_folder
from precision_time.storage.documents import MAX_JSON_BYTES, dump_json, parse_json
from precision_time.storage.errors import NotFoundError, PrecisionTimeError
from precision_time.storage.filesystem import open_store

__all__ = ["CountedModel", "counting_version", "hash_content", "recall_count", "remember_count"]

#: Raised when the form of an entry changes.
_ENTRY_FORM = 1
#: Entries to keep; the oldest go first. At 20 kB each this is 20 MB.
_MOST_ENTRIES = 1000
#: The files whose code decides the counts: after a change in one of them no earlier count is used.
_COUNTING_FILES = ("walking/*.py", "workloads/walk.py", "workloads/workload.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedModel:
    """The counts of a user's model.

    ``trainable_share`` is the share of the parameters that receive gradients. ``reasons`` are the assumptions that the
    answer has to name.
    """

    workload: WorkloadFeatures
    trainable_share: float = 1.0
    reasons: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "workload": self.workload.to_dict(),
            "trainable_share": self.trainable_share,
            "reasons": list(self.reasons),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "CountedModel":
        """The inverse of ``to_dict``; raises ``InputError``, ``KeyError`` or ``TypeError`` for other values."""
        return cls(
            workload=WorkloadFeatures.from_dict(values["workload"]),
            trainable_share=float(values["trainable_share"]),
            reasons=tuple(map(str, values["reasons"])),
        )


def hash_content(parts: Iterable[str]) -> str:
    """SHA-256 over ``parts``, each with its length, so that "ab", "c" and "a", "bc" differ."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


@functools.cache
def counting_version(*packages: str) -> str:
    """Hash of all that decides a count beside the model: the code that counts and the versions of ``packages``.

    Versions come from the packages' metadata, so nothing heavy is imported.
    """
    parts = [f"form {_ENTRY_FORM}"]
    folder = Path(__file__).parents[1]
    files = [file for pattern in _COUNTING_FILES for file in sorted(folder.glob(pattern))]
    parts += [f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}" for file in files]
    for package in packages:
        try:
            parts.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            parts.append(f"{package} absent")
    return hash_content(parts)


def recall_count(key: str) -> CountedModel | None:
    """The count kept under ``key``; None for no entry, a damaged one, or a folder that cannot be read."""
    folder = cache_folder("walks")
    if folder is None:
        return None
    try:
        data = open_store(folder).read_bytes(f"{key}.json", max_bytes=MAX_JSON_BYTES)
        entry = parse_json(data, name=f"{key}.json")
        return CountedModel.from_dict(entry["model"]) if entry["key"] == key else None
    except (PrecisionTimeError, KeyError, TypeError, ValueError):
        return None


def remember_count(key: str, counted: CountedModel) -> None:
    """Keep ``counted`` under ``key`` and drop the oldest entries above 1,000; an unwritable folder is ignored."""
    folder = cache_folder("walks")
    if folder is None:
        return
    try:
        store = open_store(folder)
        store.write_bytes(f"{key}.json", dump_json({"key": key, "model": counted.to_dict()}))
        _drop_oldest(folder)
    except (PrecisionTimeError, OSError):
        # The answer is the same without the cache.
        return


def _drop_oldest(folder: Path) -> None:
    with os.scandir(folder) as entries:
        ages = [(entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in entries if _is_entry(entry)]
    store = open_store(folder)
    for _, name in sorted(ages)[: max(0, len(ages) - _MOST_ENTRIES)]:
        try:
            store.remove(name)
        except NotFoundError:  # another process was faster
            continue


def _is_entry(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".json") and entry.is_file(follow_symlinks=False)
