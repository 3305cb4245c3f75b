"""The timings dataset: a cell is one file, recorded once, read back exactly, and damage is named."""

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pytest

from precision_time.storage.errors import (
    InputError,
    IntegrityError,
    NotFoundError,
    StorageFullError,
    StorageReadOnlyError,
)
from precision_time.storage.filesystem import open_store
from precision_time.storage.parquet import encode_table, table_of
from precision_time.storage.schema import CellOutcome, IterationTiming
from precision_time.storage.timings import TimingsDataset, escape_name, read_table, write_fragment

Rows = Callable[..., list[IterationTiming]]


@pytest.fixture
def dataset(store_url: str) -> TimingsDataset:
    return TimingsDataset(store_url)


@pytest.fixture
def local(tmp_path: Path) -> TimingsDataset:
    return TimingsDataset(tmp_path / "data")


# --- recording and reading, over every kind of store


def test_a_recorded_cell_is_read_back_exactly(dataset: TimingsDataset, cell_rows: Rows) -> None:
    rows = cell_rows()
    assert dataset.record(rows) == len(rows)
    assert [IterationTiming(**row) for row in dataset.read().to_pylist()] == rows
    assert dataset.problems == []
    assert dataset.recorded_cells() == {"00000000000000aa"}
    assert open_store(dataset.url).list_files() == [
        "timings/v1/model=mlp/precision=amp_bf16/cell-00000000000000aa.parquet"
    ]


def test_the_second_record_of_a_cell_changes_nothing(dataset: TimingsDataset, cell_rows: Rows) -> None:
    dataset.record(cell_rows())
    before = dataset.snapshot_sha256()
    assert dataset.record(cell_rows(host="elsewhere")) == 0
    assert dataset.read().column("host").unique().to_pylist() == ["here"]
    assert dataset.snapshot_sha256() == before


def test_of_eight_recorders_of_one_cell_one_wins(dataset: TimingsDataset, cell_rows: Rows) -> None:
    barrier = threading.Barrier(8)

    def record(number: int) -> int:
        barrier.wait()
        return dataset.record(cell_rows(host=f"host{number}"))

    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(record, range(8)))
    assert sorted(written) == [0] * 7 + [14]
    assert dataset.read().column("host").unique().to_pylist() == [f"host{written.index(14)}"]


