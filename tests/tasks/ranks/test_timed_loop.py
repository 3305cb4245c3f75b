from dataclasses import replace

import pytest
import torch
from torch import nn

from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.storage.run_options import RunOptions
from precision_time.tasks.ranks import clocks, device_state, run_options
from precision_time.tasks.ranks.apply_precision import apply_precision
from precision_time.tasks.ranks.clocks import DeviceClock, HostClock
from precision_time.tasks.ranks.conditions import Conditions
from precision_time.tasks.ranks.device_state import EnergyMeter, GpuState
from precision_time.tasks.ranks.job import MeasurementLimits
from precision_time.tasks.ranks.refusals import CellRefusedError, LossNotFiniteError
from precision_time.tasks.ranks.timed_loop import StepTimes, TimedLoop
from precision_time.tasks.workloads import OPTIMIZERS, Workload

CPU = torch.device("cpu")


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs)


def make_loop(
    *, precision="fp32", accumulation_steps=1, loss_factor=1.0, measured_steps=6, optimizer="sgd_momentum", options=None
):
    module = Counting()
    workload = Workload(
        name="one-layer",
        family="mlp",
        task_input="8",
        module=module,
        make_batch=lambda samples, device: torch.ones(samples, 8, device=device),
        compute_loss=lambda module, batch: module(batch).float().square().mean() * loss_factor,
        make_optimizer=OPTIMIZERS[optimizer],
        optimizer_name=optimizer,
    )
    return TimedLoop(
        workload,
        apply_precision(PRECISIONS[precision], module, device=CPU),
        device=CPU,
        world_size=1,
        batch_size=2,
        accumulation_steps=accumulation_steps,
        limits=MeasurementLimits(warmup_steps=5, measured_steps=measured_steps, seconds_per_cell=10.0),
        options=options,
    )


def test_one_rank_measures_the_steps_it_was_asked_for_after_warming_up():
    result = make_loop().run()
    assert len(result.warmup) >= 5
    assert len(result.synced) == 6
    assert result.local == result.synced
    for step in result.warmup + result.synced:
        assert step.iteration_s == pytest.approx(step.forward_s + step.backward_s + step.optimizer_s)
        assert min(step.forward_s, step.backward_s, step.optimizer_s) > 0
        assert (step.buckets, step.communication_s, step.step_skipped, step.loss_scale) == ((), 0.0, False, None)


def test_an_iteration_runs_all_its_micro_steps():
    timed = make_loop(accumulation_steps=3)
    before = timed.workload.module.calls
    timed._block(2, synchronise=True, lead_in=False)
    assert timed.workload.module.calls - before == 6


def test_accumulated_gradients_are_those_of_the_mean_loss():
    gradients = []
    for accumulation_steps in (1, 4):
        torch.manual_seed(0)
        timed = make_loop(accumulation_steps=accumulation_steps)
        timed._step(synchronise=True)
        gradients.append(timed.workload.module.weight.grad)
    assert torch.allclose(gradients[0], gradients[1])


def test_a_step_that_the_loss_scaler_leaves_out_is_marked_and_halves_the_scale():
    result = make_loop(precision="amp_fp16", loss_factor=1e38).run()
    steps = result.warmup
    assert [step.loss_scale for step in steps[:3]] == [1024.0, 512.0, 256.0]
    assert all(step.step_skipped for step in steps[:3])


class Scripted(TimedLoop):
    """Steps of a millisecond each, with the buckets of a script by the number of the block."""

    def script(self, changes_at):
        self.blocks, self.changes_at = 0, changes_at

    def _block(self, size, *, synchronise, lead_in):
        self.blocks += lead_in
        buckets = (self.blocks if self.blocks in self.changes_at else 0,)
        step = StepTimes(
            iteration_s=0.001,
            forward_s=0.0,
            backward_s=0.001,
            optimizer_s=0.0,
            communication_s=0.0,
            buckets=buckets,
            loss_scale=None,
            step_skipped=False,
            recorded_at=0.0,
            peak_memory_bytes=0,
            conditions=Conditions(load_average=0.0),
        )
        return [replace(step) for _ in range(size)]


