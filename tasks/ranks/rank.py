"""One rank of a cell in its own process, ``python -m precision_time.tasks.ranks.rank JOB RANK``: train, time, write."""

import ipaddress
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precision_time.predictor.setup.precision import PRECISIONS, parse_precision
from precision_time.predictor.workloads.workload import known_workloads
from precision_time.storage.errors import PrecisionTimeError, PrecisionUnsupportedError
from precision_time.storage.schema import IterationTiming
from precision_time.tasks.process_ties import end_with_parent
from precision_time.tasks.ranks.code_versions import digest_code, find_tool_version
from precision_time.tasks.ranks.job import RankJob
from precision_time.tasks.ranks.refusals import (
    CellRefusedError,
    EnvironmentChangedError,
    LossNotFiniteError,
    refuse_cell,
)

if TYPE_CHECKING:
    import torch

    from precision_time.tasks.ranks.chrome_trace import TraceSample
    from precision_time.tasks.ranks.timed_loop import LoopResult, StepTimes

__all__ = [
    "PARENT_VARIABLE",
    "main",
    "use_interface_of",
    "use_loopback",
]

#: Environment variable with the process id of the worker or fork server that started the rank.
PARENT_VARIABLE = "PRECISION_TIME_PARENT"

#: Words of gloo and NCCL for the loss of another rank.
PEER_LOST = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "remote process exited",
    "socket closed",
    "timed out wait",
)
OUT_OF_MEMORY = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "out of memory", "not enough memory")

#: Every rank builds the same weights by it, and by the numbers after it a batch of its own.
SEED = 20_260


def main(job_path: str, rank: int) -> None:
    """Run one rank and end the process, with exit code 0 only if its fragment is written.

    ``os._exit`` skips the teardown of process groups and DDP, which may hang.
    """
    _end_with_parent()
    job = RankJob.from_json(Path(job_path).read_text(encoding="utf-8"))
    code = 0
    try:
        _limit_memory(job)
        _run(job, rank)
    except BaseException as error:
        code = 1
        traceback.print_exc()
        report = describe_failure(error, precision=job.cell.precision)
        _write_whole(job.failure_path(rank), report | {"failed_at": time.time()})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    end_with_parent(signal.SIGKILL)
    # The parent may have died before the line above took effect.
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)


def _limit_memory(job: RankJob) -> None:
    # RLIMIT_AS would also count memory that torch and CUDA only reserve; RLIMIT_DATA counts writable private memory.
    limit = job.limits.memory_limit_bytes
    if limit is not None and job.environment.device_type == "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def describe_failure(error: BaseException, *, precision: str) -> dict[str, Any]:
    """Cause (a word of ``CellOutcome``), message, and whether ``error`` is only the loss of another rank."""
    text = str(error)
    lower = text.casefold()
    cause = "exception"
    kind = {"fp16": "'Half'", "bf16": "'BFloat16'"}.get(
        PRECISIONS[precision].compute if precision in PRECISIONS else ""
    )
    if isinstance(error, PrecisionUnsupportedError) or (kind and "not implemented for" in text and kind in text):
        cause = "precision-unsupported"
    elif isinstance(error, CellRefusedError):
        cause = error.cause
    elif type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        cause = "option-unsupported"  # torch.compile fails only in the first step, ...
    elif "`fused=True` requires" in text:
        cause = "option-unsupported"  # ... and there torch checks the parameters of its fused optimizers
    elif isinstance(error, LossNotFiniteError):
        cause = "nan loss"
    elif isinstance(error, EnvironmentChangedError):
        cause = "environment changed"
    elif isinstance(error, MemoryError) or any(phrase in lower for phrase in OUT_OF_MEMORY):
        cause = "memory-limit"
    message = text if isinstance(error, PrecisionTimeError) else f"{type(error).__name__}: {text}"
    peer_lost = isinstance(error, RuntimeError) and any(phrase in lower for phrase in PEER_LOST)
    return {"cause": cause, "message": message, "peer_lost": peer_lost}