def test_cells_of_eight_writers_are_all_there(dataset: TimingsDataset, cell_rows: Rows) -> None:
    def write(writer: int) -> None:
        for item in range(5):
            dataset.record(cell_rows(f"{writer * 5 + item:016x}"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    table = dataset.read()
    assert table.num_rows == 40 * 14
    assert len(table.column("cell_id").unique()) == 40
    assert dataset.problems == []


def test_a_table_is_recorded_like_rows(dataset: TimingsDataset, cell_rows: Rows) -> None:
    rows = cell_rows()
    assert dataset.record(table_of(rows, IterationTiming)) == len(rows)
    with pytest.raises(IntegrityError, match="lacks the column"):
        dataset.record(pa.table({"cell_id": ["00000000000000bb"]}))


def test_an_empty_place_is_an_empty_dataset(dataset: TimingsDataset) -> None:
    assert dataset.read().num_rows == 0
    assert dataset.measurements() == []
    assert dataset.outcomes() == []
    assert dataset.recorded_cells() == set()
    assert dataset.read_cards("hardware") == []
    assert dataset.check() == []
    assert len(dataset.snapshot_sha256()) == 64


def test_outcomes_are_kept_by_attempt(dataset: TimingsDataset, outcome: CellOutcome) -> None:
    assert dataset.next_attempt(outcome.cell_id) == 1
    assert dataset.record_outcome(outcome)
    assert dataset.next_attempt(outcome.cell_id) == 2
    second = replace(outcome, attempt=2, status="recorded", cause="", rows=14)
    assert dataset.record_outcome(second)
    assert not dataset.record_outcome(replace(second, cause="other"))
    assert dataset.outcomes() == [outcome, second]
    assert dataset.next_attempt("00000000000000bb") == 1


def test_the_tenth_attempt_comes_after_the_ninth(dataset: TimingsDataset, outcome: CellOutcome) -> None:
    for attempt in (9, 10):
        dataset.record_outcome(replace(outcome, attempt=attempt))
    assert dataset.next_attempt(outcome.cell_id) == 11
    assert [outcome.attempt for outcome in dataset.outcomes()] == [9, 10]


def test_measurements_carry_the_flops_of_their_card(dataset: TimingsDataset, cell_rows: Rows) -> None:
    dataset.record(cell_rows())
    dataset.record(cell_rows("00000000000000bb", model="other"))
    dataset.write_card("workloads", "mlp", {"name": "mlp", "forward_flops_per_sample": 2048})
    first, second = dataset.measurements()
    assert (first.model, first.forward_flops_per_sample) == ("mlp", 2048.0)
    assert (second.model, second.forward_flops_per_sample) == ("other", None)
    assert first.iteration_time_s == pytest.approx(0.1 + 0.04 + 0.001)
    assert first.iterations == 5


def test_cards_are_replaced_and_listed_by_name(dataset: TimingsDataset) -> None:
    dataset.write_card("hardware", "cpu-x/2c", {"name": "cpu-x/2c", "peak": 1.0})
    dataset.write_card("hardware", "a", {"name": "a"})
    dataset.write_card("hardware", "cpu-x/2c", {"name": "cpu-x/2c", "peak": 2.0})
    assert dataset.read_cards("hardware") == [{"name": "a"}, {"name": "cpu-x/2c", "peak": 2.0}]
    assert dataset.read_cards("workloads") == []
    with pytest.raises(InputError, match="no such cards"):
        dataset.write_card("../x", "a", {})  # type: ignore[arg-type]
    with pytest.raises(InputError):
        dataset.write_card("hardware", "nan", {"peak": math.nan})


def test_the_snapshot_covers_the_files_of_the_last_read(dataset: TimingsDataset, cell_rows: Rows) -> None:
    dataset.record(cell_rows())
    dataset.measurements()
    before = dataset.snapshot_sha256()
    dataset.record(cell_rows("00000000000000bb"))
    assert dataset.snapshot_sha256() == before
    dataset.measurements()
    assert dataset.snapshot_sha256() != before
    assert TimingsDataset(dataset.url).snapshot_sha256() == dataset.snapshot_sha256()


def test_a_damaged_file_is_named_and_the_others_are_read(dataset: TimingsDataset, cell_rows: Rows) -> None:
    for number in range(3):
        dataset.record(cell_rows(f"{number:016x}"))
    store = open_store(dataset.url)
    bad = "timings/v1/model=mlp/precision=amp_bf16/cell-0000000000000001.parquet"
    store.write_bytes(bad, store.read_bytes(bad)[:-100])
    table = dataset.read()
    assert sorted(table.column("cell_id").unique().to_pylist()) == ["0000000000000000", "0000000000000002"]
    ((path, reason),) = dataset.problems
    assert path == bad
    assert "damaged" in reason
    with pytest.raises(IntegrityError, match="cell-0000000000000001"):
        dataset.read(strict=True)


def test_a_file_set_aside_is_kept_and_its_cell_is_missing_again(dataset: TimingsDataset, cell_rows: Rows) -> None:
    dataset.record(cell_rows())
    store = open_store(dataset.url)
    (bad,) = store.list_files()
    for content in (b"first", b"second"):
        store.write_bytes(bad, content)
        ((path, reason),) = dataset.check()
        target = dataset.set_aside(path, reason)
        assert store.read_bytes(target) == content
        written = json.loads(store.read_bytes(f"{target}.reason.json"))
        assert written == {"path": bad, "reason": reason}
        assert dataset.recorded_cells() == set()
        assert dataset.check() == []
    assert dataset.record(cell_rows()) == 14
    with pytest.raises(NotFoundError):
        dataset.set_aside("timings/v1/gone.parquet", "reason")
    with pytest.raises(InputError):
        dataset.set_aside("elsewhere/x", "reason")


# --- what is refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("iteration_time_s", math.nan),
        ("iteration_time_s", math.inf),
        ("iteration_time_s", 0.0),
        ("iteration_time_s", -0.1),
        ("iteration_time_s", 1e6),
        ("forward_time_s", math.nan),
        ("backward_time_s", -1.0),
        ("optimizer_time_s", math.inf),
        ("compute_time_s", -1.0),
        ("communication_time_s", math.nan),
        ("exposed_communication_s", math.inf),
        ("exposed_after_backward_s", math.nan),
    ],
)
def test_a_time_that_is_none_is_never_recorded(
    local: TimingsDataset, cell_rows: Rows, field: str, value: float
) -> None:
    rows = cell_rows()
    rows[-1] = replace(rows[-1], **{field: value})
    with pytest.raises(IntegrityError, match=field):
        local.record(rows)
    assert local.recorded_cells() == set()


