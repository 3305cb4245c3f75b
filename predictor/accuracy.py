"""How good a predictor is: error metrics, cross-validation over splits, and the baselines on the same folds."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from precision_time.predictor.features import Query
from precision_time.predictor.hierarchy import HierarchicalPredictor
from precision_time.predictor.intervals import conformal_radius, fewest_rows
from precision_time.predictor.metrics import Metrics, score
from precision_time.predictor.observations import Observation
from precision_time.predictor.precision import parse_precision
from precision_time.predictor.splits import split_by_group
from precision_time.storage.schema import Measurement

__all__ = ["METHODS", "SPLITS", "CrossValidation", "cross_validate", "score_holdout"]

#: What a fold holds out together, by split.
SPLITS: dict[str, Callable[[Measurement], Hashable]] = {
    "configuration": lambda measured: measured.configuration,
    "leave-model-out": lambda measured: measured.model,
    "leave-gpu-out": lambda measured: measured.gpu,
}
METHODS = ("predictor", "precision_blind", "roofline", "closed_form")
FOLDS = {"configuration": 5, "leave-model-out": 10, "leave-gpu-out": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossValidation:
    """One split: every row predicted by a model that saw nothing of its group, by each of ``METHODS``."""

    split: str
    measured_s: npt.NDArray[np.float64]
    predicted_s: dict[str, npt.NDArray[np.float64]]
    folds: npt.NDArray[np.int64]
    level: float

    def log_errors(self, method: str = "predictor") -> npt.NDArray[np.float64]:
        """log(measured / predicted) of a method, shape (rows,); the predictor's calibrate the intervals."""
        return np.log(self.measured_s / self.predicted_s[method])

    def radius(self) -> float | None:
        """The interval radius this split supports at ``level``; None with too few rows."""
        if len(self.measured_s) < fewest_rows(self.level):
            return None
        return conformal_radius(list(self.log_errors()), level=self.level)

    def metrics(self) -> dict[str, Metrics]:
        """Metrics by method; coverage of the predictor uses radii from the other folds only."""
        return {
            method: score(values, self.measured_s, covered=self._covered() if method == "predictor" else None)
            for method, values in self.predicted_s.items()
        }

    def _covered(self) -> npt.NDArray[np.bool_] | None:
        errors = self.log_errors()
        covered = np.zeros(len(self.folds), dtype=np.bool_)
        for fold in np.unique(self.folds):
            others = errors[self.folds != fold]
            if len(others) < fewest_rows(self.level):
                return None
            inside = self.folds == fold
            covered[inside] = np.abs(errors[inside]) <= conformal_radius(list(others), level=self.level)
        return covered


def _predict_rows(predictor: HierarchicalPredictor, rows: Sequence[Observation]) -> npt.NDArray[np.float64]:
    return predictor.predict([seen.query for seen in rows]).iteration_time_s


def _closed_times(rows: Sequence[Observation]) -> npt.NDArray[np.float64]:
    return np.array([seen.closed.iteration_time_s for seen in rows])


def _measured_times(rows: Sequence[Observation]) -> npt.NDArray[np.float64]:
    return np.array([seen.measurement.iteration_time_s for seen in rows])


def _blind(rows: Sequence[Observation]) -> list[Observation]:
    """The same measurements described without their precision: every one as fp32."""
    fp32 = parse_precision("fp32")
    return [replace(seen, query=Query.of(replace(seen.setup, precision=fp32))) for seen in rows]


def _methods(
    train: Sequence[Observation], test: Sequence[Observation], *, seed: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Predictions of ``test`` after training on ``train``, by method.

    ``predictor``; ``precision_blind``, the same learner on rows described as fp32; ``roofline``, the closed forms
    times one factor, the median of measured over closed form in ``train``; ``closed_form``, without that factor:
    what answers where nothing is published.
    """
    blind_train, blind_test = _blind(train), _blind(test)
    factor = np.exp(np.median(np.log(_measured_times(train) / _closed_times(train))))
    return {
        "predictor": _predict_rows(HierarchicalPredictor.fit(train, seed=seed), test),
        "precision_blind": _predict_rows(HierarchicalPredictor.fit(blind_train, seed=seed), blind_test),
        "roofline": _closed_times(test) * factor,
        "closed_form": _closed_times(test),
    }


def cross_validate(
    observations: Sequence[Observation], *, split: str, level: float = 0.9, seed: int = 0
) -> CrossValidation:
    """Predict every row out of fold by the predictor and its baselines.

    Raises ``InputError`` when the rows hold fewer than two groups of the split, or too few rows to train on.
    """
    group = SPLITS[split]
    folds = split_by_group([group(seen.measurement) for seen in observations], folds=FOLDS[split], seed=seed)
    predicted = {method: np.empty(len(observations)) for method in METHODS}
    for fold in np.unique(folds):
        train = [seen for seen, its in zip(observations, folds, strict=True) if its != fold]
        test = [seen for seen, its in zip(observations, folds, strict=True) if its == fold]
        for method, values in _methods(train, test, seed=seed).items():
            predicted[method][folds == fold] = values
    return CrossValidation(
        split=split, measured_s=_measured_times(observations), predicted_s=predicted, folds=folds, level=level
    )


def score_holdout(train: Sequence[Observation], holdout: Sequence[Observation], *, seed: int = 0) -> dict[str, Metrics]:
    """Metrics by method on ``holdout`` after training on ``train`` alone."""
    measured = _measured_times(holdout)
    return {method: score(values, measured) for method, values in _methods(train, holdout, seed=seed).items()}
