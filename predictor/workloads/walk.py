"""Walk: what one forward and backward pass of a network does, by phase, family of operation and number format."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from precision_time.storage.errors import InputError

__all__ = ["FORMATS", "OP_FAMILIES", "PHASES", "POLICIES", "READY_POINTS", "RIDGES", "OpCount", "Walk"]

PHASES = ("forward", "backward")
#: What a walk follows: everything in fp32, or 16-bit autocast as CUDA applies it (fp16 and bf16 cast alike).
POLICIES = ("fp32", "amp")
#: ``wide`` operations compute in fp32, ``narrow`` ones in a 16-bit format.
FORMATS = ("wide", "narrow")
#: ``convolution`` has one group; ``softmax`` includes losses; ``gather`` embeddings and indexing; ``pooling`` resizing;
#: ``copy`` moves without arithmetic or a change of format, ``cast`` with one.
OP_FAMILIES = (
    "dense", "convolution", "grouped", "depthwise", "attention", "recurrent", "normalization", "softmax",
    "elementwise", "reduction", "pooling", "gather", "cast", "copy",
)  # fmt: skip
#: Families of matrix products: what a tensor core computes.
PRODUCTS = ("dense", "convolution", "grouped", "depthwise", "attention", "recurrent")
#: FLOPs per byte at which a walk knows its traffic operation by operation; V100 stands at 17 (fp32) and 139 (fp16).
RIDGES = (4.0, 16.0, 64.0, 256.0, 1024.0)
#: Sixteenths of the gradient bytes at which a walk knows how much of the backward work is done.
READY_POINTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCount:
    """Operations of one phase, family and format; a pass over B samples does ``x * B + x_fixed``.

    FLOPs count 2 per multiply-add, of products alone. ``bytes`` are what each operation by itself reads and writes
    (eager execution); ``fused`` those of products and gathers alone, as if a compiler merged all the rest into them.
    """

    flops: float = 0.0
    flops_fixed: float = 0.0
    bytes: float = 0.0
    bytes_fixed: float = 0.0
    fused: float = 0.0
    fused_fixed: float = 0.0
    ops: float = 0.0

    def scale(self, factor: float) -> "OpCount":
        """``factor`` times the work of each sample by the same operations on the same weights."""
        return replace(self, flops=self.flops * factor, bytes=self.bytes * factor, fused=self.fused * factor)


_QUANTITIES = tuple(item.name for item in fields(OpCount))
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One forward pass with loss and one backward pass under one policy.

    ``counts`` by (phase, family, format), a cast by the format it gives. ``roof_forward`` and ``roof_backward`` hold,
    for each of ``RIDGES`` r (FLOPs per byte), the sum over operations of max(FLOPs / r, bytes) of one sample, weights
    not counted: the roofline summed over operations, as traffic. ``saved`` bytes are kept from the forward for the
    backward pass; ``peak`` is the most that lives at once beside parameters, buffers and the batch, gradients
    included: at large batches as the backward pass starts, at small ones (``peak_small``) often as it ends; see
    ``peak_at``. ``scores`` are the elements of all attention score matrices of a sample, written or not.
    ``narrow_flops_share`` is of products with a dimension below 64 beside those that grow with the batch,
    ``aligned_flops_share`` of those whose dimensions are all multiples of 8. ``serial_steps`` counts the products that
    wait for the one before in recurrent layers. ``gradient_bytes`` and ``ready`` are of trained parameters, a shared
    one counted once and a table of sparse gradients as nothing: ``ready`` holds the shares of the backward work
    (max(FLOPs / 64, bytes) of one sample) done when 1/16, 2/16, ... of the gradient bytes are ready.
    """

    counts: Mapping[Key, OpCount] = field(hash=False)
    roof_forward: tuple[float, ...]
    roof_backward: tuple[float, ...]
    saved: float
    saved_fixed: float
    peak: float
    peak_fixed: float
    scores: float
    narrow_flops_share: float
    aligned_flops_share: float
    serial_steps: float
    gradient_bytes: float
    gradient_tensors: float
    ready: tuple[float, ...]
    peak_small: float = 0.0
    peak_small_fixed: float = 0.0

    def __post_init__(self) -> None:
        wrong = [key for key in self.counts if not _is_key(key)]
        if wrong or not len(self.roof_forward) == len(self.roof_backward) == len(RIDGES):
            raise InputError(
                "a walk is not usable",
                got=f"counts of {wrong[0]}"
                if wrong
                else f"{len(self.roof_forward)} and {len(self.roof_backward)} ridges",
                expected=f"keys of phase, family and format, and {len(RIDGES)} ridges",
            )
        if len(self.ready) != READY_POINTS:
            raise InputError(
                "a walk is not usable", got=f"{len(self.ready)} ready points", expected=f"{READY_POINTS} of them"
            )

    def total(
        self,
        quantity: str,
        *,
        phase: str | None = None,
        families: Iterable[str] | None = None,
        number_format: str | None = None,
    ) -> float:
        """The sum of one quantity of ``OpCount`` over what is asked for; None asks for all."""
        chosen = None if families is None else frozenset(families)
        return float(
            sum(
                getattr(count, quantity)
                for (its_phase, family, its_format), count in self.counts.items()
                if (phase is None or its_phase == phase)
                and (chosen is None or family in chosen)
                and (number_format is None or its_format == number_format)
            )
        )

    def roof_at(self, ridge: float, *, phase: str) -> float:
        """Bytes moved, or waited for, by one sample at ``ridge`` FLOPs per byte; linear in logs between known ones."""
        known = self.roof_forward if phase == "forward" else self.roof_backward
        if ridge <= RIDGES[0]:
            # bound by compute there, so in proportion to 1 / ridge
            return known[0] * RIDGES[0] / ridge
        for index in range(1, len(RIDGES)):
            if ridge <= RIDGES[index]:
                part = math.log(ridge / RIDGES[index - 1]) / math.log(RIDGES[index] / RIDGES[index - 1])
                low, high = known[index - 1], known[index]
                return low * float((high / low) ** part) if low > 0 else high
        return known[-1]

    def ready_at(self, share: float) -> float:
        """Share of the backward work done when ``share`` of the gradient bytes are ready; linear between points."""
        place = min(max(share, 0.0), 1.0) * READY_POINTS
        below = math.floor(place)
        if below == READY_POINTS:
            return self.ready[-1]
        low = self.ready[below - 1] if below else 0.0
        return low + (place - below) * (self.ready[below] - low)

    def resize(self, factor: float, *, attention_factor: float) -> "Walk":
        """The walk of ``factor`` times as large an input, on which attention takes ``attention_factor`` times as much.

        Twice the tokens take twice the work of every operation and four times that of attention scores, whose traffic
        in a fused kernel grows by the tokens alone (that of attention in plain operations is underestimated).
        """
        counts: dict[Key, OpCount] = {}
        for key, count in self.counts.items():
            grown = count.scale(factor)
            if key[1] == "attention":
                grown = replace(grown, flops=count.flops * attention_factor)
            counts[key] = grown
        flops = self.total("flops")
        growth = sum(count.flops for count in counts.values()) / flops if flops else factor
        # products bound by compute grow with the FLOPs, the rest with the traffic
        curves: dict[str, Any] = {
            name: tuple(value * (growth if index == 0 else factor) for index, value in enumerate(getattr(self, name)))
            for name in ("roof_forward", "roof_backward")
        }
        return replace(
            self,
            counts=counts,
            **curves,
            saved=self.saved * factor,
            peak=self.peak * factor,
            peak_small=self.peak_small * factor,
            scores=self.scores * attention_factor,
            serial_steps=self.serial_steps * factor,
        )

    def keep_weights(self, share: float) -> "Walk":
        """The walk with ``share`` of what no sample adds to: where the other weights lie elsewhere."""
        counts = {
            key: replace(
                count,
                bytes_fixed=count.bytes_fixed * share,
                fused_fixed=count.fused_fixed * share,
                flops_fixed=count.flops_fixed * share,
            )
            for key, count in self.counts.items()
        }
        fixed = {name: getattr(self, name) * share for name in ("saved_fixed", "peak_fixed", "peak_small_fixed")}
        return replace(self, counts=counts, gradient_bytes=self.gradient_bytes * share, **fixed)

    def to_columns(self) -> dict[str, float]:
        """Every number under a name of its own, zeros of ``counts`` left out; flat, for tables and JSON."""
        columns: dict[str, float] = {}
        for (phase, family, number_format), count in self.counts.items():
            for quantity in _QUANTITIES:
                if value := getattr(count, quantity):
                    columns[f"{phase}_{family}_{number_format}_{quantity}"] = value
        for name in ("roof_forward", "roof_backward"):
            columns |= {f"{name}_{ridge:.0f}": value for ridge, value in zip(RIDGES, getattr(self, name), strict=True)}
        columns |= {name: getattr(self, name) for name in _NUMBERS}
        columns |= {f"ready_{point}": value for point, value in enumerate(self.ready, start=1)}
        return columns

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> "Walk":
        """The inverse of ``to_columns``; absent counts are zero.

        Raises ``InputError`` for what is missing or unknown.
        """
        counts: dict[Key, dict[str, float]] = {}
        try:
            for name, value in columns.items():
                place = _COUNT_COLUMNS.get(name)
                if place is not None:
                    counts.setdefault(place[0], {})[place[1]] = float(value)
                elif name not in _OTHER_COLUMNS:
                    raise KeyError(name)
            return cls(
                counts={key: OpCount(**values) for key, values in counts.items()},
                roof_forward=tuple(float(columns[f"roof_forward_{ridge:.0f}"]) for ridge in RIDGES),
                roof_backward=tuple(float(columns[f"roof_backward_{ridge:.0f}"]) for ridge in RIDGES),
                ready=tuple(float(columns[f"ready_{point}"]) for point in range(1, READY_POINTS + 1)),
                **{name: float(columns[name]) for name in _NUMBERS},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                "a walk does not fit", got=repr(error), expected="the columns of Walk.to_columns"
            ) from error


_NUMBERS = (
    "saved", "saved_fixed", "peak", "peak_fixed", "scores", "narrow_flops_share", "aligned_flops_share",
    "serial_steps", "gradient_bytes", "gradient_tensors", "peak_small", "peak_small_fixed",
)  # fmt: skip
_COUNT_COLUMNS: dict[str, tuple[Key, str]] = {
    f"{phase}_{family}_{number_format}_{quantity}": ((phase, family, number_format), quantity)
    for phase in PHASES
    for family in OP_FAMILIES
    for number_format in FORMATS
    for quantity in _QUANTITIES
}
_OTHER_COLUMNS = frozenset(
    [*_NUMBERS]
    + [f"roof_{phase}_{ridge:.0f}" for phase in PHASES for ridge in RIDGES]
    + [f"ready_{point}" for point in range(1, READY_POINTS + 1)]
)


def _is_key(key: Key) -> bool:
    return len(key) == 3 and key[0] in PHASES and key[1] in OP_FAMILIES and key[2] in FORMATS
