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

# help() of an estimator shows the parameters, which all three have in common.
_PARAMETERS = (ColumnEstimator.__doc__ or "").partition("\n")[2]


class CASGDClassifier(ClassifierMixin, ColumnEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    __doc__ = f"""Logistic regression by CA-SGD: two classes, or several, each against the rest.

    Several classes share one policy, the most precise that the guard asks for one of them. Separable data has no
    finite optimum without a penalty: training then ends at ``max_iter`` or ``tol`` with finite weights.
    {_PARAMETERS}
    classes_ : the labels, sorted. coef_ is (1, n) and intercept_ (1,) for two classes, (classes, n) for more.
    """

    _objective = LOGISTIC
    classes_: np.ndarray

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One epoch over these rows; the first call takes all ``classes`` that will come."""
        return self._train(X, y, sample_weight, again=True, epochs=1, classes=classes)

    def _read_targets(self, y: np.ndarray, *, again: bool, partial: bool, classes: Any) -> list[np.ndarray]:
        check_classification_targets(y)
        present = unique_labels(y)
        if again and classes is not None and not np.array_equal(unique_labels(classes), self.classes_):
            raise InputError("classes differ from the first call's", got=str(classes), expected=str(self.classes_))
        if again:
            foreign = present[~np.isin(present, self.classes_)]
            if foreign.size:
                raise InputError(
                    "y has a class that the first call did not name", got=str(foreign[0]), expected=str(self.classes_)
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
        """Margins: (m,) for two classes, positive for classes_[1]; (m, classes) for more."""
        margins = self._margins(X)
        return margins[:, 0] if margins.shape[1] == 1 else margins

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities (m, classes); of several classes each against the rest, scaled to sum to 1."""
        share = (1 + np.tanh(self._margins(X) / 2)) / 2
        if share.shape[1] == 1:
            return np.hstack([1 - share, share])
        total = share.sum(axis=1, keepdims=True)
        return np.where(total > 0, share / np.where(total > 0, total, 1), 1 / share.shape[1])

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """log of predict_proba."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))

    def predict(self, X: Any) -> np.ndarray:
        """The class of each row, (m,)."""
        margins = self._margins(X)
        chosen = (margins[:, 0] > 0).astype(int) if margins.shape[1] == 1 else margins.argmax(axis=1)
        return np.asarray(self.classes_[chosen])


class _NumberEstimator(RegressorMixin, ColumnEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """What the two regressors share."""

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One epoch over these rows."""
        return self._train(X, y, sample_weight, again=True, epochs=1)

    def _read_targets(self, y: np.ndarray, *, again: bool, partial: bool, classes: Any) -> list[np.ndarray]:
        return [np.asarray(y, dtype=np.float64)]


class CASGDRegressor(_NumberEstimator):
    __doc__ = f"""Least squares with an L2 penalty by CA-SGD; ``score`` is R^2.
    {_PARAMETERS}"""

    _objective = SQUARED

    def predict(self, X: Any) -> np.ndarray:
        """X w + intercept, (m,)."""
        return self._margins(X)[:, 0]


class CASGDPoissonRegressor(_NumberEstimator):
    __doc__ = f"""Poisson regression (log link) by CA-SGD; ``score`` is D^2, the share of deviance explained.

    Margins above {POISSON_CLIP:g} are clipped in training and prediction, so that no mean exceeds e^{POISSON_CLIP:g}.
    {_PARAMETERS}"""

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
