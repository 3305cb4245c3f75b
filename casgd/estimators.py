"""CA-SGD as scikit-learn estimators: a classifier, a regressor and a Poisson regressor."""

from typing import Any, Self

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import d2_tweedie_score
from sklearn.utils.multiclass import check_classification_targets, unique_labels

from precision_time.casgd.column_estimator import ColumnEstimator
from precision_time.casgd.errors import InputError
from precision_time.casgd.objectives import LOGISTIC, POISSON, POISSON_CLIP, SQUARED
from precision_time.casgd.validation import check_counts, signed_labels

__all__ = ["CASGDClassifier", "CASGDPoissonRegressor", "CASGDRegressor"]

# The parameters and attributes that all three estimators have, for the docstring of each.
_SHARED = """
    Parameters
    ----------
    alpha : float, default=1e-4
        Weight of the L2 penalty (alpha / 2) |w|^2; the intercept is not penalised.
    fit_intercept : bool, default=True
        Whether to learn an intercept.
    max_iter : int, default=200
        Largest number of epochs (passes over the rows).
    tol : float or None, default=1e-4
        Stop when for ``n_iter_no_change`` epochs the loss has not fallen by ``tol`` below the best. The unit is the
        explainable loss (half the variance of y, the entropy of the labels, half the null deviance of counts), not the
        loss as in scikit-learn. None runs ``max_iter`` epochs.
    n_iter_no_change : int, default=10
        See ``tol``.
    batch_size : int, default=32
        Rows of a step; all rows if there are fewer.
    shuffle : bool, default=True
        Whether each epoch has a new order of the rows; otherwise all epochs use the given order.
    random_state : int, RandomState or None, default=None
        Seed of the order; the one of rank 0 counts.
    learning_rate : {'optimal', 'invscaling', 'constant'}, default='optimal'
        Step size in step t = 1, 2, ...: 'optimal' is eta0 / (1 + (t - 1) / T) with T the steps of ten epochs,
        'invscaling' is eta0 / t^power_t, 'constant' is eta0. A step is a batch.
    eta0 : float or None, default=None
        First step size. None takes the inverse of the expected smoothness of a batch, estimated from the data
        (`training.expected_smoothness`), which suits standardised features. On features that are not standardised it
        is small and training is slow.
    power_t : float, default=0.5
        Exponent of 'invscaling'.
    warm_start : bool, default=False
        Whether ``fit`` starts from the last result.
    verbose : int, default=0
        1 prints a line after each run, on rank 0.
    s : int or 'auto', default='auto'
        Steps between two communications; 1 is plain SGD. It changes the time, not the result (in exact arithmetic).
        'auto' asks the planner, which may take a twentieth of the expected time of ``max_iter`` epochs, and is 1 if
        that is too little and on one process. An outer step ends with its epoch, so an s above the batches of an epoch
        acts like that number.
    precision : str or PrecisionPolicy, default='auto'
        Formats of the nine roundings: 'auto' is 'recipe' (BF16 features, all else FP32) under the guard; other names
        are the keys of `precision.POLICIES`.
    on_risk : {'fallback', 'warn', 'raise'} or None, default=None
        What to do if rounding would add more than ``largest_excess`` to the loss: 'fallback' takes FP16, then FP32,
        'warn' keeps the policy, 'raise' refuses it. None is 'fallback' for precision 'auto' and 'warn' for any other.
        The loss is that on the rounded features; on the original features rounding adds less. If the guard's sample
        has fewer than two rows a column (always above 384 columns), nothing is known before training: the weights are
        then judged after 1, 2, 4, 8, ... epochs and after the last, and a fall-back starts training anew.
    largest_excess : float, default=0.005
        Limit of ``on_risk``, as a share of the loss.
    prefetch : bool, default=False
        Whether to send the Gram blocks of the next outer step during the recurrence of this one: the same result with
        two messages an outer step, the large one hidden if the communicator is non-blocking.
    comm : None, 'mpi', mpi4py communicator or Communicator, default=None
        The ranks of the job; None is one process. A Communicator is one of `communicator`, `mpi` or `nccl`.
    device : {'auto', 'cpu', 'cuda'}, default='auto'
        'auto' computes where X is, 'cuda' moves X to the GPU, 'cpu' to the host.
    column_block : bool, default=False
        Whether each rank passes only its own columns of X, in the order of the ranks, to ``fit`` and to every
        prediction. Otherwise every rank passes all of X and uses its share of the columns.

    Attributes
    ----------
    coef_ : ndarray of shape (n,), or (1, n) or (classes, n) for a classifier
        Weights of all columns, the same on every rank.
    intercept_ : float, or ndarray of shape (1,) or (classes,) for a classifier
        Intercept.
    n_iter_ : int
        Epochs done.
    t_ : int
        Steps done.
    loss_curve_ : list of float, or a list for each of several classes
        Loss of each epoch at the margins of its steps, without the penalty.
    precision_ : PrecisionPolicy
        The policy in use.
    verdict_ : Verdict or None
        The judgement of the guard; None for fp64 and fp32.
    s_, eta0_ : int, float
        The steps between two communications and the first step size in use.
    plan_ : Plan or None
        The plan, if the planner was asked.
    timings_ : dict of float
        Seconds of this rank by part.
    reductions_ : int
        Sums over the ranks in the solver.
    columns_ : tuple of int
        First and past-the-last column of this rank.
"""


