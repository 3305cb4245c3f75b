"""Data to solve: made-up problems with known weights, scikit-learn's built-in sets, LIBSVM files, standardisation.

Nothing is downloaded. The three large sets that papers on this solver use are on the LIBSVM page
(https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html);
addresses and sizes are recalled, not re-checked::

    base=https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary
    curl -LO $base/epsilon_normalized.bz2   # 400 000 x 2000, dense, labels -1/+1
    curl -LO $base/SUSY.xz                  # 5 000 000 x 18, dense, labels 0/1
    curl -LO $base/HIGGS.xz                 # 11 000 000 x 28, dense, labels 0/1

and are converted once, on any rank or before the job::

    cache = convert_libsvm("epsilon_normalized.bz2", "epsilon", n_features=2000)
    cache = convert_libsvm("SUSY.xz", "susy", n_features=18)
    cache = convert_libsvm("HIGGS.xz", "higgs", n_features=28)
    Problem(features=cache.features(rank=comm.rank, size=comm.size), targets=cache.targets(), objective=LOGISTIC)
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from precision_time.casgd.column_cache import ColumnCache, convert_libsvm, map_labels, open_cache, split_columns
from precision_time.casgd.errors import InputError
from precision_time.casgd.objectives import find_objective

__all__ = [
    "BUILTIN",
    "ColumnCache",
    "Dataset",
    "Standardiser",
    "convert_libsvm",
    "find_optimum",
    "load_builtin",
    "map_labels",
    "open_cache",
    "poisson_synth",
    "split_columns",
    "synth",
]

BUILTIN = ("breast_cancer", "digits", "diabetes")


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """A problem's data: features (m, n), an array or a SciPy CSR matrix, and targets (m,) as the objective takes them.

    ``true_weights`` (n,) are those that made-up targets were drawn with, and None for data from elsewhere.
    """

    name: str
    objective: str
    features: Any
    targets: np.ndarray
    true_weights: np.ndarray | None = None
    true_intercept: float = 0.0


def _draw_features(rng: np.random.Generator, m: int, n: int, *, density: float) -> Any:
    """(m, n) float64 with columns of mean 0 and variance 1: an array if ``density`` is 1, otherwise a CSR matrix."""
    if m < 1 or n < 1:
        raise InputError("a made-up problem needs rows and columns", got=f"{m} x {n}", expected="at least 1 x 1")
    if not 0 < density <= 1:
        raise InputError("density is the share of numbers that are not zero", got=density, expected="above 0, up to 1")
    if density == 1:
        return rng.standard_normal((m, n))
    from scipy import sparse

    counts = rng.binomial(n, density, size=m)
    indices = np.concatenate([np.sort(rng.choice(n, size=count, replace=False)) for count in counts])
    indptr = np.concatenate([[0], np.cumsum(counts)])
    values = rng.standard_normal(indices.size) / math.sqrt(density)
    return sparse.csr_matrix((values, indices.astype(np.int32), indptr), shape=(m, n))


def synth(
    objective: str, m: int, n: int, *, density: float = 1.0, noise: float | None = None, seed: int = 0
) -> Dataset:
    """A problem of ``m`` rows and ``n`` columns drawn from its own model, the same for the same arguments.

    Columns have mean 0 and variance 1; w_k ~ N(0, 1/n), so that the margin z = x.w has variance near 1.

    squared: y = z + noise e, e ~ N(0, 1): R^2 is near 1/(1 + noise^2). ``noise`` is 0.1 if not given; 0 interpolates.
    logistic: P(y = +1) = sigmoid(z / noise); the weights of the model are then w/noise, which is what
    ``true_weights`` holds. ``noise`` is 0.25 if not given; 0 gives y = sign(z): separable, without a finite optimum,
    and ``true_weights`` is a direction.
    poisson: see `poisson_synth`; ``noise`` has no meaning there.

    The empirical optimum differs from the true weights by O(sqrt(n/m)); `find_optimum` gives it.
    """
    name = find_objective(objective).name
    if name == "poisson":
        if noise is not None:
            raise InputError("Poisson counts carry their own noise", got=f"noise={noise}", fix="leave noise out")
        return poisson_synth(m, n, density=density, seed=seed)
    level = {"squared": 0.1, "logistic": 0.25}[name] if noise is None else float(noise)
    if not (math.isfinite(level) and level >= 0):
        raise InputError("noise must be finite and not negative", got=noise)
    rng = np.random.default_rng(seed)
    features = _draw_features(rng, m, n, density=density)
    weights = rng.standard_normal(n) / math.sqrt(n)
    margin = features @ weights
    if name == "squared":
        targets = margin + level * rng.standard_normal(m)
    elif level == 0:
        targets = np.where(margin > 0, 1.0, -1.0)
    else:
        weights = weights / level
        chance = 0.5 * (1 + np.tanh(margin / (2 * level)))
        targets = np.where(rng.random(m) < chance, 1.0, -1.0)
    return Dataset(name=f"synth-{name}", objective=name, features=features, targets=targets, true_weights=weights)


def poisson_synth(m: int, n: int, *, density: float = 1.0, rate: float = 1.0, seed: int = 0) -> Dataset:
    """Counts y ~ Poisson(exp(x.w + log rate)), w_k ~ N(0, 1/(4n)): most means lie within a factor e of ``rate``."""
    if not (math.isfinite(rate) and rate > 0):
        raise InputError("the rate of a Poisson law must be positive", got=rate)
    rng = np.random.default_rng(seed)
    features = _draw_features(rng, m, n, density=density)
    weights = rng.standard_normal(n) / (2 * math.sqrt(n))
    intercept = math.log(rate)
    targets = rng.poisson(np.exp(np.minimum(features @ weights + intercept, 30.0))).astype(np.float64)
    return Dataset(
        name="synth-poisson",
        objective="poisson",
        features=features,
        targets=targets,
        true_weights=weights,
        true_intercept=intercept,
    )


def find_optimum(
    features: Any, targets: np.ndarray, *, objective: str, l2: float = 0.0, fit_intercept: bool = True
) -> tuple[np.ndarray, float, float]:
    """(weights (n,), intercept, value) that minimise f of `Problem`, by Newton's method with step halving in float64.

    For checks on small problems: it forms the n x n Hessian. InputError where Newton's method finds no minimum in
    100 steps, as on separable data without ``l2``.
    """
    phi = find_objective(objective)
    rows = np.asarray(features.todense() if hasattr(features, "todense") else features, dtype=np.float64)
    if fit_intercept:
        rows = np.column_stack([rows, np.ones(len(rows))])
    m, n = rows.shape
    penalty = np.full(n, l2)
    if fit_intercept:
        penalty[-1] = 0.0

    def value_of(weights: np.ndarray) -> float:
        return float(np.mean(phi.loss(rows @ weights, targets)) + 0.5 * penalty @ weights**2)

    weights, value, settled = np.zeros(n), value_of(np.zeros(n)), False
    for _ in range(100):
        margin = rows @ weights
        gradient = rows.T @ np.asarray(phi.derivative(margin, targets)) / m + penalty * weights
        curvature = np.broadcast_to(phi.second(margin, targets), (m,))
        hessian = (rows.T * curvature) @ rows / m + np.diag(penalty)
        step = np.linalg.lstsq(hessian, gradient, rcond=None)[0]
        decrement = float(gradient @ step)
        if settled := decrement <= 1e-24 * max(1.0, abs(value)):
            break
        size, slope = 1.0, decrement
        while (tried := value_of(weights - size * step)) > value - 1e-4 * size * slope and size > 1e-10:
            size /= 2
        if settled := size <= 1e-10:  # the value no longer falls by more than its rounding
            break
        weights, value = weights - size * step, tried
    # Without a penalty, margins that all have the right sign can grow for ever.
    separable = phi.name == "logistic" and l2 == 0 and bool(np.all(rows @ weights * targets > 0))
    if separable or not settled:
        raise InputError(
            "Newton's method finds no minimum",
            got=f"{phi.name} loss {value:.3g}" + (", every label on its side" if separable else " and still falling"),
            fix="add l2: separable data have no finite optimum",
        )
    if fit_intercept:
        return weights[:-1], float(weights[-1]), value
    return weights, 0.0, value


def load_builtin(name: str) -> Dataset:
    """One of the sets that come with scikit-learn, as they are (see `Standardiser`).

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
    """x -> (x - mean) / scale, per column: (n,) each. A rank can fit and apply it to its own columns alone.

    Apply it before rounding to a low precision: a column far from zero loses its variation in the rounding of its mean.
    """

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def fit(cls, features: Any, *, centre: bool = True) -> "Standardiser":
        """Mean and standard deviation of the columns, in float64; a constant column keeps scale 1.

        With ``centre=False`` the mean is taken as 0 and the scale is the root mean square, which keeps zeros zero:
        the only choice for sparse features, since centring would fill them. InputError for NaN and infinity.
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
            with np.errstate(over="ignore", invalid="ignore"):  # looked for below
                mean = np.asarray(np.mean(features, axis=0, dtype=np.float64)) if centre else np.zeros(n)
                scale = np.sqrt(np.mean(np.square(features - mean, dtype=np.float64), axis=0))
        bad = np.flatnonzero(~(np.isfinite(mean) & np.isfinite(scale)))
        if bad.size:
            raise InputError("features hold NaN, infinity or numbers too large to square", got=f"column {bad[0]}")
        # What is left of a constant column after its mean is rounding, not variation.
        constant = scale <= 10 * np.finfo(np.float64).eps * np.abs(mean)
        return cls(mean=mean, scale=np.where(constant, 1.0, scale))

    def apply(self, features: Any) -> Any:
        """Features of the same kind and shape, standardised in float64 and rounded once to their type."""
        if features.shape[1] != self.mean.size:
            raise InputError("other columns than those fitted", got=features.shape[1], expected=f"{self.mean.size}")
        if not hasattr(features, "tocsr"):
            return ((features - self.mean) / self.scale).astype(features.dtype, copy=False)
        if self.mean.any():
            raise InputError("sparse features cannot be centred: every zero would be stored", fix="use centre=False")
        scaled = features.tocsr(copy=True)
        scaled.data = (scaled.data / self.scale[scaled.indices]).astype(features.dtype, copy=False)
        return scaled
