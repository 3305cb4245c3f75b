"""Count what training a torch module costs, by a walk on batches made from a sample of its input."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from precision_time.predictor.walking.walk_module import VALUES_NEEDED, walk_module
from precision_time.predictor.workloads.module_content import describe_module, describe_value
from precision_time.predictor.workloads.walk import Walk
from precision_time.predictor.workloads.walk_cache import (
    CountedModel,
    counting_version,
    hash_content,
    recall_count,
    remember_count,
)
from precision_time.predictor.workloads.workload import WorkloadFeatures, walked_fields
from precision_time.storage.errors import InputError, PrecisionTimeError

__all__ = ["count_module", "count_training", "loss_of_output", "make_sample"]

_MEAN_LOSS = "took the mean of the module's outputs for its loss; loss= chooses another"
_CHECKED_BATCH = 2
_UNITS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))


def make_sample(text: str) -> Tensor:
    """One sample [1, ...] of zeros from its shape: ``3x224x224`` for numbers, ``tokens:512`` for token ids."""
    kind, _, shape = text.strip().rpartition(":")
    sizes = shape.split("x")
    if kind not in ("", "tokens") or not all(size.isdecimal() and 0 < int(size) < 2**31 for size in sizes):
        raise InputError(
            "the sample input is not a shape",
            got=repr(text[:200]),
            expected="the shape of one sample, such as 3x224x224, or tokens:512 for token ids",
        )
    return torch.zeros(1, *map(int, sizes), dtype=torch.long if kind else torch.float32)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Arguments of ``forward()``, positional and by name; ``rows`` is the batch size of the sample itself."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    rows: int

    @classmethod
    def read(cls, sample: Any) -> "_Sample":
        if isinstance(sample, str):
            sample = make_sample(sample)
        named = dict(sample) if isinstance(sample, Mapping) else {}
        positional = () if named else tuple(sample) if isinstance(sample, list | tuple) else (sample,)
        leaves = tree_leaves((positional, named))
        wrong = [leaf for leaf in leaves if not isinstance(leaf, Tensor | bool | int | float | str | None)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if wrong or not tensors:
            raise InputError(
                "sample_input is not usable",
                got=f"{type(wrong[0]).__module__}.{type(wrong[0]).__qualname__}" if wrong else "no tensor in it",
                expected="a tensor with the batch as its first dimension, a list or tuple of tensors (positional "
                "arguments), a dict of them (by name), or the shape of one sample such as '3x224x224' or 'tokens:512'",
                fix="turn a NumPy array into a tensor by torch.from_numpy(array)" if wrong else None,
            )
        if not all(isinstance(name, str) for name in named):
            raise InputError("sample_input is not usable", got="a dict with keys that are not text",
                             expected="names of the arguments of forward() as keys")  # fmt: skip
        if tensors[0].dim() == 0 or tensors[0].shape[0] == 0:
            raise InputError(
                "sample_input has no batch",
                got=f"a first tensor of shape {tuple(tensors[0].shape)}",
                expected="a leading batch dimension of at least 1",
                fix="turn one sample into a batch by sample.unsqueeze(0)",
            )
        return cls(positional, named, int(tensors[0].shape[0]))

    def resize(self, samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with ``samples`` rows; a tensor with another leading size than the first keeps its rows."""

        def repeat(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            leaf = leaf.detach().to("cpu") if not leaf.is_meta else torch.zeros(leaf.shape, dtype=leaf.dtype)
            if leaf.is_floating_point():
                leaf = leaf.float()
            if leaf.dim() == 0 or leaf.shape[0] != self.rows:
                return leaf
            return leaf[torch.arange(samples) % self.rows]

        return tree_map(repeat, (self.positional, self.named))  # type: ignore[no-any-return]

    def describe(self) -> tuple[str, int | None]:
        """The size of one sample as a ``task_input``, and its length in tokens where the first tensor holds ids."""
        first = next(leaf for leaf in tree_leaves((self.positional, self.named)) if isinstance(leaf, Tensor))
        shape = tuple(first.shape[1:])
        if not first.is_floating_point():
            return (str(shape[0]), int(shape[0])) if len(shape) == 1 else ("x".join(map(str, shape)), None)
        sides = shape[1:] if len(shape) > 2 else shape[:1]
        return (str(sides[0]) if len(set(sides)) == 1 else "x".join(map(str, sides))), None


def _find_loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def loss_of_output(output: Any) -> Tensor:
    """The loss that a module returns (``output.loss``), else the sum of the means of its differentiable outputs."""
    loss = _find_loss(output)
    if isinstance(loss, Tensor):
        return loss
    values = output if isinstance(output, list | tuple | Mapping | Tensor) else getattr(output, "__dict__", output)
    leaves = [leaf for leaf in tree_leaves(dict(values) if isinstance(values, Mapping) else values)
              if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad]  # fmt: skip
    if not leaves:
        raise InputError(
            "the module returns nothing to differentiate",
            got=type(output).__name__,
            expected="a tensor that depends on trained parameters, or tuples, lists or dicts of such tensors",
            fix="remove no_grad() and detach() from forward(), or give the loss as loss=",
        )
    return torch.stack([leaf.float().mean() for leaf in leaves]).sum()


def _empty_copy(module: nn.Module) -> nn.Module:
    """A copy of ``module`` that has shapes alone, in fp32; tied weights stay tied."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        blank = torch.empty(tensor.shape, dtype=_widen(tensor.dtype), device="meta")
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(blank, requires_grad=tensor.requires_grad) if is_weight else blank
    return copy.deepcopy(module, memo)


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def _is_plain(module: nn.Module) -> bool:
    """Whether all weights are in fp32 on the CPU, as a walk needs them."""
    tensors = [*module.parameters(), *module.buffers()]
    return all(tensor.device.type == "cpu" and tensor.dtype == _widen(tensor.dtype) for tensor in tensors)


def _unwrap(module: nn.Module) -> nn.Module:
    """The user's module without the wrapper that compiles or replicates it."""
    inner = getattr(module, "_orig_mod", None)
    if inner is None and isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner = module.module
    return _unwrap(inner) if isinstance(inner, nn.Module) else module


def _shorten(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:500]}"


