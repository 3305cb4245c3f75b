"""The timed loop on a GPU, compared with torch.profiler and with a loop that times nothing."""

import statistics
import time

import pytest

pytestmark = pytest.mark.gpu

MODEL, PRECISION, BATCH = "resnet50", "amp_bf16", 128
PHASES = ("forward", "backward", "optimizer")
ROUNDS, ROUND_S = 6, 2.0


class Subject:
    """One model, trained by our loop and by hand."""

    def __init__(self, device) -> None:
        from precision_time.predictor.setup.precision import parse_precision
        from precision_time.tasks.ranks.apply_precision import apply_precision
        from precision_time.tasks.ranks.job import MeasurementLimits
        from precision_time.tasks.ranks.timed_loop import TimedLoop
        from precision_time.tasks.workloads import build_workload

        self.workload = build_workload(MODEL)
        self.workload.module.to(device)
        self.policy = apply_precision(parse_precision(PRECISION), self.workload.module, device=device)
        self.loop = TimedLoop(
            self.workload,
            self.policy,
            device=device,
            world_size=1,
            batch_size=BATCH,
            accumulation_steps=1,
            limits=MeasurementLimits(warmup_steps=20, measured_steps=40, seconds_per_cell=15.0),
        )

    def step(self) -> None:
        """One iteration without any timing in it."""
        self.loop.optimizer.zero_grad(set_to_none=True)
        with self.policy.autocast():
            loss = self.workload.compute_loss(self.loop.module, self.loop.batch)
        loss.backward()
        self.loop.optimizer.step()


@pytest.fixture(scope="module")
def subject(device):
    subject = Subject(device)
    subject.measured = subject.loop.run()
    return subject


def test_phases_agree_with_the_profiler(subject, profile_block, read_phases) -> None:
    events, steps = profile_block(subject.loop, 10)
    traced = read_phases(events, phases=PHASES)
    ours, alone = (
        {phase: statistics.median(getattr(step, f"{phase}_s") for step in block) for phase in PHASES}
        for block in (steps, subject.measured.synced)
    )
    for phase in PHASES:
        print(f"{phase}: loop {ours[phase]:.6f} s, profiler {traced[phase]:.6f} s, without it {alone[phase]:.6f} s")
    whole = sum(traced.values())
    for phase in PHASES:
        # The optimizer is so short that its error is compared with the whole iteration.
        assert abs(ours[phase] - traced[phase]) < 0.03 * max(traced[phase], whole / 3), phase


def test_timing_costs_no_more_than_a_hundredth(subject) -> None:
    import torch

    step_s = statistics.median(step.iteration_s for step in subject.measured.synced)
    count = max(10, round(ROUND_S / step_s))

    def run(step) -> float:
        step()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    def timed() -> float:
        # The other work of a block (load, NVML, reading the marks) is done after the device has settled.
        seconds = run(lambda: subject.loop._step(synchronise=True))
        subject.loop.clock.reuse()
        return seconds

    def plain() -> float:
        return run(subject.step)

    pairs = []
    for number in range(ROUNDS):
        # Each is first as often as the other, so that a drifting clock favours neither.
        first, second = (timed, plain) if number % 2 else (plain, timed)
        seconds = {first: first(), second: second()}
        pairs.append((seconds[timed], seconds[plain]))
    print(f"{count} steps a round, seconds a step with and without timing: {pairs}")
    assert statistics.median(ours / bare for ours, bare in pairs) < 1.01
