"""CA-SGD on a GPU through CuPy: BF16 products with FP32 sums; five kernels and one AllReduce an outer step.

Written from the source of CuPy 14.2.0. The kernels are in recurrence.cu; the host draws the batches, computes step
sizes and losses as for NumPy arrays, and waits for the GPU once an epoch.
"""

import dataclasses
import itertools
import time
from types import MappingProxyType
from typing import Any

import numpy as np

from precision_time.casgd.arrays import import_cupy, library_of
from precision_time.casgd.communicator import Done, Pending
from precision_time.casgd.errors import InputError
from precision_time.casgd.gram import packed_gram_words
from precision_time.casgd.kernels import (
    WARP,
    GramProduct,
    compile_options,
    largest_block_rows,
    load_kernels,
    real_type,
    store_rounded,
    stored_type,
)
from precision_time.casgd.nccl import drain
from precision_time.casgd.problem import PARTS, Options, Problem, Solution
from precision_time.casgd.run import Epoch, Run

__all__ = ["LAUNCHES", "DeviceRun"]

#: The launches of an outer step, in this order; the first two are left out if a block is one batch.
LAUNCHES = ("gather_rows", "gemm", "margins", "all_reduce", "recurrence", "increment")

_OBJECTIVES = MappingProxyType({"logistic": 0, "squared": 1, "poisson": 2})

_ALIGNMENT = 8  # columns: tensor cores want leading dimensions that are multiples of it
_TIMED_EVERY = 16  # outer steps; an event costs about as much as a launch


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """The rows of an outer step on the device: their order in ``source``, and the packed buffer they fill."""

    start: int
    rows: int
    words: int  # of the Gram, in front of the margins
    source: Any
    order: Any
    packed: Any

    @property
    def gram(self) -> Any:
        return self.packed[: self.words]

    @property
    def margins(self) -> Any:
        return self.packed[self.words :]


