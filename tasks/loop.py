"""The timed loop of one rank: warm up until steady, then pair blocks of steps with and without synchronisation."""

import contextlib
import itertools
import math
import resource
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from precision_time.tasks.job import MeasurementLimits
from precision_time.tasks.policies import AppliedPrecision
from precision_time.tasks.steady import is_steady, least_warmup, pair_size, union_length, warmup_size
from precision_time.tasks.workloads import Workload

__all__ = ["LoopResult", "StepTimes", "TimedLoop"]

#: Relative change between two halves of a window that counts as none; a CPU shares its caches and cores with others.
STEADY_TOLERANCE = {"cuda": 0.02, "cpu": 0.05}

#: Warm-ups begun anew because buckets changed while measuring; more means that the module changes by itself.
MAX_RESTARTS = 3


class Clock(Protocol):
    """Marks points in the work of the device; they can be read after ``settle``."""

    def mark(self) -> Any: ...
    def settle(self) -> None: ...
    def seconds(self, start: Any, end: Any) -> float: ...
    def reuse(self) -> None: ...


class HostClock:
    """A CPU works when the host does: marks are readings of ``perf_counter``."""

    def mark(self) -> float:
        return time.perf_counter()

    def settle(self) -> None:
        return

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def reuse(self) -> None:
        return