def scripted_loop(changes_at):
    timed = make_loop(measured_steps=10)
    timed.__class__ = Scripted
    timed.script(changes_at)
    return timed


def test_buckets_that_change_while_measuring_send_the_cell_back_to_warm_up():
    result = scripted_loop({2}).run()
    assert {step.buckets for step in result.synced} == {(0,)}
    assert len(result.synced) == 10
    # The block before the change and the changed one count as warm-up, too.
    assert (2,) in {step.buckets for step in result.warmup}


def test_buckets_that_never_settle_end_the_cell():
    with pytest.raises(RuntimeError, match="gradient buckets changed"):
        scripted_loop({*range(1, 100, 2)}).run()


class FakeEvent:
    made = 0

    def __init__(self):
        FakeEvent.made += 1

    def record(self):
        self.at_ms = FakeEvent.made

    def elapsed_time(self, end):
        return 1500.0


def test_cuda_events_are_made_once_and_read_as_seconds(monkeypatch):
    monkeypatch.setattr(clocks, "_new_event", FakeEvent)
    clock = DeviceClock(count=2)
    for _ in range(3):
        marks = [clock.mark() for _ in range(4)]
        assert clock.seconds(marks[0], marks[1]) == 1.5
        clock.reuse()
    assert FakeEvent.made == 4


#: Milliseconds by phase: the host's to queue the work, and the device's to do it.
QUEUED = {"forward": (0.02, 2.0), "backward": (0.02, 4.0), "optimizer": (0.02, 1.0)}


class QueuedDevice:
    """A device that works through its queue while the host runs ahead; each has its own clock, in milliseconds."""

    def __init__(self):
        self.host_ms = self.free_ms = 0.0

    def launch(self, phase):
        queueing, length = QUEUED[phase]
        self.host_ms += queueing
        self.free_ms = max(self.free_ms, self.host_ms) + length

    def synchronize(self):
        self.host_ms = max(self.host_ms, self.free_ms)

    def new_event(self):
        return QueuedEvent(self)


class QueuedEvent:
    """An event in the device's queue; like CUDA's it cannot be read before the device has reached it."""

    def __init__(self, device):
        self.device = device

    def record(self):
        self.at_ms = max(self.device.free_ms, self.device.host_ms)

    def elapsed_time(self, end):
        assert max(self.at_ms, end.at_ms) <= self.device.host_ms, "the device is not ready"
        return end.at_ms - self.at_ms


class QueuedHostClock(HostClock):
    """Readings of the host's clock, as of a timer without events or synchronisation."""

    def __init__(self, device):
        self.device = device

    def mark(self):
        return self.device.host_ms / 1e3


def time_queued(device, clock, *, waits, accumulation_steps=1):
    """Steps of a loop whose passes and optimizer queue work on ``device``; ``waits``: the optimizer needs a value."""

    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            device.launch("forward")
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            device.launch("backward")
            return gradient

    def queue_update(*_):
        if waits:
            device.synchronize()
        device.launch("optimizer")

    timed = make_loop(accumulation_steps=accumulation_steps)
    compute_loss = timed.workload.compute_loss
    timed.workload = replace(
        timed.workload, compute_loss=lambda module, batch: Passes.apply(compute_loss(module, batch))
    )
    timed.optimizer.register_step_pre_hook(queue_update)
    timed.clock = clock
    return timed._block(5, synchronise=True, lead_in=True)


@pytest.mark.parametrize("waits", [False, True], ids=["free", "waiting for the loss scaler"])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_a_device_that_runs_behind_the_host_is_told_by_phase(monkeypatch, waits, accumulation_steps):
    device = QueuedDevice()
    monkeypatch.setattr(clocks, "_new_event", device.new_event)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    steps = time_queued(device, DeviceClock(count=4), waits=waits, accumulation_steps=accumulation_steps)
    assert len(steps) == 5
    for step in steps:
        assert step.forward_s == pytest.approx(2e-3 * accumulation_steps, rel=0.05)
        assert step.backward_s == pytest.approx(4e-3 * accumulation_steps, rel=0.05)
        assert step.optimizer_s == pytest.approx(1e-3, rel=0.05)
        assert step.iteration_s == pytest.approx(6e-3 * accumulation_steps + 1e-3, rel=0.05)


