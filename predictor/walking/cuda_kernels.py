"""The kernels that CUDA runs where a CPU takes another path: fused attention, dropout, recurrent layers and cells.

They have the shapes and formats of CUDA's kernels and compute nothing. Operations of the namespace ``precision_time``
have no kernel at all: the recorder that meets them calls ``imitate``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from precision_time.predictor.walking.cuda_autocast import HALF, Casts, replace_kernels

__all__ = ["IMITATED", "cuda_kernels", "imitate"]

_LIBRARY = Library("precision_time", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMAS = (
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask) -> (Tensor, Tensor)",
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " Tensor? mask, bool mask_gradient) -> Tensor[]",
    "recurrent(Tensor input, Tensor[] weights, Tensor[] states, int directions, int reserved, int steps) -> Tensor[]",
    "recurrent_backward(Tensor input, Tensor[] weights, Tensor[] states, int directions, bool input_gradient,"
    " int steps, Tensor output, Tensor reserve, Tensor gradient) -> Tensor[]",
    "cell(Tensor input_gates, Tensor hidden_gates, Tensor[] biases, Tensor[] states) -> Tensor[]",
    "cell_backward(Tensor[] gradients, Tensor[] states, Tensor reserve, Tensor[] biases) -> Tensor[]",
)
for _schema in _SCHEMAS:
    if not hasattr(torch.ops.precision_time, _schema.partition("(")[0]):
        _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
_OPS = torch.ops.precision_time


def imitate(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of one of the ``IMITATED`` operations: tensors of the right shapes and formats."""
    return _IMITATIONS[name](*args, **kwargs)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
    return _token_major(query, value.shape[-1]), query.new_zeros(query.shape[:-1], dtype=torch.float32)


def _token_major(like: Tensor, width: int) -> Tensor:
    """A tensor [..., H, S, width] that lies in memory as [..., S, H, width], as flash kernels write it."""
    if like.dim() < 3:
        return like.new_zeros(*like.shape[:-1], width)
    *batch, heads, tokens, _ = like.shape
    return like.new_zeros(*batch, tokens, heads, width).transpose(-3, -2)


def _attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None,
    mask_gradient: bool,
) -> list[Tensor]:  # fmt: skip
    gradients = [_token_major(tensor, tensor.shape[-1]) for tensor in (query, key, value)]
    if mask is not None and mask_gradient:
        gradients.append(mask.new_zeros(mask.shape))
    return gradients


def _recurrent(
    tokens: Tensor, weights: list[Tensor], states: list[Tensor], directions: int, reserved: int, steps: int
) -> list[Tensor]:
    """[..., in] -> output [..., hidden], the last states, and the tensor kept for the backward pass."""
    output = tokens.new_zeros(*tokens.shape[:-1], directions * states[0].shape[-1])
    reserve = tokens.new_zeros(*tokens.shape[:-1], reserved)
    return [output, *(state.new_zeros(state.shape) for state in states), reserve]


def _recurrent_backward(
    tokens: Tensor, weights: list[Tensor], states: list[Tensor], directions: int, input_gradient: bool, *_: Any
) -> list[Tensor]:
    gradients = [tensor.new_zeros(tensor.shape) for tensor in (*states, *weights)]
    return [tokens.new_zeros(tokens.shape), *gradients] if input_gradient else gradients


