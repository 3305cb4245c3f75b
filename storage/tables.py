"""Tables of measurements: read CSV or Parquet into a data frame, check it, append it, and write Parquet."""

import csv
import io
import keyword
from collections.abc import Collection, Iterable
from dataclasses import make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from precision_time.storage.errors import InputError
from precision_time.storage.filesystem import open_store
from precision_time.storage.seal import check_seal, damaged
from precision_time.storage.store import Store

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "NUMBER_COLUMNS",
    "TEXT_COLUMNS",
    "TIME_COLUMNS",
    "ImportCounts",
    "check_columns",
    "import_rows",
    "read_table",
    "write_table",
]

#: Columns of the public table that hold text; a blank cell is the empty text.
TEXT_COLUMNS = (
    "row_id", "source_repo", "source_commit", "source_path", "framework", "model", "task_input", "gpu", "system",
    "interconnect", "precision", "parallelism", "flag", "notes",
)  # fmt: skip

#: Columns of the public table that hold positive numbers; a blank cell is NaN.
NUMBER_COLUMNS = (
    "model_params", "fwd_flops_per_sample", "gpus_per_node", "num_gpus", "num_nodes", "batch_size_per_gpu",
    "grad_accumulation_steps", "global_batch_size", "samples_per_second", "seconds_per_iteration",
    "seconds_per_micro_step",
)  # fmt: skip

#: A row states its time in at least one of these, the most exact first.
TIME_COLUMNS = ("seconds_per_micro_step", "seconds_per_iteration", "samples_per_second")

_NEEDED = ("model", "gpu", "num_gpus", "precision", "batch_size_per_gpu")

_MAX_FILE_BYTES = 128 * 2**20
_PARQUET = b"PAR1"
_SHOWN = 5


def read_table(path: str | Path, *, text: Collection[str] = TEXT_COLUMNS) -> "pd.DataFrame":
    """The table in a CSV or Parquet file at a path or URL.

    A column that is not in ``text`` is read as numbers if every cell is a number or blank. A blank cell is NaN among
    numbers and the empty text elsewhere. Raises ``NotFoundError``; ``InputError`` for a file that is empty, no table,
    or ragged, naming the line; ``IntegrityError`` for a damaged Parquet file.
    """
    store, name = _locate(path)
    data = store.read_bytes(name, max_bytes=_MAX_FILE_BYTES)
    if not data:
        raise InputError("this table is empty", got=str(path), expected="a CSV or Parquet file with a header")
    if data.startswith(_PARQUET) or name.casefold().endswith((".parquet", ".pq")):
        return _read_parquet(data, str(path))
    return _read_csv(data, str(path), text=text)


def write_table(path: str | Path, frame: "pd.DataFrame") -> None:
    """Write ``frame`` as Parquet (zstd, page checksums, sealed), whole or not at all; equal frames give equal bytes.

    Columns hold text (blank for a missing value), numbers or truth values, and their names are identifiers. Raises
    ``InputError`` for other columns, else as ``Store.write_bytes``.
    """
    import pyarrow as pa

    from precision_time.storage.parquet import encode_table

    columns = {str(column): _plain(frame[column]) for column in frame.columns}
    if len(columns) != len(frame.columns):
        raise InputError("this table has a column twice", got=", ".join(map(str, frame.columns)))
    table = pa.table({column: pa.array(values, from_pandas=True) for column, (values, _) in columns.items()})
    store, name = _locate(path)
    store.write_bytes(name, encode_table(table, _record({column: kind for column, (_, kind) in columns.items()})))


def check_columns(frame: "pd.DataFrame", *, where: str, needed: Iterable[str] = _NEEDED) -> None:
    """Raise ``InputError`` naming the columns of the public table that ``frame`` must have and lacks."""
    missing = [column for column in needed if column not in frame.columns]
    if not set(TIME_COLUMNS) & set(frame.columns):
        missing.append(f"one of {'/'.join(TIME_COLUMNS)}")
    if missing:
        raise InputError(
            f"{where} lacks columns",
            got=", ".join(map(str, frame.columns))[:300],
            expected=", ".join(missing),
            fix="name the columns as the public table does (predictor/data/measurements.parquet)",
        )


