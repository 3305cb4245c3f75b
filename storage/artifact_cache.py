"""A local cache of the artifacts of a remote registry: only changed files are fetched, and it works offline."""

import contextlib
import datetime
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from precision_time.storage.configuration import cache_folder
from precision_time.storage.documents import MAX_JSON_BYTES, dump_json, parse_json
from precision_time.storage.errors import PrecisionTimeError, UnreachableError
from precision_time.storage.filesystem import open_store
from precision_time.storage.manifests import MANIFEST, ArtifactManifest, unpack_manifest
from precision_time.storage.registry import Registry
from precision_time.storage.store import Store

__all__ = ["ANSWER_TIMEOUT_S", "FetchedArtifact", "fetch_artifact"]

#: How long a question waits for a connection, and for each answer, before the local copy answers.
ANSWER_TIMEOUT_S = 5.0
#: Limits of the cache; the artifacts used longest ago are dropped first.
_MOST_ARTIFACTS = 8
_MOST_BYTES = 256 * 2**20
#: Notes on the artifact that a reference led to; they are small.
_MOST_NOTES = 64
#: From this age on, files without a manifest count as the remains of a killed process.
_ABANDONED_S = 3600.0
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedArtifact:
    """A verified artifact and, in words, where it came from.

    ``is_current`` is False if the registry did not answer and the artifact of its last answer is used instead.
    """

    manifest: ArtifactManifest
    files: dict[str, bytes]
    origin: str
    is_current: bool = True


def fetch_artifact(url: str, reference: str, *, only: Collection[str]) -> FetchedArtifact:
    """The artifact ``reference`` of the registry at ``url``, and those of its files that ``only`` names.

    A remote registry is asked for alias and manifest; files that were fetched before come from the local cache, where
    they lie under the digest of the manifest. If the registry does not answer within ``ANSWER_TIMEOUT_S``, the cached
    artifact that ``reference`` last led to is used, and ``origin`` says so.

    Raises ``UnreachableError`` if there is no such copy, and the errors of ``Registry.load``: an artifact that the
    registry does not hold, or may not show, is an error even if the cache has it.
    """
    registry = Registry(url, timeout_s=ANSWER_TIMEOUT_S)
    if not registry.is_remote:
        manifest, files = registry.load(reference, only=only)
        return FetchedArtifact(manifest=manifest, files=files, origin=f"loaded from {registry.url}")
    cache = _open_cache()
    try:
        return _ask(registry, reference, only=only, cache=cache)
    except UnreachableError as error:
        cached = _recall_last(registry.url, reference, only=only, cache=cache)
        if cached is None:
            raise UnreachableError(
                error.what,
                got=error.got,
                expected="an answer, or an earlier copy on this machine; there is none",
                fix="check the connection, or name another artifact (artifact='bundled' comes with the package)",
            ) from error
        return cached


def _ask(registry: Registry, reference: str, *, only: Collection[str], cache: Store | None) -> FetchedArtifact:
    manifest = registry.manifest(reference)
    origin = f"loaded from {registry.url}"
    files = None if cache is None else _recall_files(cache, manifest, only=only)
    is_new = files is None
    if files is not None:
        origin += " (its files from the local cache)"
    else:
        # By version, because the alias may have moved since the manifest was read.
        manifest, files = registry.load(manifest.artifact_id, only=only)
    fetched = FetchedArtifact(manifest=manifest, files=files, origin=origin)
    if cache is not None:
        # A cache is a convenience: a full disk must not spoil the answer.
        with contextlib.suppress(PrecisionTimeError, OSError):
            _keep(cache, registry.url, reference, fetched, new=is_new)
    return fetched


def _open_cache() -> Store | None:
    """The folder of the cache, closed to other users; None if there is no such place."""
    folder = cache_folder("artifacts")
    if folder is None:
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.getuid():
            return None
        if stat.S_IMODE(status.st_mode) & 0o077:
            folder.chmod(0o700)
        return open_store(folder)
    except (PrecisionTimeError, OSError):
        return None


