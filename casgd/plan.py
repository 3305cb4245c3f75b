"""Choose s, the steps between two communications, from a dozen short probes, and predict the time of an epoch.

The cost model, the parts of an outer step and s* = sqrt(A/C) are our own derivation: the s and the batch sizes of the
paper (arXiv 2606.18463) were not available to us.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.comm import Communicator, OneProcess, check_agreement, find_communicator
from precision_time.casgd.costs import Costs, Sample, fit_costs
from precision_time.casgd.errors import InputError
from precision_time.casgd.guard import choose_policy
from precision_time.casgd.precision import PrecisionPolicy
from precision_time.casgd.problem import PARTS, Options, Problem
from precision_time.casgd.schedules import Schedule

__all__ = ["Plan", "Sample", "plan"]

#: A longer unrolling must be faster by this share: below it, plain SGD is as good and needs no memory for the Gram.
_LEAST_GAIN = 0.05
#: Of equal choices within the noise of a probe, the smaller s is taken: its buffers are smaller.
_TIE = 0.01
#: Costs that miss their own probes by more than this share, on average, choose nothing.
_LARGEST_ERROR = 0.15
_PROBES = 13  # at most: seven s, and two other batch sizes with up to three each
_FEWEST_REPEATS, _MOST_REPEATS = 3, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, and how long an epoch of it will take.

    s, policy: the choice, the same on every rank.
    seconds_per_epoch, low_s, high_s: predicted, with the interval at ``level`` from the residuals of the fit.
    steps_per_epoch, batch_size: what an epoch is.
    speedup: predicted, over plain SGD (s = 1).
    best_s: the unrounded sqrt(A/C); infinite where nothing grows with s, 1 on one process.
    error: the mean absolute relative error of the fit on its own probes.
    reasons: sentences for people.
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
    reasons: tuple[str, ...]

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
    on_risk: Literal["fallback", "warn", "raise"] | None = None,
    largest_s: int = 64,
    memory_bytes: int = 2**28,
    outer_steps: int = 20,
    budget_s: float = 1.5,
    level: float = 0.9,
) -> Plan:
    """Time about a dozen short runs, fit their costs, and choose s for ``options.batch_size``.

    Every rank of ``comm`` calls it with its own columns; all of them choose alike, because they decide from the same
    gathered seconds. ``options.s`` and ``options.epochs`` do not matter, and the weights of a probe are thrown away.
    On one process (``comm`` None or OneProcess) s is 1: there is no communication to avoid, and only plain SGD is
    timed. A DelayedCommunicator counts as a network.

    on_risk: if given, ``guard.choose_policy`` is asked first, and its policy is probed and returned.
    largest_s, memory_bytes: limits on s; the Gram and its buffer take 2 (s b)^2 words.
    outer_steps: of a repeat of a probe, which has three to ten repeats; fewer steps where the ``budget_s`` seconds of
        all probes would not do.
    level: of the interval.

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
        options = dataclasses.replace(options, policy=verdict.policy)
    word_bytes = 8 if options.policy.gram_accumulate == "fp64" else 4
    alone = isinstance(communicator, OneProcess)
    limit = 1 if alone else _largest_block(problem, options, largest_s, memory_bytes, word_bytes)
    probes = _Probes(problem, options, communicator, outer_steps=outer_steps, budget_s=budget_s)
    samples = tuple(probes.run_grid(limit))
    return _decide(
        samples,
        problem=problem,
        options=options,
        costs=fit_costs(samples, word_bytes=word_bytes),
        limit=limit,
        level=level,
        reasons=[*reasons, *(["one process: no communication to avoid, s = 1"] if alone else [])],
    )


