"""Implementation: facts about a training script, beside model and precision, that decide how fast it runs."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Checkpointing", "Implementation"]

#: Which activations are computed again in the backward pass instead of being kept.
Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """Facts about the code that was, or will be, run. None means not known.

    ``framework`` is the plain name (``pytorch``, ``tensorflow``, ``mxnet``, ``jax``, ``megatron``, ...).
    ``software_year`` is the year in which its container or release appeared, e.g. 2022.5. ``trainable_share`` is the
    share of the parameters that receive gradients (below 1 for adapters such as LoRA). ``tuned`` marks submissions to
    a benchmark contest. ``optimizer_step``, ``host_copy``, ``evaluation_inside`` and ``startup_inside`` say whether
    the measured time includes the optimizer, the copy of the inputs to the device, evaluation, and start-up.
    """

    framework: str = "pytorch"
    software_year: float | None = None
    channels_last: bool | None = None
    compiled: bool | None = None
    checkpointing: Checkpointing | None = None
    flash_attention: bool | None = None
    fused_kernels: bool | None = None
    packed: bool | None = None
    trainable_share: float = 1.0
    tuned: bool = False
    optimizer_step: bool = True
    host_copy: bool = False
    evaluation_inside: bool = False
    startup_inside: bool = False
