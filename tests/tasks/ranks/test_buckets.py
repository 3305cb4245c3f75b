"""The communication hook and the buckets sent alone; one real pair of gloo ranks, the rest by stand-ins."""

import json
import os
import subprocess
import sys

import pytest
import torch

from precision_time.tasks.ranks import buckets
from precision_time.tasks.ranks.buckets import FlightLog, find_averaged, log_bucket, send_alone
from precision_time.tasks.ranks.clocks import HostClock

CPU = torch.device("cpu")


class Bucket:
    def __init__(self, values):
        self.values = values

    def buffer(self):
        return self.values


class Work:
    def __init__(self, values):
        self.values = values

    def get_future(self):
        future = torch.futures.Future()
        future.set_result([self.values])
        return future

    def wait(self):
        return True


def sum_of_two(values, op=None, *, async_op=False):
    """An all-reduce of two ranks with equal values."""
    if op != torch.distributed.ReduceOp.AVG:
        values.mul_(2)
    return Work(values)


@pytest.mark.parametrize(
    ("wire", "sent_bytes"), [(None, 4 * 6), (torch.float16, 2 * 6), (torch.bfloat16, 2 * 6)], ids=str
)
def test_a_bucket_comes_back_as_the_mean_in_its_own_format_and_is_logged_as_it_was_sent(monkeypatch, wire, sent_bytes):
    monkeypatch.setattr(buckets.dist, "all_reduce", sum_of_two)
    log = FlightLog(HostClock(), 2, wire_dtype=wire)
    gradients = torch.arange(6, dtype=torch.float32)
    landed = log_bucket(log, Bucket(gradients.clone())).wait()
    assert landed.dtype == torch.float32
    assert torch.equal(landed, gradients)
    (flight,) = log.take()
    assert flight.bucket_bytes == sent_bytes
    assert flight.end >= flight.start
    assert log.sent_dtype == (wire or torch.float32)
    assert log.take() == []


@pytest.mark.parametrize(
    ("dtype", "wire", "op", "divided"),
    [
        (torch.float32, None, "AVG", False),
        (torch.float16, None, "SUM", True),  # not among those that the backend averages
        (torch.float32, torch.bfloat16, "SUM", True),  # as torch's own compression does
    ],
    ids=str,
)
def test_a_bucket_has_no_pass_of_its_own_where_the_backend_averages(monkeypatch, dtype, wire, op, divided):
    sent = []

    def all_reduce(values, op=None, *, async_op=False):
        sent.append((op, values.clone()))
        return Work(values)

    monkeypatch.setattr(buckets.dist, "all_reduce", all_reduce)
    log = FlightLog(HostClock(), 2, wire_dtype=wire, averaged=frozenset({torch.float32, torch.bfloat16}))
    log_bucket(log, Bucket(torch.full((4,), 8.0, dtype=dtype)))
    ((used, values),) = sent
    assert used == log.op == getattr(torch.distributed.ReduceOp, op)
    assert values.tolist() == [4.0 if divided else 8.0] * 4


def test_a_backend_that_cannot_average_or_overflows_is_left_to_divide(monkeypatch):
    def all_reduce(values, op=None):
        if values.dtype == torch.float64:
            raise ValueError("Cannot use ReduceOp.AVG with this backend")
        values.mul_(2).div_(2)

    monkeypatch.setattr(buckets.dist, "all_reduce", all_reduce)
    formats = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    assert find_averaged(formats, device=CPU) == {torch.bfloat16, torch.float32}


