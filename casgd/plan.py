"""Choose s, the steps between two communications, from a dozen short probes, and predict the time of an epoch.

The cost model, the parts of an outer step and s* = sqrt(A/C) are our own derivation: the s and the batch sizes of the
paper (arXiv 2606.18463) were not available to us.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from precision_time.casgd.communicator import OneProcess, check_agreement
from precision_time.casgd.costs import Costs, Sample, fit_costs
from precision_time.casgd.errors import InputError
from precision_time.casgd.guard import OnRisk, choose_policy
from precision_time.casgd.mpi import find_communicator
from precision_time.casgd.precision import PrecisionPolicy
from precision_time.casgd.probes import Probes
from precision_time.casgd.problem import Options, Problem

__all__ = ["Plan", "Sample", "plan"]

#: A longer unrolling must be faster by this share: below it, plain SGD is as good and needs no memory for the Gram.
_LEAST_GAIN = 0.05
#: Of equal choices within the noise of a probe, the smaller s is taken: its buffers are smaller.
_TIE = 0.01
#: Costs that miss their own probes by more than this share, on average, choose nothing.
_LARGEST_ERROR = 0.15
#: The factor about a prediction that rests on a first look alone.
_FIRST_LOOK_SPREAD = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, and how long an epoch of it will take.

    s, policy: the choice, the same on every rank.
    seconds_per_epoch, low_s, high_s: predicted, with the interval at ``level`` from the residuals of the fit.
    steps_per_epoch, batch_size: what an epoch is.
    speedup: predicted, over plain SGD (s = 1).
    best_s: the unrounded sqrt(A/C); infinite where nothing grows with s, 1 on one process.
    error: the mean absolute relative error of the fit on its own probes.
    prefetch: whether the probes sent the next Gram ahead (``options.prefetch``), as a run of this plan then should.
    reasons: sentences for people. warning: the one of them that says that the probes were no good; else empty.
    """

    s: int
    policy: PrecisionPolicy
    batch_size: int
    seconds_per_epoch: float
    low_s: float
    high_s: float
    level: float
    steps_per_epoch: int
    speedup: float
    best_s: float
    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_flop: float
    step_s: float
    costs: Costs
    error: float
    samples: tuple[Sample, ...]
    prefetch: bool
    reasons: tuple[str, ...]
    warning: str = ""

    def to_dict(self) -> dict[str, object]:
        """JSON values: the choice, the prediction, what was fitted and the samples."""
        names = [one.name for one in dataclasses.fields(self) if one.name not in ("policy", "samples", "costs")]
        content: dict[str, object] = {name: getattr(self, name) for name in names}
        content |= {
            "best_s": None if math.isinf(self.best_s) else self.best_s,
            "policy": self.policy.name,
            "reasons": list(self.reasons),
            "samples": [one.to_dict() for one in self.samples],
        }
        return content


