"""Columns of the feature row that a walk fills: of which operations a network is made, and what bounds them."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from precision_time.predictor.closed_form.walked_time import choose_walk
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.setup.precision import Precision
from precision_time.predictor.workloads.walk import PHASES, PRODUCTS, RIDGES, Walk

__all__ = ["CLOSED_WALK_FEATURES", "WALK_FEATURES", "describe_walk"]

_FLOPS = tuple(f"flops_{family}" for family in PRODUCTS)
_TRAFFIC = ("depthwise", "grouped", "attention", "recurrent", "normalization", "softmax", "elementwise", "reduction",
            "pooling", "gather", "cast", "copy")  # fmt: skip
_BYTES = tuple(f"bytes_{family}" for family in _TRAFFIC)
_ROOFS = tuple(f"roof_{ridge:.0f}" for ridge in RIDGES)
#: Those that a closed form fills.
CLOSED_WALK_FEATURES = ("log_operation_roofline_s", "log_operations_over_whole", "product_share_of_roofline",
                        "log_launch_over_roofline")  # fmt: skip
#: Shares are of the FLOPs, bytes or both of both passes; logs are natural.
WALK_FEATURES: tuple[str, ...] = (
    *CLOSED_WALK_FEATURES, "log_walked_flops", "log_flops_per_operation", "log_walked_bytes", "log_walked_intensity",
    "weight_traffic_share", "bytes_over_fp32", "log_walked_operations", "fused_share", *_FLOPS, *_BYTES,
    "log_saved_bytes", "saved_share",
    "log_scores", "narrow_share", "aligned_share", "log_serial_steps", *_ROOFS, "backward_flops_ratio",
    "backward_bytes_share", "ready_at_half", "log_gradient_bytes", "log_gradient_tensors",
)  # fmt: skip

#: Share of the nominal peak that products are taken to reach where operations are compared with the whole.
_EFFICIENCY = 0.7


def _log(value: float) -> float:
    return math.log(value) if value > 0 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Network:
    """Sums of a walk, and the columns that hold on every device and batch; bytes are of the walk's own policy."""

    moved: float
    fixed: float
    flops: float
    operations: float
    columns: Mapping[str, float]


@functools.lru_cache(maxsize=8192)
def _describe_network(walk: Walk) -> _Network:
    moved, flops = walk.total("bytes"), walk.total("flops")
    ahead = walk.total("flops", phase="forward")
    known = [sum(pair) for pair in zip(walk.roof_forward, walk.roof_backward, strict=True)]
    columns = {
        "log_walked_operations": _log(walk.total("ops")),
        "fused_share": walk.total("fused") / moved,
        **{
            name: walk.total("flops", phase="forward", families=(family,)) / ahead
            for name, family in zip(_FLOPS, PRODUCTS, strict=True)
        },
        **{
            name: walk.total("bytes", families=(family,)) / moved for name, family in zip(_BYTES, _TRAFFIC, strict=True)
        },
        "log_saved_bytes": _log(walk.saved),
        "saved_share": walk.saved / moved,
        "log_scores": math.log1p(walk.scores),
        "narrow_share": walk.narrow_flops_share,
        "aligned_share": walk.aligned_flops_share,
        "log_serial_steps": math.log1p(walk.serial_steps),
        **{name: _log(value / moved) for name, value in zip(_ROOFS, known, strict=True)},
        "backward_flops_ratio": (flops - ahead) / ahead,
        "backward_bytes_share": walk.total("bytes", phase="backward") / moved,
        "ready_at_half": walk.ready_at(0.5),
        "log_gradient_bytes": _log(walk.gradient_bytes),
        "log_gradient_tensors": _log(walk.gradient_tensors),
    }
    return _Network(
        moved=moved, fixed=walk.total("bytes_fixed"), flops=flops, operations=walk.total("ops"), columns=columns
    )


def describe_walk(
    walks: Mapping[str, Walk] | None, hardware: HardwareSpec, precision: Precision, *, samples: float
) -> dict[str, float]:
    """The columns ``WALK_FEATURES`` of one micro-step of ``samples`` samples; all NaN for a network never walked.

    ``log_operation_roofline_s`` is the log of the seconds that the roofline takes when it is summed over operations
    (weights' traffic with it), ``log_operations_over_whole`` the log of that over the roofline of the whole.
    """
    if walks is None:
        return dict.fromkeys(WALK_FEATURES, math.nan)
    walk, narrowed = choose_walk(walks, precision)
    peak = _EFFICIENCY * hardware.peak_flops_per_s.get(precision.compute, hardware.peak_flops_per_s["fp32"])
    bandwidth = hardware.memory_bytes_per_s
    # bytes shrink by a factor, so an operation is bound by compute from so much fewer FLOPs per byte of the walk on
    ridge = narrowed * peak / bandwidth
    waited = samples * narrowed * sum(walk.roof_at(ridge, phase=phase) for phase in PHASES)
    network = _describe_network(walk)
    moved, fixed = samples * narrowed * network.moved, narrowed * network.fixed
    flops, operations = samples * network.flops, network.operations
    roofline_s = (waited + fixed) / bandwidth
    whole_s = max(flops / peak, (moved + fixed) / bandwidth)
    fp32_bytes = _describe_network(walks["fp32"]).moved
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
        "bytes_over_fp32": narrowed * network.moved / fp32_bytes,
        **network.columns,
    }
