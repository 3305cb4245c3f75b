import io
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from precision_time.storage.columns import ColumnFile, encode_columns
from precision_time.storage.errors import InputError, IntegrityError

COLUMNS = {
    "name": ["resnet50", "", "größe", "x" * 300],
    "params": [25_557_032, 0, -1, 2**62],
    "bytes": [1.5, 0.0, -2.25, 3e38],
}


@pytest.fixture(scope="module")
def data():
    return encode_columns(COLUMNS)


def test_columns_come_back_as_they_were(data):
    file = ColumnFile(data, name="a test")
    assert file.names == ("name", "params", "bytes")
    assert file.rows == 4
    assert file.text("name") == COLUMNS["name"]
    assert file.numbers("params").tolist() == COLUMNS["params"]
    assert file.numbers("bytes").dtype == np.float32
    assert file.numbers("bytes").tolist() == pytest.approx(COLUMNS["bytes"], rel=1e-6)
    with pytest.raises(LookupError):
        file.numbers("unheard_of")


def test_arrow_reads_the_same_file(data):
    table = pq.read_table(io.BytesIO(data), page_checksum_verification=True)
    assert table.column_names == list(COLUMNS)
    assert table.column("name").to_pylist() == COLUMNS["name"]
    assert table.column("params").to_pylist() == COLUMNS["params"]


def test_equal_columns_give_equal_bytes(data):
    assert encode_columns(COLUMNS) == data


def test_many_rows_and_columns_fit_one_page_each():
    columns = {f"c{index}": [float(index * row) for row in range(5_000)] for index in range(40)}
    file = ColumnFile(encode_columns(columns), name="a test")
    assert file.numbers("c39")[-1] == 39 * 4999


@pytest.mark.parametrize("columns", [{}, {"a": []}, {"a": [1], "b": [1, 2]}, {"a": [1, "two"]}, {"a": [None]}])
def test_a_file_that_is_no_table_is_refused(columns):
    with pytest.raises(InputError):
        encode_columns(columns)


def test_every_flipped_byte_is_noticed(data):
    for place in range(0, len(data), 7):
        broken = bytearray(data)
        broken[place] ^= 0x41
        with pytest.raises(IntegrityError, match="a test is damaged"):
            ColumnFile(bytes(broken), name="a test")


def test_a_file_cut_short_or_of_another_writer_is_refused(data):
    sink = io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(data)), sink)
    for other in (b"", data[:100], data[:-1], sink.getvalue()):
        with pytest.raises(IntegrityError, match="a test is damaged"):
            ColumnFile(other, name="a test")


def test_a_column_of_another_kind_is_refused(data):
    file = ColumnFile(data, name="a test")
    with pytest.raises(IntegrityError):
        file.text("params")
    with pytest.raises(IntegrityError):
        file.numbers("name")


def test_reading_loads_no_pandas(data, tmp_path):
    path = tmp_path / "columns.parquet"
    path.write_bytes(data)
    code = (
        "import sys, pathlib; from precision_time.storage.columns import ColumnFile;"
        f"print(ColumnFile(pathlib.Path({str(path)!r}).read_bytes(), name='x').numbers('params')[0]);"
        "assert 'pandas' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "25557032"