def test_the_same_buckets_are_sent_alone(monkeypatch):
    sent = []

    def all_reduce(values, op=None, *, async_op=False):
        if async_op:
            sent.append(values.numel() * values.element_size())
            assert op == torch.distributed.ReduceOp.AVG
        return Work(values)

    monkeypatch.setattr(buckets.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(buckets.dist, "barrier", lambda: None)
    average = torch.distributed.ReduceOp.AVG
    seconds = send_alone((64, 32), dtype=torch.float16, op=average, device=CPU, clock=HostClock())
    assert seconds > 0
    assert sent == [64, 32] * (buckets.ISOLATED_REPEATS + 1)


def test_without_buckets_or_memory_there_is_no_such_time(monkeypatch):
    monkeypatch.setattr(buckets.dist, "all_reduce", lambda values, op=None, async_op=False: None)
    how = {"dtype": torch.float32, "op": torch.distributed.ReduceOp.SUM, "device": CPU, "clock": HostClock()}
    assert send_alone((), **how) is None
    assert send_alone((2**60,), **how) is None


PAIR = """
import json, os, sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.tasks.ranks.buckets import FlightLog, find_averaged, log_bucket
from precision_time.tasks.ranks.clocks import HostClock
from precision_time.tasks.ranks.job import MeasurementLimits
from precision_time.tasks.ranks.timed_loop import TimedLoop
from precision_time.storage.run_options import RunOptions
from precision_time.tasks.ranks.apply_precision import apply_precision
from precision_time.tasks.ranks.rank import use_loopback
from precision_time.tasks.workloads import OPTIMIZERS, Workload

folder, rank = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
use_loopback()
dist.init_process_group("gloo", store=dist.FileStore(folder + "/meet", 2), rank=rank, world_size=2)
results = []
for compression in ("none", "bf16"):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    workload = Workload(
        name="tiny", family="mlp", task_input="64", module=module,
        make_batch=lambda samples, device: torch.ones(samples, 64),
        compute_loss=lambda module, batch: module(batch).square().mean(),
        make_optimizer=OPTIMIZERS["sgd_momentum"], optimizer_name="sgd_momentum",
    )
    result = TimedLoop(
        workload, apply_precision(PRECISIONS["fp32"], module, device=torch.device("cpu")),
        device=torch.device("cpu"), world_size=2, batch_size=2, accumulation_steps=1,
        limits=MeasurementLimits(warmup_steps=3, measured_steps=3, seconds_per_cell=5.0),
        options=RunOptions(compression=compression),
    ).run()
    last = result.synced[-1]
    results.append([sum(last.buckets), last.communication_s, result.isolated_communication_s,
                  all(step.buckets == last.buckets for step in result.synced),
                  last.last_landing_s, last.last_backward_s])

formats = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
averaged = find_averaged(formats, device=torch.device("cpu"))
equal = {}
for dtype in formats:
    gradients = []
    for hooked in (False, True):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).to(dtype)
        parallel = DistributedDataParallel(module)
        if hooked:
            parallel.register_comm_hook(FlightLog(HostClock(), 2, averaged=averaged), log_bucket)
        torch.manual_seed(rank)
        # biases of the last layer get 40,000 on each rank: their sum overflows in fp16
        loss = parallel(torch.randn(5, 64, dtype=dtype)).sum(dim=0) * 8000
        loss.sum().backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    equal[str(dtype)] = [dtype in averaged, all(map(torch.equal, *gradients)), float(gradients[1][-1][0])]
results.append(equal)
with open(f"{folder}/{rank}.json", "w") as file:
    file.write(json.dumps(results))
dist.barrier()
os._exit(0)  # as ranks end: gloo may abort during its teardown
"""


def test_two_ranks_send_what_ddp_sends_and_half_as_much_when_gradients_are_compressed(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", PAIR, str(tmp_path), str(rank)], env=environment) for rank in range(2)
    ]
    assert [process.wait(120) for process in ranks] == [0, 0]
    plain, compressed, equal = json.loads((tmp_path / "0.json").read_text())
    parameters = 64 * 64 + 64 + 64 * 8 + 8
    assert (plain[0], compressed[0]) == (4 * parameters, 2 * parameters)
    for _, in_flight_s, alone_s, same_buckets, landing_s, backward_s in (plain, compressed):
        assert min(in_flight_s, alone_s) > 0
        assert same_buckets
        # The backward pass returns when its last bucket has landed.
        assert 0 < landing_s <= backward_s
    # Bit for bit the result of DDP without a hook, and fp16 is divided before it is summed.
    assert equal == {
        "torch.float32": [True, True, 40_000.0],
        "torch.float64": [True, True, 40_000.0],
        "torch.bfloat16": [True, True, 39_936.0],
        "torch.float16": [False, True, 40_000.0],
    }
