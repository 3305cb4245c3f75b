"""The losses of the generalised linear models: value, first and second derivative in the margin z = x.w + intercept."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from precision_time.casgd.errors import unknown_name

__all__ = ["LOGISTIC", "OBJECTIVES", "POISSON", "POISSON_CLIP", "SQUARED", "Objective", "find_objective"]

# exp(30) is 1e13: far above any count, far below the range of FP32.
POISSON_CLIP = 30.0

Elementwise = Callable[[Any, Any], np.ndarray]


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """phi(z, y), elementwise over arrays of one shape; the empirical loss is its mean over samples.

    loss, second: phi and phi'' in z, in the type of z.
    derivative_into: ``(z, y, out)`` writes phi' into ``out`` (which may be z) without temporaries. It does not silence
        warnings: the inner loops run it under one ``numpy.errstate``.
    smoothness: the largest phi''; None if phi'' is unbounded.
    """

    name: str
    loss: Elementwise
    second: Elementwise
    derivative_into: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    smoothness: float | None

    def derivative(self, z: Any, y: Any) -> np.ndarray:
        """phi' in z, in the type of z."""
        z = np.asarray(z)
        if z.dtype.kind != "f":
            z = z.astype(np.float64)
        out = np.empty(np.broadcast_shapes(z.shape, np.shape(y)), dtype=z.dtype)
        with np.errstate(over="ignore"):
            self.derivative_into(z, np.asarray(y, dtype=z.dtype), out)
        return out

    def __repr__(self) -> str:
        return f"Objective({self.name!r})"

    def __reduce__(self) -> tuple[Callable[[str], "Objective"], tuple[str]]:
        return find_objective, (self.name,)  # objectives are compared by identity, so a copy must be the same object


def _logistic_loss(z: Any, y: Any) -> np.ndarray:
    """log(1 + exp(-y z)), y in {-1, +1}."""
    t = np.multiply(z, y)
    return np.asarray(np.logaddexp(np.zeros((), dtype=t.dtype), -t))


def _logistic_into(z: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """-y / (1 + exp(y z))."""
    # Rather than (tanh(z/2) - y) / 2: it keeps its relative accuracy for well classified rows.
    # Where exp overflows, the quotient is the right zero.
    np.multiply(z, y, out)
    np.exp(out, out)
    np.add(out, 1, out)
    np.divide(y, out, out)
    np.negative(out, out)


def _logistic_second(z: Any, y: Any) -> np.ndarray:
    """sigmoid(z) (1 - sigmoid(z)), independent of y."""
    e = np.exp(-np.abs(z))
    return np.asarray(e / np.square(1 + e))


def _squared_loss(z: Any, y: Any) -> np.ndarray:
    """(z - y)^2 / 2."""
    return np.asarray(np.square(np.subtract(z, y)) * 0.5)


def _squared_into(z: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """z - y."""
    np.subtract(z, y, out)


def _squared_second(z: Any, y: Any) -> np.ndarray:
    """1."""
    return np.ones_like(z)


def _poisson_loss(z: Any, y: Any) -> np.ndarray:
    """exp(z) - y z; above the clip the exponential continues as its tangent, which keeps the loss convex."""
    clipped = np.minimum(z, POISSON_CLIP)
    return np.asarray(np.exp(clipped) * (1 + (z - clipped)) - np.multiply(y, z))


def _poisson_into(z: np.ndarray, y: np.ndarray, out: np.ndarray) -> None:
    """exp(min(z, 30)) - y."""
    np.minimum(z, POISSON_CLIP, out=out)
    np.exp(out, out)
    np.subtract(out, y, out)


def _poisson_second(z: Any, y: Any) -> np.ndarray:
    """exp(min(z, 30))."""
    return np.asarray(np.exp(np.minimum(z, POISSON_CLIP)))


LOGISTIC = Objective(
    name="logistic",
    loss=_logistic_loss,
    second=_logistic_second,
    derivative_into=_logistic_into,
    smoothness=0.25,
)
SQUARED = Objective(
    name="squared",
    loss=_squared_loss,
    second=_squared_second,
    derivative_into=_squared_into,
    smoothness=1.0,
)
POISSON = Objective(
    name="poisson",
    loss=_poisson_loss,
    second=_poisson_second,
    derivative_into=_poisson_into,
    smoothness=None,
)

OBJECTIVES: Mapping[str, Objective] = MappingProxyType({o.name: o for o in (LOGISTIC, SQUARED, POISSON)})


def find_objective(name: str) -> Objective:
    """The objective of that name: ``logistic``, ``squared`` or ``poisson``.

    Raises:
        InputError: another name.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    raise unknown_name("objective", name, OBJECTIVES)
