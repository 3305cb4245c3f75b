"""The strictly lower blocks of Y Y^T and the margins Y w, packed into the one buffer that the ranks sum."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from precision_time.casgd.precision import round_to

__all__ = ["PackedGram", "fill_gram", "fill_margins", "packed_gram_words", "round_in_place"]


def packed_gram_words(rows: int, batch_size: int) -> int:
    """Words of the strictly lower Gram blocks of ``rows`` rows in batches of b; the last batch may be shorter.

    That is b^2 s (s - 1) / 2 for s whole batches. One sum over the ranks carries these words and a margin a row.
    """
    before = (rows - 1) // batch_size  # batches in front of the last one
    return before * (before - 1) // 2 * batch_size**2 + (rows - before * batch_size) * before * batch_size


class PackedGram:
    """One buffer [G_10, G_20 G_21, ..., v] for batches of the given sizes.

    With offsets o_j = sum of the sizes before j, block row j is G_j = Y_j Y_{<j}^T of shape (b_j, o_j), row-major;
    the diagonal blocks are not needed. ``margins`` is v = Y w, (o_s,).
    """

    def __init__(self, sizes: Sequence[int], *, dtype: np.dtype[Any]) -> None:
        self.sizes = tuple(sizes)
        self.offsets = tuple(int(offset) for offset in np.cumsum((0, *sizes)))
        words = [size * offset for size, offset in zip(self.sizes, self.offsets, strict=False)]
        starts = [int(start) for start in np.cumsum([0, *words])]
        self.gram_words = starts[-1]
        self.rows = self.offsets[-1]
        self.buffer = np.empty(self.gram_words + self.rows, dtype=dtype)
        self.gram = self.buffer[: self.gram_words]
        self.margins = self.buffer[self.gram_words :]
        self.blocks = [
            self.buffer[start : start + count].reshape(size, offset)
            for start, count, size, offset in zip(starts, words, self.sizes, self.offsets, strict=False)
        ]


def fill_gram(packed: PackedGram, block: Any) -> None:
    """G_j = Y_j Y_{<j}^T for j = 1 .. s - 1 from ``block`` Y (rows, n_local), dense or CSR."""
    offsets = packed.offsets
    dense = isinstance(block, np.ndarray)
    if not dense or _whole_is_faster(block.shape, packed.sizes[0]):
        # Sparse: one product instead of s - 1, because a call costs more than the unused half.
        product = block @ block.T if dense else (block @ block.T).toarray()
        for j in range(1, len(packed.sizes)):
            packed.blocks[j][...] = product[offsets[j] : offsets[j + 1], : offsets[j]]
        return
    transposed = block.T
    if block.dtype == packed.buffer.dtype:
        for j in range(1, len(packed.sizes)):
            np.dot(block[offsets[j] : offsets[j + 1]], transposed[:, : offsets[j]], packed.blocks[j])
    else:
        for j in range(1, len(packed.sizes)):
            packed.blocks[j][...] = block[offsets[j] : offsets[j + 1]] @ transposed[:, : offsets[j]]


def _whole_is_faster(shape: tuple[int, ...], batch_size: int) -> bool:
    """Whether Y Y^T at once (a symmetric rank-k update) is faster than s - 1 flat products, as timed with OpenBLAS.

    One core, FP32: 1.9 times at 256 x 2000 with b = 16; 0.1 times at 1024 x 28 with b = 64.
    """
    rows, columns = shape
    if columns >= 128:
        return rows >= 128 and 16 <= batch_size < 64
    return columns <= 64 and batch_size <= 8 and 8 * batch_size <= rows <= 256


def fill_margins(packed: PackedGram, block: Any, weights: np.ndarray) -> None:
    """v = Y w for ``block`` Y (rows, n_local), dense or CSR, and ``weights`` (n_local,) in the type of the block."""
    if isinstance(block, np.ndarray) and block.dtype == packed.buffer.dtype:
        block.dot(weights, packed.margins)
    else:
        packed.margins[...] = block @ weights


def round_in_place(values: np.ndarray, fmt: str) -> None:
    """Round ``values`` to ``fmt``, unless the type of the array is that format."""
    if fmt in ("fp64", "fp32") and values.dtype == (np.float64 if fmt == "fp64" else np.float32):
        return
    if fmt != "fp64":
        values[...] = round_to(values, fmt)
