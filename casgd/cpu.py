"""SGD and CA-SGD on NumPy arrays and SciPy CSR matrices."""

import time
from typing import Any

import numpy as np

from precision_time.casgd.communicator import Done, Pending
from precision_time.casgd.gram import PackedGram, fill_gram, fill_margins, round_in_place
from precision_time.casgd.precision import carrier
from precision_time.casgd.problem import PARTS, Options, Problem
from precision_time.casgd.run import Epoch, Run, cut

__all__ = ["HostRun"]


class _Recurrence:
    """The s dependent steps of an outer step, for blocks of one shape: the buffers, and views of them for each step."""

    def __init__(self, packed: PackedGram, run: Run) -> None:
        self._packed = packed
        kind = run.recurrence
        # If the wire has another type, all received words are converted at once.
        self._received = packed if packed.buffer.dtype == kind else PackedGram(packed.sizes, dtype=kind)
        rows, sizes, offsets = packed.rows, packed.sizes, packed.offsets
        self.z = np.empty(rows, dtype=kind)
        self.y = np.empty(rows, dtype=kind)
        self.scales = np.empty(rows, dtype=kind)
        self.c = np.empty(rows, dtype=kind)
        products = np.empty(max(sizes), dtype=kind)
        ones = np.ones(max(sizes), dtype=kind)
        self._steps = [
            (
                self._received.blocks[j],
                self.c[: offsets[j]],
                products[: sizes[j]],
                *(vector[offsets[j] : offsets[j + 1]] for vector in (self._received.margins, self.z, self.y)),
                *(vector[offsets[j] : offsets[j + 1]] for vector in (self.scales, self.c)),
                ones[: sizes[j]],
            )
            for j in range(len(sizes))
        ]
        self._derivative_into = run.problem.objective.derivative_into
        self._fit_intercept = run.problem.fit_intercept
        self._penalised = run.problem.l2 > 0

    def run(self, intercept: float, shrinks: list[float]) -> tuple[float, float]:
        """Fill ``z`` and ``c`` from the received buffer; returns the new intercept and P_s."""
        if self._received is not self._packed:
            np.copyto(self._received.buffer, self._packed.buffer)
        derivative_into = self._derivative_into
        add, multiply, subtract = np.add, np.multiply, np.subtract
        fit_intercept, penalised = self._fit_intercept, self._penalised
        shift = fit_intercept or intercept != 0.0
        decay = 1.0
        for j, (gram, head, product, v, z, y, scales, c, ones) in enumerate(self._steps):
            if penalised:
                multiply(v, decay, v)
            if j:
                gram.dot(head, product)
                subtract(v, product, z)
                if shift:
                    add(z, intercept, z)
            else:
                add(v, intercept, z)
            derivative_into(z, y, c)
            multiply(c, scales, c)
            if penalised:
                multiply(head, shrinks[j], head)
                decay *= shrinks[j]
            if fit_intercept:
                intercept -= float(ones.dot(c))
        return intercept, decay


