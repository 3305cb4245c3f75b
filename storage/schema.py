"""What one row, one outcome and one artifact are: the records on disk, their Arrow schemas, and their version."""

import hashlib
import json
import math
import types
import typing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from precision_time.storage.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "SCHEMA_VERSION",
    "ArtifactFile",
    "ArtifactManifest",
    "CellOutcome",
    "CellStatus",
    "Environment",
    "GridCell",
    "IterationTiming",
    "Measurement",
    "arrow_schema",
]

SCHEMA_VERSION = 1

CellStatus = Literal["recorded", "failed", "refused"]


def _positive_integer(name: str, value: object, *, at_least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise InputError(f"{name} is not usable", got=repr(value), expected=f"an integer of at least {at_least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and software of a cell, as far as they may change a timing.

    ``gpu`` is the hardware name (``predictor/data/gpus.toml``); on a CPU it is ``cpu-<model>-<cores>c``.
    """

    device_type: str
    gpu: str
    cpu_model: str
    cpu_cores: int
    driver_version: str = ""
    cuda_version: str = ""
    framework: str = "pytorch"
    framework_version: str = ""
    backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCell:
    """One point of the grid: model x precision x world size x batch, on one kind of machine.

    ``precision`` is a canonical name; ``per_gpu_batch_size`` counts the samples of one rank in one micro-step.
    Raises ``InputError`` for a number that is not a positive integer or an empty name.
    """

    model: str
    precision: str
    world_size: int
    per_gpu_batch_size: int
    gradient_accumulation_steps: int = 1
    strategy: str = "ddp"
    nodes: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "per_gpu_batch_size", "gradient_accumulation_steps", "nodes"):
            _positive_integer(name, getattr(self, name))
        for name in ("model", "precision", "strategy"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InputError(f"{name} is not usable", got=repr(value), expected="a name")
        if self.world_size % self.nodes:
            raise InputError(
                "the ranks do not divide over the nodes",
                got=f"world_size {self.world_size} / nodes {self.nodes}",
                expected="a whole number of ranks per node",
            )

    @property
    def global_batch_size(self) -> int:
        """Samples in one iteration over all ranks."""
        return self.per_gpu_batch_size * self.world_size * self.gradient_accumulation_steps

    @property
    def label(self) -> str:
        """Short text for logs and tables, e.g. ``resnet50 amp_bf16 x8 b32``."""
        accumulation = f" a{self.gradient_accumulation_steps}" if self.gradient_accumulation_steps > 1 else ""
        return f"{self.model} {self.precision} x{self.world_size} b{self.per_gpu_batch_size}{accumulation}"

    def cell_id(self, environment: Environment) -> str:
        """16 hex digits: the content hash of the cell and its environment, without the attempt.

        Fields at their default are left out of the hash, so a later schema can add one and recorded cells keep
        their names.
        """
        content = {"cell": _stated(self), "environment": _stated(environment)}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stated(record: GridCell | Environment) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record) if getattr(record, f.name) != f.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutcome:
    """One attempt at one cell, failed ones too.

    ``cause`` is empty when recorded, else a short stable word: ``precision-unsupported``, ``exception``,
    ``exit code N``, ``signal N``, ``memory-limit``, ``timed out``, ``corrupt fragment``, ``lost contact``.
    """

    cell_id: str
    attempt: int
    status: str
    cause: str = ""
    message: str = ""
    rows: int = 0
    model: str
    precision: str
    world_size: int
    nodes: int
    per_gpu_batch_size: int
    gradient_accumulation_steps: int
    strategy: str
    gpu: str
    host: str
    started_at: float
    duration_s: float
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTiming:
    """One iteration of one rank. Times are seconds of a monotonic clock; ``recorded_at`` is Unix time.

    ``compute_time_s`` is the same iteration under ``no_sync`` (a paired measurement of an alternating block),
    ``communication_time_s`` the union of the intervals in which a bucket was in flight, and
    ``exposed_communication_s`` the backward time with synchronisation minus the backward time without; noise can
    make that difference slightly negative, and it is stored as measured. The three are null in warm-up rows.
    ``loss_scale`` is null without loss scaling; ``step_skipped`` marks an optimizer step that GradScaler left out.
    ``peak_memory_bytes`` is allocated device memory on CUDA and peak resident memory of the process on a CPU.
    ``is_steady`` says whether the cell passed the steady-state test before measuring (else the cap ended warm-up).
    """

    # the cell
    cell_id: str
    attempt: int
    model: str
    task_input: str
    requested_precision: str
    effective_precision: str
    world_size: int
    nodes: int
    per_gpu_batch_size: int
    gradient_accumulation_steps: int
    strategy: str
    # the iteration
    rank: int
    step: int
    is_warmup: bool
    is_steady: bool
    iteration_time_s: float
    forward_time_s: float
    backward_time_s: float
    optimizer_time_s: float
    compute_time_s: float | None
    communication_time_s: float | None
    exposed_communication_s: float | None
    bucket_count: int
    bucket_bytes: int
    loss_scale: float | None
    step_skipped: bool
    peak_memory_bytes: int
    # the model, as counted by the rank
    model_params: int
    # the environment
    device_type: str
    gpu: str
    cpu_model: str
    cpu_cores: int
    threads_per_rank: int
    driver_version: str
    cuda_version: str
    framework: str
    framework_version: str
    backend: str
    float32_matmul_precision: str
    host: str
    load_average: float
    recorded_at: float
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured training configuration: what campaigns and public tables share, and predictors learn from.

    ``iteration_time_s`` is the median over measured steps of the slowest rank. Parts that were not measured are
    None. ``relative_iqr`` is the interquartile range of the iteration time over its median.
    """

    source: str
    model: str
    task_input: str
    gpu: str
    nodes: int
    world_size: int
    precision: str
    strategy: str
    per_gpu_batch_size: int
    gradient_accumulation_steps: int
    framework: str
    iteration_time_s: float
    forward_time_s: float | None = None
    backward_time_s: float | None = None
    optimizer_time_s: float | None = None
    compute_time_s: float | None = None
    communication_time_s: float | None = None
    exposed_communication_s: float | None = None
    relative_iqr: float | None = None
    iterations: int | None = None
    peak_memory_bytes: int | None = None
    model_params: int | None = None
    forward_flops_per_sample: float | None = None
    cell_id: str = ""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not (math.isfinite(self.iteration_time_s) and self.iteration_time_s > 0):
            raise InputError(
                f"iteration_time_s of {self.model} is not a time",
                got=repr(self.iteration_time_s),
                expected="positive finite seconds",
            )

    @property
    def configuration(self) -> tuple[str | int, ...]:
        """What folds are made of: replicates of one configuration never straddle two folds."""
        return (
            self.model,
            self.task_input,
            self.gpu,
            self.nodes,
            self.world_size,
            self.precision,
            self.strategy,
            self.per_gpu_batch_size,
            self.gradient_accumulation_steps,
            self.framework,
        )


class ArtifactFile(BaseModel):
    """One file of an artifact: its name in the artifact's folder, its size and its digest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    size_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class ArtifactManifest(BaseModel):
    """What a published predictor is: its files, what it was trained on, and how well it did.

    ``accuracy`` maps split -> method -> metric -> value (fractions); methods are ``predictor``,
    ``precision_blind``, ``roofline`` (times one fitted factor) and ``closed_form``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = SCHEMA_VERSION
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    version: int = Field(ge=1)
    created_at: str
    files: tuple[ArtifactFile, ...]
    feature_names: dict[str, list[str]]
    hardware: list[str]
    default_gpu: str
    precisions: list[str]
    training_data_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    training_rows: int = Field(ge=0)
    training_configurations: int = Field(ge=0)
    holdout_models: list[str]
    seed: int
    parameters: dict[str, float | int | str]
    accuracy: dict[str, dict[str, dict[str, float | None]]]
    package_versions: dict[str, str]
    #: digest of all other fields; the registry fills it in when it publishes
    manifest_sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""

    @property
    def artifact_id(self) -> str:
        """``name@version``, how an answer names what made it."""
        return f"{self.name}@{self.version}"


def arrow_schema(record: type) -> "pa.Schema":
    """The Arrow schema of a record class: one column per field, nullable where the field may be None.

    Text is dictionary-encoded: environment columns repeat on every row and cost nothing so.
    """
    import pyarrow as pa

    column_types: dict[type, pa.DataType] = {
        str: pa.dictionary(pa.int32(), pa.string()),
        int: pa.int64(),
        float: pa.float64(),
        bool: pa.bool_(),
    }
    hints = typing.get_type_hints(record)
    columns = []
    for entry in fields(record):
        hint = hints[entry.name]
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        plain = next(option for option in options if option is not type(None))
        columns.append(pa.field(entry.name, column_types[plain], nullable=type(None) in options))
    return pa.schema(
        columns, metadata={"precision_time.schema_version": str(SCHEMA_VERSION), "record": record.__name__}
    )
