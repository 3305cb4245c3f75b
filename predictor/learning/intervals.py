"""Prediction intervals by split conformal prediction on log errors, one radius per regime."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.regimes import REGIMES
from precision_time.storage.errors import InputError

__all__ = ["FEWEST_IN_REGIME", "conformal_radius", "fewest_rows", "radii_by_regime"]

#: Rows from which a regime has a radius of its own. The coverage that n calibration rows give at 90 % is spread by
#: sqrt(0.09 / (n + 2)), the deviation of its Beta distribution (Vovk 2012, Conditional validity): 4 points with 50.
FEWEST_IN_REGIME = 50


def fewest_rows(level: float) -> int:
    """The fewest calibration rows from which an interval of ``level`` can be had: 9 at 0.9."""
    return math.ceil(round(level / (1 - level), 9))


def conformal_radius(log_errors: Sequence[float] | npt.NDArray[np.float64], *, level: float) -> float:
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


def radii_by_regime(
    log_errors: Sequence[float] | npt.NDArray[np.float64],
    regimes: Sequence[str],
    *,
    level: float,
    order: Sequence[str] = tuple(REGIMES),
    fewest: int = FEWEST_IN_REGIME,
) -> dict[str, float]:
    """A radius for each regime in ``order``, from the errors of its own rows (Mondrian: Vovk et al. 2005, ch. 4).

    ``regimes`` names the regime of each error; ``order`` goes from the narrowest to the widest. A regime with fewer
    than ``fewest`` rows takes the radius of the next wider one that has enough; where none is wider, the largest
    radius found. Where no regime has enough, all rows together give one radius; below ``fewest_rows(level)`` rows the
    result is empty. Raises ``InputError`` for a regime that is not in ``order``.
    """
    errors = np.asarray(log_errors, dtype=np.float64)
    labels = np.asarray(regimes, dtype=np.str_)
    unknown = set(regimes) - set(order)
    if unknown:
        raise InputError("regime of a calibration row", got=", ".join(sorted(unknown)), expected=", ".join(order))
    enough = max(fewest, fewest_rows(level))
    counts = {regime: int((labels == regime).sum()) for regime in order}
    own = {
        regime: conformal_radius(errors[labels == regime], level=level) for regime in order if counts[regime] >= enough
    }
    if not own:
        return dict.fromkeys(order, conformal_radius(errors, level=level)) if len(errors) >= fewest_rows(level) else {}
    radii: dict[str, float] = {}
    wider = max(own.values())
    for regime in reversed(order):
        wider = own.get(regime, wider)
        radii[regime] = wider
    return {regime: radii[regime] for regime in order}
