"""Parquet files are read with a declared schema; a damaged or foreign file raises and never gives wrong values."""

import io
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precision_time.storage.errors import InputError, IntegrityError
from precision_time.storage.parquet import conform, encode_table, read_table, table_of
from precision_time.storage.schema import ROW_VERSION, CellOutcome, IterationTiming, Measurement, arrow_schema

Rows = Callable[..., list[IterationTiming]]


@dataclass(frozen=True, kw_only=True)
class Small:
    """A record with each kind of column."""

    name: str
    note: str | None = None
    count: int
    time_s: float
    share: float | None = None
    is_good: bool = True
    schema_version: int = 1


SMALL = [Small(name="a", count=1, time_s=0.5), Small(name="b", note="n", count=2, time_s=1.5, share=0.1)]


def plain_file(columns: dict[str, object], **options: object) -> bytes:
    """A file by another writer: no seal, no label."""
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, **options)
    return sink.getvalue()


def small_columns(**changes: object) -> dict[str, object]:
    columns: dict[str, object] = {
        "name": ["a", "b"],
        "note": [None, "n"],
        "count": [1, 2],
        "time_s": [0.5, 1.5],
        "share": [None, 0.1],
        "is_good": [True, True],
        "schema_version": [1, 1],
    }
    return {name: values for name, values in (columns | changes).items() if values is not None}


@pytest.fixture
def sealed(cell_rows: Rows) -> tuple[bytes, pa.Table]:
    table = table_of(cell_rows(), IterationTiming)
    return encode_table(table, IterationTiming), table


def test_rows_come_back_as_they_were(cell_rows: Rows) -> None:
    rows = cell_rows()
    table = read_table(encode_table(table_of(rows, IterationTiming), IterationTiming), IterationTiming)
    assert table.schema.equals(arrow_schema(IterationTiming), check_metadata=True)
    assert [IterationTiming(**row) for row in table.to_pylist()] == rows


def test_a_file_without_rows_keeps_the_schema() -> None:
    table = read_table(encode_table(table_of([], Measurement), Measurement), Measurement)
    assert table.num_rows == 0
    assert table.schema.equals(arrow_schema(Measurement))


def test_other_readers_of_parquet_read_a_sealed_file(sealed: tuple[bytes, pa.Table]) -> None:
    data, table = sealed
    assert pq.read_table(io.BytesIO(data), page_checksum_verification=True).equals(table)


