"""The feature row that every learned stage reads: the columns of a training setup, its closed form and its walk."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precision_time.predictor.closed_form.solve import ClosedForm, solve_closed_form
from precision_time.predictor.closed_form.walked_time import choose_walk
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.precision import FORMAT_BYTES, Precision
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.predictor.workloads.families import ATTENTION_KINDS
from precision_time.predictor.workloads.walk import PHASES, PRODUCTS, RIDGES, Walk

__all__ = [
    "CLOSED_FORM_FEATURES",
    "FEATURE_GROUPS",
    "OPEN_FEATURES",
    "SETUP_FEATURES",
    "WALK_FEATURES",
    "Query",
    "describe_walk",
    "feature_matrix",
]


def _log(value: float | None) -> float:
    return math.log(value) if value is not None and value > 0 else math.nan


def _flag(value: bool | None) -> float:
    return math.nan if value is None else float(value)


def _input_size(task_input: str) -> float:
    """The first number of ``task_input``: resolution or sequence length."""
    number = re.search(r"\d+", task_input)
    return float(number[0]) if number else math.nan


def _peak(setup: TrainingSetup) -> float:
    """FLOPs per second of the device in the format that the policy computes in, else in fp32."""
    peaks = setup.hardware.peak_flops_per_s
    return peaks.get(setup.precision.compute, peaks["fp32"])


def _achieved_share(setup: TrainingSetup) -> float | None:
    achieved = setup.hardware.achieved_flops_per_s.get(setup.precision.compute)
    return achieved / _peak(setup) if achieved else None


def _flops(setup: TrainingSetup) -> float:
    return setup.batch_size * (setup.workload.forward_flops_per_sample + setup.workload.backward_flops_per_sample)


def _intensity(setup: TrainingSetup) -> float:
    work = setup.workload
    moved = setup.batch_size * (work.forward_bytes_per_sample + work.backward_bytes_per_sample)
    return _flops(setup) / (moved + work.forward_bytes_fixed + work.backward_bytes_fixed)


def _is_kind(kind: str, setup: TrainingSetup) -> float:
    return float(setup.workload.kind == kind)


def _is_framework(name: str, code: Implementation) -> float:
    return float(code.framework == name)


def _flops_share(family: str, walk: Walk) -> float:
    return walk.total("flops", phase="forward", families=(family,)) / walk.total("flops", phase="forward")


def _bytes_share(family: str, walk: Walk) -> float:
    return walk.total("bytes", families=(family,)) / walk.total("bytes")


def _roof(place: int, walk: Walk) -> float:
    return _log((walk.roof_forward[place] + walk.roof_backward[place]) / walk.total("bytes"))


def _backward_flops_ratio(walk: Walk) -> float:
    forward = walk.total("flops", phase="forward")
    return (walk.total("flops") - forward) / forward


# The columns by what they describe: name and formula, NaN where a value is not known. Logs are natural, times in
# seconds. A new column is a line here, and one in ``FEATURE_GROUPS`` where its group is not that of its table.

_CLOSED_COLUMNS: dict[str, Callable[[ClosedForm], float]] = {
    "log_closed_s": lambda closed: _log(closed.iteration_time_s),
    "log_closed_compute_s": lambda closed: _log(closed.compute_time_s),
    "optimizer_share": lambda closed: closed.optimizer_time_s / closed.iteration_time_s,
    "launch_bound": lambda closed: float(closed.launch_bound),
    "log_closed_communication_s": lambda closed: _log(closed.communication_time_s),
    "closed_exposed_share": lambda closed: closed.exposed_communication_s / closed.iteration_time_s,
    "tensor_communication_share": lambda closed: closed.tensor_communication_s / closed.iteration_time_s,
    "bubble_share": lambda closed: closed.pipeline_bubble_s / closed.iteration_time_s,
}

_WORK_COLUMNS: dict[str, Callable[[TrainingSetup], float]] = {
    "log_flops": lambda setup: _log(_flops(setup)),
    "log_flops_per_sample": lambda setup: _log(setup.workload.forward_flops_per_sample),
    "log_intensity": lambda setup: _log(_intensity(setup)),
    "log_params": lambda setup: _log(setup.workload.params),
    "log_active_share": lambda setup: _log(
        (setup.workload.active_params or setup.workload.params) / setup.workload.params
    ),
    "log_flops_per_param": lambda setup: _log(setup.workload.forward_flops_per_sample / setup.workload.params),
    "log_activations_per_sample": lambda setup: _log(setup.workload.activations_per_sample),
    "log_parameter_tensors": lambda setup: _log(setup.workload.parameter_tensors),
    "log_operations": lambda setup: _log(setup.workload.forward_ops + setup.workload.backward_ops),
    "log_input_size": lambda setup: _log(setup.workload.sequence_length or _input_size(setup.workload.task_input)),
    "log_layers": lambda setup: _log(setup.workload.layers),
    "log_hidden_size": lambda setup: _log(setup.workload.hidden_size),
    "convolution_share": lambda setup: setup.workload.convolution_flops_share,
    "attention_share": lambda setup: setup.workload.attention_flops_share,
    "is_attention": lambda setup: float(setup.workload.kind in ATTENTION_KINDS),
    **{
        f"is_{kind}": functools.partial(_is_kind, kind)
        for kind in (
            "detection", "segmentation", "language_decoder", "mixture_of_experts", "recurrent", "speech",
            "recommendation", "diffusion",
        )
    },
}  # fmt: skip

#: Columns of a walk that depend on batch and device too, first those that a closed form fills; ``describe_walk`` has
#: their formulas.
_WALKED_ROOFLINE = (
    "log_operation_roofline_s", "log_operations_over_whole", "product_share_of_roofline", "log_launch_over_roofline",
)  # fmt: skip
_WALKED_STEP = (
    "log_walked_flops", "log_flops_per_operation", "log_walked_bytes", "log_walked_intensity", "weight_traffic_share",
    "bytes_over_fp32",
)  # fmt: skip
#: The other columns of a walk. Shares are of the FLOPs of the forward pass, and of the bytes of both passes.
_WALK_COLUMNS: dict[str, Callable[[Walk], float]] = {
    "log_walked_operations": lambda walk: _log(walk.total("ops")),
    "fused_share": lambda walk: walk.total("fused") / walk.total("bytes"),
    **{f"flops_{family}": functools.partial(_flops_share, family) for family in PRODUCTS},
    **{
        f"bytes_{family}": functools.partial(_bytes_share, family)
        for family in (
            "depthwise", "grouped", "attention", "recurrent", "normalization", "softmax", "elementwise", "reduction",
            "pooling", "gather", "cast", "copy",
        )
    },
    "log_saved_bytes": lambda walk: _log(walk.saved),
    "saved_share": lambda walk: walk.saved / walk.total("bytes"),
    "log_scores": lambda walk: math.log1p(walk.scores),
    "narrow_share": lambda walk: walk.narrow_flops_share,
    "aligned_share": lambda walk: walk.aligned_flops_share,
    "log_serial_steps": lambda walk: math.log1p(walk.serial_steps),
    **{f"roof_{ridge:.0f}": functools.partial(_roof, place) for place, ridge in enumerate(RIDGES)},
    "backward_flops_ratio": _backward_flops_ratio,
    "backward_bytes_share": lambda walk: walk.total("bytes", phase="backward") / walk.total("bytes"),
    "ready_at_half": lambda walk: walk.ready_at(0.5),
    "log_gradient_bytes": lambda walk: _log(walk.gradient_bytes),
    "log_gradient_tensors": lambda walk: _log(walk.gradient_tensors),
}  # fmt: skip

_HARDWARE_COLUMNS: dict[str, Callable[[TrainingSetup], float]] = {
    "log_peak_flops_per_s": lambda setup: _log(_peak(setup)),
    "log_fp32_flops_per_s": lambda setup: _log(setup.hardware.peak_flops_per_s["fp32"]),
    "log_peak_over_fp32": lambda setup: _log(_peak(setup) / setup.hardware.peak_flops_per_s["fp32"]),
    "log_achieved_over_peak": lambda setup: _log(_achieved_share(setup)),
    "log_memory_bytes_per_s": lambda setup: _log(setup.hardware.memory_bytes_per_s),
    "log_memory_bytes": lambda setup: _log(setup.hardware.memory_bytes),
    "log_balance": lambda setup: _log(_peak(setup) / setup.hardware.memory_bytes_per_s),
    "log_sm_count": lambda setup: _log(setup.hardware.sm_count),
    "log_clock_hz": lambda setup: _log(setup.hardware.boost_clock_hz),
    "log_l2_bytes": lambda setup: _log(setup.hardware.l2_bytes),
    "log_power_w": lambda setup: _log(setup.hardware.power_w),
    "compute_capability": lambda setup: setup.hardware.compute_capability or math.nan,
    "is_cpu": lambda setup: float(setup.hardware.kind == "cpu"),
}

_PRECISION_COLUMNS: dict[str, Callable[[Precision], float]] = {
    "compute_bytes": lambda precision: float(FORMAT_BYTES[precision.compute]),
    "storage_bytes": lambda precision: float(FORMAT_BYTES[precision.storage]),
    "loss_scaling": lambda precision: float(precision.loss_scaling),
}

_CHECKPOINTING = {None: math.nan, "none": 0.0, "selective": 1.0, "full": 2.0}
#: Facts about the code that a question may leave open, although nearly every row of the public table states them.
_OPEN_COLUMNS: dict[str, Callable[[Implementation], float]] = {
    "software_year": lambda code: math.nan if code.software_year is None else code.software_year,
    "channels_last": lambda code: _flag(code.channels_last),
    "compiled": lambda code: _flag(code.compiled),
    "checkpointing": lambda code: _CHECKPOINTING[code.checkpointing],
    "flash_attention": lambda code: _flag(code.flash_attention),
    "fused_kernels": lambda code: _flag(code.fused_kernels),
    "packed": lambda code: _flag(code.packed),
}
_CODE_COLUMNS: dict[str, Callable[[Implementation], float]] = _OPEN_COLUMNS | {
    "trainable_share": lambda code: code.trainable_share,
    "tuned": lambda code: float(code.tuned),
    "optimizer_step": lambda code: float(code.optimizer_step),
    "host_copy": lambda code: float(code.host_copy),
    "evaluation_inside": lambda code: float(code.evaluation_inside),
    "startup_inside": lambda code: float(code.startup_inside),
    # every other framework has zeros in all of these
    **{
        f"framework_{name}": functools.partial(_is_framework, name)
        for name in ("pytorch", "tensorflow", "mxnet", "jax", "paddlepaddle", "oneflow", "megatron")
    },
}

_BATCH_COLUMNS: dict[str, Callable[[TrainingSetup], float]] = {
    "log_batch": lambda setup: _log(setup.batch_size),
    "log_accumulation": lambda setup: _log(setup.gradient_accumulation_steps),
}
_SHARDING = {"none": 0.0, "optimizer": 1.0, "gradients": 2.0, "parameters": 3.0}
_RANK_COLUMNS: dict[str, Callable[[TrainingSetup], float]] = {
    "log_world_size": lambda setup: _log(setup.world_size),
    "log_nodes": lambda setup: _log(setup.nodes),
    "log_data": lambda setup: _log(setup.layout.data),
    "log_tensor": lambda setup: _log(setup.layout.tensor),
    "log_pipeline": lambda setup: _log(setup.layout.pipeline),
    "log_context": lambda setup: _log(setup.layout.context),
    "log_expert": lambda setup: _log(setup.layout.expert),
    "log_virtual_stages": lambda setup: _log(setup.layout.virtual_stages),
    "sharding": lambda setup: _SHARDING[setup.layout.sharding],
    "single_process": lambda setup: float(setup.layout.single_process),
    "log_message_bytes": lambda setup: _log(setup.workload.params * FORMAT_BYTES[setup.precision.communicate]),
    "log_link_bytes_per_s": lambda setup: _log(setup.hardware.link_bytes_per_s),
    "log_network_bytes_per_s": lambda setup: _log(setup.hardware.network_bytes_per_s if setup.nodes > 1 else None),
}

#: Columns of several ranks: NaN for a single one.
_BETWEEN_RANKS = (
    "log_closed_communication_s", "closed_exposed_share", "log_message_bytes", "log_link_bytes_per_s", "bucket_count",
)  # fmt: skip

WALK_FEATURES: tuple[str, ...] = (*_WALKED_ROOFLINE, *_WALKED_STEP, *_WALK_COLUMNS)
OPEN_FEATURES = tuple(_OPEN_COLUMNS)
#: The columns of a feature row, in its order.
SETUP_FEATURES: tuple[str, ...] = (
    *_CLOSED_COLUMNS, *_WORK_COLUMNS, *WALK_FEATURES, *_HARDWARE_COLUMNS, *_PRECISION_COLUMNS, *_CODE_COLUMNS,
    *_BATCH_COLUMNS, *_RANK_COLUMNS, "bucket_count",
)  # fmt: skip
#: Those of them that a closed form fills.
CLOSED_FORM_FEATURES = (*_CLOSED_COLUMNS, *_WALKED_ROOFLINE, "bucket_count")

#: Columns by what they describe, for explanations.
FEATURE_GROUPS: dict[str, frozenset[str]] = {
    "closed form": frozenset(CLOSED_FORM_FEATURES),
    # casts depend on the policy as well: a walk in fp32 has none
    "precision": frozenset({*_PRECISION_COLUMNS, "log_peak_over_fp32", "bytes_cast", "bytes_over_fp32"}),
    "hardware": frozenset(_HARDWARE_COLUMNS) - {"log_peak_over_fp32"},
    "implementation": frozenset(_CODE_COLUMNS),
    "batch": frozenset({*_BATCH_COLUMNS, "log_flops", "log_walked_flops", "log_flops_per_operation"}),
    "ranks and links": frozenset(_RANK_COLUMNS),
}
FEATURE_GROUPS["network"] = frozenset(SETUP_FEATURES) - frozenset().union(*FEATURE_GROUPS.values())

#: Share of the nominal peak that products are assumed to reach where operations are compared with the whole.
_EFFICIENCY = 0.7


@functools.lru_cache(maxsize=8192)
def _describe_network(walk: Walk) -> tuple[float, float, float, float, dict[str, float]]:
    """Bytes of a sample, bytes that no sample adds to, FLOPs and operations of a walk, and its ``_WALK_COLUMNS``."""
    columns = {name: formula(walk) for name, formula in _WALK_COLUMNS.items()}
    return walk.total("bytes"), walk.total("bytes_fixed"), walk.total("flops"), walk.total("ops"), columns


def describe_walk(
    walks: Mapping[str, Walk] | None, hardware: HardwareSpec, precision: Precision, *, samples: float
) -> dict[str, float]:
    """The columns ``WALK_FEATURES`` of one micro-step of ``samples`` samples; all NaN for a network never walked.

    ``log_operation_roofline_s`` is the log of the seconds of the roofline summed over operations, with the traffic of
    the weights; ``log_operations_over_whole`` is the log of its ratio to the roofline of the network as a whole.
    """
    if walks is None:
        return dict.fromkeys(WALK_FEATURES, math.nan)
    walk, narrowed = choose_walk(walks, precision)
    sample_bytes, weight_bytes, sample_flops, operations, columns = _describe_network(walk)
    peak = _EFFICIENCY * hardware.peak_flops_per_s.get(precision.compute, hardware.peak_flops_per_s["fp32"])
    bandwidth = hardware.memory_bytes_per_s
    # a narrower format moves fewer bytes, so compute bounds an operation from fewer FLOPs per byte of the walk on
    ridge = narrowed * peak / bandwidth
    waited = samples * narrowed * sum(walk.roof_at(ridge, phase=phase) for phase in PHASES)
    moved, fixed, flops = samples * narrowed * sample_bytes, narrowed * weight_bytes, samples * sample_flops
    roofline_s = (waited + fixed) / bandwidth
    whole_s = max(flops / peak, (moved + fixed) / bandwidth)
    return {
        "log_operation_roofline_s": _log(roofline_s),
        "log_operations_over_whole": _log(roofline_s / whole_s),
        "product_share_of_roofline": min(1.0, flops / peak / roofline_s),
        "log_launch_over_roofline": _log(operations * hardware.launch_overhead_s / roofline_s),
        "log_walked_flops": _log(flops),
        "log_flops_per_operation": _log(flops / operations),
        "log_walked_bytes": _log(moved),
        "log_walked_intensity": _log(flops / moved),
        "weight_traffic_share": fixed / (moved + fixed),
        "bytes_over_fp32": narrowed * sample_bytes / _describe_network(walks["fp32"])[0],
        **columns,
    }


def _describe_setup(setup: TrainingSetup, closed: ClosedForm) -> dict[str, float]:
    """The feature row of ``setup`` by name, in the order of ``SETUP_FEATURES``."""
    row = {
        **{name: formula(closed) for name, formula in _CLOSED_COLUMNS.items()},
        **{name: formula(setup) for name, formula in _WORK_COLUMNS.items()},
        **describe_walk(setup.workload.walks, setup.hardware, setup.precision, samples=setup.batch_size),
        **{name: formula(setup) for name, formula in _HARDWARE_COLUMNS.items()},
        **{name: formula(setup.precision) for name, formula in _PRECISION_COLUMNS.items()},
        **{name: formula(setup.implementation) for name, formula in _CODE_COLUMNS.items()},
        **{name: formula(setup) for name, formula in (_BATCH_COLUMNS | _RANK_COLUMNS).items()},
        "bucket_count": float(closed.bucket_count),
    }
    return row if setup.world_size > 1 else row | dict.fromkeys(_BETWEEN_RANKS, math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A question to a predictor: a setup with its closed form and feature row."""

    setup: TrainingSetup
    closed: ClosedForm
    row: dict[str, float]

    @classmethod
    def of(cls, setup: TrainingSetup) -> "Query":
        """Solve and describe ``setup``."""
        closed = solve_closed_form(setup)
        return cls(setup=setup, closed=closed, row=_describe_setup(setup, closed))


def feature_matrix(rows: Sequence[dict[str, float]], names: tuple[str, ...]) -> npt.NDArray[np.float32]:
    """The named columns of ``rows`` as float32 of shape (rows, names)."""
    return np.array([[row[name] for name in names] for row in rows], dtype=np.float32).reshape(len(rows), len(names))
