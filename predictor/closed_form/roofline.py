"""Closed form of compute: seconds of forward, backward and optimizer on one device, as the precision changes them."""

import math
from dataclasses import dataclass

from precision_time.predictor.closed_form.optimizers import find_optimizer
from precision_time.predictor.closed_form.transformer_sizes import expert_params
from precision_time.predictor.closed_form.walked_time import NominalWork, describe_nominal, time_pass
from precision_time.predictor.setup.hardware import HardwareSpec, check_precision
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import Parallelism
from precision_time.predictor.setup.precision import FORMAT_BYTES, Precision
from precision_time.predictor.workloads.workload import WorkloadFeatures
from precision_time.storage.errors import InputError

__all__ = ["ComputeEstimate", "RankShare", "cast_bytes", "describe_passes", "divide_work", "estimate_compute",
           "scale_activation_bytes", "time_host_copy"]  # fmt: skip

#: Shares of the nominal rates that training reaches. Fitted together on 72 medians of 304 public single-GPU rows of
#: ResNet-50, BERT-base and ViT-B/16 (lambdal/deeplearning-benchmark, Oneflow-Inc/DLPerf, NVIDIA/DeepLearningExamples,
#: PaddlePaddle/Perf, huggingface/pytorch-image-models; Pascal to B200, fp32, tf32, fp16): mean error 18 %, median 13 %.
#: Starting points that the trees refine; they are averages and exact for no model.
GPU_COMPUTE_EFFICIENCY = 0.55
#: The same for the products inside attention; not fitted separately so far.
GPU_ATTENTION_EFFICIENCY = 0.55
GPU_MEMORY_EFFICIENCY = 0.40

#: The same for a CPU, whose rates are measured, not nominal. Fitted on the processor time of forward plus backward, one
#: thread, for mlp, vit_tiny, bert_mini, gpt2_mini, resnet18 (two batches each) and resnet50, in fp32 and amp_bf16, on
#: an AMD EPYC (Zen 4 or later) with torch 2.13.0: mean error 17 %, median 10 %, the largest at the smallest batches.
CPU_FP32_EFFICIENCY = 0.75
CPU_NARROW_EFFICIENCY = 0.55
CPU_MEMORY_EFFICIENCY = 0.35

#: Bytes of activations that autocast moves, per byte of fp32 eager execution, in networks with attention. Without
#: attention all activations narrow (walk of ResNet-50: 0.50). Normalisation, softmax and losses stay fp32 and add
#: casts: 0.73 to 0.94 in walks of ViT-B/16, BERT-base, Llama-7B, GPT-2 XL and GPT-2; this is the median.
AUTOCAST_ATTENTION_BYTES = 0.83

#: Tensors that one launch of a multi-tensor kernel of torch 2.13 updates on a GPU, with two lists of tensors
#: (depth_to_max_tensors in ATen/native/cuda/MultiTensorApply.cuh, small kernel arguments).
TENSORS_PER_LAUNCH = 64

#: Bytes per second from pinned host memory to a device: 0.8 of the nominal 15.8 GB/s of PCIe 3 x16; not measured.
HOST_COPY_BYTES_PER_S = 12.6e9


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeEstimate:
    """Seconds of one micro-step on one device, without communication.

    ``recompute_s`` is the part of the forward pass that the backward pass runs again (activation checkpointing).
    ``optimizer_s`` includes the traffic of loss scaling. ``launch_bound`` is true where the host, which queues the
    operations, takes longer than the device over the longer of the two passes.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    launch_bound: bool
    recompute_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Forward, recomputation, backward and optimizer."""
        return self.forward_s + self.recompute_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """Shares of a replica's work that one rank does.

    ``work`` is the share of the FLOPs and activation bytes of a micro-step, ``parameters`` that of the weights it
    computes with, ``cast`` that of the weights it casts to the compute format in each pass, ``updated`` that of the
    weights its optimizer updates, ``layers`` that of the operations and parameter tensors.
    """

    work: float = 1.0
    parameters: float = 1.0
    cast: float = 1.0
    updated: float = 1.0
    layers: float = 1.0


