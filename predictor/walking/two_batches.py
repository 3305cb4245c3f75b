"""Draw the lines of a walk: from what a network did at two batch sizes to a part per sample and a fixed one."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from precision_time.predictor.walking.operations import Operation
from precision_time.predictor.workloads.walk import PRODUCTS, READY_POINTS, RIDGES, OpCount, Walk

__all__ = ["Pass", "combine_passes"]

#: FLOPs per byte at which backward work is compared when gradients become ready.
READY_RIDGE = 64.0
#: Below it a dimension of a product does not fill the tile of a tensor core's kernel.
NARROW = 64
#: Of two moments, the one that holds more at this many samples is taken for the peak of all but the smallest batches.
PEAK_BATCH = 256
#: All dimensions in multiples of it let 16-bit products use tensor cores without padding.
ALIGNED = 8

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What one pass forward and backward did.

    ``living_bytes`` after each call, allocations too; ``ready`` = (bytes of a gradient, backward operations before it).
    """

    samples: int
    forward: list[Operation]
    backward: list[Operation]
    saved_bytes: int
    living_bytes: list[int]
    ready: list[tuple[int, int]]

    def matches(self, other: "Pass") -> bool:
        """Whether both did the same operations in the same order."""
        return _names(self.forward) == _names(other.forward) and _names(self.backward) == _names(other.backward)


@dataclass(frozen=True, slots=True)
class _Slope:
    """What an operation does for one sample more; ``dimensions`` are those that do not grow with the batch."""

    flops: float
    bytes: float
    scores: float
    is_product: bool
    dimensions: tuple[int, ...]

    def weigh(self, ridge: float) -> float:
        return max(self.flops / ridge, self.bytes)


def combine_passes(small: Pass, large: Pass) -> Walk:
    """The walk through two passes at two batch sizes.

    Where their operations differ, those of the large batch divided by it stand for one sample.
    """
    step = large.samples - small.samples
    counts = {
        ("forward", family, number_format): count
        for (family, number_format), count in _count(small.forward, large.forward, small.samples, step).items()
    } | {
        ("backward", family, number_format): count
        for (family, number_format), count in _count(small.backward, large.backward, small.samples, step).items()
    }
    if small.matches(large):
        forward, backward = _slopes(small.forward, large.forward, step), _slopes(small.backward, large.backward, step)
    else:
        forward, backward = _shares(large.forward, large.samples), _shares(large.backward, large.samples)
    saved, saved_fixed = _line(small.saved_bytes, large.saved_bytes, small.samples, step)
    peaks = [_peak_line(small, large, batch=batch) for batch in (PEAK_BATCH, 1)]
    products = [slope for slope in (*forward, *backward) if slope.is_product and slope.flops > 0]
    flops = sum(slope.flops for slope in products)
    narrow = sum(slope.flops for slope in products if min(slope.dimensions, default=NARROW) < NARROW)
    aligned = sum(slope.flops for slope in products if not any(size % ALIGNED for size in slope.dimensions))
    return Walk(
        counts=counts,
        roof_forward=tuple(sum(slope.weigh(ridge) for slope in forward) for ridge in RIDGES),
        roof_backward=tuple(sum(slope.weigh(ridge) for slope in backward) for ridge in RIDGES),
        saved=saved,
        saved_fixed=saved_fixed,
        peak=peaks[0][0],
        peak_fixed=peaks[0][1],
        peak_small=peaks[1][0],
        peak_small_fixed=peaks[1][1],
        scores=sum(slope.scores for slope in forward),
        narrow_flops_share=narrow / flops if flops else 0.0,
        aligned_flops_share=aligned / flops if flops else 0.0,
        serial_steps=sum(operation.serial_steps for operation in large.forward),
        gradient_bytes=float(sum(size for size, _ in large.ready)),
        gradient_tensors=float(len(large.ready)),
        ready=_ready_points([slope.weigh(READY_RIDGE) for slope in backward], large.ready),
    )


def _names(operations: Iterable[Operation]) -> list[str]:
    return [operation.name for operation in operations]


def _line(small: float, large: float, samples: int, step: int) -> tuple[float, float]:
    """(slope, intercept) through the values at ``samples`` and ``samples + step``."""
    slope = (large - small) / step
    return slope, max(0.0, small - slope * samples)


def _peak_line(small: Pass, large: Pass, *, batch: int) -> tuple[float, float]:
    """The line of the moment at which most bytes live for ``batch`` samples: it comes sooner in larger batches."""
    low, high = small.living_bytes, large.living_bytes
    if len(low) != len(high):
        low, high = [max(low)], [max(high)]
    step = large.samples - small.samples
    lines = [_line(one, other, small.samples, step) for one, other in zip(low, high, strict=True)]
    return max(lines, key=lambda line: line[0] * batch + line[1])


def _count(small: list[Operation], large: list[Operation], samples: int, step: int) -> dict[tuple[str, str], OpCount]:
    sums = [_sum(operations) for operations in (small, large)]
    counts = {}
    for key in sorted({*sums[0], *sums[1]}):
        low, high = (one.get(key, (0.0, 0.0, 0.0, 0)) for one in sums)
        flops, moved, fused = (_line(low[place], high[place], samples, step) for place in range(3))
        counts[key] = OpCount(
            flops=flops[0],
            flops_fixed=flops[1],
            bytes=moved[0],
            bytes_fixed=moved[1],
            fused=fused[0],
            fused_fixed=fused[1],
            ops=float(high[3]),
        )
    return counts


def _sum(operations: list[Operation]) -> dict[tuple[str, str], list[float]]:
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0])
    for operation in operations:
        one = sums[operation.family, "narrow" if operation.narrow else "wide"]
        one[0] += operation.flops
        one[1] += operation.bytes
        one[2] += operation.fused
        one[3] += 1
    return sums


def _slopes(small: list[Operation], large: list[Operation], step: int) -> list[_Slope]:
    return [
        _Slope(
            max(0.0, (high.flops - low.flops) / step),
            max(0.0, (high.bytes - low.bytes) / step),
            (high.scores - low.scores) / step,
            high.family in PRODUCTS,
            high.dimensions
            if low.dimensions == high.dimensions
            else tuple(one for one, other in zip(high.dimensions, low.dimensions, strict=False) if one == other),
        )
        for low, high in zip(small, large, strict=True)
    ]


def _shares(operations: list[Operation], samples: int) -> list[_Slope]:
    return [
        _Slope(
            operation.flops / samples,
            operation.bytes / samples,
            operation.scores / samples,
            operation.family in PRODUCTS,
            operation.dimensions,
        )
        for operation in operations
    ]


def _ready_points(work: list[float], ready: list[tuple[int, int]]) -> tuple[float, ...]:
    """Shares of ``work`` done at each sixteenth of the gradient bytes."""
    total_work, total_bytes = sum(work), sum(size for size, _ in ready)
    if not total_work or not total_bytes:
        return tuple(point / READY_POINTS for point in range(1, READY_POINTS + 1))
    points: list[float] = []
    done_work, done_bytes, place = 0.0, 0, 0
    for size, before in sorted(ready, key=lambda one: one[1]):
        done_work += sum(work[place:before])
        place, done_bytes = before, done_bytes + size
        while len(points) < READY_POINTS and done_bytes * READY_POINTS >= (len(points) + 1) * total_bytes:
            points.append(min(1.0, done_work / total_work))
    return tuple(points)
