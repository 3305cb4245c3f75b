"""CampaignSpec: the cells of a campaign and how to measure them, checked; and the grid of these cells."""

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from precision_time.flows.clusters.settings import ClusterName, SlurmOptions
from precision_time.flows.ground.settings_file import Document, build_model, parse_duration, read_document
from precision_time.flows.planning.axes import (
    AXES,
    AXIS,
    AXIS_SCHEMA,
    LIST,
    Batch,
    CellPattern,
    Gpus,
    Models,
    Precisions,
    Steps,
    Strategy,
    add_options,
    choice_of,
)  # fmt: skip
from precision_time.storage.errors import InputError
from precision_time.storage.run_options import OPTION_NAMES, RunOption
from precision_time.storage.schema import GridCell

__all__ = ["MAX_CELLS", "CampaignSpec", "CellPattern", "read_campaign"]

#: A larger plan is a typing error: the start-up of its ranks alone would take days.
MAX_CELLS = 100_000

NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
NAME_EXPECTED = "lower-case letters, digits and hyphens, at most 63"


def _check_name(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(NAME, value, re.ASCII):
        raise InputError("not a name for a campaign", got=repr(value)[:80], expected=NAME_EXPECTED)
    return value


Seconds = Annotated[float, BeforeValidator(parse_duration)]


class _Axes(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, title="Campaign")

    name: Annotated[str, BeforeValidator(_check_name)] = Field(
        title="Name", description=f"{NAME_EXPECTED[0].upper()}{NAME_EXPECTED[1:]}; reports carry it.", pattern=NAME
    )
    models: Models = Field(title="Models", description="Names of built-in workloads, or module:factory for your own.")
    precisions: Precisions = Field(
        title="Precisions",
        description="fp32, tf32, amp_bf16, amp_fp16, bf16, fp16, or any spelling of a framework (16-mixed).",
    )
    gpus: Annotated[tuple[Gpus, ...], AXIS] = Field(
        title="GPUs", description="Numbers of ranks; one per GPU or CPU worker.", json_schema_extra=AXIS_SCHEMA
    )
    batch_sizes: Annotated[tuple[Batch, ...], AXIS] = Field(
        title="Batch sizes",
        description="Samples per GPU in one forward and backward pass.",
        json_schema_extra=AXIS_SCHEMA,
    )
    gradient_accumulation_steps: Annotated[tuple[Batch, ...], AXIS] = Field(
        (1,),
        title="Gradient accumulation steps",
        description="Micro-steps in one iteration.",
        json_schema_extra=AXIS_SCHEMA,
    )


def _option_axis(option: RunOption) -> tuple[Any, Any]:
    values = Field((option.default,), title=option.title, description=option.description, json_schema_extra=AXIS_SCHEMA)
    return Annotated[tuple[choice_of(option), ...], AXIS], values  # type: ignore[misc]


if not TYPE_CHECKING:  # a type checker takes no class that is made while the program runs
    _Axes = add_options(_Axes, _option_axis)


class CampaignSpec(_Axes):
    """A set of cells (the product of the lists, less those excluded) and how to measure each."""

    strategies: Annotated[tuple[Strategy, ...], AXIS] = Field(
        ("ddp",),
        title="Strategies",
        description="How ranks share the work: ddp; cells of any other are recorded as refused.",
        json_schema_extra=AXIS_SCHEMA,
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
    traced_steps: int = Field(
        0,
        title="Traced steps",
        description="Steps after the measured ones that go into a Chrome trace of rank 0, in traces/ of the data; "
        "none by default. CA-SGD cells have none.",
        ge=0,
        le=10,
        strict=True,
    )
    max_trace_bytes: int = Field(
        2**30,
        title="Traces at most",
        description="Bytes of traces in the data after which cells are measured without one.",
        ge=0,
        strict=True,
    )
    max_attempts: int = Field(
        2, title="Attempts", description="Tries of a failing cell in one run.", ge=1, le=10, strict=True
    )
    max_hours: float | None = Field(
        None,
        title="Hours at most",
        description="Hours of one run after which no cell is started; running cells are finished.",
        gt=0,
        strict=True,
        le=10_000,
    )
    max_cells: int | None = Field(
        None, title="Cells at most", description="Cells that one run tries; all by default.", ge=1, strict=True
    )
    max_failures: int | None = Field(
        None,
        title="Failures at most",
        description="Failed cells of one run after which no cell is started; any number by default.",
        ge=1,
        strict=True,
    )
    budget_cells: int | None = Field(
        None,
        title="Adaptive budget",
        description="Cells to record in all, chosen where a predictor fitted on the recorded ones is least sure; "
        "the whole grid by default.",
        ge=1,
        strict=True,
    )
    cells_at_once: int | None = Field(
        None,
        title="Cells at once",
        description="Cells measured side by side; by default one a host on CPUs, on GPUs as many as fit.",
        ge=1,
        le=256,
        strict=True,
    )
    accept_changes: bool = Field(
        False,
        title="Accept changes",
        strict=True,
        description="Go on although recorded cells were measured with other settings, or other code of your model.",
    )
    gpus_per_node: Gpus | None = Field(
        None,
        title="GPUs per node",
        description="Ranks that stand on one host at most: wider cells spread evenly over several; by default all "
        "ranks of a cell stand on one.",
    )
    cluster: ClusterName = Field(
        "auto",
        title="Cluster",
        description="local, local-cuda, slurm, or tcp://host:port of a running Dask scheduler; auto is local or "
        "local-cuda by the device.",
    )
    slurm: SlurmOptions | None = Field(
        None, title="Slurm", description="Options of the jobs of cluster: slurm; by default those of the cluster."
    )
    scratch: str | None = Field(
        None,
        title="Scratch",
        description="Folder for the files of running cells; workers on other hosts must see it. By default a "
        "temporary one, or the folder scratch beside the data where the cluster is not local.",
        min_length=1,
        max_length=1024,
    )
    workers_timeout: Seconds = Field(
        120.0,
        title="Wait for workers",
        description='Seconds that the workers may take to appear (in files also "90s", "2h").',
        gt=0,
        le=7 * 24 * 3600,
    )
    exclude: Annotated[tuple[CellPattern, ...], LIST] = Field(
        (), title="Exclude", description="Cells to leave out, each by some of its values.", max_length=1000
    )
    retrain_after: bool = Field(
        False,
        title="Retrain after",
        strict=True,
        description="Train on the data when new cells were recorded, and publish what passes the gate.",
    )
    registry: str | None = Field(
        None,
        title="Registry",
        description="Folder or URL of the artifact registry that retraining publishes to.",
        min_length=1,
        max_length=1024,
    )

    @model_validator(mode="after")
    def _check_grid(self) -> "CampaignSpec":
        for name in AXES.values():
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
        if self.retrain_after and self.registry is None:
            raise InputError(
                "retrain_after has nowhere to publish", got="no registry", expected="registry: with a folder or a URL"
            )
        self._check_cluster()
        if self._size > MAX_CELLS:
            raise InputError("the grid is too large", got=f"{self._size:,} cells", expected=f"at most {MAX_CELLS:,}")
        for index, pattern in enumerate(self.exclude):
            self._check_pattern(f"exclude[{index}]", pattern)
        if self.exclude and not self.cells():
            raise InputError("the grid is empty", got="every cell is excluded", expected="at least one cell")
        return self

    def _check_cluster(self) -> None:
        if (self.cluster, self.device) in {("local", "cuda"), ("local-cuda", "cpu")}:
            raise InputError(
                "cluster and device do not fit each other",
                got=f"cluster: {self.cluster}, device: {self.device}",
                expected="local with cpu, local-cuda with cuda, or auto",
            )
        if self.slurm is not None and self.cluster != "slurm":
            raise InputError(
                "slurm has options for another cluster", got=f"cluster: {self.cluster}", expected="cluster: slurm"
            )
        uneven = sorted(gpus for gpus in self.gpus if gpus % self._nodes(gpus))
        if uneven:
            raise InputError(
                "the ranks do not divide over the nodes",
                got=f"gpus: {uneven[0]}, gpus_per_node: {self.gpus_per_node}",
                expected="as many ranks on every node",
            )

    def _nodes(self, gpus: int) -> int:
        return 1 if self.gpus_per_node is None else math.ceil(gpus / self.gpus_per_node)

    def _check_pattern(self, name: str, pattern: CellPattern) -> None:
        lists: dict[str, tuple[str | int, ...]] = {key: getattr(self, name) for key, name in AXES.items()}
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
        return math.prod(len(values) for values in (getattr(self, name) for name in AXES.values()))

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
            *(getattr(self, AXES[name]) for name in ("strategy", *OPTION_NAMES)),
            self.precisions,
        )
        cells = (
            GridCell(
                model=model,
                precision=precision,
                world_size=gpus,
                nodes=self._nodes(gpus),
                per_gpu_batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
                strategy=strategy,
                **dict(zip(OPTION_NAMES, options, strict=True)),
            )
            for model, gpus, batch_size, accumulation, strategy, *options, precision in grid
        )
        return [cell for cell in cells if not any(pattern.matches(cell) for pattern in self.exclude)]


def read_campaign(path: str | Path, *, overrides: Mapping[str, Any] | None = None) -> CampaignSpec:
    """The campaign in a YAML, TOML or JSON file; ``overrides`` (command line options) replace its keys.

    Raises ``InputError`` that lists every problem with file, line (YAML) and key, or ``NotFoundError``.
    """
    document = read_document(path)
    values = document.values | dict(overrides or {})
    return build_model(CampaignSpec, Document(document.name, values, document.lines))
