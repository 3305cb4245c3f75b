"""The same cell by a bare torchrun script and by a campaign's engine, in turns (A-B-B-A): the ratio and its interval.

Run on an idle machine: python tests/benchmarks/compare_torchrun.py [ROUNDS] [MODEL] [BATCH]
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from scipy.stats import t as student

from precision_time.flows.clusters.cluster import Client, open_cluster
from precision_time.storage.schema import GridCell
from precision_time.tasks.gangs.record_cell import read_fragments
from precision_time.tasks.ranks.job import MeasurementLimits
from precision_time.tests.tasks.builders import ENVIRONMENT, profile_alone

RANKS, STEPS = 2, 40
#: The environment before a local cluster adds Dask's settings for its workers.
VARIABLES = dict(os.environ)


def time_bare(model: str, batch_size: int) -> float:
    """Median seconds of a step by torchrun."""
    threads = str(max(1, (os.cpu_count() or 1) // RANKS))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
               str(Path(__file__).with_name("bare_ddp.py")), model, str(batch_size), str(STEPS)]  # fmt: skip
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "MKL_NUM_THREADS": threads} | VARIABLES | {"OMP_NUM_THREADS": threads}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return statistics.median(json.loads(done.stdout.splitlines()[-1]))


def time_cell(model: str, batch_size: int, *, client: Client, scratch: Path) -> float:
    """Median over the steps of the slowest rank's seconds, by the engine."""
    receipt = profile_alone(
        GridCell(model=model, precision="fp32", world_size=RANKS, per_gpu_batch_size=batch_size),
        client=client,
        scratch=scratch,
        limits=MeasurementLimits(warmup_steps=10, measured_steps=STEPS, seconds_per_cell=120.0),
        environment=replace(ENVIRONMENT, cpu_cores=os.cpu_count() or 1),
    )
    if receipt.status != "recorded":
        raise RuntimeError(f"{receipt.cause}: {receipt.message}")
    steps: dict[int, float] = {}
    for row in read_fragments(receipt):
        if not row.is_warmup:
            steps[row.step] = max(steps.get(row.step, 0.0), row.iteration_time_s)
    return statistics.median(steps.values())


def main(rounds: int, model: str, batch_size: int) -> None:
    """Print both medians of each round, then the ratio of engine to bare with its 90 % interval."""
    logs = []
    with tempfile.TemporaryDirectory() as scratch, open_cluster("cpu", RANKS) as client:
        for number in range(rounds):
            timings = {
                "torchrun": lambda: time_bare(model, batch_size),
                "engine": lambda: time_cell(model, batch_size, client=client, scratch=Path(scratch)),
            }
            # Each is first as often as the other, so that a host that slows during a round favours neither.
            turns = sorted(timings, reverse=number % 2 == 0)
            seconds = {name: timings[name]() for name in turns}
            logs.append(math.log(seconds["engine"] / seconds["torchrun"]))
            print(f"round {number}:", *(f"{name} {1e3 * took:.1f} ms" for name, took in seconds.items()), flush=True)
    mean = statistics.fmean(logs)
    half = float(student.ppf(0.95, rounds - 1)) * statistics.stdev(logs) / math.sqrt(rounds)
    print(
        f"engine / torchrun {math.exp(mean):.3f} ({math.exp(mean - half):.3f} to {math.exp(mean + half):.3f} at 90 %)"
    )


if __name__ == "__main__":
    arguments = sys.argv[1:]
    main(
        int(arguments[0]) if arguments else 6,
        arguments[1] if len(arguments) > 1 else "vit_tiny",
        int(arguments[2]) if len(arguments) > 2 else 16,
    )
