"""Balanced experts for networks of transformers: every expert gets as many tokens as every other."""

import math
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["balance_experts", "count_active"]

_NAME = "balanced"


def balance_experts(module: nn.Module) -> None:
    """Make every mixture of experts in ``module`` route its tokens evenly.

    The expert of a token depends on values, which a walk of shapes lacks; benchmarks force a balanced routing too. The
    router, the sorting of tokens by expert and the weighted sum stay. The products of all experts become one batched
    product with the work and the weights of grouped kernels.
    """
    config = getattr(module, "config", None)
    if config is None or not any(hasattr(part, "_apply_gate") or _is_experts(part) for part in module.modules()):
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_NAME, _run_balanced)
    for part in module.modules():
        part_config = getattr(part, "config", None)
        if part_config is not None and hasattr(part_config, "_experts_implementation"):
            part_config._experts_implementation = _NAME
    config._experts_implementation = _NAME


def count_active(module: nn.Module) -> dict[str, float]:
    """``active_params``, the parameters that one token passes through; empty where there are no experts."""
    config = getattr(module, "config", None)
    per_token = getattr(config, "num_experts_per_tok", None)
    idle = 0.0
    for part in module.modules():
        if _is_experts(part) and per_token:
            weights = [parameter for parameter in part.parameters(recurse=False) if parameter.dim() > 1]
            experts = weights[0].shape[0]
            idle += sum(weight.numel() for weight in weights) * (1 - min(per_token, experts) / experts)
    if not idle:
        return {}
    return {"active_params": round(sum(parameter.numel() for parameter in module.parameters()) - idle)}


def _is_experts(part: nn.Module) -> bool:
    return hasattr(part, "down_proj") and isinstance(part.down_proj, nn.Parameter) and part.down_proj.dim() == 3


def _run_balanced(experts: Any, hidden: Tensor, routes: Tensor, weights: Tensor) -> Tensor:
    """``hidden`` [T, H], ``routes`` and ``weights`` [T, K] -> [T, H]: K experts for each token, in even shares."""
    tokens, width = hidden.shape
    copies = routes.shape[-1]
    count = experts.num_experts
    share = math.ceil(tokens * copies / count)
    order = routes.reshape(-1).argsort()
    rows = hidden[order // copies]
    if spare := count * share - len(rows):
        rows = torch.cat([rows, rows.new_zeros(spare, width)])
    grouped = rows.view(count, share, width)
    biased = getattr(experts, "has_bias", False)
    gated = getattr(experts, "has_gate", True)
    up = "gate_up_proj" if gated else "up_proj"
    inner = _multiply(grouped, experts, up, biased=biased)
    inner = experts._apply_gate(inner) if gated else experts.act_fn(inner)
    outer = _multiply(inner, experts, "down_proj", biased=biased)
    outer = outer.reshape(count * share, -1)[: tokens * copies]
    scaled = outer * weights.reshape(-1)[order].unsqueeze(-1)
    back = torch.zeros_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return scaled[back].view(tokens, copies, -1).sum(1).to(hidden.dtype)


def _multiply(rows: Tensor, experts: Any, name: str, *, biased: bool) -> Tensor:
    weight = getattr(experts, name)
    if not getattr(experts, "is_transposed", False):
        weight = weight.transpose(1, 2)
    product = torch.bmm(rows, weight)
    return product + getattr(experts, f"{name}_bias").unsqueeze(1) if biased else product
