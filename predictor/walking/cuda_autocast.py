"""CUDA's autocast policy on tensors of a CPU, where torch applies another one."""

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel

__all__ = ["APPEND_DTYPE", "FP32", "LOWER", "PROMOTE", "SET_DTYPE", "Casts", "cuda_autocast", "replace_kernels"]

# The lists are those of torch's header ATen/autocast_mode.h (AT_FORALL_...), torch 2.13; a test compares their names
# with those that torch registered for CUDA. The kernels of cuDNN behind the convolutions are left out: no operation of
# a CPU reaches them.

#: Cast to the 16-bit format.
LOWER = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
#: Cast to fp32. CUDA refuses ``binary_cross_entropy``; a walk counts it as fp32.
FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
    "binary_cross_entropy",
)  # fmt: skip
#: Give an fp32 result unless the caller asks for another format.
SET_DTYPE = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
#: Cast to the widest format among the arguments.
PROMOTE = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
#: Replaced by an overload that takes the format of its result.
APPEND_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}

#: The 16-bit format of a walk. Autocast casts to fp16 and to bf16 alike, so one stands for both.
HALF = torch.bfloat16
_KEY = "AutocastCPU"
_EXCLUDED = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_REPLACING = threading.RLock()


class Casts:
    """Casts of arguments. A weight is copied to 16 bit once and the copy used again, as torch's own autocast does."""

    def __init__(self) -> None:
        #: weight and copy by the id of the weight
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forget(self) -> None:
        """Drop the copies, as the end of an autocast region does."""
        self.copies.clear()

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """``value`` with every tensor of fp32 or 16 bit in it cast to ``dtype``."""
        if isinstance(value, torch.Tensor):
            if not value.is_floating_point() or value.dtype in (dtype, torch.float64) or value.dtype.itemsize < 2:
                return value
            is_weight = value.is_leaf and value.requires_grad and value._base is None
            if dtype != HALF or not is_weight:
                return value.to(dtype)
            if id(value) not in self.copies:
                self.copies[id(value)] = (value, value.to(dtype))
            return self.copies[id(value)][1]
        if isinstance(value, list | tuple):
            return type(value)(self.cast(item, dtype) for item in value)
        return value


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _leaves(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _leaves(value)


def _casting(name: str, choose: Callable[[tuple[Any, ...]], torch.dtype], casts: Casts) -> Callable[..., Any]:
    func = _overload(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            dtype = choose(args)
            return func(*casts.cast(args, dtype), **{key: casts.cast(value, dtype) for key, value in kwargs.items()})

    return call


def _setting_dtype(name: str) -> Callable[..., Any]:
    func = _overload(name)
    places = [argument.name for argument in func._schema.arguments]
    place = places.index("dtype")
    by_keyword = func._schema.arguments[place].kwarg_only

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            dtype = kwargs.get("dtype") if by_keyword or len(args) <= place else args[place]
            if dtype is None and args[0].is_floating_point() and args[0].dtype != torch.float64:
                if by_keyword or len(args) <= place:
                    kwargs["dtype"] = torch.float32
                else:
                    args = (*args[:place], torch.float32, *args[place + 1 :])
            return func(*args, **kwargs)

    return call


def _appending_dtype(name: str) -> Callable[..., Any]:
    plain, wide = _overload(name), _overload(APPEND_DTYPE[name])

    def call(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
            if not args[0].is_floating_point() or args[0].dtype == torch.float64:
                return plain(*args)
            filled = [*args, *(argument.default_value for argument in plain._schema.arguments[len(args) :])]
            return wide(*filled, dtype=torch.float32)

    return call


def _make_kernels(casts: Casts) -> dict[str, Callable[..., Any]]:
    def widest(args: tuple[Any, ...]) -> torch.dtype:
        return torch.float32 if any(tensor.dtype == torch.float32 for tensor in _leaves(args)) else HALF

    return {
        **{name: _casting(name, lambda args: HALF, casts) for name in LOWER},
        **{name: _casting(name, lambda args: torch.float32, casts) for name in FP32},
        **{name: _casting(name, widest, casts) for name in PROMOTE},
        **{name: _setting_dtype(name) for name in SET_DTYPE},
        **{name: _appending_dtype(name) for name in APPEND_DTYPE},
    }


@cache
def _cast_on_cpu_only() -> list[str]:
    """Operations that a CPU's autocast casts and CUDA's does not."""
    cuda = {*LOWER, *FP32, *PROMOTE, *SET_DTYPE, *APPEND_DTYPE}
    names = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return [
        name
        for name in names
        if name not in cuda and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", _KEY)
    ]


@contextmanager
def replace_kernels(kernels: Mapping[str, Callable[..., Any]], key: str) -> Iterator[None]:
    """Put ``kernels`` (by name in ``aten``) in place of torch's own for a dispatch key while the block runs.

    They replace those of the whole process, so one thread at a time gets in.
    """
    with _REPLACING:
        library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            with warnings.catch_warnings():
                # torch warns that kernels of its own are overridden, which is the purpose here
                warnings.simplefilter("ignore", UserWarning)
                for name, kernel in kernels.items():
                    library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
            yield
        finally:
            library._destroy()  # type: ignore[no-untyped-call]


@contextmanager
def cuda_autocast() -> Iterator[Casts]:
    """Give CPU autocast the casts of CUDA's while the block runs; enter ``torch.autocast("cpu")`` inside of it.

    Yields the casts. Autocast on a CPU in other threads follows the same rules meanwhile.
    """
    casts = Casts()
    kernels = dict.fromkeys(_cast_on_cpu_only(), fallthrough_kernel) | _make_kernels(casts)
    with replace_kernels(kernels, _KEY):
        try:
            yield casts
        finally:
            casts.forget()
