"""Ways to run the same training: memory layout, torch.compile, activation checkpointing, fused optimizer, wire format.

Each is put in force or refused with the reason; none is ever left out silently.
"""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from precision_time.storage.schema import GridCell
from precision_time.tasks.ranks.buckets import WIRE_TYPES
from precision_time.tasks.ranks.refusals import CellRefusedError

__all__ = [
    "RunOptions",
    "arrange_module",
    "check_compiled",
    "check_wire",
    "checkpoint_blocks",
    "compile_module",
    "fuse_optimizer",
    "lay_out_batch",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a cell, under the names of ``GridCell``; the defaults are plain eager training."""

    channels_last: bool = False
    compiled: bool = False
    checkpointing: str = "none"
    fused_optimizer: bool = False
    compression: str = "none"

    @classmethod
    def of(cls, cell: GridCell) -> "RunOptions":
        """What ``cell`` asks for."""
        return cls(
            channels_last=cell.channels_last,
            compiled=cell.compiled,
            checkpointing=cell.checkpointing,
            fused_optimizer=cell.fused_optimizer,
            compression=cell.compression,
        )

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """The format that gradients are compressed to; None for none."""
        return None if self.compression == "none" else WIRE_TYPES[self.compression]


def arrange_module(module: nn.Module, options: RunOptions) -> None:
    """Put layout and checkpointing in force on ``module``, in place; raises ``CellRefusedError`` where it cannot."""
    if options.channels_last:
        if not any(parameter.dim() == 4 for parameter in module.parameters()):
            raise CellRefusedError("channels_last has no effect", got="a model without a weight of four dimensions")
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if options.checkpointing != "none":
        checkpoint_blocks(module)


def lay_out_batch(batch: Any) -> Any:
    """``batch`` with its tensors of four dimensions in channels-last order."""

    def lay_out(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 4:
            return leaf.contiguous(memory_format=torch.channels_last)
        return leaf

    return tree_map(lay_out, batch)


def checkpoint_blocks(module: nn.Module) -> str:
    """Keep only the inputs of blocks in the forward pass, and compute each block again in the backward pass.

    A block is a child of a list or sequence that holds at least two of its class, and has layers of its own: the
    layers of a transformer, the residual blocks of a ResNet. A model without any, but with a sequence of at least four
    layers, is cut there into the square root of their number of segments (Chen et al. 2016, arXiv:1604.06174), of which
    the last is kept. Non-reentrant checkpoints of ``torch.utils.checkpoint``, random state kept. Returns what was
    wrapped. Raises ``CellRefusedError`` for a model that has neither.
    """
    blocks = _repeated_blocks(module)
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if blocks:
        return f"{len(blocks)} blocks of {', '.join(sorted({type(block).__name__ for block in blocks}))}"
    sequences = [part for part in module.modules() if type(part) is nn.Sequential and len(part) >= 4]
    if not sequences:
        raise CellRefusedError("this model has no blocks to checkpoint", got="no repeated block, no long sequence")
    longest = max(sequences, key=len)
    segments = math.isqrt(len(longest))
    longest.forward = functools.partial(  # type: ignore[method-assign]
        checkpoint_sequential, list(longest), segments, use_reentrant=False
    )
    return f"a sequence of {len(longest)} layers in {segments} segments"


def _repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks below ``module``; what lies inside a block is not looked at."""
    children = list(module.children())
    counts = Counter(type(child) for child in children)
    is_row = isinstance(module, nn.ModuleList | nn.Sequential)
    found: list[nn.Module] = []
    for child in children:
        inner = any(True for _ in child.children()) and not isinstance(child, nn.ModuleList)
        has_weights = any(True for _ in child.parameters())
        if is_row and counts[type(child)] >= 2 and inner and has_weights:
            found.append(child)
        else:
            found += _repeated_blocks(child)
    return found


def fuse_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """``optimizer`` made anew with ``fused=True`` and otherwise equal settings.

    Raises ``CellRefusedError`` for a class without fused kernels, or parameters that they do not take.
    """
    kind = type(optimizer)
    known = set(inspect.signature(kind.__init__).parameters) - {"self", "params", "fused", "foreach"}
    if "fused" not in optimizer.defaults:
        raise CellRefusedError("the optimizer has no fused kernels", got=kind.__name__)
    groups = [
        {name: value for name, value in group.items() if name in known or name == "params"}
        for group in optimizer.param_groups
    ]
    settings = {name: value for name, value in optimizer.defaults.items() if name in known}
    build = cast(Callable[..., torch.optim.Optimizer], kind)
    try:
        return build(groups, **settings, fused=True)
    except (RuntimeError, ValueError, TypeError) as error:
        raise CellRefusedError(f"fused {kind.__name__} does not run here", got=str(error).splitlines()[0]) from error


def compile_module(module: nn.Module, *, device: torch.device) -> nn.Module:
    """``module`` behind ``torch.compile`` with its default backend; it compiles in the first step.

    Raises ``CellRefusedError`` when there is nothing to compile with.
    """
    reason = _compiler_missing(device)
    if reason is not None:
        raise CellRefusedError("torch.compile does not run here", got=reason)
    return cast(nn.Module, torch.compile(module))


def _compiler_missing(device: torch.device) -> str | None:
    """Why inductor cannot make kernels for ``device``: Triton for a GPU, a C++ compiler for a CPU; else None."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is not installed or does not know this GPU"
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        return str(error).splitlines()[0] or type(error).__name__
    return None


def check_compiled() -> None:
    """After the first steps: raise ``CellRefusedError`` if torch.compile left all of the model to the interpreter."""
    from torch._dynamo.utils import counters

    if not counters["stats"].get("unique_graphs", 0):
        raise CellRefusedError("torch.compile has no effect", got="no graph was compiled")


def check_wire(dtype: torch.dtype, *, device: torch.device) -> None:
    """All-reduce a few values in ``dtype``; raise ``CellRefusedError`` where the backend cannot. All ranks together."""
    try:
        dist.all_reduce(torch.ones(8, dtype=dtype, device=device))
    except (RuntimeError, ValueError, TypeError) as error:
        raise CellRefusedError(f"this backend does not send {dtype}", got=str(error).splitlines()[0]) from error