def _write_whole(path: Path, values: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(values), encoding="utf-8")
    temporary.replace(path)


def _run(job: RankJob, rank: int) -> None:
    import torch

    from precision_time.storage.timings import write_fragment
    from precision_time.tasks.ranks.apply_precision import apply_precision, check_switches
    from precision_time.tasks.ranks.chrome_trace import sample_trace
    from precision_time.tasks.ranks.timed_loop import TimedLoop
    from precision_time.tasks.workloads import build_workload, count_card

    cell = job.cell
    refused = refuse_cell(cell)
    if refused is not None:
        raise CellRefusedError(refused[1], cause=refused[0])
    check_environment(job, torch_version=torch.__version__, cuda_version=torch.version.cuda or "")
    torch.set_num_threads(job.threads_per_rank)
    device = torch.device("cuda:0" if job.environment.device_type == "cuda" else "cpu")
    torch.manual_seed(SEED)
    code_sha256 = digest_code(cell.model)
    workload = build_workload(cell.model)
    if rank == 0 and cell.model not in known_workloads():
        _write_whole(job.card_path, count_card(workload, name=cell.model).to_dict())
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if job.limits.memory_limit_bytes is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, job.limits.memory_limit_bytes / total), device)
    workload.module.to(device)
    policy = apply_precision(parse_precision(cell.precision), workload.module, device=device)
    params = sum(parameter.numel() for parameter in workload.module.parameters() if parameter.requires_grad)
    if cell.world_size > 1:
        _join(job, rank, device=device)
    torch.manual_seed(SEED + 1 + rank)
    loop = TimedLoop(
        workload,
        policy,
        device=device,
        world_size=cell.world_size,
        batch_size=cell.per_gpu_batch_size,
        accumulation_steps=cell.gradient_accumulation_steps,
        limits=job.limits,
        options=cell,
        ranks_here=cell.world_size // cell.nodes,
        cores=job.threads_per_rank * (cell.world_size // cell.nodes),
    )
    result = loop.run()
    check_switches(policy, device=device)
    sample = None
    if job.trace is not None:
        sample = sample_trace(loop, job.trace, path=job.trace_path if rank == 0 else None)
    rows = make_rows(
        job,
        rank,
        result=result,
        task_input=workload.task_input,
        effective_precision=policy.effective,
        model_params=params,
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        cudnn_allow_tf32=torch.backends.cudnn.allow_tf32,
        code_sha256=code_sha256,
        sample=sample,
    )
    write_fragment(job.fragment_path(rank), rows)


def check_environment(job: RankJob, *, torch_version: str, cuda_version: str) -> None:
    """Raise ``EnvironmentChangedError`` when this worker runs other software than the plan states: rows would mix.

    A version that the plan does not state is not checked.
    """
    planned = job.environment
    for name, version, expected in (
        ("torch", torch_version, planned.framework_version),
        ("CUDA", cuda_version, planned.cuda_version),
    ):
        if expected and version != expected:
            raise EnvironmentChangedError(
                f"{name} {version or 'none'} runs here, but the campaign was planned with {expected}"
            )


def _join(job: RankJob, rank: int, *, device: "torch.device") -> None:
    """Join the other ranks through a file in scratch, which unlike a port cannot be taken by another process."""
    import torch.distributed as dist

    if job.cell.nodes == 1:
        use_loopback()
    elif job.hosts:
        use_interface_of(job.hosts[rank])
    world_size = job.cell.world_size
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(Path(job.scratch) / "rendezvous"), world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=job.limits.timeout_s),
    )


