"""The optimizers of the stand-ins, under the names by which the predictor knows them."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

__all__ = ["OPTIMIZERS"]

#: Small learning rates: labels are random, and a diverging loss would be timed on infinities.
#: Plain SGD and Adagrad take the sparse gradients of embedding tables; the others need dense ones.
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "sgd_momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01),
}
