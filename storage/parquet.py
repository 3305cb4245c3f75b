"""Parquet with a declared schema: written with checksums, and read so that damage raises an error."""

from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precision_time.storage.errors import InputError, IntegrityError
from precision_time.storage.schema import ROW_VERSION, arrow_schema
from precision_time.storage.seal import add_seal, check_seal, damaged

__all__ = ["conform", "encode_table", "open_parquet", "read_table", "table_of"]

_VERSION_KEY = b"precision_time.schema_version"
_RECORD_KEY = b"record"

# A few kilobytes of repeated values can claim millions of rows, so the size in memory is checked before decoding.
_MAX_DECODED_BYTES = 128 * 2**20
_MAX_COLUMNS = 1_000
_MAX_THRIFT_BYTES = 16 * 2**20
_MAX_THRIFT_ITEMS = 100_000
_BYTES_OF_A_VALUE = 8


def table_of(rows: Sequence[Any], record: type) -> pa.Table:
    """The table of ``rows``, all of the class ``record``; raises ``InputError`` for others, else as ``conform``."""
    if others := [row for row in rows if type(row) is not record]:
        raise InputError(
            "these rows cannot be stored", got=type(others[0]).__name__, expected=f"rows of {record.__name__}"
        )
    schema = arrow_schema(record)
    if not rows:
        return schema.empty_table()
    values = [asdict(row) for row in rows]
    columns = {}
    for field in schema:
        try:
            # The type is inferred first: given the type int64, Arrow would truncate 1.5 to 1.
            columns[field.name] = pa.array([row[field.name] for row in values])
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise _misfit("these rows", field, str(error)) from error
    return conform(pa.table(columns), record, name="these rows")


def encode_table(table: pa.Table, record: type) -> bytes:
    """The bytes of a Parquet file: zstd, page checksums, and a seal over all of it.

    Raises ``IntegrityError`` when the table does not fit the schema of ``record``.
    """
    table = conform(table, record, name="this table")
    _check_size("this table", rows=table.num_rows, columns=table.num_columns, encoded=0)
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=[field.name for field in _text_fields(table.schema)],
        write_page_checksum=True,
    )
    return add_seal(sink.getvalue().to_pybytes())


def read_table(data: bytes, record: type, *, name: str = "this file") -> pa.Table:
    """The table in a Parquet file called ``name``, with exactly the schema of ``record``.

    An integer column is read as floating point if the schema says so. A missing column gets the default of the record,
    because files of earlier schemas lack it. Raises ``IntegrityError`` naming the file (and the column) for anything
    else: damage, another type, a missing or unknown column, a newer schema version, or more rows than fit in 128 MiB.
    A file of another writer has no seal and is read with the checks that Parquet itself offers.
    """
    schema = arrow_schema(record)
    check_seal(data, name)
    try:
        file = open_parquet(data)
        stored = file.schema_arrow
        _check_claims(file.metadata, schema, name)
        _check_labels(stored.metadata or {}, record, name)
        _check_columns(stored, schema, _defaults(record), name)
        # Text is decoded as a dictionary even if the file was not written so: repeated text stays one value in memory.
        encoded = [field.name for field in _text_fields(schema) if field.name in stored.names]
        table = open_parquet(data, read_dictionary=encoded, metadata=file.metadata).read(use_threads=False)
    except IntegrityError:
        raise
    # A damaged footer can raise any error in the decoder: ArrowException, OSError, MemoryError, ...
    except Exception as error:
        raise damaged(name, f"{type(error).__name__}: {error}") from error
    _check_versions(table, name)
    return conform(table, record, name=name)


def conform(table: pa.Table, record: type, *, name: str) -> pa.Table:
    """``table`` with exactly the columns and types of ``record``.

    Integer to floating point and text to encoded text are the only changes; a missing column gets the default of its
    field, or null. Raises ``IntegrityError`` naming the column otherwise.
    """
    schema, defaults = arrow_schema(record), _defaults(record)
    _check_columns(table.schema, schema, defaults, name)
    columns = []
    for field in schema:
        if field.name not in table.column_names:
            default = pa.scalar(defaults.get(field.name), type=_plain_type(field.type))
            columns.append(_convert(pa.chunked_array([pa.repeat(default, table.num_rows)]), field.type))
            continue
        column = table.column(field.name)
        if column.null_count and not field.nullable:
            raise _misfit(name, field, f"{column.null_count} nulls")
        try:
            columns.append(_convert(column, field.type))
        except pa.ArrowException as error:
            raise _misfit(name, field, str(error)) from error
    return pa.table(columns, schema=schema)


def _defaults(record: type) -> dict[str, Any]:
    """The values of missing columns; a missing schema version gets none, because it differs from file to file."""
    return {
        entry.name: entry.default
        for entry in fields(record)
        if entry.default is not MISSING and entry.name != "schema_version"
    }


