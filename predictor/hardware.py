"""What devices are: their peak rates, memory, links and supported formats, each figure with its source."""

import functools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from precision_time.predictor.precision import FORMAT_BYTES, PRECISIONS, Precision
from precision_time.storage.errors import InputError, NotFoundError, PrecisionUnsupportedError, UnknownNameError

__all__ = [
    "LINKS",
    "HardwareSpec",
    "check_precision",
    "find_hardware",
    "hardware_sources",
    "known_hardware",
    "load_hardware",
    "parse_bandwidth",
    "supported_precisions",
]

#: Kinds of link between the devices of one node; ``network.py`` says how collectives use each.
LINKS = (
    "nvlink1-mesh",
    "nvlink2-mesh",
    "nvlink2-switch",
    "nvlink3-switch",
    "nvlink4-switch",
    "nvlink5-switch",
    "pcie3",
    "pcie4",
    "pcie5",
    "shared-memory",
)

_POSITIVE_NUMBERS = (
    "memory_bytes_per_s",
    "link_bytes_per_s",
    "network_bytes_per_s",
    "all_reduce_latency_s",
    "launch_overhead_s",
)
_POSITIVE_INTEGERS = ("memory_bytes", "gpus_per_node")
_TEXTS = ("kind", "architecture", "link")


def _is_positive(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """One kind of device in the node it usually sits in. FLOP/s are dense peaks; bytes per second are one way.

    ``peak_flops_per_s`` maps a format (``fp32 tf32 fp16 bf16 fp8 nvfp4``) to the rate of matrix products that
    accumulate in fp32; a format that is absent is not supported in hardware. ``link_bytes_per_s`` is of one device
    inside a node, ``network_bytes_per_s`` of a whole node, ``all_reduce_latency_s`` the size-independent part of an
    all-reduce over two devices of a node, ``launch_overhead_s`` what the host spends on one eager operation.

    Raises ``InputError`` for a value that is not positive and finite, or a kind, link or format that is not known.
    """

    name: str
    kind: str
    architecture: str
    compute_capability: float | None
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float]
    gpus_per_node: int
    link: str
    link_bytes_per_s: float
    network_bytes_per_s: float
    all_reduce_latency_s: float
    launch_overhead_s: float
    note: str = ""

    def __post_init__(self) -> None:
        for field in ("name", *_TEXTS):
            value = getattr(self, field)
            if not isinstance(value, str) or not value:
                raise self._refuse(field, value, "a text that is not empty")
        if not isinstance(self.note, str):
            raise self._refuse("note", self.note, "a text")
        if self.kind not in ("gpu", "cpu"):
            raise self._refuse("kind", self.kind, "gpu or cpu")
        if self.link not in LINKS:
            raise self._refuse("link", self.link, f"one of {', '.join(LINKS)}")
        for field in _POSITIVE_NUMBERS:
            if not _is_positive(getattr(self, field)):
                raise self._refuse(field, getattr(self, field), "a positive finite number")
        for field in _POSITIVE_INTEGERS:
            if not _is_positive(getattr(self, field)) or not isinstance(getattr(self, field), int):
                raise self._refuse(field, getattr(self, field), "an integer of at least 1")
        if self.kind == "gpu" and not _is_positive(self.compute_capability):
            raise self._refuse("compute_capability", self.compute_capability, "a number such as 8.0")
        if self.kind == "cpu" and self.compute_capability is not None:
            raise self._refuse("compute_capability", self.compute_capability, "nothing for a CPU")
        self._check_peaks()

    def _check_peaks(self) -> None:
        peaks = self.peak_flops_per_s
        if not isinstance(peaks, Mapping) or "fp32" not in peaks:
            raise self._refuse("peak_flops_per_s", peaks, "FLOP/s by format, fp32 among them")
        for unit, peak in peaks.items():
            if unit not in FORMAT_BYTES:
                raise self._refuse("peak_flops_per_s", unit, f"formats among {', '.join(FORMAT_BYTES)}")
            if not _is_positive(peak):
                raise self._refuse(f"peak_flops_per_s.{unit}", peak, "a positive finite number")

    def _refuse(self, field: str, got: object, expected: str) -> InputError:
        return InputError(f"{field} of hardware {self.name!r} is not usable", got=repr(got), expected=expected)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"peak_flops_per_s": dict(self.peak_flops_per_s)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "HardwareSpec":
        """The inverse of ``to_dict``; raises ``InputError`` naming the fields that are missing or unknown."""
        name = str(values.get("name", "without a name"))
        known = {field.name for field in fields(cls)}
        _check_fields(values, known=known, required=known - {"note"}, where=f"hardware {name!r}")
        return cls(**values)


def _check_fields(values: Mapping[str, Any], *, known: set[str], required: set[str], where: str) -> None:
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


