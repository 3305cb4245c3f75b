"""On a GPU: what the timed loop reports against torch.profiler and against a loop without any timing in it."""

import json
import statistics
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

MODEL, PRECISION, BATCH = "resnet50", "amp_bf16", 128
PHASES = ("forward", "backward", "optimizer")
ROUNDS, STEPS = 6, 30


class Subject:
    """One model in training, by our loop and by hand."""

    def __init__(self, device) -> None:
        from precision_time.predictor.precision import parse_precision
        from precision_time.tasks.job import MeasurementLimits
        from precision_time.tasks.loop import TimedLoop
        from precision_time.tasks.policies import apply_precision
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
            limits=MeasurementLimits(warmup_steps=20, measured_steps=40, seconds_per_cell=60.0),
        )

    def step(self, mark) -> None:
        """One iteration without any timing; ``mark(phase)`` is a context."""
        with mark("optimizer"):
            self.loop.optimizer.zero_grad(set_to_none=True)
        with mark("forward"), self.policy.autocast():
            loss = self.workload.compute_loss(self.loop.module, self.loop.batch)
        with mark("backward"):
            loss.backward()
        with mark("optimizer"):
            self.loop.optimizer.step()


@pytest.fixture(scope="module")
def subject(device):
    subject = Subject(device)
    subject.measured = subject.loop.run()
    return subject


def test_phases_agree_with_the_profiler(subject, read_phases, tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile, record_function

    class Mark:
        """Ranges of the phases; clearing gradients launches nothing and belongs to the optimizer that follows."""

        def __init__(self) -> None:
            self.cleared = False

        def __call__(self, phase: str):
            import contextlib

            if phase == "optimizer" and not self.cleared:
                self.cleared = True
                return contextlib.nullcontext()
            self.cleared = self.cleared and phase != "optimizer"
            return record_function(phase)

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        mark = Mark()
        for _ in range(10):
            subject.step(mark)
    trace = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(trace))
    seen = read_phases(json.loads(trace.read_text())["traceEvents"], phases=PHASES)
    ours = {
        phase: statistics.median(getattr(step, f"{phase}_s") for step in subject.measured.synced) for phase in PHASES
    }
    print(json.dumps({phase: [ours[phase], seen[phase]] for phase in PHASES}))
    whole = sum(seen.values())
    for phase in PHASES:
        # The optimizer is so short that its share of the iteration is what counts.
        assert abs(ours[phase] - seen[phase]) < 0.03 * max(seen[phase], whole / 3), phase


def test_timing_costs_no_more_than_a_hundredth(subject) -> None:
    import contextlib

    import torch

    def plain() -> float:
        subject.step(lambda phase: contextlib.nullcontext())
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(STEPS):
            subject.step(lambda phase: contextlib.nullcontext())
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / STEPS

    def timed() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        subject.loop._block(STEPS - 1, synchronise=True, lead_in=True)
        return (time.perf_counter() - began) / STEPS

    ratios = [timed() / plain() for _ in range(ROUNDS)]
    print(json.dumps(ratios))
    assert statistics.median(ratios) < 1.01
