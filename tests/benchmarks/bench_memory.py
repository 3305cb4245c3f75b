"""Peak memory of real training steps on a CPU against the estimate; run: python tests/benchmarks/bench_memory.py [all]

Prints for each model, precision and batch: the peak of torch's CPU allocator over three steps, by the profiler's memory
events; the growth of the process's high-water mark (VmHWM) in steps after a first small one, which also counts the
allocations of oneDNN; and the estimate from the walk. The walk follows the casts and kernels of CUDA, while the
measured amp_bf16 steps have the CPU's casts: layer norms stay in 16 bit. ``all`` adds resnet50 and bert_base. The last
lines give the share of the public table's rows that the estimate would refuse.
"""

import contextlib
import ctypes
import gc
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

MODELS = ("resnet18", "vit_tiny", "bert_mini", "gpt2_mini", "mlp")
LARGE_MODELS = ("resnet50", "bert_base")
PRECISIONS = ("fp32", "amp_bf16")
BATCHES = (8, 32)
STEPS = 3
#: Bytes from which malloc maps a block by itself and frees it at once, so that resident memory follows allocations.
MAPPED_FROM = "65536"


def run_steps(name: str, precision: str, *, batch_size: int, steps: int) -> None:
    """``steps`` training steps of a named model, as campaigns run them."""
    import torch

    from precision_time.tasks.workloads import build_workload

    workload = build_workload(name)
    optimizer = workload.make_optimizer(workload.module.parameters())
    batch = workload.make_batch(batch_size, "cpu")
    workload.module.train()
    mixed = precision == "amp_bf16"
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16) if mixed else contextlib.nullcontext():
            loss = workload.compute_loss(workload.module, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def measure_allocated(name: str, precision: str, *, batch_size: int) -> int:
    """Peak bytes of torch's CPU allocator, from the build of the module to the last step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run_steps(name, precision, batch_size=batch_size, steps=STEPS)
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held_bytes = peak_bytes = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, held_bytes)
    return peak_bytes


def _read_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure_resident(name: str, precision: str, *, batch_size: int) -> int:
    """Growth of the largest resident size over the steps; a small step before loads code and fills caches."""
    import torch

    torch.set_num_threads(1)
    run_steps(name, precision, batch_size=2, steps=1)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = _read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM (proc(5))
    run_steps(name, precision, batch_size=batch_size, steps=STEPS)
    return _read_status("VmHWM") - before


def measure_apart(kind: str, name: str, precision: str, *, batch_size: int) -> int:
    """The measurement ``kind`` (``allocated`` or ``resident``) in a process of its own."""
    command = [sys.executable, __file__, kind, name, precision, str(batch_size)]
    thresholds = {"MALLOC_MMAP_THRESHOLD_": MAPPED_FROM, "MALLOC_TRIM_THRESHOLD_": MAPPED_FROM}
    result = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | thresholds | {"OMP_NUM_THREADS": "1"}
    )
    return int(result.stdout.split()[-1])


def estimate_steps(name: str) -> dict[tuple[str, int], float]:
    """Estimated bytes by precision and batch, from a walk of the named model."""
    import dataclasses

    from precision_time.predictor.closed_form.memory import estimate_memory
    from precision_time.predictor.setup.hardware import find_hardware
    from precision_time.predictor.setup.precision import parse_precision
    from precision_time.predictor.setup.training_setup import TrainingSetup
    from precision_time.predictor.walking.walk_module import walk_module
    from precision_time.tasks.workloads import build_workload, count_card

    built = build_workload(name)
    walks = walk_module(built.module, lambda samples: built.make_batch(samples, "cpu"), loss_of=built.compute_loss)
    workload = dataclasses.replace(count_card(built, name=name), walks=walks)
    return {
        (precision, batch): estimate_memory(
            TrainingSetup(
                workload=workload,
                hardware=find_hardware("cpu"),
                precision=parse_precision(precision),
                world_size=1,
                nodes=1,
                batch_size=batch,
            )
        ).total_bytes
        for precision in PRECISIONS
        for batch in BATCHES
    }


def compare_steps(models: tuple[str, ...]) -> None:
    """Print measured and estimated peaks."""
    print("model      precision batch  allocated    resident    estimate MB, error of the estimate")
    errors: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for name in models:
        for (precision, batch), estimate in estimate_steps(name).items():
            allocated = measure_apart("allocated", name, precision, batch_size=batch)
            resident = measure_apart("resident", name, precision, batch_size=batch)
            errors[precision].append(estimate / allocated - 1)
            megabytes = " ".join(f"{size / 1e6:>11.1f}" for size in (allocated, resident, estimate))
            print(f"{name:<10} {precision:<9} {batch:>5}  {megabytes} {errors[precision][-1]:+.1%}", flush=True)
    for precision, signed in errors.items():
        sizes = [abs(error) for error in signed]
        print(f"{precision}: mean {statistics.mean(sizes):.1%}, largest {max(sizes):.1%} of {len(sizes)}")


def refuse_rows() -> None:
    """Print the share of rows of the public table, which all ran, that the estimate would refuse."""
    from precision_time.predictor.closed_form.memory import estimate_memory
    from precision_time.predictor.rows.observations import observe_table
    from precision_time.predictor.rows.public_table import load_public_table

    observations, _ = observe_table(load_public_table().kept)
    rows: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    far = 0
    for observation in observations:
        estimate = estimate_memory(observation.setup)
        rows[observation.measurement.source] += 1
        refused[observation.measurement.source] += not estimate.fits
        far += estimate.total_bytes > 1.2 * estimate.device_bytes
    total = sum(rows.values())
    print(f"rows refused: {sum(refused.values()) / total:.1%} of {total}; by more than 20 %: {far / total:.1%}")
    for source, count in refused.most_common(8):
        print(f"  {source}: {count} of {rows[source]}")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] in (["allocated"], ["resident"]):
        measure = measure_allocated if arguments[0] == "allocated" else measure_resident
        print(measure(arguments[1], arguments[2], batch_size=int(arguments[3])))
    else:
        compare_steps(MODELS + (LARGE_MODELS if arguments == ["all"] else ()))
        refuse_rows()
