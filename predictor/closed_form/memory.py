"""Device memory of a training step: bytes at the fullest moment, whether they fit, and the largest batch."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from precision_time.predictor.closed_form.activations import (
    Line,
    count_in_flight,
    keep_activations,
    read_passes,
    sample_bytes,
)
from precision_time.predictor.closed_form.optimizers import find_optimizer
from precision_time.predictor.closed_form.roofline import divide_work
from precision_time.predictor.closed_form.transformer_sizes import size_transformer
from precision_time.predictor.setup.hardware import supported_precisions
from precision_time.predictor.setup.precision import FORMAT_BYTES, PRECISIONS
from precision_time.predictor.setup.training_setup import TrainingSetup

__all__ = ["MemoryEstimate", "estimate_memory", "explain_memory", "largest_batch"]

#: Bytes of a GPU that a process takes before its first tensor (context, loaded kernels, cuBLAS workspaces, allocator
#: rounding); recalled, not re-checked. A CPU has no such overhead.
GPU_WORKSPACE_BYTES = 2**29

#: Elements of a gradient bucket of DeepSpeed (``reduce_bucket_size`` of its configuration).
_DEEPSPEED_BUCKET = 500_000_000

#: Frameworks that sum gradients in place in buffers of their own, in fp32 (Megatron-LM's distributed data parallel).
_MEGATRON = frozenset({"megatron", "nemo"})

#: Smallest share of the total that a change must save to be advised.
_WORTH_SAYING = 0.05
#: Above this share of the device a step may fail: other processes, NCCL and fragmentation take an unknown part.
_NEARLY_FULL = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the fullest rank.

    Each part is given at its own peak. The peaks are not simultaneous: gradients appear while activations are freed.
    So ``total_bytes``, the largest at one moment, may lie below the sum, or above it by the temporaries of the backward
    pass. ``parameters_bytes`` are in the format in which the model is stored. fp32 masters beside 16-bit parameters
    (sharded optimizers) count as ``optimizer_bytes``, the 16-bit copies of autocast as activations.
    ``communication_bytes`` are copies of gradients in buckets and gathered parameters. ``largest_batch`` is that of one
    micro-step of one replica; None where not even one sample fits. ``how_known`` is ``walk`` where activations were
    counted operation by operation and ``card`` where they are estimated from a few sizes.
    """

    parameters_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    communication_bytes: float
    workspace_bytes: float
    total_bytes: float
    device_bytes: float
    largest_batch: int | None
    how_known: str

    @property
    def fits(self) -> bool:
        """Whether the device has that much memory."""
        return self.total_bytes <= self.device_bytes


class _Rank(NamedTuple):
    """Bytes on one rank: parts that do not depend on the batch, and the moments that may be the fullest."""

    parameters: float
    gradients: float
    optimizer: float
    communication: float
    workspace: float
    saved: Line
    moments: tuple[Line, ...]
    how_known: str

    @property
    def standing(self) -> float:
        return self.parameters + self.optimizer + self.communication + self.workspace


class _Stored(NamedTuple):
    """Bytes per parameter, before any sharding: a trained weight, a frozen one, a gradient, the optimizer's states."""

    weight: float
    frozen: float
    gradient: float
    states: float


def _assume_sharding(setup: TrainingSetup) -> TrainingSetup:
    """The setup with a sharded optimizer where its framework is Megatron, whose recipes shard it, and names none."""
    if setup.implementation.framework not in _MEGATRON or setup.layout.divides.optimizer:
        return setup
    return dataclasses.replace(setup, parallelism=dataclasses.replace(setup.layout, sharding="optimizer"))


def _store_parameters(setup: TrainingSetup) -> _Stored:
    """Bytes per parameter by precision and sharding.

    Autocast stores weights, gradients and states in fp32. Sharded optimizers store 16-bit parameters and gradients
    and, among their states, fp32 masters; Megatron-LM sums gradients in fp32. Frozen weights are stored in the compute
    format.

    Source: Rajbhandari et al., "ZeRO" (2020), 2 + 2 + 12 bytes a parameter for Adam; Megatron-LM, documentation of its
    distributed optimizer, 6 + 12 / d (recalled, not re-checked).
    """
    precision = setup.precision
    states = find_optimizer(setup.workload.optimizer).state_bytes
    stored = FORMAT_BYTES[precision.storage]
    frozen = min(stored, FORMAT_BYTES[precision.compute])
    if precision.is_mixed and setup.layout.divides.optimizer:
        narrow = FORMAT_BYTES[precision.activations]
        summed = stored if setup.implementation.framework in _MEGATRON else narrow
        return _Stored(narrow, frozen, summed, stored + states)
    return _Stored(stored, frozen, stored, states * stored / FORMAT_BYTES["fp32"])


