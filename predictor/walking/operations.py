"""Measure one dispatched operation of torch: its family, number format, FLOPs, dimensions and bytes."""

import math
import re
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GATHERED", "Operation", "count_elements", "find_rule", "measure_operation"]

#: FLOPs, the dimensions that a tensor core sees, and the family.
Product = tuple[float, tuple[int, ...], str]

#: A flash kernel keeps no score matrix. Its backward pass computes the matrix again and then four products: 5 for 2.
FLASH_BACKWARD_RATIO = 2.5

#: Operations that read only as much of their table as they return.
GATHERED = {"aten::embedding", "aten::gather", "aten::index", "aten::index_select", "aten::nll_loss_forward"}
#: Operations that sum the rows they look up: they read one row of the table for each index.
POOLED = {"aten::_embedding_bag", "aten::_embedding_bag_forward_only"}

#: Operations that overwrite their first argument without reading it.
OVERWRITES = {"aten::copy_", "aten::fill_", "aten::zero_"}

#: The family of an operation by its name without namespace, ``_backward`` and last underscore. The first pattern that
#: fits wins; an operation that fits none is elementwise.
FAMILY_PATTERNS = tuple(
    (family, re.compile(pattern))
    for family, pattern in (
        ("normalization", r".*(batch_norm|layer_norm|group_norm|rms_norm|weight_norm).*"),
        ("softmax", r".*(softmax|logsumexp|_loss|cross_entropy|kl_div).*"),
        ("pooling", r".*(pool|upsample|grid_sampler|interpolate).*"),
        (
            "gather",
            r"(_?embedding.*|.*gather.*|.*scatter.*|_?index.*|_?unsafe_index.*|take.*|masked_select|nonzero.*|roi_.*)",
        ),
        (
            "reduction",
            r"(sum|mean|prod|nansum|amax|amin|aminmax|max|min|var|std|var_mean|std_mean|any|all|argmax|argmin|norm"
            r"|linalg_vector_norm|cumsum|cumprod|logcumsumexp|cummax|cummin|topk|sort|median|mode|kthvalue|bincount"
            r"|histc|unique.*|_unique.*|dist|_?cdist.*|_?pdist.*|searchsorted|count_nonzero|trace|renorm|argsort)",
        ),
        (
            "copy",
            r"(clone|copy|cat|stack|_to_copy|constant_pad_nd|.*_pad[123]d|slice|select|unfold|as_strided|diagonal"
            r"|zeros.*|ones.*|full.*|fill|zero|new_.*|arange|linspace|eye|scalar_tensor|repeat|repeat_interleave|roll"
            r"|flip|im2col|col2im|tile|contiguous|_reshape_copy|.*_copy|.*_scatter|tril|triu|lift.*|narrow.*|split.*"
            r"|pixel_.*shuffle|channel_shuffle|rot90|_foreach_copy)",
        ),
    )
)

#: An operation with a name like these and no rule for its FLOPs is a product that the walk would miss.
PRODUCT_LIKE = re.compile(r"attention|(^|_)(b?mm|addmm|mv|matmul|linear|einsum|trilinear)(_|$)|conv|lstm|gru|rnn")
#: Operations whose names only look like products.
NO_PRODUCTS = {"im2col", "col2im", "logaddexp", "linear_backward", "upsample_linear1d", "upsample_bilinear2d"}


class Operation:
    """One launched operation; ``dimensions`` are those of a product and empty for all others."""

    __slots__ = ("bytes", "dimensions", "family", "flops", "fused", "name", "narrow", "scores", "serial_steps")

    def __init__(self, name: str, family: str, *, narrow: bool, moved_bytes: float) -> None:
        self.name, self.family, self.narrow, self.bytes = name, family, narrow, moved_bytes
        self.flops = self.fused = self.scores = self.serial_steps = 0.0
        self.dimensions: tuple[int, ...] = ()


class Rule:
    """How to count an operation, as far as its name and schema say before any call."""

    __slots__ = ("allocates_only", "base", "family", "free", "known", "mutable", "name", "product", "writes_only")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name: str = schema.name
        self.mutable: bool = schema.is_mutable
        self.free = self.name.startswith("prim::") or (func.is_view and not self.mutable)
        self.allocates_only = "empty" in self.name
        self.base = self.name.rpartition("::")[2]
        stem = self.base.removesuffix("_backward").rstrip("_")
        self.family = next((family for family, pattern in FAMILY_PATTERNS if pattern.fullmatch(stem)), "elementwise")
        self.product = PRODUCTS.get(self.name)
        self.writes_only = self.name.endswith("_like") or self.name.startswith("aten::new_")
        self.known = (
            self.product is not None
            or self.family != "elementwise"
            or self.base in NO_PRODUCTS
            or not PRODUCT_LIKE.search(self.base)
        )


_RULES: dict[Any, Rule] = {}


def find_rule(func: Any) -> Rule:
    """The rule of an overload such as ``torch.ops.aten.mm.default``, made at its first call."""
    rule = _RULES.get(func)
    if rule is None:
        rule = _RULES[func] = Rule(func)
    return rule


