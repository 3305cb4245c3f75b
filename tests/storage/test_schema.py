"""The records: stable identities, checked fields, and Arrow schemas that say what may be null."""

import hashlib
import math
from dataclasses import fields, replace

import pyarrow as pa
import pytest

from precision_time.storage.errors import InputError
from precision_time.storage.run_options import OPTION_NAMES, RUN_OPTIONS, RunOptions
from precision_time.storage.schema import (
    ROW_VERSION,
    CellOutcome,
    Environment,
    GridCell,
    IterationTiming,
    Measurement,
    arrow_schema,
)

CELL = GridCell(model="mlp", precision="fp32", world_size=2, per_gpu_batch_size=8)
ENVIRONMENT = Environment(device_type="cpu", gpu="cpu-x-2c", cpu_model="x", cpu_cores=2)
MEASUREMENT = Measurement(
    source="campaign",
    model="mlp",
    task_input="64",
    gpu="cpu-x-2c",
    nodes=1,
    world_size=2,
    precision="fp32",
    strategy="ddp",
    per_gpu_batch_size=8,
    gradient_accumulation_steps=1,
    framework="pytorch",
    iteration_time_s=0.1,
)


def test_a_cell_id_is_16_hex_digits_and_stays_the_same_between_releases() -> None:
    # Spelled out: files on disk have these ids, so the content of the hash must never change by accident.
    text = (
        '{"cell":{"model":"mlp","per_gpu_batch_size":8,"precision":"fp32","world_size":2},'
        '"environment":{"cpu_cores":2,"cpu_model":"x","device_type":"cpu","gpu":"cpu-x-2c"}}'
    )
    assert CELL.cell_id(ENVIRONMENT) == hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "mlp2"},
        {"precision": "bf16"},
        {"world_size": 4},
        {"per_gpu_batch_size": 16},
        {"gradient_accumulation_steps": 2},
        {"strategy": "fsdp"},
        {"nodes": 2},
        {"channels_last": True},
        {"compiled": True},
        {"checkpointing": "full"},
        {"fused_optimizer": True},
        {"compression": "bf16"},
    ],
)
def test_every_field_of_a_cell_counts_in_its_id(change: dict[str, object]) -> None:
    assert replace(CELL, **change).cell_id(ENVIRONMENT) != CELL.cell_id(ENVIRONMENT)


@pytest.mark.parametrize(
    "field", ["device_type", "gpu", "cpu_model", "driver_version", "cuda_version", "framework_version"]
)
def test_another_machine_or_driver_is_another_cell(field: str) -> None:
    assert CELL.cell_id(replace(ENVIRONMENT, **{field: "other"})) != CELL.cell_id(ENVIRONMENT)


@pytest.mark.parametrize("value", [0, -1, 1.0, 1e18, "2", True, None, math.nan])
@pytest.mark.parametrize("field", ["world_size", "per_gpu_batch_size", "gradient_accumulation_steps", "nodes"])
def test_a_count_that_is_no_positive_integer_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        replace(CELL, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("channels_last", 1), ("compiled", "yes"), ("fused_optimizer", None), ("checkpointing", "some"),
        ("checkpointing", False), ("compression", "fp8"),
    ],
)  # fmt: skip
def test_an_option_that_is_none_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field):
        replace(CELL, **{field: value})


def test_every_run_option_is_a_field_with_the_first_choice_as_its_default() -> None:
    defaults = {field.name: field.default for field in fields(RunOptions)}
    assert defaults == {option.name: option.default for option in RUN_OPTIONS}
    assert len(OPTION_NAMES) == len(set(OPTION_NAMES))
    for record in (GridCell, CellOutcome, IterationTiming, Measurement):
        assert issubclass(record, RunOptions)


@pytest.mark.parametrize(
    ("record", "digest"),
    [(CellOutcome, "6b2f73e6d590063a"), (IterationTiming, "003f3a23d93ba859"), (Measurement, "3f6bc2c2ffca2e62")],
)
def test_columns_keep_their_order_and_types(record: type, digest: str) -> None:
    # Files on disk have these columns, whichever class a field is inherited from.
    text = arrow_schema(record).to_string()
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_a_label_names_what_is_not_the_default() -> None:
    assert CELL.label == "mlp fp32 x2 b8"
    cell = replace(CELL, strategy="fsdp", channels_last=True, compiled=True, checkpointing="full")
    assert cell.label == "mlp fp32 x2 b8 fsdp channels-last compiled full-checkpointing"
    assert replace(CELL, fused_optimizer=True, compression="fp16").label.endswith("fused-optimizer fp16-compression")


@pytest.mark.parametrize("field", ["model", "precision", "strategy"])
def test_an_empty_name_is_refused(field: str) -> None:
    with pytest.raises(InputError, match=field):
        replace(CELL, **{field: ""})


def test_ranks_divide_over_nodes() -> None:
    with pytest.raises(InputError, match="3 / nodes 2"):
        replace(CELL, world_size=3, nodes=2)


def test_the_global_batch_counts_ranks_and_accumulation() -> None:
    cell = replace(CELL, gradient_accumulation_steps=3)
    assert cell.global_batch_size == 8 * 2 * 3
    assert cell.label == "mlp fp32 x2 b8 a3"


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_measurement_without_a_time_is_refused(value: float) -> None:
    with pytest.raises(InputError, match="iteration_time_s of mlp"):
        replace(MEASUREMENT, iteration_time_s=value)


def test_a_configuration_leaves_source_software_and_result_out() -> None:
    same = replace(MEASUREMENT, source="table", iteration_time_s=9.0, cell_id="x")
    assert same.configuration == MEASUREMENT.configuration
    assert replace(MEASUREMENT, precision="bf16").configuration != MEASUREMENT.configuration


def test_an_option_makes_another_configuration_and_its_default_none() -> None:
    assert replace(MEASUREMENT, compiled=True).configuration != MEASUREMENT.configuration
    assert replace(MEASUREMENT, compression="fp16").configuration != MEASUREMENT.configuration
    assert MEASUREMENT.configuration[-1] == "pytorch"


@pytest.mark.parametrize("record", [IterationTiming, CellOutcome, Measurement])
def test_an_arrow_schema_has_one_column_per_field_and_knows_its_version(record: type) -> None:
    schema = arrow_schema(record)
    assert schema.names == list(record.__dataclass_fields__)
    assert schema.metadata[b"precision_time.schema_version"] == str(ROW_VERSION).encode()
    assert schema.metadata[b"record"] == record.__name__.encode()


def test_only_what_may_be_none_is_nullable() -> None:
    schema = arrow_schema(IterationTiming)
    nullable = {field.name for field in schema if field.nullable}
    assert nullable == {
        "compute_time_s", "communication_time_s", "exposed_communication_s", "loss_scale",
        "isolated_communication_s", "is_cold", "is_settled", "gpu_clock_hz", "power_w", "temperature_c", "throttled",
        "contended", "other_cpu_share", "steal_share", "energy_j", "bucket_sizes", "exposed_after_backward_s",
        "cudnn_allow_tf32", "input_mode", "tool_version", "code_sha256", "trace_truncated", "traced_exposed_s",
    }  # fmt: skip
    assert schema.field("iteration_time_s").type == pa.float64()
    assert schema.field("rank").type == pa.int64()
    assert schema.field("is_warmup").type == pa.bool_()
    assert pa.types.is_dictionary(schema.field("model").type)
