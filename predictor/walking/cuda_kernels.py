"""What CUDA runs where a CPU takes another path: fused or plain attention, dropout, recurrent layers and cells.

The kernels here stand for those of CUDA in shapes and formats; they compute nothing. The operations of the namespace
``precision_time`` have no kernel at all: the walk that sees them calls ``imitate``.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.library import Library

from precision_time.predictor.walking.cuda_autocast import WALKING, Casts

__all__ = ["ATTENTIONS", "IMITATED", "cuda_kernels", "imitate", "make_autocast_kernels"]

#: ``fused`` keeps no scores, whatever mask or dropout; ``math`` is attention as models wrote it before fused kernels.
ATTENTIONS = ("fused", "math")

_LIBRARY = Library("precision_time", "FRAGMENT")  # type: ignore[no-untyped-call]
_SCHEMAS = (
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask) -> (Tensor, Tensor)",
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp,"
    " Tensor? mask, bool mask_gradient) -> Tensor[]",
    "attention_product(Tensor left, Tensor right, bool scores) -> Tensor",
    "recurrent(Tensor input, Tensor[] weights, Tensor[] states, int directions, int kept, int steps) -> Tensor[]",
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
    """The results of one of the ``IMITATED`` operations: zeros of the right shapes and formats."""
    return _IMITATIONS[name](*args, **kwargs)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> Any:
    return _token_major(query, value.shape[-1]), query.new_zeros(query.shape[:-1], dtype=torch.float32)


def _token_major(like: torch.Tensor, width: int) -> torch.Tensor:
    """[..., H, S, width] that lies in memory as [..., S, H, width], as flash kernels write it."""
    if like.dim() < 3:
        return like.new_zeros(*like.shape[:-1], width)
    *batch, heads, tokens, _ = like.shape
    return like.new_zeros(*batch, tokens, heads, width).transpose(-3, -2)


def _attention_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    mask: torch.Tensor | None,
    mask_gradient: bool,
) -> list[torch.Tensor]:
    gradients = [_token_major(tensor, tensor.shape[-1]) for tensor in (query, key, value)]
    if mask is not None and mask_gradient:
        gradients.append(mask.new_zeros(mask.shape))
    return gradients


def _attention_product(left: torch.Tensor, right: torch.Tensor, scores: bool) -> torch.Tensor:
    return left.new_zeros(*left.shape[:-1], right.shape[-1])


def _recurrent(
    tokens: torch.Tensor,
    weights: list[torch.Tensor],
    states: list[torch.Tensor],
    directions: int,
    kept: int,
    steps: int,
) -> list[torch.Tensor]:
    """[..., in] -> output [..., hidden], the last states, and what the backward pass needs."""
    output = tokens.new_zeros(*tokens.shape[:-1], directions * states[0].shape[-1])
    reserve = tokens.new_zeros(*tokens.shape[:-1], kept)
    return [output, *(state.new_zeros(state.shape) for state in states), reserve]


def _recurrent_backward(
    tokens: torch.Tensor,
    weights: list[torch.Tensor],
    states: list[torch.Tensor],
    directions: int,
    input_gradient: bool,
    *_: Any,
) -> list[torch.Tensor]:
    gradients = [tensor.new_zeros(tensor.shape) for tensor in (*states, *weights)]
    return [tokens.new_zeros(tokens.shape), *gradients] if input_gradient else gradients


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, out_dtype: Any = None
) -> torch.Tensor:
    """Groups are the first dimension of a 3-dimensional factor, or ``offs`` ends their rows in a 2-dimensional one."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim():
        shape = (left.shape[0] if left.dim() == 3 else 0 if offs is None else offs.numel(), *shape)
    return left.new_zeros(shape, dtype=out_dtype or left.dtype)


def _cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, biases: list[torch.Tensor], states: list[torch.Tensor]
) -> list[torch.Tensor]:
    # torch's workspace: the gates of an LSTM cell, and those of a GRU with both parts of the last
    hidden = states[0].shape[-1]
    kept = input_gates.shape[-1] if len(states) > 1 else 5 * hidden
    return [*(state.new_zeros(state.shape) for state in states), input_gates.new_zeros(len(input_gates), kept)]


