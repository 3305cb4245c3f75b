"""Walk a torch module once forward and once backward without running it, on a host without a GPU."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves, tree_map

from precision_time.predictor.walking.cuda_autocast import HALF, Casts, cuda_autocast
from precision_time.predictor.walking.cuda_kernels import cuda_kernels
from precision_time.predictor.walking.operation_recorder import OperationRecorder
from precision_time.predictor.walking.two_batches import Pass, combine_passes
from precision_time.predictor.workloads.families import find_family
from precision_time.predictor.workloads.walk import POLICIES, Walk
from precision_time.predictor.workloads.workload import WorkloadFeatures, walked_fields
from precision_time.storage.errors import InputError

__all__ = ["VALUES_NEEDED", "count_workload", "walk_module"]

LossOf = Callable[[nn.Module, Any], Tensor]

#: Two batch sizes give a line. They are above 1: a dimension of 1 broadcasts, and batch norm refuses a single value.
BATCHES = (2, 4)

#: What a fake tensor raises where an operation needs values; the walk then runs the module with real numbers.
VALUES_NEEDED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class _ModuleCopy:
    """A copy of a module for all passes of a walk, on fake tensors or (``real``) on real ones."""

    def __init__(self, module: nn.Module, *, real: bool) -> None:
        self.mode = None if real else FakeTensorMode(allow_non_fake_inputs=True)
        if self.mode is None:
            self.module = copy.deepcopy(module)
        else:
            memo: dict[int, Any] = {}
            for owner in module.modules():
                # an old-style weight norm leaves computed tensors, which refuse to be copied, among the attributes
                attributes = (value for value in vars(owner).values() if isinstance(value, Tensor))
                for tensor in (*owner._parameters.values(), *owner._buffers.values(), *attributes):
                    if tensor is not None and id(tensor) not in memo:
                        memo[id(tensor)] = _make_fake(tensor, self.mode)
            with FakeCopyMode(self.mode):
                self.module = copy.deepcopy(module, memo)
        self.module.train()

    def walk(self, batches: list[tuple[int, Any]], *, loss_of: LossOf, policy: str) -> Walk:
        """The walk through ``batches``, two pairs of a number of samples and a batch of it, under one policy."""
        with _apply_policy(policy) as casts:
            small, large = (self.run(*pair, loss_of=loss_of, casts=casts) for pair in batches)
            if not small.matches(large):
                # Some modules fill a cache at their first call.
                small = self.run(*batches[0], loss_of=loss_of, casts=casts)
        return combine_passes(small, large)

    def run(self, samples: int, batch: Any, *, loss_of: LossOf, casts: Casts | None) -> Pass:
        """One pass forward and backward, under autocast when there are ``casts``."""
        self.module.zero_grad(set_to_none=True)
        if (mode := self.mode) is not None:
            batch = tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)
        batch_tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        recorder = OperationRecorder([*self.module.parameters(), *self.module.buffers(), *batch_tensors])
        with ExitStack() as stack:
            if mode is not None:
                stack.enter_context(mode)
            stack.enter_context(recorder)
            with torch.autocast("cpu", dtype=HALF, enabled=casts is not None):
                loss = loss_of(self.module, batch)
            if casts is not None:
                casts.forget()
            if not loss.requires_grad:
                raise InputError(
                    "the module has nothing to train",
                    got="a loss that depends on no parameter with requires_grad",
                    expected="a scalar loss of trained parameters",
                )
            forward, recorder.operations = recorder.operations, []
            # What lives now is what the backward pass needs, and the loss itself.
            saved_bytes = recorder.live_bytes - loss.untyped_storage().nbytes()
            ready: dict[int, tuple[int, int]] = {}

            def note(parameter: Tensor) -> None:
                ready[id(parameter)] = (_gradient_bytes(parameter), len(recorder.operations))

            hooks = [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]  # type: ignore[no-untyped-call]
            try:
                loss.backward()  # type: ignore[no-untyped-call]
            finally:
                for hook in hooks:
                    hook.remove()
        self.module.zero_grad(set_to_none=True)
        return Pass(
            samples=samples,
            forward=forward,
            backward=recorder.operations,
            saved_bytes=saved_bytes,
            living_bytes=recorder.living_bytes,
            ready=list(ready.values()),
        )


def _gradient_bytes(parameter: Tensor) -> int:
    """Bytes of a gradient; 0 for a sparse one, which holds only the rows that the batch looked up."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        return 0
    return parameter.numel() * parameter.element_size()


