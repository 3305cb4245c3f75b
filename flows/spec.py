"""CampaignSpec: what a campaign measures and how, checked and expanded into cells; and RetrainSpec beside it."""

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from precision_time.flows.settings_file import Document, build_model, parse_duration, read_document
from precision_time.predictor.precision import parse_precision
from precision_time.predictor.workload import known_workloads
from precision_time.storage.errors import InputError, UnknownNameError
from precision_time.storage.schema import GridCell

__all__ = ["MAX_CELLS", "CampaignSpec", "CellPattern", "RetrainSpec", "read_campaign"]

#: a plan of 100,000 cells is a typing error: at the start-up time of a rank alone it would take days
MAX_CELLS = 100_000
MAX_GPUS = 65_536
MAX_BATCH = 10_000_000

NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
NAME_EXPECTED = "lower-case letters, digits and hyphens, at most 63"
FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def _check_name(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(NAME, value, re.ASCII):
        raise InputError("not a name for a campaign", got=repr(value)[:80], expected=NAME_EXPECTED)
    return value


def _check_model(value: object) -> object:
    if not isinstance(value, str):
        raise InputError("not a model", got=repr(value), expected="a name")
    if ":" in value:
        if not FACTORY.fullmatch(value):
            raise InputError("not a model of your own", got=repr(value), expected="package.module:factory")
    elif value not in known_workloads():
        raise UnknownNameError("model", value, known_workloads())
    return value


def _check_precision(value: object) -> object:
    # bool is an int: YAML's `precision: true` must not become a spelling.
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError("not a precision", got=repr(value), expected="a name such as fp32 or bf16-mixed")
    return parse_precision(value).name


def _whole_number(maximum: int) -> BeforeValidator:
    def check(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
            raise InputError("not usable", got=repr(value)[:80], expected=f"a whole number from 1 to {maximum:,}")
        return value

    return BeforeValidator(check)


def _check_list(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise InputError("not a list", got=repr(value)[:80], expected="a list, such as [1, 2]")
    return value


LIST = BeforeValidator(_check_list)
Model = Annotated[str, BeforeValidator(_check_model)]
PrecisionName = Annotated[str, BeforeValidator(_check_precision)]
Gpus = Annotated[int, _whole_number(MAX_GPUS)]
Batch = Annotated[int, _whole_number(MAX_BATCH)]
Steps = Annotated[int, _whole_number(10_000)]
Seconds = Annotated[float, BeforeValidator(parse_duration)]


class CellPattern(BaseModel):
    """Cells to leave out: those that agree in every key given here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Model | None = Field(None, title="Model")
    precision: PrecisionName | None = Field(None, title="Precision")
    gpus: Gpus | None = Field(None, title="GPUs", description="Number of ranks.")
    batch_size: Batch | None = Field(None, title="Batch size", description="Samples per GPU.")
    gradient_accumulation_steps: Batch | None = Field(None, title="Gradient accumulation steps")

    def matches(self, cell: GridCell) -> bool:
        """Whether ``cell`` agrees in every key that is given."""
        pairs = (
            (self.model, cell.model),
            (self.precision, cell.precision),
            (self.gpus, cell.world_size),
            (self.batch_size, cell.per_gpu_batch_size),
            (self.gradient_accumulation_steps, cell.gradient_accumulation_steps),
        )
        return all(wanted is None or wanted == value for wanted, value in pairs)


class CampaignSpec(BaseModel):
    """A set of cells (the product of the lists, less those excluded) and how to measure each."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="Campaign")

    name: Annotated[str, BeforeValidator(_check_name)] = Field(
        title="Name", description=f"{NAME_EXPECTED[0].upper()}{NAME_EXPECTED[1:]}; reports carry it.", pattern=NAME
    )
    models: Annotated[tuple[Model, ...], LIST] = Field(
        title="Models", description="Names of built-in workloads, or module:factory for your own.", min_length=1
    )
    precisions: Annotated[tuple[PrecisionName, ...], LIST] = Field(
        title="Precisions",
        description="fp32, tf32, amp_bf16, amp_fp16, bf16, fp16, or any spelling of a framework (16-mixed).",
        min_length=1,
    )
    gpus: Annotated[tuple[Gpus, ...], LIST] = Field(
        title="GPUs", description="Numbers of ranks; one per GPU or CPU worker.", min_length=1
    )
    batch_sizes: Annotated[tuple[Batch, ...], LIST] = Field(
        title="Batch sizes", description="Samples per GPU in one forward and backward pass.", min_length=1
    )
    gradient_accumulation_steps: Annotated[tuple[Batch, ...], LIST] = Field(
        (1,), title="Gradient accumulation steps", description="Micro-steps in one iteration.", min_length=1
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", title="Device", description="auto takes CUDA where there is a GPU, else the CPU."
    )
    data: str = Field(
        "precision-time-data",
        title="Data",
        description="Folder or URL (s3://bucket/prefix) of the timings dataset.",
        min_length=1,
        max_length=1024,
    )
    warmup_steps: Steps = Field(5, title="Warm-up steps", description="Iterations that are not counted, at least.")
    measured_steps: Steps = Field(20, title="Measured steps", description="Iterations that are counted.")
    seconds_per_cell: Seconds = Field(
        60.0,
        title="Seconds per cell",
        description='Cap on warm-up and measuring of one cell, in seconds (in files also "90s", "2m").',
        gt=0,
        le=3600,
    )
    timeout_per_cell: Seconds = Field(
        300.0,
        title="Time limit per cell",
        description="Seconds after which the ranks of a cell are killed, start-up included.",
        gt=0,
        le=24 * 3600,
    )
    memory_limit_bytes: int | None = Field(
        None,
        title="Memory limit",
        description="Bytes of host memory that one rank may take; none by default.",
        ge=64 * 2**20,
        strict=True,
    )
    max_attempts: int = Field(
        2, title="Attempts", description="Tries of a failing cell in one run.", ge=1, le=10, strict=True
    )
    exclude: Annotated[tuple[CellPattern, ...], LIST] = Field(
        (), title="Exclude", description="Cells to leave out, each by some of its values.", max_length=1000
    )

    @model_validator(mode="after")
    def _check_grid(self) -> "CampaignSpec":
        for name in ("models", "precisions", "gpus", "batch_sizes", "gradient_accumulation_steps"):
            values = getattr(self, name)
            twice = sorted({str(value) for value in values if values.count(value) > 1})
            if twice:
                raise InputError(f"{name} names the same thing twice", got=", ".join(twice), expected="each value once")
        if self.timeout_per_cell <= self.seconds_per_cell:
            raise InputError(
                "timeout_per_cell leaves no time to start",
                got=f"{self.timeout_per_cell:g} s",
                expected=f"more than seconds_per_cell, {self.seconds_per_cell:g} s",
            )
        if self._size > MAX_CELLS:
            raise InputError("the grid is too large", got=f"{self._size:,} cells", expected=f"at most {MAX_CELLS:,}")
        for index, pattern in enumerate(self.exclude):
            self._check_pattern(f"exclude[{index}]", pattern)
        if self.exclude and not self.cells():
            raise InputError("the grid is empty", got="every cell is excluded", expected="at least one cell")
        return self

    def _check_pattern(self, name: str, pattern: CellPattern) -> None:
        lists: dict[str, tuple[str | int, ...]] = {
            "model": self.models,
            "precision": self.precisions,
            "gpus": self.gpus,
            "batch_size": self.batch_sizes,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
        }
        stated = pattern.model_dump(exclude_none=True)
        if not stated:
            raise InputError(f"{name} excludes everything", got="no key", expected="at least one key with a value")
        for key, value in stated.items():
            if value not in lists[key]:
                raise InputError(
                    f"{name} matches no cell",
                    got=f"{key}: {value}",
                    expected=f"one of {', '.join(str(item) for item in lists[key][:20])}",
                )

    @property
    def _size(self) -> int:
        return math.prod(
            len(values)
            for values in (
                self.models, self.precisions, self.gpus, self.batch_sizes, self.gradient_accumulation_steps
            )
        )  # fmt: skip

    def cells(self) -> list[GridCell]:
        """The grid less ``exclude``: by model, small before large, the same list each time.

        The precisions of one configuration are neighbours, so that a speed-up compares measurements of nearly the
        same moment of the machine.
        """
        grid = itertools.product(
            self.models,
            sorted(self.gpus),
            sorted(self.batch_sizes),
            sorted(self.gradient_accumulation_steps),
            self.precisions,
        )
        cells = (
            GridCell(
                model=model,
                precision=precision,
                world_size=gpus,
                per_gpu_batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
            )
            for model, gpus, batch_size, accumulation, precision in grid
        )
        return [cell for cell in cells if not any(pattern.matches(cell) for pattern in self.exclude)]


class RetrainSpec(BaseModel):
    """What a retraining reads, how it validates, and where it publishes."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="Retraining")

    data: Annotated[
        str | None, Field(title="Data", description="URL or folder of the timings dataset.", min_length=1)
    ] = None
    public: Annotated[
        bool, Field(title="Public table", description="Train on the measurements that come with the package too.")
    ] = False
    measurements: Annotated[
        str | None,
        Field(title="Measurements", description="CSV or Parquet file with the public table's columns.", min_length=1),
    ] = None
    registry: str = Field(title="Registry", description="URL or folder of the artifact registry.", min_length=1)
    name: Annotated[str, Field(title="Artifact", description="Name to publish under.")] = "default"
    alias: Annotated[str, Field(title="Alias", description="Moved to the new version after it is published.")] = (
        "champion"
    )
    holdout_models: Annotated[
        tuple[str, ...], Field(title="Held-out models", description="Never trained on; reported as holdout.")
    ] = ()
    level: Annotated[
        float, Field(title="Interval level", description="Share of measurements inside.", ge=0.5, lt=1)
    ] = 0.9
    seed: Annotated[int, Field(title="Seed", ge=0, le=2**31 - 1)] = 0

    @model_validator(mode="after")
    def _check_sources(self) -> "RetrainSpec":
        if self.data is None and self.measurements is None and not self.public:
            raise InputError(
                "there is nothing to train on",
                got="neither data nor measurements nor public",
                expected="at least one of them",
            )
        return self


def read_campaign(path: str | Path, *, overrides: Mapping[str, Any] | None = None) -> CampaignSpec:
    """The campaign in a YAML, TOML or JSON file; ``overrides`` replace its keys (options of the command line).

    Raises ``InputError`` that lists every problem with file, line (YAML) and key, or ``NotFoundError``.
    """
    document = read_document(path)
    values = document.values | dict(overrides or {})
    return build_model(CampaignSpec, Document(document.name, values, document.lines))
