"""What a rank does for each run option: put it in force on a workload, or refuse the cell with the reason."""

import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from precision_time.storage.run_options import RUN_OPTIONS, RunOptions
from precision_time.tasks.ranks.buckets import WIRE_TYPES
from precision_time.tasks.ranks.refusals import CellRefusedError

__all__ = ["PreparedTraining", "check_complete", "checkpoint_blocks", "fuse_optimizer", "prepare_training"]


def _keep(value: Any) -> Any:
    return value


@dataclass(slots=True, kw_only=True)
class PreparedTraining:
    """The parts of a training that options change before DDP wraps the module.

    ``finish_optimizer`` and ``lay_out_batch`` take the workload's optimizer and batch and return those to use.
    ``wire_dtype`` is the format that gradients are compressed to, None for none. ``check_first_steps`` is called after
    the first steps and raises ``CellRefusedError`` when an option had no effect in them.
    """

    module: nn.Module
    device: torch.device
    world_size: int
    wire_dtype: torch.dtype | None = None
    lay_out_batch: Callable[[Any], Any] = _keep
    finish_optimizer: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = _keep
    check_first_steps: Callable[[], None] = lambda: None


def prepare_training(
    module: nn.Module, options: RunOptions, *, device: torch.device, world_size: int
) -> PreparedTraining:
    """Put ``options`` in force on ``module``, in place where they can; called by all ranks together.

    Raises ``CellRefusedError`` for an option that cannot be put in force here: none is left out silently.
    """
    training = PreparedTraining(module=module, device=device, world_size=world_size)
    changed = options.changed_options
    for name, apply in APPLIED.items():
        if name in changed:
            apply(training, changed[name])
    return training


def _apply_channels_last(training: PreparedTraining, value: bool | str) -> None:
    if not any(parameter.dim() == 4 for parameter in training.module.parameters()):
        raise CellRefusedError("channels_last has no effect", got="a model without a weight of four dimensions")
    training.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    training.lay_out_batch = _lay_out_batch


def _apply_checkpointing(training: PreparedTraining, value: bool | str) -> None:
    checkpoint_blocks(training.module)


def _apply_compiled(training: PreparedTraining, value: bool | str) -> None:
    """Put the module behind ``torch.compile`` with its default backend; it compiles in the first step."""
    reason = _compiler_missing(training.device)
    if reason is not None:
        raise CellRefusedError("torch.compile does not run here", got=reason)
    # Inside DDP: Dynamo leaves DDP's own forward to the interpreter, and with it a module that is a sequence.
    training.module = cast(nn.Module, torch.compile(training.module))
    training.check_first_steps = _check_compiled


def _apply_fused_optimizer(training: PreparedTraining, value: bool | str) -> None:
    training.finish_optimizer = fuse_optimizer


def _apply_compression(training: PreparedTraining, value: bool | str) -> None:
    """Let the communication hook send the format ``value``; a few values are all-reduced in it first."""
    training.wire_dtype = WIRE_TYPES[str(value)]
    if training.world_size == 1:
        return
    try:
        dist.all_reduce(torch.ones(8, dtype=training.wire_dtype, device=training.device))
    except (RuntimeError, ValueError, TypeError) as error:
        raise CellRefusedError(
            f"this backend does not send {training.wire_dtype}", got=str(error).splitlines()[0]
        ) from error


#: The functions that put an option in force when it is not at its default, in the order of the calls: blocks are
#: checkpointed before the whole module is compiled.
APPLIED: dict[str, Callable[[PreparedTraining, bool | str], None]] = {
    "channels_last": _apply_channels_last,
    "checkpointing": _apply_checkpointing,
    "compiled": _apply_compiled,
    "fused_optimizer": _apply_fused_optimizer,
    "compression": _apply_compression,
}


def check_complete(applied: Mapping[str, object]) -> None:
    """Raise ``TypeError`` unless ``applied`` has each of ``RUN_OPTIONS`` and nothing else."""
    unlike = set(applied) ^ {option.name for option in RUN_OPTIONS}
    if unlike:
        raise TypeError(f"APPLIED and RUN_OPTIONS differ in: {', '.join(sorted(unlike))}")


check_complete(APPLIED)


def _lay_out_batch(batch: Any) -> Any:
    """``batch`` with its tensors of four dimensions in channels-last order."""

    def lay_out(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 4:
            return leaf.contiguous(memory_format=torch.channels_last)
        return leaf

    return tree_map(lay_out, batch)


def checkpoint_blocks(module: nn.Module) -> str:
    """Keep only the inputs of blocks in the forward pass, and compute each block again in the backward pass.

    A block has layers of its own and is a child of a list or sequence that holds at least two of its class: the layers
    of a transformer, the residual blocks of a ResNet. In a model without blocks, the longest sequence of at least four
    layers is cut into segments, as many as the square root of its layers (Chen et al. 2016, arXiv:1604.06174), of which
    the last is kept. The checkpoints are the non-reentrant ones of ``torch.utils.checkpoint`` and keep the random
    state. Returns a description of the wrapped parts. Raises ``CellRefusedError`` for a model with neither.
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
    """The outermost repeated blocks below ``module``, without those inside of a block."""
    children = list(module.children())
    counts = Counter(type(child) for child in children)
    is_row = isinstance(module, nn.ModuleList | nn.Sequential)
    blocks: list[nn.Module] = []
    for child in children:
        inner = any(True for _ in child.children()) and not isinstance(child, nn.ModuleList)
        has_weights = any(True for _ in child.parameters())
        if is_row and counts[type(child)] >= 2 and inner and has_weights:
            blocks.append(child)
        else:
            blocks += _repeated_blocks(child)
    return blocks


def fuse_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer like ``optimizer`` with ``fused=True`` and otherwise equal settings.

    Raises ``CellRefusedError`` for a class without fused kernels, or parameters that these do not support.
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


def _compiler_missing(device: torch.device) -> str | None:
    """Why inductor has no compiler for ``device`` (Triton for a GPU, a C++ compiler for a CPU), or None if it has."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is not installed or does not know this GPU"
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        return str(error).splitlines()[0] or type(error).__name__
    return None


def _check_compiled() -> None:
    """Raise ``CellRefusedError`` if torch.compile has left all of the model to the interpreter."""
    from torch._dynamo.utils import counters

    if not counters["stats"].get("unique_graphs", 0):
        raise CellRefusedError("torch.compile has no effect", got="no graph was compiled")
