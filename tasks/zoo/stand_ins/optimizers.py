"""The optimizers of the stand-ins by name, and the workload that trains a stand-in with one of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from precision_time.tasks.workloads import Workload

__all__ = ["make_workload"]

#: Small learning rates: labels are random, and a diverging loss would be timed on infinities.
#: Plain SGD and Adagrad take the sparse gradients of embedding tables; the others need dense ones.
_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01),
}


def make_workload(
    name: str, module: nn.Module, *, family: str, task_input: str, optimizer: str,
    make_batch: Callable[[int, torch.device | str], Any], compute_loss: Callable[[nn.Module, Any], Tensor],
) -> Workload:  # fmt: skip
    """The workload that trains ``module`` with the optimizer of this name."""
    return Workload(
        name=name,
        family=family,
        task_input=task_input,
        module=module,
        make_batch=make_batch,
        compute_loss=compute_loss,
        make_optimizer=_OPTIMIZERS[optimizer],
        optimizer_name=optimizer,
    )
