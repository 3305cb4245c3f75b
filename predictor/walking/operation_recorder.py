"""Record every operation that torch dispatches while a block runs, and how many bytes of tensors live meanwhile."""

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from precision_time.predictor.walking.cuda_kernels import IMITATED, imitate
from precision_time.predictor.walking.operations import Operation, Rule, find_rule, measure_operation

__all__ = ["OperationRecorder"]

_DEVICE = torch.ops.prim.device.default


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the ``operations`` dispatched so far, and the bytes of new storages that were alive after each call.

    ``existing`` tensors do not count as new: parameters, buffers and the batch. An operation that looks like a matrix
    product and has no rule for its FLOPs is named in one warning.
    """

    def __init__(self, existing: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.live_bytes = 0
        self.living_bytes: list[int] = []
        self._warned: set[str] = set()
        self._existing = list(existing)  # held, so that no new storage gets the id of one of theirs
        self._ignored = {tensor.untyped_storage()._cdata for tensor in self._existing}
        self._living: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a short cut: it is asked very often, and the way through the fake mode is slow
        rule = find_rule(func)
        if rule.name in IMITATED:
            result = imitate(rule.name, args, kwargs or {})
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        if not rule.free:
            self._record(rule, args, kwargs, result)
        return result

    def _record(self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        outputs: list[torch.Tensor] = []
        _collect((result,), outputs)
        if not outputs:
            return
        inputs: list[torch.Tensor] = []
        _collect(args, inputs)
        if kwargs:
            _collect(kwargs.values(), inputs)
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        shared = len(storages) < len(inputs) or len(outputs) > 1
        fresh = False
        for tensor in outputs:
            storage = tensor.untyped_storage()
            place = storage._cdata
            if place not in storages:
                fresh = True
                if place not in self._living and place not in self._ignored:
                    self._watch(storage, place)
        self.living_bytes.append(self.live_bytes)
        # The storage shows every view, also those that the schema does not call a view (_unsafe_view, reshape).
        if rule.allocates_only or not (rule.mutable or fresh):
            return
        if not rule.known and rule.name not in self._warned:
            self._warned.add(rule.name)
            warnings.warn(f"{rule.name} has no rule for its FLOPs and counts as none", RuntimeWarning, stacklevel=2)
        self.operations.append(measure_operation(rule, args, inputs=inputs, outputs=outputs, shared=shared))

    def _watch(self, storage: Any, place: int) -> None:
        size = storage.nbytes()
        self.live_bytes += size

        def free(_: Any) -> None:
            self.live_bytes -= size
            del self._living[place]

        self._living[place] = weakref.ref(storage, free)


def _collect(values: Iterable[Any], tensors: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            # a sparse gradient of an embedding consists of tensors that live already
            if value.layout == torch.strided:
                tensors.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, tensors)
