"""From a torch module and a sample of its input to WorkloadFeatures: batches, a loss, a walk, and what to say of it."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

_STAND_IN = "the mean of what the module returns stands in for its loss: give loss= for your own"
_CHECKED_BATCH = 2
_UNITS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"))


def make_sample(text: str) -> Tensor:
    """One sample by its shape: ``3x224x224`` (numbers), ``tokens:512`` (ids); shape [1, ...], all zeros."""
    kind, _, shape = text.strip().rpartition(":")
    sizes = shape.split("x")
    if kind not in ("", "tokens") or not all(size.isdecimal() and 0 < int(size) < 2**31 for size in sizes):
        raise InputError(
            "this sample input names no shape",
            got=repr(text[:200]),
            expected="the shape of one sample, such as 3x224x224, or tokens:512 for token ids",
        )
    return torch.zeros(1, *map(int, sizes), dtype=torch.long if kind else torch.float32)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Arguments of a module, positional and by name; ``rows`` is the batch that the sample itself holds."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    rows: int

    @classmethod
    def of(cls, given: Any) -> "_Sample":
        if isinstance(given, str):
            given = make_sample(given)
        named = dict(given) if isinstance(given, Mapping) else {}
        positional = () if named else tuple(given) if isinstance(given, list | tuple) else (given,)
        leaves = tree_leaves((positional, named))
        wrong = [leaf for leaf in leaves if not isinstance(leaf, Tensor | bool | int | float | str | None)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if wrong or not tensors:
            raise InputError(
                "sample_input is not usable",
                got=f"{type(wrong[0]).__module__}.{type(wrong[0]).__qualname__}" if wrong else "no tensor in it",
                expected="a tensor with the batch as its first dimension, a list or tuple of them (positional "
                "arguments) or a dict (by name), or the shape of one sample such as '3x224x224' or 'tokens:512'",
                fix="for an array of NumPy: torch.from_numpy(array)" if wrong else None,
            )
        if not all(isinstance(name, str) for name in named):
            raise InputError("sample_input is not usable", got="a dict with keys that are no text",
                             expected="names of arguments of forward()")  # fmt: skip
        if tensors[0].dim() == 0 or tensors[0].shape[0] == 0:
            raise InputError(
                "sample_input has no batch",
                got=f"a first tensor of shape {tuple(tensors[0].shape)}",
                expected="a leading batch dimension of at least 1",
                fix="write sample.unsqueeze(0) for one sample",
            )
        return cls(positional, named, int(tensors[0].shape[0]))

    def resize(self, samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with ``samples`` rows; tensors of another leading size than the first stay as they are."""

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
        """(what one sample is, in the words of ``task_input``; the length in tokens where the first tensor is ids)."""
        first = next(leaf for leaf in tree_leaves((self.positional, self.named)) if isinstance(leaf, Tensor))
        shape = tuple(first.shape[1:])
        if not first.is_floating_point():
            return (str(shape[0]), int(shape[0])) if len(shape) == 1 else ("x".join(map(str, shape)), None)
        sides = shape[1:] if len(shape) > 2 else shape[:1]
        return (str(sides[0]) if len(set(sides)) == 1 else "x".join(map(str, sides))), None


def loss_of_output(output: Any) -> Tensor:
    """The loss a module returns by itself (``output.loss``), else the sum of the means of all it can be trained on."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    values = output if isinstance(output, list | tuple | Mapping | Tensor) else getattr(output, "__dict__", output)
    leaves = [leaf for leaf in tree_leaves(dict(values) if isinstance(values, Mapping) else values)
              if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad]  # fmt: skip
    if not leaves:
        raise InputError(
            "the module returns nothing to differentiate",
            got=type(output).__name__,
            expected="a tensor that depends on trained parameters, or tuples, lists or dicts of them",
            fix="leave out no_grad() and detach(), or give loss= for what you train on",
        )
    return torch.stack([leaf.float().mean() for leaf in leaves]).sum()


def _empty_copy(module: nn.Module) -> nn.Module:
    """A copy of ``module`` of shapes alone, in fp32; weights that are one stay one."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        blank = torch.empty(tensor.shape, dtype=_widen(tensor.dtype), device="meta")
        is_weight = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(blank, requires_grad=tensor.requires_grad) if is_weight else blank
    return copy.deepcopy(module, memo)


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def _is_plain(module: nn.Module) -> bool:
    """Whether the weights stand in fp32 on the CPU, as a walk wants them."""
    tensors = [*module.parameters(), *module.buffers()]
    return all(tensor.device.type == "cpu" and tensor.dtype == _widen(tensor.dtype) for tensor in tensors)


