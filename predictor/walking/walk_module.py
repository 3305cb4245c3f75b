"""Walk a torch module once forward and once backward without running it, on a host without a GPU."""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves, tree_map

from precision_time.predictor.walking.cuda_autocast import Casts, cuda_autocast
from precision_time.predictor.walking.cuda_kernels import ATTENTIONS, cuda_kernels, make_autocast_kernels
from precision_time.predictor.walking.operation_recorder import OperationRecorder
from precision_time.predictor.walking.two_batches import Pass, combine_passes
from precision_time.predictor.workloads.families import find_family
from precision_time.predictor.workloads.walk import POLICIES, Walk
from precision_time.predictor.workloads.workload import WorkloadFeatures, walked_fields
from precision_time.storage.errors import InputError

__all__ = ["VALUES_NEEDED", "count_workload", "walk_both", "walk_module"]

LossOf = Callable[[torch.nn.Module, Any], torch.Tensor]

#: Two batch sizes give a line; above 1, since a dimension of one broadcasts and batch norm refuses a single value.
BATCHES = (2, 4)

#: What a fake tensor raises where an operation needs values; the walk then runs the module for real.
VALUES_NEEDED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class _Copy:
    """A copy of a module on fake tensors, or (``real``) on real ones, that many passes share."""

    def __init__(self, module: torch.nn.Module, *, real: bool) -> None:
        self.mode = None if real else FakeTensorMode(allow_non_fake_inputs=True)
        if self.mode is None:
            self.module = copy.deepcopy(module)
        else:
            memo: dict[int, Any] = {}
            for owner in module.modules():
                # an old-style weight norm leaves computed tensors, which refuse to be copied, among the attributes
                plain = (item for item in vars(owner).values() if isinstance(item, torch.Tensor))
                for tensor in (*owner._parameters.values(), *owner._buffers.values(), *plain):
                    if tensor is not None and id(tensor) not in memo:
                        memo[id(tensor)] = _fake(tensor, self.mode)
            with FakeCopyMode(self.mode):
                self.module = copy.deepcopy(module, memo)
        self.module.train()

    def take_batch(self, batch: Any) -> Any:
        mode = self.mode
        if mode is None:
            return batch
        return tree_map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)

    def run(self, batch: Any, *, samples: int, loss_of: LossOf, casts: Casts | None) -> Pass:
        """One pass, under autocast when there are ``casts`` to make."""
        self.module.zero_grad(set_to_none=True)
        batch = self.take_batch(batch)
        batch_tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        recorder = OperationRecorder([*self.module.parameters(), *self.module.buffers(), *batch_tensors])
        with ExitStack() as stack:
            if self.mode is not None:
                stack.enter_context(self.mode)
            stack.enter_context(recorder)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts is not None):
                loss = loss_of(self.module, batch)
            if casts is not None:
                casts.forget()
            if not loss.requires_grad:
                raise InputError(
                    "a module has nothing to train",
                    got="a loss that depends on no parameter with requires_grad",
                    expected="a scalar loss of trained parameters",
                )
            forward, recorder.operations = recorder.operations, []
            # What lives now is what the graph keeps, and the loss itself.
            saved = recorder.live_bytes - loss.untyped_storage().nbytes()
            ready: dict[int, tuple[int, int]] = {}

            def note(parameter: torch.Tensor) -> None:
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
            saved_bytes=saved,
            living_bytes=recorder.living_bytes,
            ready=list(ready.values()),
        )


def _gradient_bytes(parameter: torch.Tensor) -> int:
    """Bytes of a gradient; none of a sparse one, whose rows are those that the batch looked up."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout != torch.strided:
        return 0
    return parameter.numel() * parameter.element_size()


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor of a CPU like ``tensor``, wherever that lives."""
    if torch.nn.parameter.is_lazy(tensor):
        raise InputError(
            "a module is not ready to be walked",
            got="a lazy parameter without a shape",
            expected="parameters with shapes",
            fix="run it once on a small batch first",
        )
    with mode:
        if tensor.layout == torch.strided:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        else:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)


@contextmanager
def _policy(policy: str, *, attention: str) -> Iterator[Casts | None]:
    if policy == "fp32":
        with cuda_kernels(attention=attention):
            yield None
        return
    replace = make_autocast_kernels if attention == "math" else None
    with cuda_autocast(replace=replace) as casts, cuda_kernels(attention=attention, casts=casts):
        yield casts


