"""Check the files that the ranks of a cell wrote, commit them whole, and record the outcome of the attempt."""

import itertools
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from precision_time.storage.errors import IntegrityError
from precision_time.storage.run_options import OPTION_NAMES
from precision_time.storage.schema import CellOutcome, Environment, IterationTiming
from precision_time.storage.timings import TimingsDataset, read_table
from precision_time.tasks.gangs.verdicts import judge_rows, mark_levels
from precision_time.tasks.ranks.job import CellReceipt

__all__ = ["DISCARDED", "outcome_of", "read_fragments", "record_cell"]

#: The message of an outcome whose rows came second: the cell was already recorded with other rows.
DISCARDED = "recorded before, discarded"

TIMES = ("iteration_time_s", "forward_time_s", "backward_time_s", "optimizer_time_s")
#: Columns that may be null, and else are numbers of at least 0.
UNCERTAIN = ("isolated_communication_s", "energy_j")
#: Seconds by which the parts of an iteration may differ from the whole, since they are differences of readings.
ROUNDING_S = 1e-6


def record_cell(dataset: TimingsDataset, receipt: CellReceipt) -> CellOutcome:
    """Commit the rows of a measured cell, its trace, card and the outcome of the attempt; remove its scratch folder.

    Damaged or incomplete fragments make a failed outcome with the cause ``corrupt fragment``, and stay in the folder
    for inspection; so do sound ones without a useful step (see ``judge_rows``). A cell that is already recorded stays
    as it was; its outcome is then ``recorded`` with the message ``DISCARDED`` and 0 rows. Raises ``StorageError`` when
    the dataset cannot be written: that is not the cell's fault.
    """
    outcome = outcome_of(receipt)
    if receipt.status == "recorded":
        try:
            rows = mark_levels(read_fragments(receipt))
            verdict = judge_rows(rows) or _judge_card(dataset, receipt.workload) or _judge_code(dataset, rows[0])
            count = dataset.record(rows) if verdict is None else 0
        except IntegrityError as error:
            verdict = "corrupt fragment", error.message
        if verdict is not None:
            outcome = replace(outcome, status="failed", cause=verdict[0], message=verdict[1])
        else:
            outcome = replace(outcome, rows=count, message="" if count else DISCARDED)
            if receipt.workload is not None:
                dataset.write_card("workloads", str(receipt.workload["name"]), receipt.workload)
            if count and receipt.trace:
                dataset.write_trace(receipt.cell_id, Path(receipt.trace).read_bytes())
            if count and rows[0].code_sha256 is not None:
                dataset.write_card("code", rows[0].model, {"name": rows[0].model, "code_sha256": rows[0].code_sha256})
    dataset.record_outcome(outcome)
    if outcome.status == "recorded" and receipt.scratch:
        shutil.rmtree(receipt.scratch, ignore_errors=True)
    return outcome


def outcome_of(receipt: CellReceipt) -> CellOutcome:
    """The outcome of an attempt, before any of its rows is recorded."""
    return CellOutcome(
        cell_id=receipt.cell_id,
        attempt=receipt.attempt,
        status=receipt.status,
        cause=receipt.cause,
        message=receipt.message,
        **asdict(receipt.cell),
        gpu=receipt.environment.gpu,
        host=receipt.host,
        started_at=receipt.started_at,
        duration_s=receipt.duration_s,
    )


