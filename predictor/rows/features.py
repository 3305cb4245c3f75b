"""The one named feature row that every learned stage reads, made from a training setup and its closed form."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precision_time.predictor.closed_form.solve import ClosedForm, solve_closed_form
from precision_time.predictor.rows.walk_features import CLOSED_WALK_FEATURES, WALK_FEATURES, describe_walk
from precision_time.predictor.setup.precision import FORMAT_BYTES
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.predictor.workloads.families import ATTENTION_KINDS

__all__ = [
    "CLOSED_FORM_FEATURES",
    "FEATURE_GROUPS",
    "OPEN_FEATURES",
    "SETUP_FEATURES",
    "Query",
    "describe_setup",
    "feature_matrix",
]

_CHECKPOINTING = {None: math.nan, "none": 0.0, "selective": 1.0, "full": 2.0}
_SHARDING = {"none": 0.0, "optimizer": 1.0, "gradients": 2.0, "parameters": 3.0}
#: Frameworks that a column of their own is worth; every other one has zeros in all of them.
_FRAMEWORKS = ("pytorch", "tensorflow", "mxnet", "jax", "paddlepaddle", "oneflow", "megatron")
#: The columns that describe a setup, in the order of ``describe_setup``. Times are natural logs of seconds.
SETUP_FEATURES: tuple[str, ...] = (
    "log_closed_s", "log_closed_compute_s", "optimizer_share", "launch_bound", "log_closed_communication_s",
    "closed_exposed_share", "tensor_communication_share", "bubble_share", "log_flops", "log_flops_per_sample",
    "log_intensity", "log_params", "log_active_share", "log_flops_per_param", "log_activations_per_sample",
    "log_parameter_tensors", "log_operations", "log_input_size", "log_layers", "log_hidden_size", "convolution_share",
    "attention_share", "is_attention", "is_detection", "is_segmentation", "is_language_decoder",
    "is_mixture_of_experts", "is_recurrent", "is_speech", "is_recommendation", "is_diffusion", *WALK_FEATURES,
    "log_peak_flops_per_s", "log_fp32_flops_per_s", "log_peak_over_fp32", "log_achieved_over_peak",
    "log_memory_bytes_per_s",
    "log_memory_bytes", "log_balance", "log_sm_count", "log_clock_hz", "log_l2_bytes", "log_power_w",
    "compute_capability", "is_cpu", "compute_bytes", "storage_bytes", "loss_scaling", "software_year",
    "channels_last", "compiled", "checkpointing", "flash_attention", "fused_kernels", "packed", "trainable_share",
    "tuned", "optimizer_step", "host_copy", "evaluation_inside", "startup_inside", "framework_pytorch",
    "framework_tensorflow", "framework_mxnet", "framework_jax", "framework_paddlepaddle", "framework_oneflow",
    "framework_megatron", "log_batch", "log_accumulation", "log_world_size", "log_nodes", "log_data", "log_tensor",
    "log_pipeline", "log_context", "log_expert", "log_virtual_stages", "sharding", "single_process",
    "log_message_bytes", "log_link_bytes_per_s", "log_network_bytes_per_s", "bucket_count",
)  # fmt: skip

#: Those of them that a closed form fills.
CLOSED_FORM_FEATURES = (
    "log_closed_s", "log_closed_compute_s", "optimizer_share", "launch_bound", "log_closed_communication_s",
    "closed_exposed_share", "tensor_communication_share", "bubble_share", *CLOSED_WALK_FEATURES, "bucket_count",
)  # fmt: skip

#: Facts about the code that a question may leave open while nearly every row of the public table tells them.
OPEN_FEATURES = (
    "software_year", "channels_last", "compiled", "checkpointing", "flash_attention", "fused_kernels", "packed",
)  # fmt: skip

#: Columns by what they tell, for explanations; ``closed form`` takes those that a closed form fills.
FEATURE_GROUPS: dict[str, frozenset[str]] = {
    "closed form": frozenset(CLOSED_FORM_FEATURES),
    # what autocast does to a network tells the policy too: no walk in fp32 casts
    "precision": frozenset(
        {"compute_bytes", "storage_bytes", "loss_scaling", "log_peak_over_fp32", "bytes_cast", "bytes_over_fp32"}
    ),
    "hardware": frozenset(
        name
        for name in SETUP_FEATURES[SETUP_FEATURES.index("log_peak_flops_per_s") : SETUP_FEATURES.index("compute_bytes")]
        if name != "log_peak_over_fp32"
    ),
    "implementation": frozenset(
        SETUP_FEATURES[SETUP_FEATURES.index("software_year") : SETUP_FEATURES.index("log_batch")]
    ),
    "batch": frozenset({"log_batch", "log_accumulation", "log_flops", "log_walked_flops", "log_flops_per_operation"}),
    "ranks and links": frozenset(
        SETUP_FEATURES[SETUP_FEATURES.index("log_world_size") : SETUP_FEATURES.index("log_network_bytes_per_s") + 1]
    ),
}
FEATURE_GROUPS["network"] = frozenset(SETUP_FEATURES) - frozenset().union(*FEATURE_GROUPS.values())

_KINDS = {
    "is_detection": ("detection",),
    "is_segmentation": ("segmentation",),
    "is_language_decoder": ("language_decoder",),
    "is_mixture_of_experts": ("mixture_of_experts",),
    "is_recurrent": ("recurrent",),
    "is_speech": ("speech",),
    "is_recommendation": ("recommendation",),
    "is_diffusion": ("diffusion",),
}


def _log(value: float | None) -> float:
    return math.log(value) if value is not None and value > 0 else math.nan


def _flag(value: bool | None) -> float:
    return math.nan if value is None else float(value)


def _input_size(task_input: str) -> float:
    """The first number of ``task_input``: resolution or sequence length."""
    digits = ""
    for letter in task_input:
        if letter.isdigit():
            digits += letter
        elif digits:
            break
    return float(digits) if digits else math.nan


def _describe_workload(setup: TrainingSetup) -> dict[str, float]:
    work = setup.workload
    moved = setup.batch_size * (work.forward_bytes_per_sample + work.backward_bytes_per_sample)
    flops = setup.batch_size * (work.forward_flops_per_sample + work.backward_flops_per_sample)
    size = work.sequence_length or _input_size(work.task_input)
    return {
        "log_flops": _log(flops),
        "log_flops_per_sample": _log(work.forward_flops_per_sample),
        "log_intensity": _log(flops / (moved + work.forward_bytes_fixed + work.backward_bytes_fixed)),
        "log_params": _log(work.params),
        "log_active_share": _log((work.active_params or work.params) / work.params),
        "log_flops_per_param": _log(work.forward_flops_per_sample / work.params),
        "log_activations_per_sample": _log(work.activations_per_sample),
        "log_parameter_tensors": _log(work.parameter_tensors),
        "log_operations": _log(work.forward_ops + work.backward_ops),
        "log_input_size": _log(size),
        "log_layers": _log(work.layers),
        "log_hidden_size": _log(work.hidden_size),
        "convolution_share": work.convolution_flops_share,
        "attention_share": work.attention_flops_share,
        "is_attention": float(work.kind in ATTENTION_KINDS),
        **{name: float(work.kind in kinds) for name, kinds in _KINDS.items()},
    }


def _describe_hardware(setup: TrainingSetup) -> dict[str, float]:
    hardware, unit = setup.hardware, setup.precision.compute
    fp32 = hardware.peak_flops_per_s["fp32"]
    peak = hardware.peak_flops_per_s.get(unit, fp32)
    achieved = hardware.achieved_flops_per_s.get(unit)
    return {
        "log_peak_flops_per_s": _log(peak),
        "log_fp32_flops_per_s": _log(fp32),
        "log_peak_over_fp32": _log(peak / fp32),
        "log_achieved_over_peak": _log(achieved / peak if achieved else None),
        "log_memory_bytes_per_s": _log(hardware.memory_bytes_per_s),
        "log_memory_bytes": _log(hardware.memory_bytes),
        "log_balance": _log(peak / hardware.memory_bytes_per_s),
        "log_sm_count": _log(hardware.sm_count),
        "log_clock_hz": _log(hardware.boost_clock_hz),
        "log_l2_bytes": _log(hardware.l2_bytes),
        "log_power_w": _log(hardware.power_w),
        "compute_capability": hardware.compute_capability or math.nan,
        "is_cpu": float(hardware.kind == "cpu"),
    }


def _describe_implementation(setup: TrainingSetup) -> dict[str, float]:
    code = setup.implementation
    return {
        "software_year": code.software_year if code.software_year is not None else math.nan,
        "channels_last": _flag(code.channels_last),
        "compiled": _flag(code.compiled),
        "checkpointing": _CHECKPOINTING[code.checkpointing],
        "flash_attention": _flag(code.flash_attention),
        "fused_kernels": _flag(code.fused_kernels),
        "packed": _flag(code.packed),
        "trainable_share": code.trainable_share,
        "tuned": float(code.tuned),
        "optimizer_step": float(code.optimizer_step),
        "host_copy": float(code.host_copy),
        "evaluation_inside": float(code.evaluation_inside),
        "startup_inside": float(code.startup_inside),
        **{f"framework_{name}": float(code.framework == name) for name in _FRAMEWORKS},
    }


def _describe_ranks(setup: TrainingSetup, closed: ClosedForm) -> dict[str, float]:
    layout, several = setup.layout, setup.world_size > 1
    message_bytes = setup.workload.params * FORMAT_BYTES[setup.precision.communicate]
    return {
        "log_batch": _log(setup.batch_size),
        "log_accumulation": _log(setup.gradient_accumulation_steps),
        "log_world_size": _log(setup.world_size),
        "log_nodes": _log(setup.nodes),
        "log_data": _log(layout.data),
        "log_tensor": _log(layout.tensor),
        "log_pipeline": _log(layout.pipeline),
        "log_context": _log(layout.context),
        "log_expert": _log(layout.expert),
        "log_virtual_stages": _log(layout.virtual_stages),
        "sharding": _SHARDING[layout.sharding],
        "single_process": float(layout.single_process),
        "log_message_bytes": _log(message_bytes) if several else math.nan,
        "log_link_bytes_per_s": _log(setup.hardware.link_bytes_per_s) if several else math.nan,
        "log_network_bytes_per_s": _log(setup.hardware.network_bytes_per_s) if setup.nodes > 1 else math.nan,
        "bucket_count": float(closed.bucket_count) if several else math.nan,
    }


def describe_setup(setup: TrainingSetup, closed: ClosedForm) -> dict[str, float]:
    """The feature row of ``setup`` by name, in the order of ``SETUP_FEATURES``; times are natural logs of seconds.

    NaN where a feature does not apply (communication of one rank) or nobody says (whether a script was compiled).
    """
    precision, total = setup.precision, closed.iteration_time_s
    several = setup.world_size > 1
    return {
        "log_closed_s": _log(total),
        "log_closed_compute_s": _log(closed.compute_time_s),
        "optimizer_share": closed.optimizer_time_s / total,
        "launch_bound": float(closed.launch_bound),
        "log_closed_communication_s": _log(closed.communication_time_s) if several else math.nan,
        "closed_exposed_share": closed.exposed_communication_s / total if several else math.nan,
        "tensor_communication_share": closed.tensor_communication_s / total,
        "bubble_share": closed.pipeline_bubble_s / total,
        **_describe_workload(setup),
        **describe_walk(setup.workload.walks, setup.hardware, precision, samples=setup.batch_size),
        **_describe_hardware(setup),
        "compute_bytes": float(FORMAT_BYTES[precision.compute]),
        "storage_bytes": float(FORMAT_BYTES[precision.storage]),
        "loss_scaling": float(precision.loss_scaling),
        **_describe_implementation(setup),
        **_describe_ranks(setup, closed),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A setup with its closed form and feature row: what a predictor is asked."""

    setup: TrainingSetup
    closed: ClosedForm
    row: dict[str, float]

    @classmethod
    def of(cls, setup: TrainingSetup) -> "Query":
        """Solve and describe ``setup``."""
        closed = solve_closed_form(setup)
        return cls(setup=setup, closed=closed, row=describe_setup(setup, closed))


def feature_matrix(rows: Sequence[dict[str, float]], names: tuple[str, ...]) -> npt.NDArray[np.float32]:
    """The named columns of ``rows`` as float32 of shape (rows, names)."""
    return np.array([[row[name] for name in names] for row in rows], dtype=np.float32).reshape(len(rows), len(names))
