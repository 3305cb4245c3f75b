"""Optimizers: bytes and operations of a step, and bytes of states, one row each."""

from dataclasses import dataclass

from precision_time.storage.errors import UnknownNameError

__all__ = ["OPTIMIZERS", "Optimizer", "find_optimizer"]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """Costs of one optimizer.

    ``step_bytes`` are read and written per parameter in a step, with fp32 parameters, gradients and states.
    ``step_operations`` are elementwise operations per parameter tensor. ``state_bytes`` are kept per parameter between
    steps, in fp32.
    """

    step_bytes: int
    step_operations: int
    state_bytes: float


#: Operations are counted in the loop forms of torch.optim 2.13; LAMB adds two norms, their ratio and a scaling to Adam.
#: Adafactor keeps one value a row and one a column of each matrix (Shazeer & Stern, 2018): 8 bytes a parameter over the
#: width of the matrix, here 400. NovoGrad's second moment is one number a tensor (Ginsburg et al., 2019), so its first
#: moment is all that counts.
OPTIMIZERS = {
    "sgd": Optimizer(12, 1, 0.0),
    "sgd_momentum": Optimizer(20, 3, 4.0),
    "rmsprop": Optimizer(20, 6, 4.0),
    "adagrad": Optimizer(20, 5, 4.0),
    "novograd": Optimizer(20, 8, 4.0),
    "adafactor": Optimizer(20, 12, 0.02),
    "adam": Optimizer(28, 8, 8.0),
    "adamw": Optimizer(28, 9, 8.0),
    "lamb": Optimizer(36, 12, 8.0),
}


def find_optimizer(name: str) -> Optimizer:
    """The costs of the optimizer ``name``; raises ``UnknownNameError`` for one that is not in ``OPTIMIZERS``."""
    if name not in OPTIMIZERS:
        raise UnknownNameError("optimizer", name, OPTIMIZERS)
    return OPTIMIZERS[name]
