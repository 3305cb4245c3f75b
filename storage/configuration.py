"""The user's settings for all commands: the configuration file, and environment variables, which override it."""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precision_time.storage.errors import InputError, StorageError

__all__ = ["Configuration", "allowed_hosts", "cache_folder", "configured_registry_url", "read_configuration"]

#: Keys of each section. Other sections belong to other tools and are ignored.
_SECTIONS = {
    "registry": ("url",),
    "artifact": ("reference",),
    "storage": ("allowed_hosts", "allowed_buckets"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The values of ``~/.config/precision_time/config.toml``; None or empty if the file does not set them.

    ``[registry] url`` is where artifacts are looked for, ``[artifact] reference`` the default artifact of a question,
    ``[storage] allowed_hosts`` the S3 servers that are allowed beside Amazon's and this machine, and
    ``[storage] allowed_buckets`` the only buckets that may be opened (all of them if the list is absent).
    """

    registry_url: str | None = None
    artifact_reference: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_buckets: tuple[str, ...] | None = None


def read_configuration() -> Configuration:
    """The configuration file, or the defaults if there is none.

    Raises ``InputError`` for a file that is not TOML, for a value of another type, and for an unknown key in one of
    our sections: a misspelt restriction must not pass as no restriction. Raises ``StorageError`` for an unreadable
    file.
    """
    path = Path.home() / ".config" / "precision_time" / "config.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return Configuration()
    except OSError as error:
        raise StorageError("the configuration file cannot be read", got=f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a TOML file", got=str(error)[:200], fix="correct or remove it") from error
    sections = {name: _check_section(values.get(name, {}), name=name, path=path) for name in _SECTIONS}
    storage = sections["storage"]
    buckets = _read_list(storage, "allowed_buckets", path=path)
    return Configuration(
        registry_url=_read_text(sections["registry"], "registry", "url", path=path, example="folder or URL"),
        artifact_reference=_read_text(
            sections["artifact"], "artifact", "reference", path=path, example="URL/name@champion"
        ),
        allowed_hosts=_read_list(storage, "allowed_hosts", path=path) or (),
        allowed_buckets=buckets,
    )


def configured_registry_url() -> str | None:
    """The default registry: ``PRECISION_TIME_REGISTRY``, else ``[registry] url`` of the file.

    Raises as ``read_configuration``.
    """
    return os.environ.get("PRECISION_TIME_REGISTRY") or read_configuration().registry_url


def allowed_hosts() -> tuple[str, ...]:
    """Hosts of S3 servers that the user trusts: ``PRECISION_TIME_ALLOWED_HOSTS`` (commas between), else the file's.

    Amazon's hosts and this machine are not listed, because they are always allowed. Raises as ``read_configuration``.
    """
    variable = os.environ.get("PRECISION_TIME_ALLOWED_HOSTS")
    hosts = variable.split(",") if variable else read_configuration().allowed_hosts
    return tuple(host.strip().casefold() for host in hosts if host.strip())


def cache_folder(kind: str) -> Path | None:
    """The cache folder for ``kind``; None if ``PRECISION_TIME_CACHE`` is ``off`` or the user has no home.

    It lies in the folder that ``PRECISION_TIME_CACHE`` names, else in ``$XDG_CACHE_HOME/precision_time``
    (``~/.cache/precision_time``). A relative XDG folder is ignored, as the XDG base directory specification demands.
    """
    variable = os.environ.get("PRECISION_TIME_CACHE", "").strip()
    if variable.lower() == "off":
        return None
    try:
        if variable:
            return Path(variable).expanduser() / kind
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (base if base.is_absolute() else Path.home() / ".cache") / "precision_time" / kind
    except RuntimeError:  # no home folder to be found
        return None


def _check_section(section: Any, *, name: str, path: Path) -> dict[str, Any]:
    if not isinstance(section, dict):
        raise InputError(f"[{name}] in {path} is not a section", got=repr(section)[:200], expected=f"[{name}]")
    if unknown := sorted(set(section) - set(_SECTIONS[name])):
        raise InputError(
            f"[{name}] in {path} has an unknown key",
            got=", ".join(unknown)[:200],
            expected=" or ".join(_SECTIONS[name]),
            fix="correct or remove it",
        )
    return section


def _read_text(section: dict[str, Any], name: str, key: str, *, path: Path, example: str) -> str | None:
    value = section.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise InputError(
            f"[{name}] {key} in {path} is not usable", got=repr(value)[:200], expected=f'{key} = "{example}"'
        )
    return value


def _read_list(section: dict[str, Any], key: str, *, path: Path) -> tuple[str, ...] | None:
    values = section.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise InputError(
            f"[storage] {key} in {path} is not usable", got=repr(values)[:200], expected=f'{key} = ["name", "name"]'
        )
    return tuple(values)
