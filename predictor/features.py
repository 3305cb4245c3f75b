"""From a training setup to its closed-form times and the one named feature row that every learned stage reads."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from precision_time.predictor.hardware import HardwareSpec
from precision_time.predictor.overlap import estimate_overlap
from precision_time.predictor.precision import FORMAT_BYTES, Precision
from precision_time.predictor.roofline import estimate_compute
from precision_time.predictor.workload import WorkloadFeatures

__all__ = [
    "SETUP_FEATURES",
    "ClosedForm",
    "TrainingSetup",
    "describe_setup",
    "feature_matrix",
    "solve_closed_form",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """One question: this workload, on this hardware, at this precision, on so many ranks, with this batch."""

    workload: WorkloadFeatures
    hardware: HardwareSpec
    precision: Precision
    world_size: int
    nodes: int
    batch_size: int
    gradient_accumulation_steps: int = 1
    strategy: str = "ddp"

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share one host."""
        return self.world_size // self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """Times of one iteration by roofline, collective and bucket timeline alone, in seconds.

    ``optimizer_time_s`` is part of ``compute_time_s``; ``iteration_time_s`` is compute plus exposed communication.
    """

    compute_time_s: float
    optimizer_time_s: float
    communication_time_s: float
    exposed_communication_s: float
    launch_bound: bool
    bucket_count: int

    @property
    def iteration_time_s(self) -> float:
        """Seconds of one optimizer step."""
        return self.compute_time_s + self.exposed_communication_s


def _rank_share(setup: TrainingSetup) -> HardwareSpec:
    """What one rank has: a whole GPU, or its share of a host's cores and memory bandwidth."""
    ranks = setup.ranks_per_node
    if setup.hardware.kind != "cpu" or ranks == 1:
        return setup.hardware
    return dataclasses.replace(
        setup.hardware,
        peak_flops_per_s={unit: peak / ranks for unit, peak in setup.hardware.peak_flops_per_s.items()},
        memory_bytes_per_s=setup.hardware.memory_bytes_per_s / ranks,
    )


def solve_closed_form(setup: TrainingSetup) -> ClosedForm:
    """Roofline of the compute, all-reduce of the buckets, and the timeline that lays one over the other.

    With accumulation each iteration runs the forward and backward pass that many times and communicates once,
    during the last backward pass.
    """
    hardware = _rank_share(setup)
    compute = estimate_compute(setup.workload, hardware, setup.precision, batch_size=setup.batch_size)
    micro_steps = setup.gradient_accumulation_steps
    overlap = estimate_overlap(
        setup.workload,
        hardware,
        setup.precision,
        backward_s=compute.backward_s,
        ranks=setup.world_size,
        nodes=setup.nodes,
    )
    return ClosedForm(
        compute_time_s=micro_steps * (compute.forward_s + compute.backward_s) + compute.optimizer_s,
        optimizer_time_s=compute.optimizer_s,
        communication_time_s=overlap.communication_time_s,
        exposed_communication_s=overlap.exposed_communication_s,
        launch_bound=compute.launch_bound,
        bucket_count=overlap.bucket_count,
    )


#: The columns that describe a setup, in the order of ``describe_setup``. Times are natural logs of seconds.
SETUP_FEATURES: tuple[str, ...] = (
    "log_closed_compute_s",
    "log_flops",
    "log_forward_bytes",
    "log_intensity",
    "log_params",
    "log_parameter_tensors",
    "log_batch",
    "log_operations",
    "launch_bound",
    "convolution_share",
    "attention_share",
    "optimizer_share",
    "log_peak_flops_per_s",
    "log_peak_over_fp32",
    "log_memory_bytes_per_s",
    "is_cpu",
    "compute_bytes",
    "storage_bytes",
    "loss_scaling",
    "accumulation",
    "log_world_size",
    "log_nodes",
    "log_message_bytes",
    "log_closed_communication_s",
    "closed_exposed_share",
    "bucket_count",
    "log_link_bytes_per_s",
)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else math.nan


def describe_setup(setup: TrainingSetup, closed: ClosedForm) -> dict[str, float]:
    """The feature row of ``setup`` by name; NaN where a feature does not apply (communication of one rank)."""
    work, hardware, precision = setup.workload, setup.hardware, setup.precision
    flops = setup.batch_size * (work.forward_flops_per_sample + work.backward_flops_per_sample)
    forward_bytes = setup.batch_size * work.forward_bytes_per_sample + work.forward_bytes_fixed
    moved = forward_bytes + setup.batch_size * work.backward_bytes_per_sample + work.backward_bytes_fixed
    peak = hardware.peak_flops_per_s.get(precision.compute, hardware.peak_flops_per_s["fp32"])
    several = setup.world_size > 1
    message_bytes = work.params * FORMAT_BYTES[precision.communicate]
    return {
        "log_closed_compute_s": _log(closed.compute_time_s),
        "log_flops": _log(flops),
        "log_forward_bytes": _log(forward_bytes),
        "log_intensity": _log(flops / moved),
        "log_params": _log(work.params),
        "log_parameter_tensors": _log(work.parameter_tensors),
        "log_batch": _log(setup.batch_size),
        "log_operations": _log(work.forward_ops + work.backward_ops),
        "launch_bound": float(closed.launch_bound),
        "convolution_share": work.convolution_flops_share,
        "attention_share": work.attention_flops_share,
        "optimizer_share": closed.optimizer_time_s / closed.compute_time_s,
        "log_peak_flops_per_s": _log(peak),
        "log_peak_over_fp32": _log(peak / hardware.peak_flops_per_s["fp32"]),
        "log_memory_bytes_per_s": _log(hardware.memory_bytes_per_s),
        "is_cpu": float(hardware.kind == "cpu"),
        "compute_bytes": float(FORMAT_BYTES[precision.compute]),
        "storage_bytes": float(FORMAT_BYTES[precision.storage]),
        "loss_scaling": float(precision.loss_scaling),
        "accumulation": float(setup.gradient_accumulation_steps),
        "log_world_size": _log(setup.world_size),
        "log_nodes": _log(setup.nodes),
        "log_message_bytes": _log(message_bytes) if several else math.nan,
        "log_closed_communication_s": _log(closed.communication_time_s) if several else math.nan,
        "closed_exposed_share": closed.exposed_communication_s / closed.communication_time_s if several else math.nan,
        "bucket_count": float(closed.bucket_count) if several else math.nan,
        "log_link_bytes_per_s": _log(hardware.link_bytes_per_s) if several else math.nan,
    }


def feature_matrix(rows: list[dict[str, float]], names: tuple[str, ...]) -> npt.NDArray[np.float32]:
    """The named columns of ``rows`` as float32 of shape (rows, names)."""
    return np.array([[row[name] for name in names] for row in rows], dtype=np.float32).reshape(len(rows), len(names))
