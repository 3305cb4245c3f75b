import gzip
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from precision_time.storage.errors import InputError, PrecisionUnsupportedError
from precision_time.storage.schema import IterationTiming
from precision_time.storage.timings import read_table
from precision_time.tasks.ranks.conditions import Conditions
from precision_time.tasks.ranks.device_state import GpuState
from precision_time.tasks.ranks.job import MeasurementLimits, TraceLimits
from precision_time.tasks.ranks.rank import (
    PARENT_VARIABLE,
    check_environment,
    describe_failure,
)
from precision_time.tasks.ranks.refusals import CellRefusedError, EnvironmentChangedError, LossNotFiniteError
from precision_time.tasks.ranks.timed_loop import LoopResult
from precision_time.tests.tasks import builders
from precision_time.tests.tasks.builders import CELL, ENVIRONMENT, rows_of


class CompilerError(RuntimeError):
    """An error as inductor raises it."""

    __module__ = "torch._inductor.exc"


def make_job(scratch, *, world_size):
    return builders.make_job(scratch, replace(CELL, world_size=world_size))


def make_step(*, backward_s, **changes):
    return builders.make_step(iteration_s=1.0 + backward_s, forward_s=0.75, backward_s=backward_s, **changes)


def test_exposed_communication_is_the_backward_pass_with_minus_without_synchronisation(tmp_path):
    synced = [make_step(backward_s=seconds, communication_s=0.5, buckets=(4, 8)) for seconds in (3.0, 1.5)]
    local = [make_step(backward_s=2.0), make_step(backward_s=2.0)]
    warmup = [make_step(backward_s=9.0)]
    result = LoopResult(warmup=warmup, synced=synced, local=local, steady=True)
    cold, first, second = rows_of(make_job(tmp_path, world_size=2), result)
    assert [row.step for row in (cold, first, second)] == [0, 1, 2]
    assert (cold.is_warmup, cold.compute_time_s, cold.communication_time_s, cold.exposed_communication_s) == (
        True,
        None,
        None,
        None,
    )
    assert (first.compute_time_s, first.communication_time_s, first.exposed_communication_s) == (3.0, 0.5, 1.0)
    assert (first.bucket_count, first.bucket_bytes, first.bucket_sizes) == (2, 12, "4,8")
    assert second.exposed_communication_s == -0.5  # noise is stored as it was measured


def test_the_other_exposed_communication_is_the_last_landing_after_the_backward_pass_alone(tmp_path):
    # Two micro-steps: only the backward pass of the last one counts, on either side.
    synced = [make_step(backward_s=5.0, last_backward_s=3.5, last_landing_s=landing) for landing in (3.25, 1.75, None)]
    local = [make_step(backward_s=4.0, last_backward_s=2.0)] * 3
    result = LoopResult(warmup=synced[:1], synced=synced, local=local, steady=True)
    cold, *measured = rows_of(make_job(tmp_path, world_size=2), result)
    assert cold.exposed_after_backward_s is None
    assert [row.exposed_after_backward_s for row in measured] == [1.25, -0.25, None]
    assert [row.exposed_communication_s for row in measured] == [1.0] * 3


def test_a_row_says_what_measured_it_and_what_is_not_known_is_null(tmp_path):
    step = make_step(backward_s=2.0)
    result = LoopResult(warmup=[], synced=[step], local=[step], steady=True)
    job = make_job(tmp_path, world_size=1)
    (row,) = rows_of(job, result, cudnn_allow_tf32=True, code_sha256="c0de")
    assert (row.cudnn_allow_tf32, row.code_sha256, row.input_mode) == (True, "c0de", "synthetic")
    assert row.tool_version == importlib.metadata.version("precision-time")
    assert row.schema_version == 3
    (silent,) = rows_of(job, result)
    assert (silent.cudnn_allow_tf32, silent.code_sha256) == (None, None)


