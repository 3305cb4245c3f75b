"""Bytes of activations kept for the backward pass, by precision, checkpointing and attention kernel."""

import math
from typing import NamedTuple

from precision_time.predictor.closed_form.transformer_sizes import size_transformer
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism
from precision_time.predictor.setup.precision import FORMAT_BYTES, Precision
from precision_time.predictor.workloads.workload import WorkloadFeatures

__all__ = ["Kept", "Line", "Passes", "count_in_flight", "keep_activations", "read_passes", "sample_bytes"]

#: Bytes kept for the backward pass, per byte of fp32 activations that products write, and, where those are not known,
#: per byte that eager execution moves: with convolutions, and with attention. From the saved tensors of torch 2.13:
#: ResNet-18 and -50 (2.17 and 1.92; 0.30 and 0.26), ViT-B/16, GPT-2 and BERT-base (1.23, 1.40 and 1.88; 0.42, 0.39 and
#: 0.38).
_SAVED_CONVOLUTION = (2.0, 0.28)
_SAVED_ATTENTION = (1.4, 0.39)
#: The same without batch norm, or with a frozen one as in detectors: the output of a convolution need not be kept
#: beside that of the activation after it. Set by reasoning.
_SAVED_PLAIN = (1.0, 0.14)
_PLAIN_KINDS = frozenset({"detection", "speech"})
#: Bytes kept under 16-bit autocast, without the weights that it casts, over those kept in fp32.
_AUTOCAST_SAVED_CONVOLUTION = 0.53
_AUTOCAST_SAVED_ATTENTION = 0.75

#: A layer of a transformer keeps 34 s b h bytes in 16 bit (Korthikanti et al., 2022). 2 + 2 + 2 + 8 of the 34 are
#: inputs of products: only gradients of weights need them, and formats below 16 bit narrow them.
_PRODUCT_INPUTS = 14 / 34

#: Matrices of a feed-forward block from which it counts as gated: a plain one has 2 and a gated one 3.
_GATED = 2.5

#: Frameworks whose norms and activations are single kernels by default.
_FUSED_FRAMEWORKS = frozenset({"megatron", "nemo", "composer", "oneflow"})
_PLAIN = Implementation()


class Line(NamedTuple):
    """Bytes of a batch of B samples: ``slope * B + fixed``."""

    slope: float
    fixed: float

    def at(self, batch: int) -> float:
        """Bytes of ``batch`` samples."""
        return self.slope * batch + self.fixed


class Passes(NamedTuple):
    """Bytes of the passes of a whole replica.

    ``saved`` are kept for the backward pass. ``peak`` and ``peak_small`` are those at the fullest moment of large and
    of small batches, gradients included. ``casts`` are the weights cast to the compute format, a part of each
    ``fixed``; ``gradients`` are all gradients. ``scores`` counts the elements of the attention scores of a sample.
    ``how_known`` is ``walk`` or ``card``.
    """

    saved: Line
    peak: Line
    peak_small: Line
    gradients: float
    casts: float
    scores: float
    how_known: str


class Kept(NamedTuple):
    """Bytes kept of a sample: in all layers for each micro-step in flight, in one working layer, and in the head."""

    layers: float
    working: float
    head: float