def _convert(column: pa.ChunkedArray, declared: pa.DataType) -> pa.ChunkedArray:
    if column.type == declared:
        return column
    if pa.types.is_dictionary(declared) and not pa.types.is_null(column.type):
        plain = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        return plain.cast(declared)
    return column.cast(declared)


def _check_columns(stored: pa.Schema, schema: pa.Schema, defaults: dict[str, Any], name: str) -> None:
    """Check the schemas alone, so that nothing is decoded for a file that does not fit."""
    repeated = {column for column in stored.names if stored.names.count(column) > 1}
    for problem, columns in (
        ("has a column twice", repeated),
        ("has an unknown column", set(stored.names) - set(schema.names)),
    ):
        if columns:
            raise IntegrityError(
                f"{name} {problem}", got=", ".join(sorted(columns))[:300], expected="the columns of its schema"
            )
    for field in schema:
        if field.name in stored.names:
            if not _is_readable_as(stored.field(field.name).type, field):
                raise _misfit(name, field, str(stored.field(field.name).type))
        elif not field.nullable and field.name not in defaults:
            raise IntegrityError(f"{name} lacks the column {field.name}", expected=f"{field.name} of {field.type}")


def _is_readable_as(stored: pa.DataType, field: pa.Field) -> bool:
    declared = field.type
    if pa.types.is_null(stored):
        return bool(field.nullable)
    if pa.types.is_dictionary(declared):
        plain = stored.value_type if pa.types.is_dictionary(stored) else stored
        return bool(pa.types.is_string(plain) or pa.types.is_large_string(plain))
    return stored == declared or bool(pa.types.is_floating(declared) and pa.types.is_integer(stored))


def open_parquet(data: bytes, **options: Any) -> pq.ParquetFile:
    """The Parquet file, with page checksums verified and limits on the sizes that its footer may claim."""
    return pq.ParquetFile(
        pa.BufferReader(data),
        thrift_string_size_limit=_MAX_THRIFT_BYTES,
        thrift_container_size_limit=_MAX_THRIFT_ITEMS,
        page_checksum_verification=True,
        **options,
    )


def _text_fields(schema: pa.Schema) -> list[pa.Field]:
    return [field for field in schema if pa.types.is_dictionary(field.type)]


def _check_claims(metadata: Any, schema: pa.Schema, name: str) -> None:
    if not 0 < metadata.num_columns <= _MAX_COLUMNS:
        raise damaged(name, f"{metadata.num_columns} columns")
    # Single columns are not read here: on a damaged footer that aborts the process.
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    rows = sum(group.num_rows for group in groups)
    if rows != metadata.num_rows or any(group.num_rows < 0 for group in groups):
        raise damaged(name, f"{metadata.num_rows} rows in all, {rows} in its groups")
    encoded = sum(group.total_byte_size for group in groups)
    _check_size(name, rows=rows, columns=max(metadata.num_columns, len(schema)), encoded=encoded)


def _check_size(name: str, *, rows: int, columns: int, encoded: int) -> None:
    """Check rows times width, because the sizes in a footer are those of the encoded data, not those in memory."""
    if max(rows * columns * _BYTES_OF_A_VALUE, encoded) > _MAX_DECODED_BYTES:
        raise IntegrityError(
            f"{name} is too large",
            got=f"{rows} rows of {columns} columns, {encoded} encoded bytes",
            expected=f"at most {_MAX_DECODED_BYTES} bytes in memory",
        )


def _check_labels(metadata: dict[bytes, bytes], record: type, name: str) -> None:
    version = metadata.get(_VERSION_KEY, b"")
    if version.isdigit() and len(version) < 10:
        _check_version(int(version), name)
    label = metadata.get(_RECORD_KEY, record.__name__.encode())
    if label != record.__name__.encode():
        raise IntegrityError(f"{name} holds other rows", got=repr(label)[:100], expected=record.__name__)


def _check_versions(table: pa.Table, name: str) -> None:
    if "schema_version" in table.column_names and pa.types.is_integer(table.schema.field("schema_version").type):
        for version in pc.unique(table.column("schema_version").combine_chunks()).drop_null().to_pylist():
            _check_version(version, name)


def _check_version(version: int, name: str) -> None:
    if not 1 <= version <= ROW_VERSION:
        raise IntegrityError(
            f"{name} was written by another version",
            got=f"schema version {version}",
            expected=f"schema version 1 to {ROW_VERSION}",
            fix="update precision-time, or record it again with this version",
        )


def _misfit(name: str, field: pa.Field, got: str) -> IntegrityError:
    optional = ", or null" if field.nullable else ""
    return IntegrityError(
        f"{name}: column {field.name} does not fit",
        got=got[:300],
        expected=f"values of {_plain_type(field.type)}{optional}",
    )


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
