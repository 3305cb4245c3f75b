"""Error metrics of predicted against measured seconds."""

import numpy as np
import numpy.typing as npt

from precision_time.storage.errors import InputError

__all__ = ["Metrics", "bootstrap_mape", "score"]

#: Values by metric; fractions, not percentages. None where there is no such metric.
Metrics = dict[str, float | None]

_BOOTSTRAP_SAMPLES = 500


def score(predicted_s: npt.ArrayLike, measured_s: npt.ArrayLike, *, covered: npt.ArrayLike | None = None) -> Metrics:
    """Error metrics of predicted against measured seconds, each of shape (rows,); fractions, not percentages.

    ``mape`` is the mean of abs(predicted - measured) / measured, ``median_ape`` and ``p90_ape`` its median and 90th
    percentile, ``within_10`` and ``within_25`` the shares of rows inside that error, ``bias`` the mean log ratio
    (positive: predicted too slow) as a factor minus one, ``rmse_s`` in seconds, ``coverage`` the share of
    measurements inside their interval.
    """
    predicted, measured = np.asarray(predicted_s, np.float64), np.asarray(measured_s, np.float64)
    if predicted.shape != measured.shape or not predicted.size:
        raise InputError(
            "nothing to score",
            got=f"{predicted.shape} predictions for {measured.shape} measurements",
            expected="one prediction a measurement, at least one",
        )
    error = np.abs(predicted - measured) / measured
    return {
        "n": float(len(error)),
        "mape": float(error.mean()),
        "median_ape": float(np.median(error)),
        "p90_ape": float(np.quantile(error, 0.9)),
        "within_10": float((error <= 0.10).mean()),
        "within_25": float((error <= 0.25).mean()),
        "bias": float(np.expm1(np.log(predicted / measured).mean())),
        "rmse_s": float(np.sqrt(np.square(predicted - measured).mean())),
        "coverage": None if covered is None else float(np.asarray(covered, np.float64).mean()),
    }


def bootstrap_mape(predicted_s: npt.ArrayLike, measured_s: npt.ArrayLike) -> tuple[float, float]:
    """The 95 % interval of the MAPE over resampled rows (percentile bootstrap, Efron 1979), the same on every call."""
    predicted, measured = np.asarray(predicted_s, np.float64), np.asarray(measured_s, np.float64)
    error = np.abs(predicted - measured) / measured
    generator = np.random.default_rng(0)
    # One sample at a time, so no more memory is needed than for the rows.
    means = [error[generator.integers(len(error), size=len(error))].mean() for _ in range(_BOOTSTRAP_SAMPLES)]
    tail = (1 - 0.95) / 2
    return float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail))
