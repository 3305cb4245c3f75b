"""The shared part of the three estimators: parameters, checks, columns, training, and the result on every rank."""

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, is_classifier
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from precision_time.casgd.arrays import library_of, to_host
from precision_time.casgd.communicator import Communicator, agree, check_agreement
from precision_time.casgd.errors import NotConvergedWarning, PrecisionWarning
from precision_time.casgd.guard import Verdict
from precision_time.casgd.guarded_training import GuardSettings, choose_precision, train_guarded
from precision_time.casgd.mpi import find_communicator
from precision_time.casgd.nccl import sum_over_ranks
from precision_time.casgd.objectives import Objective
from precision_time.casgd.precision import PrecisionPolicy
from precision_time.casgd.problem import PARTS, Options, Problem, Solution, Start
from precision_time.casgd.training import (
    best_constant,
    choose_s,
    expected_smoothness,
    make_schedule,
    null_deviance,
    place_features,
)
from precision_time.casgd.validation import (
    check_dtype,
    check_finite,
    check_fits_format,
    check_gpu_arrays,
    check_parameters,
    read_weights,
    share_columns,
)

__all__ = ["ColumnEstimator"]

_RATES = ("optimal", "invscaling", "constant")


class ColumnEstimator(ABC, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """The shared part of the three estimators; estimators.py documents parameters and attributes."""

    _objective: Objective
    coef_: np.ndarray
    intercept_: Any  # a number, or an array for a classifier, as scikit-learn's linear models have it
    loss_curve_: list[Any]
    n_features_in_: int
    n_iter_: int
    precision_: PrecisionPolicy
    s_: int
    t_: int
    verdict_: Verdict | None

    def __init__(
        self,
        *,
        alpha: float = 1e-4,
        fit_intercept: bool = True,
        max_iter: int = 200,
        tol: float | None = 1e-4,
        n_iter_no_change: int = 10,
        batch_size: int = 32,
        shuffle: bool = True,
        random_state: Any = None,
        learning_rate: str = "optimal",
        eta0: float | None = None,
        power_t: float = 0.5,
        warm_start: bool = False,
        verbose: int = 0,
        s: int | str = "auto",
        precision: Any = "auto",
        on_risk: Literal["fallback", "warn", "raise"] | None = None,
        largest_excess: float = 0.005,
        prefetch: bool = False,
        comm: Any = None,
        device: str = "auto",
        column_block: bool = False,
    ) -> None:
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.random_state = random_state
        self.learning_rate = learning_rate
        self.eta0 = eta0
        self.power_t = power_t
        self.warm_start = warm_start
        self.verbose = verbose
        self.s = s
        self.precision = precision
        self.on_risk = on_risk
        self.largest_excess = largest_excess
        self.prefetch = prefetch
        self.comm = comm
        self.device = device
        self.column_block = column_block

    def __sklearn_clone__(self) -> Self:
        # A copy works with the same ranks; a communicator itself cannot be copied.
        bare = copy.copy(self)
        bare.comm = None
        made: Self = super(ColumnEstimator, bare).__sklearn_clone__()
        made.comm = self.comm
        return made

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train the model.

        Parameters
        ----------
        X : array or CSR matrix of shape (m, n)
            Features; with ``column_block`` only the columns of this rank. NumPy, SciPy or CuPy.
        y : array of shape (m,)
            Labels, numbers or counts.
        sample_weight : array of shape (m,) or float, default=None
            Weight of the loss of each row.

        Returns
        -------
        The fitted estimator.

        Raises
        ------
        InputError
            Input that cannot be used, or training that diverged.

        Warns
        -----
        NotConvergedWarning
            ``max_iter`` ended training before ``tol`` did.
        PrecisionWarning
            A risk or advice of the guard.
        """
        return self._train(X, y, sample_weight, again=self.warm_start, epochs=None)

    @abstractmethod
    def _read_targets(self, y: np.ndarray, *, again: bool, partial: bool, classes: Any) -> list[np.ndarray]:
        """A vector of targets for each model: one, or one for each of several classes."""

    def _train(
        self, X: Any, y: Any, sample_weight: Any, *, again: bool, epochs: int | None, classes: Any = None
    ) -> Self:
        partial = epochs is not None
        comm = find_communicator(self.comm)
        continued = again and hasattr(self, "coef_")
        features, y, weights = agree(comm, lambda: self._read(X, y, sample_weight, reset=not continued))
        targets = agree(comm, lambda: self._read_targets(y, again=continued, partial=partial, classes=classes))
        seed = int(comm.gather(int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max)))[0])
        self._check_ranks(comm, features, targets)
        block = self._own_columns(features, comm)
        features = agree(comm, lambda: place_features(block, device=self.device))
        problems = [
            Problem(
                features=features,
                targets=target,
                objective=self._objective,
                l2=float(self.alpha),
                sample_weight=weights,
                fit_intercept=bool(self.fit_intercept),
            )
            for target in targets
        ]
        options = self._make_options(problems, comm, continued=continued and partial, epochs=epochs, seed=seed)
        if not (continued and partial):
            self._choose(problems, options, comm)
        # Single epochs of partial_fit are judged after 1, 2, 4, ... of them, as those of a fit are.
        starts = [self._start(problem, k, continued, partial) for k, problem in enumerate(problems)]
        done = starts[0].epochs + options.epochs
        trained = train_guarded(
            problems,
            [self._with_tol(replace(options, policy=self.precision_, s=self.s_), problem) for problem in problems],
            starts=starts,
            verdict=self.verdict_ if self._judge_later and not (partial and done & (done - 1)) else None,
            settings=self._guard_settings(),
            comm=comm,
        )
        solutions, self.precision_ = trained.solutions, trained.policy
        self.verdict_ = trained.verdict or self.verdict_
        for text in trained.warnings:
            warnings.warn(text, PrecisionWarning, stacklevel=3)
        self._keep(solutions, comm, partial=continued and partial)
        if self.verbose and comm.rank == 0:
            loss = np.mean([solution.loss_curve[-1] for solution in solutions])
            print(f"{type(self).__name__}: {self.n_iter_} epochs, loss {loss:.6g}, {self.precision_.name}, s={self.s_}")
        if epochs is None and self.tol is not None and not all(solution.converged for solution in solutions):
            warnings.warn(
                f"training ended after max_iter={self.max_iter} epochs while the loss still fell by more than "
                f"tol={self.tol:g}; raise max_iter or tol, or standardise the features",
                NotConvergedWarning,
                stacklevel=3,
            )
        return self

    def _choose(self, problems: Sequence[Problem], options: Options, comm: Communicator) -> None:
        """Set ``precision_``, ``verdict_``, ``s_`` and ``plan_``, in partial_fit as if ``max_iter`` epochs followed."""
        self.precision_, warned, self.verdict_ = choose_precision(
            problems, options, precision=self.precision, settings=self._guard_settings(), comm=comm
        )
        for text in warned:
            warnings.warn(text, PrecisionWarning, stacklevel=4)
        agree(comm, lambda: check_fits_format(problems[0].features, self.precision_))
        self._judge_later = self.verdict_ is not None and bool(self.verdict_.unjudged_warning)
        whole_run = replace(options, policy=self.precision_, epochs=int(self.max_iter) * len(problems))
        self.s_, self.plan_ = choose_s(problems[0], whole_run, s=self.s, comm=comm)
        if self.plan_ is not None and self.plan_.warning:
            warnings.warn(f"s={self.s_}: {self.plan_.warning}", stacklevel=4)

    def _guard_settings(self) -> GuardSettings:
        usual: Literal["fallback", "warn"] = "fallback" if self.precision == "auto" else "warn"
        return GuardSettings(
            on_risk=self.on_risk or usual,
            largest_excess=float(self.largest_excess),
            own_steps=self.eta0 is None,
            epochs=int(self.max_iter),
        )

    def _read(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[Any, np.ndarray, np.ndarray | None]:
        check_parameters(self.get_params(deep=False), rates=_RATES)
        check_dtype(y, name="y")
        features, y = self._validate(X, y, with_targets=True, reset=reset)
        weights = None
        if sample_weight is not None:
            weights = read_weights(sample_weight, rows=features.shape[0])
        return features, y, weights

    def _validate(self, X: Any, y: Any = None, *, with_targets: bool = False, reset: bool) -> Any:
        """X, or X and y, checked before any rounding; float64 and float32 keep their type."""
        check_dtype(X, name="X")
        if type(X).__module__.partition(".")[0] == "cupy":
            y = check_gpu_arrays(X, y if with_targets else None, columns=None if reset else self.n_features_in_)
            self.n_features_in_ = int(X.shape[1])
            return (X, y) if with_targets else X
        checks: dict[str, Any] = {
            "accept_sparse": "csr",
            "dtype": (np.float64, np.float32),
            "ensure_all_finite": False,
            "reset": reset,
        }
        if not with_targets:
            features = validate_data(self, X, **checks)
        else:
            features, y = validate_data(self, X, y, y_numeric=not is_classifier(self), **checks)
        check_finite(features, name="Input X")
        return (features, y) if with_targets else features

    def _check_ranks(self, comm: Communicator, features: Any, targets: Sequence[np.ndarray]) -> None:
        """Refuse ranks with other parameters or rows, before a sum whose length follows from them."""
        if comm.size == 1:
            return
        values = {
            name: repr(value)
            for name, value in self.get_params(deep=False).items()
            if name not in ("comm", "random_state", "verbose")
        }
        values |= {"rows": str(targets[0].size), "models": str(len(targets))}
        values |= {"library of X": library_of(features), "type of X": str(features.dtype)}
        if not self.column_block:
            values["columns"] = str(self.n_features_in_)
        check_agreement(comm, values)

    def _own_columns(self, features: Any, comm: Communicator) -> Any:
        if self.column_block:
            edges = np.cumsum([0, *comm.gather(int(features.shape[1]))]).tolist()
            shares = list(pairwise(edges))
        else:
            shares = share_columns(features, comm.size)
        self._n_columns = shares[-1][1]
        self.columns_ = shares[comm.rank]
        if self.column_block or comm.size == 1:
            return features
        return features[:, self.columns_[0] : self.columns_[1]]

    def _make_options(
        self, problems: Sequence[Problem], comm: Communicator, *, continued: bool, epochs: int | None, seed: int
    ) -> Options:
        rows = problems[0].rows
        if not continued:
            if self.eta0 is None:
                smoothness = expected_smoothness(problems[0], batch_size=self.batch_size, comm=comm)
                self.eta0_ = 1 / smoothness if smoothness > 0 else 1.0
            else:
                self.eta0_ = float(self.eta0)
            self._steps_per_epoch = -(-rows // int(self.batch_size))
        return Options(
            batch_size=int(self.batch_size),
            epochs=int(self.max_iter) if epochs is None else epochs,
            schedule=make_schedule(
                self.learning_rate, eta0=self.eta0_, power_t=self.power_t, steps_per_epoch=self._steps_per_epoch
            ),
            order="shuffled" if self.shuffle else "cyclic",
            seed=seed,
            n_iter_no_change=int(self.n_iter_no_change),
            prefetch=bool(self.prefetch),
        )

    def _with_tol(self, options: Options, problem: Problem) -> Options:
        if self.tol is None or options.epochs == 1:
            return options
        deviance = null_deviance(self._objective, np.asarray(problem.targets), problem.sample_weight)
        # An epoch counts as stale if its loss is above best - tol, so a loss of zero needs a tol above zero.
        return replace(options, tol=max(float(self.tol) * deviance, np.finfo(float).tiny))

    def _start(self, problem: Problem, model: int, continued: bool, partial: bool) -> Start:
        if not continued:
            guess = best_constant(self._objective, np.asarray(problem.targets), problem.sample_weight)
            return Start(intercept=guess if self.fit_intercept else 0.0)
        weights = np.atleast_2d(self.coef_)[model, self.columns_[0] : self.columns_[1]]
        return Start(
            weights=weights.copy(),
            intercept=float(np.atleast_1d(self.intercept_)[model]),
            steps=self.t_ if partial else 0,
            epochs=self.n_iter_ if partial else 0,
        )

    def _keep(self, solutions: Sequence[Solution], comm: Communicator, *, partial: bool) -> None:
        coef = np.zeros((len(solutions), self._n_columns))
        for row, solution in zip(coef, solutions, strict=True):
            row[self.columns_[0] : self.columns_[1]] = solution.weights
        if comm.size > 1:
            sum_over_ranks(coef, comm=comm)  # every column has one owner, so the sum only collects the columns
        self._set_coefficients(coef, np.array([solution.intercept for solution in solutions]))
        curves = [list(solution.loss_curve) for solution in solutions]
        before = (self.loss_curve_ if len(curves) > 1 else [self.loss_curve_]) if partial else [[] for _ in curves]
        curves = [[*old, *new] for old, new in zip(before, curves, strict=True)]
        self.loss_curve_ = curves if len(curves) > 1 else curves[0]
        self.n_iter_ = max(solution.epochs for solution in solutions) + (self.n_iter_ if partial else 0)
        self.t_ = max(solution.steps for solution in solutions) + (self.t_ if partial else 0)
        self.reductions_ = sum(solution.reductions for solution in solutions)
        self.timings_ = {part: sum(float(solution.seconds[part]) for solution in solutions) for part in PARTS}

    def _set_coefficients(self, coef: np.ndarray, intercept: np.ndarray) -> None:
        self.coef_ = coef[0]
        self.intercept_ = float(intercept[0])

    def _margins(self, X: Any) -> np.ndarray:
        """X w + intercept, (m, models) float64; with column_block one sum over the ranks."""
        check_is_fitted(self, "coef_")
        comm = find_communicator(self.comm)
        features = (
            agree(comm, lambda: self._validate(X, reset=False)) if self.column_block else self._validate(X, reset=False)
        )
        features = to_host(features)
        coef = np.atleast_2d(self.coef_)
        if self.column_block:
            coef = coef[:, self.columns_[0] : self.columns_[1]]
        margins = np.asarray(features @ coef.T, dtype=np.float64)
        if self.column_block and comm.size > 1:
            margins = np.ascontiguousarray(margins)
            sum_over_ranks(margins, comm=comm)
        return np.asarray(margins + np.atleast_1d(self.intercept_))