def test_files_carry_page_checksums(sealed: tuple[bytes, pa.Table]) -> None:
    data, _ = sealed
    # The first data page: without our seal only the page checksum shows the damage.
    broken = bytearray(data)
    chunk = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0).column(15)
    assert chunk.path_in_schema == "iteration_time_s"
    assert chunk.compression == "ZSTD"
    broken[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1
    with pytest.raises(OSError, match="checksum"):
        pq.read_table(io.BytesIO(bytes(broken)), page_checksum_verification=True)


def test_no_single_bit_flip_changes_a_value_or_ends_the_process(sealed: tuple[bytes, pa.Table]) -> None:
    data, table = sealed
    bits = random.Random(7)
    refused = 0
    for _ in range(400):
        place = bits.randrange(len(data) * 8)
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << (place % 8)
        try:
            assert read_table(bytes(flipped), IterationTiming).equals(table), place
        except IntegrityError:
            refused += 1
    assert refused > 300


def test_a_damaged_footer_that_aborts_the_native_parser_is_refused_before_it() -> None:
    """In a child process, because a crash would end the test run."""
    code = (
        "import sys; from precision_time.storage.errors import IntegrityError\n"
        "from precision_time.storage.parquet import read_table, encode_table, table_of\n"
        "from precision_time.storage.schema import Measurement\n"
        "row = Measurement(source='s', model='m', task_input='t', gpu='g', nodes=1, world_size=1, precision='fp32',"
        " strategy='ddp', per_gpu_batch_size=1, gradient_accumulation_steps=1, framework='f', iteration_time_s=1.0)\n"
        "data = encode_table(table_of([row] * 50, Measurement), Measurement)\n"
        "start = len(data) - 8 - int.from_bytes(data[-8:-4], 'little')\n"
        "bits = range(start * 8, len(data) * 8, 7)\n"
        "refused = 0\n"
        "for bit in bits:\n"
        "    flipped = bytearray(data); flipped[bit // 8] ^= 1 << (bit % 8)\n"
        "    try: read_table(bytes(flipped), Measurement)\n"
        "    except IntegrityError: refused += 1\n"
        "print(refused == len(bits))\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert shown.stdout.strip() == "True"


def test_every_truncation_is_refused(sealed: tuple[bytes, pa.Table]) -> None:
    data, _ = sealed
    for length in range(0, len(data), 97):
        with pytest.raises(IntegrityError, match=r"cut\.parquet"):
            read_table(data[:length], IterationTiming, name="cut.parquet")
    with pytest.raises(IntegrityError):
        read_table(data + b"x", IterationTiming)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PAR1",
        b"PAR1PAR1",
        b"not parquet at all, but long enough",
        b'{"json": true, "padding": "............"}',
        b"PAR1" + bytes(20) + (2**31 - 1).to_bytes(4, "little") + b"PAR1",
        b"PAR1" + bytes(20) + (0).to_bytes(4, "little") + b"PAR1",
        b"PAR1" + bytes(20) + (20).to_bytes(4, "little") + b"PAR1",
        b"PAR1" + b"\xff" * 20 + (20).to_bytes(4, "little") + b"PAR1",
        b"PARE" + bytes(20) + (4).to_bytes(4, "little") + b"PARE",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_a_file_that_is_no_parquet_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(IntegrityError, match=r"bad\.parquet is damaged"):
        read_table(data, IterationTiming, name="bad.parquet")


def test_an_integer_column_is_read_as_floating_point() -> None:
    table = read_table(plain_file(small_columns(time_s=[1, 2])), Small)
    assert table.column("time_s").to_pylist() == [1.0, 2.0]
    assert table.schema.equals(arrow_schema(Small))
    mixed = pa.concat_tables([table, read_table(plain_file(small_columns()), Small)])
    assert mixed.column("time_s").to_pylist() == [1.0, 2.0, 0.5, 1.5]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("time_s", ["1.5", "2.5"]),
        ("time_s", [True, False]),
        ("time_s", pa.array([1.5, 2.5], pa.float32())),
        ("time_s", pa.array([2**53 + 1, 1])),
        ("time_s", [None, 1.0]),
        ("time_s", pa.array([None, None])),
        ("time_s", [[1.0], [2.0]]),
        ("count", [1.0, 2.0]),
        ("count", ["1", "2"]),
        ("count", pa.array([1, 2], pa.int32())),
        ("name", [1, 2]),
        ("name", [None, "a"]),
        ("note", [1.5, 2.5]),
        ("is_good", [0, 1]),
        ("share", ["x", "y"]),
    ],
)
def test_another_type_is_refused_with_file_and_column(column: str, values: object) -> None:
    with pytest.raises(IntegrityError, match=rf"odd\.parquet: column {column}"):
        read_table(plain_file(small_columns(**{column: values})), Small, name="odd.parquet")


def test_a_missing_optional_column_is_null() -> None:
    columns = small_columns()
    del columns["share"], columns["note"]
    table = read_table(plain_file(columns), Small)
    assert table.column("share").to_pylist() == [None, None]
    assert table.column("note").to_pylist() == [None, None]
    assert table.schema.equals(arrow_schema(Small))
    assert read_table(plain_file(small_columns(share=pa.nulls(2))), Small).column("share").null_count == 2


def test_a_missing_column_with_a_default_is_filled_with_it() -> None:
    columns = small_columns()
    del columns["is_good"]
    table = read_table(plain_file(columns), Small)
    assert table.column("is_good").to_pylist() == [True, True]
    assert table.schema.equals(arrow_schema(Small))


@pytest.mark.parametrize("column", ["name", "count", "time_s", "schema_version"])
def test_a_missing_required_column_is_refused_with_file_and_column(column: str) -> None:
    columns = small_columns()
    del columns[column]
    with pytest.raises(IntegrityError, match=rf"old\.parquet lacks the column {column}"):
        read_table(plain_file(columns), Small, name="old.parquet")


