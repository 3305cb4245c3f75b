"""Network: one named network of the zoo at one input, and how to build it so that a walk can follow it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precision_time.storage.errors import InputError

__all__ = [
    "Built",
    "Missing",
    "Network",
    "classify",
    "count_buffer_bytes",
    "count_params",
    "image_batches",
    "label_loss",
    "skip_initialisation",
]

CLASSES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A module on the meta device, ``make_batch(samples)`` and ``loss_of(module, batch)``, a scalar."""

    module: nn.Module
    make_batch: Callable[[int], Any]
    loss_of: Callable[[nn.Module, Any], Tensor]
    #: layers, hidden_size, heads, kv_heads, ffn_size, vocab, sequence_length, experts, active_experts, where known
    sizes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A name of the zoo at ``task_input`` (an image's side, a length in tokens, ...).

    Names whose ``builds`` are equal share one network: it is built and walked once. ``params`` is what its publisher
    or the public table counts, None where nobody does; ``tolerance`` how far the built network may be from it.
    """

    name: str
    task_input: str
    source: str
    builds: str
    build: Callable[[], Built]
    params: float | None = None
    tolerance: float = 0.01
    note: str = ""


class Missing(NamedTuple):
    """A name of the table at one input that has no network, and why."""

    name: str
    task_input: str
    rows: int
    reason: str


def image_batches(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Batches of images [B, *shape] with a class each."""

    def make_batch(samples: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(samples, *shape), torch.zeros(samples, dtype=torch.long)

    return make_batch


def label_loss(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy summed over all outputs of a network: a tensor [B, classes, ...], or tuples and dicts of them.

    Images of classes [B, classes, H, W] are scored at every pixel.
    """
    if isinstance(output, Tensor):
        output = [output]
    values = output.values() if isinstance(output, Mapping) else output
    losses = []
    for value in values:
        if isinstance(value, Tensor):
            target = labels.reshape(-1, *[1] * (value.dim() - 2)).expand(len(labels), *value.shape[2:])
            losses.append(F.cross_entropy(value, target))
        elif value is not None:
            losses.append(label_loss(value, labels))
    if not losses:
        raise InputError("a network gives no scores", got=type(output).__name__, expected="tensors [B, classes]")
    return torch.stack(losses).sum()


def classify(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a classifier over a batch of ``image_batches``."""
    images, labels = batch
    return label_loss(module(images), labels)


_INITIALISERS = tuple(
    name
    for name in dir(nn.init)
    if name.endswith("_") and not name.startswith("_") and callable(getattr(nn.init, name))
)
_Made = TypeVar("_Made")


def build_light(make: Callable[[], nn.Module], *, holders: Iterable[Any] = (), for_real: bool = False) -> nn.Module:
    """The module that ``make`` makes, on the meta device: with shapes and no memory.

    One that computes with values while it is made (or ``for_real``) is made on the CPU without initial values first;
    ``holders`` are modules with initialisers of their own.
    """
    with skip_initialisation(holders):
        try:
            module = make() if for_real else _on_meta(make)
        except (RuntimeError, NotImplementedError):
            module = make()
    return module.to(torch.device("meta"))


def _on_meta(make: Callable[[], _Made]) -> _Made:
    """What ``make`` makes on the meta device.

    Ranges stay on the CPU: many networks read their rates of dropped paths out of one.
    """
    ranges = torch.linspace

    def range_on_cpu(*args: Any, **options: Any) -> Tensor:
        return ranges(*args, **(options | {"device": "cpu"}))

    torch.linspace = range_on_cpu
    try:
        with torch.device("meta"):
            return make()
    finally:
        torch.linspace = ranges


@contextmanager
def skip_initialisation(modules: Iterable[Any] = ()) -> Iterator[None]:
    """Leave new parameters as memory comes: pages that nobody writes take no memory, and no time.

    ``modules`` are those that hold initialisers of ``torch.nn.init`` (or their own of the same names) under their own
    globals.
    """
    saved: list[tuple[Any, str, Any]] = []

    def leave(tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    names = {*_INITIALISERS, "trunc_normal_tf_", "lecun_normal_", "variance_scaling_"}
    for holder in (nn.init, *modules):
        for name in names:
            if callable(known := getattr(holder, name, None)):
                saved.append((holder, name, known))
                setattr(holder, name, leave)
    try:
        yield
    finally:
        for holder, name, known in saved:
            setattr(holder, name, known)


def count_params(module: nn.Module, *, trained: bool = False) -> int:
    """Parameters of a module (those to be ``trained``), shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not trained)


def count_buffer_bytes(module: nn.Module) -> int:
    """Bytes of a module's buffers."""
    return sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
