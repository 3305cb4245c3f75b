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

# A larger s must be faster by this share: otherwise plain SGD is as good and needs no memory for the Gram.
_LEAST_GAIN = 0.05
# Choices that differ by less than this share count as equal, and the smallest s wins: its buffers are smaller.
_TIE = 0.01
# Costs that miss their own probes by more than this share, on average, are not used.
_LARGEST_ERROR = 0.15
# The factor of the interval of a prediction from a single probe.
_FIRST_LOOK_SPREAD = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen settings, and the predicted time of an epoch with them.

    s, policy: the choice, the same on every rank.
    batch_size, steps_per_epoch: of the planned run.
    seconds_per_epoch, low_s, high_s: predicted, with the interval at ``level`` from the residuals of the fit.
    speedup: predicted, over plain SGD (s = 1).
    best_s: the unrounded sqrt(A/C); infinite if nothing grows with s, 1 on one process.
    alpha_s, beta_s_per_byte, gamma_s_per_flop, step_s: as in ``costs``.
    error: the mean absolute relative error of the fit on its own probes.
    samples: the probes.
    prefetch: whether the probes used ``options.prefetch``, as a run of this plan should.
    reasons: sentences for people.
    warning: the reason, if any, that the costs do not fit the probes.
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
        """JSON values: the choice, the prediction, the fitted costs and the samples."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("policy", "samples", "costs")]
        content: dict[str, object] = {name: getattr(self, name) for name in names}
        content |= {
            "best_s": None if math.isinf(self.best_s) else self.best_s,
            "policy": self.policy.name,
            "reasons": list(self.reasons),
            "samples": [sample.to_dict() for sample in self.samples],
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

    Every rank of ``comm`` calls it with its own columns. All ranks make the same choice, because they decide from the
    same gathered seconds. ``options.s`` is ignored, and the weights of the probes are discarded. On one process
    (``comm`` None or OneProcess) s is 1: there is no communication to avoid, and only plain SGD is timed. A
    DelayedCommunicator counts as a network.

    on_risk: if given, ``guard.choose_policy`` is called first, and its policy is probed and returned.
    largest_s, memory_bytes: limits on s; the Gram and its buffer take 2 (s b)^2 words.
    outer_steps: of one round of a probe, which has three to ten rounds; fewer if ``budget_s`` seconds for all probes
        are not enough.
    budget_share: if given, planning may take at most this share of the expected time of ``options.epochs`` epochs of
        plain SGD; if that is too little to plan, s is 1.
    level: of the interval.

    Probes take turns, so that a slow spell of the machine affects all of them. If their costs do not fit, as many
    rounds follow; if they still do not fit, s is 1 unless another s was faster in every round.

    Probes run on the first rows: features that fit a cache in a probe and not in an epoch are gathered more slowly
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
    """The costs, their mean absolute relative error on the samples, and measured over predicted time of each sample."""
    costs = fit_costs(samples, word_bytes=word_bytes)
    stored = samples[0].columns * samples[0].density
    ratios = [
        sample.step_s / costs.predict_step_s(sample.s, sample.batch_size, stored_columns=stored) for sample in samples
    ]
    return costs, statistics.fmean(abs(1 / ratio - 1) for ratio in ratios), ratios


def _share_of_wins(sample: Sample, plain: Sample) -> float:
    """The share of the rounds in which ``sample`` was faster than ``plain`` by at least the required gain."""
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
    probed = {sample.s: sample for sample in samples if sample.batch_size == b}
    reached = max(probed)
    costs, error, ratios = _fit(samples, word_bytes)
    warning = ""
    # The usual time over that of the fastest parts, because an epoch cannot pick the fastest of several rounds.
    usual = statistics.median(sample.usual_step_s / sample.step_s for sample in samples)
    if error <= _LARGEST_ERROR:
        powers = (2**k for k in range(limit.bit_length()))
        by_s = {s: usual * costs.predict_step_s(s, b, stored_columns=stored) for s in powers if s <= reached}
    else:
        by_s = {s: sample.usual_step_s for s, sample in probed.items()}
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
        # A gain that the cost model does not explain must show in every round, whatever else ran on the machine.
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
    """The factor of the interval that holds ``level`` of new runs, from measured over predicted times of the probes.

    Student's t on the logarithms. The parts have about five free numbers; fewer than three degrees of freedom count as
    three. The quantile is the expansion of Cornish and Fisher, within 2 % there.
    """
    logs = np.log(ratios)
    freedom = max(3, len(logs) - 5)
    deviation = math.sqrt(float(np.square(logs).sum()) / freedom)
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return math.exp(t * deviation * math.sqrt(1 + 1 / len(logs)))
