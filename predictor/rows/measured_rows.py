"""Reads the measured rows of a user, from files, tables, mappings or records, as setups and seconds."""

import dataclasses
import math
import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from precision_time.predictor.setup.hardware import HardwareSpec, choose_precision, find_hardware, parse_bandwidth
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import parse_parallelism
from precision_time.predictor.setup.precision import parse_precision
from precision_time.predictor.setup.training_setup import TrainingSetup, fill_pipeline
from precision_time.predictor.setup.values import check_checkpointing, check_compiled, check_count, count_nodes
from precision_time.predictor.workloads.workload import WorkloadFeatures, find_workload
from precision_time.storage.errors import InputError, PrecisionTimeError, UnknownNameError
from precision_time.storage.schema import Measurement

__all__ = ["FIELDS", "name_row", "read_measured_rows"]

_NEEDED = ("gpu", "precision", "batch_size")
_TIMES = ("iteration_time_s", "samples_per_s")
#: The fields of a row, named as in ``predict_time``; ``workload`` is a ``WorkloadFeatures`` in place of ``model``, and
#: ``gpu`` a name or a ``HardwareSpec``.
FIELDS = (
    "model", "workload", *_NEEDED, *_TIMES, "gpus", "nodes", "strategy", "gradient_accumulation_steps",
    "task_input", "framework", "compiled", "activation_checkpointing", "network_bandwidth",
)  # fmt: skip
#: Columns of the public table under other names.
_PUBLIC_COLUMNS = {
    "num_gpus": "gpus",
    "num_nodes": "nodes",
    "batch_size_per_gpu": "batch_size",
    "grad_accumulation_steps": "gradient_accumulation_steps",
    "parallelism": "strategy",
    "seconds_per_iteration": "iteration_time_s",
    "samples_per_second": "samples_per_s",
}
#: A time and a throughput that differ by a larger share are not of the same measurement.
_SAME_RATE = 0.1
_UNITS = "the seconds of one optimizer step"


def read_measured_rows(
    measurements: object,
    *,
    workloads: Sequence[WorkloadFeatures] = (),
    hardware: Sequence[HardwareSpec] = (),
    default: WorkloadFeatures | None = None,
) -> list[tuple[TrainingSetup, float]]:
    """Setups and measured seconds of an iteration, in the order of the rows.

    ``measurements`` is the path of a CSV or Parquet file or a pandas DataFrame (columns named as in ``FIELDS`` or in
    the public table; other columns are ignored), or a sequence of mappings (names in ``FIELDS``) or ``Measurement``
    records. ``workloads`` and ``hardware`` take precedence over the shipped ones. ``default`` is the workload of rows
    that name no model.

    Raises ``InputError`` without rows, for a wrong type, or for a value that cannot be used, and ``UnknownNameError``
    for an unknown name; both name the row (the first is 1). Raises for a file as ``read_table``.
    """
    rows: list[tuple[TrainingSetup, float]] = []
    for number, row in enumerate(_list_rows(measurements), start=1):
        try:
            if default is not None and _is_blank(row.get("model")) and _is_blank(row.get("workload")):
                row = {**row, "workload": default}
            rows.append(_read_row(row, workloads=workloads, hardware=hardware))
        except PrecisionTimeError as error:
            name_row(error, number)
            raise
    if not rows:
        raise InputError("nothing was measured", got="no rows", expected="at least one measured row")
    return rows


def name_row(error: PrecisionTimeError, number: int) -> None:
    """Add the number of the measured row to the message of ``error``."""
    error.what = f"measured row {number}: {error.what}"
    error.args = (error.message,)


def _list_rows(measurements: object) -> Iterable[Mapping[str, Any]]:
    if isinstance(measurements, str | Path):
        from precision_time.storage.tables import TEXT_COLUMNS, read_table

        return _table_rows(read_table(measurements, text={*TEXT_COLUMNS, "strategy", "network_bandwidth"}))
    if hasattr(measurements, "columns") and hasattr(measurements, "to_dict"):
        return _table_rows(measurements)
    if isinstance(measurements, Mapping) or not isinstance(measurements, Iterable):
        raise InputError(
            "measured rows of a wrong type",
            got=type(measurements).__name__,
            expected="a path, a DataFrame, or a list of mappings or Measurement records",
            fix="put a single row into a list" if isinstance(measurements, Mapping) else None,
        )
    return [_plain_row(row, number) for number, row in enumerate(measurements, start=1)]


def _table_rows(frame: Any) -> list[dict[str, Any]]:
    # Our names take precedence where a table has both.
    ours = {str(name): str(name) for name in frame.columns if name in FIELDS}
    public = {old: new for old, new in _PUBLIC_COLUMNS.items() if old in frame.columns and new not in ours}
    fields = ours | public
    missing = _list_missing(fields.values())
    if missing:
        raise InputError(
            "the measured table lacks columns",
            got=", ".join(map(str, frame.columns))[:300],
            expected=", ".join(missing),
            fix=f"name the columns {', '.join(FIELDS)}, or as in the public table",
        )
    return [{fields[str(name)]: row[name] for name in row if str(name) in fields} for row in frame.to_dict("records")]


def _list_missing(names: Collection[str]) -> list[str]:
    """The fields that a row needs beside those with these ``names``."""
    missing = [name for name in _NEEDED if name not in names]
    if "model" not in names and "workload" not in names:
        missing.insert(0, "model")
    if not any(name in names for name in _TIMES):
        missing.append(" or ".join(_TIMES))
    return missing