def _read_entry(name: str, entry: object, *, sources: Mapping[str, str]) -> tuple[HardwareSpec, dict[str, str]]:
    """One ``[hardware."..."]`` table as a specification, and the source of each of its figures by field."""
    where = f"hardware {name!r}"
    if not isinstance(entry, Mapping):
        raise InputError(f"{where} is not usable", got=repr(entry), expected="a table of fields")
    figures = {*_POSITIVE_NUMBERS, *_POSITIVE_INTEGERS}
    required = {*figures, *_TEXTS, "peak_flops_per_s"} | (
        {"compute_capability"} if entry.get("kind") == "gpu" else set()
    )
    _check_fields(entry, known=required | {"aliases", "note", "compute_capability"}, required=required, where=where)
    values: dict[str, Any] = {field: entry[field] for field in _TEXTS}
    values |= {"name": name, "note": entry.get("note", ""), "compute_capability": None}
    origin: dict[str, str] = {}
    for field in figures | (entry.keys() & {"compute_capability"}):
        values[field], origin[field] = _read_figure(entry[field], where=f"{field} of {where}", sources=sources)
    if not isinstance(entry["peak_flops_per_s"], Mapping):
        raise InputError(f"peak_flops_per_s of {where} is not usable", got=repr(entry["peak_flops_per_s"]),
                         expected="a table of formats")  # fmt: skip
    peaks = values["peak_flops_per_s"] = {}
    for unit, cell in entry["peak_flops_per_s"].items():
        field = f"peak_flops_per_s.{unit}"
        peaks[unit], origin[field] = _read_figure(cell, where=f"{field} of {where}", sources=sources)
    return HardwareSpec(**values), origin


@dataclass(frozen=True, slots=True)
class _Catalogue:
    specs: dict[str, HardwareSpec]
    sources: dict[str, dict[str, str]]
    by_alias: dict[str, str]


def _fold(name: str) -> str:
    """Letters and digits only, without the maker's words: ``NVIDIA A100-SXM4-80GB`` is ``a100sxm480gb``."""
    words = re.findall(r"[a-z0-9]+", name.casefold())
    return "".join(word for word in words if word not in ("nvidia", "tesla", "geforce", "quadro"))


def _parse_catalogue(text: str, *, where: str) -> _Catalogue:
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{where} cannot be read", got=str(error), expected="a TOML file of hardware") from error
    _check_fields(document, known={"sources", "hardware"}, required={"hardware"}, where=where)
    sources = document.get("sources", {})
    if not isinstance(sources, dict) or not isinstance(document["hardware"], dict):
        raise InputError(f"{where} is not usable", expected='tables [sources] and [hardware."NAME"]')
    catalogue = _Catalogue({}, {}, {})
    for name, entry in document["hardware"].items():
        catalogue.specs[name], catalogue.sources[name] = _read_entry(name, entry, sources=sources)
        aliases = entry.get("aliases", [])
        if not isinstance(aliases, list) or not all(isinstance(alias, str) for alias in aliases):
            raise InputError(
                f"aliases of hardware {name!r} are not usable", got=repr(aliases), expected="a list of texts"
            )
        for alias in (name, *aliases):
            owner = catalogue.by_alias.setdefault(_fold(alias), name)
            if owner != name:
                raise InputError(f"{where} gives one name to two devices", got=repr(alias), expected=f"only {owner}")
    return catalogue


@functools.cache
def _shipped() -> _Catalogue:
    text = resources.files("precision_time.predictor").joinpath("data/gpus.toml").read_text(encoding="utf-8")
    return _parse_catalogue(text, where="predictor/data/gpus.toml")


def known_hardware() -> dict[str, HardwareSpec]:
    """The shipped devices by canonical name (``predictor/data/gpus.toml``)."""
    return dict(_shipped().specs)


def hardware_sources(name: str) -> dict[str, str]:
    """Where each figure of the shipped device ``name`` comes from, by field (``peak_flops_per_s.fp16``, ...)."""
    return dict(_shipped().sources[find_hardware(name).name])


