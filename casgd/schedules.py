"""Step sizes: the schedules that scikit-learn names, as a function of the step number."""

import math
from dataclasses import dataclass

import numpy as np

from precision_time.casgd.errors import InputError

__all__ = ["KINDS", "Schedule"]

KINDS = ("constant", "invscaling", "optimal")


@dataclass(frozen=True)
class Schedule:
    """eta_t for t = 1, 2, ...; a step is one batch (in scikit-learn one sample).

    ========== ================================
    kind        eta_t
    ========== ================================
    constant    eta0
    invscaling  eta0 / t^power_t
    optimal     1 / (alpha (t0 + t - 1))
    ========== ================================

    ``t0=None`` is 1 / (alpha eta0): the first step is then eta0. scikit-learn chooses t0 by a heuristic of Bottou
    instead (first step 1/sqrt(sqrt(alpha)) at most), and ignores eta0.

    Raises:
        InputError: an unknown kind, or a number out of range.
    """

    kind: str = "constant"
    eta0: float = 0.01
    power_t: float = 0.5
    alpha: float = 1e-4
    t0: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError("unknown schedule", got=repr(self.kind), expected=", ".join(KINDS))
        if not (math.isfinite(self.eta0) and self.eta0 > 0):
            raise InputError("eta0 of a schedule", got=self.eta0, expected="a finite number above 0")
        if not math.isfinite(self.power_t):
            raise InputError("power_t of a schedule", got=self.power_t, expected="a finite number")
        if self.kind == "optimal":
            if not (math.isfinite(self.alpha) and self.alpha > 0):
                raise InputError("alpha of schedule 'optimal'", got=self.alpha, expected="a finite number above 0")
            if self.t0 is not None and not (math.isfinite(self.t0) and self.t0 > 0):
                raise InputError("t0 of schedule 'optimal'", got=self.t0, expected="a finite number above 0")

    def rates(self, t_first: int, count: int) -> np.ndarray:
        """eta_t for t = t_first .. t_first + count - 1, float64 of shape (count,); t counts from 1."""
        if t_first < 1:
            raise InputError("first step of a schedule", got=t_first, expected="at least 1")
        if self.kind == "constant":
            return np.full(count, self.eta0)
        t = np.arange(t_first, t_first + count, dtype=np.float64)
        if self.kind == "invscaling":
            return np.asarray(self.eta0 / t**self.power_t)
        start = 1 / (self.alpha * self.eta0) if self.t0 is None else self.t0
        return np.asarray(1 / (self.alpha * (start + t - 1)))
