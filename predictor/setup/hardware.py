"""Devices: peak rates, memory, links and supported formats, read from files in which every figure has a source."""

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from precision_time.predictor.setup.catalogue import (
    Catalogue,
    check_fields,
    fold_name,
    parse_catalogue,
    required_fields,
)
from precision_time.predictor.setup.links import LINK_KINDS
from precision_time.predictor.setup.precision import FORMAT_BYTES, PRECISIONS, Precision
from precision_time.predictor.shipped import shipped_text
from precision_time.storage.errors import InputError, NotFoundError, PrecisionUnsupportedError, UnknownNameError

__all__ = [
    "ACHIEVED_OVER_PEAK",
    "HardwareSpec",
    "check_precision",
    "choose_precision",
    "find_hardware",
    "known_hardware",
    "load_hardware",
    "parse_bandwidth",
    "supported_precisions",
]

#: Largest measured rate over the nominal one: clocks differ by a little, a figure with sparsity by a factor of two.
ACHIEVED_OVER_PEAK = 1.05


def _is_positive(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value) and value > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareSpec:
    """One kind of device in its usual node. FLOP/s are dense peaks; bytes per second are one way.

    ``peak_flops_per_s`` maps a format (``fp32 tf32 fp16 bf16 fp8 nvfp4``) to the rate of matrix products that
    accumulate in fp32; a format that is absent is not supported in hardware. ``link`` is a name of ``LINK_KINDS``.
    ``link_bytes_per_s`` is the rate of one device inside a node, ``network_bytes_per_s`` that of a whole node.
    ``all_reduce_latency_s`` is the size-independent part of an all-reduce over two devices of a node.
    ``launch_overhead_s`` is the time of the host for one eager operation.

    ``chip`` is the silicon, which sister parts share (``GA100``; empty for a CPU). ``nvlink_domain`` is the number of
    GPUs that share NVLink across the nodes of a rack; None where NVLink ends at the node. ``achieved_flops_per_s`` are
    measured rates of large matrix products by format, ``achieved_memory_bytes_per_s`` that of copies, both of one card
    at its own power and clocks. A file whose achieved rate is above ``ACHIEVED_OVER_PEAK`` of the nominal one is
    refused.

    Raises ``InputError`` for a value that is not positive and finite, or an unknown kind, link or format.
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
    chip: str = ""
    nvlink_domain: int | None = None
    sm_count: int | None = None
    boost_clock_hz: float | None = None
    l2_bytes: int | None = None
    power_w: float | None = None
    achieved_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    achieved_memory_bytes_per_s: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            self._check_field(item.name, item.type, has_default=item.default is not MISSING)
        if self.kind not in ("gpu", "cpu"):
            raise self._refuse("kind", self.kind, "gpu or cpu")
        if self.link not in LINK_KINDS:
            raise self._refuse("link", self.link, f"one of {', '.join(LINK_KINDS)}")
        if self.kind == "gpu" and not _is_positive(self.compute_capability):
            raise self._refuse("compute_capability", self.compute_capability, "a number such as 8.0")
        if self.kind == "cpu" and self.compute_capability is not None:
            raise self._refuse("compute_capability", self.compute_capability, "nothing for a CPU")
        self._check_rates()

    def _check_field(self, name: str, kind: Any, *, has_default: bool) -> None:
        value = getattr(self, name)
        if kind is str:
            if not isinstance(value, str) or not (value or has_default):
                raise self._refuse(name, value, "a text" if has_default else "a text that is not empty")
        elif value is None and kind in (int | None, float | None):
            return
        elif kind in (int, int | None):
            if not _is_positive(value) or not isinstance(value, int):
                raise self._refuse(name, value, "an integer of at least 1")
        elif kind in (float, float | None) and not _is_positive(value):
            raise self._refuse(name, value, "a positive finite number")

    def _check_rates(self) -> None:
        for name in ("peak_flops_per_s", "achieved_flops_per_s"):
            rates = getattr(self, name)
            if not isinstance(rates, Mapping) or (name == "peak_flops_per_s" and "fp32" not in rates):
                raise self._refuse(name, rates, "FLOP/s by format, fp32 among the peaks")
            for unit, rate in rates.items():
                if unit not in FORMAT_BYTES:
                    raise self._refuse(name, unit, f"formats among {', '.join(FORMAT_BYTES)}")
                if not _is_positive(rate):
                    raise self._refuse(f"{name}.{unit}", rate, "a positive finite number")

    def _check_achieved(self) -> "HardwareSpec":
        # Files only: code that replaces the nominal rates need not know the measured ones.
        pairs = [
            (f"achieved_flops_per_s.{unit}", rate, self.peak_flops_per_s.get(unit, 0.0))
            for unit, rate in self.achieved_flops_per_s.items()
        ]
        if self.achieved_memory_bytes_per_s is not None:
            pairs.append(("achieved_memory_bytes_per_s", self.achieved_memory_bytes_per_s, self.memory_bytes_per_s))
        for name, achieved, nominal in pairs:
            if achieved > ACHIEVED_OVER_PEAK * nominal:
                raise self._refuse(name, achieved, f"at most {ACHIEVED_OVER_PEAK} of the nominal {nominal:g}")
        return self

    def _refuse(self, field: str, got: object, expected: str) -> InputError:
        return InputError(f"{field} of hardware {self.name!r} is not usable", got=repr(got), expected=expected)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "HardwareSpec":
        """The inverse of ``to_dict``; raises ``InputError`` naming the fields that are missing or unknown.

        Fields with a default may be missing: files written before such a field existed still load.
        """
        name = str(values.get("name", "without a name"))
        known = {item.name for item in fields(cls)}
        check_fields(values, known=known, required=required_fields(cls), where=f"hardware {name!r}")
        return cls(**values)._check_achieved()


def _specify(catalogue: Catalogue) -> dict[str, HardwareSpec]:
    return {name: HardwareSpec(**values)._check_achieved() for name, values in catalogue.entries.items()}


@functools.cache
def _shipped() -> tuple[Catalogue, dict[str, HardwareSpec]]:
    catalogue = parse_catalogue(shipped_text("gpus.toml"), record=HardwareSpec, where="predictor/data/gpus.toml")
    return catalogue, _specify(catalogue)


def known_hardware() -> dict[str, HardwareSpec]:
    """The shipped devices by canonical name (``predictor/data/gpus.toml``)."""
    return dict(_shipped()[1])


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
    return _specify(parse_catalogue(text, record=HardwareSpec, where=str(path)))


def find_hardware(name: str, *, measured: Iterable[HardwareSpec] = ()) -> HardwareSpec:
    """The device called ``name``, by canonical name, alias or the name its driver prints; ``measured`` ones first.

    Case, blanks, dashes and the maker's name do not matter. ``cpu`` means the one measured CPU if there is exactly
    one, else the generic entry. Raises ``UnknownNameError`` with the nearest three names.
    """
    by_name = {fold_name(spec.name): spec for spec in measured}
    catalogue, shipped = _shipped()
    key = fold_name(str(name))
    if key == "cpu":
        measured_cpus = [spec for spec in by_name.values() if spec.kind == "cpu"]
        return measured_cpus[0] if len(measured_cpus) == 1 else shipped["cpu"]
    if key in by_name:
        return by_name[key]
    canonical = catalogue.names.get(key)
    if canonical is None:
        names = {*shipped, *(spec.name for spec in by_name.values())}
        raise UnknownNameError(
            "GPU",
            str(name),
            names,
            fix="name a known device, describe yours in a hardware file, or measure it in a campaign",
        )
    return by_name.get(fold_name(canonical), shipped[canonical])


#: Policies to offer in place of one that a device lacks, best first: the same range of numbers before the same width.
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

#: The first compute capability whose tensor cores multiply matrices of a format, and its name.
_FIRST_SUPPORT: dict[str, tuple[float, str]] = {
    "fp16": (7.0, "7.0 (Volta)"),
    "tf32": (8.0, "8.0 (Ampere)"),
    "bf16": (8.0, "8.0 (Ampere)"),
    "fp8": (8.9, "8.9 (Ada) or 9.0 (Hopper)"),
    "nvfp4": (10.0, "10.0 (Blackwell)"),
}


def supported_precisions(spec: HardwareSpec) -> tuple[str, ...]:
    """Canonical names of the policies whose products the device computes in hardware."""
    return tuple(name for name, policy in PRECISIONS.items() if policy.compute in spec.peak_flops_per_s)


def _explain_lack(spec: HardwareSpec, unit: str) -> str:
    if spec.kind == "cpu":
        return "tf32 is a format of GPU tensor cores" if unit == "tf32" else f"no {unit} rate is known for this CPU"
    first, generation = _FIRST_SUPPORT.get(unit, (math.inf, ""))
    if spec.compute_capability is not None and spec.compute_capability >= first:
        return f"no {unit} rate is known for this GPU"
    reason = f"compute capability {spec.compute_capability} has no {unit} tensor-core path"
    return f"{reason}; it begins with {generation}" if generation else reason


def choose_precision(
    spec: HardwareSpec, precision: Precision, *, allow_fallback: bool = False
) -> tuple[Precision, str | None]:
    """The policy that the device runs, and the reason where it differs from ``precision``.

    It is ``precision`` itself where the device has a unit for its format, else with ``allow_fallback`` the nearest
    supported policy; the reason names both.

    Raises ``PrecisionUnsupportedError`` where a fallback is needed and not allowed. The message names the device, the
    policy, the reason and the nearest supported policy.
    """
    if precision.compute in spec.peak_flops_per_s:
        return precision, None
    supported = supported_precisions(spec)
    offered = next((name for name in _NEAREST_POLICIES.get(precision.name, ()) if name in supported), "fp32")
    hint = " (fp16 with loss scaling)" if offered == "amp_fp16" else ""
    lack = f"{spec.name} does not support {precision.name}: {_explain_lack(spec, precision.compute)}"
    if allow_fallback:
        return PRECISIONS[offered], f"{lack}; answered for {offered}{hint} in its place, since a fallback was allowed"
    raise PrecisionUnsupportedError(
        lack,
        got=precision.name,
        expected=f"one of {', '.join(supported)}",
        fix=f"use {offered}{hint}",
    )


def check_precision(spec: HardwareSpec, precision: Precision) -> None:
    """Refuse a policy whose format the device does not compute in hardware.

    Raises ``PrecisionUnsupportedError`` as ``choose_precision`` does.
    """
    choose_precision(spec, precision)


_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY_PREFIXES = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_BANDWIDTH = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*"
    r"(?P<prefix>[kKmMgGtT]?i?)(?P<unit>bit|bits|Bit|Bits|byte|bytes|Byte|Bytes|b|B)(?:/s|ps|/sec)"
)


def parse_bandwidth(text: str) -> float:
    """Bytes per second of a bandwidth with its unit: ``25 Gbit/s``, ``25Gb/s``, ``25 Gbps`` (bits), ``3.1 GB/s``.

    A small ``b`` is a bit and a capital ``B`` a byte; ``G`` is 10^9 and ``Gi`` 2^30. Raises ``InputError`` for a bare
    number, an unknown unit, a missing ``/s``, and a value that is not positive and finite.
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
