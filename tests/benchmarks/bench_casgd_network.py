"""CA-SGD over a real network stack: two MPI ranks in network namespaces, joined by a relay between TUN devices.

    python tests/benchmarks/bench_casgd_network.py [--delays-us 0 200 1000] [--batch-size 16]

A report without assertions, as one JSON object. Every packet goes through the kernel's TCP of both namespaces and waits
``delay`` in a small relay in user space (a stand-in for netem if the kernel lacks it); the real time of a sum is
measured and printed. The two ranks and the relay share the machine's cores, so jitter is that of a busy machine. Needs
root, /dev/net/tun, `ip` of iproute2, mpi4py and mpich; without them it says so and ends well.
"""

import argparse
import contextlib
import fcntl
import heapq
import itertools
import json
import math
import os
import select
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

NAMESPACES = ("casgd-bench-a", "casgd-bench-b")
DEVICE = "casgd0"  # the same name in both namespaces: ranks share one environment
ADDRESSES = ("10.77.0.1", "10.77.0.2")
MTU = 65000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def find_obstacle() -> str | None:
    """The reason why this cannot run here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is missing"
    if find_mpiexec() is None:
        return "mpiexec is missing: pip install 'precision-time[mpi]'"
    probe = subprocess.run(["ip", "netns", "add", NAMESPACES[0]], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"no network namespace can be made: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", NAMESPACES[0]], check=True)
    return None


def find_mpiexec() -> str | None:
    return shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


def open_tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22s", name.encode(), _IFF_TUN | _IFF_NO_PI, b""))
    return descriptor


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def joined_namespaces(delay_s: float) -> Iterator[None]:
    """Two namespaces with one TUN device each, and a relay process between them."""
    relay = None
    descriptors: list[int] = []
    try:
        for side, (namespace, address) in enumerate(zip(NAMESPACES, ADDRESSES, strict=True)):
            name = f"casgd-tun{side}"
            ip("netns", "add", namespace)
            descriptors.append(open_tun(name))
            ip("link", "set", name, "netns", namespace, "name", DEVICE)
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", DEVICE)
            ip("-n", namespace, "link", "set", DEVICE, "mtu", str(MTU), "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        command = [sys.executable, __file__, "--relay", str(delay_s), *map(str, descriptors)]
        relay = subprocess.Popen(command, pass_fds=descriptors)
        yield
    finally:
        if relay is not None:
            relay.terminate()
            relay.wait()
        for descriptor in descriptors:
            os.close(descriptor)
        for namespace in NAMESPACES:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def run_relay(delay_s: float, ends: Sequence[int]) -> None:
    """Move packets from each end to the other, ``delay_s`` after they came, until terminated."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    count = itertools.count()
    held: list[tuple[float, int, int, bytes]] = []
    while True:
        wait_s = max(0.0, held[0][0] - time.perf_counter()) if held else None
        for end in select.select(ends, [], [], wait_s)[0]:
            try:
                while packet := os.read(end, MTU + 64):
                    heapq.heappush(held, (time.perf_counter() + delay_s, next(count), other[end], packet))
            except BlockingIOError:
                pass
        while held and held[0][0] <= time.perf_counter():
            _, _, end, packet = heapq.heappop(held)
            with contextlib.suppress(OSError):  # a full or closed device drops the packet, and TCP sends it again
                os.write(end, packet)


def run_ranks(options: argparse.Namespace) -> dict[str, Any]:
    """Run both ranks under mpiexec, each in its namespace; returns the report of rank 0."""
    rank = [sys.executable, __file__, "--rank"]
    rank += ["--batch-size", str(options.batch_size), "--columns", str(options.columns)]
    enter = f'if [ "$PMI_RANK" = 0 ]; then n={NAMESPACES[0]}; else n={NAMESPACES[1]}; fi; exec ip netns exec $n "$@"'
    command = [find_mpiexec() or "mpiexec", "-n", "2", "sh", "-c", enter, "sh", *rank]
    network = {
        "MPIR_CVAR_NOLOCAL": "1",  # ranks of one host name would talk through shared memory
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": DEVICE,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, env={**os.environ, **network}, capture_output=True, text=True, timeout=240, check=False
    )
    if done.returncode:
        return {"error": done.stderr[-1500:]}
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def run_rank(arguments: argparse.Namespace) -> None:
    from precision_time.casgd.ca_sgd import run_ca_sgd
    from precision_time.casgd.mpi import MpiCommunicator
    from precision_time.casgd.objectives import LOGISTIC
    from precision_time.casgd.plan import plan
    from precision_time.casgd.problem import Options, Problem, Schedule

    comm = MpiCommunicator(deadline_s=60.0)
    sums = []
    for _ in range(60):
        comm.barrier()
        began = time.perf_counter()
        comm.sum(np.ones(arguments.batch_size, dtype=np.float32))
        # The larger of both ranks, because the last rank to leave the barrier does not wait for the other.
        sums.append(max(comm.gather((time.perf_counter() - began) * 1e6)))
    sums.sort()
    half = arguments.columns // 2
    x = np.random.default_rng(comm.rank).standard_normal((2048, half if comm.rank else arguments.columns - half))
    y = np.where(np.random.default_rng(9).random(2048) < 0.5, -1.0, 1.0)
    problem = Problem(features=x.astype(np.float32), targets=y, objective=LOGISTIC)
    options = Options(batch_size=arguments.batch_size, epochs=1, schedule=Schedule(eta0=1e-3))
    planned = plan(problem, options, comm=comm, largest_s=32)
    times: dict[int, list[float]] = {2**k: [] for k in range(6)}
    for _ in range(3):
        for s, measured_us in times.items():
            comm.barrier()
            solution = run_ca_sgd(problem, replace(options, s=s), comm=comm)
            measured_us.append(max(comm.gather(sum(solution.seconds.values()) / solution.steps * 1e6)))
    steps_us = {s: statistics.median(measured_us) for s, measured_us in times.items()}
    best = min(steps_us, key=steps_us.__getitem__)
    report = {
        "sum_us": {"p10": sums[6], "median": sums[30], "p90": sums[54]},
        "planned_s": planned.s,
        "alpha_us": planned.alpha_s * 1e6,
        "fit_error": planned.error,
        "best_s": best,
        "above_best": steps_us[planned.s] / steps_us[best] - 1,
        "speedup_over_sgd": steps_us[1] / steps_us[planned.s],
        "step_us": {s: [min(measured_us), steps_us[s], max(measured_us)] for s, measured_us in times.items()},
        "predicted_step_us": planned.seconds_per_epoch / planned.steps_per_epoch * 1e6,
    }
    if comm.rank == 0:
        print(json.dumps(report), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delays-us", type=float, nargs="+", default=[0.0, 200.0, 1000.0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--columns", type=int, default=28)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--relay", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.relay:
        run_relay(float(options.relay[0]), [int(word) for word in options.relay[1:]])
        return
    if options.rank:
        run_rank(options)
        return
    obstacle = find_obstacle()
    if obstacle is not None:
        print(json.dumps({"not run": obstacle}))
        return
    results = []
    for delay_us in options.delays_us:
        if not (math.isfinite(delay_us) and delay_us >= 0):
            parser.error("a delay is a number of microseconds, 0 or above")
        with joined_namespaces(delay_us * 1e-6):
            results.append({"delay_us_one_way": delay_us, **run_ranks(options)})
    report = {"batch_size": options.batch_size, "columns": options.columns, "ranks": 2, "runs": results}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
