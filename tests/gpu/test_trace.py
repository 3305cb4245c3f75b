"""Reading a profiler's trace, on traces with the structure of CUDA's and no GPU."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

PHASES = ("forward", "backward", "optimizer")
MAIN, AUTOGRAD = 100, 200
WORK = {"kernel": "cudaLaunchKernel", "gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}


@dataclass
class Machine:
    """A host that runs ahead of its device, and the events that Kineto writes of both; times in microseconds."""

    host: float = 0.0
    free: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    correlations: Any = field(default_factory=lambda: itertools.count(1))

    def launch(self, length: float, *, kind: str = "kernel", thread: int = MAIN, by: str = "cuda_runtime") -> None:
        """A call of the host, and the work that the device does as soon as it is free."""
        number = next(self.correlations)
        name = "cuLaunchKernelEx" if by == "cuda_driver" else WORK[kind]
        tie = {"External id": number, "correlation": number}
        self.add(by, name, self.host, 4.0, thread=thread, args={"cbid": 211, **tie})
        begin = max(self.free, self.host + 6.0)
        self.free = begin + length
        self.add(kind, "work", begin, length, thread=7, args={"device": 0, "stream": 7, **tie})
        self.add("ac2g", "ac2g", begin, None, thread=7, args=None)
        self.host += 5.0

    def synchronise(self) -> None:
        """The host waits, which is no work of the device."""
        length = max(1.0, self.free - self.host)
        tie = {"correlation": next(self.correlations)}
        self.add("cuda_runtime", "cudaDeviceSynchronize", self.host, length, args=tie)
        self.host += length

    def add(self, category, name, begin, length, *, thread=MAIN, args=None) -> None:
        event = {"ph": "X" if length is not None else "f", "cat": category, "name": name, "pid": 1, "tid": thread}
        event |= {"ts": begin} | ({} if length is None else {"dur": length}) | ({} if args is None else {"args": args})
        self.events.append(event)

    def span(self, name: str, begin: float) -> None:
        """A range of the profiler that ends now."""
        self.add("user_annotation", name, begin, self.host - begin, args={"External id": 0})

    def step(self, *, backward: float = 200.0) -> None:
        """100 us of forward, 200 of backward from autograd's thread and 50 of optimizer, inside its own range."""
        begin = self.host
        self.launch(20.0, kind="gpu_memcpy")
        self.launch(80.0)
        self.add("cpu_op", "aten::mm", begin, 5000.0)
        self.span("forward", begin)
        self.host += 3.0
        begin = self.host
        self.launch(1.0)  # the gradient of the loss itself, filled with ones by the calling thread
        self.add("gpu_user_annotation", "backward", self.free - 1.0, 1.0, thread=7)
        self.launch(9.0, kind="gpu_memset", thread=AUTOGRAD)
        self.launch(backward - 10.0, thread=AUTOGRAD, by="cuda_driver")
        self.span("backward", begin)
        self.host += 3.0
        begin = self.host
        inner = self.host = begin + 2.0
        self.launch(50.0)
        self.span("Optimizer.step#SGD.step", inner)
        self.add("gpu_user_annotation", "Optimizer.step#SGD.step", self.free - 50.0, 50.0, thread=7)
        self.span("optimizer", begin)
        self.host += 3.0


def make_trace(*, steps: int = 4) -> Machine:
    machine = Machine(events=[{"ph": "M", "name": "process_name", "pid": 1, "ts": 0.0, "args": {"name": "python"}}])
    for _ in range(steps):
        machine.step()
    machine.synchronise()
    machine.launch(1.0)  # reads the loss after the last step
    # Kineto writes events by thread and kind, not by time.
    machine.events.sort(key=lambda event: (event.get("cat", ""), -event["ts"]))
    return machine


def test_work_belongs_to_the_phase_that_launched_it_from_any_thread(read_phases) -> None:
    assert read_phases(make_trace().events, phases=PHASES) == pytest.approx(
        {"forward": 100e-6, "backward": 200e-6, "optimizer": 50e-6}
    )


