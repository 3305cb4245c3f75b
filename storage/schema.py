"""The records on disk (rows, outcomes, measurements), their Arrow schemas, and the version of these."""

import math
import types
import typing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from precision_time.storage.cells import Environment, GridCell
from precision_time.storage.errors import InputError
from precision_time.storage.run_options import RunOptions

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "ROW_VERSION",
    "SCHEMA_VERSION",
    "CellOutcome",
    "CellStatus",
    "Environment",
    "GridCell",
    "IterationTiming",
    "Measurement",
    "arrow_schema",
]

#: Of artifacts.
SCHEMA_VERSION = 1
#: Of rows. 2: run options, conditions, energy, levels. 3: bucket sizes, both TF32 switches, exposed
#: communication by the last bucket and by a trace, input mode, versions of the tool and of the model's code. Files of
#: earlier versions are read with defaults and nulls.
ROW_VERSION = 3

CellStatus = Literal["recorded", "failed", "refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutcomeColumns:
    """Columns of an outcome before those of the run options."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutcome(RunOptions, _OutcomeColumns):
    """The outcome of one attempt at one cell.

    ``cause`` is empty when it was recorded, else a short stable word. Refused: ``precision-unsupported``,
    ``strategy-unsupported``, ``option-unsupported``. Failed: ``exception``, ``exit code N``, ``signal N``,
    ``memory-limit``, ``timed out``, ``corrupt fragment``, ``lost contact``, ``nan loss``, ``environment changed``,
    ``throttled``, ``contended``, ``unsteady``, ``no usable step``.
    """

    schema_version: int = ROW_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class _IterationColumns:
    """Columns of an iteration before those of the run options: what version 1 had."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTiming(RunOptions, _IterationColumns):
    """One iteration of one rank. Times are seconds of a monotonic clock; ``recorded_at`` is Unix time.

    ``compute_time_s`` is the time of the same iteration under ``no_sync`` (paired steps of alternating blocks),
    ``communication_time_s`` the union of the intervals in which a bucket was in flight, and
    ``exposed_communication_s`` the backward time with synchronisation minus the backward time without; noise can
    make that difference slightly negative, and it is stored as measured. The three are null in warm-up rows.
    ``loss_scale`` is null without loss scaling; ``step_skipped`` marks an optimizer step that GradScaler left out.
    ``peak_memory_bytes`` is allocated device memory on CUDA and peak resident memory of the process on a CPU.
    ``is_steady`` says whether the cell passed the steady-state test before measuring (else the cap ended warm-up).

    ``bucket_bytes`` are bytes on the wire, after compression. ``isolated_communication_s`` is an all-reduce of the
    same buckets with nothing beside it, measured once per cell. ``is_cold`` marks steps before the last change of
    level in the series of the cell's slowest rank, and ``is_settled`` says whether that series settled after it.
    Conditions are those of the block of steps that the row belongs to: ``gpu_clock_hz`` to ``throttle_reasons`` by NVML
    (null without it; ``throttled`` by heat or hardware, while an ordinary power cap is only among the reasons),
    ``other_cpu_share`` the share of the host's CPU time that processes other than the cell's ranks took,
    ``steal_share`` the share that its hypervisor gave to other machines, ``contended`` whether one of these or the load
    average was above its bound. ``energy_j`` is the energy of this rank's GPU in one measured iteration; null with the
    reason in ``energy_reason``. In files of version 1 all of these are null or at their defaults.

    Since version 3, and null in earlier files: ``bucket_sizes`` are the bytes on the wire of each bucket in the order
    of sending, joined by commas; empty where nothing is sent. ``exposed_after_backward_s`` is a second estimate of
    exposed communication: from the begin of the backward pass that sends to the landing of its last bucket, minus the
    same backward pass under ``no_sync``; it also may be slightly negative, and is null in warm-up. ``cudnn_allow_tf32``
    is the TF32 switch of convolutions (``float32_matmul_precision`` is that of products). ``input_mode`` is
    ``synthetic`` for a batch that is made once and stays on the device. ``tool_version`` is the version of this package
    that measured; it is no part of the cell's identity. ``code_sha256`` is the digest of the source file of a user's
    own model, null for a named one. ``trace_truncated`` says whether a limit left steps out of the cell's trace, null
    without a trace; ``traced_exposed_s`` is a third estimate of exposed communication, of one step of rank 0 by that
    trace: the time in which kernels of NCCL ran and no other kernel.
    """

    # since version 2
    isolated_communication_s: float | None = None
    is_cold: bool | None = None
    is_settled: bool | None = None
    gpu_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: bool | None = None
    throttle_reasons: str = ""
    contended: bool | None = None
    other_cpu_share: float | None = None
    steal_share: float | None = None
    energy_j: float | None = None
    energy_reason: str = "not recorded"
    # since version 3
    bucket_sizes: str | None = None
    exposed_after_backward_s: float | None = None
    cudnn_allow_tf32: bool | None = None
    input_mode: str | None = None
    tool_version: str | None = None
    code_sha256: str | None = None
    trace_truncated: bool | None = None
    traced_exposed_s: float | None = None
    schema_version: int = ROW_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasurementColumns:
    """Fields of a measurement before those of the run options."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement(RunOptions, _MeasurementColumns):
    """One measured training configuration, of a campaign or a public table; predictors learn from these.

    ``iteration_time_s`` is the median over measured steps of the slowest rank, after a change of level only of the
    steps after it; ``cold_iteration_time_s`` is the median of all steps before it, None without a change, and
    ``settled`` says whether the series settled. Parts that were not measured are None. ``relative_iqr`` is the
    interquartile range of the iteration time over its median. ``skew_s`` is the median over steps of the longest
    minus the shortest communication of the ranks: a bucket lands on all ranks at about the same time, so the rank that
    waits longest is early by that much (clocks of several hosts need not agree). ``transfer_time_s`` is the median over
    steps of that shortest communication, of the rank that comes last: it waits for no other, so this is pure transfer.
    ``exposed_after_backward_s`` is the second estimate of ``IterationTiming``. ``skipped_steps`` counts the steps that
    loss scaling left out. ``energy_j`` is the energy of all GPUs in one iteration. ``throttled_share`` and
    ``contended_share`` are shares of the measured steps.
    """

    cold_iteration_time_s: float | None = None
    settled: bool | None = None
    isolated_communication_s: float | None = None
    skew_s: float | None = None
    skipped_steps: int | None = None
    energy_j: float | None = None
    gpu_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled_share: float | None = None
    contended_share: float | None = None
    transfer_time_s: float | None = None
    exposed_after_backward_s: float | None = None
    schema_version: int = ROW_VERSION

    def __post_init__(self) -> None:
        if not (math.isfinite(self.iteration_time_s) and self.iteration_time_s > 0):
            raise InputError(
                f"iteration_time_s of {self.model} is not a time",
                got=repr(self.iteration_time_s),
                expected="positive finite seconds",
            )

    @property
    def configuration(self) -> tuple[str | int, ...]:
        """The group of a measurement for folds: replicates of one configuration are always in the same fold.

        Run options at their defaults are left out, as in ``cell_id``.
        """
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
            *(f"{name}={value}" for name, value in self.changed_options.items()),
        )


def arrow_schema(record: type) -> "pa.Schema":
    """The Arrow schema of a record class: one column per field, nullable where the field may be None.

    Text is dictionary-encoded, so that environment columns, which repeat on every row, cost nothing.
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
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        plain = next(kind for kind in kinds if kind is not type(None))
        columns.append(pa.field(entry.name, column_types[plain], nullable=type(None) in kinds))
    return pa.schema(columns, metadata={"precision_time.schema_version": str(ROW_VERSION), "record": record.__name__})