def test_a_negative_exposed_time_is_recorded_as_measured(local: TimingsDataset, cell_rows: Rows) -> None:
    local.record(cell_rows(exposed_communication_s=-0.001))
    assert local.read().column("exposed_communication_s").to_pylist() == [-0.001] * 14
    assert local.measurements()[0].exposed_communication_s == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"cell_id": "00000000000000bb"},
        {"attempt": 2},
        {"model": "other"},
        {"effective_precision": "fp32"},
        {"world_size": 3},
        {"per_gpu_batch_size": 9},
        {"gpu": "other"},
        {"rank": 0},
    ],
)
def test_rows_that_are_not_one_attempt_at_one_cell_are_refused(
    local: TimingsDataset, cell_rows: Rows, change: dict[str, object]
) -> None:
    rows = cell_rows()
    rows[-1] = replace(rows[-1], **change)
    with pytest.raises(IntegrityError, match="cannot be a cell"):
        local.record(rows)
    assert local.recorded_cells() == set()


@pytest.mark.parametrize("cell_id", ["", "x", "../../../canary", "00000000000000AA", "00000000000000aa\n", "0" * 17])
def test_a_cell_id_that_is_none_is_refused(
    local: TimingsDataset, cell_rows: Rows, cell_id: str, outcome: CellOutcome
) -> None:
    with pytest.raises(IntegrityError, match="16 hex digits"):
        local.record(cell_rows(cell_id))
    with pytest.raises(InputError, match="16 hex digits"):
        local.record_outcome(replace(outcome, cell_id=cell_id))


def test_no_rows_and_impossible_outcomes_are_refused(local: TimingsDataset, outcome: CellOutcome) -> None:
    with pytest.raises(IntegrityError, match="no rows"):
        local.record([])
    for change in ({"attempt": 0}, {"status": "lost"}):
        with pytest.raises(InputError):
            local.record_outcome(replace(outcome, **change))


def test_bad_times_already_on_disk_stay_out_of_measurements(local: TimingsDataset, cell_rows: Rows) -> None:
    rows = cell_rows()
    rows[4] = replace(rows[4], iteration_time_s=math.nan)
    path = "timings/v1/model=mlp/precision=amp_bf16/cell-00000000000000aa.parquet"
    open_store(local.url).write_bytes(path, encode_table(table_of(rows, IterationTiming), IterationTiming))
    (measured,) = local.measurements()
    assert measured.iterations == 4
    assert local.problems == [(path, "1 steps left out: no usable iteration time")]
    assert local.unsound_files == []


# --- files that are not what their name says