def _grouped_mm(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: Any, out_dtype: Any = None) -> Tensor:
    """The groups are the first dimension of a 3-dimensional factor; ``offs`` ends their rows in a 2-dimensional one."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        shape = (left.shape[0] if left.dim() == 3 else 0 if offs is None else offs.numel(), *shape)
    return left.new_zeros(shape, dtype=out_dtype or left.dtype)


def _cell(input_gates: Tensor, hidden_gates: Tensor, biases: list[Tensor], states: list[Tensor]) -> list[Tensor]:
    # the workspace of torch's kernels: the gates of an LSTM cell; those of a GRU cell, with both parts of the last gate
    hidden = states[0].shape[-1]
    width = input_gates.shape[-1] if len(states) > 1 else 5 * hidden
    return [*(state.new_zeros(state.shape) for state in states), input_gates.new_zeros(len(input_gates), width)]


def _cell_backward(
    gradients: list[Tensor], states: list[Tensor], reserve: Tensor, biases: list[Tensor]
) -> list[Tensor]:
    hidden = states[-1].shape[-1]
    gates = reserve.shape[-1] if reserve.shape[-1] != 5 * hidden else 3 * hidden
    results = [reserve.new_zeros(len(reserve), gates), states[-1].new_zeros(states[-1].shape)]
    return [*results, *(bias.new_zeros(bias.shape) for bias in biases[:1])]


_IMITATIONS: dict[str, Callable[..., Any]] = {
    "precision_time::attention": _attention,
    "precision_time::attention_backward": _attention_backward,
    "precision_time::recurrent": _recurrent,
    "precision_time::recurrent_backward": _recurrent_backward,
    "precision_time::cell": _cell,
    "precision_time::cell_backward": _cell_backward,
    # torch knows its shapes for bfloat16 alone
    "aten::_grouped_mm": _grouped_mm,
}
#: Operations that ``imitate`` knows.
IMITATED = frozenset(_IMITATIONS)


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        out, logsumexp = _OPS.attention(query, key, value, mask)
        ctx.save_for_backward(query, key, value, out, logsumexp, mask)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradients = _OPS.attention_backward(gradient, *ctx.saved_tensors, ctx.needs_input_grad[3])
        return (*gradients[:3], gradients[3] if len(gradients) > 3 else None)


class _Recurrent(torch.autograd.Function):
    """One layer in all its directions."""

    @staticmethod
    def forward(ctx: Any, tokens: Any, directions: int, reserved: int, steps: int, count: int, *rest: Any) -> Any:
        states, weights = list(rest[:count]), list(rest[count:])
        *results, reserve = _OPS.recurrent(tokens, weights, states, directions, reserved, steps)
        ctx.save_for_backward(tokens, results[0], reserve, *rest)
        ctx.directions, ctx.steps, ctx.count = directions, steps, count
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        tokens, output, reserve, *rest = ctx.saved_tensors
        states, weights, input_gradient = rest[: ctx.count], rest[ctx.count :], ctx.needs_input_grad[0]
        gradients = _OPS.recurrent_backward(
            tokens, weights, states, ctx.directions, input_gradient, ctx.steps, output, reserve, gradient
        )
        first = gradients.pop(0) if input_gradient else None
        return (first, None, None, None, None, *gradients)


class _Cell(torch.autograd.Function):
    """The gates of an LSTM or GRU cell in one kernel, after its two products."""

    @staticmethod
    def forward(ctx: Any, input_gates: Any, hidden_gates: Any, count: int, *rest: Any) -> Any:
        states, biases = list(rest[:count]), list(rest[count:])
        *results, reserve = _OPS.cell(input_gates, hidden_gates, biases, states)
        saved_states = [states[-1], *results[1:]]
        ctx.save_for_backward(reserve, *saved_states, *biases)
        ctx.count = len(saved_states)
        ctx.states = count
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reserve, *rest = ctx.saved_tensors
        present = [gradient for gradient in gradients if gradient is not None]
        biases = rest[ctx.count :]
        gates, state, *bias = _OPS.cell_backward(present, rest[: ctx.count], reserve, biases)
        # the hidden state of an LSTM enters only through its product, that of a GRU through the last gate as well
        states = (None, state) if ctx.states > 1 else (state,)
        return (gates, gates, None, *states, *(bias * len(biases)))


def _attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> Any:
    if attn_mask is not None and attn_mask.requires_grad:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]


def _drop(tokens: Any, p: float, train: bool) -> Any:
    if not train or p == 0 or tokens.numel() == 0:
        return tokens
    return torch.ops.aten.native_dropout(tokens, p, train)[0]


def _make_layers(kind: str, casts: Casts | None) -> dict[str, Callable[..., Any]]:
    """``aten::lstm`` and its like as cuDNN runs them: in 16 bit under autocast, weights cast anew at every call."""
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)

    def run(
        tokens: Any, states: Any, weights: Any, num_layers: int, dropout: float, bidirectional: bool, steps: int
    ) -> Any:
        states = list(states) if kind == "lstm" else [states]
        if casts is not None and torch.is_autocast_enabled("cpu"):
            tokens = tokens.to(HALF)
            states, weights = ([tensor.to(HALF) for tensor in group] for group in (states, weights))
        directions = 2 if bidirectional else 1
        tensors_per_layer = len(weights) // num_layers
        last_states: list[list[Any]] = [[] for _ in states]
        for layer in range(num_layers):
            layer_weights = weights[layer * tensors_per_layer : (layer + 1) * tensors_per_layer]
            hidden = layer_weights[1].shape[0] // gates
            # activated gates and the cell state of every step
            reserved = directions * ((gates + 1) * hidden if gates > 1 else hidden)
            rows = slice(layer * directions, (layer + 1) * directions)
            tokens, *ends = _Recurrent.apply(  # type: ignore[no-untyped-call]
                tokens, directions, reserved, steps, len(states), *(state[rows] for state in states), *layer_weights
            )
            for layer_states, end in zip(last_states, ends, strict=True):
                layer_states.append(end)
            if dropout and layer < num_layers - 1:
                tokens = _drop(tokens, dropout, True)
        return (tokens, *(ends[0] if num_layers == 1 else torch.cat(ends) for ends in last_states))

    def run_even(
        tokens: Any, states: Any, weights: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        tokens = tokens.transpose(0, 1) if batch_first else tokens
        tokens, *last_states = run(
            tokens, states, weights, num_layers, dropout if train else 0.0, bidirectional, tokens.shape[0]
        )
        return (tokens.transpose(0, 1) if batch_first else tokens, *last_states)

    def run_packed(
        tokens: Any, batch_sizes: Any, states: Any, weights: Any, has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool,
    ) -> Any:  # fmt: skip
        steps = batch_sizes.numel()
        return run(tokens, states, weights, num_layers, dropout if train else 0.0, bidirectional, steps)

    return {f"{kind}.input": run_even, f"{kind}.data": run_packed}


def _run_cell(tokens: Any, states: list[Any], w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> Any:
    biases = [bias for bias in (b_ih, b_hh) if bias is not None]
    gates = torch.matmul(tokens, w_ih.t()), torch.matmul(states[0], w_hh.t())
    return _Cell.apply(*gates, len(states), *states, *biases)  # type: ignore[no-untyped-call]


def _lstm_cell(tokens: Any, states: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    return _run_cell(tokens, list(states), w_ih, w_hh, b_ih, b_hh)


def _gru_cell(tokens: Any, hidden: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    return _run_cell(tokens, [hidden], w_ih, w_hh, b_ih, b_hh)[0]


@contextmanager
def cuda_kernels(*, casts: Casts | None = None) -> Iterator[None]:
    """Put CUDA's paths in place of a CPU's while the block runs under an ``OperationRecorder``.

    Gradients are made as if for training. ``casts`` are those of ``cuda_autocast``, None in fp32.
    """
    kernels: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": _attend,
        "dropout": _drop,
        "lstm_cell": _lstm_cell,
        "gru_cell": _gru_cell,
        **_make_layers("lstm", casts),
        **_make_layers("gru", casts),
        **_make_layers("rnn_tanh", casts),
        **_make_layers("rnn_relu", casts),
    }
    with replace_kernels(kernels, "AutogradCPU"):
        yield
