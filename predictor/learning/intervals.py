"""Prediction intervals by split conformal prediction on log errors, one radius for each regime."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.regimes import REGIMES
from precision_time.storage.errors import InputError

__all__ = ["FEWEST_IN_REGIME", "conformal_radius", "fewest_rows", "radii_by_regime"]

#: A regime with this many held-out rows has its own radius. The coverage that n of them give at 90 % has a standard
#: deviation of sqrt(0.09 / (n + 2)), that of its Beta distribution (Vovk 2012, Conditional validity): 4 points with 50.
FEWEST_IN_REGIME = 50


def fewest_rows(level: float) -> int:
    """The fewest held-out rows that an interval of ``level`` can be fitted on: 9 at 0.9."""
    return math.ceil(round(level / (1 - level), 9))


def conformal_radius(log_errors: Sequence[float] | npt.NDArray[np.float64], *, level: float) -> float:
    """The half width r, in log seconds, such that [t e^-r, t e^r] covers a new measurement with ``level``.

    ``log_errors`` are log(measured / predicted) of held-out rows that are exchangeable with the query. The radius is
    the ceil((n + 1) level)-th smallest absolute error (Vovk, Gammerman and Shafer 2005, ch. 2; Lei et al. 2018,
    section 2.2). Raises ``InputError`` when n is too small for the level.
    """
    if not 0 < level < 1:
        raise InputError("the level of an interval is out of range", got=level, expected="a fraction between 0 and 1")
    absolute = np.sort(np.abs(np.asarray(log_errors, dtype=np.float64)))
    rank = math.ceil(round((len(absolute) + 1) * level, 9))
    if rank > len(absolute):
        raise InputError(
            "too few held-out rows for the level of the interval",
            got=f"{len(absolute)} rows for level {level}",
            expected=f"at least {fewest_rows(level)} rows",
            fix="measure more cells or ask for a lower level",
        )
    return float(absolute[rank - 1])


def radii_by_regime(
    log_errors: Sequence[float] | npt.NDArray[np.float64], regimes: Sequence[str], *, level: float
) -> dict[str, float]:
    """A radius for each regime, from the errors of its own rows (Mondrian: Vovk et al. 2005, ch. 4).

    ``regimes`` names the regime of each error. A regime with fewer than ``FEWEST_IN_REGIME`` rows takes the radius of
    the next regime in ``REGIMES``, which goes from the narrowest to the widest, that has enough, or the largest radius
    where none has. Where no regime has enough, all rows together give one radius; below ``fewest_rows(level)`` rows the
    result is empty. Raises ``InputError`` for an unknown regime.
    """
    errors = np.asarray(log_errors, dtype=np.float64)
    labels = np.asarray(regimes, dtype=np.str_)
    unknown = set(regimes) - set(REGIMES)
    if unknown:
        raise InputError(
            "unknown regime of a held-out row", got=", ".join(sorted(unknown)), expected=", ".join(REGIMES)
        )
    enough = max(FEWEST_IN_REGIME, fewest_rows(level))
    fitted = {
        regime: conformal_radius(errors[labels == regime], level=level)
        for regime in REGIMES
        if (labels == regime).sum() >= enough
    }
    if not fitted:
        return (
            dict.fromkeys(REGIMES, conformal_radius(errors, level=level)) if len(errors) >= fewest_rows(level) else {}
        )
    radii: dict[str, float] = {}
    wider = max(fitted.values())
    for regime in reversed(REGIMES):
        wider = fitted.get(regime, wider)
        radii[regime] = wider
    return {regime: radii[regime] for regime in REGIMES}
