"""Walk: the counts of one forward and backward pass of a network, by phase, family of operation and number format."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from precision_time.storage.errors import InputError

__all__ = ["FORMATS", "OP_FAMILIES", "PHASES", "POLICIES", "READY_POINTS", "RIDGES", "OpCount", "Walk"]

PHASES = ("forward", "backward")
#: A walk follows one of these: everything in fp32, or 16-bit autocast as CUDA applies it (fp16 and bf16 cast alike).
POLICIES = ("fp32", "amp")
#: ``wide`` operations compute in fp32, ``narrow`` ones in a 16-bit format.
FORMATS = ("wide", "narrow")
#: ``convolution`` has one group; ``softmax`` includes losses, ``gather`` embeddings and indexing, ``pooling`` resizing;
#: ``copy`` moves data without arithmetic, ``cast`` changes its format.
OP_FAMILIES = (
    "dense", "convolution", "grouped", "depthwise", "attention", "recurrent", "normalization", "softmax",
    "elementwise", "reduction", "pooling", "gather", "cast", "copy",
)  # fmt: skip
#: Families of matrix products, which tensor cores compute.
PRODUCTS = ("dense", "convolution", "grouped", "depthwise", "attention", "recurrent")
#: FLOPs per byte at which a walk holds the roofline summed over operations; a V100 has 17 in fp32 and 139 in fp16.
RIDGES = (4.0, 16.0, 64.0, 256.0, 1024.0)
#: A walk holds the share of the backward work done at each sixteenth of the gradient bytes.
READY_POINTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCount:
    """Operations of one phase, family and format; a pass over B samples takes ``x * B + x_fixed``.

    FLOPs count 2 per multiply-add, of products alone. ``bytes`` are those that each operation by itself reads and
    writes (eager execution); ``fused`` are those of products and gathers alone, as if a compiler merged all other
    operations into them.
    """

    flops: float = 0.0
    flops_fixed: float = 0.0
    bytes: float = 0.0
    bytes_fixed: float = 0.0
    fused: float = 0.0
    fused_fixed: float = 0.0
    ops: float = 0.0

    def scale(self, factor: float) -> "OpCount":
        """The same operations on the same weights with ``factor`` times the work of each sample."""
        return replace(self, flops=self.flops * factor, bytes=self.bytes * factor, fused=self.fused * factor)


_QUANTITIES = tuple(item.name for item in fields(OpCount))
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One forward pass with loss and one backward pass under one policy.

    - ``counts`` by (phase, family, format); a cast counts under the format of its result.
    - ``roof_forward`` and ``roof_backward``: for each r of ``RIDGES`` (FLOPs per byte), the sum over operations of
      max(FLOPs / r, bytes) of one sample without weights: the roofline summed over operations, as bytes of traffic.
    - ``saved``: bytes kept from the forward for the backward pass.
    - ``peak``: most bytes alive at once beside parameters, buffers and the batch, gradients included. At large batches
      that is the start of the backward pass, at small ones (``peak_small``) often its end; the larger one holds.
    - ``scores``: elements of all attention score matrices of a sample, written or not.
    - ``narrow_flops_share``: of products with a dimension below 64 that does not grow with the batch;
      ``aligned_flops_share``: of products whose dimensions are all multiples of 8.
    - ``serial_steps``: products in recurrent layers that wait for the one before.
    - ``gradient_bytes``, ``gradient_tensors``: of trained parameters; a shared one counts once, a table with sparse
      gradients has no bytes.
    - ``ready``: shares of the backward work (max(FLOPs / 64, bytes) of one sample) done when 1/16, 2/16, ... of the
      gradient bytes are ready.
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
                "the walk is not usable",
                got=f"counts of {wrong[0]}"
                if wrong
                else f"{len(self.roof_forward)} and {len(self.roof_backward)} ridges",
                expected=f"keys of phase, family and format, and {len(RIDGES)} ridges",
            )
        if len(self.ready) != READY_POINTS:
            raise InputError(
                "the walk is not usable", got=f"{len(self.ready)} ready points", expected=f"{READY_POINTS} ready points"
            )

    def total(
        self,
        quantity: str,
        *,
        phase: str | None = None,
        families: Collection[str] | None = None,
        number_format: str | None = None,
    ) -> float:
        """The sum of one quantity of ``OpCount`` over a phase, families and a format; None means all."""
        return float(
            sum(
                getattr(count, quantity)
                for key, count in self.counts.items()
                if phase in (None, key[0])
                and (families is None or key[1] in families)
                and number_format in (None, key[2])
            )
        )

    def roof_at(self, ridge: float, *, phase: str) -> float:
        """The roof of one sample in bytes at ``ridge`` FLOPs per byte; linear in logs between ``RIDGES``."""
        roof = self.roof_forward if phase == "forward" else self.roof_backward
        if ridge <= RIDGES[0]:
            # bound by compute there, so in proportion to 1 / ridge
            return roof[0] * RIDGES[0] / ridge
        for index in range(1, len(RIDGES)):
            if ridge <= RIDGES[index]:
                part = math.log(ridge / RIDGES[index - 1]) / math.log(RIDGES[index] / RIDGES[index - 1])
                low, high = roof[index - 1], roof[index]
                return low * float((high / low) ** part) if low > 0 else high
        return roof[-1]

    def ready_at(self, share: float) -> float:
        """Share of the backward work done when ``share`` of the gradient bytes are ready; linear between points."""
        place = min(max(share, 0.0), 1.0) * READY_POINTS
        below = math.floor(place)
        if below == READY_POINTS:
            return self.ready[-1]
        low = self.ready[below - 1] if below else 0.0
        return low + (place - below) * (self.ready[below] - low)

    def resize(self, factor: float, *, attention_factor: float) -> "Walk":
        """The walk at an input ``factor`` times as large, where attention takes ``attention_factor`` times the FLOPs.

        Twice the tokens take twice the work of every operation and four times the FLOPs of attention. The traffic of
        attention in a fused kernel grows with the tokens alone; that of attention in plain operations, which grows
        faster, is underestimated.
        """
        counts: dict[Key, OpCount] = {}
        for key, count in self.counts.items():
            grown = count.scale(factor)
            if key[1] == "attention":
                grown = replace(grown, flops=count.flops * attention_factor)
            counts[key] = grown
        flops = self.total("flops")
        growth = sum(count.flops for count in counts.values()) / flops if flops else factor
        # the first ridge is bound by compute and grows with the FLOPs, the others with the traffic
        roofs: dict[str, Any] = {
            name: tuple(value * (growth if index == 0 else factor) for index, value in enumerate(getattr(self, name)))
            for name in ("roof_forward", "roof_backward")
        }
        return replace(
            self,
            counts=counts,
            **roofs,
            saved=self.saved * factor,
            peak=self.peak * factor,
            peak_small=self.peak_small * factor,
            scores=self.scores * attention_factor,
            serial_steps=self.serial_steps * factor,
        )

    def keep_weights(self, share: float) -> "Walk":
        """The walk with ``share`` of the fixed parts, for a rank that holds only this share of the weights."""
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
        """Every number by a name of its own, for tables and JSON; counts of zero are left out."""
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

        Raises ``InputError`` for missing and for unknown columns.
        """
        counts: dict[Key, dict[str, float]] = {}
        try:
            for name, value in columns.items():
                if name in _COUNT_COLUMNS:
                    key, quantity = _COUNT_COLUMNS[name]
                    counts.setdefault(key, {})[quantity] = float(value)
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
                "these columns are not a walk", got=repr(error), expected="the columns of Walk.to_columns"
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