def walk_module(
    module: torch.nn.Module,
    make_batch: Callable[[int], Any],
    *,
    loss_of: LossOf,
    policy: str = "fp32",
    attention: str = "fused",
    batches: tuple[int, int] = BATCHES,
) -> Walk:
    """Walk ``module`` at two batch sizes under one of ``POLICIES``; see ``walk_both``."""
    walks = _walk(module, make_batch, loss_of=loss_of, policies=(policy,), attention=attention, batches=batches)
    return walks[policy]


def walk_both(
    module: torch.nn.Module,
    make_batch: Callable[[int], Any],
    *,
    loss_of: LossOf,
    attention: str = "fused",
    batches: tuple[int, int] = BATCHES,
) -> dict[str, Walk]:
    """Walk ``module`` forward with its loss and backward, by policy: ``fp32`` and ``amp`` (16-bit autocast of CUDA).

    ``make_batch(samples)`` gives a batch, ``loss_of(module, batch)`` the scalar loss. Parameters may be real, fake or
    on the meta device. A copy is walked, on fake tensors (shapes alone); one that looks at values, which shapes cannot
    tell, is run for real instead: same counts, more time. While a walk runs, CUDA's paths and casts replace those of a
    CPU in the whole process; one walk at a time gets in. ``attention`` is one of ``ATTENTIONS`` and rules every
    ``scaled_dot_product_attention``; attention that a module writes out itself is counted as it is written.

    Raises ``InputError`` for unknown choices, for a module without trained parameters and for one that needs values
    but has none.
    """
    return _walk(module, make_batch, loss_of=loss_of, policies=POLICIES, attention=attention, batches=batches)


def _walk(
    module: torch.nn.Module,
    make_batch: Callable[[int], Any],
    *,
    loss_of: LossOf,
    policies: tuple[str, ...],
    attention: str,
    batches: tuple[int, int],
) -> dict[str, Walk]:
    for what, got, known in (("policy", policies[0], POLICIES), ("attention", attention, ATTENTIONS)):
        if got not in known:
            raise InputError(f"a walk knows no such {what}", got=repr(got), expected=" or ".join(known))
    if not 1 <= batches[0] < batches[1]:
        raise InputError("a walk needs two batch sizes", got=repr(batches), expected="a small and a larger one")
    made = [(samples, make_batch(samples)) for samples in batches]

    def walk_copy(*, real: bool) -> dict[str, Walk]:
        copied = _Copy(module, real=real)
        return {
            policy: _walk_copy(copied, made, loss_of=loss_of, policy=policy, attention=attention) for policy in policies
        }

    try:
        return walk_copy(real=False)
    except VALUES_NEEDED as error:
        if any(tensor.is_meta or not _is_real(tensor) for tensor in (*module.parameters(), *module.buffers())):
            raise InputError(
                "a module looks at values that it has not got",
                got=f"{type(error).__name__}: {error}",
                expected="a module of shapes alone, or one with real parameters",
                fix="build it with real parameters",
            ) from error
    with torch.random.fork_rng(devices=[]):
        return walk_copy(real=True)


def _is_real(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _walk_copy(copied: _Copy, made: list[tuple[int, Any]], *, loss_of: LossOf, policy: str, attention: str) -> Walk:
    with _policy(policy, attention=attention) as casts:
        small, large = (copied.run(batch, samples=samples, loss_of=loss_of, casts=casts) for samples, batch in made)
        if not small.matches(large):
            # Some modules fill a cache at their first call.
            samples, batch = made[0]
            small = copied.run(batch, samples=samples, loss_of=loss_of, casts=casts)
    return combine_passes(small, large)


def count_workload(
    module: torch.nn.Module,
    make_batch: Callable[[int], Any],
    *,
    loss_of: LossOf,
    name: str,
    family: str,
    task_input: str,
    optimizer: str,
) -> WorkloadFeatures:
    """Walk ``module`` under both policies; counts split into a part per sample and a fixed part are of the fp32 walk.

    ``make_batch`` and ``loss_of`` as in ``walk_both``. FLOPs count 2 per multiply-add in matrix products, convolutions
    (groups respected in both directions) and attention (4 B H Sq Sk D forward, 2.5 times that backward for a flash
    kernel; attention made of plain products is counted by them). Bytes are what every operation reads of its distinct
    inputs and writes; views are free. ``params`` counts trained parameters.
    Raises ``InputError`` when nothing countable was found.
    """
    walks = walk_both(module, make_batch, loss_of=loss_of)
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
