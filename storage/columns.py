"""A table of plain columns in one sealed Parquet file; a column is decoded when it is read."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from precision_time.storage.errors import InputError, IntegrityError
from precision_time.storage.seal import add_seal, check_seal

if TYPE_CHECKING:
    import numpy as np

__all__ = ["ColumnFile", "encode_columns"]


def encode_columns(columns: Mapping[str, Sequence[str] | Sequence[int] | Sequence[float]]) -> bytes:
    """The bytes of a Parquet file of ``columns``: text, whole numbers (int64) or numbers (float32).

    Equal columns give equal bytes. Raises ``InputError`` for columns of unequal lengths, none at all, or missing
    values.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1 or lengths == {0}:
        raise InputError(
            "these columns are no table", got=f"lengths {sorted(lengths)}", expected="one length, above zero"
        )
    fields, arrays = [], []
    for name, values in columns.items():
        kinds = {type(value) for value in values}
        kind = pa.string() if kinds == {str} else pa.int64() if kinds == {int} else pa.float32()
        if not kinds <= {int, float} and kinds != {str}:
            raise InputError(
                f"column {name} cannot be stored", got=str(sorted(kind.__name__ for kind in kinds)), expected="one kind"
            )
        arrays.append(pa.array([float(value) for value in values] if kind == pa.float32() else list(values), type=kind))
        fields.append(pa.field(name, kind, nullable=False))
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_arrays(arrays, schema=pa.schema(fields)),
        sink,
        compression="zstd",
        compression_level=9,
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        store_schema=False,
    )
    return add_seal(sink.getvalue().to_pybytes())


class ColumnFile:
    """The columns of a file that ``encode_columns`` wrote.

    ``names`` in their order; ``rows``. Raises ``IntegrityError`` naming the file for damage, and for Parquet without a
    seal.
    """

    def __init__(self, data: bytes, *, name: str) -> None:
        # Only the small part of Arrow, because predictions wait for this import.
        import pyarrow as pa
        import pyarrow.parquet as pq

        check_seal(data, name, needed=True)
        self.name = name
        try:
            self._file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
            self.names: tuple[str, ...] = tuple(self._file.schema_arrow.names)
            self.rows: int = self._file.metadata.num_rows
        except Exception as error:  # damage can raise any error in the decoder
            raise self._misfit(f"{type(error).__name__}: {error}") from error

    def text(self, column: str) -> list[str]:
        """The values of a column of text; raises ``LookupError`` for a name that is not there."""
        import pyarrow as pa

        values = self._read([column])[column]
        if not pa.types.is_string(values.type):
            raise self._misfit(f"column {column} holds {values.type}")
        return list(values.to_pylist())

    def numbers(self, *columns: str) -> "np.ndarray[Any, Any]":
        """The values of columns of numbers, of shape (rows,) for one and else (rows, columns), int64 or float32.

        Raises ``LookupError`` for a name that is not there.
        """
        import numpy as np
        import pyarrow as pa

        table = self._read(list(columns))
        for values in table.itercolumns():
            if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
                raise self._misfit(f"a column among {', '.join(columns[:3])} holds {values.type}")
        arrays = [_plain(values) for values in table.itercolumns()]
        return arrays[0] if len(arrays) == 1 else np.stack(arrays, axis=1)

    def _read(self, columns: list[str]) -> Any:
        if unknown := [column for column in columns if column not in self.names]:
            raise LookupError(unknown[0])
        try:
            return self._file.read(columns=columns, use_threads=False)
        except Exception as error:  # damage can raise any error in the decoder
            raise self._misfit(f"{type(error).__name__}: {error}") from error

    def _misfit(self, got: str) -> IntegrityError:
        return IntegrityError(
            f"{self.name} is damaged",
            got=got[:300],
            expected="an undamaged table of plain columns",
            fix="install the package again, or rebuild the table",
        )


def _plain(values: Any) -> "np.ndarray[Any, Any]":
    """The numbers of a column without missing values; Arrow's own conversion would load pandas."""
    import numpy as np

    kinds = {"int64": np.int64, "float": np.float32, "double": np.float64}
    parts = [
        np.frombuffer(chunk.buffers()[1], dtype=kinds[str(chunk.type)])[chunk.offset : chunk.offset + len(chunk)]
        for chunk in values.chunks
        if len(chunk)
    ]
    return np.concatenate(parts)