def _communication_bytes(setup: TrainingSetup, *, gradients: float) -> float:
    """Bytes of the copies that communication needs.

    torch's DistributedDataParallel stores gradients a second time in its buckets unless ``gradient_as_bucket_view`` is
    set (documented there; off by default); so does ``nn.DataParallel`` while it sums. ZeRO is taken with DeepSpeed's
    default buckets. Sharded parameters are gathered layer by layer, one layer ahead, beside one layer's whole gradient.
    """
    workload, layout, precision = setup.workload, setup.layout, setup.precision
    replicas = layout.data * layout.context
    if replicas == 1:
        return 0.0
    narrow = FORMAT_BYTES[precision.activations] if precision.is_mixed else FORMAT_BYTES[precision.storage]
    params = workload.params / (layout.tensor * layout.pipeline)
    if layout.divides.parameters:
        table = float((workload.vocab or 0) * (workload.hidden_size or 0))
        depth = size_transformer(workload).layers / layout.pipeline
        unit = min(params, max(params / max(1.0, depth), table / layout.tensor))
        return unit * (2 * narrow + FORMAT_BYTES[precision.communicate])
    if setup.implementation.framework in _MEGATRON or layout.tensor * layout.pipeline * layout.context > 1:
        return 0.0
    if layout.divides.optimizer:
        return min(params, _DEEPSPEED_BUCKET) * narrow
    return gradients if setup.implementation.framework == "pytorch" else 0.0


def _step_temporaries(setup: TrainingSetup, *, gradients: float) -> float:
    """Bytes of the optimizer's temporaries.

    torch's multi-tensor loops, the default on GPUs, make a list as large as the parameters (documented in
    ``torch.optim``). A CPU updates tensors one by one: one temporary of the largest, two for Adam's denominator.
    """
    if setup.implementation.framework != "pytorch" or not setup.implementation.optimizer_step:
        return 0.0
    workload = setup.workload
    if setup.hardware.kind == "gpu":
        return gradients
    # every second tensor is a bias or a norm
    largest = max(2 * workload.params / workload.parameter_tensors, (workload.vocab or 0) * (workload.hidden_size or 0))
    copies = 2 if find_optimizer(workload.optimizer).state_bytes > FORMAT_BYTES["fp32"] else 1
    return min(gradients, copies * FORMAT_BYTES[setup.precision.storage] * largest)


def _describe_rank(setup: TrainingSetup) -> _Rank:
    setup = _assume_sharding(setup)
    workload, layout, divides = setup.workload, setup.layout, setup.layout.divides
    trainable, steps = setup.implementation.trainable_share, setup.implementation.optimizer_step
    share = divide_work(workload, layout)
    stored = _store_parameters(setup)
    weight = trainable * stored.weight + (1.0 - trainable) * stored.frozen
    parameters = workload.params * weight * (share.updated if divides.parameters else share.parameters)
    gradients = workload.params * stored.gradient * trainable
    gradients *= share.updated if divides.gradients else share.parameters
    optimizer = workload.params * stored.states * trainable * share.updated if steps else 0.0
    communication = _communication_bytes(setup, gradients=gradients)

    passes = read_passes(workload, setup.precision, implementation=setup.implementation)
    kept = keep_activations(workload, setup.precision, passes=passes, implementation=setup.implementation)
    # Sharded optimizers store the weights in the compute format, as do frozen weights: no copies of them are cast.
    cast = passes.casts * (1.0 if divides.optimizer else 1.0 - trainable)
    fixed = (passes.saved.fixed - cast) * share.parameters
    batch = sample_bytes(workload)
    temporaries = max(0.0, passes.peak.slope - passes.saved.slope) * share.work + kept.working * share.work
    in_flight = count_in_flight(layout, micro_steps=setup.gradient_accumulation_steps)
    # The first stage keeps the most micro-steps, the last stage the scores of the vocabulary.
    whole_head = kept.head * share.work * layout.pipeline
    first = kept.layers * share.work * in_flight + (whole_head if layout.pipeline == 1 else 0.0)
    last = kept.layers * share.work + whole_head
    saved = max(first, last)
    # Gradients summed over micro-steps, and those in standing buffers, live through the forward pass.
    standing = setup.gradient_accumulation_steps > 1 or divides.optimizer
    moments = [Line(saved + temporaries + batch, fixed + (gradients if standing else 0.0))]
    if passes.saved.slope > 0 and passes.gradients > 0:
        # The fullest moments of the walk, with this rank's part of its gradients.
        for peak in (passes.peak, passes.peak_small):
            living_gradients = max(0.0, peak.fixed - passes.saved.fixed) * gradients / passes.gradients
            slope = peak.slope * saved / passes.saved.slope + kept.working * share.work
            moments.append(Line(slope + batch, fixed + living_gradients))
    moments.append(Line(batch, gradients + _step_temporaries(setup, gradients=gradients)))
    return _Rank(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        communication=communication,
        workspace=float(GPU_WORKSPACE_BYTES) if setup.hardware.kind == "gpu" else 0.0,
        saved=Line(saved + kept.working * share.work, fixed),
        moments=tuple(moments),
        how_known=passes.how_known,
    )


