"""TimeEstimate: the answer of ``predict_time``, with its parts, its interval and its reasons."""

import html
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["TimeEstimate", "format_duration"]


def format_duration(seconds: float) -> str:
    """Seconds in readable units: ``840 us``, ``12.3 ms``, ``4.56 s``, ``7 d 0 h 53 m 20 s``."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.995:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    parts = [(days, "d"), (hours, "h"), (minutes, "m"), (rest, "s")]
    first = next(number for number, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first:])


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TimeEstimate:
    """How long one training iteration takes, and a whole job.

    All times are seconds. ``low_s`` and ``high_s`` bound the iteration time at ``level``; the optimizer's time is
    part of ``compute_time_s``, and ``iteration_time_s`` is compute plus exposed communication. ``regime`` says how
    far the question is from the training data. ``reasons`` say what was assumed and why the answer is what it is.
    ``artifact_id`` names the artifact that answered, None for the closed forms alone. Totals are None unless ``steps``,
    or ``epochs`` and ``dataset_size``, were given.

    Example:
        >>> from precision_time import predict_time
        >>> estimate = predict_time("resnet50", "tf32", batch_size=64, gpu="A100-SXM4-80GB", steps=1000)
        >>> estimate.total_time_s == 1000 * estimate.iteration_time_s
        True
        >>> sorted(estimate.to_dict())[:3]
        ['artifact_id', 'communication_time_s', 'compute_time_s']
    """

    iteration_time_s: float
    low_s: float
    high_s: float
    level: float
    compute_time_s: float
    communication_time_s: float
    exposed_communication_s: float
    optimizer_time_s: float
    samples_per_s: float
    global_batch_size: int
    world_size: int
    model: str
    requested_precision: str
    effective_precision: str
    gpu: str
    regime: str
    reasons: tuple[str, ...]
    artifact_id: str | None
    #: bytes that the fullest rank needs, and whether its device has them
    memory_bytes: float | None = None
    memory_fits: bool | None = None
    #: the most samples that fit one GPU in a micro-step; None where not even one fits
    largest_batch: int | None = None
    steps: int | None = None
    epochs: float | None = None
    total_time_s: float | None = None
    total_low_s: float | None = None
    total_high_s: float | None = None
    epoch_time_s: float | None = None
    #: ``closed_form_s`` by part and learned ``factors``, with ``explain=True``
    explanation: dict[str, dict[str, float]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Every field as a plain value for JSON."""
        return asdict(self) | {"reasons": list(self.reasons)}

    def _lines(self) -> list[tuple[str, str]]:
        """Label and text of each printed line."""

        def spread(value: float, low: float, high: float) -> str:
            between = f"{format_duration(low)} .. {format_duration(high)}"
            return f"{format_duration(value)}  ({between} at {self.level:.0%})"

        precision = self.requested_precision
        if self.effective_precision != self.requested_precision:
            precision += f", run as {self.effective_precision}"
        lines = [
            (
                "job",
                f"{self.model}, {precision}, {self.world_size} x {self.gpu}, global batch {self.global_batch_size}",
            ),
            ("iteration", spread(self.iteration_time_s, self.low_s, self.high_s)),
            (
                "compute",
                f"{format_duration(self.compute_time_s)}, of which optimizer {format_duration(self.optimizer_time_s)}",
            ),
            (
                "communication",
                f"{format_duration(self.communication_time_s)}, of which exposed "
                f"{format_duration(self.exposed_communication_s)}",
            ),
            (
                "throughput",
                f"{self.samples_per_s:,.0f} samples/s"
                if self.samples_per_s >= 100
                else f"{self.samples_per_s:.3g} samples/s",
            ),
        ]
        if self.total_time_s is not None and self.total_low_s is not None and self.total_high_s is not None:
            lines.append(
                ("total", f"{spread(self.total_time_s, self.total_low_s, self.total_high_s)}, {self.steps:,} steps")
            )
        if self.epoch_time_s is not None:
            lines.append(("epoch", format_duration(self.epoch_time_s)))
        if self.memory_bytes is not None:
            most = f"at most {self.largest_batch:,} samples a micro-step" if self.largest_batch else "no batch fits"
            lines.append(("memory", f"{self.memory_bytes / 1e9:.3g} GB a GPU, {most}"))
        lines.append(("regime", self.regime))
        lines.append(("answered by", self.artifact_id or "the closed forms"))
        lines += [("because" if number == 0 else "", reason) for number, reason in enumerate(self.reasons)]
        if self.explanation is not None:
            parts = self.explanation["closed_form_s"].items()
            lines.append(("closed form", ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts)))
            factors = self.explanation["factors"].items()
            if factors:
                lines.append(("learned", ", ".join(f"{name} x{factor:.2f}" for name, factor in factors)))
        return lines

    def __repr__(self) -> str:
        return "\n".join(["TimeEstimate", *(f"  {label:<14}{text}" for label, text in self._lines())])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(label)}</th>"
            f"<td style='text-align:left'>{html.escape(text)}</td></tr>"
            for label, text in self._lines()
        )
        return f"<table>{rows}</table>"
