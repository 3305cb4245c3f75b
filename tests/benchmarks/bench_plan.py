"""How long the plan of 10,000 cells takes and how much memory; run: python tests/benchmarks/bench_plan.py

Prints one JSON object: seconds of reading the campaign, planning and ordering it, and the peak of the process's memory.
"""

import json
import tempfile
import time
from pathlib import Path

from precision_time.flows.planning.order import order_cells
from precision_time.flows.planning.plan import plan_campaign
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.tests.made_up_machine import make_machine


def _peak_memory_bytes() -> int:
    """Of this program alone; getrusage also counts the process that started it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def measure() -> dict[str, float | int]:
    """All figures by name."""
    machine = make_machine(64)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        spec = CampaignSpec.model_validate(
            {
                "name": "wide",
                "models": ["mlp", "gpt2_mini", "resnet50", "vit_tiny", "bert_mini"],
                "precisions": ["fp32", "amp_bf16", "bf16", "amp_fp16"],
                "gpus": list(range(1, 11)),
                "batch_sizes": list(range(1, 51)),
                "data": folder,
            }
        )
        read = time.perf_counter()
        plan = plan_campaign(spec, probe=lambda wanted: machine)
        planned = time.perf_counter()
        order_cells([cell.cell for cell in plan.cells])
        ordered = time.perf_counter()
    return {
        "cells": len(plan.cells),
        "read_s": round(read - started, 3),
        "plan_s": round(planned - read, 3),
        "of_it_order_s": round(ordered - planned, 3),
        "peak_memory_bytes": _peak_memory_bytes(),
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
