"""Walk a torch module once forward and once backward without running it, and count FLOPs, bytes and operations."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from precision_time.predictor.cards import find_family
from precision_time.predictor.workload import WorkloadFeatures
from precision_time.storage.errors import InputError

__all__ = ["PhaseCount", "count_phases", "count_workload"]

#: Two batch sizes give a line; above 1, since a dimension of one broadcasts and batch norm refuses a single value.
SMALL_BATCH, LARGE_BATCH = 2, 4

#: A flash kernel keeps no score matrix: its backward makes it again and then takes four products (5 for 2).
FLASH_BACKWARD_RATIO = 2.5

ATTENTION_FORWARD = {
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
}
ATTENTION_BACKWARD = {f"{name}_backward" for name in ATTENTION_FORWARD}

#: Which argument of a matrix product is the left one; the inner dimension is its last.
PRODUCT_LEFT = {
    "aten::mm": 0, "aten::bmm": 0, "aten::mv": 0, "aten::dot": 0,
    "aten::addmm": 1, "aten::baddbmm": 1, "aten::addbmm": 1, "aten::addmv": 1,
}  # fmt: skip

#: Operations that read of their table only as much as they give out.
GATHERS = {"aten::embedding", "aten::gather", "aten::index", "aten::index_select", "aten::nll_loss_forward"}

#: Operations that overwrite their first argument without reading it.
OVERWRITES = {"aten::copy_", "aten::fill_", "aten::zero_"}


@dataclass(slots=True)
class PhaseCount:
    """What one phase (forward with loss, or backward) does: FLOPs at 2 per multiply-add, bytes, launched operations."""

    flops: float = 0.0
    convolution_flops: float = 0.0
    attention_flops: float = 0.0
    bytes: int = 0
    ops: int = 0


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds every dispatched operation to ``phase``."""

    def __init__(self, phase: PhaseCount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = phase

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        inputs = _tensors((args, kwargs))
        outputs = _tensors(result)
        if _launches(name, func, inputs, outputs):
            self.phase.ops += 1
            self.phase.bytes += _moved_bytes(name, inputs, outputs)
            self._add_flops(name, args, outputs)
        return result

    def _add_flops(self, name: str, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
        if name in PRODUCT_LEFT:
            self.phase.flops += _product_flops(args[PRODUCT_LEFT[name]], name=name, output=outputs[0])
        elif name == "aten::convolution":
            flops = _convolution_flops(args[0], args[1], output=outputs[0], transposed=args[6])
            self.phase.flops += flops
            self.phase.convolution_flops += flops
        elif name == "aten::convolution_backward":
            grad_output, image, weight = args[:3]
            once = _convolution_flops(image, weight, output=grad_output, transposed=args[7])
            # output_mask = (input, weight, bias); the bias needs no product.
            flops = once * args[10][:2].count(True)
            self.phase.flops += flops
            self.phase.convolution_flops += flops
        elif name in ATTENTION_FORWARD:
            flops = _attention_flops(*args[:3])
            self.phase.flops += flops
            self.phase.attention_flops += flops
        elif name in ATTENTION_BACKWARD:
            flops = FLASH_BACKWARD_RATIO * _attention_flops(*args[1:4])
            self.phase.flops += flops
            self.phase.attention_flops += flops


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _launches(name: str, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """Whether an operation does work on the device: queries, allocations and views do not."""
    if name.startswith("prim::") or not outputs or "empty" in name:
        return False
    if func._schema.is_mutable:
        return True
    # Asking the storage finds every view, also those that the schema does not call one (_unsafe_view, reshape).
    shared = {tensor.untyped_storage()._cdata for tensor in inputs}
    return not all(tensor.untyped_storage()._cdata in shared for tensor in outputs)


def _element_count(tensor: torch.Tensor) -> int:
    """Elements in memory: a dimension of stride 0 repeats the same ones."""
    return math.prod(
        size if stride else min(size, 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _moved_bytes(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Bytes read of distinct inputs and written to distinct outputs."""
    written = sum(_element_count(tensor) * tensor.element_size() for tensor in _distinct(outputs))
    if name.endswith("_like") or name.startswith("aten::new_"):
        return written
    if name in OVERWRITES:
        inputs = inputs[1:]
    read = sum(_element_count(tensor) * tensor.element_size() for tensor in _distinct(inputs))
    if name in GATHERS:
        table = inputs[0]
        taken = min(table.numel(), outputs[0].numel()) * table.element_size()
        read += taken - _element_count(table) * table.element_size()
    return read + written


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    views = {
        (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()): tensor
        for tensor in tensors
        if tensor.layout == torch.strided
    }
    return list(views.values())


def _product_flops(left: torch.Tensor, *, name: str, output: torch.Tensor) -> float:
    """2 M N K of a matrix product whose left factor is ``left`` [..., M, K]."""
    if name == "aten::addbmm":  # sums over the batch too
        return 2.0 * output.numel() * left.shape[0] * left.shape[-1]
    return 2.0 * output.numel() * left.shape[-1]


def _convolution_flops(image: torch.Tensor, weight: torch.Tensor, *, output: torch.Tensor, transposed: bool) -> float:
    """2 per multiply-add. weight [out, in / groups, ...] (transposed: [in, out / groups, ...]), so groups are in it.

    Input gradient and weight gradient each take the same number of products as the forward pass.
    """
    return 2.0 * (image if transposed else output).numel() * math.prod(weight.shape[1:])


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """2 B H Sq Sk (D + Dv) for query [B, H, Sq, D], key [B, H, Sk, D], value [B, H, Sk, Dv], causal or not."""
    batch, heads, queries, width = query.shape
    return 2.0 * batch * heads * queries * key.shape[-2] * (width + value.shape[-1])


def count_phases(
    module: torch.nn.Module, batch: Any, *, loss_of: Callable[[torch.nn.Module, Any], torch.Tensor]
) -> tuple[PhaseCount, PhaseCount]:
    """Count one forward pass with loss and one backward pass of ``module`` over ``batch``.

    Runs on fake tensors (shapes only; ``module`` is copied and stays as it is). A module that looks at values, which
    shapes cannot tell, is run for real on a copy instead: same counts, more time. Returns (forward, backward).
    """
    try:
        mode = FakeTensorMode()
        with FakeCopyMode(mode):
            copied = copy.deepcopy(module)
        fake_batch = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)
        with mode:
            return _walk(copied, fake_batch, loss_of=loss_of)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
        return _walk(copy.deepcopy(module), batch, loss_of=loss_of)


def _walk(
    module: torch.nn.Module, batch: Any, *, loss_of: Callable[[torch.nn.Module, Any], torch.Tensor]
) -> tuple[PhaseCount, PhaseCount]:
    forward, backward = PhaseCount(), PhaseCount()
    module.train()
    module.zero_grad(set_to_none=True)
    with _Count(forward):
        loss = loss_of(module, batch)
    with _Count(backward):
        loss.backward()  # type: ignore[no-untyped-call]
    return forward, backward


def count_workload(
    module: torch.nn.Module,
    make_batch: Callable[[int], Any],
    *,
    loss_of: Callable[[torch.nn.Module, Any], torch.Tensor],
    name: str,
    family: str,
    task_input: str,
    optimizer: str,
) -> WorkloadFeatures:
    """Count ``module`` (fp32) at two batch sizes and split bytes into a part per sample and a fixed part.

    ``make_batch(samples)`` gives a batch, ``loss_of(module, batch)`` the scalar loss. FLOPs count 2 per multiply-add
    in matrix products, convolutions (groups respected in both directions) and attention (4 B H Sq Sk D forward, 2.5
    times that backward for a flash kernel; attention made of plain products is counted by them). Bytes are what every
    operation reads of its distinct inputs and writes; views are free. ``params`` counts trained parameters.
    Raises ``InputError`` when nothing countable was found.
    """
    small = count_phases(module, make_batch(SMALL_BATCH), loss_of=loss_of)
    large = count_phases(module, make_batch(LARGE_BATCH), loss_of=loss_of)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    forward_bytes, forward_fixed = _line(small[0].bytes, large[0].bytes)
    backward_bytes, backward_fixed = _line(small[1].bytes, large[1].bytes)
    flops = _line(small[0].flops, large[0].flops)[0]
    if flops <= 0:
        raise InputError(
            f"workload {name} does no work that can be counted",
            got=f"{flops:g} forward FLOPs per sample",
            expected="matrix products, convolutions or attention over the batch",
        )
    listed = find_family(name)
    return WorkloadFeatures(
        name=name,
        family=family,
        kind=listed.kind if listed else "",
        network=listed.canonical if listed else "",
        task_input=task_input,
        optimizer=optimizer,
        params=sum(parameter.numel() for parameter in trained),
        parameter_tensors=len(trained),
        forward_flops_per_sample=flops,
        backward_flops_per_sample=_line(small[1].flops, large[1].flops)[0],
        convolution_flops_share=_line(small[0].convolution_flops, large[0].convolution_flops)[0] / flops,
        attention_flops_share=_line(small[0].attention_flops, large[0].attention_flops)[0] / flops,
        forward_bytes_per_sample=forward_bytes,
        forward_bytes_fixed=forward_fixed,
        backward_bytes_per_sample=backward_bytes,
        backward_bytes_fixed=backward_fixed,
        forward_ops=large[0].ops,
        backward_ops=large[1].ops,
    )


def _line(small: float, large: float) -> tuple[float, float]:
    """(slope, intercept) through the counts at the two batch sizes."""
    slope = (large - small) / (LARGE_BATCH - SMALL_BATCH)
    return slope, max(0.0, small - slope * SMALL_BATCH)