def test_an_unknown_or_repeated_column_is_refused() -> None:
    with pytest.raises(IntegrityError, match="unknown column; got: extra"):
        read_table(plain_file(small_columns(extra=[1, 2])), Small)
    sink = io.BytesIO()
    table = pa.table(small_columns())
    pq.write_table(table.append_column("count", table.column("count")), sink)
    with pytest.raises(IntegrityError, match="twice"):
        read_table(sink.getvalue(), Small)


def test_text_may_be_stored_plain_or_encoded() -> None:
    encoded = pa.array(["a", "b"]).dictionary_encode()
    for text in (encoded, pa.array(["a", "b"], pa.large_string()), encoded.cast(pa.dictionary(pa.int8(), pa.string()))):
        table = read_table(plain_file(small_columns(name=text), use_dictionary=False), Small)
        assert table.column("name").to_pylist() == ["a", "b"]
        assert table.schema.equals(arrow_schema(Small))


def test_a_newer_schema_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    later = ROW_VERSION + 1
    with pytest.raises(IntegrityError, match=f"schema version {later}; expected: schema version 1 to {ROW_VERSION}"):
        read_table(
            encode_table(table_of([replace(SMALL[0], schema_version=later)], Small), Small), Small, name="new.parquet"
        )
    # The version is checked before the columns, which may differ.
    table = pa.table({"other": [1]}).replace_schema_metadata({"precision_time.schema_version": "7"})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    with pytest.raises(IntegrityError, match=r"new\.parquet .*schema version 7; expected: schema version 1"):
        read_table(sink.getvalue(), Small, name="new.parquet")
    with pytest.raises(IntegrityError, match="schema version 0"):
        read_table(plain_file(small_columns(schema_version=[0, 1])), Small)


def test_rows_of_another_record_are_refused() -> None:
    data = encode_table(table_of(SMALL, Small), Small)
    with pytest.raises(IntegrityError, match="holds other rows"):
        read_table(data, CellOutcome)


def test_a_small_file_that_claims_millions_of_rows_is_refused_before_it_is_read() -> None:
    rows = 4_000_000
    column = pa.repeat(1.0, rows)
    text = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), rows), pa.array(["a"]))
    data = plain_file(
        {
            "name": text,
            "count": pa.repeat(1, rows),
            "time_s": column,
            "share": column,
            "is_good": pa.repeat(True, rows),
            "schema_version": pa.repeat(1, rows),
        },
        compression="zstd",
    )
    assert len(data) < 200_000
    before = pa.total_allocated_bytes()
    with pytest.raises(IntegrityError, match=r"bomb\.parquet is too large.*4000000 rows"):
        read_table(data, Small, name="bomb.parquet")
    assert pa.total_allocated_bytes() - before < 10_000_000
    with pytest.raises(IntegrityError, match="too large"):
        encode_table(pa.table(pq.read_table(io.BytesIO(data))), Small)


def test_one_long_text_on_many_rows_stays_one_text() -> None:
    text = "x" * 1_000_000
    before = pa.total_allocated_bytes()
    table = read_table(plain_file(small_columns_of(2_000, text), use_dictionary=True), Small)
    assert table.num_rows == 2_000
    assert pa.total_allocated_bytes() - before < 100_000_000


def small_columns_of(rows: int, text: str) -> dict[str, object]:
    encoded = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), rows), pa.array([text]))
    return {
        "name": encoded,
        "count": [1] * rows,
        "time_s": [1.0] * rows,
        "is_good": [True] * rows,
        "schema_version": [1] * rows,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"count": 1.5},
        {"count": None},
        {"count": "1"},
        {"count": True},
        {"count": 2**63},
        {"time_s": "0.5"},
        {"time_s": None},
        {"time_s": True},
        {"name": 3},
        {"name": None},
        {"name": "\ud800"},
        {"is_good": 1},
    ],
)
def test_a_row_whose_value_does_not_fit_is_refused_by_column(change: dict[str, object]) -> None:
    with pytest.raises(IntegrityError, match=f"column {next(iter(change))}"):
        table_of([replace(SMALL[0], **change)], Small)


def test_rows_of_another_class_are_refused() -> None:
    with pytest.raises(InputError, match="dict"):
        table_of([{"name": "a"}], Small)


def test_conform_changes_nothing_that_fits() -> None:
    table = table_of(SMALL, Small)
    assert conform(table, Small, name="x").equals(table)
