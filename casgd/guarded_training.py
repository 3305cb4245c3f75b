"""Training under the guard: a policy is chosen before the first epoch and, if need be, judged again on real weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from precision_time.casgd.arrays import DenseFeatures, library_of, store_features
from precision_time.casgd.communicator import Communicator, agree
from precision_time.casgd.errors import InputError
from precision_time.casgd.guard import OnRisk, Verdict, choose_policy
from precision_time.casgd.precision import ROUNDOFF, PrecisionPolicy, find_policy
from precision_time.casgd.problem import Options, Problem, Solution, Start
from precision_time.casgd.training import train

__all__ = ["GuardSettings", "Guarded", "choose_precision", "train_guarded"]


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """The settings of the guard.

    on_risk, largest_excess: as `guard.choose_policy` takes them.
    own_steps: whether the first step comes from `training.expected_smoothness`; the guard's advice on it, whose limit
        is for batches of one row, is then left out.
    epochs: of the whole run, because its last step matters.
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
    """The policy for all ``problems`` (the classes of one data set), the warnings, and the worst verdict.

    'auto' starts from the recipe. fp64 and fp32 have no finer policy and are not judged. If the excess cannot be judged
    before training, only the verdict says so, not the warnings: `train_guarded` judges it later.
    """
    policy = find_policy("recipe" if precision == "auto" else precision)
    if policy.name in ("fp64", "fp32"):
        return policy, (), None
    whole_run = replace(options, policy=policy, epochs=settings.epochs)
    verdicts = [
        choose_policy(problem, whole_run, comm=comm, on_risk=settings.on_risk, largest_excess=settings.largest_excess)
        for problem in problems
    ]
    if not verdicts:
        raise InputError("no problem to choose a precision for")
    worst = _find_worst(verdicts)
    texts = (text for verdict in verdicts for text in _select_warnings(verdict, settings))
    return worst.policy, tuple(dict.fromkeys(texts)), worst


def _find_worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict with the finest policy, then with the largest excess; an unknown excess counts as the largest."""

    def key(verdict: Verdict) -> tuple[float, float]:
        excess = math.inf if math.isnan(verdict.predicted_excess) else verdict.predicted_excess
        return ROUNDOFF[verdict.policy.x_storage], -excess

    return min(verdicts, key=key)


def _select_warnings(verdict: Verdict, settings: GuardSettings) -> list[str]:
    left_out = {verdict.unjudged_warning, verdict.step_warning if settings.own_steps else ""}
    return [text for text in verdict.warnings if text not in left_out]


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """The result of training; ``verdict`` and ``warnings`` are None and empty if training was not judged."""

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
    """Train every problem; with a ``verdict`` whose excess is unknown, judge after 1, 2, 4, 8, ... epochs and the last.

    The excess grows while the loss falls, so a judgement after the first epoch is not enough, and the last one always
    counts. If the guard falls back, training starts anew with its policy, so that the model has that policy from the
    first step; discarded epochs count in no figure.

    Raises:
        InputError: a risk, where ``settings.on_risk`` is "raise"; training that diverges.
    """
    runs = list(zip(problems, options, starts, strict=True))
    if verdict is None:
        trained = tuple(train(problem, option, comm=comm, start=start) for problem, option, start in runs)
        return Guarded(solutions=trained, policy=options[0].policy)
    requested, warned = verdict.requested, dict[str, None]()
    while True:
        policy = verdict.policy
        solutions: list[Solution] = []
        verdicts: list[Verdict] = []
        for problem, option, start in runs:
            solution, judged = _train_in_parts(
                problem, replace(option, policy=policy), start=start, settings=settings, comm=comm
            )
            solutions.append(solution)
            verdicts.append(judged)
            warned |= dict.fromkeys(_select_warnings(judged, settings))
            if judged.changed:
                break
        worst = _find_worst(verdicts)
        if worst.rows:  # else the policy has no format below fp32, and was not judged
            earlier = [text for text in verdict.warnings if text != verdict.unjudged_warning]
            verdict = replace(
                worst,
                requested=requested,
                requested_excess=verdict.requested_excess if verdict.changed else worst.requested_excess,
                warnings=tuple(dict.fromkeys([*earlier, *worst.warnings])),
            )
        if not worst.changed:
            return Guarded(solutions=tuple(solutions), policy=policy, verdict=verdict, warnings=tuple(warned))


def _train_in_parts(
    problem: Problem, options: Options, *, start: Start, settings: GuardSettings, comm: Communicator
) -> tuple[Solution, Verdict]:
    """One run, or its first part if the guard falls back; the iterates are those of an undivided run."""
    stored = problem
    if library_of(problem.features) == "numpy":
        # Rounded once for all parts; the guard gets the original features.
        rounded = agree(comm, lambda: store_features(problem.features, options.policy))
        if isinstance(rounded, DenseFeatures):
            stored = replace(problem, features=rounded.values)
    whole_run = replace(options, epochs=settings.epochs, earlier_losses=())
    parts: list[Solution] = []
    verdict: Verdict | None = None
    while True:
        done = sum(part.epochs for part in parts)
        losses = (*options.earlier_losses, *(loss for part in parts for loss in part.loss_curve))
        epochs_left = options.epochs - done
        # A verdict without rows was not judged: the policy has no format below fp32.
        epochs = epochs_left if verdict is not None and not verdict.rows else min(max(done, 1), epochs_left)
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
            whole_run,
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
