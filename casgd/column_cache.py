"""LIBSVM text converted once to a checksummed cache of column blocks, and a rank's columns read back from it.

A cache is a folder: ``header.json`` (shapes, types, the size and SHA-256 of every file, and a digest of the header
itself) and the files of the blocks. A dense block is the C-ordered matrix (rows, columns of the block); a CSR block is
three files, ``data``, ``indices`` (counted from the block's first column) and ``indptr``. Text is read once, in chunks,
and memory holds one chunk and the labels. The folder gets its name when it is complete.
"""

import bz2
import fcntl
import gzip
import hashlib
import io
import json
import lzma
import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from precision_time.casgd.errors import InputError

__all__ = ["ColumnCache", "convert_libsvm", "map_labels", "open_cache", "split_columns"]

_FORMAT = "casgd-columns"
_VERSION = 1
_CHUNK_BYTES = 16 * 2**20
_OPENERS: dict[str, Any] = {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}
# The pairs of labels in LIBSVM's two-class files. Other pairs are refused: {3, 7} is more likely a wrong file.
_LABEL_PAIRS = ((-1.0, 1.0), (0.0, 1.0), (1.0, 2.0))


def map_labels(labels: np.ndarray) -> np.ndarray:
    """``labels`` (m,) of {-1,+1}, {0,1} or {1,2} as -1.0 and +1.0, the smaller becoming -1.

    Raises:
        InputError: not exactly two classes, or another pair; the message names the classes.
    """
    classes = np.unique(labels)
    if classes.size != 2 or tuple(classes.tolist()) not in _LABEL_PAIRS:
        shown = ", ".join(f"{value:g}" for value in classes[:6]) + (", ..." if classes.size > 6 else "")
        raise InputError(
            "the labels are no known pair of two classes",
            got=f"{classes.size} classes: {shown}",
            expected="{-1,+1}, {0,1} or {1,2}, both present",
            fix="keep the labels as they are with labels='numbers', or relabel the file",
        )
    return np.where(labels == classes[1], 1.0, -1.0)