def read_passes(workload: WorkloadFeatures, precision: Precision, *, implementation: Implementation = _PLAIN) -> Passes:
    """The passes in the formats of ``precision``, with fused attention and without recomputation.

    Pure 16-bit formats keep half of the bytes of fp32. Without a walk the activations are estimated from a card's
    sizes. A walk follows eager execution, which keeps every step of norms and activations written in plain operations;
    under fused or compiled kernels a transformer of known sizes keeps no more than the estimate from its sizes.
    """
    mixed = precision.is_mixed
    narrow = 1.0 if mixed else FORMAT_BYTES[precision.storage] / FORMAT_BYTES["fp32"]
    casts = workload.params * FORMAT_BYTES[precision.activations] if mixed else 0.0
    if workload.walks is not None:
        walk = workload.walks["amp" if mixed else "fp32"]
        spared = 0.0
        if _has_fused_kernels(implementation) and _knows_sizes(workload):
            spared = max(0.0, walk.saved * narrow - _estimate_saved(workload, precision))
        return Passes(
            saved=Line(walk.saved * narrow - spared, walk.saved_fixed * narrow),
            peak=Line(max(0.0, walk.peak * narrow - spared), walk.peak_fixed * narrow),
            peak_small=Line(max(0.0, walk.peak_small * narrow - spared), walk.peak_small_fixed * narrow),
            gradients=walk.gradient_bytes * narrow,
            casts=min(casts, walk.saved_fixed),
            scores=walk.scores,
            how_known="walk",
        )
    scores = 0.0
    if workload.layers and workload.heads and workload.sequence_length:
        scores = float(workload.layers * workload.heads * workload.sequence_length**2)
    kept = Line(_estimate_saved(workload, precision), casts)
    return Passes(kept, kept, kept, workload.params * FORMAT_BYTES[precision.storage], casts, scores, "card")


def _has_fused_kernels(implementation: Implementation) -> bool:
    return bool(
        implementation.fused_kernels or implementation.compiled or implementation.framework in _FUSED_FRAMEWORKS
    )


def _knows_sizes(workload: WorkloadFeatures) -> bool:
    return bool(workload.layers and workload.hidden_size and workload.sequence_length)


def _estimate_saved(workload: WorkloadFeatures, precision: Precision) -> float:
    """Bytes kept of a sample, estimated from a card."""
    if _knows_sizes(workload):
        return _layer_bytes(workload, precision) + _head_bytes(workload, precision)
    narrow = FORMAT_BYTES[precision.storage] / FORMAT_BYTES["fp32"]
    if workload.attention_flops_share > 0:
        by_activation, by_byte = _SAVED_ATTENTION
        narrow = _AUTOCAST_SAVED_ATTENTION if precision.is_mixed else narrow
    else:
        by_activation, by_byte = _SAVED_PLAIN if workload.kind in _PLAIN_KINDS else _SAVED_CONVOLUTION
        narrow = _AUTOCAST_SAVED_CONVOLUTION if precision.is_mixed else narrow
    if workload.activations_per_sample is not None:
        return narrow * by_activation * FORMAT_BYTES["fp32"] * workload.activations_per_sample
    return narrow * by_byte * workload.forward_bytes_per_sample


def _layer_bytes(workload: WorkloadFeatures, precision: Precision) -> float:
    """Bytes that the layers of a transformer keep of a sample, with fused attention and without dropout.

    Kept for each token: the inputs of both norms (in fp32 under autocast), of the products behind them and of the
    output projection; queries, keys and values; and in the feed-forward block, for each active expert, the values
    before and after the activation, twice as many where the block is gated (three matrices by its parameter count).

    Source: Korthikanti et al. (2022), extended to grouped keys, gates and experts; 2 of their 34 s b h are dropout.
    """
    sizes = size_transformer(workload)
    hidden, experts = sizes.hidden, sizes.active_experts
    ffn = workload.ffn_size or 4.0 * hidden
    outside = 2.0 * (workload.vocab or 0) * hidden
    inside = ((workload.active_params or workload.params) - outside) / sizes.layers - 2 * hidden**2
    matrices = (inside - sizes.key_value * hidden) / (hidden * ffn * experts)
    # Each active expert keeps a copy of its tokens and an output.
    copies = 2.0 * hidden * experts if experts > 1 else 0.0
    narrow = 4.0 * hidden + sizes.key_value + copies + (4.0 if matrices > _GATED else 2.0) * ffn * experts
    width = FORMAT_BYTES[precision.activations]
    wide = FORMAT_BYTES["fp32"] if precision.is_mixed else width
    return sizes.layers * sizes.tokens * (wide * 2.0 * hidden + width * narrow)