def load_hardware(path: str | Path) -> dict[str, HardwareSpec]:
    """The devices of a user's own file, in the form of ``predictor/data/gpus.toml``: every number with its source.

    Raises ``NotFoundError`` for a missing file; ``InputError`` for a field that is missing, unknown, without a
    source or not positive, naming the field and the device.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} cannot be read", got=str(error), expected="a TOML file in UTF-8") from error
    except OSError as error:
        raise NotFoundError("a hardware file cannot be read", got=f"{path}: {error.strerror}") from error
    return _parse_catalogue(text, where=str(path)).specs


def find_hardware(name: str, *, measured: Iterable[HardwareSpec] = ()) -> HardwareSpec:
    """The device called ``name``, by canonical name, alias or the name its driver prints; ``measured`` ones first.

    Case, blanks, dashes and the maker's name do not matter. ``cpu`` means the one measured CPU if there is exactly
    one, else the generic entry. Raises ``UnknownNameError`` with the nearest three names.
    """
    own = {_fold(spec.name): spec for spec in measured}
    shipped = _shipped()
    key = _fold(str(name))
    if key == "cpu":
        measured_cpus = [spec for spec in own.values() if spec.kind == "cpu"]
        return measured_cpus[0] if len(measured_cpus) == 1 else shipped.specs["cpu"]
    if key in own:
        return own[key]
    canonical = shipped.by_alias.get(key)
    if canonical is None:
        names = {*shipped.specs, *(spec.name for spec in own.values())}
        raise UnknownNameError(
            "GPU",
            str(name),
            names,
            fix="name a known device, give yours in a hardware file, or measure it in a campaign",
        )
    return own.get(_fold(canonical), shipped.specs[canonical])


#: What to offer for a policy that a device lacks, best first: the same range of numbers before the same width.
_NEAREST_POLICIES: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "tf32": ("fp32",),
    "amp_fp16": ("amp_bf16", "tf32", "fp32"),
    "amp_bf16": ("amp_fp16", "tf32", "fp32"),
    "fp16": ("bf16", "amp_bf16", "tf32", "fp32"),
    "bf16": ("amp_fp16", "tf32", "fp32"),
    "fp8": ("amp_bf16", "amp_fp16", "tf32", "fp32"),
    "nvfp4": ("fp8", "amp_bf16", "amp_fp16", "tf32", "fp32"),
}

_FIRST_SUPPORT = {"tf32": "8.0 (Ampere)", "bf16": "8.0 (Ampere)", "fp8": "8.9 (Ada) or 9.0 (Hopper)",
                  "nvfp4": "10.0 (Blackwell)"}  # fmt: skip


def supported_precisions(spec: HardwareSpec) -> tuple[str, ...]:
    """Canonical names of the policies whose products the device computes in hardware."""
    return tuple(name for name, policy in PRECISIONS.items() if policy.compute in spec.peak_flops_per_s)


def check_precision(spec: HardwareSpec, precision: Precision) -> None:
    """Refuse a policy whose format the device has no unit for; nothing is ever replaced.

    Raises ``PrecisionUnsupportedError`` with the device, the policy, the reason and the nearest supported policy.
    """
    unit = precision.compute
    if unit in spec.peak_flops_per_s:
        return
    if spec.kind == "cpu":
        reason = "tf32 is a format of GPU tensor cores" if unit == "tf32" else f"no {unit} rate is known for this CPU"
    else:
        reason = f"compute capability {spec.compute_capability} has no {unit} tensor-core path"
        if unit in _FIRST_SUPPORT:
            reason += f"; it begins with {_FIRST_SUPPORT[unit]}"
    supported = supported_precisions(spec)
    offered = next((name for name in _NEAREST_POLICIES.get(precision.name, ()) if name in supported), "fp32")
    hint = " (fp16 with loss scaling)" if offered == "amp_fp16" else ""
    raise PrecisionUnsupportedError(
        f"{spec.name} does not support {precision.name}: {reason}",
        got=precision.name,
        expected=f"one of {', '.join(supported)}",
        fix=f"use {offered}{hint}",
    )


_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY_PREFIXES = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_BANDWIDTH = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*"
    r"(?P<prefix>[kKmMgGtT]?i?)(?P<unit>bit|bits|Bit|Bits|byte|bytes|Byte|Bytes|b|B)(?:/s|ps|/sec)"
)


def parse_bandwidth(text: str) -> float:
    """Bytes per second of a bandwidth with its unit: ``25 Gbit/s``, ``25Gb/s``, ``25 Gbps`` (bits), ``3.1 GB/s``.

    A small ``b`` is a bit and a capital ``B`` a byte; ``G`` is 10^9 and ``Gi`` 2^30. Raises ``InputError`` for a bare
    number, an unknown unit, a missing ``/s``, and for what is not positive and finite.
    """
    match = _BANDWIDTH.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise InputError("a bandwidth is not usable", got=repr(text), expected="a positive number with its unit",
                         fix="write 25 Gbit/s (bits) or 3.1 GB/s (bytes)")  # fmt: skip
    prefix = match["prefix"].casefold()
    scale = _BINARY_PREFIXES[prefix] if prefix in _BINARY_PREFIXES else _PREFIXES.get(prefix)
    in_bits = match["unit"] == "b" or match["unit"].casefold().startswith("bit")
    value = math.nan if scale is None else float(match["number"]) * scale / (8 if in_bits else 1)
    if not _is_positive(value):
        raise InputError("a bandwidth is not usable", got=repr(text), expected="a positive finite bandwidth")
    return value