def plan(
    problem: Problem,
    options: Options,
    *,
    comm: Any = None,
    on_risk: OnRisk | None = None,
    largest_s: int = 64,
    memory_bytes: int = 2**28,
    outer_steps: int = 20,
    budget_s: float = 1.5,
    budget_share: float | None = None,
    level: float = 0.9,
) -> Plan:
    """Time about a dozen short runs, fit their costs, and choose s for ``options.batch_size``.

    Every rank of ``comm`` calls it with its own columns; all of them choose alike, because they decide from the same
    gathered seconds. ``options.s`` does not matter, and the weights of a probe are thrown away. On one process
    (``comm`` None or OneProcess) s is 1: there is no communication to avoid, and only plain SGD is timed. A
    DelayedCommunicator counts as a network.

    on_risk: if given, ``guard.choose_policy`` is asked first, and its policy is probed and returned.
    largest_s, memory_bytes: limits on s; the Gram and its buffer take 2 (s b)^2 words.
    outer_steps: of a round of a probe, which has three to ten rounds; fewer steps where the ``budget_s`` seconds of all
        probes would not do.
    budget_share: if given, planning may take no more than this share of what ``options.epochs`` epochs of plain SGD
        are expected to take; where that is too little to plan, s is 1.
    level: of the interval.

    Probes take turns, so that a slow spell of the machine meets all of them. Where their costs do not fit, as many
    rounds follow; where they still do not, s is 1 unless another was faster in every round.

    Probes run on the first rows: features that fill no cache in a probe and overflow it in an epoch gather slower
    than predicted.

    Raises:
        InputError: a limit out of range; ranks that disagree on the options.
    """
    for name, value in (("largest_s", largest_s), ("outer_steps", outer_steps)):
        if value < 1:
            raise InputError(name, got=value, expected="1 or above")
    if not 0 < level < 1:
        raise InputError("level of the interval", got=level, expected="between 0 and 1")
    communicator = find_communicator(comm)
    check_agreement(
        communicator,
        {"batch_size": options.batch_size, "rows": problem.rows, "policy": options.policy.name, "largest_s": largest_s},
    )
    reasons: list[str] = []
    if on_risk is not None:
        verdict = choose_policy(problem, options, comm=communicator, on_risk=on_risk)
        if verdict.policy != options.policy:
            reasons.append(f"policy {verdict.policy.name} instead of {options.policy.name}: {verdict.warnings[0]}")
        else:
            reasons += [text for text in verdict.warnings if text != verdict.step_warning]
        options = dataclasses.replace(options, policy=verdict.policy)
    word_bytes = 8 if options.policy.gram_accumulate == "fp64" else 4
    alone = isinstance(communicator, OneProcess)
    limit = 1 if alone else _largest_block(problem, options, largest_s, memory_bytes, word_bytes)
    probes = Probes(problem, options, communicator, outer_steps=outer_steps)
    if alone:
        reasons.append("one process: no communication to avoid, s = 1")
    if limit > 1 and budget_share is not None:
        steps = options.epochs * math.ceil(problem.rows / options.batch_size)
        budget_s = min(budget_s, budget_share * steps * probes.sgd_step_s)
        if probes.least_s(limit) > budget_s:
            reasons.append(
                f"planning takes {probes.least_s(limit):.2g} s at least, and may take {budget_share:.0%} of the "
                f"{steps * probes.sgd_step_s:.2g} s that training is expected to take at most: s = 1"
            )
            return _decide(
                probes.samples(), problem=problem, options=options, word_bytes=word_bytes, limit=1, level=level,
                reasons=reasons,
            )  # fmt: skip
    probes.open_grid(limit)
    probes.run_rounds(budget_s / 2)
    if limit > 1 and _fit(probes.samples(), word_bytes)[1] > _LARGEST_ERROR:
        probes.run_rounds(budget_s / 2)
    return _decide(
        probes.samples(), problem=problem, options=options, word_bytes=word_bytes, limit=limit, level=level,
        reasons=reasons,
    )  # fmt: skip


