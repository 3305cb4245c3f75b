"""Published artifacts: a version is claimed, filled, and made visible by its manifest, then an alias points to it."""

import hashlib
import uuid
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath

from precision_time.storage.documents import MAX_JSON_BYTES, dump_json, parse_json
from precision_time.storage.errors import (
    IntegrityError,
    NotFoundError,
    PrecisionTimeError,
    StorageError,
    VersionExistsError,
    nearest,
)
from precision_time.storage.filesystem import open_store
from precision_time.storage.manifests import (
    MANIFEST,
    ArtifactFile,
    ArtifactManifest,
    check_alias,
    check_name,
    check_version,
    is_alias,
    is_name,
    is_version,
    list_contents,
    pack_manifest,
    parse_reference,
    parse_version,
    seal_manifest,
    unpack_manifest,
)

__all__ = ["Registry"]

_CLAIM = ".claim"
_MAX_CLAIMS = 10_000
_MAX_HISTORY = 1_000


class Registry:
    """Artifacts at a URL, as ``<name>/<version>/`` with the version an increasing integer.

    A version exists if its ``manifest.json`` does, which is written last and once; a crash leaves a claimed number
    behind, which stays unused. Every name follows one pattern, so no name can lead out of the registry.
    """

    def __init__(self, url: str | Path, *, timeout_s: float | None = None) -> None:
        self._store = open_store(url, timeout_s=timeout_s)
        self.url = self._store.url
        #: whether a network lies between this machine and the artifacts
        self.is_remote = self._store.is_remote

    def publish(
        self,
        name: str,
        files: Mapping[str, bytes],
        *,
        describe: Callable[[int, tuple[ArtifactFile, ...]], ArtifactManifest],
        alias: str | None = "champion",
        version: int | None = None,
    ) -> ArtifactManifest:
        """Publish ``files`` and point ``alias`` to them; ``describe(version, files)`` makes the manifest.

        Without ``version`` the next free integer is used. Raises ``VersionExistsError`` if ``version`` is taken,
        ``InputError`` for names or files that cannot be published, and the errors of ``Store``.
        """
        check_name(name)
        if alias is not None:
            check_alias(alias)
        if version is not None:
            check_version(version)
        listed = list_contents(files)
        version = self._claim(name, version)
        folder = f"{name}/{version}"
        try:
            manifest = seal_manifest(describe(version, listed))
            document = pack_manifest(manifest, name=name, version=version, files=listed)
            for file in listed:
                self._store.create_bytes(f"{folder}/{file.path}", files[file.path])
        except BaseException:
            self._abandon(folder, listed)
            raise
        # From here on nothing is undone: if the answer is lost, the manifest may be there and the version visible.
        self._store.create_bytes(f"{folder}/{MANIFEST}", document)
        if alias is not None:
            self._point(name, alias, version)
        return manifest

    def resolve(self, reference: str) -> tuple[str, int]:
        """(name, version) of ``name`` (its champion), ``name@3`` or ``name@alias``.

        Raises ``InputError`` for a malformed reference, ``NotFoundError`` for a missing artifact, ``IntegrityError``
        for a broken alias file.
        """
        name, version, alias = parse_reference(reference)
        if version is None:
            version = self._read_alias(name, alias)[0]
        if not self._store.exists(f"{name}/{version}/{MANIFEST}"):
            raise self._missing(name, f"{name}@{version}")
        return name, version

    def load(self, reference: str, *, only: Collection[str] | None = None) -> tuple[ArtifactManifest, dict[str, bytes]]:
        """The manifest and the content of its files, each checked before it is returned.

        ``only`` names the files to read; of the others only the names are compared with the manifest. Raises
        ``IntegrityError`` naming every file that is missing, changed, too large, or not in the manifest, and as
        ``resolve``.
        """
        manifest = self.manifest(reference)
        folder = f"{manifest.name}/{manifest.version}"
        expected = {file.path for file in manifest.files}
        present = {path.removeprefix(f"{folder}/") for path in self._store.list_files(folder)}
        problems = [f"{folder}/{path} is not in the manifest" for path in sorted(present - expected - {MANIFEST})]
        problems += [f"{folder}/{path} is missing" for path in sorted(expected - present)]
        files: dict[str, bytes] = {}
        for file in manifest.files:
            path = f"{folder}/{file.path}"
            if file.path not in present or (only is not None and file.path not in only):
                continue
            try:
                data = self._store.read_bytes(path, max_bytes=file.size_bytes)
            except NotFoundError:
                problems.append(f"{path} is missing")
                continue
            except IntegrityError as error:
                problems.append(f"{path} is changed: {error.what}")
                continue
            if len(data) != file.size_bytes or hashlib.sha256(data).hexdigest() != file.sha256:
                problems.append(f"{path} is changed")
            files[file.path] = data
        if problems:
            raise IntegrityError(
                f"artifact {manifest.artifact_id} is not what was published",
                got="; ".join(problems),
                expected="exactly the files of its manifest",
                fix="publish it again, or roll the alias back",
            )
        return manifest, files

    def verify(self, reference: str) -> ArtifactManifest:
        """The manifest, after all checks of ``load``."""
        return self.load(reference)[0]

    def manifest(self, reference: str) -> ArtifactManifest:
        """The manifest alone, checked by itself; raises as ``load``."""
        name, version, alias = parse_reference(reference)
        if version is None:
            version = self._read_alias(name, alias)[0]
        try:
            return self._read_manifest(name, version)
        except NotFoundError as error:
            raise self._missing(name, f"{name}@{version}") from error

    def names(self) -> list[str]:
        """Names with at least one version, sorted."""
        return sorted({name for name, _ in self._complete("")})

    def versions(self, name: str) -> list[int]:
        """Visible versions of ``name``, ascending."""
        return sorted(version for _, version in self._complete(check_name(name)))

    def aliases(self, name: str) -> dict[str, int]:
        """Aliases of ``name`` and their versions; raises ``IntegrityError`` for a broken alias file."""
        return {alias: self._read_alias(name, alias)[0] for alias in self._alias_names(check_name(name))}

    def set_alias(self, name: str, alias: str, version: int) -> None:
        """Point ``alias`` to ``version`` and remember the version before it.

        Of two moves at the same moment the last one stays. Raises ``NotFoundError`` for a missing version.
        """
        check_alias(alias)
        self.resolve(f"{check_name(name)}@{check_version(version)}")
        self._point(name, alias, version)

    def roll_back(self, name: str, alias: str = "champion") -> int:
        """Point ``alias`` to the version before the current one and return it; repeated calls go further back.

        Raises ``NotFoundError`` if there is no earlier version.
        """
        version, history = self._read_alias(check_name(name), check_alias(alias))
        if not history:
            raise NotFoundError(
                f"{name}@{alias} has no earlier version",
                got=f"version {version}",
                expected="an alias that was moved at least once",
                fix="point it to a version by `precision-time registry alias`",
            )
        *history, earlier = history
        self.resolve(f"{name}@{earlier}")
        self._write_alias(name, alias, earlier, history)
        return earlier

    def _claim(self, name: str, version: int | None) -> int:
        """Reserve a version: exclusive creation gives it to one publisher."""
        token = uuid.uuid4().hex.encode()
        if version is not None:
            try:
                self._store.create_bytes(f"{name}/{version}/{_CLAIM}", token)
            except VersionExistsError as error:
                raise VersionExistsError(
                    f"{name}@{version} is published, being published, or was left unfinished",
                    got=f"version {version}",
                    expected="a version that is free",
                    fix="leave the version out to get the next free one",
                ) from error
            return version
        first = max(self.versions(name), default=0) + 1
        # Claims of other publishers, unfinished ones too, are not in the listing: skip them.
        for candidate in range(first, first + _MAX_CLAIMS):
            claim = f"{name}/{candidate}/{_CLAIM}"
            # Asking is cheaper than a failed creation; only the creation decides.
            if self._store.exists(claim):
                continue
            try:
                self._store.create_bytes(claim, token)
            except VersionExistsError:
                continue
            return candidate
        raise StorageError(f"no free version of {name} was found", got=f"{_MAX_CLAIMS} claimed versions")

    def _abandon(self, folder: str, files: tuple[ArtifactFile, ...]) -> None:
        """Remove an unfinished version as far as the store allows; the claim goes last, because it guards the rest."""
        for path in [*(file.path for file in files), _CLAIM]:
            try:
                self._store.remove(f"{folder}/{path}")
            except NotFoundError:
                continue
            except PrecisionTimeError:
                return

    def _complete(self, prefix: str) -> set[tuple[str, int]]:
        complete = set()
        for path in self._store.list_files(prefix):
            parts = path.split("/")
            version = (
                parse_version(parts[1]) if len(parts) == 3 and parts[2] == MANIFEST and is_name(parts[0]) else None
            )
            if version is not None:
                complete.add((parts[0], version))
        return complete

    def _alias_names(self, name: str) -> list[str]:
        paths = [PurePosixPath(path) for path in self._store.list_files(f"{name}/aliases")]
        return [path.stem for path in paths if path.suffix == ".json" and len(path.parts) == 3 and is_alias(path.stem)]

    def _read_manifest(self, name: str, version: int) -> ArtifactManifest:
        path = f"{name}/{version}/{MANIFEST}"
        data = self._store.read_bytes(path, max_bytes=MAX_JSON_BYTES)
        return unpack_manifest(data, where=path, name=name, version=version)

    def _point(self, name: str, alias: str, version: int) -> None:
        try:
            current, history = self._read_alias(name, alias)
        except NotFoundError:
            self._write_alias(name, alias, version, [])
            return
        if current != version:
            self._write_alias(name, alias, version, [*history, current][-_MAX_HISTORY:])

    def _read_alias(self, name: str, alias: str) -> tuple[int, list[int]]:
        path = f"{name}/aliases/{alias}.json"
        try:
            values = parse_json(self._store.read_bytes(path, max_bytes=MAX_JSON_BYTES), name=path)
        except NotFoundError as error:
            raise self._missing(name, f"{name}@{alias}") from error
        version = values.get("version") if isinstance(values, dict) else None
        history = values.get("history") if isinstance(values, dict) else None
        if not is_version(version) or not isinstance(history, list) or not all(map(is_version, history)):
            raise IntegrityError(f"{path} is not an alias", got=repr(values)[:200], expected="a version and a history")
        return version, history

    def _write_alias(self, name: str, alias: str, version: int, history: list[int]) -> None:
        document = dump_json({"version": version, "history": history})
        self._store.write_bytes(f"{name}/aliases/{alias}.json", document)

    def _missing(self, name: str, reference: str) -> NotFoundError:
        versions = self.versions(name)
        if versions:
            known = [f"version {version}" for version in versions[-5:]] + self._alias_names(name)
            expected = f"one of {', '.join(known)}"
        else:
            expected = f"a published name; the nearest are {', '.join(nearest(name, self.names())) or 'none'}"
        return NotFoundError(
            "there is no such artifact",
            got=f"{reference} in {self.url}",
            expected=expected,
            fix="`precision-time registry list` shows what there is",
        )