WHOLE = RankShare()
_PLAIN = Implementation()


def divide_work(workload: WorkloadFeatures, parallelism: Parallelism) -> RankShare:
    """The shares of one rank: layers divide over pipeline stages, a layer over tensor ranks, tokens over context ranks.

    Assumptions:
    - stages have equal work;
    - tensor ranks also divide the activations that they could keep whole (norms, residuals: sequence parallelism);
    - experts divide over the expert ranks alone where there are any (an expert tensor degree of 1), and tokens spread
      evenly over experts;
    - sharding divides the optimizer's work over all ranks that hold the same stage and tensor part;
    - a rank with sharded parameters casts only its shard, before the gather.

    Source: Shoeybi et al., "Megatron-LM" (2019); Korthikanti et al., "Reducing Activation Recomputation" (2022);
    Rajbhandari et al., "ZeRO" (2020).
    """
    model_ranks = parallelism.tensor * parallelism.pipeline
    parameters = 1 / model_ranks
    if parallelism.expert > 1:
        inside = expert_params(workload) / workload.params
        split = max(parallelism.expert, parallelism.tensor)
        parameters = ((1 - inside) / parallelism.tensor + inside / split) / parallelism.pipeline
    # Dense parameters divide over data x context ranks and those of experts over fewer; both end at 1 / world size.
    updated = 1 / parallelism.world_size if parallelism.divides.optimizer else parameters
    return RankShare(
        work=1 / (model_ranks * parallelism.context),
        parameters=parameters,
        cast=updated if parallelism.divides.parameters else parameters,
        updated=updated,
        layers=1 / parallelism.pipeline,
    )


def scale_activation_bytes(workload: WorkloadFeatures, precision: Precision) -> float:
    """Bytes of activations that a policy moves, over those of fp32 eager execution."""
    narrow = FORMAT_BYTES[precision.activations] / FORMAT_BYTES["fp32"]
    if precision.is_mixed and workload.attention_flops_share > 0:
        return max(narrow, AUTOCAST_ATTENTION_BYTES)
    return narrow


def cast_bytes(params: int, precision: Precision) -> tuple[float, float]:
    """Bytes of casting fp32 parameters down in the forward pass and their gradients up in the backward pass.

    6P each under 16-bit autocast (read 4, write 2; read 2, write 4); zero when parameters are stored as computed.
    """
    if not precision.is_mixed:
        return 0.0, 0.0
    stored = FORMAT_BYTES[precision.storage]
    down = params * (stored + FORMAT_BYTES[precision.compute])
    up = params * (FORMAT_BYTES[precision.activations] + stored)
    return down, up


@dataclass(frozen=True, slots=True)
class _Device:
    flops_per_s: float
    bytes_per_s: float
    launch_s: float
    launches_overlap: bool
    #: seconds of a FLOP inside attention over those of any other FLOP
    attention_slowdown: float

    def time_phase(self, flops: float, moved_bytes: float, operations: float) -> tuple[float, bool]:
        device_s = max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)
        host_s = operations * self.launch_s
        if not self.launches_overlap:
            return device_s + host_s, host_s > device_s
        # device_s + max(0, host_s - device_s): a GPU works while the host queues the next operation.
        return max(device_s, host_s), host_s > device_s


def _describe_device(hardware: HardwareSpec, precision: Precision) -> _Device:
    is_gpu = hardware.kind == "gpu"
    if is_gpu:
        compute, memory = GPU_COMPUTE_EFFICIENCY, GPU_MEMORY_EFFICIENCY
    else:
        compute = CPU_FP32_EFFICIENCY if precision.compute == "fp32" else CPU_NARROW_EFFICIENCY
        memory = CPU_MEMORY_EFFICIENCY
    # The products of attention stay in the format of the activations when the rest narrows to fp8 or nvfp4.
    attention_peak = hardware.peak_flops_per_s[precision.compute]
    if FORMAT_BYTES[precision.compute] < FORMAT_BYTES[precision.activations]:
        attention_peak = hardware.peak_flops_per_s[precision.activations]
    attention = GPU_ATTENTION_EFFICIENCY if is_gpu else compute
    return _Device(
        attention_slowdown=compute * hardware.peak_flops_per_s[precision.compute] / (attention * attention_peak),
        flops_per_s=compute * hardware.peak_flops_per_s[precision.compute],
        bytes_per_s=memory * hardware.memory_bytes_per_s,
        launch_s=hardware.launch_overhead_s,
        launches_overlap=is_gpu,
    )


