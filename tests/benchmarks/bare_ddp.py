"""A training loop as people write it, for torchrun: DDP, no hooks; prints the seconds of each step, slowest rank.

torchrun --nproc-per-node 2 tests/benchmarks/bare_ddp.py MODEL BATCH STEPS
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from precision_time.tasks.ranks.rank import use_loopback
from precision_time.tasks.workloads import build_workload

WARMUP_STEPS = 10


def main(model: str, batch_size: int, steps: int) -> None:
    """Train ``model`` for ``steps`` after the warm-up; rank 0 prints a JSON list of seconds."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    use_loopback()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    workload = build_workload(model)
    module = DistributedDataParallel(workload.module.train())
    optimizer = workload.make_optimizer(module.parameters())
    batch = workload.make_batch(batch_size, torch.device("cpu"))
    seconds = []
    for step in range(WARMUP_STEPS + steps):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        workload.compute_loss(module, batch).backward()
        optimizer.step()
        if step >= WARMUP_STEPS:
            seconds.append(time.perf_counter() - began)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps(slowest.tolist()), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