def _device_bytes(setup: TrainingSetup) -> float:
    """Memory of one rank: that of its GPU, or its share of the host's."""
    return setup.hardware.memory_bytes / (setup.ranks_per_node if setup.hardware.kind == "cpu" else 1)


def _fit_batch(rank: _Rank, device_bytes: float) -> int | None:
    free_bytes = device_bytes - rank.standing
    largest = math.inf
    for moment in rank.moments:
        if moment.fixed > free_bytes:
            return None
        if moment.slope > 0:
            largest = min(largest, (free_bytes - moment.fixed) / moment.slope)
    return math.floor(largest) if 1 <= largest < math.inf else None


def estimate_memory(setup: TrainingSetup) -> MemoryEstimate:
    """Bytes of a training step on the fullest rank, and the largest batch of a micro-step that fits the device.

    The total is the largest over four moments, each linear in the batch: the begin of the backward pass, the fullest
    moments of the walk at large and at small batches, and the optimizer's step. Without a walk the activations are
    estimated from a card's sizes. Stages hold equal shares; tensor and context ranks divide all activations (sequence
    parallelism). Left out: fragmentation of the allocator beyond a constant, buffers of NCCL, embedding tables that
    recommenders divide over ranks.

    Raises ``UnknownNameError`` for an unknown optimizer.

    Source: Rajbhandari et al., "ZeRO" (2020); Korthikanti et al. (2022); constants of this file.
    """
    rank = _describe_rank(setup)
    device_bytes = _device_bytes(setup)
    return MemoryEstimate(
        parameters_bytes=rank.parameters,
        gradients_bytes=rank.gradients,
        optimizer_bytes=rank.optimizer,
        activations_bytes=rank.saved.at(setup.batch_size),
        communication_bytes=rank.communication,
        workspace_bytes=rank.workspace,
        total_bytes=rank.standing + max(moment.at(setup.batch_size) for moment in rank.moments),
        device_bytes=device_bytes,
        largest_batch=largest_batch(setup),
        how_known=rank.how_known,
    )


def largest_batch(setup: TrainingSetup) -> int | None:
    """The largest batch of a micro-step of one replica that fits; None where not even one sample does."""
    # Of a full pipeline, also where the setup has fewer micro-steps than stages.
    steps = max(setup.gradient_accumulation_steps, setup.layout.pipeline)
    full = dataclasses.replace(setup, gradient_accumulation_steps=steps)
    return _fit_batch(_describe_rank(full), _device_bytes(setup))


def _offer_changes(setup: TrainingSetup) -> Iterator[tuple[str, TrainingSetup]]:
    """Changes of a setup that may take less memory, each with its name, the least intrusive first."""
    code, layout = setup.implementation, setup.layout
    if code.flash_attention is False:
        fused = dataclasses.replace(code, flash_attention=True)
        yield "fused attention", dataclasses.replace(setup, implementation=fused)
    if not setup.precision.is_mixed and setup.precision.storage == "fp32":
        narrow = next((name for name in ("amp_bf16", "amp_fp16") if name in supported_precisions(setup.hardware)), None)
        if narrow:
            yield narrow, dataclasses.replace(setup, precision=PRECISIONS[narrow])
    if code.checkpointing != "full":
        checkpointed = dataclasses.replace(code, checkpointing="full")
        yield "activation checkpointing", dataclasses.replace(setup, implementation=checkpointed)
    if layout.data > 1 and not layout.divides.parameters and not layout.single_process:
        sharded = dataclasses.replace(layout, sharding="parameters")
        yield "sharding (fsdp)", dataclasses.replace(setup, parallelism=sharded)


def _join(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def explain_memory(setup: TrainingSetup, estimate: MemoryEstimate) -> str | None:
    """A warning with numbers where ``estimate`` of ``setup`` exceeds the device, or nearly; None where it fits well.

    It names the largest batch and the changes that save at least 5 %, each with its own estimate.
    """
    if estimate.total_bytes <= _NEARLY_FULL * estimate.device_bytes:
        return None
    needs = (
        f"needs about {estimate.total_bytes / 1e9:.3g} GB of the {estimate.device_bytes / 1e9:.3g} GB of "
        f"{setup.hardware.name}"
    )
    largest = estimate.largest_batch
    batch = "not even a batch of 1 fits" if largest is None else f"the largest batch that fits is {largest}"
    if estimate.fits:
        return f"{needs}, so it may run out of memory: {batch}"
    fitting: list[str] = []
    helping: list[str] = []
    for name, changed in _offer_changes(setup):
        total = estimate_memory(changed).total_bytes
        if total <= (1.0 - _WORTH_SAYING) * estimate.total_bytes:
            (fitting if total <= estimate.device_bytes else helping).append(f"{name} ({total / 1e9:.3g} GB)")
    advice = f"; {_join(fitting)} would fit" if fitting else ""
    if helping:
        advice += f"; {_join(helping)} would need less"
    return f"{needs}, so it runs out of memory: {batch}{advice}"
