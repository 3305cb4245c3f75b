"""The rules of publishing: names, references, sets of files, and the manifest that lists them."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from precision_time.storage.documents import dump_json, parse_json
from precision_time.storage.errors import InputError, IntegrityError
from precision_time.storage.schema import SCHEMA_VERSION

__all__ = [
    "MANIFEST",
    "ArtifactFile",
    "ArtifactManifest",
    "check_alias",
    "check_name",
    "check_version",
    "is_alias",
    "is_name",
    "is_version",
    "list_contents",
    "pack_manifest",
    "parse_reference",
    "parse_version",
    "seal_manifest",
    "unpack_manifest",
]

MANIFEST = "manifest.json"
_MAX_FILE_BYTES = 64 * 2**20
_MAX_FILES = 100
_MAX_TOTAL_BYTES = 256 * 2**20

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9])?")
_ALIAS = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
#: A file lies in the artifact's folder, or in its ``plots``; there is no other folder.
_FILE_PATTERN = r"(?:plots/)?[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_FILE = re.compile(_FILE_PATTERN)
_RESERVED = {MANIFEST, "plots"}
#: Fields that earlier manifests lack; with these values they do not enter the digest, so old manifests stay sound.
_LATER_FIELDS: dict[str, object] = {"zoo_sha256": "", "known_limits": [], "accuracy_by_precision": {}}


class ArtifactFile(BaseModel):
    """One file of an artifact: its name in the artifact's folder or in ``plots``, its size and its digest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(pattern=f"^{_FILE_PATTERN}$")
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class ArtifactManifest(BaseModel):
    """A published predictor: its files, its training data, and its accuracy.

    ``accuracy`` maps split -> method -> metric -> value (fractions); methods are ``predictor``,
    ``precision_blind``, ``roofline`` (times one fitted factor) and ``closed_form``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    version: int = Field(ge=1)
    created_at: str
    files: tuple[ArtifactFile, ...]
    feature_names: dict[str, list[str]]
    hardware: list[str]
    default_gpu: str
    precisions: list[str]
    training_data_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    training_rows: int = Field(ge=0)
    training_configurations: int = Field(ge=0)
    holdout_models: list[str]
    seed: int
    parameters: dict[str, float | int | str]
    accuracy: dict[str, dict[str, dict[str, float | None]]]
    package_versions: dict[str, str]
    #: digest of the shipped zoo, whose features the trees were trained on; blank if unknown
    zoo_sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    #: in words: data that the predictor was never trained on, and regimes without calibrated intervals
    known_limits: list[str] = Field(default_factory=list)
    #: the predictor and its baselines on the rows of each policy, 5-fold by configuration: policy -> method -> metric
    accuracy_by_precision: dict[str, dict[str, dict[str, float | None]]] = Field(default_factory=dict)
    #: digest of all other fields; the registry fills it in when it publishes
    manifest_sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""

    @property
    def artifact_id(self) -> str:
        """``name@version``, by which an answer names its predictor."""
        return f"{self.name}@{self.version}"


def is_name(name: object) -> TypeGuard[str]:
    """Whether ``name`` can name an artifact."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None and ".." not in name


def is_alias(alias: object) -> TypeGuard[str]:
    """Whether ``alias`` is a valid alias; it starts with a letter, so it never looks like a version."""
    return isinstance(alias, str) and _ALIAS.fullmatch(alias) is not None


def is_version(version: object) -> TypeGuard[int]:
    """Whether ``version`` is an integer of 1 to 999999999."""
    return isinstance(version, int) and not isinstance(version, bool) and 0 < version < 10**9


def check_name(name: str) -> str:
    """``name`` itself, or ``InputError``."""
    if not is_name(name):
        raise InputError(
            "this is not an artifact name",
            got=repr(name)[:300],
            expected="1 to 64 of a-z 0-9 . _ - with a letter or digit at both ends, and no ..",
        )
    return name


def check_alias(alias: str) -> str:
    """``alias`` itself, or ``InputError``."""
    if not is_alias(alias):
        raise InputError(
            "this is not an alias", got=repr(alias)[:300], expected="a letter, then up to 31 of a-z 0-9 _ -"
        )
    return alias


def check_version(version: int) -> int:
    """``version`` itself, or ``InputError``."""
    if not is_version(version):
        raise InputError("this is not a version", got=repr(version)[:300], expected="an integer of 1 to 999999999")
    return version


def parse_reference(reference: str) -> tuple[str, int | None, str]:
    """(name, version or None, alias) of ``name``, ``name@3`` or ``name@alias``; the alias is ``champion`` by default.

    Raises ``InputError`` for anything else.
    """
    name, at, rest = str(reference).partition("@")
    check_name(name)
    if not at:
        return name, None, "champion"
    version = parse_version(rest)
    return (name, None, check_alias(rest)) if version is None else (name, version, "champion")


def parse_version(text: str) -> int | None:
    """The version that ``text`` spells without a leading zero or a sign, or None."""
    return int(text) if _VERSION.fullmatch(text) else None