class DeviceClock:
    """CUDA events on the current stream, made once and used in every block, so that no step waits for the device."""

    def __init__(self, count: int = 256) -> None:
        self._free = [_new_event() for _ in range(count)]
        self._used: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else _new_event()
        event.record()
        self._used.append(event)
        return event

    def settle(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def reuse(self) -> None:
        self._free += self._used
        self._used = []


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class Flight:
    """One bucket on its way: its size and the marks at its all-reduce's start and end."""

    bucket_bytes: int
    start: Any
    end: Any = None


@dataclass(slots=True)
class FlightLog:
    """The state of the communication hook: the buckets of the step under way."""

    clock: Clock
    world_size: int
    flights: list[Flight] = field(default_factory=list)

    def take(self) -> list[Flight]:
        """The flights since the last call."""
        taken, self.flights = self.flights, []
        return taken


def log_bucket(state: FlightLog, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """DDP communication hook: average the bucket over the ranks as DDP would, and note when it left and landed."""
    buffer = bucket.buffer().div_(state.world_size)
    flight = Flight(bucket_bytes=buffer.numel() * buffer.element_size(), start=state.clock.mark())
    state.flights.append(flight)

    def land(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        # On CUDA this runs at once, on a stream that waits for the collective: the mark is in the right place there.
        flight.end = state.clock.mark()
        return future.value()[0]

    work: torch.futures.Future[list[torch.Tensor]] = dist.all_reduce(buffer, async_op=True).get_future()
    return work.then(land)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One iteration: seconds of its parts, what was sent, and what the loss scaler did."""

    iteration_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    communication_s: float
    buckets: tuple[int, ...]
    loss_scale: float | None
    step_skipped: bool
    recorded_at: float
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """Warm-up steps, measured steps, and for each measured step its partner without synchronisation.

    With one rank nothing is synchronised: ``local`` holds the measured steps themselves.
    """

    warmup: list[StepTimes]
    synced: list[StepTimes]
    local: list[StepTimes]
    steady: bool


@dataclass(slots=True)
class _Marks:
    """What a step leaves behind until its block has settled: begin, gradients cleared, (forward, backward)*, end."""

    points: list[Any]
    flights: list[Flight]
    loss_scale: float | None
    step_skipped: bool
    recorded_at: float


class TimedLoop:
    """Trains ``workload`` on one batch that stays on the device, and times every step."""

    def __init__(
        self,
        workload: Workload,
        policy: AppliedPrecision,
        *,
        device: torch.device,
        world_size: int,
        batch_size: int,
        accumulation_steps: int,
        limits: MeasurementLimits,
    ) -> None:
        self.workload, self.policy, self.device = workload, policy, device
        self.world_size, self.accumulation_steps, self.limits = world_size, accumulation_steps, limits
        self.clock: Clock = DeviceClock() if device.type == "cuda" else HostClock()
        self.log = FlightLog(self.clock, world_size)
        self.module: nn.Module = workload.module.train()
        if world_size > 1:
            devices = [device] if device.type == "cuda" else None
            parallel = DistributedDataParallel(self.module, device_ids=devices)
            parallel.register_comm_hook(self.log, log_bucket)
            self.module = parallel
        self.optimizer = workload.make_optimizer(self.module.parameters())
        # Followed here: asking the scaler would make every step wait for the device.
        self._loss_scale = None if policy.scaler is None else policy.scaler.get_scale()
        self._optimizer_steps = 0
        self.optimizer.register_step_post_hook(self._count_optimizer_step)
        self.batch = policy.cast_batch(workload.make_batch(batch_size, device))

    def _count_optimizer_step(self, *_: Any) -> None:
        self._optimizer_steps += 1

    def run(self) -> LoopResult:
        """Warm up and measure. Every decision is rank 0's, and told to the others between two blocks."""
        began = time.perf_counter()
        cap = self.limits.seconds_per_cell
        warmup: list[StepTimes] = []
        for _ in range(MAX_RESTARTS + 1):
            fresh = self._warm_up(began)
            warmup += fresh
            tolerance = STEADY_TOLERANCE[self.device.type]
            steady = bool(self._agree(is_steady([step.iteration_s for step in fresh], tolerance=tolerance)))
            step_s = statistics.median(step.iteration_s for step in fresh[-5:])
            synced: list[StepTimes] = []
            local: list[StepTimes] = []
            while True:
                size = pair_size(
                    len(synced),
                    wanted=self.limits.measured_steps,
                    step_s=step_s,
                    blocks=1 if self.world_size == 1 else 2,
                    elapsed_s=time.perf_counter() - began,
                    cap_s=cap,
                )
                size = self._agree(size)
                if size == 0:
                    return LoopResult(warmup=warmup, synced=synced, local=local, steady=steady)
                synced += self._block(size, synchronise=True, lead_in=True)
                if self._agree(any(step.buckets != fresh[-1].buckets for step in synced)):
                    warmup += synced
                    break
                local += synced[-size:] if self.world_size == 1 else self._block(size, synchronise=False, lead_in=True)
        raise RuntimeError(
            f"the gradient buckets changed {MAX_RESTARTS + 1} times while measuring: {synced[-1].buckets}"
        )

    def _warm_up(self, began: float) -> list[StepTimes]:
        steps: list[StepTimes] = []
        while True:
            elapsed = time.perf_counter() - began
            size = warmup_size(
                [step.iteration_s for step in steps],
                least=least_warmup(
                    [step.buckets for step in steps],
                    wanted=self.limits.warmup_steps,
                    in_time=elapsed < self.limits.seconds_per_cell,
                ),
                elapsed_s=elapsed,
                cap_s=self.limits.seconds_per_cell,
                tolerance=STEADY_TOLERANCE[self.device.type],
            )
            size = self._agree(size)
            if size == 0:
                return steps
            steps += self._block(size, synchronise=True, lead_in=False)

    def _agree(self, value: int) -> int:
        """Rank 0's ``value`` on every rank; never inside a timed region."""
        if self.world_size == 1:
            return int(value)
        told = torch.tensor([int(value)], device=self.device)
        dist.broadcast(told, 0)
        return int(told.item())

    def _block(self, size: int, *, synchronise: bool, lead_in: bool) -> list[StepTimes]:
        """``size`` timed steps that start together on all ranks.

        The lead-in step is thrown away: it finds an empty pipeline, and DDP still sends the buffers of the block
        before it. Without synchronisation the weights of the ranks drift apart, which changes no time.
        """
        if self.world_size > 1:
            dist.barrier()
        if lead_in:
            self._step(synchronise=synchronise)
        marks = [self._step(synchronise=synchronise) for _ in range(size)]
        self.clock.settle()
        peak = _peak_memory_bytes(self.device)
        times = [self._read(mark, peak=peak) for mark in marks]
        self.clock.reuse()
        return times

    def _step(self, *, synchronise: bool) -> _Marks:
        """One iteration. Gradients are sent in its last micro-step only, or never without ``synchronise``."""
        recorded_at, scaler = time.time(), self.policy.scaler
        scale, steps_before = self._loss_scale, self._optimizer_steps
        points = [self.clock.mark()]
        self.optimizer.zero_grad(set_to_none=True)
        points.append(self.clock.mark())
        for micro in range(self.accumulation_steps):
            sends = synchronise and micro == self.accumulation_steps - 1
            with contextlib.nullcontext() if sends else self._no_sync():
                with self.policy.autocast():
                    loss = self.workload.compute_loss(self.module, self.batch)
                if self.accumulation_steps > 1:
                    loss = loss / self.accumulation_steps
                points.append(self.clock.mark())
                (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
                points.append(self.clock.mark())
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        points.append(self.clock.mark())
        skipped = self._optimizer_steps == steps_before
        if skipped and scaler is not None and scale is not None:
            self._loss_scale = scale * scaler.get_backoff_factor()
        return _Marks(
            points=points,
            flights=self.log.take(),
            loss_scale=scale,
            step_skipped=skipped,
            recorded_at=recorded_at,
        )

    def _no_sync(self) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()
        return contextlib.nullcontext()

    def _read(self, marks: _Marks, *, peak: int) -> StepTimes:
        begin, *points = marks.points
        moments = [self.clock.seconds(begin, point) for point in points]
        spans = [end - start for start, end in itertools.pairwise([0.0, *moments])]
        return StepTimes(
            iteration_s=moments[-1],
            forward_s=math.fsum(spans[1:-1:2]),
            backward_s=math.fsum(spans[2:-1:2]),
            # Clearing the gradients is the optimizer's work too.
            optimizer_s=spans[0] + spans[-1],
            communication_s=union_length(
                (self.clock.seconds(begin, flight.start), self.clock.seconds(begin, flight.end))
                for flight in marks.flights
            ),
            buckets=tuple(flight.bucket_bytes for flight in marks.flights),
            loss_scale=marks.loss_scale,
            step_skipped=marks.step_skipped,
            recorded_at=marks.recorded_at,
            peak_memory_bytes=peak,
        )


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss counts KiB, on macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
