"""Seconds of a pass on a GPU from a walk: nominal work times slow-downs that were fitted on public measurements."""

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.precision import FORMAT_BYTES, Precision
from precision_time.predictor.shipped import shipped_text
from precision_time.predictor.workloads.walk import PRODUCTS, Walk
from precision_time.storage.errors import IntegrityError

__all__ = [
    "FUSIBLE",
    "SLOWDOWNS",
    "TRAFFIC",
    "UNITS",
    "NominalWork",
    "PassTime",
    "choose_walk",
    "describe_nominal",
    "time_pass",
]

#: Families whose traffic shares one slow-down.
TRAFFIC: dict[str, tuple[str, ...]] = {
    "product_traffic": PRODUCTS,
    "normalization_traffic": ("normalization", "pooling"),
    "elementwise_traffic": ("elementwise", "softmax", "reduction", "copy"),
    "cast_traffic": ("cast",),
    "gather_traffic": ("gather",),
}
#: Compute formats that share a slow-down over fp32's.
UNITS: dict[str, str] = {"tf32": "tf32", "fp16": "half", "bf16": "half", "fp8": "eighth", "nvfp4": "eighth"}
#: What ``data/rates.toml`` gives: seconds over nominal ones of products by family and unit, traffic and launches.
SLOWDOWNS = (*PRODUCTS, *TRAFFIC, "weight_traffic", "score_traffic", "launch", "tf32", "half", "eighth", "fused")
#: Groups of traffic that fused kernels and compilers save.
FUSIBLE = frozenset({"normalization_traffic", "elementwise_traffic", "cast_traffic"})
#: Device and host work side by side; a norm of this order lies a little above the longer of both where they are equal.
_NORM = 4.0
_PLAIN = Implementation()
_ATTENTION = PRODUCTS.index("attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class NominalWork:
    """Nominal seconds of one pass: FLOPs at the dense peak by family of ``PRODUCTS`` (``products``) and the same at
    fp32's peak, bytes at the memory's bandwidth by group of ``TRAFFIC``, of weights and of attention scores that are
    written, launches at one overhead each; ``fused`` where kernels were fused by hand or by a compiler.
    """

    products: tuple[float, ...]
    fp32_products: tuple[float, ...]
    traffic: tuple[float, ...]
    weights: float
    scores: float
    launches: float
    unit: str | None
    attention_unit: str | None
    fused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Seconds of one pass; ``launch_bound``: the host takes longer to queue it than the device to run it."""

    seconds: float
    launch_bound: bool


@functools.cache
def _slowdowns() -> Mapping[str, float]:
    text = shipped_text("rates.toml")
    try:
        found = {name: float(value) for name, value in tomllib.loads(text)["slowdowns"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _misfit(f"{type(error).__name__}: {error}") from error
    if found.keys() != set(SLOWDOWNS):
        raise _misfit(", ".join(sorted(found)))
    wrong = {name: value for name, value in found.items() if not 0 < value < math.inf}
    if wrong:
        raise _misfit(", ".join(f"{name} = {value}" for name, value in wrong.items()))
    return found


def _misfit(got: str) -> IntegrityError:
    return IntegrityError(
        "data/rates.toml does not fit",
        got=got,
        expected=f"positive numbers for {', '.join(SLOWDOWNS)}",
        fix="install the package again",
    )


def choose_walk(walks: Mapping[str, Walk], precision: Precision) -> tuple[Walk, float]:
    """The walk a policy follows, and the bytes it moves over those of that walk.

    16-bit mixed precision follows autocast. A network stored in a 16-bit format does what fp32 does, on half of the
    bytes, and so does one that computes in 8 bits or fewer, whose recipes keep all else in 16.
    """
    if precision.is_mixed and FORMAT_BYTES[precision.compute] >= FORMAT_BYTES[precision.activations]:
        return walks["amp"], 1.0
    return walks["fp32"], FORMAT_BYTES[precision.activations] / FORMAT_BYTES["fp32"]


@functools.lru_cache(maxsize=8192)
def _add_up(walk: Walk, phase: str) -> tuple[tuple[float, ...], tuple[float, ...], float, float]:
    """FLOPs by product and bytes by group, both of a sample; bytes that no sample adds to; operations."""
    flops = tuple(walk.total("flops", phase=phase, families=(family,)) for family in PRODUCTS)
    moved = tuple(walk.total("bytes", phase=phase, families=families) for families in TRAFFIC.values())
    return flops, moved, walk.total("bytes_fixed", phase=phase), walk.total("ops", phase=phase)


def _find_unit(hardware: HardwareSpec, number_format: str) -> tuple[float, str | None]:
    """The peak at which a device computes in a format, and the unit that does where it is faster than fp32's."""
    fp32_peak = hardware.peak_flops_per_s["fp32"]
    peak = hardware.peak_flops_per_s.get(number_format, fp32_peak)
    return peak, UNITS.get(number_format) if peak > fp32_peak else None


def describe_nominal(
    walks: Mapping[str, Walk],
    hardware: HardwareSpec,
    precision: Precision,
    *,
    phase: str,
    samples: float,
    weights_share: float = 1.0,
    layers_share: float = 1.0,
    products_share: float = 1.0,
    implementation: Implementation = _PLAIN,
) -> NominalWork:
    """The nominal work of ``phase`` over ``samples`` samples; the shares are of weights, of operations, and of the
    products outside attention (frozen weights need no gradient). Scores are written once where ``implementation`` says
    that attention is not fused.
    """
    walk, narrowed = choose_walk(walks, precision)
    flops, moved, fixed, operations = _add_up(walk, phase)
    fp32_peak = hardware.peak_flops_per_s["fp32"]
    peak, unit = _find_unit(hardware, precision.compute)
    # The products of attention stay in the format of the activations when the rest narrows to fp8 or nvfp4.
    attention_peak, attention_unit = peak, unit
    if FORMAT_BYTES[precision.compute] < FORMAT_BYTES[precision.activations]:
        attention_peak, attention_unit = _find_unit(hardware, precision.activations)
    work = [samples * products_share * count for count in flops]
    work[_ATTENTION] = samples * flops[_ATTENTION]
    products = [count / peak for count in work]
    products[_ATTENTION] = work[_ATTENTION] / attention_peak
    scale = samples * narrowed / hardware.memory_bytes_per_s
    scores = 0.0
    if implementation.flash_attention is False:
        scores = samples * walk.scores * FORMAT_BYTES[precision.activations] / hardware.memory_bytes_per_s
    return NominalWork(
        products=tuple(products),
        fp32_products=tuple([count / fp32_peak for count in work]),
        traffic=tuple([scale * count for count in moved]),
        weights=fixed * weights_share * narrowed / hardware.memory_bytes_per_s,
        scores=scores,
        launches=operations * layers_share * hardware.launch_overhead_s,
        unit=unit,
        attention_unit=attention_unit,
        fused=bool(implementation.fused_kernels or implementation.compiled),
    )


def time_pass(work: NominalWork, slowdowns: Mapping[str, float] | None = None) -> PassTime:
    """Seconds of a pass, (device^4 + host^4)^(1/4): device = sum of c_f F_f / Pi + c_g Q_g / B, host = c_l n tau.

    Products of a narrower unit take its slow-down on top, and never longer than fp32's would. ``slowdowns`` has the
    keys ``SLOWDOWNS`` (default: ``data/rates.toml``).
    """
    rates = _slowdowns() if slowdowns is None else slowdowns
    unit = 1.0 if work.unit is None else rates[work.unit]
    attention_unit = 1.0 if work.attention_unit is None else rates[work.attention_unit]
    products = 0.0
    for family, narrow, wide in zip(PRODUCTS, work.products, work.fp32_products, strict=True):
        if wide:
            products += rates[family] * min((attention_unit if family == "attention" else unit) * narrow, wide)
    fused = rates["fused"] if work.fused else 1.0
    traffic = 0.0
    for group, seconds in zip(TRAFFIC, work.traffic, strict=True):
        traffic += rates[group] * seconds * (fused if group in FUSIBLE else 1.0)
    device = products + traffic + rates["weight_traffic"] * work.weights + rates["score_traffic"] * work.scores
    host = rates["launch"] * work.launches
    longest = max(device, host)
    if longest == 0:
        return PassTime(seconds=0.0, launch_bound=False)
    seconds = longest * math.pow((device / longest) ** _NORM + (host / longest) ** _NORM, 1.0 / _NORM)
    return PassTime(seconds=seconds, launch_bound=host > device)