def test_the_hosts_clock_would_blame_whoever_waits_first():
    """The made-up device does run behind: without events the optimizer gets the time of all phases."""
    device = QueuedDevice()
    steps = time_queued(device, QueuedHostClock(device), waits=True)
    assert all(step.optimizer_s > 0.9 * step.iteration_s for step in steps)
    assert all(step.backward_s < 0.05 * 4e-3 for step in steps)


@pytest.mark.parametrize("optimizer", ["sgd_momentum", "adamw"])
def test_a_fused_optimizer_is_called_for_skipped_steps_too_and_they_are_marked_all_the_same(optimizer):
    fused = RunOptions(fused_optimizer=True)
    timed = make_loop(precision="amp_fp16", loss_factor=1e38, optimizer=optimizer, options=fused)
    before = timed.workload.module.weight.clone()
    steps = timed._block(3, synchronise=True, lead_in=False)
    assert torch.equal(before, timed.workload.module.weight)
    assert [step.loss_scale for step in steps] == [1024.0, 512.0, 256.0]
    assert all(step.step_skipped for step in steps)
    good = make_loop(precision="amp_fp16", optimizer=optimizer, options=fused)
    steps = good._block(3, synchronise=True, lead_in=True)
    assert [(step.loss_scale, step.step_skipped) for step in steps] == [(1024.0, False)] * 3


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_cell_after_its_block(factor):
    timed = make_loop(loss_factor=factor)
    with pytest.raises(LossNotFiniteError, match=r"the loss is (nan|inf)"):
        timed.run()


def test_the_loss_is_looked_at_once_a_block_and_never_inside_a_step(monkeypatch):
    looks = []
    real = torch.isfinite
    monkeypatch.setattr(torch, "isfinite", lambda values: looks.append(1) or real(values))
    timed = make_loop()
    timed._step(synchronise=True)
    assert looks == []
    timed._block(4, synchronise=True, lead_in=True)
    assert len(looks) == 1


def test_every_step_carries_the_conditions_of_its_block():
    timed = make_loop()
    result = timed.run()
    assert all(step.conditions is not None for step in result.warmup + result.synced)
    assert result.synced[0].conditions.load_average >= 0
    assert (result.energy_j, result.isolated_communication_s) == (None, None)
    assert "no energy counter" in result.energy_reason


class CountingMonitor:
    """A GPU that takes 5 J for every step of the loop."""

    def __init__(self, timed):
        self.timed = timed

    def energy_j(self):
        return 100.0 + 5.0 * self.timed.workload.module.calls

    def read(self):
        return GpuState(throttled=False)


def test_energy_counts_the_thrown_away_step_on_both_sides(monkeypatch):
    timed = make_loop()
    timed._energy = EnergyMeter(CountingMonitor(timed), reason="")
    monkeypatch.setattr(device_state, "LEAST_ENERGY_S", 0.0)
    result = timed.run()
    assert (result.energy_j, result.energy_reason) == (5.0, "")


def test_an_option_that_cannot_be_put_in_force_is_refused_before_the_first_step():
    with pytest.raises(CellRefusedError, match="no blocks to checkpoint"):
        make_loop(options=RunOptions(checkpointing="full"))


def test_a_compiled_module_is_what_a_step_calls(monkeypatch):
    calls = []

    class Compiled(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.inner = module

        def forward(self, inputs):
            calls.append(1)
            return self.inner(inputs)

    monkeypatch.setattr(run_options, "_compiler_missing", lambda device: None)
    monkeypatch.setattr(torch, "compile", Compiled)
    timed = make_loop(options=RunOptions(compiled=True))
    timed._block(2, synchronise=True, lead_in=False)
    assert len(calls) == 2
    # Checked after the first block: this class has compiled nothing.
    with pytest.raises(CellRefusedError, match="no graph was compiled"):
        timed.run()