def _plain_row(row: object, number: int) -> dict[str, Any]:
    if isinstance(row, Measurement):
        return {
            "model": row.model,
            "task_input": row.task_input,
            "gpu": row.gpu,
            "gpus": row.world_size,
            "nodes": row.nodes,
            "precision": row.precision,
            "strategy": row.strategy,
            "batch_size": row.per_gpu_batch_size,
            "gradient_accumulation_steps": row.gradient_accumulation_steps,
            "framework": row.framework,
            "iteration_time_s": row.iteration_time_s,
        }
    if not isinstance(row, Mapping):
        raise InputError(f"measured row {number}: of a wrong type", got=type(row).__name__,
                         expected="a mapping or a Measurement")  # fmt: skip
    for name in row:
        if name not in FIELDS:
            error = UnknownNameError(
                "field", str(name), FIELDS, fix="times are in seconds, rates in samples per second"
            )
            name_row(error, number)
            raise error
    return {str(name): value for name, value in row.items()}


def _is_blank(value: object) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _count(name: str, value: object) -> int:
    # A column with blanks holds its integers as floats.
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    return check_count(name, number, at_most=10**9)


def _positive(name: str, value: object) -> float:
    number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number > 0):
        unit = _UNITS if name == "iteration_time_s" else "samples per second of the whole job"
        raise InputError(f"{name} is not usable", got=repr(value), expected=f"a positive finite number: {unit}")
    return number


def _read_row(
    row: Mapping[str, Any], *, workloads: Sequence[WorkloadFeatures], hardware: Sequence[HardwareSpec]
) -> tuple[TrainingSetup, float]:
    values = {name: value for name, value in row.items() if not _is_blank(value)}
    blank = [name for name in _TIMES if name in row and row[name] is not None]
    if blank and not any(name in values for name in _TIMES):
        _positive(blank[0], row[blank[0]])
    missing = _list_missing(values)
    if missing:
        raise InputError("values are missing", got=", ".join(values) or "an empty row", expected=", ".join(missing))
    setup = _describe(values, workloads=workloads, hardware=hardware)
    return setup, _read_time(values, setup)


def _describe(
    values: Mapping[str, Any], *, workloads: Sequence[WorkloadFeatures], hardware: Sequence[HardwareSpec]
) -> TrainingSetup:
    device = (
        values["gpu"] if isinstance(values["gpu"], HardwareSpec) else find_hardware(values["gpu"], measured=hardware)
    )
    precision, _ = choose_precision(device, parse_precision(values["precision"]))
    if "network_bandwidth" in values:
        device = dataclasses.replace(device, network_bytes_per_s=parse_bandwidth(values["network_bandwidth"]))
    world_size = _count("gpus", values.get("gpus", 1))
    nodes = values.get("nodes")
    layout = parse_parallelism(values.get("strategy", "ddp"), world_size=world_size)
    batch_size, micro_steps = fill_pipeline(
        stages=layout.pipeline,
        batch_size=_count("batch_size", values["batch_size"]),
        micro_steps=_count("gradient_accumulation_steps", values.get("gradient_accumulation_steps", 1)),
    )
    return TrainingSetup(
        workload=_find_work(values, workloads),
        hardware=device,
        precision=precision,
        world_size=world_size,
        nodes=count_nodes(world_size, _count("nodes", nodes) if nodes is not None else None, device),
        batch_size=batch_size,
        gradient_accumulation_steps=micro_steps,
        parallelism=layout,
        implementation=_read_implementation(values),
    )


def _find_work(values: Mapping[str, Any], workloads: Sequence[WorkloadFeatures]) -> WorkloadFeatures:
    if "workload" in values:
        if not isinstance(values["workload"], WorkloadFeatures):
            raise InputError("workload of a wrong type", got=type(values["workload"]).__name__,
                             expected="WorkloadFeatures", fix="give a name as model")  # fmt: skip
        return values["workload"]
    return find_workload(values["model"], task_input=str(values.get("task_input", "")), measured=workloads)


def _read_implementation(values: Mapping[str, Any]) -> Implementation:
    framework, compiled = values.get("framework", "pytorch"), values.get("compiled")
    if not isinstance(framework, str):
        raise InputError("framework is not usable", got=repr(framework), expected="a name such as pytorch")
    return Implementation(
        framework=framework.strip().casefold(),
        compiled=check_compiled(bool(compiled) if compiled in (True, False) else compiled),
        checkpointing=check_checkpointing(values.get("activation_checkpointing")),
    )


def _read_time(values: Mapping[str, Any], setup: TrainingSetup) -> float:
    times = {name: _positive(name, values[name]) for name in _TIMES if name in values}
    samples = setup.batch_size * setup.layout.data * setup.gradient_accumulation_steps
    if "samples_per_s" not in times:
        return times["iteration_time_s"]
    by_rate = samples / times["samples_per_s"]
    seconds = times.get("iteration_time_s", by_rate)
    if abs(by_rate / seconds - 1) > _SAME_RATE:
        raise InputError(
            "the time and the rate do not agree: mixed units, or two measurements",
            got=f"iteration_time_s {seconds:g} and samples_per_s {times['samples_per_s']:g}",
            expected=f"{samples} samples of an iteration in {seconds:g} s: {samples / seconds:g} samples per second",
            fix=f"iteration_time_s is {_UNITS}; samples_per_s counts the samples of all GPUs; give one of them",
        )
    return seconds
