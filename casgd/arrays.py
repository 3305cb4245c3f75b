"""Features of NumPy, SciPy and CuPy: which library it is, rounding to a format, gathering rows; the door to CuPy."""

import functools
import os
from typing import Any, Literal, Protocol

import numpy as np

from precision_time.casgd.communicator import say
from precision_time.casgd.errors import InputError
from precision_time.casgd.precision import PrecisionPolicy, carrier, round_to

__all__ = [
    "DenseFeatures",
    "Features",
    "SparseFeatures",
    "choose_gpu",
    "import_cupy",
    "library_of",
    "move_to_gpu",
    "store_features",
    "to_host",
    "work_type",
]

# Below this share of non-zeros a sparse product costs less than a dense one (measured on CPUs, one core).
DENSE_FROM_DENSITY = 0.05
# A block is not made dense above this many numbers (FP32: 256 MiB).
_LARGEST_DENSE_BLOCK = 2**26

# The variables by which launchers number the processes of a machine: Open MPI, Hydra (MPICH and Intel MPI), MVAPICH2,
# and last Slurm, whose number is that of a helper process if another launcher starts the ranks.
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def library_of(features: Any) -> Literal["numpy", "scipy", "cupy"]:
    """The library of an array; none is imported to find out.

    Raises:
        InputError: another library, or a sparse matrix that is not CSR.
    """
    if isinstance(features, np.ndarray):
        return "numpy"
    module = type(features).__module__.partition(".")[0]
    if module == "scipy":
        if getattr(features, "format", None) != "csr":
            raise InputError("sparse features", got=type(features).__name__, expected="CSR", fix="call .tocsr()")
        return "scipy"
    if module == "cupy":
        return "cupy"
    raise InputError("features", got=type(features).__name__, expected="a NumPy or CuPy array, or a SciPy CSR matrix")


def import_cupy() -> Any:
    """The module cupy.

    Raises:
        InputError: it is not installed.
    """
    try:
        import cupy
    except ImportError as error:
        raise InputError(
            "CuPy is needed for arrays on a GPU", got=error, fix="install precision-time[gpu-cu12] or [gpu-cu13]"
        ) from error
    return cupy


def choose_gpu() -> str:
    """Make the GPU of this process's local rank CuPy's current device; returns which GPU that is, and why.

    The local rank comes from the launcher, modulo the number of visible GPUs. A current GPU other than the first was
    set by the caller and stays, and so does any GPU without a launcher. Under a launcher, standard error gets the same
    line, once.

    Raises:
        InputError: CuPy is not installed, or finds no GPU.
    """
    cuda = import_cupy().cuda
    if not cuda.is_available():
        raise InputError("CuPy finds no GPU", fix="compute on the CPU, or see what nvidia-smi says")
    current, count = int(cuda.Device().id), int(cuda.runtime.getDeviceCount())
    name = next((name for name in _LOCAL_RANKS if os.environ.get(name, "").isdecimal()), None)
    if name is None:
        return f"GPU {current} of {count}, the current one"
    local = int(os.environ[name]) % count
    if current in (0, local):
        cuda.Device(local).use()
        line = f"GPU {local} of {count}, by {name}={os.environ[name]}"
    else:
        line = f"GPU {current} of {count}, the current one"
    _say_once(line)
    return line


@functools.cache
def _say_once(message: str) -> None:
    say(message)


def move_to_gpu(features: np.ndarray) -> Any:
    """A copy of ``features`` on the GPU of `choose_gpu`.

    Raises:
        InputError: CuPy is not installed, or finds no GPU.
    """
    choose_gpu()
    return import_cupy().asarray(features)


def to_host(values: Any) -> Any:
    """``values`` in host memory, of the same type: an ndarray, or a sparse matrix as it is."""
    return values.get() if hasattr(values, "get") else values


def work_type(policy: PrecisionPolicy) -> np.dtype[Any]:
    """The type in which Y w, Y Y^T and Y^T c are multiplied and summed: float64 if the policy has it for any of them.

    The product of two FP16, BF16 or TF32 numbers is exact in float32, so a float32 product of converted blocks is the
    arithmetic of a tensor core.
    """
    formats = (policy.margin_accumulate, policy.gram_accumulate, policy.increment)
    return carrier("fp64" if "fp64" in formats else "fp32")


class Features(Protocol):
    """Stored features, whose rows are gathered and converted block by block."""

    shape: tuple[int, int]

    def gather(self, rows: np.ndarray | slice, slot: int = 0) -> Any:
        """The rows as a block (count, n_local) in the work type: an ndarray or a CSR matrix.

        The block may live in a buffer of this object that the next call with the same ``slot`` overwrites.
        """