def test_one_rank_exposes_nothing(tmp_path):
    step = make_step(backward_s=2.0)
    result = LoopResult(warmup=[], synced=[step], local=[step], steady=False)
    (row,) = rows_of(make_job(tmp_path, world_size=1), result)
    assert (row.compute_time_s, row.communication_time_s, row.exposed_communication_s) == (3.0, 0.0, 0.0)
    assert (row.bucket_sizes, row.exposed_after_backward_s) == ("", 0.0)
    assert not row.is_steady


@pytest.mark.parametrize(
    ("error", "precision", "cause", "peer_lost"),
    [
        (ValueError("no"), "fp32", "exception", False),
        (MemoryError(), "fp32", "memory-limit", False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), "fp32", "memory-limit", False),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "fp32", "memory-limit", False),
        (RuntimeError("\"addmm\" not implemented for 'Half'"), "fp16", "precision-unsupported", False),
        (RuntimeError("\"addmm\" not implemented for 'Half'"), "fp32", "exception", False),
        (PrecisionUnsupportedError("no tf32"), "tf32", "precision-unsupported", False),
        (RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]"), "fp32", "exception", True),
        (ConnectionResetError("Connection reset by peer"), "fp32", "exception", False),
        (CellRefusedError("no blocks to checkpoint"), "fp32", "option-unsupported", False),
        (CellRefusedError("no fsdp", cause="strategy-unsupported"), "fp32", "strategy-unsupported", False),
        (CompilerError("no compiler"), "fp32", "option-unsupported", False),
        (
            RuntimeError("`fused=True` requires all the params to be on supported devices"),
            "fp32",
            "option-unsupported",
            False,
        ),
        (LossNotFiniteError("the loss is nan"), "fp32", "nan loss", False),
        (EnvironmentChangedError("torch 2.13 runs here"), "fp32", "environment changed", False),
    ],
)
def test_a_failure_gets_the_cause_that_outcomes_use(error, precision, cause, peer_lost):
    report = describe_failure(error, precision=precision)
    assert (report["cause"], report["peer_lost"]) == (cause, peer_lost)


def test_our_own_errors_keep_their_words():
    error = InputError("a thing is wrong", got="1", expected="2")
    assert describe_failure(error, precision="fp32")["message"] == "a thing is wrong; got: 1; expected: 2"


def test_a_rank_whose_worker_is_gone_ends_without_working(tmp_path):
    job = make_job(tmp_path, world_size=1)
    (tmp_path / "job.json").write_text(job.to_json())
    command = [sys.executable, "-m", "precision_time.tasks.ranks.rank", str(tmp_path / "job.json"), "0"]
    ended = subprocess.run(command, env={**os.environ, PARENT_VARIABLE: "1"}, timeout=60, check=False)
    assert ended.returncode == 1
    assert not job.fragment_path(0).exists()
    assert not job.failure_path(0).exists()


OWN_MODELS = """
import torch
from precision_time.tasks.workloads import OPTIMIZERS, Workload

def build(compute_loss=lambda module, batch: module(batch).square().mean()):
    return Workload(
        name="own", family="mlp", task_input="8", module=torch.nn.Linear(8, 8), optimizer_name="sgd_momentum",
        make_batch=lambda samples, device: torch.ones(samples, 8, device=device), compute_loss=compute_loss,
        make_optimizer=OPTIMIZERS["sgd_momentum"],
    )

def turning():
    def compute_loss(module, batch):
        torch.backends.cudnn.allow_tf32 = True
        return module(batch).square().mean()
    return build(compute_loss)
"""


def run_own_model(folder, model, **changes):
    """A real rank with a model of the current folder: its job and its exit code."""
    (folder / "own_models_here.py").write_text(OWN_MODELS, encoding="utf-8")
    job = make_job(folder / "scratch", world_size=1)
    cell = replace(job.cell, model=f"own_models_here:{model}")
    limits = MeasurementLimits(warmup_steps=1, measured_steps=3, seconds_per_cell=5.0)
    job = replace(job, cell=cell, limits=limits, **changes)
    command = [sys.executable, "-m", "precision_time.tasks.ranks.rank", str(job.lay_out()), "0"]
    return job, subprocess.run(command, cwd=folder, timeout=120, check=False, capture_output=True).returncode