def _make_fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor on the CPU like ``tensor``, whatever device that is on."""
    if nn.parameter.is_lazy(tensor):
        raise InputError(
            "the module cannot be walked yet",
            got="a lazy parameter without a shape",
            expected="parameters with shapes",
            fix="run it once on a small batch first",
        )
    with mode:
        if tensor.layout == torch.strided:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        else:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


@contextmanager
def _apply_policy(policy: str) -> Iterator[Casts | None]:
    if policy == "fp32":
        with cuda_kernels():
            yield None
    else:
        with cuda_autocast() as casts, cuda_kernels(casts=casts):
            yield casts


def walk_module(module: nn.Module, make_batch: Callable[[int], Any], *, loss_of: LossOf) -> dict[str, Walk]:
    """Walk ``module`` forward with its loss and backward, by policy: ``fp32`` and ``amp`` (CUDA's 16-bit autocast).

    ``make_batch(samples)`` gives a batch, ``loss_of(module, batch)`` the scalar loss. Parameters may be real, fake or
    on the meta device. The walk follows a copy on fake tensors, which have shapes alone. A module that looks at values
    is run with real numbers instead: the counts are the same, it takes longer. While a walk runs, CUDA's kernels and
    casts replace those of the CPU in the whole process, and other walks wait. Every ``scaled_dot_product_attention``
    counts as a fused kernel that keeps no scores; attention that a module writes out itself counts as written.

    Raises ``InputError`` for a module without trained parameters, for one with lazy parameters, and for one that
    looks at values but has none.
    """
    batches = [(samples, make_batch(samples)) for samples in BATCHES]

    def walk_copy(*, real: bool) -> dict[str, Walk]:
        module_copy = _ModuleCopy(module, real=real)
        return {policy: module_copy.walk(batches, loss_of=loss_of, policy=policy) for policy in POLICIES}

    try:
        return walk_copy(real=False)
    except VALUES_NEEDED as error:
        if not all(map(_has_values, (*module.parameters(), *module.buffers()))):
            raise InputError(
                "the module looks at values, and its parameters have none",
                got=f"{type(error).__name__}: {error}",
                expected="a module that needs shapes alone, or one with real parameters",
                fix="build it with real parameters",
            ) from error
    with torch.random.fork_rng(devices=[]):
        return walk_copy(real=True)


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and type(tensor) in (Tensor, nn.Parameter, nn.Buffer)


def count_workload(
    module: nn.Module, make_batch: Callable[[int], Any], *, loss_of: LossOf, name: str, family: str, task_input: str,
    optimizer: str,
) -> WorkloadFeatures:  # fmt: skip
    """Walk ``module`` and describe it as a workload; the counts outside of ``walks`` are those of the fp32 walk.

    ``make_batch`` and ``loss_of`` as in ``walk_module``. FLOPs count 2 per multiply-add in matrix products,
    convolutions (groups respected in both directions) and attention (4 B H Sq Sk D forward, 2.5 times that backward;
    attention made of plain products counts as those). Bytes are what every operation reads of its distinct inputs and
    writes; views are free. ``params`` counts trained parameters.
    Raises ``InputError`` when nothing countable was found.
    """
    walks = walk_module(module, make_batch, loss_of=loss_of)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    flops = walks["fp32"].total("flops", phase="forward")
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
        **walked_fields(walks),
    )
