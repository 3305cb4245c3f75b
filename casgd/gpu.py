"""CA-SGD on a GPU through CuPy: BF16 products with FP32 sums, and five kernels and one AllReduce an outer step.

Written from the source of CuPy 14.2.0. What an outer step does is in recurrence.cu; the host draws the batches, tells
the step sizes and judges the losses as for NumPy arrays, and waits for the GPU once an epoch.
"""

import dataclasses
import importlib
import itertools
import math
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from precision_time.casgd.arrays import import_cupy, library_of
from precision_time.casgd.errors import InputError
from precision_time.casgd.precision import PrecisionPolicy
from precision_time.casgd.problem import PARTS, Options, Problem, Solution
from precision_time.casgd.sgd import Epoch, Run

__all__ = ["LAUNCHES", "SOURCE", "DeviceRun", "compile_options", "largest_block_rows", "run_ca_sgd", "run_sgd"]

SOURCE = Path(__file__).with_name("recurrence.cu")

#: What is started on the device in an outer step, in this order; with one block the first two are left out.
LAUNCHES = ("gather_rows", "gemm", "margins", "all_reduce", "recurrence", "increment")

_OBJECTIVES = MappingProxyType({"logistic": 0, "squared": 1, "poisson": 2})
_FORMATS = MappingProxyType({"bf16": 1, "fp16": 2, "tf32": 3, "fp32": 4})
_ARITHMETIC = ("margin_accumulate", "gram_accumulate", "recurrence", "link", "increment", "weights")

# cublas_api.h, library_types.h: names would have to come from a module that does not import without a GPU.
_R_32F, _R_64F, _R_16F, _R_16BF = 0, 1, 2, 14
_COMPUTE_32F, _COMPUTE_64F, _COMPUTE_32F_FAST_TF32 = 68, 70, 77
_GEMM_DEFAULT = -1
_TRANSPOSED, _AS_IS = 1, 0

_ALIGNMENT = 8  # columns: tensor cores want leading dimensions that are multiples of it
_STATIC_SHARED_BYTES = 48 * 1024  # what a kernel may use without asking
_WARP = 32
_TIMED_EVERY = 16  # outer steps: events cost about as much as a launch
_ROWS_AT_ONCE = 2**16  # when features are rounded, to bound the memory of the copy


def _real_type(policy: PrecisionPolicy) -> np.dtype[Any]:
    """float64 if any arithmetic of the policy asks for it, else float32."""
    return np.dtype(np.float64 if any(getattr(policy, name) == "fp64" for name in _ARITHMETIC) else np.float32)


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
    double = _real_type(policy) == np.float64

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
    """The largest s b: the coefficients of a block are in the shared memory of the one CTA of the recurrence."""
    return _STATIC_SHARED_BYTES // _real_type(policy).itemsize - 1024 // _WARP


def packed_gram_words(rows: int, b: int) -> int:
    """Words of the strictly lower blocks of ``rows`` rows in batches of b, the last one perhaps shorter."""
    block = (rows - 1) // b
    return block * (block - 1) // 2 * b * b + (rows - block * b) * block * b


@lru_cache(maxsize=16)
def _load_kernels(options: tuple[str, ...], device: int) -> Mapping[str, Any]:
    """The compiled kernels by name; CuPy keeps the binaries on disk between processes."""
    del device  # a module belongs to the device it was loaded on
    module = import_cupy().RawModule(code=SOURCE.read_text(encoding="utf-8"), options=options)
    names = ("store_float32", "store_float64", "gather_rows", "margins", "recurrence", "increment")
    return MappingProxyType({name: module.get_function(name) for name in names})