def _note_path(url: str, reference: str) -> str:
    return f"notes/{hashlib.sha256(f'{url} {reference}'.encode()).hexdigest()}.json"


def _keep(cache: Store, url: str, reference: str, fetched: FetchedArtifact, *, new: bool) -> None:
    """Store the files if they are ``new``, then the manifest that names them, then the note on ``reference``."""
    manifest, folder = fetched.manifest, fetched.manifest.manifest_sha256
    if sum(map(len, fetched.files.values())) > _MOST_BYTES:
        return
    if new:
        for path, data in fetched.files.items():
            cache.write_bytes(f"{folder}/{path}", data)
    # Written even if it is there: its age says when the artifact was last used.
    cache.write_bytes(f"{folder}/{MANIFEST}", dump_json(manifest.model_dump(mode="json")))
    if new:
        _drop_oldest(cache)
    note = {
        "url": url,
        "reference": reference,
        "name": manifest.name,
        "version": manifest.version,
        "manifest_sha256": folder,
        "resolved_at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    cache.write_bytes(_note_path(url, reference), dump_json(note))


def _recall_files(cache: Store, manifest: ArtifactManifest, *, only: Collection[str]) -> dict[str, bytes] | None:
    """The cached files of ``manifest``, each verified; None if one is missing or changed."""
    folder = manifest.manifest_sha256
    if not cache.exists(f"{folder}/{MANIFEST}"):
        return None
    files = {}
    for file in manifest.files:
        if file.path not in only:
            continue
        try:
            data = cache.read_bytes(f"{folder}/{file.path}", max_bytes=file.size_bytes)
        except PrecisionTimeError:
            data = b""
        if len(data) != file.size_bytes or hashlib.sha256(data).hexdigest() != file.sha256:
            _drop(Path(cache.url) / folder)
            return None
        files[file.path] = data
    return files


def _recall_last(url: str, reference: str, *, only: Collection[str], cache: Store | None) -> FetchedArtifact | None:
    """The artifact that ``reference`` led to when the registry last answered, verified; None if it is not cached."""
    if cache is None:
        return None
    path = _note_path(url, reference)
    try:
        note = parse_json(cache.read_bytes(path, max_bytes=MAX_JSON_BYTES), name=path)
        folder, when = str(note["manifest_sha256"]), str(note["resolved_at"])
        if (note["url"], note["reference"]) != (url, reference) or not _SHA256.fullmatch(folder):
            return None
        where = f"{folder}/{MANIFEST}"
        manifest = unpack_manifest(
            cache.read_bytes(where, max_bytes=MAX_JSON_BYTES), where=where, name=note["name"], version=note["version"]
        )
    except (PrecisionTimeError, KeyError, TypeError):
        return None
    files = _recall_files(cache, manifest, only=only) if manifest.manifest_sha256 == folder else None
    if files is None:
        return None
    return FetchedArtifact(
        manifest=manifest,
        files=files,
        origin=f"the registry {url} did not answer: version {manifest.version}, which {reference} led to on {when}, "
        "answers from the local cache",
        is_current=False,
    )


def _drop_oldest(cache: Store) -> None:
    root = Path(cache.url)
    artifacts = []
    for folder in root.iterdir():
        manifest = folder / MANIFEST
        if manifest.is_file():
            artifacts.append((manifest.stat().st_mtime, sum(file.stat().st_size for file in folder.iterdir()), folder))
        elif _SHA256.fullmatch(folder.name) and time.time() - folder.stat().st_mtime > _ABANDONED_S:
            _drop(folder)
    artifacts.sort(reverse=True)
    for number, (_, _, folder) in enumerate(artifacts):
        if number >= _MOST_ARTIFACTS or sum(size for _, size, _ in artifacts[: number + 1]) > _MOST_BYTES:
            _drop(folder)
    notes = sorted((path.stat().st_mtime, path) for path in root.glob("notes/*.json"))
    for _, path in notes[:-_MOST_NOTES]:
        path.unlink(missing_ok=True)


def _drop(folder: Path) -> None:
    """Remove an artifact, its manifest first, so that an interrupted removal leaves nothing that can be found."""
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
