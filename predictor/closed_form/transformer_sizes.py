"""Sizes of a transformer that its card does not name: width, layers and tokens, and the parameters of its experts."""

import math
from typing import NamedTuple

from precision_time.predictor.workloads.workload import WorkloadFeatures

__all__ = ["TransformerSizes", "expert_params", "size_transformer"]

#: Width of an attention head that is taken where a transformer's sizes are not known, as in GPT-3 and Llama.
HEAD_WIDTH = 128


class TransformerSizes(NamedTuple):
    """Layers, width of the residual stream, width of keys plus values, tokens of a sample, experts at work."""

    layers: float
    hidden: float
    key_value: float
    tokens: float
    active_experts: int


def size_transformer(workload: WorkloadFeatures) -> TransformerSizes:
    """Sizes of a transformer, estimated where the card does not name them.

    A decoder layer has about 12 H^2 parameters (4 in attention, 8 in the feed-forward block) and models have about
    H / 128 layers, so P = 12 L H^2 gives H = (128 P / 12)^(1/3); with L known H = (P / 12 L)^(1/2). A token costs
    2 P FLOPs, so a sample has F / 2P tokens. For other networks these are widths of the same order, no more.

    Source: Kaplan et al., "Scaling Laws for Neural Language Models" (2020), for 12 L H^2 and 2 P.
    """
    params = workload.active_params or workload.params
    if workload.hidden_size:
        hidden = float(workload.hidden_size)
    elif workload.layers:
        hidden = math.sqrt(params / (12 * workload.layers))
    else:
        hidden = (HEAD_WIDTH * params / 12) ** (1 / 3)
    heads = workload.heads or 1
    return TransformerSizes(
        layers=workload.layers or max(1.0, params / (12 * hidden * hidden)),
        hidden=hidden,
        key_value=2 * hidden * (workload.kv_heads or heads) / heads,
        tokens=workload.sequence_length or max(1.0, workload.forward_flops_per_sample / (2 * params)),
        active_experts=workload.active_experts or 1,
    )


def expert_params(workload: WorkloadFeatures) -> float:
    """Parameters inside the experts of a mixture of experts, zero for a dense model.

    With D parameters outside the experts, X inside them and k of E experts at work on a token, params = D + X and
    active_params = D + X k / E, so X = (params - active_params) / (1 - k / E).
    """
    experts, active = workload.experts, workload.active_experts
    if workload.active_params is None or not experts or not active or active >= experts:
        return 0.0
    return min(workload.params, max(0.0, (workload.params - workload.active_params) / (1 - active / experts)))
