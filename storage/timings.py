"""The timings dataset: one immutable Parquet file per cell, one per attempt, and small cards beside them."""

import hashlib
import logging
import re
import typing
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from precision_time.storage.documents import MAX_JSON_BYTES, dump_json, parse_json
from precision_time.storage.errors import InputError, IntegrityError, NotFoundError, VersionExistsError
from precision_time.storage.filesystem import open_store
from precision_time.storage.local import LocalStore
from precision_time.storage.measurements import MAX_ITERATION_TIME_S, derive_measurements
from precision_time.storage.parquet import conform, encode_table, read_table, table_of
from precision_time.storage.run_options import OPTION_NAMES
from precision_time.storage.schema import CellOutcome, CellStatus, IterationTiming, Measurement, arrow_schema

__all__ = ["CardKind", "TimingsDataset", "escape_name", "read_table", "write_fragment"]

CardKind = Literal["hardware", "workloads", "code"]

_TIMINGS, _OUTCOMES, _TRACES, _QUARANTINE = "timings/v1", "outcomes/v1", "traces/v1", "quarantine"
_CELL_ID = re.compile(r"[0-9a-f]{16}")
_CELL_FILE = re.compile(r"cell-([0-9a-f]{16})\.parquet")
_OUTCOME_FILE = re.compile(r"cell-([0-9a-f]{16})-([1-9][0-9]{0,8})\.parquet")
_MAX_NAME_BYTES = 200
_MAX_FILE_BYTES = 256 * 2**20
_MAX_REASON = 2_000
_READERS = 8

# Columns with one value in a file: a median over a mixture of cells would mean nothing.
_SAME_IN_A_CELL = (
    "cell_id", "attempt", "model", "task_input", "requested_precision", "effective_precision", "world_size", "nodes",
    "per_gpu_batch_size", "gradient_accumulation_steps", "strategy", *OPTION_NAMES,
    # a cell on another driver or release is another cell: see GridCell.cell_id
    "device_type", "gpu", "cpu_model", "cpu_cores", "driver_version", "cuda_version", "framework", "framework_version",
    "backend",
    "tool_version", "code_sha256", "cudnn_allow_tf32",
)  # fmt: skip
_TIMES = (
    "forward_time_s", "backward_time_s", "optimizer_time_s", "compute_time_s", "communication_time_s",
    "isolated_communication_s", "energy_j", "traced_exposed_s",
)  # fmt: skip

_log = logging.getLogger(__name__)


def escape_name(name: str) -> str:
    """``name`` as one safe part of a path: percent-encoded, never hidden, never ``..``, at most 200 bytes.

    ``urllib.parse.unquote`` gives it back. Raises ``InputError`` for an empty or longer name.
    """
    try:
        text = quote(name, safe="")
    except UnicodeEncodeError as error:
        raise InputError("this name cannot be stored", got=repr(name)[:300], expected="valid Unicode") from error
    text = text.replace("..", "%2E%2E")
    if text.startswith((".", "_")):
        text = f"%{ord(text[0]):02X}{text[1:]}"
    if not 0 < len(text) <= _MAX_NAME_BYTES:
        raise InputError(
            "this name cannot be stored",
            got=f"{name[:60]!r}, {len(text)} bytes when escaped",
            expected=f"1 to {_MAX_NAME_BYTES} bytes",
        )
    return text


def write_fragment(path: Path, rows: Sequence[IterationTiming]) -> None:
    """Write the rows of one rank to a scratch file, whole or not at all, with checksums.

    Raises ``IntegrityError`` naming the column when a value does not fit, and what ``Store.write_bytes`` raises.
    """
    data = encode_table(table_of(rows, IterationTiming), IterationTiming)
    LocalStore(path.parent).write_bytes(path.name, data)


