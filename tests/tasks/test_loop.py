from dataclasses import replace

import pytest
import torch
from torch import nn

from precision_time.predictor.precision import PRECISIONS
from precision_time.tasks import loop
from precision_time.tasks.job import MeasurementLimits
from precision_time.tasks.loop import DeviceClock, StepTimes, TimedLoop
from precision_time.tasks.policies import apply_precision
from precision_time.tasks.workloads import OPTIMIZERS, Workload

CPU = torch.device("cpu")


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs)


def make_loop(*, precision="fp32", accumulation_steps=1, loss_factor=1.0, measured_steps=6):
    module = Counting()
    workload = Workload(
        name="one-layer",
        family="mlp",
        task_input="8",
        module=module,
        make_batch=lambda samples, device: torch.ones(samples, 8, device=device),
        compute_loss=lambda module, batch: module(batch).float().square().mean() * loss_factor,
        make_optimizer=OPTIMIZERS["sgd_momentum"],
        optimizer_name="sgd_momentum",
    )
    return TimedLoop(
        workload,
        apply_precision(PRECISIONS[precision], module, device=CPU),
        device=CPU,
        world_size=1,
        batch_size=2,
        accumulation_steps=accumulation_steps,
        limits=MeasurementLimits(warmup_steps=5, measured_steps=measured_steps, seconds_per_cell=10.0),
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
    monkeypatch.setattr(loop, "_new_event", FakeEvent)
    clock = DeviceClock(count=2)
    for _ in range(3):
        marks = [clock.mark() for _ in range(4)]
        assert clock.seconds(marks[0], marks[1]) == 1.5
        clock.reuse()
    assert FakeEvent.made == 4
