"""Data sets: made-up problems, scikit-learn's built-in sets, how to get large LIBSVM files, and standardisation.

Nothing is downloaded. The three large sets that papers on this solver use are on the LIBSVM page
(https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html). Addresses and sizes are from memory, not
re-checked::

    base=https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary
    curl -LO $base/epsilon_normalized.bz2   # 400 000 x 2000, dense, labels -1/+1
    curl -LO $base/SUSY.xz                  # 5 000 000 x 18, dense, labels 0/1
    curl -LO $base/HIGGS.xz                 # 11 000 000 x 28, dense, labels 0/1

They are converted once, on any rank or before the job, by column_cache.py::

    cache = convert_libsvm("epsilon_normalized.bz2", "epsilon", n_features=2000)
    cache = convert_libsvm("SUSY.xz", "susy", n_features=18)
    cache = convert_libsvm("HIGGS.xz", "higgs", n_features=28)
    Problem(features=cache.features(rank=comm.rank, size=comm.size), targets=cache.targets(), objective=LOGISTIC)
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from precision_time.casgd.column_cache import map_labels
from precision_time.casgd.errors import InputError
from precision_time.casgd.objectives import find_objective

__all__ = ["BUILTIN", "Dataset", "Standardiser", "load_builtin", "synth"]

BUILTIN = ("breast_cancer", "digits", "diabetes")


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A problem's data: features (m, n), and targets (m,) as the objective takes them."""

    name: str
    objective: str
    features: Any
    targets: np.ndarray


def synth(objective: str, m: int, n: int, *, seed: int = 0) -> Dataset:
    """A problem of ``m`` rows and ``n`` columns drawn from its own model, the same for the same arguments.

    Columns have mean 0 and variance 1; w_k ~ N(0, 1/n), so that the margin z = x.w has variance near 1.

    squared: y = z + 0.1 e, e ~ N(0, 1): R^2 is near 0.99.
    logistic: P(y = +1) = sigmoid(4 z).
    poisson: y ~ Poisson(exp(z / 2)): most means lie within a factor e of 1.
    """
    name = find_objective(objective).name
    if m < 1 or n < 1:
        raise InputError("a made-up problem needs rows and columns", got=f"{m} x {n}", expected="at least 1 x 1")
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((m, n))
    weights = rng.standard_normal(n)
    if name == "poisson":
        weights = weights / (2 * math.sqrt(n))
        targets = rng.poisson(np.exp(np.minimum(features @ weights, 30.0))).astype(np.float64)
    else:
        margins = features @ (weights / math.sqrt(n))
        if name == "squared":
            targets = margins + 0.1 * rng.standard_normal(m)
        else:
            targets = np.where(rng.random(m) < 0.5 * (1 + np.tanh(margins / 0.5)), 1.0, -1.0)
    return Dataset(name=f"synth-{name}", objective=name, features=features, targets=targets)


def load_builtin(name: str) -> Dataset:
    """One of the data sets that come with scikit-learn, not standardised (see `Standardiser`).

    breast_cancer: 569 x 30, logistic. digits: 1797 x 64, integers 0..16 divided by 16, logistic, odd digits are +1.
    diabetes: 442 x 10, squared.
    """
    if name not in BUILTIN:
        raise InputError("there is no built-in data set of this name", got=repr(name), expected=", ".join(BUILTIN))
    try:
        from sklearn import datasets
    except ImportError as error:
        raise InputError(
            "the built-in data sets come with scikit-learn", got=error, fix="pip install 'precision-time[glm]'"
        ) from error
    if name == "diabetes":
        features, targets = datasets.load_diabetes(return_X_y=True)
        return Dataset(name=name, objective="squared", features=features, targets=targets.astype(np.float64))
    if name == "digits":
        features, digits = datasets.load_digits(return_X_y=True)
        targets = np.where(digits % 2 == 1, 1.0, -1.0)
        return Dataset(name=name, objective="logistic", features=features / 16.0, targets=targets)
    features, labels = datasets.load_breast_cancer(return_X_y=True)
    return Dataset(name=name, objective="logistic", features=features, targets=map_labels(labels))


@dataclass(frozen=True, kw_only=True, eq=False)
class Standardiser:
    """x -> (x - mean) / scale for each column, (n,) each. A rank can fit and apply it to its own columns alone.

    Apply it before rounding to a low precision: rounding a column far from zero loses its variation.
    """

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, features: Any, *, centre: bool = True) -> "Standardiser":
        """Mean and standard deviation of the columns, in float64; a constant column keeps scale 1.

        With ``centre=False`` the mean is taken as 0 and the scale is the root mean square. Zeros stay zero then, which
        sparse features need: centring would fill them. InputError for NaN and infinity.
        """
        sparse = hasattr(features, "tocsr")
        if sparse and centre:
            raise InputError(
                "sparse features cannot be centred: every zero would be stored",
                got=f"{features.shape[0]} x {features.shape[1]} with {features.nnz} non-zeros",
                fix="use centre=False",
            )
        m, n = features.shape
        if m < 1:
            raise InputError("standardising needs at least one row", got=f"{m} x {n}")
        if sparse:
            entries = features.tocoo()
            squares = np.bincount(entries.col, weights=entries.data.astype(np.float64) ** 2, minlength=n) / m
            mean, scale = np.zeros(n), np.sqrt(squares)
        else:
            with np.errstate(over="ignore", invalid="ignore"):  # checked below
                mean = np.asarray(np.mean(features, axis=0, dtype=np.float64)) if centre else np.zeros(n)
                scale = np.sqrt(np.mean(np.square(features - mean, dtype=np.float64), axis=0))
        bad = np.flatnonzero(~(np.isfinite(mean) & np.isfinite(scale)))
        if bad.size:
            raise InputError("features hold NaN, infinity or numbers too large to square", got=f"column {bad[0]}")
        # A constant column less its mean leaves rounding errors, not variation.
        constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(mean)
        return cls(mean=mean, scale=np.where(constant, 1.0, scale))

    def apply(self, features: Any) -> Any:
        """Features of the same kind and shape, standardised in float64 and rounded once to their type."""
        if features.shape[1] != self.mean.size:
            raise InputError(
                "the standardiser was fitted to another number of columns",
                got=features.shape[1],
                expected=f"{self.mean.size}",
            )
        if not hasattr(features, "tocsr"):
            return ((features - self.mean) / self.scale).astype(features.dtype, copy=False)
        if self.mean.any():
            raise InputError("sparse features cannot be centred: every zero would be stored", fix="use centre=False")
        scaled = features.tocsr(copy=True)
        scaled.data = (scaled.data / self.scale[scaled.indices]).astype(features.dtype, copy=False)
        return scaled
