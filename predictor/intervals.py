"""Prediction intervals by split conformal prediction on log errors, one radius per regime."""

import math
from collections.abc import Sequence

import numpy as np

from precision_time.storage.errors import InputError

__all__ = ["conformal_radius", "fewest_rows"]


def fewest_rows(level: float) -> int:
    """The fewest calibration rows from which an interval of ``level`` can be had: 9 at 0.9."""
    return math.ceil(round(level / (1 - level), 9))


def conformal_radius(log_errors: Sequence[float], *, level: float) -> float:
    """The half width r, in log seconds, such that [t e^-r, t e^r] covers a new measurement with ``level``.

    ``log_errors`` are log(measured / predicted) of rows the predictor did not see, exchangeable with the query. The
    radius is the ceil((n + 1) level)-th smallest absolute error (Vovk, Gammerman and Shafer 2005, ch. 2; Lei et al.
    2018, section 2.2). Raises ``InputError`` when n is too small for the level.
    """
    if not 0 < level < 1:
        raise InputError("level of an interval", got=level, expected="a fraction between 0 and 1")
    absolute = np.sort(np.abs(np.asarray(log_errors, dtype=np.float64)))
    rank = math.ceil(round((len(absolute) + 1) * level, 9))
    if rank > len(absolute):
        raise InputError(
            "too few calibration rows for the level of the interval",
            got=f"{len(absolute)} rows for level {level}",
            expected=f"at least {fewest_rows(level)} rows",
            fix="measure more cells or ask for a lower level",
        )
    return float(absolute[rank - 1])