class CASGDClassifier(ClassifierMixin, ColumnEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    __doc__ = f"""Logistic regression by CA-SGD: two classes, or several, each against the rest.

    Several classes share one policy, the finest that the guard asks for one of them. Separable data have no finite
    optimum without a penalty: training then ends at ``max_iter`` or ``tol`` with finite weights.
    {_SHARED}    classes_ : ndarray of shape (classes,)
        The labels, sorted.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.preprocessing import StandardScaler
    >>> from precision_time.casgd.estimators import CASGDClassifier
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> X = StandardScaler().fit_transform(X)
    >>> model = CASGDClassifier(random_state=0).fit(X, y)
    >>> model.precision_.name
    'recipe'
    >>> model.score(X, y) > 0.97
    True
    """

    _objective = LOGISTIC
    classes_: np.ndarray

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One epoch over these rows.

        Parameters
        ----------
        X, y, sample_weight
            As ``fit`` takes them.
        classes : array of shape (classes,), default=None
            All labels of all calls; required in the first call.
        """
        return self._train(X, y, sample_weight, again=True, epochs=1, classes=classes)

    def _read_targets(self, y: np.ndarray, *, again: bool, partial: bool, classes: Any) -> list[np.ndarray]:
        check_classification_targets(y)
        present = unique_labels(y)
        if again and classes is not None and not np.array_equal(unique_labels(classes), self.classes_):
            raise InputError("classes differ from the first call's", got=str(classes), expected=str(self.classes_))
        if again:
            unknown = present[~np.isin(present, self.classes_)]
            if unknown.size:
                raise InputError(
                    "y has a class that the first call did not name", got=str(unknown[0]), expected=str(self.classes_)
                )
        elif partial:
            if classes is None:
                raise InputError("classes must be passed on the first call to partial_fit")
            self.classes_ = unique_labels(classes)
            if not np.isin(present, self.classes_).all():
                raise InputError("y has a class that is not in classes", got=str(present), expected=str(self.classes_))
        else:
            self.classes_ = present
        if self.classes_.size < 2:
            raise InputError(
                "a classifier needs at least two classes",
                got=f"{self.classes_.size} class: {self.classes_[0]!r} in every row",
                expected="labels of two classes or more",
            )
        if self.classes_.size == 2:
            return [signed_labels(y, self.classes_[1])]
        return [signed_labels(y, label) for label in self.classes_]

    def _set_coefficients(self, coef: np.ndarray, intercept: np.ndarray) -> None:
        self.coef_, self.intercept_ = coef, intercept

    def decision_function(self, X: Any) -> np.ndarray:
        """Margins of X: (m,) for two classes, positive for classes_[1]; (m, classes) for more."""
        margins = self._margins(X)
        return margins[:, 0] if margins.shape[1] == 1 else margins

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (m, classes); those of several classes, each against the rest, are scaled to sum to 1."""
        chance = (1 + np.tanh(self._margins(X) / 2)) / 2
        if chance.shape[1] == 1:
            return np.hstack([1 - chance, chance])
        total = chance.sum(axis=1, keepdims=True)
        return np.where(total > 0, chance / np.where(total > 0, total, 1), 1 / chance.shape[1])

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """The logarithm of predict_proba, (m, classes)."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))

    def predict(self, X: Any) -> np.ndarray:
        """The class of each row, (m,)."""
        margins = self._margins(X)
        index = (margins[:, 0] > 0).astype(int) if margins.shape[1] == 1 else margins.argmax(axis=1)
        return np.asarray(self.classes_[index])


class _NumberEstimator(RegressorMixin, ColumnEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """The shared part of the two regressors."""

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One epoch over these rows; arguments as in ``fit``."""
        return self._train(X, y, sample_weight, again=True, epochs=1)

    def _read_targets(self, y: np.ndarray, *, again: bool, partial: bool, classes: Any) -> list[np.ndarray]:
        return [np.asarray(y, dtype=np.float64)]


class CASGDRegressor(_NumberEstimator):
    __doc__ = f"""Least squares with an L2 penalty by CA-SGD; ``score`` is R^2.
    {_SHARED}
    Examples
    --------
    >>> from sklearn.datasets import load_diabetes
    >>> from sklearn.preprocessing import StandardScaler
    >>> from precision_time.casgd.estimators import CASGDRegressor
    >>> X, y = load_diabetes(return_X_y=True)
    >>> X = StandardScaler().fit_transform(X)
    >>> model = CASGDRegressor(precision="fp32", random_state=0).fit(X, y)
    >>> round(model.score(X, y), 2)
    0.52
    """

    _objective = SQUARED

    def predict(self, X: Any) -> np.ndarray:
        """X w + intercept, (m,)."""
        return self._margins(X)[:, 0]


class CASGDPoissonRegressor(_NumberEstimator):
    __doc__ = f"""Poisson regression (log link) by CA-SGD; ``score`` is D^2, the share of deviance explained.

    Margins above {POISSON_CLIP:g} are clipped in training and prediction, so that no mean exceeds e^{POISSON_CLIP:g}.
    {_SHARED}
    Examples
    --------
    >>> import numpy as np
    >>> from precision_time.casgd.estimators import CASGDPoissonRegressor
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(1000, 3))
    >>> y = rng.poisson(np.exp(X @ [0.5, -0.25, 0.0] + 1))
    >>> model = CASGDPoissonRegressor(random_state=0).fit(X, y)
    >>> np.abs(model.coef_ - [0.5, -0.25, 0.0]).max() < 0.05
    np.True_
    """

    _objective = POISSON

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = True
        return tags

    def _read_targets(self, y: np.ndarray, *, again: bool, partial: bool, classes: Any) -> list[np.ndarray]:
        targets = super()._read_targets(y, again=again, partial=partial, classes=classes)
        check_counts(targets[0])
        return targets

    def predict(self, X: Any) -> np.ndarray:
        """The mean count of each row, exp(X w + intercept), (m,)."""
        return np.asarray(np.exp(np.minimum(self._margins(X)[:, 0], POISSON_CLIP)))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """D^2: 1 less the Poisson deviance over that of the best constant."""
        return float(d2_tweedie_score(y, self.predict(X), sample_weight=sample_weight, power=1))