def _largest_block(problem: Problem, options: Options, largest_s: int, memory_bytes: int, word_bytes: int) -> int:
    """The largest power of two that s may be: whole batches of an epoch, and a Gram that fits."""
    b = min(options.batch_size, problem.rows)
    s = 1
    while 2 * s <= min(largest_s, problem.rows // b) and 2 * word_bytes * (2 * s * b) ** 2 <= memory_bytes:
        s *= 2
    return s


class _Probes:
    """Short runs on the first rows; their counts follow from gathered seconds, so all ranks make the same calls."""

    def __init__(
        self, problem: Problem, options: Options, comm: Communicator, *, outer_steps: int, budget_s: float
    ) -> None:
        self._problem, self._comm = problem, comm
        self._outer_steps, self._budget_s = outer_steps, budget_s
        # Times do not depend on the step sizes; tiny ones cannot overflow.
        self._options = dataclasses.replace(options, schedule=Schedule(kind="constant", eta0=1e-6), tol=None)
        stored = getattr(problem.features, "nnz", None)
        entries = problem.rows * max(problem.columns, 1)
        shapes = comm.gather([problem.columns, 1.0 if stored is None else stored / entries])
        self._features = sum(int(one[0]) for one in shapes)
        self._columns, self._density = (float(value) for value in max(shapes, key=lambda one: one[0] * one[1]))

    def run_grid(self, limit: int) -> list[Sample]:
        """s = 1, 2, 4, .. at the batch size until it only gets slower, then a few s at a smaller and a larger one."""
        b = min(self._options.batch_size, self._problem.rows)
        powers = [2**k for k in range(limit.bit_length())]
        samples: list[Sample] = []
        for s in powers:
            samples.append(self._run(s, b))
            if samples[-1].step_s > 2 * min(one.step_s for one in samples):
                break
        reached = samples[-1].s
        for other in (max(1, b // 4), min(2 * b, self._problem.rows)):
            wanted = (1, 4, 16) if other < b else (1, 4)
            rows = self._problem.rows
            samples += [self._run(s, other) for s in wanted if other != b and s <= reached and s * other <= rows]
        return samples

    def _run(self, s: int, b: int) -> Sample:
        first, _ = self._time(s, b, 1)  # also warms up
        share_s = self._budget_s / _PROBES
        affordable = int(share_s / max(first * s, 1e-9))  # outer steps
        count = max(1, min(self._outer_steps, affordable // _FEWEST_REPEATS))
        times = max(_FEWEST_REPEATS, min(_MOST_REPEATS, affordable // count))
        repeats = [self._time(s, b, count) for _ in range(times)]
        # Each part at its fastest: what else runs on the machine rarely hits the same part in every repeat.
        parts_s = {part: min(parts[part] for _, parts in repeats) for part in PARTS}
        return Sample(
            objective=self._problem.objective.name,
            policy=self._options.policy.name,
            rows=self._problem.rows,
            features=self._features,
            columns=int(self._columns),
            density=self._density,
            ranks=self._comm.size,
            s=s,
            batch_size=b,
            outer_steps=count * times,
            step_s=sum(parts_s.values()),
            usual_step_s=statistics.median(step_s for step_s, _ in repeats),
            parts_s=MappingProxyType(parts_s),
        )

    def _time(self, s: int, b: int, outer_steps: int) -> tuple[float, dict[str, float]]:
        """Seconds of a step of the slowest rank, whole and by part."""
        block = s * b
        rows = min(outer_steps, self._problem.rows // block) * block
        weights = self._problem.sample_weight
        part = dataclasses.replace(
            self._problem,
            features=self._problem.features[:rows],
            targets=np.asarray(self._problem.targets)[:rows],
            sample_weight=None if weights is None else np.asarray(weights)[:rows],
        )
        epochs = math.ceil(outer_steps * block / rows)
        run = dataclasses.replace(self._options, s=s, batch_size=b, epochs=epochs)
        self._comm.barrier()
        solution = run_ca_sgd(part, run, comm=self._comm)
        mine = {name: solution.seconds[name] / max(solution.steps, 1) for name in PARTS}
        everyone = self._comm.gather(mine)
        slowest = max(everyone, key=lambda one: sum(one.values()))
        return sum(slowest.values()), {name: slowest[name] for name in PARTS}


def _decide(
    samples: Sequence[Sample],
    *,
    problem: Problem,
    options: Options,
    costs: Costs,
    limit: int,
    level: float,
    reasons: list[str],
) -> Plan:
    b = min(options.batch_size, problem.rows)
    stored = samples[0].columns * samples[0].density
    reached = max(one.s for one in samples if one.batch_size == b)
    ratios = [one.step_s / costs.predict_step_s(one.s, one.batch_size, stored_columns=stored) for one in samples]
    error = statistics.fmean(abs(1 / one - 1) for one in ratios)
    # What a run usually takes above its fastest parts: an epoch has no fastest of many.
    usual = statistics.median(one.usual_step_s / one.step_s for one in samples)
    if error <= _LARGEST_ERROR:
        powers = (2**k for k in range(limit.bit_length()))
        by_s = {s: usual * costs.predict_step_s(s, b, stored_columns=stored) for s in powers if s <= reached}
    else:
        by_s = {one.s: one.usual_step_s for one in samples if one.batch_size == b}
        reasons.append(f"costs miss the probes by {error:.0%} (a library that changes its protocol with the message")
        reasons[-1] += " does that): the choice and the time are those of the fastest probe"
    fastest = min(by_s.values())
    s = min(s for s, seconds in by_s.items() if seconds <= fastest * (1 + _TIE))
    gain = 1 - by_s[s] / by_s[1]
    if s > 1 and gain < _LEAST_GAIN:
        reasons.append(f"s = {s} would save {gain:.1%} of the time, under {_LEAST_GAIN:.0%}: s = 1")
        s = 1
    unrounded = 1.0 if limit == 1 else costs.best_s(b, stored_columns=stored)
    if limit > 1:
        speed = "as plain SGD" if s == 1 else f"{by_s[1] / by_s[s]:.1f} times as fast as plain SGD"
        reasons.append(f"s = {s} at batch size {b} is predicted {speed}; sqrt(A/C) is {unrounded:.1f}")
        reasons.append(f"an AllReduce costs {costs.alpha_s * 1e6:.1f} us and {costs.beta_s_per_byte * 1e9:.2f} ns/byte")
    steps = math.ceil(problem.rows / b)
    seconds = steps * by_s[s]
    spread = _spread(ratios, level=level)
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
        reasons=tuple(reasons),
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