class ImportCounts(NamedTuple):
    """The rows of an import: read, added, skipped because they are in the table already, and total of the table now."""

    read: int
    added: int
    skipped: int
    total: int


def import_rows(source: str | Path, *, into: str | Path) -> ImportCounts:
    """Append the rows of a CSV or Parquet file to the Parquet table at ``into`` (made if missing), all or none.

    A row that is in the table already is skipped. Raises ``InputError`` naming missing columns, rows whose id is
    empty, repeated, or taken by a row of other content, and cells that are not positive numbers; the table at
    ``into`` then stays as it was.
    """
    import pandas as pd

    if not str(into).lower().endswith((".parquet", ".pq")):
        raise InputError(
            "the table to import into is a Parquet file", got=str(into), expected="a name that ends in .parquet"
        )
    new = read_table(source)
    check_columns(new, where=str(source), needed=("row_id", *_NEEDED))
    _check_ids(new["row_id"], str(source))
    new = _with_public_columns(new, str(source))
    store, name = _locate(into)
    old = _with_public_columns(read_table(into), str(into)) if store.exists(name) else new.iloc[:0]
    for column in old.columns if len(old) else ():
        if column in new and _is_text(old[column]) != _is_text(new[column]):
            raise InputError(
                f"column {column} holds text in one table and numbers in the other", got=f"{source} and {into}"
            )
    merged = pd.concat([old, new], ignore_index=True) if len(old) else new.reset_index(drop=True)
    for column in merged.columns:
        if _is_text(merged[column]):
            merged[column] = merged[column].fillna("").astype(str)
    repeated = merged.duplicated("row_id", keep="first")
    # A repeated id whose whole row is not a repeat has other content.
    changed = repeated & ~merged.duplicated(keep="first")
    if changed.any():
        ids = merged.loc[changed, "row_id"]
        raise InputError(
            f"{len(ids)} rows have an id that is taken",
            got=_some(ids),
            expected=f"new ids, or rows equal to those in {into}",
            fix="give changed rows new ids",
        )
    added = int((~repeated).sum()) - len(old)
    if added:
        write_table(into, merged[~repeated])
    return ImportCounts(read=len(new), added=added, skipped=len(new) - added, total=len(old) + added)


def _locate(path: str | Path) -> tuple[Store, str]:
    """The store of the folder that holds ``path``, and the file's name in it."""
    text = str(path)
    if "://" in text or text.startswith("file:"):
        folder, _, name = text.rpartition("/")
        return open_store(folder), name
    # A link may lead anywhere: the user named this file, so its target is read, and nothing else.
    full = Path(text).expanduser().resolve()
    if not full.name:
        raise InputError("this is no file", got=repr(text), expected="the path of a CSV or Parquet file")
    return open_store(full.parent), full.name


def _read_csv(data: bytes, where: str, *, text: Collection[str]) -> "pd.DataFrame":
    import pandas as pd

    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        header = [name.strip() for name in next(reader, [])]
        rows = []
        for row in reader:
            if row and len(row) != len(header):
                raise InputError(
                    f"{where} is ragged",
                    got=f"{len(row)} cells in line {reader.line_num}",
                    expected=f"{len(header)} cells",
                )
            if row:
                rows.append(row)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{where} cannot be read", got=str(error), expected="a CSV file in UTF-8") from error
    if not any(header) or len(set(header)) != len(header):
        raise InputError(
            f"{where} has no usable header", got=", ".join(header)[:300], expected="names of columns, each once"
        )
    frame = pd.DataFrame(rows, columns=header, dtype=str)
    for column in header:
        if column not in text:
            frame[column] = _as_numbers(frame[column])
    return frame


def _as_numbers(cells: "pd.Series[Any]") -> "pd.Series[Any]":
    """The column as floating point if every cell that is not blank is a number, else as it is."""
    import pandas as pd

    stripped = cells.str.strip()
    filled = stripped.ne("")
    numbers = pd.to_numeric(stripped.where(filled), errors="coerce").astype(float)
    return numbers if bool(filled.any()) and bool(numbers.notna().eq(filled).all()) else cells