class DeviceRun(Run):
    """A run whose features, weights and s b-vectors are on the current device of CuPy.

    ``launched`` names the launches of the last outer step, at most :data:`LAUNCHES`; with prefetch the Gram has a
    packing kernel and a sum of its own.
    """

    def __init__(self, problem: Problem, options: Options, **more: Any) -> None:
        self.cupy = import_cupy()
        # The host's part has no columns: it draws batches, compares the ranks and checks the losses.
        hosted = dataclasses.replace(problem, features=np.empty((problem.rows, 0), dtype=np.float32))
        self.columns = problem.columns
        self.stride = max(1, -(-problem.columns // _ALIGNMENT)) * _ALIGNMENT
        super().__init__(hosted, options, owned=problem.features, **more)
        self.state = self.cupy.asarray(np.array([self.intercept, 1.0, 0.0]))
        self.launched: list[str] = []
        self._timed: list[tuple[str, Any]] | None = None
        self._marks: list[list[tuple[str, Any]]] = []

    def _place_weights(self, weights: Any) -> np.ndarray:
        """Fill the device; `Run` raises a failure here on all ranks, so no rank waits for one that has left.

        The host's part of the weights is empty.
        """
        features, policy = self._owned, self.options.policy
        if library_of(features) != "cupy" or not hasattr(features, "data") or hasattr(features, "nnz"):
            raise InputError("features on a GPU", got=type(features).__name__, expected="a dense CuPy array")
        device = int(self.cupy.cuda.Device().id)
        if int(features.device.id) != device:
            raise InputError(
                "the features lie on another GPU than the current one",
                got=f"GPU {features.device.id}, and GPU {device} is current",
                fix="call cupy.cuda.Device(i).use() before the features are made",
            )
        self.real = real_type(policy)
        self.kernels = load_kernels(compile_options(policy), device)
        try:
            self.device_features = store_rounded(features, kernels=self.kernels, policy=policy, stride=self.stride)
            self.device_weights = self._place_on_device(weights)
        except MemoryError as error:  # CuPy's own is one
            raise InputError(
                "the features do not fit on the GPU", got=error, fix="more ranks, or a policy that stores less"
            ) from error
        return np.empty(0)

    def _place_on_device(self, weights: Any) -> Any:
        placed = self.cupy.zeros(self.stride, dtype=self.real)
        if weights is not None:
            first = self.cupy.asarray(weights, dtype=self.real)
            if first.shape != (self.columns,):
                raise InputError("initial weights", got=f"shape {first.shape}", expected=f"({self.columns},)")
            placed[: self.columns] = first
        return placed

    def pass_over(self, epoch: Epoch) -> None:
        """One epoch in outer steps of s batches."""
        cupy, b, s = self.cupy, self.batch_size, self.options.s
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
        self._marks = []
        began = time.perf_counter()
        spans = [(start, min(block, self.m - start)) for start in range(0, self.m, block)]
        if self.options.prefetch and s > 1:
            self._pass_ahead(spans)
        else:
            for number, span in enumerate(spans):
                self._begin_step(number)
                self._outer_step(*span)
        # A read of the device has no deadline, so the sums, which have one, must end before it.
        drain(self.comm)
        self.intercept, _, self._loss_sum = self.state.get().tolist()
        self._share_out(time.perf_counter() - began)
        self._timed = None

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
        slots = 2 if self.options.prefetch and with_gram else 1
        self._packed = [cupy.empty(words + block, dtype=self.real) for _ in range(slots)]
        self._coefficients = cupy.empty(block, dtype=self.real)
        self._gram = cupy.empty(block * block if with_gram else 1, dtype=self.real)
        held = (block if with_gram else 1, self.stride)
        self._blocks = [cupy.empty(held, dtype=stored_type(self.options.policy)) for _ in range(slots)]
        if with_gram:
            self._product = GramProduct(cupy, self.options.policy)
        self._prepared = block

    def _begin_step(self, number: int) -> None:
        self.launched = []
        self._timed = [] if number % _TIMED_EVERY == 0 else None
        if self._timed is not None:
            self._marks.append(self._timed)
        self._mark("start")

    def _outer_step(self, start: int, rows: int) -> None:
        """One outer step on rows ``start`` to ``start + rows`` of the epoch: at most six launches, no wait."""
        block = self._form(start, rows, 0)
        self._fill(block, gram=True, margins=True)
        self._mark("gram")
        if self.comm.size > 1:
            self.launched.append("all_reduce")
        self.comm.sum(block.packed)
        self._mark("communicate")
        self._finish_step(block)

    def _pass_ahead(self, spans: list[tuple[int, int]]) -> None:
        """The outer steps of an epoch; the Gram of each is summed during the recurrence of the step before it.

        As in cpu.py, the margins are under way while the next Gram is formed. Two slots alternate. All kernels are on
        one stream; a communicator with its own stream makes that stream wait for this one.
        """
        self._begin_step(0)
        ahead = self._form_ahead(*spans[0], 0)
        pending = self._start_sum(ahead.gram)
        for number in range(len(spans)):
            if number:
                self._begin_step(number)
            block, more = ahead, number + 1 < len(spans)
            self._fill(block, gram=False, margins=True)
            self._mark("recurrence")
            margins = self._start_sum(block.margins)
            if more:
                ahead = self._form_ahead(*spans[number + 1], (number + 1) % 2)
            pending.wait()
            margins.wait()
            self._mark("communicate")
            if more:
                pending = self._start_sum(ahead.gram)
            self._finish_step(block)

    def _form_ahead(self, start: int, rows: int, slot: int) -> _Block:
        block = self._form(start, rows, slot)
        if block.words:
            self._fill(block, gram=True, margins=False)
            self._mark("gram")
        return block

    def _start_sum(self, buffer: Any) -> Pending:
        if not buffer.size:
            return Done()
        if self.comm.size > 1:
            self.launched.append("all_reduce")
        return self.comm.start_sum(buffer)

    def _form(self, start: int, rows: int, slot: int) -> _Block:
        """The rows in place; with more than one batch, a copy of the rows and its Gram."""
        order, source = self._order[start : start + rows], self.device_features
        words = packed_gram_words(rows, self.batch_size)
        if words:
            copy = self._blocks[slot]
            self._launch("gather_rows", (rows,), (128,), (source, order, np.int32(self.stride), copy))
            self._mark("gather")
            source, order = copy, self._identity
            self._product.run(copy, rows, self._gram)
            self.launched.append("gemm")
        return _Block(start, rows, words, source, order, self._packed[slot][: words + rows])

    def _fill(self, block: _Block, *, gram: bool, margins: bool) -> None:
        """Put the Gram, the margins or both into the packed buffer, by one kernel.

        Called with zero columns the kernel makes no margins (zeros, which the next call replaces); called with one
        batch of all rows it packs no Gram.
        """
        self._launch(
            "margins",
            (block.rows,),
            (128,),
            (
                block.source,
                block.order,
                self.device_weights,
                np.int32(self.stride if margins else 0),
                self._gram,
                np.int32(self.batch_size if gram else block.rows),
                np.int64(block.words),
                block.packed,
            ),
            shared_mem=128 // WARP * self.real.itemsize,
        )

    def _finish_step(self, block: _Block) -> None:
        """Recurrence and update, from summed Gram and margins."""
        start, rows, itemsize = block.start, block.rows, self.real.itemsize
        # One warp for each row; a batch of 32 rows or more keeps the whole CTA busy.
        threads = WARP * min(32, max(4, self.batch_size))
        self._launch(
            "recurrence",
            (1,),
            (threads,),
            (
                block.packed,
                np.int64(block.words),
                np.int32(rows),
                np.int32(self.batch_size),
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
            shared_mem=(rows + threads // WARP) * itemsize,
        )
        self._mark("recurrence")
        strips = min(32, max(1, rows // 8))
        self._launch(
            "increment",
            (-(-self.stride // WARP),),
            (WARP, strips),
            (
                block.source,
                block.order,
                self._coefficients,
                self.state,
                np.int32(rows),
                np.int32(self.stride),
                self.device_weights,
            ),
            shared_mem=WARP * strips * itemsize,
        )
        self._mark("update")

    def _launch(self, name: str, grid: tuple[int, ...], block: tuple[int, ...], arguments: Any, **more: int) -> None:
        self.kernels[name](grid, block, arguments, **more)
        self.launched.append(name)

    def _mark(self, part: str) -> None:
        if self._timed is not None:
            event = self.cupy.cuda.Event()
            event.record()
            self._timed.append((part, event))

    def _share_out(self, elapsed_s: float) -> None:
        """Divide the wall seconds of an epoch among the parts, in the proportions of the timed outer steps."""
        spent = dict.fromkeys(PARTS, 0.0)
        for timed in self._marks:
            for (_, before), (part, after) in itertools.pairwise(timed):
                spent[part] += float(self.cupy.cuda.get_elapsed_time(before, after))
        total = sum(spent.values())
        for part, value in spent.items():
            self.seconds[part] += elapsed_s * (value / total if total > 0 else 1 / len(PARTS))

    def _score(self, epoch: Epoch) -> float:
        """The loss that the kernels have summed."""
        total = float(self.m) if self.importance is None else float(np.sum(self.importance))
        return self._loss_sum / total if total > 0 else 0.0

    def finish(self) -> Solution:
        self.weights = self.device_weights[: self.columns].get()
        return super().finish()
