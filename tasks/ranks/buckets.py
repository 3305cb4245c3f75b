"""DDP's gradient buckets: the communication hook that logs (and compresses) them, and the same ones sent alone."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from precision_time.tasks.ranks.clocks import Clock

__all__ = ["WIRE_TYPES", "Flight", "FlightLog", "find_averaged", "log_bucket", "send_alone"]

#: Formats of compressed gradients.
WIRE_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: Timed all-reduces of the buckets alone, after one that is thrown away.
ISOLATED_REPEATS = 5

#: Exact in every format, while the sum of two overflows in fp16.
LARGE = 2.0**15


@dataclass(slots=True)
class Flight:
    """One bucket on its way: its size on the wire and the marks at its all-reduce's start and end."""

    bucket_bytes: int
    start: Any
    end: Any = None


@dataclass(slots=True)
class FlightLog:
    """The state of the communication hook: the buckets of the step under way.

    ``wire_dtype`` is the format that gradients are compressed to, None for none; ``averaged`` are the formats in which
    the backend's all-reduce averages (see ``find_averaged``). ``sent_dtype`` is the format of the last bucket sent, and
    ``op`` how it was reduced.
    """

    clock: Clock
    world_size: int
    wire_dtype: torch.dtype | None = None
    averaged: frozenset[torch.dtype] = frozenset()
    sent_dtype: torch.dtype = torch.float32
    op: Any = dist.ReduceOp.SUM
    flights: list[Flight] = field(default_factory=list)

    def take(self) -> list[Flight]:
        """The flights since the last call."""
        taken, self.flights = self.flights, []
        return taken


def find_averaged(dtypes: Iterable[torch.dtype], *, device: torch.device) -> frozenset[torch.dtype]:
    """Those of ``dtypes`` in which the backend's all-reduce averages as DDP does. Called by all ranks together.

    DDP divides each gradient by the world size before the sum, while it copies it into its bucket. An all-reduce that
    averages saves a hook its own pass for that. But gloo divides after the sum, which in fp16 overflows where DDP does
    not, so fp16 is not among the result there.
    """
    averaged = set()
    for dtype in sorted(set(dtypes), key=str):
        values = torch.full((8,), LARGE, dtype=dtype, device=device)
        try:
            dist.all_reduce(values, op=dist.ReduceOp.AVG)
        except (RuntimeError, ValueError, TypeError):
            continue
        if bool((values == LARGE).all()):
            averaged.add(dtype)
    return frozenset(averaged)


def log_bucket(state: FlightLog, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """DDP communication hook: average the bucket over the ranks as DDP would, and note when it left and landed.

    With ``wire_dtype`` the bucket is cast before it is sent and cast back after it has landed, as in torch's own
    ``fp16_compress_hook``; the casts belong to the backward pass, not to the flight. Without it, in a format of
    ``averaged``, the all-reduce itself averages, so that this hook has no pass over the bucket that DDP has not.
    """
    whole = bucket.buffer()
    sent = whole if state.wire_dtype is None else whole.to(state.wire_dtype)
    averages = state.wire_dtype is None and sent.dtype in state.averaged
    if not averages:
        sent.div_(state.world_size)
    state.sent_dtype, state.op = sent.dtype, dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    flight = Flight(bucket_bytes=sent.numel() * sent.element_size(), start=state.clock.mark())
    state.flights.append(flight)

    def land(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        # On CUDA this runs at once, on a stream that waits for the collective, so the mark is at the right place.
        flight.end = state.clock.mark()
        landed = future.value()[0]
        return landed if landed.dtype == whole.dtype else whole.copy_(landed)

    work: torch.futures.Future[list[torch.Tensor]] = dist.all_reduce(sent, op=state.op, async_op=True).get_future()
    return work.then(land)


def send_alone(
    bucket_bytes: tuple[int, ...], *, dtype: torch.dtype, op: Any, device: torch.device, clock: Clock
) -> float | None:
    """Seconds of an all-reduce of buckets of these sizes (bytes on the wire) with nothing beside it.

    All are launched at once, as at the end of a backward pass, and reduced by ``op``; the median of
    ``ISOLATED_REPEATS``. None without buckets, and on every rank when one of them lacks the memory for a second set.
    Called by all ranks together.
    """
    if not bucket_bytes:
        return None
    buckets: list[torch.Tensor] = []
    try:
        width = torch.empty((), dtype=dtype).element_size()
        buckets = [torch.zeros(size // width, dtype=dtype, device=device) for size in bucket_bytes]
    except (RuntimeError, MemoryError):
        buckets = []
    enough = torch.tensor([int(bool(buckets))], device=device)
    dist.all_reduce(enough, op=dist.ReduceOp.MIN)
    if not enough.item():
        return None
    times = []
    for _ in range(ISOLATED_REPEATS + 1):
        dist.barrier()
        start = clock.mark()
        works = [dist.all_reduce(bucket, op=op, async_op=True) for bucket in buckets]
        for work in works:
            work.wait()
        end = clock.mark()
        clock.settle()
        times.append(clock.seconds(start, end))
        clock.reuse()
    return statistics.median(times[1:])
