"""The axes of a campaign's grid: the types of their values, and the pattern that excludes cells."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, create_model

from precision_time.predictor.setup.precision import PRECISIONS, parse_precision
from precision_time.predictor.workloads.workload import known_workloads
from precision_time.storage.errors import InputError
from precision_time.storage.run_options import OPTION_NAMES, RUN_OPTIONS, RunOption
from precision_time.storage.schema import GridCell
from precision_time.tasks.work_kinds import WORK_KINDS, kind_of

__all__ = [
    "AXES", "AXIS", "AXIS_SCHEMA", "LIST", "Batch", "CellPattern", "Gpus", "Model", "Models", "PrecisionName",
    "Precisions", "Steps", "Strategy", "add_options", "choice_of",
]  # fmt: skip

MAX_GPUS = 65_536
MAX_BATCH = 10_000_000


def _check_model(value: object) -> object:
    if not isinstance(value, str):
        raise InputError("not a model", got=repr(value), expected="a name")
    kind_of(value).check_model(value)
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
        # 1 and 0 equal True and False, and are refused here.
        if value not in known or type(value) is not type(known[0]):
            raise InputError(
                "not usable",
                got=repr(value)[:80],
                expected=f"one of {', '.join(str(choice).lower() for choice in known)}",
            )
        return value

    return BeforeValidator(check)


def _check_list(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise InputError("not a list", got=repr(value)[:80], expected="a list, such as [1, 2]")
    return value


def _check_axis(value: object) -> object:
    # Not by pydantic's min_length, which counts valid values: a single bad one would also be reported as an empty list.
    if not _check_list(value):
        raise InputError("an empty list", got=repr(value), expected="at least one value")
    return value


def _bounds(maximum: int) -> WithJsonSchema:
    return WithJsonSchema({"type": "integer", "minimum": 1, "maximum": maximum})


def _drop_down(*known: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "enum": list(known)})


def _chips(*known: str, other: dict[str, Any]) -> WithJsonSchema:
    """A list in the form: chips for ``known``, and behind a second button rows of text for any other value.

    Prefect's form shows chips only for items with an ``enum``, and its server checks a run's parameters by the same
    schema, so that chips alone would refuse some values that a campaign file may have.
    """
    return WithJsonSchema(
        {
            "anyOf": [
                {"title": "Choose", "type": "array", "items": {"type": "string", "enum": list(known)}, "minItems": 1},
                {"title": "Type", "type": "array", "items": {"type": "string", **other}, "minItems": 1},
            ]
        }
    )


#: Those that are measured, and others whose cells are refused by name.
STRATEGIES = (*(name for kind in reversed(WORK_KINDS) for name in kind.strategies), "fsdp", "zero1", "zero2", "zero3")

LIST = BeforeValidator(_check_list)
AXIS = BeforeValidator(_check_axis)
#: Part of the JSON schema of every axis.
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
Strategy = Annotated[str, _one_of(*STRATEGIES), _drop_down(*STRATEGIES)]
Steps = Annotated[int, _whole_number(10_000), _bounds(10_000)]


#: Key of a pattern -> the list of the campaign that it picks from.
AXES = {
    "model": "models",
    "precision": "precisions",
    "gpus": "gpus",
    "batch_size": "batch_sizes",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    **{name: name for name in OPTION_NAMES},
    "strategy": "strategies",
}


def choice_of(option: RunOption) -> Any:
    """The type of one value of ``option`` in a campaign."""
    checked = _one_of(*option.choices)
    if isinstance(option.default, bool):
        return Annotated[bool, checked]
    return Annotated[str, checked, _drop_down(*map(str, option.choices))]


def add_options(base: type[BaseModel], field_of: Callable[[RunOption], tuple[Any, Any]]) -> type[BaseModel]:
    """``base`` with a field for each run option: ``field_of`` gives its type and its ``Field``."""
    fields: dict[str, Any] = {option.name: field_of(option) for option in RUN_OPTIONS}
    return create_model(base.__name__, __base__=base, __module__=base.__module__, **fields)


class _CellKeys(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Model | None = Field(None, title="Model")
    precision: PrecisionName | None = Field(None, title="Precision")
    gpus: Gpus | None = Field(None, title="GPUs", description="Number of ranks.")
    batch_size: Batch | None = Field(None, title="Batch size", description="Samples per GPU.")
    gradient_accumulation_steps: Batch | None = Field(None, title="Gradient accumulation steps")


if not TYPE_CHECKING:  # a type checker takes no class that is made while the program runs
    _CellKeys = add_options(_CellKeys, lambda option: (choice_of(option) | None, Field(None, title=option.title)))


class CellPattern(_CellKeys):
    """Cells to leave out: those that agree in every key given here."""

    strategy: Strategy | None = Field(None, title="Strategy")

    def matches(self, cell: GridCell) -> bool:
        """Whether ``cell`` agrees in every key that is given."""
        pairs = (
            (self.model, cell.model),
            (self.precision, cell.precision),
            (self.gpus, cell.world_size),
            (self.batch_size, cell.per_gpu_batch_size),
            (self.gradient_accumulation_steps, cell.gradient_accumulation_steps),
            *((getattr(self, name), getattr(cell, name)) for name in (*OPTION_NAMES, "strategy")),
        )
        return all(wanted is None or wanted == value for wanted, value in pairs)
