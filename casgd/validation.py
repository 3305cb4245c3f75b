"""Checks of the input of estimators and commands, and the columns that each rank owns."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from precision_time.casgd.arrays import to_host
from precision_time.casgd.column_cache import split_columns
from precision_time.casgd.errors import InputError
from precision_time.casgd.precision import LARGEST, PrecisionPolicy

__all__ = [
    "DtypeError",
    "check_counts",
    "check_dtype",
    "check_finite",
    "check_fits_format",
    "check_gpu_arrays",
    "check_parameters",
    "check_whole",
    "read_weights",
    "share_columns",
    "signed_labels",
]

# The element types of features and targets; check_dtype refuses others before the values are read.
_ACCEPTED_TYPES = ("float64", "float32", "float16", "integers", "booleans")

# As ml_dtypes, PyTorch and JAX name them.
_NARROW = re.compile(r"bfloat\d+|float[468](_\w+)?|u?int[124]")


class DtypeError(InputError, TypeError):
    """An array has an element type that is not accepted; raised before any exchange with its library."""

    code = "E-DTYPE"


def check_dtype(values: Any, *, name: str) -> None:
    """Refuse bfloat16 and other types that NumPy does not know, by the name of the type alone.

    ``values`` may be an array of any library; values without ``dtype`` (a list) pass. Nothing is converted or
    exchanged, because the import of such a tensor can crash the process (cupy/cupy issue 8801). Complex numbers and
    text are left to scikit-learn's own checks.

    Raises:
        DtypeError: the element type is none of float64, float32, float16, integers and booleans.
    """
    dtype = getattr(values, "dtype", None)
    if dtype is None:
        return
    text = str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    if not _NARROW.fullmatch(text) and not (isinstance(dtype, np.dtype) and dtype.kind == "V"):
        return
    raise DtypeError(
        f"{name} has an element type that is not accepted",
        got=text,
        expected=", ".join(_ACCEPTED_TYPES),
        fix=f"pass {name} as float32: the policies 'recipe' and 'paper' round it to bfloat16 once, after the checks",
    )


def check_finite(values: Any, *, name: str) -> None:
    """Refuse NaN and infinity, and name the place of the first.

    ``values``: an ndarray of one or two axes, a SciPy sparse matrix (its stored values) or a CuPy array.

    Raises:
        InputError: names the number of such rows.
    """
    data = values.tocsr().data if hasattr(values, "tocsr") else values
    # A finite sum has only finite terms, so the usual case takes one cheap pass.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(float(data.sum())):
            return
    if hasattr(values, "tocsr"):
        matrix = values.tocsr()
        bad = np.flatnonzero(~np.isfinite(matrix.data))
        rows = np.searchsorted(matrix.indptr, bad, side="right") - 1
        columns, wrong = matrix.indices[bad], matrix.data[bad]
    else:
        host = np.asarray(to_host(values))
        places = np.nonzero(~np.isfinite(host))
        rows, columns, wrong = places[0], places[-1], host[places]
    if not len(rows):
        return
    where = f"row {int(rows[0])}" + (f", column {int(columns[0])}" if values.ndim == 2 else "")
    raise InputError(
        f"{name} holds NaN or infinity",
        got=f"{'NaN' if np.isnan(wrong[0]) else 'inf'} in {where}; {len(set(rows.tolist()))} row(s) in all",
        expected="finite numbers",
        fix="drop these rows or impute them (sklearn.impute)",
    )


def check_fits_format(features: Any, policy: PrecisionPolicy) -> None:
    """Refuse features that the policy's storage format would turn into infinity.

    Raises:
        InputError: names the largest value and the largest number of the format.
    """
    data = features.data if hasattr(features, "tocsr") else features
    largest = LARGEST[policy.x_storage]
    if 0 in data.shape or largest >= np.finfo(data.dtype).max:
        return
    largest_value = max(float(data.max()), -float(data.min()))
    if largest_value > largest:
        raise InputError(
            f"policy {policy.name!r} stores the features in {policy.x_storage}, which ends at {largest:g}",
            got=f"{largest_value:g}",
            fix="standardise the features, or choose precision='fp32'",
        )


def check_counts(targets: np.ndarray) -> None:
    """Refuse negative targets of a Poisson model.

    Raises:
        InputError: a negative target.
    """
    bad = np.flatnonzero(targets < 0)
    if bad.size:
        raise InputError(
            "a target of a Poisson model is negative",
            got=f"{targets[bad[0]]:g} in row {bad[0]}; {bad.size} row(s) in all",
            expected="targets of 0 and above",
            fix="fit CASGDRegressor, or shift the targets",
        )


def check_whole(value: Any, *, name: str, least: int) -> int:
    """``value`` as an int.

    Raises:
        InputError: not a whole number, or below ``least``.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(f"{name} is not usable", got=repr(value), expected=f"a whole number of at least {least}")
    return int(value)


