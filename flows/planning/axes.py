"""The axes of a campaign's grid: what each of their values may be, and the pattern that leaves cells out."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from precision_time.predictor.setup.precision import PRECISIONS, parse_precision
from precision_time.predictor.workloads.workload import known_workloads
from precision_time.storage.errors import InputError, UnknownNameError
from precision_time.storage.schema import CHECKPOINTING, COMPRESSION, OPTIONS, GridCell
from precision_time.tasks.casgd_cells.cells import GLM_STRATEGIES, check_glm_model, is_glm

__all__ = [
    "AXES", "AXIS", "AXIS_SCHEMA", "LIST", "Batch", "CellPattern", "Checkpointing", "Compression", "Gpus", "Model",
    "Models", "PrecisionName", "Precisions", "Steps", "Strategy", "Switch",
]  # fmt: skip

MAX_GPUS = 65_536
MAX_BATCH = 10_000_000

FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def _check_model(value: object) -> object:
    if not isinstance(value, str):
        raise InputError("not a model", got=repr(value), expected="a name")
    if ":" in value:
        if not FACTORY.fullmatch(value):
            raise InputError("not a model of your own", got=repr(value), expected="package.module:factory")
    elif is_glm(value):
        check_glm_model(value)
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


def _one_of(*known: bool | str) -> BeforeValidator:
    def check(value: object) -> object:
        # 1 and 0 equal True and False, and mean neither here.
        if value not in known or type(value) is not type(known[0]):
            raise InputError(
                "not usable",
                got=repr(value)[:80],
                expected=f"one of {', '.join(str(one).lower() for one in known)}",
            )
        return value

    return BeforeValidator(check)


def _check_list(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise InputError("not a list", got=repr(value)[:80], expected="a list, such as [1, 2]")
    return value


def _check_axis(value: object) -> object:
    # Not by pydantic's min_length: it counts the good values, and a bad one alone would read as an empty list as well.
    if not _check_list(value):
        raise InputError("an empty list", got=repr(value), expected="at least one value")
    return value


def _bounds(maximum: int) -> WithJsonSchema:
    return WithJsonSchema({"type": "integer", "minimum": 1, "maximum": maximum})


def _drop_down(*known: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "enum": list(known)})


def _chips(*known: str, other: dict[str, Any]) -> WithJsonSchema:
    """A list in the form: chips for ``known``, and behind a second button rows of text for what is no chip.

    Prefect's form shows chips only for items with an ``enum``, and its server holds a run's parameters against the
    same schema, so that a list of chips alone would refuse what a campaign file may say.
    """
    return WithJsonSchema(
        {
            "anyOf": [
                {"title": "Choose", "type": "array", "items": {"type": "string", "enum": list(known)}, "minItems": 1},
                {"title": "Type", "type": "array", "items": {"type": "string", **other}, "minItems": 1},
            ]
        }
    )


#: Only ddp is measured, and columns for CA-SGD; what else is a strategy is refused by name.
STRATEGIES = ("ddp", *GLM_STRATEGIES, "fsdp", "zero1", "zero2", "zero3")

LIST = BeforeValidator(_check_list)
AXIS = BeforeValidator(_check_axis)
#: Of an axis, for the form.
AXIS_SCHEMA: dict[str, Any] = {"minItems": 1}
Model = Annotated[str, BeforeValidator(_check_model)]
Models = Annotated[
    tuple[Model, ...], AXIS, _chips(*known_workloads(), other={"description": "A built-in name, or module:factory."})
]
PrecisionName = Annotated[str, BeforeValidator(_check_precision)]
Precisions = Annotated[
    tuple[PrecisionName, ...], AXIS, _chips(*PRECISIONS, other={"description": "Any spelling, such as 16-mixed."})
]
Gpus = Annotated[int, _whole_number(MAX_GPUS), _bounds(MAX_GPUS)]
Batch = Annotated[int, _whole_number(MAX_BATCH), _bounds(MAX_BATCH)]
Switch = Annotated[bool, _one_of(False, True)]
Checkpointing = Annotated[str, _one_of(*CHECKPOINTING), _drop_down(*CHECKPOINTING)]
Compression = Annotated[str, _one_of(*COMPRESSION), _drop_down(*COMPRESSION)]
Strategy = Annotated[str, _one_of(*STRATEGIES), _drop_down(*STRATEGIES)]
Steps = Annotated[int, _whole_number(10_000), _bounds(10_000)]


#: Key of a pattern -> the list of the campaign that it picks from.
AXES = {
    "model": "models",
    "precision": "precisions",
    "gpus": "gpus",
    "batch_size": "batch_sizes",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    **{name: name for name in OPTIONS},
    "strategy": "strategies",
}


class CellPattern(BaseModel):
    """Cells to leave out: those that agree in every key given here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Model | None = Field(None, title="Model")
    precision: PrecisionName | None = Field(None, title="Precision")
    gpus: Gpus | None = Field(None, title="GPUs", description="Number of ranks.")
    batch_size: Batch | None = Field(None, title="Batch size", description="Samples per GPU.")
    gradient_accumulation_steps: Batch | None = Field(None, title="Gradient accumulation steps")
    channels_last: Switch | None = Field(None, title="Channels last")
    compiled: Switch | None = Field(None, title="Compiled")
    checkpointing: Checkpointing | None = Field(None, title="Activation checkpointing")
    fused_optimizer: Switch | None = Field(None, title="Fused optimizer")
    compression: Compression | None = Field(None, title="Gradient compression")
    strategy: Strategy | None = Field(None, title="Strategy")

    def matches(self, cell: GridCell) -> bool:
        """Whether ``cell`` agrees in every key that is given."""
        pairs = (
            (self.model, cell.model),
            (self.precision, cell.precision),
            (self.gpus, cell.world_size),
            (self.batch_size, cell.per_gpu_batch_size),
            (self.gradient_accumulation_steps, cell.gradient_accumulation_steps),
            *((getattr(self, name), getattr(cell, name)) for name in (*OPTIONS, "strategy")),
        )
        return all(wanted is None or wanted == value for wanted, value in pairs)
