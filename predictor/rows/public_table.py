"""The table of public measurements, parsed for the predictor; every doubtful row is set aside with its reason."""

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from precision_time.predictor.rows.implementation_facts import find_container, read_implementation
from precision_time.predictor.rows.quarantine import REASONS
from precision_time.predictor.setup.hardware import check_precision, find_hardware
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism, parse_parallelism
from precision_time.predictor.setup.precision import PRECISIONS, parse_precision
from precision_time.predictor.shipped import shipped_path
from precision_time.predictor.workloads.input_sizes import parse_input_size
from precision_time.storage.errors import InputError
from precision_time.storage.tables import NUMBER_COLUMNS, TEXT_COLUMNS, check_columns, read_table

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "PublicTable",
    "imply_utilisation",
    "load_public_table",
    "row_implementation",
    "row_parallelism",
    "shipped_collectives",
    "shipped_measurements",
]


# Flags that state facts, not doubts: they become columns.
_FACTS = ("", "no_optimizer_step", "eval_inside", "startup_inside")

_MAX_UTILISATION = 0.95
# Flags of the transcriber that are reasons to set a row aside.
_FLAGS = tuple(word for word in REASONS if "_" in word or word in ("suspect", "duplicate"))

# NVIDIA's recipes for Megatron shard the optimizer states over the replicas unless they say otherwise.
_SHARDED_OPTIMIZERS = ("NVIDIA-NeMo/Megatron-Bridge", "NVIDIA/NeMo", "NVIDIA/NeMo-Framework-Launcher")
# Columns that a prediction or its score needs; in other columns a cell that is not a number counts as blank.
_NEEDED_NUMBERS = ("num_gpus", "num_nodes", "batch_size_per_gpu", "grad_accumulation_steps", "seconds_per_iteration",
                   "seconds_per_micro_step")  # fmt: skip
_LINE = re.compile(r"\bline [0-9]+;? ?")

# At the time of PyTorch 1.10 and 1.11, timm most likely built ConvNeXt-Base under these names: 88.59 M parameters.
_WRONG_NETWORK = re.compile(r"convnext_(tiny|small)(_384)?_in22ft1k")
_BASE_PARAMS = (88.5e6, 88.7e6)

_PARALLELISM_COLUMNS = ("data", "tensor", "pipeline", "context", "expert", "virtual_stages", "sharding",
                        "single_process")  # fmt: skip
