"""Training under the guard: a policy before the first epoch, judged again with real weights where no batch can tell."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from precision_time.casgd.arrays import DenseFeatures, library_of, store_features
from precision_time.casgd.communicator import Communicator
from precision_time.casgd.errors import InputError
from precision_time.casgd.guard import OnRisk, Verdict, choose_policy
from precision_time.casgd.precision import ROUNDOFF, PrecisionPolicy, find_policy
from precision_time.casgd.problem import Options, Problem, Solution, Start
from precision_time.casgd.training import train
from precision_time.casgd.validation import agree

__all__ = ["GuardSettings", "Guarded", "choose_precision", "train_guarded"]


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """What the guard is told.

    on_risk, largest_excess: as `guard.choose_policy` takes them.
    own_steps: the first step comes from `training.expected_smoothness`; the guard's advice on it, whose limit is that
        of batches of one row, is then left out.
    epochs: of the whole run, whose last step counts.
    """

    on_risk: OnRisk
    largest_excess: float
    own_steps: bool
    epochs: int


def choose_precision(
    problems: Sequence[Problem],
    options: Options,
    *,
    precision: str | PrecisionPolicy,
    settings: GuardSettings,
    comm: Communicator,
) -> tuple[PrecisionPolicy, tuple[str, ...], Verdict | None]:
    """The policy for all ``problems`` (the classes of one data set), what to warn of, and the worst verdict.

    'auto' starts from the recipe. fp64 and fp32 have nothing to fall back to and are not looked at. That something
    cannot be judged before training is in the verdict and not among the warnings: `train_guarded` judges it later.
    """
    policy = find_policy("recipe" if precision == "auto" else precision)
    if policy.name in ("fp64", "fp32"):
        return policy, (), None
    whole = replace(options, policy=policy, epochs=settings.epochs)
    verdicts = [
        choose_policy(problem, whole, comm=comm, on_risk=settings.on_risk, largest_excess=settings.largest_excess)
        for problem in problems
    ]
    if not verdicts:
        raise InputError("no problem to choose a precision for")
    worst = _find_worst(verdicts)
    return worst.policy, tuple(dict.fromkeys(text for one in verdicts for text in _warned(one, settings))), worst


def _find_worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The one with the most precise policy; of those, the one with the largest excess, and before it one left open."""

    def key(one: Verdict) -> tuple[float, float]:
        excess = math.inf if math.isnan(one.predicted_excess) else one.predicted_excess
        return ROUNDOFF[one.policy.x_storage], -excess

    return min(verdicts, key=key)


def _warned(verdict: Verdict, settings: GuardSettings) -> list[str]:
    silent = {verdict.unjudged_warning, verdict.step_warning if settings.own_steps else ""}
    return [text for text in verdict.warnings if text not in silent]


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """What training gave; ``verdict`` and ``warnings`` are those of training, None and empty without a judgement."""

    solutions: tuple[Solution, ...]
    policy: PrecisionPolicy
    verdict: Verdict | None = None
    warnings: tuple[str, ...] = ()


def train_guarded(
    problems: Sequence[Problem],
    options: Sequence[Options],
    *,
    starts: Sequence[Start],
    verdict: Verdict | None,
    settings: GuardSettings,
    comm: Communicator,
) -> Guarded:
    """Train every problem; with a ``verdict`` that is still open, judge it after 1, 2, 4, 8, ... epochs and the last.

    The excess grows while the loss falls, so one look after the first epoch does not do, and the last one always
    counts. Where the guard falls back, training starts anew with the policy that it chose, so that the model is the
    one of that policy from its first step; epochs given up are in no figure.

    Raises:
        InputError: a risk, where ``settings.on_risk`` is "raise"; training that diverges.
    """
    each = list(zip(problems, options, starts, strict=True))
    if verdict is None:
        trained = tuple(train(problem, one, comm=comm, start=start) for problem, one, start in each)
        return Guarded(solutions=trained, policy=options[0].policy)
    found, warned = verdict, dict[str, None]()
    while True:
        policy = found.policy
        solutions: list[Solution] = []
        verdicts: list[Verdict] = []
        for problem, one, start in each:
            solution, seen = _train_in_parts(
                problem, replace(one, policy=policy), start=start, settings=settings, comm=comm
            )
            solutions.append(solution)
            verdicts.append(seen)
            warned |= dict.fromkeys(_warned(seen, settings))
            if seen.changed:
                break
        worst = _find_worst(verdicts)
        if worst.rows:  # else the policy has nothing below fp32, and nobody looked
            earlier = [text for text in found.warnings if text != found.unjudged_warning]
            found = replace(
                worst,
                requested=verdict.requested,
                requested_excess=found.requested_excess if found.changed else worst.requested_excess,
                warnings=tuple(dict.fromkeys([*earlier, *worst.warnings])),
            )
        if not worst.changed:
            return Guarded(solutions=tuple(solutions), policy=policy, verdict=found, warnings=tuple(warned))


def _train_in_parts(
    problem: Problem, options: Options, *, start: Start, settings: GuardSettings, comm: Communicator
) -> tuple[Solution, Verdict]:
    """One run, or what was done of it when the guard fell back; the iterates are those of a run in one piece."""
    stored = problem
    if library_of(problem.features) == "numpy":
        # Rounded once and not once a part; the guard sees the features as they came.
        rounded = agree(comm, lambda: store_features(problem.features, options.policy))
        if isinstance(rounded, DenseFeatures):
            stored = replace(problem, features=rounded.values)
    whole = replace(options, epochs=settings.epochs, earlier_losses=())
    parts: list[Solution] = []
    verdict: Verdict | None = None
    while True:
        done = sum(part.epochs for part in parts)
        losses = (*options.earlier_losses, *(loss for part in parts for loss in part.loss_curve))
        left = options.epochs - done
        # Without rows nobody looked: the policy has nothing below fp32.
        epochs = left if verdict is not None and not verdict.rows else min(max(done, 1), left)
        part = train(stored, replace(options, epochs=epochs, earlier_losses=losses), comm=comm, start=start)
        parts.append(part)
        start = Start(
            weights=part.weights,
            intercept=part.intercept,
            steps=start.steps + part.steps,
            epochs=start.epochs + part.epochs,
        )
        verdict = choose_policy(
            problem,
            whole,
            comm=comm,
            on_risk=settings.on_risk,
            largest_excess=settings.largest_excess,
            weights=part.weights,
            intercept=part.intercept,
        )
        if verdict.changed or part.converged or done + part.epochs >= options.epochs:
            return _join(parts), verdict


def _join(parts: Sequence[Solution]) -> Solution:
    last = parts[-1]
    return replace(
        last,
        epochs=sum(part.epochs for part in parts),
        steps=sum(part.steps for part in parts),
        loss_curve=tuple(loss for part in parts for loss in part.loss_curve),
        reductions=sum(part.reductions for part in parts),
        seconds={name: sum(part.seconds[name] for part in parts) for name in last.seconds},
    )