def _read_parquet(data: bytes, where: str) -> "pd.DataFrame":
    from precision_time.storage import parquet

    check_seal(data, where)
    try:
        schema = parquet.open_parquet(data).schema_arrow
    # As in parquet.read_table: a damaged footer can raise any error in the decoder.
    except Exception as error:
        raise damaged(where, f"{type(error).__name__}: {error}") from error
    kinds = {field.name: _kind_of(field, where) for field in schema}
    frame: pd.DataFrame = parquet.read_table(data, _record(kinds), name=where).to_pandas()
    for column, kind in kinds.items():
        if kind == str | None:
            frame[column] = frame[column].astype(object).fillna("").astype(str)
    return frame


def _kind_of(field: Any, where: str) -> Any:
    import pyarrow.types as kinds

    plain = field.type.value_type if kinds.is_dictionary(field.type) else field.type
    if kinds.is_string(plain) or kinds.is_large_string(plain) or kinds.is_null(plain):
        return str | None
    if kinds.is_float64(plain) or kinds.is_integer(plain):
        return float | None
    if kinds.is_boolean(plain) and not field.nullable:
        return bool
    if kinds.is_boolean(plain):
        return bool | None
    raise InputError(
        f"{where}: column {field.name} cannot be read", got=str(field.type), expected="text, numbers or truth values"
    )


def _record(kinds: dict[str, Any]) -> type:
    """A record class with these columns, as ``parquet`` needs it to encode and check a table."""
    for column in kinds:
        if not column.isidentifier() or keyword.iskeyword(column):
            raise InputError("this column name cannot be stored", got=repr(column), expected="an identifier")
    return make_dataclass("Table", list(kinds.items()))


def _plain(column: "pd.Series[Any]") -> tuple[list[Any], Any]:
    """The values of a column as Arrow takes them, and their kind for the record."""
    import pandas as pd

    if pd.api.types.is_bool_dtype(column) and not column.isna().any():
        return column.astype(bool).tolist(), bool
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_complex_dtype(column):
        return column.astype(float).tolist(), float | None
    if not _is_text(column):
        raise InputError(
            f"column {column.name} cannot be stored", got=str(column.dtype), expected="text, numbers or truth values"
        )
    return column.astype(object).where(column.notna(), "").map(str).tolist(), str | None


def _is_text(column: "pd.Series[Any]") -> bool:
    import pandas as pd

    return bool(
        pd.api.types.is_string_dtype(column)
        or pd.api.types.is_object_dtype(column)
        or isinstance(column.dtype, pd.CategoricalDtype)
    )


def _check_ids(ids: "pd.Series[Any]", where: str) -> None:
    if ids.str.strip().eq("").any():
        raise InputError(f"{where} has rows without an id", expected="a row_id in every row")
    repeated = ids[ids.duplicated()]
    if len(repeated):
        raise InputError(f"{where} has a row_id twice", got=_some(repeated), expected="each id once")


def _with_public_columns(frame: "pd.DataFrame", where: str) -> "pd.DataFrame":
    """``frame`` with all columns of the public table first, in their order and types; raises for bad numbers."""
    import numpy as np
    import pandas as pd

    columns: dict[str, Any] = {}
    for column in TEXT_COLUMNS:
        columns[column] = frame[column].astype(str) if column in frame else ""
    for column in NUMBER_COLUMNS:
        if column not in frame:
            columns[column] = np.nan
            continue
        cells = frame[column]
        filled = cells.astype(str).str.strip().ne("") & cells.notna()
        numbers = pd.to_numeric(cells.where(filled), errors="coerce").astype(float)
        bad = filled & ~(np.isfinite(numbers) & numbers.gt(0))
        if bad.any():
            named = frame["row_id"][bad] + f": {column} = " + cells[bad].astype(str)
            raise InputError(
                f"{where} has {int(bad.sum())} cells that are no positive numbers",
                got=_some(named),
                expected="positive finite numbers, or nothing",
            )
        columns[column] = numbers
    extra = {column: frame[column] for column in frame.columns if column not in columns}
    return pd.DataFrame(columns | extra, index=frame.index)


def _some(values: Iterable[object]) -> str:
    shown = list(map(str, values))
    return ", ".join(shown[:_SHOWN]) + (f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")
