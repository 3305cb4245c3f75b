"""WorkloadFeatures: what one sample of a model costs, from a shipped card or from a walk over the module."""

import functools
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["WorkloadFeatures", "find_workload", "known_workloads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadFeatures:
    """A model with its input, as the closed forms and the learner see it.

    FLOPs count 2 per multiply-add and are of the forward pass of one sample; bytes are what fp32 eager execution
    reads and writes. ``*_fixed`` is the part that does not grow with the batch (reading weights), ``*_per_sample``
    the part that does.
    """

    name: str
    family: str
    task_input: str
    optimizer: str
    params: int
    parameter_tensors: int
    #: forward FLOPs of one sample in matrix products, convolutions and attention
    forward_flops_per_sample: float
    #: backward FLOPs of one sample, as counted (the first layer needs no input gradient)
    backward_flops_per_sample: float
    #: shares of the forward FLOPs in convolutions and in attention; the rest is dense products
    convolution_flops_share: float
    attention_flops_share: float
    forward_bytes_per_sample: float
    forward_bytes_fixed: float
    backward_bytes_per_sample: float
    backward_bytes_fixed: float
    #: dispatched operations: what an eager framework launches
    forward_ops: int
    backward_ops: int
    #: where the numbers come from
    source: str = "counted"

    def __post_init__(self) -> None:
        for name in ("params", "forward_flops_per_sample", "forward_ops"):
            if not getattr(self, name) > 0:
                raise InputError(
                    f"{name} of workload {self.name} is not usable",
                    got=getattr(self, name),
                    expected="a positive number",
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "WorkloadFeatures":
        """The inverse of ``to_dict``; raises ``InputError`` for missing or unknown fields."""
        try:
            return cls(**values)
        except TypeError as error:
            raise InputError(
                "a workload card does not fit",
                got=str(error),
                expected="the fields of WorkloadFeatures",
                fix="count the workload again with this version",
            ) from error


@functools.cache
def known_workloads() -> dict[str, WorkloadFeatures]:
    """The shipped cards by name (``predictor/data/workloads.toml``)."""
    text = resources.files("precision_time.predictor").joinpath("data/workloads.toml").read_text(encoding="utf-8")
    return {name: WorkloadFeatures.from_dict({"name": name, **card}) for name, card in tomllib.loads(text).items()}


def find_workload(name: str, *, measured: Iterable[WorkloadFeatures] = ()) -> WorkloadFeatures:
    """The card called ``name``: from ``measured`` (what an artifact carries) first, then from the shipped ones.

    Raises ``UnknownNameError`` with the nearest three names.
    """
    if not isinstance(name, str):
        raise InputError("not a model", got=repr(name), expected="a name")
    cards = known_workloads() | {card.name: card for card in measured}
    if name not in cards:
        raise UnknownNameError("model", name, cards, fix="name a known model, or measure yours in a campaign first")
    return cards[name]
