"""Run options: ways to run the same training, one record for each; grid, rows, form and labels all read these."""

from dataclasses import dataclass

__all__ = ["OPTION_NAMES", "RUN_OPTIONS", "RunOption", "RunOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOption:
    """One option: an axis of the grid, a field of ``RunOptions``, and a column of every row under the same name.

    ``choices`` are the values that a cell may have, the default first. ``title`` and ``description`` are those of the
    form. ``setup_field`` is the field of the predictor's ``TrainingSetup`` that takes a value other than the default.
    What a rank does about it is a function in ``tasks/ranks/run_options.py``.
    """

    name: str
    choices: tuple[bool, ...] | tuple[str, ...]
    title: str
    description: str
    setup_field: str

    @property
    def default(self) -> bool | str:
        """The value of plain eager training."""
        return self.choices[0]

    def label(self, value: bool | str) -> str:
        """``value`` in the label of a cell, e.g. ``channels-last`` or ``full-checkpointing``; empty for the default."""
        if value == self.default:
            return ""
        name = self.name.replace("_", "-")
        return name if value is True else f"{value}-{name}"


RUN_OPTIONS = (
    RunOption(
        name="channels_last",
        choices=(False, True),
        title="Channels last",
        description="Weights and images in channels-last memory order.",
        setup_field="implementation.channels_last",
    ),
    RunOption(
        name="compiled",
        choices=(False, True),
        title="Compiled",
        description="The model behind torch.compile.",
        setup_field="implementation.compiled",
    ),
    RunOption(
        name="checkpointing",
        choices=("none", "full"),
        title="Activation checkpointing",
        description="none, or full: repeated blocks keep their inputs and are computed again in the backward pass.",
        setup_field="implementation.checkpointing",
    ),
    RunOption(
        name="fused_optimizer",
        choices=(False, True),
        title="Fused optimizer",
        description="The optimizer's fused kernels.",
        setup_field="implementation.fused_kernels",
    ),
    RunOption(
        name="compression",
        choices=("none", "fp16", "bf16"),
        title="Gradient compression",
        description="Format of the gradients on the wire: none (their own), fp16 or bf16.",
        setup_field="precision.communicate",
    ),
)
OPTION_NAMES = tuple(option.name for option in RUN_OPTIONS)


# Without slots: a record inherits from this class and from one with slots, and two of those do not go together.
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run, one field for each of ``RUN_OPTIONS``; the defaults are plain eager training.

    A record names it before the class with its other fields: dataclasses take the fields of their bases from the last
    base to the first, so the columns of the options stand between those of that class and those of the record.
    """

    channels_last: bool = False
    compiled: bool = False
    checkpointing: str = "none"
    fused_optimizer: bool = False
    compression: str = "none"

    @property
    def changed_options(self) -> dict[str, bool | str]:
        """The options that are not at their default, by name."""
        values = {option.name: getattr(self, option.name) for option in RUN_OPTIONS}
        return {option.name: values[option.name] for option in RUN_OPTIONS if values[option.name] != option.default}

    @property
    def option_words(self) -> list[str]:
        """``changed_options`` as campaign files write them, e.g. ``compiled`` and ``checkpointing full``."""
        return [name if value is True else f"{name} {value}" for name, value in self.changed_options.items()]
