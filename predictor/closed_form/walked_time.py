"""Seconds of a pass on a GPU from a walk: nominal work times slow-downs fitted on public measurements."""

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
#: Compute formats by the unit whose slow-down over fp32's they share.
UNITS: dict[str, str] = {"tf32": "tf32", "fp16": "half", "bf16": "half", "fp8": "eighth", "nvfp4": "eighth"}
#: Keys of ``data/rates.toml``: seconds over nominal seconds of products by family and unit, traffic and launches.
SLOWDOWNS = (*PRODUCTS, *TRAFFIC, "weight_traffic", "score_traffic", "launch", "tf32", "half", "eighth", "fused")
#: Groups of traffic that fused kernels and compilers reduce.
FUSIBLE = frozenset({"normalization_traffic", "elementwise_traffic", "cast_traffic"})
#: Order of the norm that joins device and host, which work side by side: a little above the longer of two near times.
_NORM = 4.0
_PLAIN = Implementation()
_ATTENTION = PRODUCTS.index("attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class NominalWork:
    """Nominal seconds of one pass.

    ``products`` are FLOPs at the dense peak by family of ``PRODUCTS``, ``fp32_products`` the same at fp32's peak.
    ``traffic`` are bytes at the memory's bandwidth by group of ``TRAFFIC``, ``weights`` those of weights, ``scores``
    those of written attention scores. ``launches`` are operations at one launch overhead each. ``unit`` and
    ``attention_unit`` are values of ``UNITS``, None where the device computes no faster than in fp32. ``fused`` is
    true where kernels are fused by hand or by a compiler.
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
    """Seconds of one pass; ``launch_bound`` where the host takes longer to queue it than the device to run it."""

    seconds: float
    launch_bound: bool


@functools.cache
def _slowdowns() -> Mapping[str, float]:
    text = shipped_text("rates.toml")
    try:
        slowdowns = {name: float(value) for name, value in tomllib.loads(text)["slowdowns"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _misfit(f"{type(error).__name__}: {error}") from error
    if slowdowns.keys() != set(SLOWDOWNS):
        raise _misfit(", ".join(sorted(slowdowns)))
    unusable = {name: value for name, value in slowdowns.items() if not 0 < value < math.inf}
    if unusable:
        raise _misfit(", ".join(f"{name} = {value}" for name, value in unusable.items()))
    return slowdowns


def _misfit(got: str) -> IntegrityError:
    return IntegrityError(
        "data/rates.toml does not fit",
        got=got,
        expected=f"positive numbers for {', '.join(SLOWDOWNS)}",
        fix="install the package again",
    )


def choose_walk(walks: Mapping[str, Walk], precision: Precision) -> tuple[Walk, float]:
    """The walk that a policy follows, and the policy's bytes over those of that walk.

    16-bit mixed precision follows the walk under autocast. A network stored in a 16-bit format runs the operations of
    fp32 on half of the bytes. So does one that computes in 8 bits or fewer: its recipes keep all else in 16 bits.
    """
    if precision.is_mixed and FORMAT_BYTES[precision.compute] >= FORMAT_BYTES[precision.activations]:
        return walks["amp"], 1.0
    return walks["fp32"], FORMAT_BYTES[precision.activations] / FORMAT_BYTES["fp32"]


@functools.lru_cache(maxsize=8192)
def _add_up(walk: Walk, phase: str) -> tuple[tuple[float, ...], tuple[float, ...], float, float]:
    """FLOPs by family of products and bytes by group of traffic, of a sample; fixed bytes; operations."""
    flops = tuple(walk.total("flops", phase=phase, families=(family,)) for family in PRODUCTS)
    moved = tuple(walk.total("bytes", phase=phase, families=families) for families in TRAFFIC.values())
    return flops, moved, walk.total("bytes_fixed", phase=phase), walk.total("ops", phase=phase)


def _find_unit(hardware: HardwareSpec, number_format: str) -> tuple[float, str | None]:
    """The peak of a device in a format, and the unit that computes it, None where that is no faster than fp32's."""
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
    """The nominal work of ``phase`` (``forward`` or ``backward``) over ``samples`` samples.

    ``weights_share`` is of the weights, ``layers_share`` of the operations, ``products_share`` of the products outside
    attention (frozen weights need no gradient). Attention scores are written once where ``implementation`` says that
    attention is not fused.
    """
    walk, width = choose_walk(walks, precision)
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
    scale = samples * width / hardware.memory_bytes_per_s
    scores = 0.0
    if implementation.flash_attention is False:
        scores = samples * walk.scores * FORMAT_BYTES[precision.activations] / hardware.memory_bytes_per_s
    return NominalWork(
        products=tuple(products),
        fp32_products=tuple([count / fp32_peak for count in work]),
        traffic=tuple([scale * count for count in moved]),
        weights=fixed * weights_share * width / hardware.memory_bytes_per_s,
        scores=scores,
        launches=operations * layers_share * hardware.launch_overhead_s,
        unit=unit,
        attention_unit=attention_unit,
        fused=bool(implementation.fused_kernels or implementation.compiled),
    )


def time_pass(work: NominalWork, slowdowns: Mapping[str, float] | None = None) -> PassTime:
    """Seconds of a pass.

        t = (device^4 + host^4)^(1/4),  device = sum of c_f F_f / Pi + sum of c_g Q_g / B,  host = c_l n tau

    with the slow-downs c, FLOPs F_f by family, the peak Pi, bytes Q_g by group, the bandwidth B, n launches and the
    launch overhead tau. Products in a narrower unit are multiplied by its slow-down too, but take no longer than in
    fp32. ``slowdowns`` has the keys ``SLOWDOWNS`` (default: ``data/rates.toml``).
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
