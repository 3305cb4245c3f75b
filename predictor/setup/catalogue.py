"""Catalogues of devices: TOML tables in which every figure carries its source."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["Catalogue", "check_fields", "fold_name", "parse_catalogue", "required_fields"]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The fields of each device by canonical name, and the canonical name of each folded spelling."""

    entries: dict[str, dict[str, Any]]
    names: dict[str, str]


def fold_name(name: str) -> str:
    """Letters and digits only, without the maker's words: ``NVIDIA A100-SXM4-80GB`` is ``a100sxm480gb``."""
    words = re.findall(r"[a-z0-9]+", name.casefold())
    return "".join(word for word in words if word not in ("nvidia", "tesla", "geforce", "quadro"))


def required_fields(record: type[Any]) -> set[str]:
    """Names of the fields of a dataclass that have no default."""
    return {field.name for field in fields(record) if field.default is MISSING and field.default_factory is MISSING}


def check_fields(values: Mapping[str, Any], *, known: set[str], required: set[str], where: str) -> None:
    """Raise ``UnknownNameError`` for a field that is not ``known``, ``InputError`` for a missing ``required`` one."""
    unknown = sorted(values.keys() - known)
    if unknown:
        raise UnknownNameError("field", unknown[0], known, fix=f"correct it in {where}")
    missing = sorted(required - values.keys())
    if missing:
        raise InputError(f"{where} is incomplete", got=f"no {', '.join(missing)}", expected=", ".join(sorted(required)))


def _read_figure(figure: object, *, where: str) -> Any:
    """The number of one ``{ value = ..., source = ... }``."""
    if not isinstance(figure, Mapping) or set(figure) != {"value", "source"}:
        raise InputError(f"{where} has no source", got=repr(figure),
                         expected='{ value = 312e12, source = "data sheet" }',
                         fix="name the source beside every number")  # fmt: skip
    source = figure["source"]
    if not isinstance(source, str) or not source.strip():
        raise InputError(
            f"the source of {where} is not usable", got=repr(source), expected="a text or a key of [sources]"
        )
    return figure["value"]


def _read_entry(name: str, entry: object, *, record: type[Any]) -> dict[str, Any]:
    """One ``[hardware."..."]`` table as plain values."""
    where = f"hardware {name!r}"
    if not isinstance(entry, Mapping):
        raise InputError(f"{where} is not usable", got=repr(entry), expected="a table of fields")
    types = {field.name: field.type for field in fields(record) if field.name != "name"}
    required = required_fields(record) - {"name"}
    if entry.get("kind") != "gpu":
        required -= {"compute_capability"}
    check_fields(entry, known={"aliases", *types}, required=required, where=where)
    values: dict[str, Any] = {"name": name, "compute_capability": None}
    for field, kind in types.items():
        if field not in entry:
            continue
        content = entry[field]
        if kind is str:
            values[field] = content
        elif kind != Mapping[str, float]:
            values[field] = _read_figure(content, where=f"{field} of {where}")
        elif isinstance(content, Mapping):
            values[field] = {
                unit: _read_figure(figure, where=f"{field}.{unit} of {where}") for unit, figure in content.items()
            }
        else:
            raise InputError(f"{field} of {where} is not usable", got=repr(content), expected="a table of formats")
    return values


def parse_catalogue(text: str, *, record: type[Any], where: str) -> Catalogue:
    """Read a TOML text of ``[sources]`` and ``[hardware."NAME"]`` tables with the fields of the dataclass ``record``.

    Its texts are plain; every other field is a figure with a source, or a table of such figures by format.

    Raises ``InputError`` for text that is not TOML, a field that is missing, unknown or without a source, and a
    spelling that two devices claim; ``where`` names the file in the message.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{where} cannot be read", got=str(error), expected="a TOML file of hardware") from error
    check_fields(document, known={"sources", "hardware"}, required={"hardware"}, where=where)
    if not isinstance(document.get("sources", {}), dict) or not isinstance(document["hardware"], dict):
        raise InputError(f"{where} is not usable", expected='tables [sources] and [hardware."NAME"]')
    catalogue = Catalogue({}, {})
    for name, entry in document["hardware"].items():
        catalogue.entries[name] = _read_entry(name, entry, record=record)
        aliases = entry.get("aliases", [])
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            raise InputError(
                f"aliases of hardware {name!r} are not usable", got=repr(aliases), expected="a list of texts"
            )
        for alias in (name, *aliases):
            owner = catalogue.names.setdefault(fold_name(alias), name)
            if owner != name:
                raise InputError(f"{where} gives one name to two devices", got=repr(alias), expected=f"only {owner}")
    return catalogue