_IMPLEMENTATION_COLUMNS = tuple(field.name for field in fields(Implementation) if field.name != "framework")
_PARSED_COLUMNS = (
    "hardware", "policy", "input_size", "world_size", "nodes", "per_gpu_batch_size", "accumulation",
    "iteration_time_s", "micro_step_time_s", *_PARALLELISM_COLUMNS, "framework_name", *_IMPLEMENTATION_COLUMNS,
    "container", "is_mlperf", "source", "utilisation", "unusable", "reason", "can_predict",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PublicTable:
    """Rows to learn from, and rows set aside with the columns ``reason`` (joined by ``, ``) and ``can_predict``.

    Beside the columns of the file (extra ones too) rows have ``hardware policy input_size world_size nodes
    per_gpu_batch_size accumulation iteration_time_s micro_step_time_s data tensor pipeline context expert
    virtual_stages sharding single_process container is_mlperf source utilisation framework_name`` and the fields of
    ``Implementation`` (``framework`` stays the raw text). NaN, None or blank where the value is not known.
    """

    kept: "pd.DataFrame"
    quarantined: "pd.DataFrame"

    def count_reasons(self) -> dict[str, int]:
        """Number of rows by reason; a row with several reasons counts for each."""
        counts = dict.fromkeys(REASONS, 0)
        for reasons in self.quarantined["reason"]:
            for reason in reasons.split(", "):
                counts[reason] += 1
        return {reason: count for reason, count in counts.items() if count}


def shipped_measurements() -> "pd.DataFrame":
    """The raw rows of ``predictor/data/measurements.parquet``, one per configuration."""
    return _shipped("measurements.parquet").copy()


def shipped_collectives() -> "pd.DataFrame":
    """Measured collective curves (``predictor/data/collectives.parquet``), one row per curve and size.

    ``bytes`` is the size in the convention of nccl-tests, ``seconds`` the out-of-place time, ``kind`` one of
    ``closed_form.collectives.COLLECTIVES``.
    """
    frame = _shipped("collectives.parquet").copy()
    frame["kind"] = frame["collective"].replace({"alltoall": "all_to_all", "sendrecv": "point_to_point"})
    return frame


@functools.cache
def _shipped(name: str) -> "pd.DataFrame":
    return read_table(shipped_path(name))


def load_public_table(path: str | None = None) -> PublicTable:
    """Parse the shipped table, or a CSV or Parquet file with its columns, and set doubtful rows aside.

    No row is refused: one that cannot be understood is set aside with its reason. An extra column with the name of a
    parsed one is kept as ``file_<name>``. Raises ``InputError`` for a file that lacks ``model gpu num_gpus precision
    batch_size_per_gpu`` or every column of time, else as ``read_table``.
    """
    raw = shipped_measurements() if path is None else read_table(path)
    if path is not None:
        check_columns(raw, where=path)
        # An extra column may have the name of a parsed one: both are kept.
        raw = raw.rename(columns={name: f"file_{name}" for name in raw.columns if name in _PARSED_COLUMNS})
    frame, reasons = _parse(_complete(raw))
    frame["reason"] = [", ".join(word for word in REASONS if word in words) for words in reasons]
    frame["can_predict"] = [all(REASONS[word].can_predict for word in words) for words in reasons]
    aside = frame["reason"].ne("")
    kept = frame[~aside].drop(columns=["reason", "can_predict"])
    return PublicTable(kept.reset_index(drop=True), frame[aside].reset_index(drop=True))


def row_parallelism(row: Mapping[Any, Any]) -> Parallelism:
    """The layout of one row of a ``PublicTable``."""
    values = {name: row[name] for name in _PARALLELISM_COLUMNS}
    numbers = {name: int(value) for name, value in values.items() if name not in ("sharding", "single_process")}
    return Parallelism(**numbers, sharding=values["sharding"], single_process=bool(values["single_process"]))


def row_implementation(row: Mapping[Any, Any]) -> Implementation:
    """The implementation of one row of a ``PublicTable``."""
    values = {name: row[name] for name in _IMPLEMENTATION_COLUMNS}
    year = values.pop("software_year")
    return Implementation(
        framework=row["framework_name"], software_year=None if math.isnan(year) else float(year), **values
    )


def imply_utilisation(frame: "pd.DataFrame", *, forward_flops: "pd.Series[float] | None" = None) -> "pd.Series[float]":
    """Share of the dense peak that the time of each row implies: FLOPs of a micro-step on one device / time / peak.

    A micro-step costs 3 forward passes, 2 where only adapters are trained. ``forward_flops`` are per sample (default:
    the column ``fwd_flops_per_sample``). NaN where a factor is not known.
    """
    import pandas as pd

    flops = frame["fwd_flops_per_sample"] if forward_flops is None else forward_flops
    passes = frame["trainable_share"].lt(0.5).map({True: 2.0, False: 3.0})
    split = frame["tensor"] * frame["pipeline"] * frame["context"]
    peaks = {
        (device, policy): find_hardware(device).peak_flops_per_s.get(PRECISIONS[policy].compute, math.nan)
        for device, policy in set(zip(frame["hardware"], frame["policy"], strict=True))
        if device and policy
    }
    pairs = zip(frame["hardware"], frame["policy"], strict=True)
    peak = pd.Series([peaks.get(pair, math.nan) for pair in pairs], index=frame.index, dtype=float)
    return passes * flops * frame["per_gpu_batch_size"] / split / frame["micro_step_time_s"] / peak


def _complete(raw: "pd.DataFrame") -> "pd.DataFrame":
    """``raw`` with every column of the public table as numbers or text.

    ``unusable`` marks rows where a needed cell is not a positive number.
    """
    import numpy as np
    import pandas as pd

    frame = raw.copy()
    unusable = pd.Series(False, index=frame.index)
    for column in NUMBER_COLUMNS:
        if column not in frame:
            frame[column] = np.nan
            continue
        filled = frame[column].notna() & frame[column].astype(str).str.strip().ne("")
        numbers = pd.to_numeric(frame[column].where(filled), errors="coerce").astype(float)
        sound = np.isfinite(numbers) & numbers.gt(0)
        if column in _NEEDED_NUMBERS:
            unusable |= filled & ~sound
        frame[column] = numbers.where(sound)
    for column in TEXT_COLUMNS:
        frame[column] = frame[column].fillna("").astype(str).str.strip() if column in frame else ""
    frame["unusable"] = unusable
    unnamed = frame["row_id"].eq("")
    frame.loc[unnamed, "row_id"] = [f"row {number}" for number in np.flatnonzero(unnamed) + 1]
    return frame


def _parse(frame: "pd.DataFrame") -> tuple["pd.DataFrame", list[set[str]]]:
    """``frame`` with the parsed columns, and the reasons against each of its rows."""
    import numpy as np
    import pandas as pd

    reasons: list[set[str]] = [set() for _ in range(len(frame))]

    def set_aside(rows: "pd.Series[bool]", reason: str) -> None:
        for position in np.flatnonzero(rows.to_numpy(dtype=bool)):
            reasons[position].add(reason)

    for position, flags in enumerate(frame["flag"]):
        words = {word.strip() for word in flags.split(",")}
        # An unknown flag is a doubt all the same.
        reasons[position] |= {word if word in _FLAGS else "suspect" for word in words if word not in _FACTS}
    set_aside(frame.pop("unusable"), "number unusable")
    raw_columns = list(frame.columns)

    frame["source"] = frame["source_repo"]
    frame["is_mlperf"] = frame["source_repo"].str.startswith("mlcommons/")
    frame["hardware"] = frame["gpu"].map(_parse_each(frame["gpu"], lambda name: find_hardware(name).name))
    frame["policy"] = frame["precision"].map(_parse_each(frame["precision"], lambda text: parse_precision(text).name))
    frame["input_size"] = frame["task_input"].map({text: parse_input_size(text) for text in set(frame["task_input"])})
    set_aside(frame["hardware"].eq(""), "hardware unknown")
    set_aside(frame["policy"].eq(""), "precision unknown")
    set_aside(_unsupported(frame), "precision unsupported")

    set_aside(frame["num_gpus"].isna(), "device count missing")
    for column in ("num_gpus", "num_nodes", "batch_size_per_gpu", "grad_accumulation_steps"):
        set_aside(frame[column].mod(1).gt(0), "number unusable")
    frame["world_size"] = frame["num_gpus"].where(frame["num_gpus"].mod(1).eq(0))
    in_nodes = -(-frame["world_size"] // frame["gpus_per_node"])
    frame["nodes"] = frame["num_nodes"].fillna(in_nodes).fillna(1.0)
    set_aside(frame["world_size"].mod(frame["nodes"]).gt(0), "number unusable")
    frame["accumulation"] = frame["grad_accumulation_steps"].fillna(1.0)
    layouts = _layouts(frame)
    for name in _PARALLELISM_COLUMNS:
        absent = {"sharding": "none", "single_process": False}.get(name, math.nan)
        values = [absent if layout is None else getattr(layout, name) for layout in layouts]
        kind = None if name in ("sharding", "single_process") else float
        frame[name] = pd.Series(values, index=frame.index, dtype=kind)
    set_aside(frame["data"].isna() & frame["world_size"].notna(), "parallelism unknown")

    _set_batch(frame, reasons, set_aside)
    _set_times(frame, set_aside)
    _set_implementation(frame)

    wrong = frame["model"].str.fullmatch(_WRONG_NETWORK.pattern) & frame["model_params"].between(*_BASE_PARAMS)
    set_aside(wrong, "another network")
    frame["utilisation"] = imply_utilisation(frame)
    set_aside(frame["utilisation"].gt(_MAX_UTILISATION), "utilisation above 0.95")
    # The same figure printed by two lines of one document, not the same figure reached by two runs.
    facts = frame[[column for column in raw_columns if column not in ("row_id", "source_commit")]].copy()
    facts["notes"] = facts["notes"].str.replace(_LINE, "", regex=True)
    set_aside(facts.duplicated() & frame["micro_step_time_s"].notna(), "exact repeat")
    return frame, reasons


def _parse_each(values: "pd.Series[Any]", parse: Callable[[str], str]) -> dict[str, str]:
    """The result of ``parse`` by distinct value, blank where it raises ``InputError``."""
    parsed = {}
    for value in set(values):
        try:
            parsed[value] = parse(value)
        except InputError:
            parsed[value] = ""
    return parsed


def _unsupported(frame: "pd.DataFrame") -> "pd.Series[bool]":
    import pandas as pd

    refused = set()
    for device, policy in set(zip(frame["hardware"], frame["policy"], strict=True)):
        if device and policy:
            try:
                check_precision(find_hardware(device), PRECISIONS[policy])
            except InputError:
                refused.add((device, policy))
    pairs = zip(frame["hardware"], frame["policy"], strict=True)
    return pd.Series([pair in refused for pair in pairs], index=frame.index)


def _layouts(frame: "pd.DataFrame") -> list[Parallelism | None]:
    """The layout of each row, None where it cannot be understood."""
    layouts: dict[tuple[str, float, bool], Parallelism | None] = {}
    keys = list(zip(frame["parallelism"], frame["world_size"], frame["source"].isin(_SHARDED_OPTIMIZERS), strict=True))
    for text, world, sharded in set(keys):
        sharding = "optimizer" if sharded else None
        try:
            layout = None if math.isnan(world) else parse_parallelism(text, world_size=int(world), sharding=sharding)
            layouts[text, world, sharded] = layout
        except InputError:
            layouts[text, world, sharded] = None
    return [layouts.get(key) for key in keys]


def _set_batch(
    frame: "pd.DataFrame", reasons: list[set[str]], set_aside: Callable[["pd.Series[bool]", str], None]
) -> None:
    """The micro-batch of one data-parallel replica: as stated, else derived from the global batch."""
    stated = frame["batch_size_per_gpu"]
    replicas = frame["data"] * frame["accumulation"]
    derived = frame["global_batch_size"] / replicas
    # Without a layout it is not known how several devices divide the global batch.
    is_divided = frame["parallelism"].ne("") | frame["world_size"].eq(1)
    frame["per_gpu_batch_size"] = stated.fillna(derived.where(derived.mod(1).eq(0) & is_divided))
    missing = frame["per_gpu_batch_size"].isna()
    set_aside(missing, "batch missing")
    for words, is_missing in zip(reasons, missing, strict=True):
        if is_missing:
            words.discard("batch_missing")
    ratio = stated * replicas / frame["global_batch_size"]
    set_aside(ratio.sub(1).abs().gt(0.01), "table_inconsistent")


def _set_times(frame: "pd.DataFrame", set_aside: Callable[["pd.Series[bool]", str], None]) -> None:
    """Seconds of an optimizer step and of a micro-step, from the most exact figure of each row."""
    micro = frame["seconds_per_micro_step"].fillna(frame["seconds_per_iteration"] / frame["accumulation"])
    micro_step_samples = frame["per_gpu_batch_size"] * frame["data"]
    from_throughput = micro_step_samples / frame["samples_per_second"]
    # A file with a column of seconds leaves a cell blank for a reason; a file without one has only throughputs.
    if frame["seconds_per_micro_step"].notna().any() or frame["seconds_per_iteration"].notna().any():
        set_aside(micro.isna() & frame["samples_per_second"].notna(), "time not converted")
    set_aside(micro.isna() & frame["samples_per_second"].isna(), "time missing")
    frame["micro_step_time_s"] = micro.fillna(from_throughput)
    frame["iteration_time_s"] = frame["seconds_per_iteration"].fillna(
        frame["micro_step_time_s"] * frame["accumulation"]
    )


def _set_implementation(frame: "pd.DataFrame") -> None:
    import pandas as pd

    columns = ["framework", "model", "precision", "source_repo", "source_path", "flag", "notes"]
    implementations = [
        read_implementation(dict(zip(columns, row, strict=True)))
        for row in frame[columns].itertuples(index=False, name=None)
    ]
    frame["framework_name"] = [implementation.framework for implementation in implementations]
    for name in _IMPLEMENTATION_COLUMNS:
        kind = float if name in ("software_year", "trainable_share") else object
        values = [getattr(implementation, name) for implementation in implementations]
        frame[name] = pd.Series(values, index=frame.index, dtype=kind)
    pairs = zip(frame["framework"], frame["notes"], strict=True)
    frame["container"] = [find_container(framework, notes) for framework, notes in pairs]