class DeviceRun(Run):
    """A run whose features, weights and sb-vectors are on the current device of CuPy.

    ``launched`` has the names of what the last outer step started, at most :data:`LAUNCHES`.
    """

    def __init__(self, problem: Problem, options: Options, *, weights: Any = None, **given: Any) -> None:
        self.cupy = import_cupy()
        features = problem.features
        if library_of(features) != "cupy" or not hasattr(features, "data") or hasattr(features, "nnz"):
            raise InputError("features on a GPU", got=type(features).__name__, expected="a dense CuPy array")
        # The host's part has no columns: it draws batches, checks agreement and judges losses.
        hosted = Problem(
            features=np.empty((problem.rows, 0), dtype=np.float32),
            targets=problem.targets,
            objective=problem.objective,
            l2=problem.l2,
            sample_weight=problem.sample_weight,
            fit_intercept=problem.fit_intercept,
        )
        super().__init__(hosted, options, weights=None, **given)
        policy = options.policy
        self.real = _real_type(policy)
        self.kernels = _load_kernels(compile_options(policy), int(self.cupy.cuda.Device().id))
        self.columns = problem.columns
        self.stride = max(1, -(-problem.columns // _ALIGNMENT)) * _ALIGNMENT
        self.device_features = self._store(features)
        self.device_weights = self._start_on_device(weights)
        self.state = self.cupy.asarray(np.array([self.intercept, 1.0, 0.0]))
        self.launched: list[str] = []
        self._one, self._zero = np.ones(1, dtype=self.real), np.zeros(1, dtype=self.real)

    def _stored_type(self) -> np.dtype[Any]:
        if self.real == np.float64:
            return np.dtype(np.float64)
        # BF16 and FP16 as bits: no array library has to know either.
        return np.dtype(np.uint16 if self.options.policy.x_storage in ("bf16", "fp16") else np.float32)

    def _store(self, features: Any) -> Any:
        """The features rounded once, (m, stride); InputError for NaN, infinity and what the format cannot hold."""
        fmt = self.options.policy.x_storage
        largest = 65519.99 if fmt == "fp16" else math.inf  # rounds to 65504, the largest finite FP16
        target = self.cupy.empty((self.m, self.stride), dtype=self._stored_type())
        for start in range(0, self.m, _ROWS_AT_ONCE):
            part = features[start : start + _ROWS_AT_ONCE]
            if part.dtype.name not in ("float32", "float64"):
                part = part.astype(np.float32)
            part = self.cupy.ascontiguousarray(part)
            if part.size:
                size = float(self.cupy.abs(part).max())
                if not size < largest:
                    beyond = "NaN or infinity" if not math.isfinite(size) else f"values past the range of {fmt}"
                    raise InputError(
                        f"features hold {beyond}",
                        got=f"{size:g} in rows {start} to {start + part.shape[0] - 1}",
                        fix="standardise the columns first, or choose policy 'recipe' or 'fp32'",
                    )
            out = target[start : start + part.shape[0]]
            arguments = (part, np.int64(part.shape[0]), np.int32(self.columns), np.int32(self.stride), out)
            self.kernels[f"store_{part.dtype.name}"]((-(-out.size // 256),), (256,), arguments)
        return target

    def _start_on_device(self, weights: Any) -> Any:
        start = self.cupy.zeros(self.stride, dtype=self.real)
        if weights is not None:
            given = self.cupy.asarray(weights, dtype=self.real)
            if given.shape != (self.columns,):
                raise InputError("initial weights", got=f"shape {given.shape}", expected=f"({self.columns},)")
            start[: self.columns] = given
        return start

    def pass_over(self, epoch: Epoch, s: int) -> None:
        """One epoch in outer steps of s batches."""
        cupy, b = self.cupy, self.batch_size
        block = min(s * b, self.m)
        self._prepare(block, with_gram=s > 1 and self.m > b)
        rows = np.arange(self.m, dtype=np.int32) if epoch.rows is None else epoch.rows.astype(np.int32)
        self._order = cupy.asarray(rows)
        self._targets = cupy.asarray(epoch.targets.astype(self.real, copy=False))
        self._scales = cupy.asarray(epoch.scales.astype(self.real, copy=False))
        self._shrinks = cupy.asarray(np.asarray(epoch.shrinks, dtype=self.real))
        self._importance: Any = np.uintp(0)  # a null pointer
        if self.importance is not None:
            ordered = self.importance if epoch.rows is None else self.importance[epoch.rows]
            self._importance = cupy.asarray(ordered.astype(self.real))
        self.state[2:] = 0.0
        marks: list[list[tuple[str, Any]]] = []
        began = time.perf_counter()
        for number, start in enumerate(range(0, self.m, block)):
            timed: list[tuple[str, Any]] | None = [] if number % _TIMED_EVERY == 0 else None
            self._outer_step(start, min(block, self.m - start), timed)
            if timed:
                marks.append(timed)
        told = self.state.get()  # waits for the device
        self.intercept, self._loss_sum = float(told[0]), float(told[2])
        self._share_out(time.perf_counter() - began, marks)

    def _prepare(self, block: int, *, with_gram: bool) -> None:
        if getattr(self, "_prepared", None) == block:
            return
        if block > largest_block_rows(self.options.policy):
            raise InputError(
                "s times the batch size on a GPU",
                got=block,
                expected=f"at most {largest_block_rows(self.options.policy)}",
                fix="choose a smaller s or batch size",
            )
        cupy = self.cupy
        self._identity = cupy.asarray(np.arange(block, dtype=np.int32))
        words = packed_gram_words(block, self.batch_size)
        self._packed = cupy.empty(words + block, dtype=self.real)
        self._coefficients = cupy.empty(block, dtype=self.real)
        self._gram = cupy.empty(block * block if with_gram else 1, dtype=self.real)
        self._block = cupy.empty((block if with_gram else 1, self.stride), dtype=self._stored_type())
        if with_gram:
            self._cublas = importlib.import_module("cupy_backends.cuda.libs.cublas")  # fails without a GPU's libraries
        self._prepared = block

    def _outer_step(self, start: int, rows: int, timed: list[tuple[str, Any]] | None) -> None:
        """Batches ``start`` to ``start + rows`` of the epoch; at most six launches, nothing waits for the device."""
        self.launched = []
        b, stride = np.int32(self.batch_size), np.int32(self.stride)
        words = packed_gram_words(rows, self.batch_size)
        order = self._order[start : start + rows]
        source = self.device_features
        self._mark("start", timed)
        if rows > self.batch_size:
            self._launch("gather_rows", (rows,), (128,), (source, order, stride, self._block))
            self._mark("gather", timed)
            source, order = self._block, self._identity
            self._multiply(rows)
        itemsize = self.real.itemsize
        self._launch(
            "margins",
            (rows,),
            (128,),
            (source, order, self.device_weights, stride, self._gram, b, np.int64(words), self._packed),
            shared_mem=128 // _WARP * itemsize,
        )
        self._mark("gram", timed)
        if self.comm.size > 1:
            self.launched.append("all_reduce")
        self.comm.sum(self._packed[: words + rows])
        self._mark("communicate", timed)
        # A warp a row; a batch of 32 rows or more keeps all of a CTA busy.
        threads = _WARP * min(32, max(4, self.batch_size))
        self._launch(
            "recurrence",
            (1,),
            (threads,),
            (
                self._packed,
                np.int64(words),
                np.int32(rows),
                b,
                self._targets[start : start + rows],
                self._scales[start : start + rows],
                self._importance if self.importance is None else self._importance[start : start + rows],
                self._shrinks[start // self.batch_size :],
                np.int32(self.problem.l2 > 0),
                np.int32(_OBJECTIVES[self.problem.objective.name]),
                np.int32(self.problem.fit_intercept),
                self._coefficients,
                self.state,
            ),
            shared_mem=(rows + threads // _WARP) * itemsize,
        )
        self._mark("recurrence", timed)
        strips = min(32, max(1, rows // 8))
        self._launch(
            "increment",
            (-(-self.stride // _WARP),),
            (_WARP, strips),
            (source, order, self._coefficients, self.state, np.int32(rows), stride, self.device_weights),
            shared_mem=_WARP * strips * itemsize,
        )
        self._mark("update", timed)

    def _launch(self, name: str, grid: tuple[int, ...], block: tuple[int, ...], arguments: Any, **more: int) -> None:
        self.kernels[name](grid, block, arguments, **more)
        self.launched.append(name)

    def _multiply(self, rows: int) -> None:
        """gram = Y Y^T for the gathered block Y (rows, stride), summed in REAL.

        cuBLAS counts columns first, so Y in rows is Y^T there: op T times op N gives Y Y^T, and a symmetric result has
        no order. ``cupy.matmul`` would round the sums of BF16 products to BF16.
        """
        kind, result, compute = _R_32F, _R_32F, _COMPUTE_32F
        x_storage = self.options.policy.x_storage
        if self.real == np.float64:
            kind, result, compute = _R_64F, _R_64F, _COMPUTE_64F
        elif x_storage in ("bf16", "fp16"):
            kind = _R_16BF if x_storage == "bf16" else _R_16F
        elif x_storage == "tf32":
            compute = _COMPUTE_32F_FAST_TF32
        y, n = self._block.data.ptr, self.stride
        handle, one, zero = self.cupy.cuda.Device().cublas_handle, self._one.ctypes.data, self._zero.ctypes.data
        self._cublas.gemmEx(
            *(handle, _TRANSPOSED, _AS_IS, rows, rows, n),
            *(one, y, kind, n, y, kind, n),
            *(zero, self._gram.data.ptr, result, rows, compute, _GEMM_DEFAULT),
        )
        self.launched.append("gemm")

    def _mark(self, part: str, timed: list[tuple[str, Any]] | None) -> None:
        if timed is not None:
            event = self.cupy.cuda.Event()
            event.record()
            timed.append((part, event))

    def _share_out(self, elapsed_s: float, marks: list[list[tuple[str, Any]]]) -> None:
        """The wall seconds of an epoch among the parts, as the events of every sixteenth outer step divide them."""
        spent = dict.fromkeys(PARTS, 0.0)
        for timed in marks:
            for (_, before), (part, after) in itertools.pairwise(timed):
                spent[part] += float(self.cupy.cuda.get_elapsed_time(before, after))
        total = sum(spent.values())
        for part, value in spent.items():
            self.seconds[part] += elapsed_s * (value / total if total > 0 else 1 / len(PARTS))

    def _score(self, epoch: Epoch) -> float:
        """The loss that the kernels added up."""
        total = float(self.m) if self.importance is None else float(np.sum(self.importance))
        return self._loss_sum / total if total > 0 else 0.0

    def finish(self) -> Solution:
        self.weights = self.device_weights[: self.columns].get()
        return super().finish()


def run_ca_sgd(
    problem: Problem,
    options: Options,
    *,
    comm: Any = None,
    weights: Any = None,
    intercept: float = 0.0,
    first_step: int = 0,
    first_epoch: int = 0,
) -> Solution:
    """CA-SGD on features that are a dense CuPy array; see :func:`precision_time.casgd.ca_sgd.run_ca_sgd`.

    The solution's weights are on the host. ``options.prefetch`` plays no part here. ``seconds`` are wall seconds of
    the epochs, divided among the parts as events of some outer steps tell.

    Raises:
        InputError: features that are sparse or out of range, s b above `largest_block_rows`, a policy that this back
            end cannot do, ranks that disagree, or iterates that diverge.
    """
    run = DeviceRun(
        problem,
        options,
        comm=comm,
        weights=weights,
        intercept=intercept,
        first_step=first_step,
        first_epoch=first_epoch,
    )
    for epoch in run.epochs():
        run.pass_over(epoch, options.s)
    return run.finish()


def run_sgd(
    problem: Problem,
    options: Options,
    *,
    comm: Any = None,
    weights: Any = None,
    intercept: float = 0.0,
    first_step: int = 0,
    first_epoch: int = 0,
) -> Solution:
    """Plain SGD on a dense CuPy array: three kernels and one AllReduce a step, without a gathered copy of the rows."""
    return run_ca_sgd(
        problem,
        dataclasses.replace(options, s=1),
        comm=comm,
        weights=weights,
        intercept=intercept,
        first_step=first_step,
        first_epoch=first_epoch,
    )