def test_files_swapped_between_cells_are_refused(local: TimingsDataset, cell_rows: Rows) -> None:
    local.record(cell_rows())
    local.record(cell_rows("00000000000000bb", model="other"))
    store = open_store(local.url)
    first, second = store.list_files()
    first_data, second_data = store.read_bytes(first), store.read_bytes(second)
    store.write_bytes(first, second_data)
    store.write_bytes(second, first_data)
    assert local.read().num_rows == 0
    assert [path for path, _ in local.problems] == [first, second]
    assert all("not where its rows belong" in reason for _, reason in local.problems)


def test_stray_files_are_named_and_temporary_ones_ignored(
    local: TimingsDataset, cell_rows: Rows, outcome: CellOutcome
) -> None:
    local.record(cell_rows())
    local.record_outcome(outcome)
    store = open_store(local.url)
    folder = "timings/v1/model=mlp/precision=amp_bf16"
    for name in (".tmp-1", "_x", ".cell-00000000000000bb.parquet"):
        store.write_bytes(f"{folder}/{name}", b"half")
    assert local.check() == []
    good = store.read_bytes(f"{folder}/cell-00000000000000aa.parquet")
    store.write_bytes(f"{folder}/cell-00000000000000bb.parquet", good)
    store.write_bytes(f"{folder}/copy.parquet", good)
    store.write_bytes(f"{folder}/cell-00000000000000aa.parquet.tmp", good[:50])
    store.write_bytes("outcomes/v1/cell-00000000000000aa-2.parquet",
                      store.read_bytes("outcomes/v1/cell-00000000000000aa-1.parquet"))  # fmt: skip
    store.write_bytes("outcomes/v1/empty.parquet", b"")
    store.write_bytes("hardware/v1/list.json", b"[]")
    store.write_bytes("workloads/v1/cut.json", b"{")
    assert [path for path, _ in local.check()] == [
        f"{folder}/cell-00000000000000aa.parquet.tmp",
        f"{folder}/cell-00000000000000bb.parquet",
        f"{folder}/copy.parquet",
        "workloads/v1/cut.json",
        "outcomes/v1/cell-00000000000000aa-2.parquet",
        "outcomes/v1/empty.parquet",
        "hardware/v1/list.json",
    ]
    assert len(local.outcomes()) == 1


def test_a_link_out_of_the_dataset_is_named_and_can_be_set_aside(
    local: TimingsDataset, cell_rows: Rows, tmp_path: Path
) -> None:
    local.record(cell_rows())
    canary = tmp_path / "canary.parquet"
    canary.write_bytes(b"secret")
    link = Path(local.url) / "timings/v1/model=mlp/precision=amp_bf16/cell-00000000000000bb.parquet"
    link.symlink_to(canary)
    ((path, reason),) = local.check()
    assert "link" in reason
    local.set_aside(path, reason)
    assert not link.is_symlink()
    assert canary.read_bytes() == b"secret"
    assert local.check() == []


# --- names


NAMES = [
    "resnet50",
    "my_pkg.models:make",
    "../../x",
    "..",
    ".",
    "a/b",
    "a\\b",
    "_private",
    ".hidden",
    "a...b",
    "with space",
    "new\nline",
    "nul\0",
    "émoji 🙂",
    "%2e%2e%2f",
    "a=b",
    "x" * 200,
]


@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_name_is_escaped_safely_and_reversibly(name: str) -> None:
    text = escape_name(name)
    assert unquote(text) == name
    assert not text.startswith((".", "_"))
    assert ".." not in text
    assert all(c.isascii() and (c.isalnum() or c in "-_.~%") for c in text)


@pytest.mark.parametrize("name", ["", "x" * 201, "🙂" * 20, "\ud800"], ids=repr)
def test_a_name_that_cannot_be_a_folder_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="cannot be stored"):
        escape_name(name)