def check_parameters(values: Mapping[str, Any], *, rates: Sequence[str]) -> None:
    """Refuse invalid parameters of an estimator; ``rates`` are the values of ``learning_rate``.

    Raises:
        InputError: names the parameter.
    """
    for name in ("max_iter", "n_iter_no_change", "batch_size"):
        check_whole(values[name], name=name, least=1)
    if values["s"] != "auto":
        check_whole(values["s"], name="s", least=1)
    for name, allowed in (("learning_rate", rates), ("on_risk", (None, "fallback", "warn", "raise"))):
        if values[name] not in allowed:
            raise InputError(f"unknown {name}", got=repr(values[name]), expected=", ".join(map(str, allowed)))
    if not isinstance(values["prefetch"], bool | np.bool_):
        raise InputError("prefetch is not usable", got=repr(values["prefetch"]), expected="True or False")
    for name, optional in (("alpha", False), ("tol", True), ("eta0", True), ("largest_excess", False)):
        value = values[name]
        if value is None and optional:
            continue
        try:
            fits = math.isfinite(value) and (value >= 0 or name == "tol") and (name != "eta0" or value > 0)
        except TypeError:
            fits = False
        if not fits:
            raise InputError(f"{name} is not usable", got=repr(value), expected="a finite number, not below 0")


def check_gpu_arrays(features: Any, targets: Any = None, *, columns: int | None) -> np.ndarray | None:
    """Check arrays on a GPU, which scikit-learn's own checks cannot read; returns ``targets``, if given, on the host.

    columns: the required number of columns of the features; None is any number.

    Raises:
        InputError: another type or shape, or values that are not finite.
    """
    if features.ndim != 2 or features.dtype not in (np.float32, np.float64) or 0 in features.shape:
        got = f"{features.dtype} of shape {features.shape}"
        raise InputError("X on a GPU", got=got, expected="float32 or float64 (m, n)")
    if columns is not None and features.shape[1] != columns:
        raise InputError("X has another number of columns", got=features.shape[1], expected=str(columns))
    check_finite(features, name="Input X")
    if targets is None:
        return None
    y = np.asarray(to_host(targets))
    if y.shape != features.shape[:1]:
        raise InputError("y does not fit X", got=f"shape {y.shape}", expected=str(features.shape[:1]))
    if y.dtype.kind == "f":
        check_finite(y, name="Input y")
    return y


def read_weights(sample_weight: Any, *, rows: int) -> np.ndarray:
    """Sample weights as (rows,) float64; a single number is the weight of every row.

    Raises:
        InputError: another shape, or weights that are negative, not finite or all zero.
    """
    check_dtype(sample_weight, name="sample_weight")
    weights = np.asarray(sample_weight, dtype=np.float64)
    if weights.ndim == 0:
        weights = np.full(rows, weights)
    if weights.shape != (rows,):
        raise InputError("sample_weight does not fit X", got=f"shape {weights.shape}", expected=f"({rows},)")
    check_finite(weights, name="sample_weight")
    if (weights < 0).any():
        raise InputError("a sample weight is negative", got=f"{weights.min():g}", expected="0 and above")
    if not weights.any():
        raise InputError("all sample weights are zero", expected="at least one weight above zero")
    return weights


def signed_labels(targets: np.ndarray, positive: Any) -> np.ndarray:
    """+1.0 where ``targets`` equal ``positive``, else -1.0: (m,) float64."""
    return np.where(targets == positive, 1.0, -1.0)


def share_columns(features: Any, size: int) -> list[tuple[int, int]]:
    """The columns of ``features`` (m, n) that each of ``size`` ranks owns, as half-open ranges.

    Each rank gets about the same number of dense columns, or of stored values of a sparse matrix, and at least one
    column.

    Raises:
        InputError: more ranks than columns.
    """
    columns = int(features.shape[1])
    stored = np.bincount(features.tocsr().indices, minlength=columns) if hasattr(features, "tocsr") else None
    return split_columns(columns, size, nonzeros=stored)