def use_loopback() -> None:
    """Let gloo use the loopback interface, unless the user named another.

    It would look up the address of the host's own name, which containers often lack.
    """
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def use_interface_of(host: str) -> None:
    """Let gloo and NCCL use the interface that has the address ``host`` here, unless the user named another.

    gloo would look up the address of the host's own name, which often reaches this host alone (Debian writes
    127.0.1.1), and NCCL would take the first interface that is up. They still do so where no interface has the address,
    as behind address translation.
    """
    name = _interface_of(host)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        # Without the equals sign NCCL takes every interface whose name begins like this: eth1 and eth10.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _interface_of(host: str) -> str | None:
    import psutil

    try:
        addresses = {ipaddress.ip_address(str(entry[4][0]).split("%")[0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    # The loopback interface lists one address and has the whole network.
    is_loopback = any(address.is_loopback for address in addresses)
    interfaces: dict[str, Any] = psutil.net_if_addrs()
    for name, entries in interfaces.items():
        texts = [entry.address.split("%")[0] for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        for address in map(ipaddress.ip_address, texts):
            if address in addresses or (is_loopback and address.is_loopback):
                return name
    return None


def make_rows(
    job: RankJob,
    rank: int,
    *,
    result: "LoopResult",
    task_input: str,
    effective_precision: str,
    model_params: int,
    float32_matmul_precision: str,
    cudnn_allow_tf32: bool | None = None,
    code_sha256: str | None = None,
    sample: "TraceSample | None" = None,
) -> list[IterationTiming]:
    """The rows of one rank: warm-up steps, then measured ones, each beside its partner without synchronisation."""
    shared = {
        **job.row_columns(),
        "rank": rank,
        "task_input": task_input,
        "effective_precision": effective_precision,
        "model_params": model_params,
        "threads_per_rank": job.threads_per_rank,
        "float32_matmul_precision": float32_matmul_precision,
        "cudnn_allow_tf32": cudnn_allow_tf32,
        "code_sha256": code_sha256,
        "tool_version": find_tool_version(),
        "is_steady": result.steady,
    }
    if sample is not None:
        shared |= {"trace_truncated": sample.truncated, "traced_exposed_s": sample.exposed_s}
    unmeasured = dict.fromkeys(("compute_time_s", "communication_time_s", "exposed_communication_s"))
    warmup = [
        _step_columns(times) | {"is_warmup": True, "energy_reason": "warm-up is not counted", **unmeasured}
        for times in result.warmup
    ]
    once = {
        "is_warmup": False,
        "isolated_communication_s": result.isolated_communication_s,
        "energy_j": result.energy_j,
        "energy_reason": result.energy_reason,
    }
    measured = [
        _step_columns(times) | _paired_columns(times, local, is_alone=job.cell.world_size == 1) | once
        for times, local in zip(result.synced, result.local, strict=True)
    ]
    return [IterationTiming(**shared, **columns, step=step) for step, columns in enumerate(warmup + measured)]


def _step_columns(times: "StepTimes") -> dict[str, Any]:
    return {
        "iteration_time_s": times.iteration_s,
        "forward_time_s": times.forward_s,
        "backward_time_s": times.backward_s,
        "optimizer_time_s": times.optimizer_s,
        "bucket_count": len(times.buckets),
        "bucket_bytes": sum(times.buckets),
        "bucket_sizes": ",".join(map(str, times.buckets)),
        "loss_scale": times.loss_scale,
        "step_skipped": times.step_skipped,
        "peak_memory_bytes": times.peak_memory_bytes,
        "recorded_at": times.recorded_at,
        **times.conditions.row_columns(),
    }


def _paired_columns(times: "StepTimes", local: "StepTimes", *, is_alone: bool) -> dict[str, Any]:
    """Columns of a measured step and its partner without synchronisation; one rank alone exposes nothing."""
    return {
        "compute_time_s": local.iteration_s,
        "communication_time_s": times.communication_s,
        "exposed_communication_s": 0.0 if is_alone else times.backward_s - local.backward_s,
        "exposed_after_backward_s": 0.0 if is_alone else _exposed_after(times, local),
    }


def _exposed_after(times: "StepTimes", local: "StepTimes") -> float | None:
    """Seconds by which the last bucket landed after the backward pass alone would have ended."""
    if times.last_landing_s is None or local.last_backward_s is None:
        return None
    return times.last_landing_s - local.last_backward_s


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