class _CheckedLoss:
    """Calls ``compute_loss`` for the walk, checks the result, and notes whether it needed values.

    ``hollow`` says that the module has shapes alone and no values to give.
    """

    def __init__(self, compute_loss: Callable[[nn.Module, Any], Any], *, hollow: bool) -> None:
        self.compute_loss, self.hollow = compute_loss, hollow
        self.needed_values = False

    def __call__(self, module: nn.Module, batch: Any) -> Tensor:
        try:
            loss = self.compute_loss(module, batch)
        except VALUES_NEEDED as error:
            self.needed_values = True
            if not self.hollow:
                raise
            raise InputError(
                "the module looks at values, and its weights are not in fp32 on the CPU",
                got=_shorten(error),
                expected="a module that can be run with its values",
                fix="build it on the CPU in fp32, or remove code that depends on values from forward()",
            ) from error
        except PrecisionTimeError:
            raise
        except Exception as error:
            raise _ForwardError(
                "the module's forward pass fails on this input",
                got=_shorten(error),
                expected="arguments that forward() takes, each with the batch as its first dimension",
                fix="check that module(*sample_input) runs",
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            got = f"shape {tuple(loss.shape)}, requires_grad {loss.requires_grad}" if isinstance(loss, Tensor) else ""
            raise InputError(
                "the loss is not usable",
                got=got or type(loss).__name__,
                expected="a tensor of one value that depends on trained parameters",
            )
        return loss


class _ForwardError(InputError):
    """The user's code failed; on fake tensors it may fail where it would not on real ones."""


def _walk(module: nn.Module, make_batch: Callable[[int], Any], loss_of: _CheckedLoss) -> Mapping[str, Walk]:
    try:
        return walk_module(module, make_batch, loss_of=loss_of)
    except _ForwardError as error:
        if loss_of.hollow:
            raise
        # If it fails on real tensors too, this raises the user's own error.
        loss_of(copy.deepcopy(module).train(), make_batch(_CHECKED_BATCH))
        raise InputError(
            "the module runs, but cannot be walked on shapes alone",
            got=error.got,
            expected="operations of torch on tensors",
            fix="remove NumPy, .data_ptr() and the like from forward(), or describe the model by a card of its sizes",
        ) from error


def count_module(
    module: nn.Module, *, sample_input: Any, loss: Callable[[Any], Any] | None = None, name: str = ""
) -> CountedModel:
    """Count what training ``module`` costs, from a walk of its forward and backward pass on ``sample_input``.

    ``sample_input`` is a tensor [batch, ...], a list or tuple of tensors (positional arguments), a dict of them (by
    name), or the shape of one sample as text; the walk varies its first dimension. ``loss`` maps the module's output to
    the scalar to differentiate (default: ``loss_of_output``). The module is not changed.

    Raises ``InputError`` for a sample or loss that is not usable, a forward pass that fails, and a module that trains
    nothing, returns nothing to differentiate, or does no work that can be counted.
    """
    sample = _Sample.read(sample_input)
    if loss is not None and not callable(loss):
        raise InputError("loss is not usable", got=type(loss).__name__,
                         expected="a function from the module's output to a scalar tensor")  # fmt: skip
    is_mean = False

    def compute_loss(module: nn.Module, batch: Any) -> Any:
        nonlocal is_mean
        output = module(*batch[0], **batch[1])
        if loss is not None:
            return loss(output)
        chosen_loss = loss_of_output(output)
        is_mean = chosen_loss is not _find_loss(output)
        return chosen_loss

    task_input, length = sample.describe()
    # at two sizes: a tensor that grows with the batch differs from one that happens to have as many rows
    shapes = describe_value([sample.resize(rows) for rows in (2, 3)])
    return count_training(
        module,
        sample.resize,
        compute_loss=compute_loss,
        name=name or type(_unwrap(module)).__qualname__.rpartition("<locals>.")[2],
        task_input=task_input,
        sequence_length=length,
        content=(shapes, describe_value(loss)),
        reasons_after=lambda: (_MEAN_LOSS,) if is_mean else (),
    )


def count_training(
    module: nn.Module,
    make_batch: Callable[[int], Any],
    *,
    compute_loss: Callable[[nn.Module, Any], Any],
    name: str,
    task_input: str = "",
    sequence_length: int | None = None,
    content: tuple[str, ...] | None,
    reasons_after: Callable[[], tuple[str, ...]] = tuple,
) -> CountedModel:
    """Count what training ``module`` on ``make_batch(samples)`` with ``compute_loss(module, batch)`` costs.

    The count is kept on disk by the content of the module and by ``content``, text that decides the batches and the
    loss; None: the caller keeps the count. ``reasons_after`` gives further reasons once the walk is done. Weights on
    another device or in another format are walked as fp32 on the CPU, since the question chooses the precision.
    Family, kind, network and optimizer stay empty.
    """
    module = _unwrap(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError(
            f"{name} trains nothing",
            got=f"{sum(1 for _ in module.parameters())} parameters, none with requires_grad",
            expected="parameters that receive gradients",
        )
    key = ""
    if content is not None:
        key = hash_content([counting_version("torch"), name, task_input, *content, *describe_module(module)])
        recalled = recall_count(key)
        if recalled is not None:
            return recalled
    hollow = not _is_plain(module)
    loss_of = _CheckedLoss(compute_loss, hollow=hollow)
    walks = _walk(_empty_copy(module) if hollow else module, make_batch, loss_of)
    counted = _describe_walks(walks, module, name=name, task_input=task_input, sequence_length=sequence_length)
    reasons = (*counted.reasons, *reasons_after())
    if loss_of.needed_values:
        reasons += (f"{name} looks at values, so the sample was run for real: other values may cost more or less",)
    counted = replace(counted, reasons=reasons)
    if key and not loss_of.needed_values:
        remember_count(key, counted)
    return counted


def _describe_walks(
    walks: Mapping[str, Walk],
    module: nn.Module,
    *,
    name: str,
    task_input: str,
    sequence_length: int | None,
) -> CountedModel:
    """The workload of ``walks``, with the sums that the closed forms read.

    With a share s of the parameters trained, the closed form takes away 0.5 (1 - s) of the backward pass outside
    attention. The walk counted only the work that is left, so its sums are divided by the same factor here.
    """
    walk = walks["fp32"]
    flops = walk.total("flops", phase="forward")
    if flops <= 0:
        raise InputError(
            f"{name} does no work that can be counted",
            got=f"{flops:g} forward FLOPs per sample",
            expected="matrix products, convolutions or attention over the batch",
        )
    parameters = list(module.parameters())
    params = sum(parameter.numel() for parameter in parameters)
    share = sum(parameter.numel() for parameter in parameters if parameter.requires_grad) / params
    counted = walked_fields(walks)
    # the share that the closed form takes away
    frozen = 0.5 * (1 - share)
    counted["backward_flops_per_sample"] /= 1 - frozen * (1 - counted["attention_flops_share"])
    counted["backward_bytes_fixed"] /= 1 - frozen
    workload = WorkloadFeatures(
        name=name,
        family="",
        task_input=task_input,
        optimizer="",
        params=params,
        parameter_tensors=len(parameters),
        sequence_length=sequence_length,
        **counted,
    )
    scale, unit = next((pair for pair in _UNITS if flops >= pair[0]), _UNITS[-1])
    summary = f"{name} was walked: {params:,} parameters, {flops / scale:,.4g} {unit} in the forward pass of one sample"
    reasons: tuple[str, ...] = (summary,)
    if share < 1:
        reasons += (f"{share:.1%} of its parameters are trained, the others are frozen",)
    return CountedModel(workload=workload, trainable_share=share, reasons=reasons)
