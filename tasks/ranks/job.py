"""The job that the ranks of an attempt read, and the receipt that comes back of it, as plain values."""

import json
import math
import shutil
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from precision_time.storage.errors import InputError, StorageError
from precision_time.storage.schema import CellStatus, Environment, GridCell

__all__ = ["REFUSAL_CAUSES", "Attempt", "CellReceipt", "MeasurementLimits", "RankJob", "TraceLimits"]

#: Causes of an outcome that is ``refused``: another attempt on this device cannot come out differently.
REFUSAL_CAUSES = frozenset({"precision-unsupported", "strategy-unsupported", "option-unsupported"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementLimits:
    """How long and how often a cell is measured.

    ``seconds_per_cell`` caps warm-up and measuring in the rank (start-up not counted): after it no step is added, but
    the few steps after the bucket rebuild and three measured ones are always taken. ``timeout_s`` ends the rank's whole
    process. ``memory_limit_bytes`` limits the data that a CPU rank may allocate, and the device memory of a CUDA rank.
    Raises ``InputError`` for a number that is no limit.
    """

    warmup_steps: int = 5
    measured_steps: int = 20
    seconds_per_cell: float = 60.0
    timeout_s: float = 300.0
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("warmup_steps", 0), ("measured_steps", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} is not usable", got=repr(value), expected=f"an integer of at least {least}")
        for name in ("seconds_per_cell", "timeout_s"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value <= 0:
                raise InputError(f"{name} is not usable", got=repr(value), expected="positive finite seconds")
        limit: Any = self.memory_limit_bytes
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit <= 0):
            raise InputError("memory_limit_bytes is not usable", got=repr(limit), expected="a positive count of bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLimits:
    """How many steps are traced after the measured ones, and the most bytes of JSON of that trace (0: none)."""

    steps: int
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at one cell on one kind of machine; ``attempt`` counts from 1."""

    cell: GridCell
    attempt: int
    environment: Environment

    @property
    def cell_id(self) -> str:
        """The cell's identity on this machine."""
        return self.cell.cell_id(self.environment)

    def receipt(self, **result: Any) -> "CellReceipt":
        """The receipt of this attempt; ``result`` are the other fields of ``CellReceipt``."""
        return CellReceipt(cell=self.cell, attempt=self.attempt, environment=self.environment, **result)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob(Attempt):
    """An attempt as every rank of it reads it; ``trace`` is None where no step is traced.

    ``scratch`` is the folder of this attempt, seen by all ranks. ``devices`` holds the ``CUDA_VISIBLE_DEVICES`` entry
    of each rank, and is empty on a CPU. ``hosts`` holds the address by which each rank's worker is known to the others.
    """

    limits: MeasurementLimits
    scratch: str
    devices: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    trace: TraceLimits | None = None

    @classmethod
    def of(
        cls, attempt: Attempt, *, limits: MeasurementLimits, scratch: Path, trace: TraceLimits | None = None
    ) -> "RankJob":
        """The job of ``attempt``, with a folder of its own in ``scratch``; no device and no host is assigned yet."""
        folder = scratch / f"{attempt.cell_id}-{attempt.attempt}"
        return cls(
            cell=attempt.cell,
            attempt=attempt.attempt,
            environment=attempt.environment,
            limits=limits,
            scratch=str(folder.resolve()),
            trace=trace,
        )

    def fragment_path(self, rank: int) -> Path:
        """Where ``rank`` writes its rows."""
        return Path(self.scratch) / f"rank-{rank}.parquet"

    def failure_path(self, rank: int) -> Path:
        """Where ``rank`` says why it failed, if it can."""
        return Path(self.scratch) / f"rank-{rank}.error.json"

    @property
    def card_path(self) -> Path:
        """Where rank 0 writes the feature card of a model that has no shipped one."""
        return Path(self.scratch) / "workload.json"

    @property
    def trace_path(self) -> Path:
        """Where rank 0 writes the trace of the steps after the measured ones, gzipped once it is whole."""
        return Path(self.scratch) / "trace.json"

    @property
    def threads_per_rank(self) -> int:
        """Compute threads of one rank: its share of the cores of its node."""
        return max(1, self.environment.cpu_cores // (self.cell.world_size // self.cell.nodes))

    def row_columns(self) -> dict[str, Any]:
        """The columns that all rows of the attempt share on this host: cell, environment, host and input."""
        cell = asdict(self.cell)
        return {
            "cell_id": self.cell_id,
            "attempt": self.attempt,
            "requested_precision": cell.pop("precision"),
            **cell,
            **asdict(self.environment),
            "host": socket.gethostname(),
            "input_mode": "synthetic",
        }

    def to_json(self) -> str:
        """Text for ``from_json``."""
        return json.dumps(asdict(self))

    def lay_out(self) -> Path:
        """Make the folder of this attempt, empty but for ``job.json``, whose path is returned.

        Raises ``StorageError`` where the folder cannot be written.
        """
        folder = Path(self.scratch)
        try:
            # With the rendezvous of a killed attempt the ranks would wait for processes that are gone.
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
            path = folder / "job.json"
            path.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise StorageError(
                "the scratch folder cannot be written",
                got=f"{folder}: {error.strerror}",
                expected="a folder that this process and all workers can write",
            ) from error
        return path

    def conclude(self, *, cause: str, message: str, host: str, started_at: float, duration_s: float) -> "CellReceipt":
        """The receipt of the job once its ranks have ended; without a ``cause`` it names the files that they left."""
        receipt = self.receipt(
            cause=cause, message=message, scratch=self.scratch, started_at=started_at, duration_s=duration_s, host=host
        )
        if cause:
            return receipt
        card, trace = self.card_path, self.trace_path
        return replace(
            receipt,
            fragments=tuple(str(self.fragment_path(rank)) for rank in range(self.cell.world_size)),
            trace=str(trace) if trace.exists() else "",
            workload=json.loads(card.read_text(encoding="utf-8")) if card.exists() else None,
        )

    @classmethod
    def from_json(cls, text: str) -> "RankJob":
        """The inverse of ``to_json``; raises ``InputError`` for text that is no job."""
        try:
            values: dict[str, Any] = json.loads(text)
            trace = values.pop("trace")
            return cls(
                cell=GridCell(**values.pop("cell")),
                environment=Environment(**values.pop("environment")),
                limits=MeasurementLimits(**values.pop("limits")),
                devices=tuple(values.pop("devices")),
                hosts=tuple(values.pop("hosts")),
                trace=None if trace is None else TraceLimits(**trace),
                **values,
            )
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise InputError(
                "a rank's job cannot be read", got=str(error), expected="what RankJob.to_json wrote"
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReceipt(Attempt):
    """The result of an attempt: where its fragments lie, or why there are none.

    ``cause`` is a word of ``CellOutcome``, empty when every rank ended well; the fragments are then still to be checked
    and committed. ``workload`` is the feature card that rank 0 counted, None for a model whose card is shipped;
    ``trace`` the file that its steps were traced into, empty where there is none.
    """

    cause: str = ""
    message: str = ""
    scratch: str = ""
    fragments: tuple[str, ...] = ()
    trace: str = ""
    workload: dict[str, Any] | None = None
    started_at: float
    duration_s: float
    host: str

    @property
    def status(self) -> CellStatus:
        """``recorded`` without a cause, ``refused`` for one of ``REFUSAL_CAUSES``, else ``failed``."""
        if not self.cause:
            return "recorded"
        return "refused" if self.cause in REFUSAL_CAUSES else "failed"
