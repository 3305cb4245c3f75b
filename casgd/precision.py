"""The nine precision choices of the solver as one value, the named policies, and rounding to a format.

The nine are our own derivation: the list of the paper (arXiv 2606.18463) was not available to us.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from precision_time.casgd.errors import InputError, unknown_name

__all__ = ["CHOICES", "LARGEST", "POLICIES", "ROUNDOFF", "PrecisionPolicy", "carrier", "find_policy", "round_to"]

# Unit roundoff u of round-to-nearest: half the spacing above 1. Bounds depend on a machine through u only.
ROUNDOFF: Mapping[str, float] = MappingProxyType(
    {"fp64": 2.0**-53, "fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
)

#: The largest finite number of each format.
LARGEST: Mapping[str, float] = MappingProxyType(
    {
        "fp64": float(np.finfo(np.float64).max),
        "fp32": float(np.finfo(np.float32).max),
        "tf32": (2 - 2.0**-10) * 2.0**127,
        "fp16": 65504.0,
        "bf16": (2 - 2.0**-7) * 2.0**127,
    }
)

CHOICES = (
    "x_storage",
    "margin_accumulate",
    "margin_storage",
    "gram_accumulate",
    "gram_storage",
    "recurrence",
    "link",
    "increment",
    "weights",
)

# The choices that round after every operation: in FP32 or FP64 in the back ends, in any format in the emulator.
_ARITHMETIC = ("margin_accumulate", "gram_accumulate", "recurrence", "link", "increment")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """The formats of one run, each a key of :data:`ROUNDOFF`.

    x_storage: the stored features, which also enter the Gram product.
    margin_accumulate: the sums of Y w.
    margin_storage: the local margins, and their sums over the ranks (on FP32 or FP64 wires).
    gram_accumulate: the sums of Y Y^T.
    gram_storage: the local Gram blocks, and their sums over the ranks.
    recurrence: the s dependent margins of an outer step.
    link: the derivative of the loss.
    increment: the sums of Y^T c.
    weights: the weights and their update.

    Raises:
        InputError: an unknown format.
    """

    name: str
    x_storage: str
    margin_accumulate: str
    margin_storage: str
    gram_accumulate: str
    gram_storage: str
    recurrence: str
    link: str
    increment: str
    weights: str

    def __post_init__(self) -> None:
        for choice in CHOICES:
            fmt = getattr(self, choice)
            if fmt not in ROUNDOFF:
                raise InputError(f"{choice}: unknown format", got=repr(fmt), expected=", ".join(ROUNDOFF))

    @property
    def formats(self) -> dict[str, str]:
        """The nine choices by name."""
        return {choice: getattr(self, choice) for choice in CHOICES}

    def replace(self, *, name: str, **formats: str) -> "PrecisionPolicy":
        """This policy under another name with some choices changed."""
        return dataclasses.replace(self, name=name, **formats)

    def check_executable(self) -> None:
        """Refuse arithmetic below FP32: no back end rounds after every addition.

        Raises:
            InputError: margin_accumulate, gram_accumulate, recurrence, link or increment is below FP32.
        """
        for choice in _ARITHMETIC:
            fmt = getattr(self, choice)
            if fmt not in ("fp32", "fp64"):
                raise InputError(
                    f"policy {self.name!r}: {choice} below fp32 exists in the emulator only",
                    got=fmt,
                    expected="fp32 or fp64",
                    fix="choose fp32, or study the format with casgd.emulator",
                )


def _uniform(name: str, fmt: str) -> PrecisionPolicy:
    return PrecisionPolicy(name=name, **dict.fromkeys(CHOICES, fmt))


_FP32 = _uniform("fp32", "fp32")
_RECIPE = _FP32.replace(name="recipe", x_storage="bf16")

# `recipe` has margins in FP32: they are only s b words of the traffic, and their rounding is the largest avoidable
# error. `paper` is the recipe C that summaries of arXiv 2606.18463 describe; its margin format is our reading.
POLICIES: Mapping[str, PrecisionPolicy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            _uniform("fp64", "fp64"),
            _FP32,
            _RECIPE,
            _RECIPE.replace(name="paper", margin_storage="bf16"),
            _FP32.replace(name="fp16", x_storage="fp16"),
            _RECIPE.replace(name="bf16-gram", gram_storage="bf16"),
        )
    }
)


def find_policy(policy: str | PrecisionPolicy) -> PrecisionPolicy:
    """The policy of that name, or the policy itself.

    Raises:
        InputError: a name that is not in :data:`POLICIES`.
    """
    if isinstance(policy, PrecisionPolicy):
        return policy
    if isinstance(policy, str) and policy in POLICIES:
        return POLICIES[policy]
    raise unknown_name("precision policy", policy, POLICIES)


def carrier(fmt: str) -> np.dtype[Any]:
    """The NumPy type that holds values of ``fmt`` in arithmetic: float64 for fp64, else float32."""
    return np.dtype(np.float64 if fmt == "fp64" else np.float32)


def round_to(values: Any, fmt: str) -> np.ndarray:
    """``values`` rounded once to ``fmt``, to nearest, ties to even, in an array of :func:`carrier` type.

    A float64 input is rounded to FP16, BF16 and TF32 once, not through float32. Values past the largest number of the
    format become infinite, which the caller must check.

    Raises:
        InputError: an unknown format.
    """
    array = np.asarray(values)
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float64 if array.dtype.kind in "iu" else np.float32)
    with np.errstate(over="ignore"):
        if fmt in ("fp64", "fp32"):
            return array.astype(carrier(fmt), copy=False)
        if fmt == "fp16":
            return array.astype(np.float16).astype(np.float32)
        if fmt == "bf16":
            return _keep_bits(array, 8)
        if fmt == "tf32":
            return _keep_bits(array, 11)
    raise InputError("unknown format", got=repr(fmt), expected=", ".join(ROUNDOFF))


def _keep_bits(array: np.ndarray, bits: int) -> np.ndarray:
    """Round to ``bits`` significant bits with the exponent range of float32.

    Works on the bits as integers, as hardware does: add half of the last place, less one if that place is even, then
    cut. Below the normal range of float32 the spacing is that of the format's subnormals.
    """
    if array.dtype == np.float64:
        array = _to_odd_float32(array)
    cut = 24 - bits
    integers = np.ascontiguousarray(array).view(np.uint32).copy()
    finite = np.isfinite(array).reshape(integers.shape)
    odd = (integers >> np.uint32(cut)) & np.uint32(1)
    rounded = (integers + odd + np.uint32((1 << (cut - 1)) - 1)) & np.uint32((0xFFFFFFFF << cut) & 0xFFFFFFFF)
    integers = np.where(finite, rounded, integers)
    return integers.view(np.float32).reshape(array.shape)


def _to_odd_float32(array: np.ndarray) -> np.ndarray:
    """float64 to float32 by rounding to odd, so that a second rounding to fewer bits is as good as a single one.

    Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", IEEE Trans. Computers 57 (2008).
    """
    nearest = array.astype(np.float32)
    inexact = (nearest.astype(np.float64) != array) & np.isfinite(nearest)
    even = (np.ascontiguousarray(nearest).view(np.uint32).reshape(array.shape) & np.uint32(1)) == 0
    toward = np.where(nearest.astype(np.float64) < array, np.float32(np.inf), np.float32(-np.inf))
    return np.where(inexact & even, np.nextafter(nearest, toward, dtype=np.float32), nearest)
