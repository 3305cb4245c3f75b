"""Network: one named network of the zoo at one input, and how to build it for a walk."""

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
    """A module on the meta device with its batches and its loss, a scalar of a module and a batch."""

    module: nn.Module
    make_batch: Callable[[int], Any]
    loss_of: Callable[[nn.Module, Any], Tensor]
    #: the known ones of ``workloads.zoo.SIZES``
    sizes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A name of the zoo at ``task_input`` (the side of an image, a length in tokens, ...).

    Names with equal ``builds`` share one network, which is built and walked once. ``params`` is the count of its
    publisher or of the public table, None without one; ``tolerance`` is the largest relative difference from it.
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
    """A name of the public table at one input without a network, its rows, and the reason."""

    name: str
    task_input: str
    rows: int
    reason: str


def image_batches(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """A maker of batches of images [B, *shape] with one class each."""

    def make_batch(samples: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(samples, *shape), torch.zeros(samples, dtype=torch.long)

    return make_batch


def label_loss(output: Any, labels: Tensor) -> Tensor:
    """Cross-entropy summed over all outputs of a network: a tensor [B, classes, ...], or a tuple or dict of such.

    Outputs [B, classes, H, W] are scored at every pixel.
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
        raise InputError("the network returns no scores", got=type(output).__name__, expected="tensors [B, classes]")
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
_Module = TypeVar("_Module")


def build_light(make: Callable[[], nn.Module], *, holders: Iterable[Any] = (), for_real: bool = False) -> nn.Module:
    """Build the module that ``make`` returns on the meta device: with shapes and no memory.

    A module that computes with values while it is built (or ``for_real``) is built on the CPU first, without initial
    values. ``holders`` are modules of Python with initialisers of their own.
    """
    with skip_initialisation(holders):
        try:
            module = make() if for_real else _on_meta(make)
        except (RuntimeError, NotImplementedError):
            module = make()
    return module.to(torch.device("meta"))


def _on_meta(make: Callable[[], _Module]) -> _Module:
    """Call ``make`` with the meta device as default, and ``torch.linspace`` on the CPU.

    Many networks read the rates at which they drop paths out of such a range.
    """
    linspace = torch.linspace

    def linspace_on_cpu(*args: Any, **options: Any) -> Tensor:
        return linspace(*args, **(options | {"device": "cpu"}))

    torch.linspace = linspace_on_cpu
    try:
        with torch.device("meta"):
            return make()
    finally:
        torch.linspace = linspace


@contextmanager
def skip_initialisation(holders: Iterable[Any] = ()) -> Iterator[None]:
    """Leave new parameters uninitialised: memory that is never written costs nothing, and no time.

    ``holders`` are modules of Python that have initialisers of ``torch.nn.init`` (or their own of the same names)
    among their globals.
    """
    replaced: list[tuple[Any, str, Any]] = []

    def leave(tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    names = {*_INITIALISERS, "trunc_normal_tf_", "lecun_normal_", "variance_scaling_"}
    for holder in (nn.init, *holders):
        for name in names:
            if callable(initialiser := getattr(holder, name, None)):
                replaced.append((holder, name, initialiser))
                setattr(holder, name, leave)
    try:
        yield
    finally:
        for holder, name, initialiser in replaced:
            setattr(holder, name, initialiser)


def count_params(module: nn.Module, *, trained: bool = False) -> int:
    """Parameters of a module, shared ones once; ``trained``: only those with gradients."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad or not trained)


def count_buffer_bytes(module: nn.Module) -> int:
    """Bytes of a module's buffers."""
    return sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