@pytest.mark.parametrize("model", ["../../../canary", "my_pkg.models:make", "_x", "a\nb"], ids=repr)
def test_any_model_name_stays_inside_the_dataset(
    local: TimingsDataset, cell_rows: Rows, tmp_path: Path, model: str
) -> None:
    local.record(cell_rows(model=model))
    local.write_card("workloads", model, {"name": model, "forward_flops_per_sample": 1.0})
    assert sorted(os.listdir(tmp_path)) == ["data"]
    (measured,) = local.measurements()
    assert measured.model == model
    assert measured.forward_flops_per_sample == 1.0
    assert local.problems == []


# --- fragments and crashes


def test_a_fragment_is_whole_and_read_with_its_schema(tmp_path: Path, cell_rows: Rows) -> None:
    path = tmp_path / "scratch" / "rank-0.parquet"
    rows = cell_rows()
    write_fragment(path, rows)
    table = read_table(path.read_bytes(), IterationTiming, name=path.name)
    assert [IterationTiming(**row) for row in table.to_pylist()] == rows
    assert os.listdir(path.parent) == ["rank-0.parquet"]


def test_a_fragment_with_a_value_that_does_not_fit_leaves_no_file(tmp_path: Path, cell_rows: Rows) -> None:
    with pytest.raises(IntegrityError, match="column step"):
        write_fragment(tmp_path / "rank-0.parquet", cell_rows(step=1.5))
    assert os.listdir(tmp_path) == []


def test_a_full_disk_or_a_read_only_place_is_found_before_measuring(local: TimingsDataset, tmp_path: Path) -> None:
    with pytest.raises(StorageFullError):
        local.check_writable(required_bytes=1 << 60)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageReadOnlyError):
        TimingsDataset(tmp_path / "file" / "data").check_writable(required_bytes=1)


def test_a_recorder_killed_anywhere_loses_and_repeats_nothing(
    local: TimingsDataset, timing: Callable[..., IterationTiming]
) -> None:
    """SIGKILL before each system call of a write in turn; a run after it fills the gaps."""
    code = (
        # pyarrow imports pandas at first use: here once instead of in every fork.
        "import itertools, os, sys, pandas\n"
        "from precision_time.storage.timings import TimingsDataset\n"
        "from precision_time.storage.schema import IterationTiming\n"
        "import json\n"
        "row, url = json.loads(sys.argv[2]), sys.argv[1]\n"
        "def run(deadline):\n"
        "    calls = itertools.count()\n"
        "    def counted(call):\n"
        "        def go(*args, **kwargs):\n"
        "            if next(calls) == deadline: os.kill(os.getpid(), 9)\n"
        "            return call(*args, **kwargs)\n"
        "        return go\n"
        "    for name in ('open', 'fsync', 'link', 'unlink'): setattr(os, name, counted(getattr(os, name)))\n"
        "    data = TimingsDataset(url)\n"
        "    for cell in range(3):\n"
        "        data.record([IterationTiming(**{**row, 'cell_id': f'{cell:016x}', 'step': s}) for s in range(5)])\n"
        "for deadline in [*range(0, 40, 2), 10**9]:\n"
        "    if os.fork() == 0: run(deadline); os._exit(0)\n"
        "    os.wait()\n"
        "    print(len(TimingsDataset(url).recorded_cells()))\n"
    )
    row = asdict(timing(world_size=1))
    command = [sys.executable, "-c", code, local.url, json.dumps(row)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    counts = [int(line) for line in shown.stdout.splitlines()]
    assert local.check() == []
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 3
    table = local.read()
    assert table.num_rows == 15
    assert len(table.group_by(["cell_id", "step"]).aggregate([])) == 15


def test_a_reader_beside_writers_sees_only_whole_cells(local: TimingsDataset, cell_rows: Rows) -> None:
    counts = []

    def write() -> None:
        for number in range(30):
            local.record(cell_rows(f"{number:016x}"))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        reader = TimingsDataset(local.url)
        while not writing.done():
            counts.append(reader.read().num_rows)
            assert reader.problems == []
        writing.result()
    assert counts == sorted(counts)
    assert all(count % 14 == 0 for count in counts)
    assert TimingsDataset(local.url).read().num_rows == 30 * 14