class TimingsDataset:
    """Timings, outcomes and cards at a URL.

    Files are never changed: a cell is recorded once, and an attempt has one outcome. Readers skip damaged files and
    list them in ``problems``; only ``set_aside`` moves them.
    """

    def __init__(self, url: str | Path) -> None:
        self._store = open_store(url)
        self.url = self._store.url
        self._unsound: dict[str, list[tuple[str, str]]] = {}
        self._left_out: list[tuple[str, str]] = []
        self._digests: dict[str, str] | None = None

    @property
    def problems(self) -> list[tuple[str, str]]:
        """(path, reason) of what the last ``read``, ``measurements``, ``outcomes`` and ``read_cards`` skipped."""
        return self.unsound_files + self._left_out

    @property
    def unsound_files(self) -> list[tuple[str, str]]:
        """The ``problems`` that concern a whole file, which ``set_aside`` can move."""
        return [problem for problems in self._unsound.values() for problem in problems]

    def check_writable(self, *, required_bytes: int = 0) -> None:
        """Raise now the error that recording would raise later: see ``Store.check_writable``."""
        self._store.check_writable(required_bytes=required_bytes)

    def record(self, rows: pa.Table | Sequence[IterationTiming]) -> int:
        """Commit all rows of one cell as one file; returns their number, or 0 if the cell was recorded before.

        Of two writers of one cell the first wins. Raises ``IntegrityError`` for rows that are not one attempt at one
        cell, that repeat a step of a rank, or that hold an unusable time (NaN, infinite, negative, an iteration of 0).
        """
        if isinstance(rows, pa.Table):
            table = conform(rows, IterationTiming, name="these rows")
        else:
            table = table_of(rows, IterationTiming)
        path = _check_cell(table, "these rows")
        _check_times(table)
        try:
            self._store.create_bytes(path, encode_table(table, IterationTiming))
        except VersionExistsError:
            _log.info("%s is already there", path)
            return 0
        return int(table.num_rows)

    def record_outcome(self, outcome: CellOutcome) -> bool:
        """Commit the outcome of one attempt; returns False if that attempt already has an outcome, which stays.

        Raises ``InputError`` for an invalid cell id, attempt or status.
        """
        statuses = typing.get_args(CellStatus)
        if not _CELL_ID.fullmatch(outcome.cell_id) or outcome.attempt < 1 or outcome.status not in statuses:
            raise InputError(
                "this outcome cannot be stored",
                got=f"cell {outcome.cell_id!r}, attempt {outcome.attempt}, status {outcome.status!r}",
                expected=f"16 hex digits, an attempt of at least 1, one of {', '.join(statuses)}",
            )
        path = f"{_OUTCOMES}/cell-{outcome.cell_id}-{outcome.attempt}.parquet"
        try:
            self._store.create_bytes(path, encode_table(table_of([outcome], CellOutcome), CellOutcome))
        except VersionExistsError:
            _log.warning("attempt %d of cell %s already has an outcome", outcome.attempt, outcome.cell_id)
            return False
        return True

    def recorded_cells(self) -> set[str]:
        """Ids of the cells that have a file; only names are read, so a damaged file counts until it is set aside."""
        names = (_CELL_FILE.fullmatch(path.rpartition("/")[2]) for path in self._store.list_files(_TIMINGS))
        return {match.group(1) for match in names if match}

    def is_empty(self) -> bool:
        """Whether the dataset has no files: no timings, outcomes or cards."""
        return not self._store.list_files()

    def next_attempt(self, cell_id: str) -> int:
        """One more than the highest attempt at ``cell_id`` with an outcome; 1 for a new cell."""
        matches = (_OUTCOME_FILE.fullmatch(path.rpartition("/")[2]) for path in self._store.list_files(_OUTCOMES))
        attempts = [int(match.group(2)) for match in matches if match and match.group(1) == cell_id]
        return max(attempts, default=0) + 1

    def read(self, *, strict: bool = False, cells: Container[str] | None = None) -> pa.Table:
        """All rows of all sound files, or of those of ``cells``.

        With ``strict`` the first unsound file raises ``IntegrityError`` instead.
        """
        self._digests, self._left_out = {}, []
        tables = self._read_files(
            _TIMINGS, IterationTiming, _check_timings_file, strict=strict, digests=self._digests, cells=cells
        )
        if not tables:
            return arrow_schema(IterationTiming).empty_table()
        return pa.concat_tables(tables).unify_dictionaries()

    def outcomes(self, *, strict: bool = False, cells: Container[str] | None = None) -> list[CellOutcome]:
        """All outcomes or those of ``cells``, by cell and attempt; unsound files as in ``read``."""
        tables = self._read_files(_OUTCOMES, CellOutcome, _check_outcome_file, strict=strict, cells=cells)
        outcomes = [CellOutcome(**row) for table in tables for row in table.to_pylist()]
        return sorted(outcomes, key=lambda outcome: (outcome.cell_id, outcome.attempt))

    def measurements(self, *, strict: bool = False, cells: Container[str] | None = None) -> list[Measurement]:
        """One measurement for each recorded cell, or for each of ``cells`` (see ``derive_measurements``).

        ``problems`` lists the cells that could not be measured.
        """
        timings = self.read(strict=strict, cells=cells)
        flops = {}
        for card in self.read_cards("workloads"):
            value = card.get("forward_flops_per_sample")
            if isinstance(value, int | float) and not isinstance(value, bool):
                flops[str(card.get("name"))] = float(value)
        measured, left_out = derive_measurements(timings, forward_flops=flops)
        paths = {path.rpartition("/")[2]: path for path in self._digests or ()}
        self._left_out = [(paths[f"cell-{cell}.parquet"], reason) for cell, reason in left_out]
        return measured

    def snapshot_sha256(self) -> str:
        """Digest of the timing files that the last ``read`` or ``measurements`` used; reads them now if need be."""
        if self._digests is None:
            self.read()
        listed = "".join(f"{digest}  {path}\n" for path, digest in sorted((self._digests or {}).items()))
        return hashlib.sha256(listed.encode()).hexdigest()

    def write_card(self, kind: CardKind, name: str, values: dict[str, Any]) -> None:
        """Write the card ``name``, replacing an earlier one; raises ``InputError`` for values that JSON lacks."""
        self._store.write_bytes(f"{_card_folder(kind)}/{escape_name(name)}.json", dump_json(values))

    def read_cards(self, kind: CardKind) -> list[dict[str, Any]]:
        """All sound cards of a kind, by file name; the others are listed in ``problems``."""
        cards, self._unsound[kind] = [], []
        for path in self._store.list_files(_card_folder(kind)):
            try:
                card = parse_json(self._store.read_bytes(path, max_bytes=MAX_JSON_BYTES), name=path)
                if not isinstance(card, dict):
                    raise IntegrityError(f"{path} is not a card", got=type(card).__name__, expected="a JSON object")
                cards.append(card)
            except (IntegrityError, InputError) as error:
                self._unsound[kind].append((path, str(error)))
            except NotFoundError:
                continue
        return cards

    def write_trace(self, cell_id: str, data: bytes) -> None:
        """Store the gzipped Chrome trace of a cell as ``traces/v1/cell-ID.json.gz``."""
        self._store.write_bytes(f"{_TRACES}/cell-{cell_id}.json.gz", data)

    def trace_bytes(self) -> int:
        """The total size of all traces."""
        return self._store.total_bytes(_TRACES)

    def check(self) -> list[tuple[str, str]]:
        """Read everything; returns (path, reason) of each file and step that cannot be used."""
        self.measurements()
        self.outcomes()
        self.read_cards("hardware")
        return self.problems

    def set_aside(self, path: str, reason: str) -> str:
        """Move an unsound file to ``quarantine/``, with the reason beside it, so that its cell is measured again.

        Returns the new path. Raises ``NotFoundError`` if the file is gone, ``InputError`` for a path outside the
        folders of the dataset.
        """
        folders = (_TIMINGS, _OUTCOMES, *map(_card_folder, typing.get_args(CardKind)))
        if not path.startswith(tuple(f"{folder}/" for folder in folders)):
            raise InputError("this file is not part of the dataset", got=repr(path), expected=f"one of {folders}")
        number = 0
        while True:
            target = f"{_QUARANTINE}/{path}.{number}" if number else f"{_QUARANTINE}/{path}"
            try:
                self._store.move(path, target)
            except VersionExistsError:
                number += 1
                continue
            self._store.write_bytes(f"{target}.reason.json", dump_json({"path": path, "reason": reason[:_MAX_REASON]}))
            return target

    def _read_files(
        self,
        folder: str,
        record: type,
        check: Callable[[pa.Table, str], None],
        *,
        strict: bool,
        digests: dict[str, str] | None = None,
        cells: Container[str] | None = None,
    ) -> list[pa.Table]:
        def read(path: str) -> tuple[pa.Table, str] | IntegrityError | InputError | None:
            try:
                data = self._store.read_bytes(path, max_bytes=_MAX_FILE_BYTES)
                table = read_table(data, record, name=path)
                check(table, path)
            except (IntegrityError, InputError) as error:
                return error
            except NotFoundError:  # set aside since the listing
                return None
            return table, hashlib.sha256(data).hexdigest()

        paths = [path for path in self._store.list_files(folder) if cells is None or _cell_of(path) in cells]
        problems = self._unsound[folder] = []
        tables = []
        # Each file is a round trip, which is slow on S3: threads overlap them.
        with ThreadPoolExecutor(_READERS) as pool:
            for path, result in zip(paths, pool.map(read, paths), strict=True):
                if result is None:
                    continue
                if isinstance(result, Exception):
                    if strict:
                        raise result
                    problems.append((path, str(result)))
                    continue
                table, digest = result
                tables.append(table)
                if digests is not None:
                    digests[path] = digest
        return tables


