"""The timed loop of one rank: warm up until steady, then pair blocks of steps with and without synchronisation."""

import contextlib
import itertools
import math
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from precision_time.storage.run_options import RunOptions
from precision_time.tasks.ranks.apply_precision import AppliedPrecision
from precision_time.tasks.ranks.buckets import Flight, FlightLog, find_averaged, log_bucket, send_alone
from precision_time.tasks.ranks.clocks import Clock, make_clock
from precision_time.tasks.ranks.conditions import Conditions, MachineWatch
from precision_time.tasks.ranks.device_state import EnergyMeter, GpuMonitor, open_monitor
from precision_time.tasks.ranks.job import MeasurementLimits
from precision_time.tasks.ranks.refusals import LossNotFiniteError
from precision_time.tasks.ranks.run_options import prepare_training
from precision_time.tasks.ranks.steady_state import (
    STEADY_TOLERANCE,
    is_steady,
    least_warmup,
    pair_size,
    union_length,
    warmup_size,
)
from precision_time.tasks.workloads import Workload

__all__ = ["LoopResult", "StepTimes", "TimedLoop"]

#: Repeated warm-ups after a change of buckets while measuring; more changes come from the module itself.
MAX_RESTARTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One iteration: seconds of its parts, sizes of its buckets, loss scaling, and the conditions of its block.

    ``last_backward_s`` is the backward pass of the last micro-step, which sends the gradients; ``last_landing_s`` the
    time from its begin until the last bucket landed, None where none was sent.
    """

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
    conditions: Conditions
    last_backward_s: float | None = None
    last_landing_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """Warm-up steps, measured steps, and for each measured step its partner without synchronisation.

    With one rank nothing is synchronised: ``local`` holds the measured steps themselves.
    ``isolated_communication_s`` is an all-reduce of the same buckets with nothing beside it; ``energy_j`` are joules
    of this rank's GPU in one measured iteration, None for the reason beside it.
    """

    warmup: list[StepTimes]
    synced: list[StepTimes]
    local: list[StepTimes]
    steady: bool
    isolated_communication_s: float | None = None
    energy_j: float | None = None
    energy_reason: str = "not measured"


@dataclass(slots=True)
class _Marks:
    """The marks of a step until its block has ended: begin, gradients cleared, (forward, backward)*, end."""

    points: list[Any]
    flights: list[Flight]
    loss_scale: float | None
    step_skipped: bool
    recorded_at: float
    #: whether a fused optimizer found infinite gradients: it is called for skipped steps too
    found_inf: torch.Tensor | None = None


class TimedLoop:
    """Trains ``workload`` on one batch that stays on the device, and times every step.

    ``module`` is called in each step: the workload's own as its run options change it, in DDP with more than one rank.
    Raises ``CellRefusedError`` for options that cannot be put in force here. ``ranks_here`` is the number of ranks on
    this host, ``cores`` the number of cores that they use together.
    """

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
        options: RunOptions | None = None,
        cores: int = 1,
        ranks_here: int | None = None,
    ) -> None:
        self.workload, self.policy, self.device = workload, policy, device
        self.world_size, self.accumulation_steps, self.limits = world_size, accumulation_steps, limits
        self.clock: Clock = make_clock(device)
        training = prepare_training(
            workload.module.train(), options or RunOptions(), device=device, world_size=world_size
        )
        self._check_first_steps = training.check_first_steps
        self.log = FlightLog(self.clock, world_size, wire_dtype=training.wire_dtype)
        self._parallel: DistributedDataParallel | None = None
        if world_size > 1:
            if self.log.wire_dtype is None:
                formats = {parameter.dtype for parameter in training.module.parameters() if parameter.requires_grad}
                self.log.averaged = find_averaged(formats, device=device)
            devices = [device] if device.type == "cuda" else None
            self._parallel = DistributedDataParallel(training.module, device_ids=devices)
            self._parallel.register_comm_hook(self.log, log_bucket)
        self.module: nn.Module = self._parallel or training.module
        self.optimizer = training.finish_optimizer(workload.make_optimizer(self.module.parameters()))
        # Tracked here, since every step would wait for the device if it asked the scaler.
        self._loss_scale = None if policy.scaler is None else policy.scaler.get_scale()
        self._optimizer_steps = 0
        self._found_inf: torch.Tensor | None = None
        self._skips_inside = policy.scaler is not None and hasattr(self.optimizer, "_step_supports_amp_scaling")
        self.optimizer.register_step_post_hook(
            self._keep_found_inf if self._skips_inside else self._count_optimizer_step
        )
        self._loss: torch.Tensor | None = None
        self.batch = training.lay_out_batch(policy.cast_batch(workload.make_batch(batch_size, device)))
        monitor, reason = _open_monitor(device)
        self._watch = MachineWatch(monitor=monitor, ranks_here=ranks_here or world_size, cores=cores)
        self._energy = EnergyMeter(monitor, reason=reason)

    def _count_optimizer_step(self, *_: Any) -> None:
        self._optimizer_steps += 1

    def _keep_found_inf(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizer_steps += 1
        self._found_inf = getattr(optimizer, "found_inf", None)

    def run(self) -> LoopResult:
        """Warm up and measure. Rank 0 decides everything, and tells the others between two blocks."""
        began = time.perf_counter()
        cap = self.limits.seconds_per_cell
        warmup: list[StepTimes] = []
        for _ in range(MAX_RESTARTS + 1):
            fresh = self._warm_up(began)
            warmup += fresh
            tolerance = STEADY_TOLERANCE[self.device.type]
            steady = bool(self.agree(is_steady([step.iteration_s for step in fresh], tolerance=tolerance)))
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
                size = self.agree(size)
                if size == 0:
                    energy_j, reason = self._energy.per_step()
                    return LoopResult(
                        warmup=warmup,
                        synced=synced,
                        local=local,
                        steady=steady,
                        isolated_communication_s=self._send_alone(synced[-1].buckets),
                        energy_j=energy_j,
                        energy_reason=reason,
                    )
                synced += self._block(size, synchronise=True, lead_in=True)
                if self.agree(any(step.buckets != fresh[-1].buckets for step in synced)):
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
            size = self.agree(size)
            if size == 0:
                return steps
            steps += self._block(size, synchronise=True, lead_in=False)
            self._check_first_steps()

    def agree(self, value: int) -> int:
        """Rank 0's ``value`` on every rank; never inside a timed region."""
        if self.world_size == 1:
            return int(value)
        message = torch.tensor([int(value)], device=self.device)
        dist.broadcast(message, 0)
        return int(message.item())

    def take_block(self, size: int) -> list[StepTimes]:
        """``size`` more steps, begun together on all ranks and no part of the result of ``run``."""
        return self._block(size, synchronise=True, lead_in=False)

    def _send_alone(self, buckets: tuple[int, ...]) -> float | None:
        if self.world_size == 1:
            return None
        return send_alone(buckets, dtype=self.log.sent_dtype, op=self.log.op, device=self.device, clock=self.clock)

    def _block(self, size: int, *, synchronise: bool, lead_in: bool) -> list[StepTimes]:
        """``size`` timed steps that start together on all ranks.

        The lead-in step is thrown away: the device has nothing queued before it, and DDP still sends the buffers of the
        block before. Without synchronisation the weights of the ranks drift apart, which changes no time.
        """
        if self.world_size > 1:
            dist.barrier()
        # Energy is that of measured blocks: they have a lead-in, and they synchronise.
        counted = lead_in and synchronise
        joules = self._energy.start() if counted else None
        self._watch.start_block()
        began = time.perf_counter()
        marks = [self._step(synchronise=synchronise) for _ in range(size + lead_in)]
        self._watch.look()
        self.clock.settle()
        if counted:
            self._energy.add(joules, steps=size + 1, seconds=time.perf_counter() - began)
        conditions = self._watch.end_block()
        self._check_loss()
        peak = _peak_memory_bytes(self.device)
        for mark in marks:
            self._settle_skip(mark)
        times = [self._read(mark, peak=peak, conditions=conditions) for mark in marks[lead_in:]]
        self.clock.reuse()
        return times

    def _check_loss(self) -> None:
        if self._loss is not None and not bool(torch.isfinite(self._loss).all()):
            raise LossNotFiniteError(f"the loss is {self._loss.item()}")

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
        # After the last mark: kept without its graph, and checked once a block.
        self._loss = loss.detach()
        skipped = self._optimizer_steps == steps_before
        if skipped and scaler is not None and scale is not None:
            self._loss_scale = scale * scaler.get_backoff_factor()
        return _Marks(
            points=points,
            flights=self.log.take(),
            loss_scale=scale,
            step_skipped=skipped,
            recorded_at=recorded_at,
            found_inf=self._found_inf,
        )

    def _no_sync(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._parallel is None else self._parallel.no_sync()

    def _settle_skip(self, marks: _Marks) -> None:
        """Note whether a fused optimizer skipped the step; to be called in order, after the device has settled."""
        if marks.found_inf is None or self.policy.scaler is None:
            return
        marks.loss_scale, marks.step_skipped = self._loss_scale, bool(marks.found_inf)
        if marks.step_skipped and self._loss_scale is not None:
            self._loss_scale *= self.policy.scaler.get_backoff_factor()

    def _read(self, marks: _Marks, *, peak: int, conditions: Conditions) -> StepTimes:
        begin, *points = marks.points
        moments = [self.clock.seconds(begin, point) for point in points]
        spans = [end - start for start, end in itertools.pairwise([0.0, *moments])]
        flights = [
            (self.clock.seconds(begin, flight.start), self.clock.seconds(begin, flight.end)) for flight in marks.flights
        ]
        landed = max((end for _, end in flights), default=None)
        return StepTimes(
            iteration_s=moments[-1],
            forward_s=math.fsum(spans[1:-1:2]),
            backward_s=math.fsum(spans[2:-1:2]),
            # Clearing the gradients is the optimizer's work too.
            optimizer_s=spans[0] + spans[-1],
            communication_s=union_length(flights),
            buckets=tuple(flight.bucket_bytes for flight in marks.flights),
            loss_scale=marks.loss_scale,
            step_skipped=marks.step_skipped,
            recorded_at=marks.recorded_at,
            peak_memory_bytes=peak,
            conditions=conditions,
            last_backward_s=spans[-2],
            last_landing_s=None if landed is None else landed - moments[-3],
        )


def _open_monitor(device: torch.device) -> tuple[GpuMonitor | None, str]:
    if device.type != "cuda":
        return None, "a CPU rank has no energy counter of its own"
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return (None, "torch does not know the GPU's uuid") if uuid is None else open_monitor(str(uuid))


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss counts KiB, on macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
