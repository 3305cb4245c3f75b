"""Communication-avoiding SGD: s steps of mini-batch SGD for one sum over the ranks, with the same iterates."""

import time
from typing import Any

import numpy as np

from precision_time.casgd.arrays import library_of
from precision_time.casgd.comm import Pending
from precision_time.casgd.gram import PackedGram, fill_gram, fill_margins, round_in_place
from precision_time.casgd.precision import carrier
from precision_time.casgd.problem import Options, Problem, Solution
from precision_time.casgd.sgd import Epoch, Run, cut, run_sgd

__all__ = ["run_ca_sgd"]


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
    """SGD whose iterates do not depend on s, with one sum over the ranks every s steps.

    With Y the stacked rows of s batches, v = Y w and G = Y Y^T below the diagonal blocks, both summed over ranks in
    one buffer, every rank runs, with rho_j = 1 - eta_j l2 and P = 1:

        z_j = P v_j + w0 - sum_{i<j} G_ji c_i       the margin that SGD would see in step j
        c_j = (eta_j / b) a phi'(z_j, y_j)
        c_i <- rho_j c_i for i < j;  P <- rho_j P;  w0 <- w0 - sum(c_j)

    and then w <- P w - Y^T c on its own columns. In exact arithmetic each iterate is that of SGD: by induction
    w_j = P w - sum_{i<j} Y_i^T c_i. The method is that of arXiv 2011.08281 (no penalty) and 2606.18463. In FP32 the
    weights stay within a roundoff (2^-24) of the largest weight a step of those of s = 1 (tested, not proven).

    Blocks do not straddle epochs: the last block of an epoch may have fewer than s batches, and its last batch fewer
    than b rows. ``options.s == 1`` is :func:`precision_time.casgd.sgd.run_sgd`. ``options.prefetch`` sends the Gram
    blocks of the next outer step ahead, which makes two sums an outer step, only the one of s b words exposed.

    comm: as :func:`precision_time.casgd.comm.find_communicator` takes it; None is one process.
    weights, intercept: where to start, (n_local,) and a number.
    first_step, first_epoch: steps and epochs done before, for the schedule and the shuffling.

    Raises:
        InputError: data, options or ranks that do not fit together, or iterates that diverge.
        CommunicationError: a rank that is gone, or sums that are not the same on all ranks.
    """
    begin: dict[str, Any] = {
        "comm": comm,
        "weights": weights,
        "intercept": intercept,
        "first_step": first_step,
        "first_epoch": first_epoch,
    }
    if options.s == 1:
        return run_sgd(problem, options, **begin)
    if library_of(problem.features) == "cupy":
        from precision_time.casgd.gpu import run_ca_sgd as run_on_gpu

        return run_on_gpu(problem, options, **begin)
    run = Run(problem, options, **begin)
    solver = _OuterSteps(run)
    for epoch in run.epochs():
        solver.pass_over(epoch)
    return run.finish()


class _Recurrence:
    """The s dependent steps on vectors of one block shape: buffers, and the views of each step made once."""

    def __init__(self, packed: PackedGram, run: Run) -> None:
        self._packed = packed
        kind = run.recurrence
        # Where the wire has another type, the received words are converted at once.
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
        """Fill ``z`` and ``c`` from the received buffer; the new intercept and P_s."""
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