def _largest_block(problem: Problem, options: Options, largest_s: int, memory_bytes: int, word_bytes: int) -> int:
    """The largest power of two that s may be: whole batches of an epoch, and a Gram that fits."""
    b = min(options.batch_size, problem.rows)
    s = 1
    while 2 * s <= min(largest_s, problem.rows // b) and 2 * word_bytes * (2 * s * b) ** 2 <= memory_bytes:
        s *= 2
    return s


def _fit(samples: Sequence[Sample], word_bytes: int) -> tuple[Costs, float, list[float]]:
    """The costs, by how much they miss the samples on average, and measured over predicted of each."""
    costs = fit_costs(samples, word_bytes=word_bytes)
    stored = samples[0].columns * samples[0].density
    ratios = [one.step_s / costs.predict_step_s(one.s, one.batch_size, stored_columns=stored) for one in samples]
    return costs, statistics.fmean(abs(1 / one - 1) for one in ratios), ratios


def _share_of_wins(sample: Sample, plain: Sample) -> float:
    """The share of the rounds in which ``sample`` was faster than ``plain`` by as much as is worth it."""
    wins = [ours < theirs * (1 - _LEAST_GAIN) for ours, theirs in zip(sample.rounds_s, plain.rounds_s, strict=True)]
    return statistics.fmean(wins)


def _decide(
    samples: Sequence[Sample],
    *,
    problem: Problem,
    options: Options,
    word_bytes: int,
    limit: int,
    level: float,
    reasons: list[str],
) -> Plan:
    b = min(options.batch_size, problem.rows)
    stored = samples[0].columns * samples[0].density
    probed = {one.s: one for one in samples if one.batch_size == b}
    reached = max(probed)
    costs, error, ratios = _fit(samples, word_bytes)
    warning = ""
    # What a run usually takes above its fastest parts: an epoch has no fastest of many.
    usual = statistics.median(one.usual_step_s / one.step_s for one in samples)
    if error <= _LARGEST_ERROR:
        powers = (2**k for k in range(limit.bit_length()))
        by_s = {s: usual * costs.predict_step_s(s, b, stored_columns=stored) for s in powers if s <= reached}
    else:
        by_s = {s: one.usual_step_s for s, one in probed.items()}
        warning = (
            f"costs miss the probes by {error:.0%}, as on a busy machine, or with a library that changes its protocol "
            "with the message: s is 1 unless another was faster in every round of probes"
        )
        reasons.append(warning)
    fastest = min(by_s.values())
    s = min(s for s, seconds in by_s.items() if seconds <= fastest * (1 + _TIE))
    gain = 1 - by_s[s] / by_s[1]
    if s > 1 and gain < _LEAST_GAIN:
        reasons.append(f"s = {s} would save {gain:.1%} of the time, under {_LEAST_GAIN:.0%}: s = 1")
        s = 1
    if s > 1 and warning:
        # A gain that no costs explain must show whatever else ran on the machine.
        wins = _share_of_wins(probed[s], probed[1])
        if wins < 1:
            reasons.append(f"s = {s} was faster by {_LEAST_GAIN:.0%} in {wins:.0%} of the rounds only: s = 1")
            s = 1
    elif s > 1 and probed[s].step_s > probed[1].step_s * (1 - _LEAST_GAIN):
        reasons.append(f"s = {s} is predicted to be faster, and its own probe was not by {_LEAST_GAIN:.0%}: s = 1")
        s = 1
    unrounded = 1.0 if limit == 1 else costs.best_s(b, stored_columns=stored)
    if limit > 1:
        speed = "as plain SGD" if s == 1 else f"{by_s[1] / by_s[s]:.1f} times as fast as plain SGD"
        reasons.append(f"s = {s} at batch size {b} is predicted {speed}; sqrt(A/C) is {unrounded:.1f}")
        reasons.append(f"an AllReduce costs {costs.alpha_s * 1e6:.1f} us and {costs.beta_s_per_byte * 1e9:.2f} ns/byte")
    steps = math.ceil(problem.rows / b)
    seconds = steps * by_s[s]
    spread = _spread(ratios, level=level) if len(samples) > 1 else _FIRST_LOOK_SPREAD
    return Plan(
        s=s,
        policy=options.policy,
        batch_size=b,
        seconds_per_epoch=seconds,
        low_s=seconds / usual / spread,
        high_s=seconds * usual * spread,
        level=level,
        steps_per_epoch=steps,
        speedup=by_s[1] / by_s[s],
        best_s=unrounded,
        alpha_s=costs.alpha_s,
        beta_s_per_byte=costs.beta_s_per_byte,
        gamma_s_per_flop=costs.gamma_s_per_flop,
        step_s=costs.step_s,
        costs=costs,
        error=error,
        samples=tuple(samples),
        prefetch=options.prefetch,
        reasons=tuple(reasons),
        warning=warning,
    )


def _spread(ratios: Sequence[float], *, level: float) -> float:
    """The factor about a prediction that holds ``level`` of new runs, from measured over predicted of the probes.

    Student's t on the logarithms. The parts share about five free numbers; a fit that leaves fewer than three degrees
    of freedom is taken as three. The quantile is the expansion of Cornish and Fisher, within 2 % there.
    """
    logs = np.log(ratios)
    freedom = max(3, len(logs) - 5)
    deviation = math.sqrt(float(np.square(logs).sum()) / freedom)
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return math.exp(t * deviation * math.sqrt(1 + 1 / len(logs)))