def _cell_of(path: str) -> str:
    """The cell id in the file name, so that files are chosen without reading them."""
    return path.rpartition("/")[2][len("cell-") :][:16]


def _card_folder(kind: str) -> str:
    if kind not in typing.get_args(CardKind):
        raise InputError("there are no such cards", got=repr(kind), expected=" or ".join(typing.get_args(CardKind)))
    return f"{kind}/v1"


def _cell_path(row: dict[str, Any]) -> str:
    model, precision = escape_name(row["model"]), escape_name(row["requested_precision"])
    return f"{_TIMINGS}/model={model}/precision={precision}/cell-{row['cell_id']}.parquet"


def _check_cell(table: pa.Table, name: str) -> str:
    """The path where ``table`` belongs; raises ``IntegrityError`` unless it is one attempt at one cell."""
    if not table.num_rows:
        raise IntegrityError(f"{name} cannot be a cell", got="no rows", expected="the rows of one cell")
    for column in _SAME_IN_A_CELL:
        values = pc.unique(table.column(column).combine_chunks()).to_pylist()
        if len(values) != 1:
            raise IntegrityError(
                f"{name} cannot be a cell",
                got=f"{column}: {values[:3]}",
                expected="the rows of one attempt at one cell",
            )
    row = table.slice(0, 1).to_pylist()[0]
    if not _CELL_ID.fullmatch(row["cell_id"]):
        raise IntegrityError(f"{name} cannot be a cell", got=f"cell_id {row['cell_id']!r}", expected="16 hex digits")
    keys = table.select(["is_warmup", "rank", "step"])
    if keys.group_by(keys.column_names).aggregate([]).num_rows != table.num_rows:
        raise IntegrityError(f"{name} cannot be a cell", got="a step of a rank twice", expected="one row for each")
    return _cell_path(row)