def _cell_backward(
    gradients: list[torch.Tensor], states: list[torch.Tensor], reserve: torch.Tensor, biases: list[torch.Tensor]
) -> list[torch.Tensor]:
    hidden = states[-1].shape[-1]
    gates = reserve.shape[-1] if reserve.shape[-1] != 5 * hidden else 3 * hidden
    results = [reserve.new_zeros(len(reserve), gates), states[-1].new_zeros(states[-1].shape)]
    return [*results, *(bias.new_zeros(bias.shape) for bias in biases[:1])]


_IMITATIONS: dict[str, Callable[..., Any]] = {
    "precision_time::attention": _attention,
    "precision_time::attention_backward": _attention_backward,
    "precision_time::attention_product": _attention_product,
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


class _AttentionProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Any, right: Any, scores: bool) -> Any:
        ctx.save_for_backward(left, right)
        return _OPS.attention_product(left, right, scores)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        left, right = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            _OPS.attention_product(gradient, right.transpose(-2, -1), False) if wanted[0] else None,
            _OPS.attention_product(left.transpose(-2, -1), gradient, False) if wanted[1] else None,
            None,
        )


class _Recurrent(torch.autograd.Function):
    """One layer in all its directions."""

    @staticmethod
    def forward(ctx: Any, tokens: Any, directions: int, kept: int, steps: int, count: int, *rest: Any) -> Any:
        states, weights = list(rest[:count]), list(rest[count:])
        *results, reserve = _OPS.recurrent(tokens, weights, states, directions, kept, steps)
        ctx.save_for_backward(tokens, results[0], reserve, *rest)
        ctx.directions, ctx.steps, ctx.count = directions, steps, count
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        tokens, output, reserve, *rest = ctx.saved_tensors
        states, weights, wanted = rest[: ctx.count], rest[ctx.count :], ctx.needs_input_grad[0]
        gradients = _OPS.recurrent_backward(
            tokens, weights, states, ctx.directions, wanted, ctx.steps, output, reserve, gradient
        )
        first = gradients.pop(0) if wanted else None
        return (first, None, None, None, None, *gradients)


class _Cell(torch.autograd.Function):
    """The gates of an LSTM or GRU cell in one kernel, after its two products."""

    @staticmethod
    def forward(ctx: Any, input_gates: Any, hidden_gates: Any, count: int, *rest: Any) -> Any:
        states, biases = list(rest[:count]), list(rest[count:])
        *results, reserve = _OPS.cell(input_gates, hidden_gates, biases, states)
        kept = [states[-1], *results[1:]]
        ctx.save_for_backward(reserve, *kept, *biases)
        ctx.count = len(kept)
        ctx.states = count
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        reserve, *rest = ctx.saved_tensors
        given = [gradient for gradient in gradients if gradient is not None]
        biases = rest[ctx.count :]
        gates, state, *bias = _OPS.cell_backward(given, rest[: ctx.count], reserve, biases)
        # the hidden state of an LSTM comes in by its product alone, that of a GRU also by the last gate
        states = (None, state) if ctx.states > 1 else (state,)
        return (gates, gates, None, *states, *(bias * len(biases)))


def _attend_fused(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> Any:
    if attn_mask is not None and attn_mask.requires_grad:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]