def list_contents(files: Mapping[str, bytes]) -> tuple[ArtifactFile, ...]:
    """Names, sizes and digests, sorted by name; raises ``InputError`` for files that could not be loaded again."""
    if not 0 < len(files) <= _MAX_FILES:
        raise InputError("these files cannot be published", got=f"{len(files)} files", expected=f"1 to {_MAX_FILES}")
    for path, data in files.items():
        if not _is_file_name(path):
            raise InputError(
                "this file name cannot be published",
                got=repr(path)[:300],
                expected=f"1 to 100 of A-Z a-z 0-9 . _ -, a letter or digit first, optionally below plots/, and not "
                f"{' or '.join(sorted(_RESERVED))}",
            )
        if not _is_content(data):
            size = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
            raise InputError(f"{path} cannot be published", got=size, expected=f"1 to {_MAX_FILE_BYTES} bytes")
    listed = tuple(
        ArtifactFile(path=path, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for path, data in sorted(files.items())
    )
    if problem := _problem(listed):
        raise InputError("these files cannot be published", got=problem, expected="a smaller set of distinct names")
    return listed


def pack_manifest(manifest: ArtifactManifest, *, name: str, version: int, files: tuple[ArtifactFile, ...]) -> bytes:
    """The JSON of a manifest; raises ``InputError`` if its name, version or files are not exactly the given ones."""
    if (manifest.name, manifest.version) != (name, version):
        raise InputError(
            "the manifest describes another artifact", got=manifest.artifact_id, expected=f"{name}@{version}"
        )
    if sorted(manifest.files, key=lambda file: file.path) != list(files):
        raise InputError(
            "the manifest does not list exactly the files",
            got=", ".join(file.path for file in manifest.files) or "no files",
            expected=f"{', '.join(file.path for file in files)} with their sizes and digests",
        )
    return dump_json(manifest.model_dump(mode="json"))


def seal_manifest(manifest: ArtifactManifest) -> ArtifactManifest:
    """The manifest with the digest of its other fields, which shows later damage."""
    return manifest.model_copy(update={"manifest_sha256": _digest(manifest)})


def _digest(manifest: ArtifactManifest) -> str:
    values = manifest.model_dump(mode="json", exclude={"manifest_sha256"})
    for name, nothing in _LATER_FIELDS.items():
        if values[name] == nothing:
            del values[name]
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def unpack_manifest(data: bytes, *, where: str, name: str, version: int) -> ArtifactManifest:
    """The manifest at ``where``; raises ``IntegrityError`` if it is damaged or not that of ``name`` and ``version``."""
    _check_schema_version(parse_json(data, name=where), where)
    try:
        manifest = ArtifactManifest.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise IntegrityError(
            f"{where} is not a manifest",
            got=f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}",
            expected="the fields of ArtifactManifest",
        ) from error
    if manifest.manifest_sha256 != _digest(manifest):
        raise IntegrityError(
            f"{where} is not what was published",
            got="fields that do not match its digest",
            expected=f"SHA-256 {manifest.manifest_sha256 or 'of its fields'}",
            fix="publish the artifact again",
        )
    if (manifest.name, manifest.version) != (name, version):
        raise IntegrityError(
            f"{where} belongs to another artifact", got=manifest.artifact_id, expected=f"{name}@{version}"
        )
    if problem := _problem(manifest.files):
        raise IntegrityError(f"{where} does not list a usable set of files", got=problem, expected="distinct names")
    return manifest


def _is_file_name(path: object) -> bool:
    return isinstance(path, str) and _FILE.fullmatch(path) is not None and path.casefold() not in _RESERVED


def _is_content(data: object) -> bool:
    return isinstance(data, bytes) and 0 < len(data) <= _MAX_FILE_BYTES


def _problem(files: tuple[ArtifactFile, ...]) -> str | None:
    """Why this set of files cannot be an artifact, or None. Names that differ in case are one file on some systems."""
    paths = [file.path.casefold() for file in files]
    if not 0 < len(paths) <= _MAX_FILES:
        return f"{len(paths)} files"
    if len(set(paths)) != len(paths) or _RESERVED & set(paths):
        return f"repeated or reserved names among {', '.join(sorted(file.path for file in files))}"
    total = sum(file.size_bytes for file in files)
    if total > _MAX_TOTAL_BYTES:
        return f"{total} bytes in all, over {_MAX_TOTAL_BYTES}"
    return next(
        (f"{file.path} of {file.size_bytes} bytes" for file in files if file.size_bytes > _MAX_FILE_BYTES), None
    )


def _check_schema_version(values: Any, where: str) -> None:
    """Check the version before the fields, which may differ in another version."""
    version = values.get("schema_version") if isinstance(values, dict) else None
    if isinstance(version, int) and not isinstance(version, bool) and not 1 <= version <= SCHEMA_VERSION:
        raise IntegrityError(
            f"{where} was written by another version",
            got=f"schema version {version}",
            expected=f"schema version 1 to {SCHEMA_VERSION}",
            fix="update precision-time, or publish again with this version",
        )
