"""The parts of an outer step on a GPU: compiled kernels, features rounded on the device, and the Gram product."""

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from precision_time.casgd.arrays import import_cupy
from precision_time.casgd.errors import InputError
from precision_time.casgd.precision import PrecisionPolicy

__all__ = [
    "SOURCE",
    "WARP",
    "GramProduct",
    "compile_options",
    "largest_block_rows",
    "load_kernels",
    "real_type",
    "store_rounded",
    "stored_type",
]

SOURCE = Path(__file__).with_name("recurrence.cu")
WARP = 32

_FORMATS = MappingProxyType({"bf16": 1, "fp16": 2, "tf32": 3, "fp32": 4})
_ARITHMETIC = ("margin_accumulate", "gram_accumulate", "recurrence", "link", "increment", "weights")
# From cublas_api.h and library_types.h; the module with their names cannot be imported without a GPU.
_R_32F, _R_64F, _R_16F, _R_16BF = 0, 1, 2, 14
_COMPUTE_32F, _COMPUTE_64F, _COMPUTE_32F_FAST_TF32 = 68, 70, 77
_GEMM_DEFAULT = -1
_TRANSPOSED, _AS_IS = 1, 0

_STATIC_SHARED_BYTES = 48 * 1024  # the shared memory of a kernel without a special attribute
_ROWS_AT_ONCE = 2**16  # rows rounded at a time, to bound the memory of the copy


def real_type(policy: PrecisionPolicy) -> np.dtype[Any]:
    """float64 if any arithmetic of the policy is FP64, else float32."""
    return np.dtype(np.float64 if any(getattr(policy, name) == "fp64" for name in _ARITHMETIC) else np.float32)


def stored_type(policy: PrecisionPolicy) -> np.dtype[Any]:
    """The type of the features on the device: BF16 and FP16 as bits, so no array library needs these types."""
    if real_type(policy) == np.float64:
        return np.dtype(np.float64)
    return np.dtype(np.uint16 if policy.x_storage in ("bf16", "fp16") else np.float32)


def compile_options(policy: PrecisionPolicy) -> tuple[str, ...]:
    """The macros of recurrence.cu for a policy.

    With FP64 arithmetic the features are rounded to their format and held in float64: cuBLAS multiplies no BF16 into
    FP64. TF32 features are held in float32.

    Raises:
        InputError: arithmetic below FP32, or weights that are not FP32 or FP64.
    """
    policy.check_executable()
    if policy.weights not in ("fp32", "fp64"):
        raise InputError(
            f"policy {policy.name!r}: weights below fp32 on a GPU", got=policy.weights, expected="fp32 or fp64"
        )
    double = real_type(policy) == np.float64

    def rounding(fmt: str) -> int:
        held = "fp64" if double else "fp32"
        return 0 if fmt in (held, "fp64") else _FORMATS[fmt]

    stored = 3 if double else {"bf16": 0, "fp16": 1}.get(policy.x_storage, 2)
    return (
        f"-DREAL={'double' if double else 'float'}",
        f"-DSTORED={stored}",
        f"-DROUND_FEATURES={rounding(policy.x_storage) if stored >= 2 else 0}",
        f"-DROUND_GRAM={rounding(policy.gram_storage)}",
        f"-DROUND_MARGIN={rounding(policy.margin_storage)}",
    )


def largest_block_rows(policy: PrecisionPolicy) -> int:
    """The largest s b: the coefficients of a block fit the shared memory of the single CTA of the recurrence."""
    return _STATIC_SHARED_BYTES // real_type(policy).itemsize - 1024 // WARP


@lru_cache(maxsize=16)
def load_kernels(options: tuple[str, ...], device: int) -> Mapping[str, Any]:
    """The compiled kernels by name; CuPy keeps the binaries on disk between processes."""
    del device  # a module belongs to the device it was loaded on
    module = import_cupy().RawModule(code=SOURCE.read_text(encoding="utf-8"), options=options)
    names = ("store_float32", "store_float64", "gather_rows", "margins", "recurrence", "increment")
    return MappingProxyType({name: module.get_function(name) for name in names})


def store_rounded(features: Any, *, kernels: Mapping[str, Any], policy: PrecisionPolicy, stride: int) -> Any:
    """The features (m, n) of the current device rounded once, (m, stride) with zeros in the added columns.

    Raises:
        InputError: NaN, infinity, or values past the range of the format.
    """
    cupy = import_cupy()
    m, columns = features.shape
    fmt = policy.x_storage
    largest = 65519.99 if fmt == "fp16" else math.inf  # rounds to 65504, the largest finite FP16
    target = cupy.empty((m, stride), dtype=stored_type(policy))
    for start in range(0, m, _ROWS_AT_ONCE):
        part = features[start : start + _ROWS_AT_ONCE]
        if part.dtype.name not in ("float32", "float64"):
            part = part.astype(np.float32)
        part = cupy.ascontiguousarray(part)
        if part.size:
            size = float(cupy.abs(part).max())
            if not size < largest:
                beyond = "NaN or infinity" if not math.isfinite(size) else f"values past the range of {fmt}"
                raise InputError(
                    f"features hold {beyond}",
                    got=f"{size:g} in rows {start} to {start + part.shape[0] - 1}",
                    fix="standardise the columns first, or choose policy 'recipe' or 'fp32'",
                )
        out = target[start : start + part.shape[0]]
        arguments = (part, np.int64(part.shape[0]), np.int32(columns), np.int32(stride), out)
        kernels[f"store_{part.dtype.name}"]((-(-out.size // 256),), (256,), arguments)
    return target


class GramProduct:
    """Y Y^T by cuBLAS: BF16, FP16, TF32 or FP32 in and FP32 out, or FP64 throughout.

    ``cupy.matmul`` would round the sums of BF16 products to BF16.
    """

    def __init__(self, cupy: Any, policy: PrecisionPolicy) -> None:
        self._cupy = cupy
        # Under this name CuPy also finds the library among pip's packages; under its module name it does not.
        self._cublas = cupy.cuda.cublas
        real = real_type(policy)
        self._kind, self._result, self._compute = _R_32F, _R_32F, _COMPUTE_32F
        if real == np.float64:
            self._kind, self._result, self._compute = _R_64F, _R_64F, _COMPUTE_64F
        elif policy.x_storage in ("bf16", "fp16"):
            self._kind = _R_16BF if policy.x_storage == "bf16" else _R_16F
        elif policy.x_storage == "tf32":
            self._compute = _COMPUTE_32F_FAST_TF32
        self._one, self._zero = np.ones(1, dtype=real), np.zeros(1, dtype=real)

    def run(self, block: Any, rows: int, gram: Any) -> None:
        """Fill ``gram``, rows^2 words, with Y Y^T of the first rows of ``block`` (at least rows, stride).

        cuBLAS is column-major, so row-major Y is Y^T there: op T times op N gives Y Y^T, which is symmetric and has
        the same layout in both orders.
        """
        y, n = block.data.ptr, block.shape[1]
        handle, one, zero = self._cupy.cuda.Device().cublas_handle, self._one.ctypes.data, self._zero.ctypes.data
        self._cublas.gemmEx(
            *(handle, _TRANSPOSED, _AS_IS, rows, rows, n),
            *(one, y, self._kind, n, y, self._kind, n),
            *(zero, gram.data.ptr, self._result, rows, self._compute, _GEMM_DEFAULT),
        )