def split_columns(columns: int, ranks: int, *, nonzeros: np.ndarray | None = None) -> list[tuple[int, int]]:
    """The half-open range of columns of each rank: equal counts, or equal shares of ``nonzeros`` (columns,).

    Every rank gets at least one column. InputError if there are more ranks than columns.
    """
    if not 1 <= ranks <= columns:
        raise InputError(
            "every rank needs a column of its own",
            got=f"{ranks} ranks for {columns} columns",
            expected=f"1 to {columns} ranks",
            fix="start fewer ranks",
        )
    if nonzeros is None:
        edges = [columns * rank // ranks for rank in range(ranks + 1)]
    else:
        # Plus one for each column, whose weight is stored and updated even if the column is empty.
        before = np.concatenate([[0], np.cumsum(np.asarray(nonzeros, dtype=np.int64) + 1)])
        edges = [int(edge) for edge in np.searchsorted(before, before[-1] * np.arange(ranks + 1) / ranks)]
        edges[0], edges[-1] = 0, columns
        for rank in range(1, ranks):
            edges[rank] = min(max(edges[rank], edges[rank - 1] + 1), columns - (ranks - rank))
    return list(pairwise(edges))


class _HashedFile:
    """A new file that is hashed while it is written, and synced to disk when it is closed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
        self._digest = hashlib.sha256()
        self._name, self._bytes = path.name, 0

    def append(self, values: np.ndarray) -> None:
        part = np.ascontiguousarray(values).view(np.uint8).reshape(-1).data
        self._file.write(part)
        self._digest.update(part)
        self._bytes += len(part)

    def close(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"file": self._name, "bytes": self._bytes, "sha256": self._digest.hexdigest()}


def _seal(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _line_chunks(source: Path, chunk_bytes: int) -> Iterator[bytes]:
    """The text in chunks of whole lines, of at least ``chunk_bytes`` bytes."""
    rest = b""
    with _OPENERS.get(source.suffix, open)(source, "rb") as text:
        while True:
            try:
                part = text.read(chunk_bytes)
            except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
                raise InputError("the compressed file is cut short or damaged", got=f"{source}: {error}") from error
            if not part:
                break
            end = part.rfind(b"\n") + 1
            if end:
                yield rest + part[:end]
                rest = b""
            rest += part[end:]
    if rest.strip():
        yield rest


def _parse(chunk: bytes, *, columns: int, zero_based: bool, first_line: int) -> tuple[Any, np.ndarray]:
    from sklearn.datasets import load_svmlight_file

    def read(lines: bytes) -> tuple[Any, np.ndarray]:
        features, labels = load_svmlight_file(io.BytesIO(lines), n_features=columns, zero_based=zero_based)[:2]
        if not (np.isfinite(features.data).all() and np.isfinite(labels).all()):
            raise ValueError("NaN or infinity")
        return features, labels

    try:
        return read(chunk)
    except (ValueError, OverflowError) as error:
        for number, line in enumerate(chunk.splitlines(), start=first_line):
            try:
                read(line + b"\n")
            except (ValueError, OverflowError) as cause:
                raise InputError(
                    f"line {number} of the LIBSVM text cannot be used",
                    got=f"{line[:80].decode(errors='replace')!r}: {cause}",
                    expected=f"label index:value ..., finite, indices {0 if zero_based else 1} to "
                    f"{columns - 1 if zero_based else columns}",
                    fix="correct the line, or give the right n_features and zero_based",
                ) from error
        raise


def convert_libsvm(
    source: str | Path,
    target: str | Path,
    *,
    n_features: int,
    layout: Literal["dense", "csr"] = "dense",
    labels: Literal["binary", "numbers"] = "binary",
    dtype: Literal["float32", "float64"] = "float32",
    blocks: int = 16,
    zero_based: bool = False,
    chunk_bytes: int = _CHUNK_BYTES,
) -> "ColumnCache":
    """The cache ``target`` of the LIBSVM text ``source`` (plain, .gz, .bz2 or .xz), converted unless it exists.

    n_features: n; a LIBSVM file does not state its number of columns, and a test file may lack the last columns.
    blocks: the number of column blocks (at most n).
    labels: "binary" maps two classes to -1/+1, see `map_labels`; "numbers" keeps them.

    A cache that was made from the same file (by size and time of change) with the same options is opened as it is, so
    every rank of a job may call this: one rank converts, the others wait. A conversion that dies leaves nothing under
    ``target``; the next conversion removes its remains.

    Raises:
        InputError: an unusable line, by number; labels of other classes; a cache of another file or other options.
    """
    source, target = Path(source), Path(target)
    if n_features < 1 or blocks < 1 or chunk_bytes < 1:
        raise InputError("n_features, blocks and chunk_bytes must be at least 1", got=(n_features, blocks, chunk_bytes))
    if not source.is_file():
        raise InputError("there is no such LIBSVM file", got=source)
    state = source.stat()
    origin = {
        "name": source.name,
        "bytes": state.st_size,
        "changed_ns": state.st_mtime_ns,
        "n_features": n_features,
        "layout": layout,
        "labels": labels,
        "dtype": dtype,
        "blocks": min(blocks, n_features),
        "zero_based": zero_based,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            cache = open_cache(target)
            changed = [name for name, value in origin.items() if cache.header["origin"].get(name) != value]
            if changed:
                raise InputError(
                    "this cache was made from another file or with other options",
                    got=f"{target}: {', '.join(changed)} differ",
                    fix="name another target, or remove this one",
                )
            return cache
        unfinished = target.parent / f".{target.name}.part"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            _write(source, unfinished, origin=origin, chunk_bytes=chunk_bytes)
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return open_cache(target)


def _write(source: Path, folder: Path, *, origin: dict[str, Any], chunk_bytes: int) -> None:
    columns, dtype, dense = origin["n_features"], np.dtype(origin["dtype"]), origin["layout"] == "dense"
    ranges = split_columns(columns, origin["blocks"])
    kinds = ("values",) if dense else ("data", "indices", "indptr")
    files = [{kind: _HashedFile(folder / f"block-{i:05d}.{kind}") for kind in kinds} for i in range(len(ranges))]
    stored = [0] * len(ranges)
    nonzeros = np.zeros(columns, dtype=np.int64)
    labels: list[np.ndarray] = []
    lines = 1
    if not dense:
        for block in files:
            block["indptr"].append(np.zeros(1, dtype=np.int64))
    for chunk in _line_chunks(source, chunk_bytes):
        part, part_labels = _parse(chunk, columns=columns, zero_based=origin["zero_based"], first_line=lines)
        lines += chunk.count(b"\n")
        labels.append(part_labels)
        nonzeros += np.bincount(part.indices, minlength=columns)
        with np.errstate(over="ignore"):
            rounded = part.astype(dtype)
        if not np.isfinite(rounded.data).all():
            raise InputError("a value is too large for the type of the cache", got=dtype, fix="dtype='float64'")
        whole = rounded.toarray() if dense else rounded.tocsc()
        for i, (first, end) in enumerate(ranges):
            if dense:
                files[i]["values"].append(whole[:, first:end])
                continue
            block = whole[:, first:end].tocsr()
            block.sort_indices()
            files[i]["data"].append(block.data)
            files[i]["indices"].append(block.indices.astype(np.int32))
            files[i]["indptr"].append(block.indptr[1:].astype(np.int64) + stored[i])
            stored[i] += block.nnz
    targets = np.concatenate(labels) if labels else np.zeros(0)
    if not targets.size:
        raise InputError("the LIBSVM file holds no rows", got=source)
    if origin["labels"] == "binary":
        targets = map_labels(targets)
    described = []
    for (first, end), block in zip(ranges, files, strict=True):
        described.append({"first": first, "end": end, "files": {kind: file.close() for kind, file in block.items()}})
    sides = {}
    for name, values in (("targets", targets.astype(np.float64)), ("nonzeros", nonzeros)):
        file = _HashedFile(folder / name)
        file.append(values)
        sides[name] = file.close()
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "rows": int(targets.size),
        "columns": columns,
        "dtype": dtype.name,
        "layout": origin["layout"],
        "byte_order": "little",
        "blocks": described,
        **sides,
        "origin": origin,
    }
    with (folder / "header.json").open("x") as out:
        json.dump({**header, "sha256": _seal(header)}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())


def open_cache(path: str | Path) -> "ColumnCache":
    """The cache in the folder ``path``; InputError if it is no cache, damaged, or of another version."""
    path = Path(path)
    try:
        header = json.loads((path / "header.json").read_bytes())
        seal = header.pop("sha256")
        is_cache = header["format"] == _FORMAT
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            "this is no cache of columns", got=f"{path}: {error}", fix="make it with convert_libsvm"
        ) from error
    if not is_cache or header.get("version") != _VERSION or seal != _seal(header):
        raise InputError(
            "the header of the cache is damaged or of another version",
            got=path,
            expected=f"{_FORMAT} version {_VERSION}",
            fix="remove the folder and convert again",
        )
    return ColumnCache(path=path, header=header)


@dataclass(frozen=True, kw_only=True)
class ColumnCache:
    """An open cache; ``header`` is the content of header.json."""

    path: Path
    header: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the whole matrix."""
        return self.header["rows"], self.header["columns"]

    def targets(self) -> np.ndarray:
        """The labels (rows,), float64, of all rows."""
        return np.array(self._map(self.header["targets"], np.dtype("<f8")))

    def column_range(self, *, rank: int = 0, size: int = 1) -> tuple[int, int]:
        """The half-open range of columns of ``rank``: equal counts if dense, equal shares of the non-zeros if CSR."""
        if not 0 <= rank < size:
            raise InputError("there is no such rank", got=rank, expected=f"0 to {size - 1}")
        nonzeros = None
        if self.header["layout"] == "csr":
            nonzeros = self._map(self.header["nonzeros"], np.dtype("<i8"))
        return split_columns(self.shape[1], size, nonzeros=nonzeros)[rank]

    def features(self, *, rank: int = 0, size: int = 1) -> Any:
        """The columns of ``rank`` of ``size``: an array (rows, n_local) or a SciPy CSR matrix.

        Only the blocks with these columns are read, by memory mapping, and checked against their digests. Dense columns
        of one block are a read-only view of the file and take no memory; others are copied.
        """
        first, end = self.column_range(rank=rank, size=size)
        parts = [
            self._block(block, max(first, block["first"]), min(end, block["end"]))
            for block in self.header["blocks"]
            if block["first"] < end and first < block["end"]
        ]
        if len(parts) == 1:
            return parts[0]
        if self.header["layout"] == "dense":
            return np.concatenate(parts, axis=1)
        from scipy import sparse

        return sparse.hstack(parts, format="csr")

    def _block(self, block: dict[str, Any], first: int, end: int) -> Any:
        dtype = np.dtype(self.header["dtype"]).newbyteorder("<")
        first, end, width = first - block["first"], end - block["first"], block["end"] - block["first"]
        files = block["files"]
        if self.header["layout"] == "dense":
            return self._map(files["values"], dtype).reshape(-1, width)[:, first:end]
        from scipy import sparse

        types = {"data": dtype, "indices": np.dtype("<i4"), "indptr": np.dtype("<i8")}
        data, indices, indptr = (self._map(files[kind], element) for kind, element in types.items())
        whole = sparse.csr_matrix((data, indices, indptr), shape=(self.shape[0], width), copy=False)
        return whole if (first, end) == (0, width) else whole[:, first:end]

    def _map(self, entry: dict[str, Any], dtype: np.dtype[Any]) -> np.ndarray:
        path = self.path / entry["file"]
        try:
            intact = path.stat().st_size == entry["bytes"]
            if intact:
                with path.open("rb") as file:
                    intact = hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"]
        except OSError:
            intact = False
        if not intact:
            raise InputError(
                "a file of the cache is damaged or missing", got=path, fix="remove the folder and convert again"
            )
        if entry["bytes"] == 0:
            return np.zeros(0, dtype=dtype)
        return np.memmap(path, dtype=dtype, mode="r")