class _OuterSteps:
    """The outer steps of a run: gather, Gram and margins, one sum, recurrence, update."""

    def __init__(self, run: Run) -> None:
        self._run = run
        policy = run.options.policy
        self._sizes = cut(len(run.batches), run.options.s)
        self._shapes: dict[tuple[tuple[int, ...], int], tuple[PackedGram, _Recurrence]] = {}
        self._one_type = run.weights.dtype == run.work == run.recurrence
        self._delta = np.empty(run.weights.shape, dtype=run.work)
        self._round_gram = _needs_rounding(policy.gram_storage, run)
        self._round_margins = _needs_rounding(policy.margin_storage, run)
        self._round_weights = policy.weights not in ("fp32", "fp64")

    def pass_over(self, epoch: Epoch) -> None:
        """All blocks of one epoch."""
        if self._run.options.prefetch:
            self._pass_ahead(epoch)
            return
        run = self._run
        now, seconds = time.perf_counter, run.seconds
        step = start = 0
        t0 = now()
        for count in self._sizes:
            packed, recurrence = self._shape(run.batches[step : step + count], 0)
            stop = start + packed.rows
            block = run.features.gather(epoch.rows_between(start, stop))
            t1 = now()
            fill_gram(packed, block)
            t2 = now()
            fill_margins(packed, block, run.weights.astype(run.work, copy=False))
            self._round(packed, gram=True, margins=True)
            t3 = now()
            run.comm.sum(packed.buffer)
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
        """All blocks of one epoch, each one's Gram summed while the block before it is still in its recurrence.

        The Gram depends on the data and on the order of the rows only. The margins are under way while the next
        Gram is formed, and that Gram's sum is under way during this recurrence and update; ``communicate`` counts
        what is waited for.
        """
        run = self._run
        now, seconds = time.perf_counter, run.seconds
        step = start = 0
        ahead = self._form_ahead(epoch, 0, 0, 0, 0)
        pending: Pending = run.comm.start_sum(ahead[0].gram) if ahead[0].gram_words else _NOTHING
        for number, count in enumerate(self._sizes):
            packed, recurrence, block = ahead
            stop = start + packed.rows
            t0 = now()
            fill_margins(packed, block, run.weights.astype(run.work, copy=False))
            self._round(packed, gram=False, margins=True)
            t1 = now()
            margins = run.comm.start_sum(packed.margins)
            next_step = step + count
            more = number + 1 < len(self._sizes)
            if more:
                ahead = self._form_ahead(epoch, number + 1, next_step, stop, (number + 1) % 2)
            t2 = now()
            pending.wait()
            margins.wait()
            t3 = now()
            self._round(packed, gram=True, margins=True)
            pending = run.comm.start_sum(ahead[0].gram) if more and ahead[0].gram_words else _NOTHING
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
        run = self._run
        t0 = time.perf_counter()
        packed, recurrence = self._shape(run.batches[step : step + self._sizes[number]], slot)
        block = run.features.gather(epoch.rows_between(start, start + packed.rows), slot)
        t1 = time.perf_counter()
        fill_gram(packed, block)
        self._round(packed, gram=True, margins=False)
        run.seconds["gather"] += t1 - t0
        run.seconds["gram"] += time.perf_counter() - t1
        return packed, recurrence, block

    def _shape(self, sizes: list[int], slot: int) -> tuple[PackedGram, _Recurrence]:
        key = (tuple(sizes), slot)
        if key not in self._shapes:
            packed = PackedGram(sizes, dtype=self._run.wire)
            self._shapes[key] = packed, _Recurrence(packed, self._run)
        return self._shapes[key]

    def _round(self, packed: PackedGram, *, gram: bool, margins: bool) -> None:
        """Storage formats that the wire's own type is not: what is sent is rounded, and so is the sum."""
        policy = self._run.options.policy
        if gram and self._round_gram:
            round_in_place(packed.gram, policy.gram_storage)
        if margins and self._round_margins:
            round_in_place(packed.margins, policy.margin_storage)

    def _recur(self, recurrence: _Recurrence, epoch: Epoch, start: int, stop: int, step: int) -> float:
        run = self._run
        recurrence.y[:] = epoch.targets[start:stop]
        recurrence.scales[:] = epoch.scales[start:stop]
        run.intercept, decay = recurrence.run(run.intercept, epoch.shrinks[step : step + run.options.s])
        epoch.margins[start:stop] = recurrence.z
        return decay

    def _update(self, block: Any, c: np.ndarray, decay: float) -> None:
        """w <- P w - Y^T c."""
        run = self._run
        weights = run.weights
        if run.problem.l2 > 0:
            np.multiply(weights, decay, weights)
        if self._one_type and isinstance(block, np.ndarray):
            c.dot(block, self._delta)
            np.subtract(weights, self._delta, weights)
        else:
            delta = block.T @ c.astype(run.work, copy=False)
            np.subtract(weights, delta, weights, casting="same_kind")
        if self._round_weights:
            round_in_place(weights, run.options.policy.weights)


def _needs_rounding(fmt: str, run: Run) -> bool:
    return fmt not in ("fp32", "fp64") or carrier(fmt) != run.wire


class _Nothing:
    def wait(self) -> None:
        return


_NOTHING = _Nothing()
