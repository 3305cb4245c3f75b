"""Closed form of compute: seconds of forward, backward and optimizer on one device, as the precision changes them."""

from dataclasses import dataclass

from precision_time.predictor.hardware import HardwareSpec, check_precision
from precision_time.predictor.precision import FORMAT_BYTES, Precision
from precision_time.predictor.workload import WorkloadFeatures
from precision_time.storage.errors import InputError, UnknownNameError

__all__ = ["ComputeEstimate", "cast_bytes", "estimate_compute", "scale_activation_bytes"]

#: Shares of the nominal rates that training reaches. Fitted together on 72 medians of 304 public single-GPU rows of
#: ResNet-50, BERT-base and ViT-B/16 (lambdal/deeplearning-benchmark, Oneflow-Inc/DLPerf, NVIDIA/DeepLearningExamples,
#: PaddlePaddle/Perf, huggingface/pytorch-image-models; Pascal to B200, fp32, tf32, fp16): mean error 18 %, median 13 %.
#: Starting points that the learner refines; they hold for no single model.
GPU_COMPUTE_EFFICIENCY = 0.55
GPU_MEMORY_EFFICIENCY = 0.40

#: The same for a CPU, whose rates are measured and not nominal ones: fitted on the processor time of forward
#: plus backward, one thread, for mlp, vit_tiny, bert_mini, gpt2_mini, resnet18 (two batches each) and resnet50, in fp32
#: and amp_bf16, on an AMD EPYC (Zen 4 or later) with torch 2.13.0: mean error 17 %, median 10 %, the largest at the
#: smallest batches.
CPU_FP32_EFFICIENCY = 0.75
CPU_NARROW_EFFICIENCY = 0.55
CPU_MEMORY_EFFICIENCY = 0.35

#: Bytes of activations that autocast still moves, per byte of fp32 eager execution. Without attention all of it
#: narrows (walk of ResNet-50: 0.50). Normalisation, softmax and losses stay fp32 and add casts around them: 0.73 to
#: 0.94 in walks of ViT-B/16, BERT-base, Llama-7B, GPT-2 XL and GPT-2, the middle one here.
AUTOCAST_ATTENTION_BYTES = 0.83

#: Bytes an optimizer reads and writes per parameter with fp32 parameters, gradients and states.
OPTIMIZER_BYTES = {"sgd": 12, "sgd_momentum": 20, "adam": 28, "adamw": 28, "lamb": 36}

#: Elementwise operations per parameter tensor, counted in the loop forms of torch.optim 2.13; LAMB adds two
#: norms, their ratio and a scaling to Adam.
OPTIMIZER_OPERATIONS = {"sgd": 1, "sgd_momentum": 3, "adam": 8, "adamw": 9, "lamb": 12}

#: Tensors that one launch of a multi-tensor kernel of torch 2.13 updates on a GPU, with two lists of tensors
#: (depth_to_max_tensors in ATen/native/cuda/MultiTensorApply.cuh, small kernel arguments).
TENSORS_PER_LAUNCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeEstimate:
    """Seconds of one micro-step on one device, without communication.

    ``optimizer_s`` includes the traffic of loss scaling. ``launch_bound`` says that the host, which queues the
    operations, and not the device sets the time of the forward and backward pass.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    launch_bound: bool

    @property
    def total_s(self) -> float:
        """Forward, backward and optimizer."""
        return self.forward_s + self.backward_s + self.optimizer_s


def scale_activation_bytes(workload: WorkloadFeatures, precision: Precision) -> float:
    """Bytes of activations a policy moves, over those of fp32 eager execution."""
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
    return _Device(
        flops_per_s=compute * hardware.peak_flops_per_s[precision.compute],
        bytes_per_s=memory * hardware.memory_bytes_per_s,
        launch_s=hardware.launch_overhead_s,
        launches_overlap=is_gpu,
    )


def _time_optimizer(workload: WorkloadFeatures, precision: Precision, device: _Device) -> float:
    if workload.optimizer not in OPTIMIZER_BYTES:
        raise UnknownNameError("optimizer", workload.optimizer, OPTIMIZER_BYTES)
    state = FORMAT_BYTES[precision.storage] / FORMAT_BYTES["fp32"]
    moved = workload.params * OPTIMIZER_BYTES[workload.optimizer] * state
    # A GPU updates many tensors in one launch (foreach), a CPU one by one.
    groups = (
        -(-workload.parameter_tensors // TENSORS_PER_LAUNCH) if device.launches_overlap else workload.parameter_tensors
    )
    operations = groups * OPTIMIZER_OPERATIONS[workload.optimizer]
    if precision.loss_scaling:
        # Unscaling and the search for infinities read and write every fp32 gradient, in one operation per group.
        moved += 8 * workload.params
        operations += groups
    return device.time_phase(0.0, moved, operations)[0]


def estimate_compute(
    workload: WorkloadFeatures, hardware: HardwareSpec, precision: Precision, *, batch_size: int
) -> ComputeEstimate:
    """Roofline of one micro-step of ``batch_size`` samples and of the optimizer step after it.

    Each pass takes max(F / (eta_c Pi), Q / (eta_m B)) seconds on the device: F its FLOPs (2 per multiply-add), Pi the
    dense peak (FLOP/s) of the policy's compute format, Q the bytes it moves, B the memory bandwidth (bytes/s). Q is
    batch x activations, scaled by what the policy narrows, plus the weights in the compute format, plus the casts
    between both. Launching n operations costs the host n tau seconds; a GPU hides them behind its own work, so a pass
    takes at least n tau, while on a CPU they add up. Autocast launches one cast per parameter tensor and pass.

    Raises ``InputError`` for a batch that is not a positive integer, ``PrecisionUnsupportedError`` for a format the
    device lacks, ``UnknownNameError`` for an optimizer that is not known.

    Source: Williams, Waterman, Patterson, "Roofline" (2009); constants of this file.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InputError("batch_size is not usable", got=repr(batch_size), expected="an integer of at least 1")
    check_precision(hardware, precision)
    device = _describe_device(hardware, precision)
    activations = batch_size * scale_activation_bytes(workload, precision)
    # fp8 and nvfp4 keep their copies of the weights in the compute format too.
    weights = FORMAT_BYTES[precision.compute] / FORMAT_BYTES["fp32"]
    down, up = cast_bytes(workload.params, precision)
    casts = workload.parameter_tensors if precision.is_mixed else 0
    forward_s, forward_waits = device.time_phase(
        batch_size * workload.forward_flops_per_sample,
        activations * workload.forward_bytes_per_sample + weights * workload.forward_bytes_fixed + down,
        workload.forward_ops + casts,
    )
    backward_s, backward_waits = device.time_phase(
        batch_size * workload.backward_flops_per_sample,
        activations * workload.backward_bytes_per_sample + weights * workload.backward_bytes_fixed + up,
        workload.backward_ops + casts,
    )
    return ComputeEstimate(
        forward_s=forward_s,
        backward_s=backward_s,
        optimizer_s=_time_optimizer(workload, precision, device),
        launch_bound=forward_waits if forward_s >= backward_s else backward_waits,
    )
