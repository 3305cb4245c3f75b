"""Trials: a method is trained on some rows and predicts others; several processes share many trials."""

import functools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.learning.splits import Fold
from precision_time.predictor.rows.features import CLOSED_FORM_FEATURES, SETUP_FEATURES, Query
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.setup.precision import parse_precision
from precision_time.storage.errors import InputError, PrecisionTimeError

__all__ = ["ABLATIONS", "LEARNERS", "Learner", "Outcome", "Trial", "run_trials"]


# Ablations leave out one part of the method, to measure what that part gives.


class _NoBlend(HierarchicalPredictor):
    """The trees alone, however far the question is from the data."""

    __slots__ = ()
    has_blend = False


class _Direct(_NoBlend):
    """The time itself instead of its ratio to the closed form, which stays a column."""

    __slots__ = ()
    total_is_ratio = False


class _NoClosedForm(_Direct):
    """The time itself, from columns that no closed form fills."""

    __slots__ = ()
    total_features = tuple(name for name in SETUP_FEATURES if name not in CLOSED_FORM_FEATURES)


class _Stages(_NoBlend):
    """Compute, communication and the exposed share, without a model of the whole iteration."""

    __slots__ = ()
    has_total = False


#: On few rows, where the stages decide the iteration, all of these are the same predictor.
ABLATIONS: dict[str, type[HierarchicalPredictor]] = {
    "no_blend": _NoBlend,
    "direct": _Direct,
    "no_closed_form": _NoClosedForm,
    "stages": _Stages,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A method that is trained: the class that is fitted, and whether all its rows are described as fp32."""

    predictor: type[HierarchicalPredictor] = HierarchicalPredictor
    blind: bool = False


#: The methods that are trained, by name.
LEARNERS: dict[str, Learner] = {
    "predictor": Learner(),
    "precision_blind": Learner(blind=True),
    **{name: Learner(predictor=kind) for name, kind in ABLATIONS.items()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fit and its predictions: ``method``, a name in ``LEARNERS``, is trained and tested on ``rows``."""

    split: str
    fold: int
    method: str
    rows: Fold


#: Predicted seconds of the test rows, shape (rows,), and the regime of each: its distance from the training rows.
Outcome = tuple[npt.NDArray[np.float64], tuple[str, ...]]


class _Bench:
    """Trains and predicts on the rows it holds, each described once with its precision and once without."""

    def __init__(self, observations: Sequence[Observation], *, seed: int) -> None:
        self._observations = observations
        self._seed = seed

    @functools.cached_property
    def _without_precision(self) -> list[Observation]:
        return [_forget_precision(observation) for observation in self._observations]

    def run(self, trial: Trial) -> Outcome:
        """Predicted seconds of the trial's test rows, and the regime of each."""
        learner = LEARNERS[trial.method]
        rows = self._without_precision if learner.blind else self._observations
        test = [rows[position] for position in trial.rows.test]
        fitted = learner.predictor.fit([rows[position] for position in trial.rows.train], seed=self._seed)
        predicted = fitted.predict([observation.query for observation in test]).iteration_time_s
        return predicted, tuple(fitted.domain.regime_of(observation.setup).name for observation in test)


def _forget_precision(observation: Observation) -> Observation:
    """The same measurement described as fp32; unchanged where the closed forms refuse that description."""
    try:
        fp32 = replace(observation.setup, precision=parse_precision("fp32"))
        return replace(observation, query=Query.of(fp32))
    except PrecisionTimeError:
        return observation


_bench: _Bench | None = None


def _open_bench(observations: Sequence[Observation], seed: int) -> None:
    """Store the rows in a worker process, once for all its trials."""
    global _bench
    _bench = _Bench(observations, seed=seed)


def _run_at_bench(trial: Trial) -> Outcome:
    if _bench is None:
        raise InputError("a worker process has no rows", got=trial.split, expected="a pool opened with _open_bench")
    return _bench.run(trial)


def run_trials(
    trials: Sequence[Trial],
    observations: Sequence[Observation],
    *,
    seed: int,
    processes: int,
    progress: Callable[[int, int], None] | None,
) -> list[Outcome]:
    """The outcome of each trial, in their order; it does not depend on the number of ``processes``.

    Several processes are spawned and receive ``observations`` once each; one means this process. ``progress`` is called
    with the number of finished and of all trials. Raises ``InputError`` below one process, and what ``fit`` raises.
    """
    if processes < 1:
        raise InputError("number of processes", got=processes, expected="at least 1")
    outcomes: dict[int, Outcome] = {}

    def keep(number: int, outcome: Outcome) -> None:
        outcomes[number] = outcome
        if progress is not None:
            progress(len(outcomes), len(trials))

    if processes == 1 or len(trials) < 2:
        bench = _Bench(observations, seed=seed)
        for number, trial in enumerate(trials):
            keep(number, bench.run(trial))
    else:
        # Spawned, because a fork of a process with threads (Arrow's, a progress bar's) may hang.
        with ProcessPoolExecutor(
            min(processes, len(trials)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_open_bench,
            initargs=(list(observations), seed),
        ) as pool:
            pending = {pool.submit(_run_at_bench, trial): number for number, trial in enumerate(trials)}
            try:
                for done in as_completed(pending):
                    keep(pending[done], done.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [outcomes[number] for number in range(len(trials))]