def _time_optimizer(
    workload: WorkloadFeatures, precision: Precision, device: _Device, *, share: RankShare, trainable: float
) -> float:
    optimizer = find_optimizer(workload.optimizer)
    width = FORMAT_BYTES[precision.storage] / FORMAT_BYTES["fp32"]
    params = workload.params * share.updated * trainable
    moved_bytes = params * optimizer.step_bytes * width
    tensors = math.ceil(workload.parameter_tensors * share.layers)
    # A GPU updates many tensors in one launch (foreach), a CPU one by one.
    groups = -(-tensors // TENSORS_PER_LAUNCH) if device.launches_overlap else tensors
    operations = groups * optimizer.step_operations
    if precision.loss_scaling:
        # Unscaling and the search for infinities read and write every fp32 gradient, in one operation per group.
        moved_bytes += 8 * params
        operations += groups
    return device.time_phase(0.0, moved_bytes, operations)[0]


def _recomputed_share(workload: WorkloadFeatures, implementation: Implementation) -> float:
    if implementation.checkpointing == "full":
        return 1.0
    # Selective recomputation (Korthikanti et al., 2022) repeats the products and the softmax inside attention.
    return workload.attention_flops_share if implementation.checkpointing == "selective" else 0.0


def describe_passes(
    workload: WorkloadFeatures,
    hardware: HardwareSpec,
    precision: Precision,
    *,
    batch_size: int,
    share: RankShare = WHOLE,
    implementation: Implementation = _PLAIN,
) -> tuple[NominalWork, NominalWork, float]:
    """Nominal work of the forward and the backward pass of a walked network on a GPU, and the share recomputed.

    Parameters that were frozen when the module was walked have no weight gradients in the walk, so only further ones
    that the setup freezes (``trainable_share``) take weight gradients away.

    Raises ``InputError`` for a network that was never walked.
    """
    if workload.walks is None:
        raise InputError(f"{workload.name} was never walked", expected="a network of the zoo, or a module")
    trained = min(1.0, workload.walks["fp32"].gradient_bytes / (4.0 * workload.params))
    frozen = 0.5 * (1.0 - min(1.0, implementation.trainable_share / trained)) if trained else 0.0
    forward, backward = (
        describe_nominal(
            workload.walks,
            hardware,
            precision,
            phase=phase,
            samples=batch_size * share.work,
            weights_share=share.parameters * (1.0 - left_out),
            layers_share=share.layers,
            products_share=1.0 - left_out,
            implementation=implementation,
        )
        for phase, left_out in (("forward", 0.0), ("backward", frozen))
    )
    return forward, backward, _recomputed_share(workload, implementation)


def estimate_compute(
    workload: WorkloadFeatures,
    hardware: HardwareSpec,
    precision: Precision,
    *,
    batch_size: int,
    share: RankShare = WHOLE,
    implementation: Implementation = _PLAIN,
) -> ComputeEstimate:
    """Seconds of one micro-step of ``batch_size`` samples, of which a rank does ``share``, and of its optimizer step.

        t = max(F / (eta_c Pi), Q / (eta_m B))

    for each pass on the device, with its FLOPs F (2 per multiply-add), the dense peak Pi (FLOP/s) of the policy's
    compute format, the bytes Q that it moves, and the memory bandwidth B (bytes/s). Q is the activations of the batch,
    scaled by the policy's width, plus the weights in the compute format, plus the casts between both. On a GPU the
    passes of a walked network are timed family by family instead (``walked_time``).

    Launching n operations costs the host n tau seconds. A GPU hides them behind its own work, so a pass takes at least
    n tau; on a CPU they add up. Autocast launches one cast per parameter tensor and pass.

    Checkpointing runs the forward pass (full) or its attention (selective) once more. With a share s < 1 of trainable
    parameters the backward pass leaves out 1 - s of the weight gradients, which are half of its products outside
    attention and half of its traffic with weights; frozen parameters have no optimizer step.

    Raises ``InputError`` for a batch that is not a positive integer, ``PrecisionUnsupportedError`` for a format that
    the device lacks, ``UnknownNameError`` for an unknown optimizer.

    Source: Williams, Waterman, Patterson, "Roofline" (2009); constants of this file.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InputError("batch_size is not usable", got=repr(batch_size), expected="an integer of at least 1")
    check_precision(hardware, precision)
    device = _describe_device(hardware, precision)
    trainable = implementation.trainable_share
    optimizer_s = 0.0
    if implementation.optimizer_step:
        optimizer_s = _time_optimizer(workload, precision, device, share=share, trainable=trainable)
    if workload.walks is not None and hardware.kind == "gpu":
        forward_work, backward_work, recomputed = describe_passes(
            workload, hardware, precision, batch_size=batch_size, share=share, implementation=implementation
        )
        forward_pass, backward_pass = time_pass(forward_work), time_pass(backward_work)
        longer = forward_pass if forward_pass.seconds >= backward_pass.seconds else backward_pass
        return ComputeEstimate(
            forward_s=forward_pass.seconds,
            backward_s=backward_pass.seconds,
            optimizer_s=optimizer_s,
            launch_bound=longer.launch_bound,
            recompute_s=recomputed * forward_pass.seconds,
        )
    samples = batch_size * share.work
    # F (1 - a) + F a slowdown, over F, with the share a of attention
    slowed = 1.0 + workload.attention_flops_share * (device.attention_slowdown - 1.0)
    activations = samples * scale_activation_bytes(workload, precision)
    # fp8 and nvfp4 keep copies of the weights in the compute format too.
    weights = FORMAT_BYTES[precision.compute] / FORMAT_BYTES["fp32"] * share.parameters
    down, up = cast_bytes(workload.params, precision)
    casts = workload.parameter_tensors if precision.is_mixed else 0
    forward = (
        samples * workload.forward_flops_per_sample * slowed,
        activations * workload.forward_bytes_per_sample + weights * workload.forward_bytes_fixed + down * share.cast,
        (workload.forward_ops + casts) * share.layers,
    )
    frozen = 0.5 * (1.0 - trainable)
    forward_s, forward_waits = device.time_phase(*forward)
    backward_s, backward_waits = device.time_phase(
        samples * workload.backward_flops_per_sample * (slowed - frozen * (1.0 - workload.attention_flops_share)),
        activations * workload.backward_bytes_per_sample
        + weights * workload.backward_bytes_fixed * (1.0 - frozen)
        + up * share.cast * trainable,
        (workload.backward_ops + casts) * share.layers,
    )
    recomputed = _recomputed_share(workload, implementation)
    return ComputeEstimate(
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=optimizer_s,
        launch_bound=forward_waits if forward_s >= backward_s else backward_waits,
        recompute_s=device.time_phase(*(recomputed * part for part in forward))[0] if recomputed else 0.0,
    )


def time_host_copy(workload: WorkloadFeatures, *, samples: int) -> float:
    """Seconds to copy the inputs of ``samples`` samples to the device; zero where their size is unknown.

    A token is an int64; an input named by a number alone is a square image of that width in three fp32 channels.
    """
    if workload.sequence_length:
        sample_bytes = 8 * workload.sequence_length
    elif workload.task_input.isdecimal():
        sample_bytes = 12 * int(workload.task_input) ** 2
    else:
        return 0.0
    return samples * sample_bytes / HOST_COPY_BYTES_PER_S