def _attend_by_math(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    casts: Casts | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Scale, product, mask, softmax, dropout, product, each in the format that autocast gives it."""
    lower = casts.lower if casts is not None else _keep
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    query = query * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = _AttentionProduct.apply(lower(query), lower(key).transpose(-2, -1), True)  # type: ignore[no-untyped-call]
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = torch.softmax(scores, -1)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    return _AttentionProduct.apply(lower(weights), lower(value), False)  # type: ignore[no-untyped-call]


def _keep(value: Any) -> Any:
    return value


def _drop(tokens: Any, p: float, train: bool) -> Any:
    if not train or p == 0 or tokens.numel() == 0:
        return tokens
    return torch.ops.aten.native_dropout(tokens, p, train)[0]


def _make_layers(kind: str, casts: Casts | None) -> dict[str, Callable[..., Any]]:
    """``aten::lstm`` and its kin as cuDNN runs them: in 16-bit under autocast, weights cast anew every time."""
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)

    def run(
        tokens: Any, states: Any, weights: Any, num_layers: int, dropout: float, bidirectional: bool, steps: int
    ) -> Any:
        states = list(states) if kind == "lstm" else [states]
        if casts is not None and torch.is_autocast_enabled("cpu"):
            tokens = tokens.to(casts.dtype)
            states, weights = ([item.to(casts.dtype) for item in group] for group in (states, weights))
        directions = 2 if bidirectional else 1
        share = len(weights) // num_layers
        lasts: list[list[Any]] = [[] for _ in states]
        for layer in range(num_layers):
            own = weights[layer * share : (layer + 1) * share]
            cells = own[1].shape[0] // gates
            # activated gates and the cell state of every step
            kept = directions * ((gates + 1) * cells if gates > 1 else cells)
            rows = slice(layer * directions, (layer + 1) * directions)
            tokens, *ends = _Recurrent.apply(  # type: ignore[no-untyped-call]
                tokens, directions, kept, steps, len(states), *(state[rows] for state in states), *own
            )
            for last, end in zip(lasts, ends, strict=True):
                last.append(end)
            if dropout and layer < num_layers - 1:
                tokens = _drop(tokens, dropout, True)
        return (tokens, *(last[0] if num_layers == 1 else torch.cat(last) for last in lasts))

    def run_even(
        tokens: Any,
        states: Any,
        weights: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        tokens = tokens.transpose(0, 1) if batch_first else tokens
        tokens, *lasts = run(
            tokens, states, weights, num_layers, dropout if train else 0.0, bidirectional, tokens.shape[0]
        )
        return (tokens.transpose(0, 1) if batch_first else tokens, *lasts)

    def run_packed(
        tokens: Any,
        batch_sizes: Any,
        states: Any,
        weights: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        steps = batch_sizes.numel()
        return run(tokens, states, weights, num_layers, dropout if train else 0.0, bidirectional, steps)

    return {f"{kind}.input": run_even, f"{kind}.data": run_packed}


def _lstm_cell(tokens: Any, states: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    biases = [bias for bias in (b_ih, b_hh) if bias is not None]
    hidden, cell = states
    gates = torch.matmul(tokens, w_ih.t()), torch.matmul(hidden, w_hh.t())
    return _Cell.apply(*gates, 2, hidden, cell, *biases)  # type: ignore[no-untyped-call]


def _gru_cell(tokens: Any, hidden: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    biases = [bias for bias in (b_ih, b_hh) if bias is not None]
    gates = torch.matmul(tokens, w_ih.t()), torch.matmul(hidden, w_hh.t())
    return _Cell.apply(*gates, 1, hidden, *biases)[0]  # type: ignore[no-untyped-call]


def make_autocast_kernels(casts: Casts) -> dict[str, Callable[..., Any]]:
    """Kernels that take the place of a cast for ``math``: it casts inside, operation by operation."""

    def attend(*args: Any, **kwargs: Any) -> Any:
        return _attend_by_math(*args, casts=casts, **kwargs)

    return {"scaled_dot_product_attention": attend}


@contextmanager
def cuda_kernels(*, attention: str, casts: Casts | None = None) -> Iterator[None]:
    """Put CUDA's paths in place of a CPU's, for the whole process, while the block runs under a ``OperationRecorder``.

    Gradients are made as if for training; one thread at a time gets in.
    """
    kernels = {
        "scaled_dot_product_attention": _attend_fused if attention == "fused" else _attend_by_math,
        "dropout": _drop,
        "lstm_cell": _lstm_cell,
        "gru_cell": _gru_cell,
        **_make_layers("lstm", casts),
        **_make_layers("gru", casts),
        **_make_layers("rnn_tanh", casts),
        **_make_layers("rnn_relu", casts),
    }
    with WALKING:
        library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            with warnings.catch_warnings():
                # torch warns that kernels of its own are overridden, which is the purpose here
                warnings.simplefilter("ignore", UserWarning)
                for name, kernel in kernels.items():
                    library.impl(name, kernel, "AutogradCPU")  # type: ignore[no-untyped-call]
            yield
        finally:
            library._destroy()  # type: ignore[no-untyped-call]