def test_a_phase_lasts_from_the_end_of_the_work_before_it_idle_time_of_the_device_included(read_phases) -> None:
    machine = Machine()
    for _ in range(4):
        machine.step()
        machine.synchronise()
        machine.host += 30.0
    # The host waits for the device, then 30 us, and its first launch takes 6 us to arrive.
    assert read_phases(machine.events, phases=PHASES) == pytest.approx(
        {"forward": 136e-6, "backward": 200e-6, "optimizer": 50e-6}
    )


def test_the_first_step_does_not_count(read_phases) -> None:
    machine = Machine()
    machine.step(backward=9000.0)
    machine.step()
    assert read_phases(machine.events, phases=PHASES)["backward"] == pytest.approx(200e-6)


def test_phases_out_of_order_are_an_error(read_phases) -> None:
    events = make_trace().events
    next(event for event in events if event["name"] == "forward")["name"] = "optimizer"
    with pytest.raises(ValueError, match="out of order"):
        read_phases(events, phases=PHASES)
    with pytest.raises(ValueError, match="out of order"):
        read_phases([], phases=PHASES)


def test_a_phase_that_launched_nothing_is_an_error(read_phases) -> None:
    events = make_trace().events
    own = [event for event in events if event["name"] == "Optimizer.step#SGD.step"]
    last = max(event["ts"] for event in own if event["cat"] == "user_annotation")
    (launch,) = (event for event in events if event.get("cat") == "cuda_runtime" and event["ts"] == last)
    kept = [event for event in events if event.get("args", {}).get("correlation") != launch["args"]["correlation"]]
    with pytest.raises(ValueError, match="launched nothing: optimizer"):
        read_phases(kept, phases=PHASES)


@pytest.mark.parametrize(("length", "fits"), [(2.0, True), (200.0, False)])
def test_work_without_a_launch_is_left_out_while_it_is_little(read_phases, length: float, fits: bool) -> None:
    machine = make_trace()
    machine.add("gpu_memset", "Memset (Device)", machine.free, length, thread=7, args={"stream": 7, "correlation": -1})
    if fits:
        assert read_phases(machine.events, phases=PHASES)["optimizer"] == pytest.approx(50e-6)
    else:
        with pytest.raises(ValueError, match="launched by no phase"):
            read_phases(machine.events, phases=PHASES)


def test_the_ranges_of_a_profiled_block_are_its_phases(profile_block, read_phases) -> None:
    """The loop and the profiler are real; the device is made up: a second for each operation of a kind."""
    import torch

    from precision_time.predictor.setup.precision import PRECISIONS
    from precision_time.tasks.ranks.apply_precision import apply_precision
    from precision_time.tasks.ranks.job import MeasurementLimits
    from precision_time.tasks.ranks.timed_loop import TimedLoop
    from precision_time.tasks.workloads import OPTIMIZERS, Workload

    cpu = torch.device("cpu")
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    workload = Workload(
        name="two-layers",
        family="mlp",
        task_input="8",
        module=module,
        make_batch=lambda samples, device: torch.ones(samples, 8, device=device),
        compute_loss=lambda module, batch: module(batch).square().mean(),
        make_optimizer=OPTIMIZERS["sgd_momentum"],
        optimizer_name="sgd_momentum",
    )
    loop = TimedLoop(
        workload,
        apply_precision(PRECISIONS["fp32"], module, device=cpu),
        device=cpu,
        world_size=1,
        batch_size=4,
        accumulation_steps=1,
        limits=MeasurementLimits(warmup_steps=1, measured_steps=3, seconds_per_cell=10.0),
    )
    clock = loop.clock
    events, steps = profile_block(loop, 3)
    assert (len(steps), loop.clock) == (3, clock)

    # Two layers forward; two gradients of weights and one of activations; four parameters and their momenta to add to.
    kinds = {"aten::addmm": MAIN, "aten::mm": AUTOGRAD, "aten::add_": MAIN}
    machine = Machine()
    for operation in sorted((event for event in events if event["name"] in kinds), key=lambda event: event["ts"]):
        machine.host = operation["ts"]
        machine.launch(1e6, thread=kinds[operation["name"]])
    assert read_phases(events + machine.events, phases=PHASES) == pytest.approx(
        {"forward": 2.0, "backward": 3.0, "optimizer": 8.0}
    )
