"""Put a precision policy in force on a torch module, check that it is, and find what a device cannot run."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from precision_time.predictor.setup.precision import PRECISIONS, Precision
from precision_time.storage.errors import PrecisionUnsupportedError

__all__ = ["AppliedPrecision", "apply_precision", "check_switches", "reason_unsupported"]

HALF_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: A scale at which the mean loss is far below the limit of fp16, so that no step is lost to searching; it then stays.
SETTLED_LOSS_SCALE = 2.0**10
NEVER_GROW = 2**31 - 1

#: The first compute capability with TF32 and bfloat16 tensor cores; earlier GPUs emulate bfloat16.
AMPERE = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedPrecision:
    """A policy in force: its autocast format or None, the format of all parameters, and its loss scaler or None."""

    effective: str
    device_type: str
    autocast_dtype: torch.dtype | None
    parameter_dtype: torch.dtype
    scaler: torch.amp.GradScaler | None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of a forward pass."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)

    def cast_batch(self, batch: Any) -> Any:
        """``batch`` with its floating tensors in the format of the parameters."""

        def cast(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                return leaf.to(self.parameter_dtype)
            return leaf

        return tree_map(cast, batch)


def apply_precision(precision: Precision, module: nn.Module, *, device: torch.device) -> AppliedPrecision:
    """Set the process's TF32 switches, cast ``module`` in place where the policy is pure, and check the effect.

    Raises ``PrecisionUnsupportedError`` when the device cannot run the policy or another precision came into force.
    """
    reason = _static_reason(precision, device=device)
    if reason is not None:
        raise _refusal(precision, device=device, reason=reason)
    use_tf32 = precision.compute == "tf32"
    # By default TF32 is off for matrix products only: cuDNN convolutions use it.
    torch.set_float32_matmul_precision("high" if use_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = use_tf32
    half = HALF_TYPES.get(precision.compute)
    if half is not None and not precision.is_mixed:
        module.to(half)
    scaler = None
    if precision.loss_scaling:
        scaler = torch.amp.GradScaler(device.type, init_scale=SETTLED_LOSS_SCALE, growth_interval=NEVER_GROW)
    applied = AppliedPrecision(
        effective=precision.name,
        device_type=device.type,
        autocast_dtype=half if precision.is_mixed else None,
        parameter_dtype=half if half is not None and not precision.is_mixed else torch.float32,
        scaler=scaler,
    )
    in_force = _precision_in_force(applied, module, device=device)
    if in_force != precision.name:
        raise _refusal(precision, device=device, reason=f"{in_force} came into force instead")
    return applied


def _precision_in_force(applied: AppliedPrecision, module: nn.Module, *, device: torch.device) -> str:
    """The canonical name of the precision of products, by a real product, the parameters and the switches."""
    factor = torch.ones(8, 8, device=device, dtype=applied.parameter_dtype)
    with applied.autocast():
        product = torch.mm(factor, factor).dtype
    stored = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    names = {dtype: name for name, dtype in HALF_TYPES.items()}
    if product in names and stored == {product}:
        return names[product]
    if product in names and stored == {torch.float32}:
        return f"amp_{names[product]}"
    if product == torch.float32 and stored == {torch.float32}:
        return _switches_in_force()
    return f"products in {product} over parameters in {sorted(map(str, stored))}"


def _switches_in_force() -> str:
    """``fp32`` or ``tf32`` where the switches of products and of convolutions agree, else both of their values."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if (products != "highest") != convolutions:
        return f"float32_matmul_precision={products} with cudnn.allow_tf32={convolutions}"
    return "tf32" if convolutions else "fp32"


def check_switches(applied: AppliedPrecision, *, device: torch.device) -> None:
    """Raise ``PrecisionUnsupportedError`` if a model has changed a TF32 switch of the process since it was set."""
    in_force, expected = _switches_in_force(), "tf32" if applied.effective == "tf32" else "fp32"
    if in_force != expected:
        reason = f"the model changed the TF32 switches: {in_force} instead of {expected}"
        raise _refusal(PRECISIONS[applied.effective], device=device, reason=reason)


def _refusal(precision: Precision, *, device: torch.device, reason: str) -> PrecisionUnsupportedError:
    return PrecisionUnsupportedError(
        f"this {'GPU' if device.type == 'cuda' else 'CPU'} does not run {precision.name}",
        got=reason,
        expected="a precision that the device computes in",
        fix="leave this precision out of the campaign, or measure it on another device",
    )


def reason_unsupported(precision: Precision, *, device: torch.device) -> str | None:
    """Why ``device`` cannot train in ``precision``, by fixed rules and then by a small step; None if it can."""
    reason = _static_reason(precision, device=device)
    if reason is not None:
        return reason
    try:
        _try_step(precision, device=device)
    except PrecisionUnsupportedError as error:
        return error.got
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _static_reason(precision: Precision, *, device: torch.device) -> str | None:
    if precision.compute not in ("fp32", "tf32", "fp16", "bf16"):
        return f"training in {precision.name} needs kernels that torch does not have"
    if device.type != "cuda":
        return "TF32 is a mode of NVIDIA tensor cores" if precision.compute == "tf32" else None
    capability = torch.cuda.get_device_capability(device)
    if precision.compute in ("tf32", "bf16") and capability < AMPERE:
        return (
            f"{precision.compute} needs compute capability 8.0 (Ampere); this GPU has {capability[0]}.{capability[1]}"
        )
    return None


class _Sample(nn.Module):
    """One small layer of every kind that the named workloads use."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 16)
        self.convolution = nn.Conv2d(1, 16, 3, padding=1)
        self.batch_norm, self.layer_norm = nn.BatchNorm2d(16), nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        tokens = self.words(words)
        image = F.max_pool2d(F.relu(self.batch_norm(self.convolution(tokens[:, None]))), 2)
        heads = self.layer_norm(self.linear(tokens))[:, None]
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return F.gelu(mixed[:, 0]).mean(dim=1) + image.mean(dim=(2, 3))


def _try_step(precision: Precision, *, device: torch.device) -> None:
    module = _Sample().to(device)
    applied = apply_precision(precision, module, device=device)
    optimizer = torch.optim.AdamW(module.parameters())
    words = torch.zeros(2, 16, dtype=torch.long, device=device)
    with applied.autocast():
        loss = F.cross_entropy(module(words), words[:, 0])
    if applied.scaler is None:
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    else:
        applied.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        applied.scaler.step(optimizer)
        applied.scaler.update()