def _head_bytes(workload: WorkloadFeatures, precision: Precision) -> float:
    """Bytes that the vocabulary's scores keep of a sample: log-probabilities in fp32 and, under autocast, logits."""
    if not workload.vocab or not workload.sequence_length:
        return 0.0
    width = FORMAT_BYTES["fp32"] + (FORMAT_BYTES[precision.activations] if precision.is_mixed else 0.0)
    return width * workload.sequence_length * workload.vocab


def keep_activations(
    workload: WorkloadFeatures, precision: Precision, *, passes: Passes, implementation: Implementation
) -> Kept:
    """Bytes kept of a sample with the given checkpointing, attention kernel and share of trained weights.

    Full checkpointing keeps the input of each layer and recomputes the activations of one layer at a time. Where the
    number of layers is unknown, the network of n products is cut into sqrt(n) segments, recomputed one at a time. Math
    attention keeps its probabilities in fp32 and, under autocast, once more in 16 bit; selective checkpointing
    recomputes them.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022); Chen et al.,
    "Training Deep Nets with Sublinear Memory Cost" (2016), for sqrt(n).
    """
    head = min(_head_bytes(workload, precision), passes.saved.slope)
    layers = passes.saved.slope - head
    if implementation.trainable_share < 1.0 and workload.attention_flops_share > 0:
        layers *= 1.0 - _PRODUCT_INPUTS * (1.0 - implementation.trainable_share)
    scores = 0.0
    if implementation.flash_attention is False:
        twice = FORMAT_BYTES["fp32"] + FORMAT_BYTES[precision.activations]
        scores = passes.scores * (twice if precision.is_mixed else FORMAT_BYTES[precision.storage])
    if workload.attention_flops_share > 0:
        below = FORMAT_BYTES[precision.compute] / FORMAT_BYTES[precision.activations]
        layers *= 1.0 - _PRODUCT_INPUTS * (1.0 - min(1.0, below))
    depth = workload.layers or 0
    if implementation.checkpointing == "full":
        if depth and workload.hidden_size:
            sizes = size_transformer(workload)
            boundaries = depth * sizes.tokens * sizes.hidden * FORMAT_BYTES[precision.activations]
            return Kept(min(boundaries, layers), (layers + scores) / depth, head)
        # a weight and two values of its norm or bias for each product
        segments = math.sqrt(max(1.0, workload.parameter_tensors / 3))
        return Kept(layers / segments, (layers + scores) / segments, head)
    if implementation.checkpointing == "selective":
        return Kept(layers, scores / max(1, depth), head)
    return Kept(layers + scores, 0.0, head)


def count_in_flight(parallelism: Parallelism, *, micro_steps: int) -> float:
    """Micro-steps whose activations the first stage of a pipeline keeps at once under 1F1B.

        n = min(p, micro-steps), or min(p (1 + (p - 1) / (p m)), micro-steps) with m > 1 chunks a rank

    Source: Korthikanti et al. (2022), for p stages.
    """
    stages, chunks = parallelism.pipeline, parallelism.virtual_stages
    interleaved = 1.0 + (stages - 1) / (stages * chunks) if chunks > 1 else 1.0
    return min(stages * interleaved, micro_steps)


def sample_bytes(workload: WorkloadFeatures) -> float:
    """Bytes of a sample in a batch: tokens and labels as int64, an image in three fp32 channels, or a vector of fp32.

    Zero where its size is unknown.
    """
    if workload.sequence_length:
        return 16.0 * workload.sequence_length
    if not workload.task_input.isdecimal():
        return 0.0
    size = int(workload.task_input)
    if workload.kind.startswith("language"):
        return 16.0 * size
    if "vision" in workload.kind or workload.kind in ("cnn", "detection", "segmentation"):
        return 12.0 * size**2
    return 4.0 * size