def count_elements(tensor: torch.Tensor) -> int:
    """Elements in memory; a dimension of stride 0 repeats the same elements and counts once."""
    strides = tensor.stride()
    if 0 not in strides:
        return tensor.numel()
    return math.prod(size if stride else min(size, 1) for size, stride in zip(tensor.shape, strides, strict=True))


def measure_operation(
    rule: Rule, args: tuple[Any, ...], *, inputs: list[torch.Tensor], outputs: list[torch.Tensor], shared: bool
) -> Operation:
    """Measure one call; ``inputs`` and ``outputs`` are the tensors of its arguments and results in their order.

    Bytes are what it reads of its distinct inputs and writes to its distinct outputs. ``shared`` says that two of the
    tensors may be the same one. FLOPs count 2 per multiply-add, of products alone. An operation is narrow when its
    first floating-point tensor is of 16 bit or less, a cast when its result is.
    """
    if shared:
        outputs = _distinct(outputs)
    written = 0
    for tensor in outputs:
        written += count_elements(tensor) * tensor.element_size()
    family = rule.family
    if family == "copy" and _is_cast(rule, inputs, outputs):
        family = "cast"
    narrow = _is_narrow(outputs if family == "cast" else [*inputs, *outputs])
    moved = written if rule.writes_only else written + _read_bytes(rule.name, inputs, outputs)
    operation = Operation(rule.name, family, narrow=narrow, moved_bytes=moved)
    if rule.product is not None:
        operation.flops, operation.dimensions, operation.family = rule.product(args, outputs)
        EXTRAS.get(rule.name, _add_nothing)(operation, args, outputs)
        operation.fused = operation.bytes
    elif family == "gather":
        operation.fused = moved
    return operation