def test_a_rank_writes_down_its_switches_its_tool_and_the_source_of_its_model(tmp_path):
    job, code = run_own_model(tmp_path, "build", trace=TraceLimits(steps=2, max_bytes=2**26))
    assert code == 0
    assert gzip.decompress(job.trace_path.read_bytes()).lstrip().startswith(b"{")
    table = read_table(job.fragment_path(0).read_bytes(), IterationTiming)
    source = hashlib.sha256((tmp_path / "own_models_here.py").read_bytes()).hexdigest()
    expected = {"cudnn_allow_tf32": False, "float32_matmul_precision": "highest", "input_mode": "synthetic",
            "code_sha256": source, "tool_version": importlib.metadata.version("precision-time"), "bucket_sizes": "",
            "trace_truncated": False, "traced_exposed_s": None, "schema_version": 3}  # fmt: skip
    assert {name: set(table[name].to_pylist()) for name in expected} == {
        name: {value} for name, value in expected.items()
    }


def test_a_model_that_turns_tf32_on_while_it_trains_in_fp32_leaves_no_rows(tmp_path):
    job, code = run_own_model(tmp_path, "turning")
    assert code == 1
    assert not job.fragment_path(0).exists()
    report = json.loads(job.failure_path(0).read_text())
    assert report["cause"] == "precision-unsupported"
    assert "the model changed the TF32 switches" in report["message"]


def test_a_row_tells_the_options_the_conditions_and_what_was_measured_once(tmp_path):
    conditions = Conditions(
        load_average=3.5, other_cpu_share=0.25, steal_share=0.0, contended=True,
        gpu=GpuState(clock_hz=1e9, power_w=300.0, temperature_c=60.0, throttled=False, reasons="power cap"),
    )  # fmt: skip
    step = replace(make_step(backward_s=2.0), conditions=conditions)
    result = LoopResult(
        warmup=[step], synced=[step], local=[step], steady=True, isolated_communication_s=0.25, energy_j=7.0,
        energy_reason="",
    )  # fmt: skip
    job = make_job(tmp_path, world_size=2)
    job = replace(job, cell=replace(job.cell, checkpointing="full", compression="bf16"))
    cold, row = rows_of(job, result)
    assert (row.checkpointing, row.compression, row.compiled) == ("full", "bf16", False)
    assert (row.gpu_clock_hz, row.power_w, row.temperature_c) == (1e9, 300.0, 60.0)
    assert (row.throttled, row.throttle_reasons) == (False, "power cap")
    assert (row.load_average, row.other_cpu_share, row.steal_share, row.contended) == (3.5, 0.25, 0.0, True)
    assert (row.isolated_communication_s, row.energy_j, row.energy_reason) == (0.25, 7.0, "")
    assert (cold.isolated_communication_s, cold.energy_j) == (None, None)
    assert cold.energy_reason == "warm-up is not counted"


def test_a_worker_with_other_software_than_the_plan_does_not_measure(tmp_path):
    job = make_job(tmp_path, world_size=1)
    check_environment(job, torch_version="2.13", cuda_version="")  # the plan states none
    planned = replace(job, environment=replace(ENVIRONMENT, framework_version="2.12", cuda_version="12.6"))
    check_environment(planned, torch_version="2.12", cuda_version="12.6")
    with pytest.raises(EnvironmentChangedError, match=r"torch 2\.13 runs here, .* planned with 2\.12"):
        check_environment(planned, torch_version="2.13", cuda_version="12.6")
    with pytest.raises(EnvironmentChangedError, match="CUDA none"):
        check_environment(planned, torch_version="2.12", cuda_version="")