class HostRun(Run):
    """A run whose features, weights and s b-vectors are in host memory."""

    def __init__(self, problem: Problem, options: Options, **more: Any) -> None:
        super().__init__(problem, options, **more)
        policy = options.policy
        self._sizes = cut(len(self.batches), options.s)
        self._shapes: dict[tuple[tuple[int, ...], int], tuple[PackedGram, _Recurrence]] = {}
        self._one_type = self.weights.dtype == self.work == self.recurrence
        self._delta = np.empty(self.weights.shape, dtype=self.work)
        self._round_gram = self._needs_rounding(policy.gram_storage)
        self._round_margins = self._needs_rounding(policy.margin_storage)
        self._round_weights = policy.weights not in ("fp32", "fp64")

    def _needs_rounding(self, fmt: str) -> bool:
        return fmt not in ("fp32", "fp64") or carrier(fmt) != self.wire

    def pass_over(self, epoch: Epoch) -> None:
        """One epoch: step by step with s = 1, else in outer steps."""
        if self.options.s == 1:
            self._pass_step_by_step(epoch)
        elif self.options.prefetch:
            self._pass_ahead(epoch)
        else:
            self._pass_in_outer_steps(epoch)

    def _pass_step_by_step(self, epoch: Epoch) -> None:
        policy = self.options.policy
        gather, total = self.features.gather, self.comm.sum
        derivative_into = self.problem.objective.derivative_into
        fit_intercept, penalised = self.problem.fit_intercept, self.problem.l2 > 0
        round_margins, round_weights = self._round_margins, self._round_weights
        one_type = self._one_type and self.work == self.wire
        weights, intercept, dense_delta = self.weights, self.intercept, self._delta
        wire = np.empty(self.batch_size, dtype=self.wire)
        coefficients = np.empty(self.batch_size, dtype=self.recurrence)
        ones = np.ones(self.batch_size, dtype=self.recurrence)
        gather_s = communicate_s = recurrence_s = update_s = 0.0
        now = time.perf_counter
        start = 0
        t0 = now()
        for size, shrink in zip(self.batches, epoch.shrinks, strict=True):
            stop = start + size
            if size != wire.shape[0]:
                wire, coefficients, ones = wire[:size], coefficients[:size], ones[:size]
            block = gather(epoch.rows_between(start, stop))
            dense = isinstance(block, np.ndarray)
            t1 = now()
            if dense and one_type:
                block.dot(weights, wire)
            else:
                wire[...] = block @ weights.astype(self.work, copy=False)
            if round_margins:
                round_in_place(wire, policy.margin_storage)
            t2 = now()
            total(wire)
            t3 = now()
            if round_margins:
                round_in_place(wire, policy.margin_storage)
            margins = epoch.margins[start:stop]
            np.add(wire, intercept, margins)
            derivative_into(margins, epoch.targets[start:stop], coefficients)
            np.multiply(coefficients, epoch.scales[start:stop], coefficients)
            if fit_intercept:
                intercept -= float(ones.dot(coefficients))
            t4 = now()
            if penalised:
                np.multiply(weights, shrink, weights)
            if dense and one_type:
                coefficients.dot(block, dense_delta)
                np.subtract(weights, dense_delta, weights)
            else:
                np.subtract(weights, block.T @ coefficients.astype(self.work, copy=False), weights, casting="same_kind")
            if round_weights:
                round_in_place(weights, policy.weights)
            start = stop
            t5 = now()
            gather_s += t1 - t0
            communicate_s += t3 - t2
            recurrence_s += (t2 - t1) + (t4 - t3)
            update_s += t5 - t4
            t0 = t5
        self.intercept = intercept
        for part, value in zip(PARTS, (gather_s, 0.0, communicate_s, recurrence_s, update_s), strict=True):
            self.seconds[part] += value

    def _pass_in_outer_steps(self, epoch: Epoch) -> None:
        now, seconds = time.perf_counter, self.seconds
        step = start = 0
        t0 = now()
        for count in self._sizes:
            packed, recurrence = self._shape(self.batches[step : step + count], 0)
            stop = start + packed.rows
            block = self.features.gather(epoch.rows_between(start, stop))
            t1 = now()
            fill_gram(packed, block)
            t2 = now()
            fill_margins(packed, block, self.weights.astype(self.work, copy=False))
            self._round(packed, gram=True, margins=True)
            t3 = now()
            self.comm.sum(packed.buffer)
            t4 = now()
            self._round(packed, gram=True, margins=True)
            decay = self._recur(recurrence, epoch, start, stop, step)
            t5 = now()
            self._update(block, recurrence.c, decay)
            t6 = now()
            seconds["gather"] += t1 - t0
            seconds["gram"] += t2 - t1
            seconds["communicate"] += t4 - t3
            seconds["recurrence"] += (t3 - t2) + (t5 - t4)
            seconds["update"] += t6 - t5
            t0, start, step = t6, stop, step + count

    def _pass_ahead(self, epoch: Epoch) -> None:
        """One epoch in outer steps; the Gram of each block is summed during the recurrence of the block before it.

        The Gram depends on the data and on the order of the rows only. The margins are under way while the next
        Gram is formed, and the sum of that Gram is under way during this recurrence and update. ``communicate``
        counts the waiting time only.
        """
        now, seconds = time.perf_counter, self.seconds
        step = start = 0
        ahead = self._form_ahead(epoch, 0, 0, 0, 0)
        pending: Pending = self.comm.start_sum(ahead[0].gram) if ahead[0].gram_words else Done()
        for number, count in enumerate(self._sizes):
            packed, recurrence, block = ahead
            stop = start + packed.rows
            t0 = now()
            fill_margins(packed, block, self.weights.astype(self.work, copy=False))
            self._round(packed, gram=False, margins=True)
            t1 = now()
            margins = self.comm.start_sum(packed.margins)
            next_step = step + count
            more = number + 1 < len(self._sizes)
            if more:
                ahead = self._form_ahead(epoch, number + 1, next_step, stop, (number + 1) % 2)
            t2 = now()
            pending.wait()
            margins.wait()
            t3 = now()
            self._round(packed, gram=True, margins=True)
            pending = self.comm.start_sum(ahead[0].gram) if more and ahead[0].gram_words else Done()
            decay = self._recur(recurrence, epoch, start, stop, step)
            t4 = now()
            self._update(block, recurrence.c, decay)
            t5 = now()
            seconds["communicate"] += t3 - t2
            seconds["recurrence"] += (t1 - t0) + (t4 - t3)
            seconds["update"] += t5 - t4
            start, step = stop, next_step

    def _form_ahead(
        self, epoch: Epoch, number: int, step: int, start: int, slot: int
    ) -> tuple[PackedGram, _Recurrence, Any]:
        t0 = time.perf_counter()
        packed, recurrence = self._shape(self.batches[step : step + self._sizes[number]], slot)
        block = self.features.gather(epoch.rows_between(start, start + packed.rows), slot)
        t1 = time.perf_counter()
        fill_gram(packed, block)
        self._round(packed, gram=True, margins=False)
        self.seconds["gather"] += t1 - t0
        self.seconds["gram"] += time.perf_counter() - t1
        return packed, recurrence, block

    def _shape(self, sizes: list[int], slot: int) -> tuple[PackedGram, _Recurrence]:
        key = (tuple(sizes), slot)
        if key not in self._shapes:
            packed = PackedGram(sizes, dtype=self.wire)
            self._shapes[key] = packed, _Recurrence(packed, self)
        return self._shapes[key]

    def _round(self, packed: PackedGram, *, gram: bool, margins: bool) -> None:
        """Round to the storage formats, if the type of the wire is not that format: before the sum and after it."""
        policy = self.options.policy
        if gram and self._round_gram:
            round_in_place(packed.gram, policy.gram_storage)
        if margins and self._round_margins:
            round_in_place(packed.margins, policy.margin_storage)

    def _recur(self, recurrence: _Recurrence, epoch: Epoch, start: int, stop: int, step: int) -> float:
        recurrence.y[:] = epoch.targets[start:stop]
        recurrence.scales[:] = epoch.scales[start:stop]
        self.intercept, decay = recurrence.run(self.intercept, epoch.shrinks[step : step + self.options.s])
        epoch.margins[start:stop] = recurrence.z
        return decay

    def _update(self, block: Any, c: np.ndarray, decay: float) -> None:
        """w <- P w - Y^T c."""
        weights = self.weights
        if self.problem.l2 > 0:
            np.multiply(weights, decay, weights)
        if self._one_type and isinstance(block, np.ndarray):
            c.dot(block, self._delta)
            np.subtract(weights, self._delta, weights)
        else:
            delta = block.T @ c.astype(self.work, copy=False)
            np.subtract(weights, delta, weights, casting="same_kind")
        if self._round_weights:
            round_in_place(weights, self.options.policy.weights)
