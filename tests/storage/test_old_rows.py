"""Datasets of schema versions 1 and 2, and rows of two environments: read with defaults, and never mixed."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precision_time.storage.errors import IntegrityError
from precision_time.storage.schema import CellOutcome, Environment, GridCell, IterationTiming
from precision_time.storage.seal import add_seal
from precision_time.storage.timings import TimingsDataset

Make = Callable[..., list[IterationTiming]]
CELL = GridCell(model="mlp", precision="amp_bf16", world_size=2, per_gpu_batch_size=8)
ENVIRONMENT = Environment(
    device_type="cuda", gpu="A100-SXM4-80GB", cpu_model="x", cpu_cores=2, driver_version="535.1",
    framework_version="2.12",
)  # fmt: skip

TEXT, INTEGER, NUMBER, TRUTH = pa.dictionary(pa.int32(), pa.string()), pa.int64(), pa.float64(), pa.bool_()
#: The columns of version 1, spelled out, since the class has more by now.
TIMING_1 = {
    "cell_id": TEXT, "attempt": INTEGER, "model": TEXT, "task_input": TEXT, "requested_precision": TEXT,
    "effective_precision": TEXT, "world_size": INTEGER, "nodes": INTEGER, "per_gpu_batch_size": INTEGER,
    "gradient_accumulation_steps": INTEGER, "strategy": TEXT, "rank": INTEGER, "step": INTEGER, "is_warmup": TRUTH,
    "is_steady": TRUTH, "iteration_time_s": NUMBER, "forward_time_s": NUMBER, "backward_time_s": NUMBER,
    "optimizer_time_s": NUMBER, "compute_time_s": NUMBER, "communication_time_s": NUMBER,
    "exposed_communication_s": NUMBER, "bucket_count": INTEGER, "bucket_bytes": INTEGER, "loss_scale": NUMBER,
    "step_skipped": TRUTH, "peak_memory_bytes": INTEGER, "model_params": INTEGER, "device_type": TEXT, "gpu": TEXT,
    "cpu_model": TEXT, "cpu_cores": INTEGER, "threads_per_rank": INTEGER, "driver_version": TEXT,
    "cuda_version": TEXT, "framework": TEXT, "framework_version": TEXT, "backend": TEXT,
    "float32_matmul_precision": TEXT, "host": TEXT, "load_average": NUMBER, "recorded_at": NUMBER,
    "schema_version": INTEGER,
}  # fmt: skip
#: The columns of version 2.
TIMING_2 = {name: kind for name, kind in TIMING_1.items() if name != "schema_version"} | {
    "channels_last": TRUTH, "compiled": TRUTH, "checkpointing": TEXT, "fused_optimizer": TRUTH, "compression": TEXT,
    "isolated_communication_s": NUMBER, "is_cold": TRUTH, "is_settled": TRUTH, "gpu_clock_hz": NUMBER,
    "power_w": NUMBER, "temperature_c": NUMBER, "throttled": TRUTH, "throttle_reasons": TEXT, "contended": TRUTH,
    "other_cpu_share": NUMBER, "steal_share": NUMBER, "energy_j": NUMBER, "energy_reason": TEXT,
    "schema_version": INTEGER,
}  # fmt: skip
#: The columns that version 3 added.
SINCE_3 = (
    "bucket_sizes", "exposed_after_backward_s", "cudnn_allow_tf32", "input_mode", "tool_version", "code_sha256",
    "trace_truncated", "traced_exposed_s",
)  # fmt: skip
OUTCOME_1 = {
    "cell_id": TEXT, "attempt": INTEGER, "status": TEXT, "cause": TEXT, "message": TEXT, "rows": INTEGER,
    "model": TEXT, "precision": TEXT, "world_size": INTEGER, "nodes": INTEGER, "per_gpu_batch_size": INTEGER,
    "gradient_accumulation_steps": INTEGER, "strategy": TEXT, "gpu": TEXT, "host": TEXT, "started_at": NUMBER,
    "duration_s": NUMBER, "schema_version": INTEGER,
}  # fmt: skip


def write_old(path: Path, rows: list, columns: dict[str, pa.DataType], record: str, *, version: int = 1) -> None:
    values = {name: [version if name == "schema_version" else getattr(row, name) for row in rows] for name in columns}
    labels = {"precision_time.schema_version": str(version), "record": record}
    schema = pa.schema(list(columns.items()), metadata=labels)
    sink = io.BytesIO()
    pq.write_table(pa.table(values, schema=schema), sink)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(add_seal(sink.getvalue()))


def test_a_dataset_of_the_first_schema_is_read_with_defaults_and_nulls(tmp_path: Path, cell_rows: Make) -> None:
    rows = cell_rows()
    path = tmp_path / "timings/v1/model=mlp/precision=amp_bf16/cell-00000000000000aa.parquet"
    write_old(path, rows, TIMING_1, "IterationTiming")
    dataset = TimingsDataset(str(tmp_path))
    table = dataset.read(strict=True)
    assert table.num_rows == len(rows)
    assert table.column("compiled").to_pylist() == [False] * len(rows)
    assert table.column("checkpointing").to_pylist() == ["none"] * len(rows)
    assert table.column("energy_j").null_count == len(rows)
    assert set(table.column("energy_reason").to_pylist()) == {"not recorded"}
    assert set(table.column("schema_version").to_pylist()) == {1}
    (measured,) = dataset.measurements(strict=True)
    assert measured.iterations == 5
    assert (measured.compiled, measured.compression, measured.settled) == (False, "none", None)
    assert (measured.cold_iteration_time_s, measured.energy_j, measured.throttled_share) == (None, None, None)
    assert measured.skew_s is not None  # known from old rows too


def test_what_the_second_schema_did_not_record_is_null_and_never_a_value(tmp_path: Path, cell_rows: Make) -> None:
    rows = cell_rows(isolated_communication_s=0.5, energy_j=2.0, energy_reason="")
    path = tmp_path / "timings/v1/model=mlp/precision=amp_bf16/cell-00000000000000aa.parquet"
    write_old(path, rows, TIMING_2, "IterationTiming", version=2)
    dataset = TimingsDataset(str(tmp_path))
    table = dataset.read(strict=True)
    assert {name: table.column(name).null_count for name in SINCE_3} == dict.fromkeys(SINCE_3, len(rows))
    (measured,) = dataset.measurements(strict=True)
    assert (measured.isolated_communication_s, measured.energy_j) == (0.5, 4.0)
    assert measured.exposed_after_backward_s is None
    assert measured.transfer_time_s is not None  # old rows have the communication of every rank


def test_old_and_new_rows_stand_in_one_dataset(tmp_path: Path, cell_rows: Make) -> None:
    path = tmp_path / "timings/v1/model=mlp/precision=amp_bf16/cell-00000000000000aa.parquet"
    write_old(path, cell_rows(), TIMING_1, "IterationTiming")
    dataset = TimingsDataset(str(tmp_path))
    sent = {"bucket_sizes": "4000,96", "tool_version": "1.2", "cudnn_allow_tf32": False}
    dataset.record(cell_rows("00000000000000bb", compiled=True, energy_j=2.0, energy_reason="", **sent))
    old, new = dataset.measurements(strict=True)
    assert (old.compiled, new.compiled, old.energy_j, new.energy_j) == (False, True, None, 4.0)
    table = dataset.read(strict=True)
    for name, value in sent.items():
        assert set(table.column(name).to_pylist()) == {None, value}


def test_outcomes_of_the_first_schema_are_read(tmp_path: Path) -> None:
    outcome = CellOutcome(
        cell_id="00000000000000aa", attempt=1, status="failed", cause="signal 9", model="mlp", precision="fp32",
        world_size=2, nodes=1, per_gpu_batch_size=8, gradient_accumulation_steps=1, strategy="ddp", gpu="cpu", host="h",
        started_at=1.0, duration_s=2.0, schema_version=1,
    )  # fmt: skip
    write_old(tmp_path / "outcomes/v1/cell-00000000000000aa-1.parquet", [outcome], OUTCOME_1, "CellOutcome")
    assert TimingsDataset(str(tmp_path)).outcomes(strict=True) == [outcome]


@pytest.mark.parametrize("change", [{"driver_version": "550.2"}, {"framework_version": "2.13"}])
def test_another_driver_or_release_makes_another_cell_and_another_measurement(
    tmp_path: Path, cell_rows: Make, change: dict[str, str]
) -> None:
    dataset = TimingsDataset(str(tmp_path))
    later = replace(ENVIRONMENT, **change)
    for environment, seconds in ((ENVIRONMENT, 0.1), (later, 0.3)):
        values = {name: getattr(environment, name) for name in ("gpu", "driver_version", "framework_version")}
        dataset.record(cell_rows(CELL.cell_id(environment), iteration_time_s=seconds, **values))
    times = {measured.cell_id: measured.iteration_time_s for measured in dataset.measurements(strict=True)}
    assert times == {CELL.cell_id(ENVIRONMENT): 0.1, CELL.cell_id(later): 0.3}


@pytest.mark.parametrize(
    "column",
    [
        "driver_version", "framework_version", "cuda_version", "cpu_model", "compression", "tool_version",
        "code_sha256",
    ],
)  # fmt: skip
def test_rows_of_two_environments_under_one_name_are_refused(tmp_path: Path, cell_rows: Make, column: str) -> None:
    rows = cell_rows()
    with pytest.raises(IntegrityError, match=column):
        TimingsDataset(str(tmp_path)).record([*rows[:-1], replace(rows[-1], **{column: "other"})])