def _unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside what compiles or replicates it."""
    inner = getattr(module, "_orig_mod", None)
    if inner is None and isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        inner = module.module
    return _unwrap(inner) if isinstance(inner, nn.Module) else module


def _cut(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:500]}"


class _Runner:
    """Calls ``compute_loss`` for the walk, checks what comes back, and notes whether it needed values."""

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
                "the module looks at values, and its weights have none here",
                got=_cut(error),
                expected="a module on the CPU in fp32, which can be run for real",
                fix="build it on the CPU, or take what depends on values out of forward()",
            ) from error
        except PrecisionTimeError:
            raise
        except Exception as error:
            raise _ForwardError(
                "the module's forward pass fails on this input",
                got=_cut(error),
                expected="arguments that forward() takes, each with the batch as its first dimension",
                fix="call module(*sample_input) once yourself",
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
    """The user's code failed; on fake tensors it may fail where it would not for real."""


def _walk_module(module: nn.Module, make_batch: Callable[[int], Any], run: _Runner) -> Mapping[str, Walk]:
    try:
        return walk_module(module, make_batch, loss_of=run)
    except _ForwardError as failed:
        if run.hollow:
            raise
        # Does it fail for real too? Then the user's own error is the one to show.
        run(copy.deepcopy(module).train(), make_batch(_CHECKED_BATCH))
        raise InputError(
            "the module runs, but cannot be walked on shapes alone",
            got=failed.got,
            expected="operations of torch on tensors",
            fix="keep NumPy, .data_ptr() and the like out of forward(), or describe the model by a card of its sizes",
        ) from failed


def count_module(
    module: nn.Module, *, sample_input: Any, loss: Callable[[Any], Any] | None = None, name: str = ""
) -> CountedModel:
    """What training ``module`` costs, from its own forward and backward pass on ``sample_input``.

    ``sample_input`` is a tensor [batch, ...], a list or tuple of them (positional arguments), a dict (by name), or the
    shape of one sample as text; its first dimension is what is varied. ``loss`` maps what the module returns to the
    scalar to differentiate; without it, see ``loss_of_output``. The module stays as it is.

    Raises ``InputError`` for a sample or loss that is not usable, a forward pass that fails, a module that trains
    nothing, returns nothing to differentiate, or does no work that can be counted.
    """
    sample = _Sample.of(sample_input)
    if loss is not None and not callable(loss):
        raise InputError("loss is not usable", got=type(loss).__name__,
                         expected="a function from what the module returns to a scalar tensor")  # fmt: skip
    stands_in = False

    def compute_loss(module: nn.Module, batch: Any) -> Any:
        nonlocal stands_in
        output = module(*batch[0], **batch[1])
        if loss is not None:
            return loss(output)
        found = loss_of_output(output)
        stands_in = found is not (output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None))
        return found

    task_input, length = sample.describe()
    # at two sizes, so that what grows with the batch tells itself from what only has as many rows
    shapes = describe_value([sample.resize(rows) for rows in (2, 3)])
    return count_training(
        module,
        sample.resize,
        compute_loss=compute_loss,
        name=name or type(_unwrap(module)).__qualname__.rpartition("<locals>.")[2],
        task_input=task_input,
        sequence_length=length,
        content=(shapes, describe_value(loss)),
        reasons_after=lambda: (_STAND_IN,) if stands_in else (),
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
    """What training ``module`` on ``make_batch(samples)`` with ``compute_loss(module, batch)`` costs; kept by content.

    ``content`` is what decides the batches and the loss, as text; the module's own content is added to it (None: the
    caller keeps the count). Weights on
    another device or in another format are walked as fp32 on the CPU: the precision is the question's. Family, kind,
    network and optimizer are left empty.
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
        kept = recall_count(key)
        if kept is not None:
            return kept
    hollow = not _is_plain(module)
    run = _Runner(compute_loss, hollow=hollow)
    walks = _walk_module(_empty_copy(module) if hollow else module, make_batch, run)
    counted = _describe_walks(walks, module, name=name, task_input=task_input, sequence_length=sequence_length)
    reasons = reasons_after()
    if run.needed_values:
        reasons += (f"{name} looks at values, so it was run for real on the sample: other values may take another way",)
    counted = CountedModel(
        workload=counted.workload, trainable_share=counted.trainable_share, reasons=(*counted.reasons, *reasons)
    )
    if key and not run.needed_values:
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
    """The walks with the sums that the closed forms read.

    With a share s of the parameters trained, the closed form takes 0.5 (1 - s) of the backward pass outside attention
    away, as if frozen and trained weights were mixed; the walk has counted what is left, so its sums are divided by
    the same factor here and come out as counted there.
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
    # a setup with this share of trained parameters takes off again what the walk did not do
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
    told = f"{name} was walked: {params:,} parameters, {flops / scale:,.4g} {unit} forward for one sample"
    reasons: tuple[str, ...] = (told,)
    if share < 1:
        reasons += (f"{share:.1%} of its parameters are trained, the rest is frozen",)
    return CountedModel(workload=workload, trainable_share=share, reasons=reasons)
