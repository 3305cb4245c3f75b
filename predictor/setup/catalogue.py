"""Catalogues of devices: TOML tables in which every figure carries its source."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["Catalogue", "CatalogueEntry", "check_fields", "fold_name", "parse_catalogue"]

_TEXTS = ("kind", "architecture", "link")
_OPTIONAL_TEXTS = ("chip", "note")
_FIGURES = (
    "memory_bytes",
    "memory_bytes_per_s",
    "gpus_per_node",
    "link_bytes_per_s",
    "network_bytes_per_s",
    "all_reduce_latency_s",
    "launch_overhead_s",
)
_OPTIONAL_FIGURES = (
    "compute_capability",
    "nvlink_domain",
    "sm_count",
    "boost_clock_hz",
    "l2_bytes",
    "power_w",
    "achieved_memory_bytes_per_s",
)
_RATES = ("peak_flops_per_s",)
_OPTIONAL_RATES = ("achieved_flops_per_s",)


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One device: the plain ``values`` of its specification, and where each figure comes from by field."""

    values: dict[str, Any]
    sources: dict[str, str]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Devices by canonical name, and the canonical name of each folded spelling."""

    entries: dict[str, CatalogueEntry]
    names: dict[str, str]


def fold_name(name: str) -> str:
    """Letters and digits only, without the maker's words: ``NVIDIA A100-SXM4-80GB`` is ``a100sxm480gb``."""
    words = re.findall(r"[a-z0-9]+", name.casefold())
    return "".join(word for word in words if word not in ("nvidia", "tesla", "geforce", "quadro"))


def check_fields(values: Mapping[str, Any], *, known: set[str], required: set[str], where: str) -> None:
    """Raise ``UnknownNameError`` for a field that is not ``known``, ``InputError`` for a ``required`` one missing."""
    unknown = sorted(values.keys() - known)
    if unknown:
        raise UnknownNameError("field", unknown[0], known, fix=f"correct it in {where}")
    missing = sorted(required - values.keys())
    if missing:
        raise InputError(f"{where} is incomplete", got=f"no {', '.join(missing)}", expected=", ".join(sorted(required)))


def _read_figure(cell: object, *, where: str, sources: Mapping[str, str]) -> tuple[Any, str]:
    """The number and the source text of one ``{ value = ..., source = ... }``."""
    if not isinstance(cell, Mapping) or set(cell) != {"value", "source"}:
        raise InputError(f"{where} has no source", got=repr(cell), expected='{ value = 312e12, source = "data sheet" }',
                         fix="say beside every number where it comes from")  # fmt: skip
    source = cell["source"]
    if not isinstance(source, str) or not source.strip():
        raise InputError(
            f"the source of {where} is not usable", got=repr(source), expected="a text or a key of [sources]"
        )
    return cell["value"], sources.get(source, source)


def _read_entry(name: str, entry: object, *, sources: Mapping[str, str]) -> CatalogueEntry:
    """One ``[hardware."..."]`` table as plain values and the source of each figure."""
    where = f"hardware {name!r}"
    if not isinstance(entry, Mapping):
        raise InputError(f"{where} is not usable", got=repr(entry), expected="a table of fields")
    required = {*_TEXTS, *_FIGURES, *_RATES} | ({"compute_capability"} if entry.get("kind") == "gpu" else set())
    known = required | {"aliases", *_OPTIONAL_TEXTS, *_OPTIONAL_FIGURES, *_OPTIONAL_RATES}
    check_fields(entry, known=known, required=required, where=where)
    values: dict[str, Any] = {"name": name, "compute_capability": None}
    values |= {field: entry[field] for field in (*_TEXTS, *_OPTIONAL_TEXTS) if field in entry}
    origin: dict[str, str] = {}
    for field in (*_FIGURES, *_OPTIONAL_FIGURES):
        if field in entry:
            values[field], origin[field] = _read_figure(entry[field], where=f"{field} of {where}", sources=sources)
    for table in (*_RATES, *_OPTIONAL_RATES):
        if table not in entry:
            continue
        if not isinstance(entry[table], Mapping):
            raise InputError(f"{table} of {where} is not usable", got=repr(entry[table]), expected="a table of formats")
        rates = values[table] = {}
        for unit, cell in entry[table].items():
            field = f"{table}.{unit}"
            rates[unit], origin[field] = _read_figure(cell, where=f"{field} of {where}", sources=sources)
    return CatalogueEntry(values, origin)


def parse_catalogue(text: str, *, where: str) -> Catalogue:
    """Read a TOML text of ``[sources]`` and ``[hardware."NAME"]`` tables.

    Raises ``InputError`` for text that is not TOML, a field that is missing, unknown or without a source, and a
    spelling that two devices claim; ``where`` names the file in the message.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{where} cannot be read", got=str(error), expected="a TOML file of hardware") from error
    check_fields(document, known={"sources", "hardware"}, required={"hardware"}, where=where)
    sources = document.get("sources", {})
    if not isinstance(sources, dict) or not isinstance(document["hardware"], dict):
        raise InputError(f"{where} is not usable", expected='tables [sources] and [hardware."NAME"]')
    catalogue = Catalogue({}, {})
    for name, entry in document["hardware"].items():
        catalogue.entries[name] = _read_entry(name, entry, sources=sources)
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