def _check_times(table: pa.Table) -> None:
    """Refuse unusable times: a recorded file is never corrected."""
    iteration = table.column("iteration_time_s")
    usable = pc.and_(pc.greater(iteration, 0.0), pc.less_equal(iteration, MAX_ITERATION_TIME_S))
    _refuse_unless(usable, iteration, "a positive time of at most a day")
    for name in _TIMES:
        column = table.column(name)
        _refuse_unless(pc.and_(pc.is_finite(column), pc.greater_equal(column, 0.0)), column, "a time", name=name)
    for name in ("exposed_communication_s", "exposed_after_backward_s"):
        _refuse_unless(pc.is_finite(table.column(name)), table.column(name), "a finite difference", name=name)


def _refuse_unless(
    usable: pa.ChunkedArray, values: pa.ChunkedArray, expected: str, *, name: str = "iteration_time_s"
) -> None:
    # NaN compares false and is refused; null, a part that was not measured, stays null and passes.
    bad = values.filter(pc.invert(usable))
    if len(bad):
        raise IntegrityError(
            f"these rows cannot be recorded: {name} is not usable in {len(bad)} of them",
            got=repr(bad[0].as_py()),
            expected=expected,
        )


def _check_timings_file(table: pa.Table, path: str) -> None:
    belongs = _check_cell(table, path)
    if belongs != path:
        raise IntegrityError(f"{path} is not where its rows belong", got=path, expected=belongs)


def _check_outcome_file(table: pa.Table, path: str) -> None:
    rows = table.select(["cell_id", "attempt"]).slice(0, 2).to_pylist()
    belongs = [f"{_OUTCOMES}/cell-{row['cell_id']}-{row['attempt']}.parquet" for row in rows]
    if belongs != [path]:
        raise IntegrityError(
            f"{path} is not where its rows belong", got=f"{table.num_rows} rows", expected="one outcome"
        )