def _read_bytes(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    if name in OVERWRITES:
        inputs = inputs[1:]
    if not inputs:
        return 0
    read = 0
    for tensor in _distinct(inputs) if len(inputs) > 1 else inputs:
        read += count_elements(tensor) * tensor.element_size()
    if name in GATHERED or name in POOLED:
        table = inputs[0]
        looked_up = outputs[0].numel() if name in GATHERED else inputs[1].numel() * table.shape[-1]
        read += (min(table.numel(), looked_up) - count_elements(table)) * table.element_size()
    return read


def _distinct(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    views = {
        (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()): tensor
        for tensor in tensors
        if tensor.layout == torch.strided
    }
    return list(views.values())


def _is_cast(rule: Rule, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    if not inputs:
        return False
    if rule.base == "copy_":
        return len(inputs) > 1 and inputs[0].dtype != inputs[1].dtype
    return rule.base == "_to_copy" and inputs[0].dtype != outputs[0].dtype


def _is_narrow(tensors: list[torch.Tensor]) -> bool:
    for tensor in tensors:
        dtype = tensor.dtype
        if dtype.is_floating_point or dtype.is_complex:
            return dtype.itemsize <= 2
    return False


# Rules of products: (arguments, results) -> FLOPs, dimensions, family.


def _of_left(place: int) -> Callable[[tuple[Any, ...], list[torch.Tensor]], Product]:
    """2 M N K of a product whose left factor [..., M, K] is argument ``place``."""

    def count(args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Product:
        output, inner = outputs[0], args[place].shape[-1]
        return 2.0 * output.numel() * inner, (*output.shape[-2:], inner), "dense"

    return count


def _of_addbmm(args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Product:
    left, output = args[1], outputs[0]  # left [batch, M, K]; the result sums over the batch too
    return 2.0 * output.numel() * left.shape[0] * left.shape[-1], (*output.shape, left.shape[-1]), "dense"


def _of_outer(args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Product:
    return 2.0 * outputs[0].numel(), tuple(outputs[0].shape), "dense"


def _of_grouped(args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Product:
    """Each row meets one group: all groups take 2 rows K N. From [M, rows] and [rows, N] each group gives [M, N]."""
    left, right = args[:2]
    if left.dim() == right.dim() == 2:
        return 2.0 * left.numel() * right.shape[-1], (left.shape[0], right.shape[-1]), "dense"
    flops = 2.0 * outputs[0].numel() * left.shape[-1]
    return flops, (*(left.shape[-2:] if left.dim() == 3 else left.shape[-1:]), right.shape[-1]), "dense"


def _of_trilinear(args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Product:
    """One multiply-add for each index of three factors broadcast against each other (bilinear and its gradients)."""
    shapes = []
    for factor, expanded in zip(args[:3], args[3:6], strict=True):
        shape = list(factor.shape)
        for place in sorted(expanded):
            shape.insert(place, 1)
        shapes.append(shape)
    sizes = tuple(max(column) for column in zip(*shapes, strict=True))
    return 2.0 * math.prod(sizes), sizes, "dense"


def _convolve(
    image: torch.Tensor, weight: torch.Tensor, *, output: torch.Tensor, transposed: bool, groups: int
) -> Product:
    """FLOPs by the weight [out, in / groups, ...], or [in, out / groups, ...] when ``transposed``."""
    flops = 2.0 * (image if transposed else output).numel() * math.prod(weight.shape[1:])
    first, second = weight.shape[0] // groups, weight.shape[1]
    inputs_per_group = first if transposed else second
    family = "convolution" if groups == 1 else "depthwise" if inputs_per_group == 1 else "grouped"
    return flops, (first, second), family


def _of_convolution(args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Product:
    return _convolve(args[0], args[1], output=outputs[0], transposed=args[6], groups=args[8])


def _of_convolution_backward(args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Product:
    """The gradients of input and weight each take the products of the forward pass; the bias gradient takes none."""
    gradient, image, weight = args[:3]
    flops, dimensions, family = _convolve(image, weight, output=gradient, transposed=args[7], groups=args[9])
    return flops * args[10][:2].count(True), dimensions, family


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Product:
    """2 B H Sq Sk (D + Dv) for query [..., Sq, D], key [..., Sk, D], value [..., Sk, Dv], causal or not."""
    width, keys, value_width = query.shape[-1], key.shape[-2], value.shape[-1]
    flops = 2.0 * math.prod(query.shape[:-1]) * keys * (width + value_width)
    return flops, (query.shape[-2], keys, width, value_width), "attention"


def _of_attention(args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Product:
    return _attend(*args[:3])


def _of_attention_backward(args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Product:
    flops, dimensions, family = _attend(*args[1:4])
    return FLASH_BACKWARD_RATIO * flops, dimensions, family


def _of_recurrent(args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Product:
    """One layer: input [..., in], weights of each direction [gates, in] and [gates, hidden], then biases."""
    tokens, matrices = args[0], [weight for weight in args[1] if weight.dim() == 2]
    flops = 2.0 * math.prod(tokens.shape[:-1]) * sum(weight.numel() for weight in matrices)
    return flops, (*matrices[0].shape, *matrices[1].shape), "recurrent"


def _of_recurrent_backward(args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Product:
    flops, dimensions, family = _of_recurrent(args, outputs)
    tokens, weights, _, directions, input_gradient = args[:5]
    # The first layer of a network computes no gradient of its input.
    spared = 0.0 if input_gradient else 2.0 * math.prod(tokens.shape[:-1]) * directions * weights[0].numel()
    return 2.0 * flops - spared, dimensions, family


def _of_nothing(args: tuple[Any, ...], outputs: list[torch.Tensor]) -> Product:
    return 0.0, (), "recurrent"


PRODUCTS: dict[str, Callable[[tuple[Any, ...], list[torch.Tensor]], Product]] = {
    **{f"aten::{name}": _of_left(0) for name in ("mm", "bmm", "mv", "dot", "vdot", "_scaled_mm", "_int_mm", "linear")},
    **{f"aten::{name}": _of_left(1) for name in ("addmm", "baddbmm", "addmv", "_addmm_activation")},
    **{f"aten::{name}_": _of_left(1) for name in ("addmm", "baddbmm", "addmv")},
    "aten::addbmm": _of_addbmm,
    "aten::addr": _of_outer,
    "aten::_grouped_mm": _of_grouped,
    "aten::_scaled_grouped_mm": _of_grouped,
    "aten::_trilinear": _of_trilinear,
    "aten::convolution": _of_convolution,
    "aten::convolution_backward": _of_convolution_backward,
    **{
        f"aten::_scaled_dot_product_{kind}{suffix}": rule
        for kind in (
            "flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
            "fused_attention_overrideable",
        )
        for suffix, rule in (("", _of_attention), ("_backward", _of_attention_backward))
    },
    "precision_time::attention": _of_attention,
    "precision_time::attention_backward": _of_attention_backward,
    "precision_time::recurrent": _of_recurrent,
    "precision_time::recurrent_backward": _of_recurrent_backward,
    "precision_time::cell": _of_nothing,
    "precision_time::cell_backward": _of_nothing,
}  # fmt: skip


# What a kernel moves or waits for beside its arguments and results.


def _add_nothing(operation: Operation, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
    pass


def _add_scores(operation: Operation, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
    operation.scores = float(math.prod(args[0].shape[:-1]) * args[1].shape[-2])


def _add_steps(operation: Operation, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
    """Every step reads the recurrent weights again; gates are written by one product and read by the next."""
    tokens, weights, _, directions, _, steps = args[:6]
    matrices = [weight.numel() for weight in weights if weight.dim() == 2]
    weights_again = (steps - 1) * (sum(matrices) - directions * matrices[0])
    gates = 2 * math.prod(tokens.shape[:-1]) * directions * weights[0].shape[0]
    operation.bytes += (weights_again + gates) * tokens.element_size()
    if operation.name == "precision_time::recurrent":
        operation.serial_steps = float(steps)


def _add_step(operation: Operation, args: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
    operation.serial_steps = 1.0


EXTRAS: dict[str, Callable[[Operation, tuple[Any, ...], list[torch.Tensor]], None]] = {
    **{
        f"aten::_scaled_dot_product_{kind}": _add_scores
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    },
    "precision_time::attention": _add_scores,
    "precision_time::recurrent": _add_steps,
    "precision_time::recurrent_backward": _add_steps,
    "precision_time::cell": _add_step,
}
