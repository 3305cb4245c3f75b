"""Tables: read with clear errors, written whole and equal for equal content, appended without duplicates."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from precision_time.storage.commands import data_app
from precision_time.storage.errors import InputError, IntegrityError, NotFoundError, PrecisionTimeError
from precision_time.storage.tables import (
    NUMBER_COLUMNS,
    TEXT_COLUMNS,
    check_columns,
    import_rows,
    read_table,
    write_table,
)

HEADER = "row_id,model,gpu,num_gpus,precision,batch_size_per_gpu,seconds_per_micro_step"


def write_csv(path: Path, *rows: str, header: str = HEADER) -> Path:
    path.write_text("\n".join((header, *rows)) + "\n", encoding="utf-8")
    return path


def row(number: int = 1, **values: object) -> str:
    cells = {"row_id": f"m-{number}", "model": "resnet50", "gpu": "A100-SXM4-80GB", "num_gpus": 8,
             "precision": "bf16", "batch_size_per_gpu": 32, "seconds_per_micro_step": 0.25} | values  # fmt: skip
    return ",".join(map(str, cells.values()))


def test_numbers_become_numbers_and_known_text_stays_text(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "a.csv", "7,32,1.10,3", "8,16,1.9,", header="row_id,precision,framework,extra")
    frame = read_table(path)
    assert frame["row_id"].tolist() == ["7", "8"]
    assert frame["framework"].tolist() == ["1.10", "1.9"]
    assert frame["extra"][0] == 3.0
    assert np.isnan(frame["extra"][1])


def test_a_column_with_one_word_among_numbers_stays_text(tmp_path: Path) -> None:
    frame = read_table(write_csv(tmp_path / "a.csv", "1", "n/a", header="x,".rstrip(",")))
    assert frame["x"].tolist() == ["1", "n/a"]


def test_a_table_survives_parquet(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"name": ["a", "", "ü,\n"], "count": [1.0, np.nan, 3.5], "seen": [True, False, True], "whole": [1, 2, 3]}
    )
    write_table(tmp_path / "new" / "t.parquet", frame)
    back = read_table(tmp_path / "new" / "t.parquet")
    pd.testing.assert_frame_equal(back, frame.astype({"whole": float}), check_dtype=False)


def test_equal_tables_give_equal_bytes(tmp_path: Path) -> None:
    frame = pd.DataFrame({"name": ["b", "a", "b"], "x": [1.0, 2.0, 3.0]})
    write_table(tmp_path / "1.parquet", frame)
    write_table(tmp_path / "2.parquet", frame.copy())
    assert (tmp_path / "1.parquet").read_bytes() == (tmp_path / "2.parquet").read_bytes()


def test_a_damaged_table_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_table(path, pd.DataFrame({"name": ["a"], "x": [1.0]}))
    data = bytearray(path.read_bytes())
    data[8] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="does not match its seal"):
        read_table(path)


def test_a_parquet_file_of_another_writer_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"model": ["a", None], "num_gpus": [1, 2]}), tmp_path / "t.parquet")
    frame = read_table(tmp_path / "t.parquet")
    assert frame["model"].tolist() == ["a", ""]
    assert frame["num_gpus"].tolist() == [1.0, 2.0]


def test_a_parquet_column_of_lists_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"model": [["a"]]}), tmp_path / "t.parquet")
    with pytest.raises(InputError, match="column model cannot be read"):
        read_table(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"a,b\n1,2,3\n", "ragged.*3 cells in line 2"),
        (b"a,a\n1,2\n", "no usable header"),
        (b'a,b\n"1,2\n', "cannot be read"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_table(tmp_path / "a.csv")


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_table(tmp_path / "none.csv")


def test_names_that_are_no_identifiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="column name cannot be stored"):
        write_table(tmp_path / "t.parquet", pd.DataFrame({"my column": [1.0]}))
    assert not (tmp_path / "t.parquet").exists()


def test_missing_columns_are_named() -> None:
    with pytest.raises(InputError, match=r"gpu, num_gpus.*seconds_per_micro_step/"):
        check_columns(pd.DataFrame({"model": [], "precision": [], "batch_size_per_gpu": []}), where="x")


def test_rows_are_imported_once(tmp_path: Path) -> None:
    into = tmp_path / "all.parquet"
    assert import_rows(write_csv(tmp_path / "a.csv", row(1), row(2)), into=into) == (2, 2, 0, 2)
    before = into.read_bytes()
    assert import_rows(tmp_path / "a.csv", into=into) == (2, 0, 2, 2)
    assert into.read_bytes() == before
    assert import_rows(write_csv(tmp_path / "b.csv", row(2), row(3)), into=into) == (2, 1, 1, 3)
    frame = read_table(into)
    assert frame["row_id"].tolist() == ["m-1", "m-2", "m-3"]
    assert list(frame.columns) == [*TEXT_COLUMNS, *NUMBER_COLUMNS]


def test_an_extra_column_is_kept(tmp_path: Path) -> None:
    into = tmp_path / "all.parquet"
    import_rows(write_csv(tmp_path / "a.csv", row(1)), into=into)
    import_rows(write_csv(tmp_path / "b.csv", row(2) + ",rack-7", header=HEADER + ",place"), into=into)
    assert read_table(into)["place"].tolist() == ["", "rack-7"]


def check_refused(tmp_path: Path, source: Path, message: str) -> None:
    into = tmp_path / "all.parquet"
    import_rows(write_csv(tmp_path / "first.csv", row(1)), into=into)
    before = into.read_bytes()
    with pytest.raises(InputError, match=message):
        import_rows(source, into=into)
    assert into.read_bytes() == before


def test_other_content_under_a_taken_id_is_refused_whole(tmp_path: Path) -> None:
    source = write_csv(tmp_path / "b.csv", row(1, num_gpus=4), row(2))
    check_refused(tmp_path, source, "id that is taken.*m-1")


@pytest.mark.parametrize("value", ["-1", "0", "inf", "many"])
def test_cells_that_are_no_positive_numbers_are_named_by_row(tmp_path: Path, value: str) -> None:
    source = write_csv(tmp_path / "b.csv", row(2), row(3, num_gpus=value))
    check_refused(tmp_path, source, f"m-3: num_gpus = {value}")


def test_an_id_that_a_file_repeats_or_leaves_out_is_refused(tmp_path: Path) -> None:
    check_refused(tmp_path, write_csv(tmp_path / "b.csv", row(2), row(2)), "row_id twice.*m-2")
    check_refused(tmp_path, write_csv(tmp_path / "b.csv", row(2, row_id="")), "without an id")


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    check_refused(tmp_path, write_csv(tmp_path / "b.csv", "1", header="row_id"), "lacks columns.*model")


def call(*arguments: str) -> Any:
    result = CliRunner().invoke(data_app, ["import", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit | PrecisionTimeError):
        raise result.exception
    return result


def test_the_command_prints_counts(tmp_path: Path) -> None:
    source, into = str(write_csv(tmp_path / "a.csv", row(1), row(2))), str(tmp_path / "all.parquet")
    assert json.loads(call(source, "--into", into, "--json").stdout) == {
        "file": source, "into": into, "read": 2, "added": 2, "skipped": 0, "total": 2,
    }  # fmt: skip
    assert "2 rows read, 0 added, 2 skipped" in call(source, "--into", into).stdout
    assert isinstance(call(str(tmp_path / "none.csv"), "--into", into).exception, NotFoundError)


def test_a_csv_file_is_not_turned_into_parquet_by_an_import(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "mine.csv", row(1))
    before = path.read_bytes()
    with pytest.raises(InputError, match="Parquet"):
        import_rows(write_csv(tmp_path / "new.csv", row(2)), into=path)
    assert path.read_bytes() == before
