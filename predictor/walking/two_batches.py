"""Combine passes at two batch sizes into a walk: each count becomes a part per sample and a fixed part."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from precision_time.predictor.walking.operations import Operation
from precision_time.predictor.workloads.walk import PHASES, PRODUCTS, READY_POINTS, RIDGES, Key, OpCount, Walk

__all__ = ["Pass", "combine_passes"]

#: FLOPs per byte at which the backward work is weighed to tell when gradients are ready.
READY_RIDGE = 64.0
#: A dimension of a product below this does not fill the tile of a tensor core's kernel.
NARROW = 64
#: The peak of all but the smallest batches is the moment at which this many samples hold most bytes.
PEAK_BATCH = 256
#: 16-bit products whose dimensions are all multiples of this use tensor cores without padding.
ALIGNED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The operations and the memory of one pass forward and backward.

    ``living_bytes`` are those alive after each call, allocations included. ``ready`` holds, for each gradient, its
    bytes and the number of backward operations before it.
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
class _SampleWork:
    """The work of an operation for each further sample; ``dimensions`` are those that do not grow with the batch."""

    flops: float
    bytes: float
    scores: float
    is_product: bool
    dimensions: tuple[int, ...]

    def weigh(self, ridge: float) -> float:
        return max(self.flops / ridge, self.bytes)


def combine_passes(small: Pass, large: Pass) -> Walk:
    """The walk that fits two passes at two batch sizes.

    Where their operations differ, one sample stands for the operations of the large batch divided by its samples.
    """
    step = large.samples - small.samples
    counts: dict[Key, OpCount] = {
        (phase, *key): count
        for phase in PHASES
        for key, count in _count(getattr(small, phase), getattr(large, phase), small.samples, step).items()
    }
    if small.matches(large):
        forward = _added_work(small.forward, large.forward, step)
        backward = _added_work(small.backward, large.backward, step)
    else:
        forward, backward = (_mean_work(operations, large.samples) for operations in (large.forward, large.backward))
    saved, saved_fixed = _line(small.saved_bytes, large.saved_bytes, small.samples, step)
    peaks = [_peak_line(small, large, batch=batch) for batch in (PEAK_BATCH, 1)]
    products = [work for work in (*forward, *backward) if work.is_product and work.flops > 0]
    flops = sum(work.flops for work in products)
    narrow = sum(work.flops for work in products if min(work.dimensions, default=NARROW) < NARROW)
    aligned = sum(work.flops for work in products if not any(size % ALIGNED for size in work.dimensions))
    return Walk(
        counts=counts,
        roof_forward=tuple(sum(work.weigh(ridge) for work in forward) for ridge in RIDGES),
        roof_backward=tuple(sum(work.weigh(ridge) for work in backward) for ridge in RIDGES),
        saved=saved,
        saved_fixed=saved_fixed,
        peak=peaks[0][0],
        peak_fixed=peaks[0][1],
        peak_small=peaks[1][0],
        peak_small_fixed=peaks[1][1],
        scores=sum(work.scores for work in forward),
        narrow_flops_share=narrow / flops if flops else 0.0,
        aligned_flops_share=aligned / flops if flops else 0.0,
        serial_steps=sum(operation.serial_steps for operation in large.forward),
        gradient_bytes=float(sum(size for size, _ in large.ready)),
        gradient_tensors=float(len(large.ready)),
        ready=_ready_points([work.weigh(READY_RIDGE) for work in backward], large.ready),
    )


def _names(operations: Iterable[Operation]) -> list[str]:
    return [operation.name for operation in operations]


def _line(small: float, large: float, samples: int, step: int) -> tuple[float, float]:
    """(slope, intercept) through the values at ``samples`` and ``samples + step``."""
    slope = (large - small) / step
    return slope, max(0.0, small - slope * samples)


def _peak_line(small: Pass, large: Pass, *, batch: int) -> tuple[float, float]:
    """The line of the moment at which ``batch`` samples hold most bytes: it comes sooner in larger batches."""
    low, high = small.living_bytes, large.living_bytes
    if len(low) != len(high):
        low, high = [max(low)], [max(high)]
    step = large.samples - small.samples
    lines = [_line(*sizes, small.samples, step) for sizes in zip(low, high, strict=True)]
    return max(lines, key=lambda line: line[0] * batch + line[1])


def _count(small: list[Operation], large: list[Operation], samples: int, step: int) -> dict[tuple[str, str], OpCount]:
    sums = [_sum(operations) for operations in (small, large)]
    counts = {}
    for key in sorted({*sums[0], *sums[1]}):
        low, high = (by_key.get(key, (0.0, 0.0, 0.0, 0)) for by_key in sums)
        flops, moved, fused = (_line(low[place], high[place], samples, step) for place in range(3))
        counts[key] = OpCount(
            flops=flops[0], flops_fixed=flops[1], bytes=moved[0], bytes_fixed=moved[1], fused=fused[0],
            fused_fixed=fused[1], ops=float(high[3]),
        )  # fmt: skip
    return counts


def _sum(operations: list[Operation]) -> dict[tuple[str, str], list[float]]:
    """FLOPs, bytes, fused bytes and number of operations, by family and number format."""
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0])
    for operation in operations:
        total = sums[operation.family, "narrow" if operation.narrow else "wide"]
        total[0] += operation.flops
        total[1] += operation.bytes
        total[2] += operation.fused
        total[3] += 1
    return sums


def _added_work(small: list[Operation], large: list[Operation], step: int) -> list[_SampleWork]:
    return [
        _SampleWork(
            max(0.0, (high.flops - low.flops) / step),
            max(0.0, (high.bytes - low.bytes) / step),
            (high.scores - low.scores) / step,
            high.family in PRODUCTS,
            tuple(size for size, other in zip(high.dimensions, low.dimensions, strict=False) if size == other),
        )
        for low, high in zip(small, large, strict=True)
    ]


def _mean_work(operations: list[Operation], samples: int) -> list[_SampleWork]:
    return [
        _SampleWork(
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
    for size, before in sorted(ready, key=lambda gradient: gradient[1]):
        done_work += sum(work[place:before])
        place, done_bytes = before, done_bytes + size
        while len(points) < READY_POINTS and done_bytes * READY_POINTS >= (len(points) + 1) * total_bytes:
            points.append(min(1.0, done_work / total_work))
    return tuple(points)