class DenseFeatures:
    """A dense matrix in its storage format: float64, float32 (also TF32), float16 or ml_dtypes.bfloat16."""

    def __init__(self, values: np.ndarray, *, work: np.dtype[Any]) -> None:
        self.values = values
        self.shape = (int(values.shape[0]), int(values.shape[1]))
        self._work = work
        self._converted = values.dtype != work
        self._stored: np.ndarray = np.empty((0, self.shape[1]), dtype=values.dtype)
        self._blocks: dict[int, np.ndarray] = {}

    def gather(self, rows: np.ndarray | slice, slot: int = 0) -> np.ndarray:
        if isinstance(rows, slice):
            part = self.values[rows]
            if not self._converted:
                return part
            block = self._block(part.shape[0], slot)
            np.copyto(block, part, casting="same_kind")
            return block
        count = rows.shape[0]
        block = self._block(count, slot)
        # Mode "clip" lets take write straight into the block; the rows are part of a permutation, so none is clipped.
        if not self._converted:
            return self.values.take(rows, 0, block, "clip")
        if self._stored.shape[0] < count:
            self._stored = np.empty((count, self.shape[1]), dtype=self.values.dtype)
        np.copyto(block, self.values.take(rows, 0, self._stored[:count], "clip"), casting="same_kind")
        return block

    def _block(self, count: int, slot: int) -> np.ndarray:
        block = self._blocks.get(slot)
        if block is None or block.shape[0] < count:
            block = self._blocks[slot] = np.empty((count, self.shape[1]), dtype=self._work)
        return block if block.shape[0] == count else block[:count]


class SparseFeatures:
    """A CSR matrix whose values are rounded to the storage format but held in the work type: SciPy has no BF16."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix
        self.shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        self.density = matrix.nnz / max(1, self.shape[0] * self.shape[1])

    def gather(self, rows: np.ndarray | slice, slot: int = 0) -> Any:
        block = self.matrix[rows]
        small = block.shape[0] * block.shape[1] <= _LARGEST_DENSE_BLOCK
        return block.toarray() if small and self.density >= DENSE_FROM_DENSITY else block


def store_features(features: Any, policy: PrecisionPolicy) -> Features:
    """The features rounded once to ``policy.x_storage``, on the host.

    An array that already has the storage type is used without a copy.

    Raises:
        InputError: NaN or infinity in the features, or values past the range of the format.
    """
    fmt = policy.x_storage
    work = work_type(policy)
    if library_of(features) == "scipy":
        matrix = features
        values = matrix.data
        if fmt not in ("fp64", "fp32") or values.dtype != work:
            rounded = round_to(values, fmt).astype(work, copy=False)
            matrix = type(matrix)((rounded, matrix.indices, matrix.indptr), shape=matrix.shape)
        _check_finite(matrix.data, values, fmt)
        return SparseFeatures(matrix)
    storage = _storage_type(fmt)
    stored = features
    if fmt == "tf32" or features.dtype != storage:
        with np.errstate(over="ignore"):
            # By round_to if the cast would round twice: ml_dtypes converts float64 through float32.
            stored = features.astype(storage) if fmt not in ("tf32", "bf16") else _round_dense(features, fmt, storage)
    _check_finite(stored, features, fmt)
    return DenseFeatures(np.ascontiguousarray(stored), work=work)


def _storage_type(fmt: str) -> np.dtype[Any]:
    if fmt == "bf16":
        import ml_dtypes

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(np.float16) if fmt == "fp16" else carrier(fmt)


def _round_dense(features: np.ndarray, fmt: str, storage: np.dtype[Any]) -> np.ndarray:
    """Round a few rows at a time, so that the temporaries stay in the cache."""
    stored = np.empty(features.shape, dtype=storage)
    step = max(1, 2**18 // max(1, features.shape[1]))
    for start in range(0, features.shape[0], step):
        stored[start : start + step] = round_to(features[start : start + step], fmt).astype(storage)
    return stored


def _check_finite(stored: np.ndarray, original: np.ndarray, fmt: str) -> None:
    # One sum finds nearly every case in one pass without a temporary; sums of BF16 are slow, so BF16 skips it.
    if stored.dtype in (np.float32, np.float64):
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(stored.sum()):
                return
    bad = ~np.isfinite(stored)
    if not bad.any():
        return
    where = tuple(int(index) for index in np.argwhere(bad)[0])
    if not np.isfinite(np.asarray(original)[bad].astype(np.float64)).all():
        raise InputError("features hold NaN or infinity", got=f"{int(bad.sum())} of them, the first at {where}")
    raise InputError(
        f"features past the range of {fmt}",
        got=f"{int(bad.sum())} of them, the first at {where}: {np.asarray(original)[where]}",
        fix="standardise the columns first, or choose policy 'recipe' or 'fp32'",
    )