def _judge_card(dataset: TimingsDataset, card: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """(cause, message) when a model of the user's own is not the network that is recorded under its name."""
    if card is None:
        return None
    for earlier in dataset.read_cards("workloads"):
        if earlier.get("name") == card["name"]:
            changed = [
                f"{key} {earlier[key]} -> {card.get(key)}"
                for key in ("task_input", "params")
                if key in earlier and earlier[key] != card.get(key)
            ]
            if changed:
                return "model changed", (
                    f"{card['name']} is not the network that was recorded under this name: {', '.join(changed)}; "
                    "give it another name, or measure into another data folder"
                )
    return None


def _judge_code(dataset: TimingsDataset, row: IterationTiming) -> tuple[str, str] | None:
    """(cause, message) when a model of the user's own comes from other source code than its recorded cells."""
    if row.code_sha256 is None:
        return None
    for earlier in dataset.read_cards("code"):
        before = earlier.get("code_sha256")
        if earlier.get("name") == row.model and before is not None and before != row.code_sha256:
            return "model changed", (
                f"the source file of {row.model} is not the one that its recorded cells were measured with: "
                f"{str(before)[:8]} -> {row.code_sha256[:8]}; take the change back, measure into another data folder, "
                "or start the campaign again with --accept-changes"
            )
    return None


def read_fragments(receipt: CellReceipt) -> list[IterationTiming]:
    """The rows of all ranks, checked: schema, checksums, every rank, every step, the right cell, possible times.

    Raises ``IntegrityError`` saying which fragment fails and why.
    """
    if len(receipt.fragments) != receipt.cell.world_size:
        raise IntegrityError(
            "a cell lacks fragments", got=f"{len(receipt.fragments)}", expected=f"{receipt.cell.world_size}, one a rank"
        )
    by_rank = [_read_fragment(Path(path), rank=rank, receipt=receipt) for rank, path in enumerate(receipt.fragments)]
    marks = [[row.is_warmup for row in rows] for rows in by_rank]
    if any(other != marks[0] for other in marks):
        raise IntegrityError(
            "the ranks of a cell took different steps",
            got=", ".join(f"{len(steps) - sum(steps)} of {len(steps)} measured" for steps in marks),
            expected="the same warm-up and measured steps on every rank",
        )
    return list(itertools.chain.from_iterable(by_rank))


def _read_fragment(path: Path, *, rank: int, receipt: CellReceipt) -> list[IterationTiming]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise IntegrityError(f"the fragment of rank {rank} cannot be read", got=error.strerror) from error
    table = read_table(data, IterationTiming, name=path.name)
    rows = [IterationTiming(**values) for values in table.to_pylist()]
    for row in rows:
        problem = _problem_of(row, rank=rank, receipt=receipt)
        if problem is not None:
            raise IntegrityError(f"step {row.step} of rank {rank} is not usable", got=problem)
    steps = [row.step for row in rows]
    if steps != list(range(len(steps))) or all(row.is_warmup for row in rows):
        raise IntegrityError(
            f"the fragment of rank {rank} is incomplete",
            got=f"steps {steps[:3]}...{steps[-3:]}, {sum(not row.is_warmup for row in rows)} measured",
            expected="every step from 0 on, some of them measured",
        )
    return rows


def _problem_of(row: IterationTiming, *, rank: int, receipt: CellReceipt) -> str | None:
    stated = (row.cell_id, row.attempt, row.rank, row.model, row.requested_precision, row.world_size)
    cell = receipt.cell
    expected = (receipt.cell_id, receipt.attempt, rank, cell.model, cell.precision, cell.world_size)
    if stated != expected:
        return f"it belongs to {stated}, not {expected}"
    if row.effective_precision != row.requested_precision:
        return f"it ran in {row.effective_precision} instead of {row.requested_precision}"
    for name in OPTION_NAMES:
        if getattr(row, name) != getattr(cell, name):
            return f"it ran with {name}={getattr(row, name)} instead of {getattr(cell, name)}"
    for field in fields(Environment):
        value, planned = getattr(row, field.name), getattr(receipt.environment, field.name)
        if value != planned:
            return f"its {field.name} is {value!r} instead of {planned!r}"
    times = {name: getattr(row, name) for name in TIMES}
    if not row.is_warmup:
        times |= {name: getattr(row, name) for name in ("compute_time_s", "communication_time_s")}
        if row.exposed_communication_s is None or not math.isfinite(row.exposed_communication_s):
            return f"exposed_communication_s is {row.exposed_communication_s}"
    times |= {name: value for name in UNCERTAIN if (value := getattr(row, name)) is not None}
    for name, value in times.items():
        if value is None or not math.isfinite(value) or value < 0:
            return f"{name} is {value}"
    parts_s = row.forward_time_s + row.backward_time_s + row.optimizer_time_s
    if row.iteration_time_s <= 0 or abs(parts_s - row.iteration_time_s) > ROUNDING_S + 1e-3 * row.iteration_time_s:
        return f"its parts sum to {parts_s} s of {row.iteration_time_s} s"
    return None
