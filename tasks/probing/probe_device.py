"""Probe this machine in a fresh process: what it is, which precisions it runs, and how fast it computes."""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precision_time.predictor.setup.hardware import HardwareSpec, find_hardware, known_hardware
from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.storage.errors import InputError, PrecisionTimeError, UnknownNameError
from precision_time.storage.schema import Environment

if TYPE_CHECKING:
    import torch

__all__ = ["ProbeReport", "cpu_hardware_name", "probe_device"]

DEVICES = ("auto", "cpu", "cuda")

#: Time for importing torch on a busy machine, trying each precision and the all-reduce, beside the measuring itself.
STARTUP_S = 120.0
ALL_REDUCE_TIMEOUT_S = 20.0
#: Shares of the measuring time: matrix products, copies, launches.
PRODUCT_SHARE, COPY_SHARE, LAUNCH_SHARE = 0.7, 0.2, 0.1

PRODUCT_SIDES = (256, 512, 1024, 2048, 4096, 8192)
#: Larger than the caches of any CPU that trains.
COPY_BYTES = 2**28
LARGE_MESSAGE_BYTES = 2**23
SMALL_MESSAGE_BYTES = 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The facts of a machine that a plan needs; ``unsupported`` maps a precision to the reason.

    ``device_count`` is the number of ranks that fit on one host, ``worker_count`` the number that fit on all
    ``host_count`` hosts of a cluster together; None without a cluster.
    """

    environment: Environment
    device_count: int
    unsupported: dict[str, str]
    hardware: HardwareSpec
    worker_count: int | None = None
    host_count: int = 1

    @property
    def most_ranks(self) -> int:
        """How many ranks fit on all hosts together."""
        return max(1, self.device_count if self.worker_count is None else self.worker_count)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "environment": asdict(self.environment),
            "device_count": self.device_count,
            "worker_count": self.worker_count,
            "host_count": self.host_count,
            "unsupported": dict(self.unsupported),
            "hardware": self.hardware.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ProbeReport":
        """The inverse of ``to_dict``."""
        return cls(
            environment=Environment(**values["environment"]),
            device_count=values["device_count"],
            worker_count=values["worker_count"],
            host_count=values["host_count"],
            unsupported=values["unsupported"],
            hardware=HardwareSpec.from_dict(values["hardware"]),
        )


def probe_device(device: str = "auto", *, seconds: float = 3.0) -> ProbeReport:
    """Probe this machine in a subprocess, so that the caller never imports torch.

    ``device`` is ``cpu``, ``cuda`` or ``auto`` (a GPU if there is one). A CPU, and a GPU that the shipped table does
    not know, is measured for about ``seconds``. Raises ``InputError`` when the device is not there: a CPU never
    replaces a requested GPU.
    """
    if device not in DEVICES:
        raise InputError("device is not usable", got=repr(device), expected=f"one of {', '.join(DEVICES)}")
    # Like the ranks of a campaign: see tasks/processes/rank_process.py.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="precision-time-probe-") as folder:
        result = Path(folder) / "probe.json"
        command = [sys.executable, "-m", "precision_time.tasks.probing.probe_device", "--device", device,
                   "--json", str(result), "--seconds", str(seconds)]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=STARTUP_S + seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise PrecisionTimeError(
                "the probe of this machine did not end", got=f"{error.timeout:g} s", fix="look for a hung GPU driver"
            ) from error
        if done.returncode == InputError.exit_code and result.exists():
            raise InputError(**json.loads(result.read_text(encoding="utf-8")))
        if done.returncode != 0:
            raise PrecisionTimeError(
                "the probe of this machine failed",
                got=f"exit code {done.returncode}: {' | '.join(done.stderr.splitlines()[-3:])}",
                fix="install precision-time[campaign], and see whether python -c 'import torch' works",
            )
        return ProbeReport.from_dict(json.loads(result.read_text(encoding="utf-8")))


def cpu_hardware_name(cpu_model: str, cores: int) -> str:
    """``cpu-<model>-<cores>c``: lower case, words joined by dashes, without trade marks and clock."""
    plain = re.sub(r"\((?:r|tm)\)|@.*|\bcpu\b|\bprocessor\b", " ", cpu_model.casefold())
    words = re.findall(r"[a-z0-9.]+", plain)
    return "-".join(["cpu", *(words or ["unknown"]), f"{cores}c"])


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _cpu_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _driver_version(path: str = "/proc/driver/nvidia/version") -> str:
    """The version of NVIDIA's kernel module, the closed or the open one; blank without either."""
    with contextlib.suppress(OSError):
        text = Path(path).read_text(encoding="utf-8")
        match = re.search(r"Module\s+(?:for\s+\S+\s+)?(\d+(?:\.\d+)+)", text)
        return match[1] if match else ""
    return ""


def _probe(device: str, *, seconds: float) -> ProbeReport:
    import torch

    from precision_time.tasks.ranks.apply_precision import reason_unsupported

    has_gpu = torch.cuda.is_available() if device != "cpu" else False
    if device == "cuda" and not has_gpu:
        raise InputError(
            "no CUDA GPU can be used here",
            got=f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs",
            expected="a GPU, its driver, and a torch built for CUDA",
            fix="ask for --device cpu to measure the CPU, or repair the driver",
        )
    cpu_model, cores = _cpu_model(), _cpu_cores()
    common: dict[str, Any] = {"cpu_model": cpu_model, "cpu_cores": cores, "framework_version": torch.__version__}
    if has_gpu:
        probed = torch.device("cuda:0")
        hardware, count = _gpu_hardware(seconds=seconds), torch.cuda.device_count()
        environment = Environment(
            device_type="cuda", gpu=hardware.name, driver_version=_driver_version(),
            cuda_version=torch.version.cuda or "", backend="nccl", **common,
        )  # fmt: skip
    else:
        probed = torch.device("cpu")
        # Before torch starts threads, since they would not survive the fork.
        latency_s, link_bytes_per_s = _measure_all_reduce() if cores > 1 else (None, None)
        hardware, count = _cpu_hardware(cpu_model, cores, seconds=seconds), cores
        if latency_s is not None and link_bytes_per_s is not None:
            hardware = replace(hardware, all_reduce_latency_s=latency_s, link_bytes_per_s=link_bytes_per_s)
        environment = Environment(device_type="cpu", gpu=hardware.name, backend="gloo", **common)
    reasons = {name: reason_unsupported(policy, device=probed) for name, policy in PRECISIONS.items()}
    unsupported = {name: reason for name, reason in reasons.items() if reason is not None}
    return ProbeReport(environment=environment, device_count=count, unsupported=unsupported, hardware=hardware)


def _cpu_hardware(cpu_model: str, cores: int, *, seconds: float) -> HardwareSpec:
    """The CPU as measured. Its rates are those of all cores together, which the ranks of a cell share."""
    import torch

    generic = known_hardware()["cpu"]
    torch.set_num_threads(cores)
    device = torch.device("cpu")
    return replace(
        generic,
        name=cpu_hardware_name(cpu_model, cores),
        architecture=platform.machine(),
        memory_bytes=_memory_bytes(),
        memory_bytes_per_s=_copy_rate(device, seconds=COPY_SHARE * seconds),
        peak_flops_per_s=_product_rates(device, formats=("fp32", "bf16", "fp16"), seconds=PRODUCT_SHARE * seconds),
        gpus_per_node=cores,
        launch_overhead_s=_launch_overhead(device, seconds=LAUNCH_SHARE * seconds),
        note=f"measured by precision-time probe with torch {torch.__version__}",
    )


def _gpu_hardware(*, seconds: float) -> HardwareSpec:
    """The shipped entry of the GPU; an unknown GPU is measured, and gets the links of a plain PCIe card."""
    import torch

    name = torch.cuda.get_device_name(0)
    with contextlib.suppress(UnknownNameError):
        return find_hardware(name)
    properties = torch.cuda.get_device_properties(0)
    capability = float(f"{properties.major}.{properties.minor}")
    formats = ("fp32", "fp16", "tf32", "bf16") if capability >= 8.0 else ("fp32", "fp16")
    device = torch.device("cuda:0")
    return replace(
        known_hardware()["cpu"],
        name=name,
        kind="gpu",
        architecture=f"sm_{properties.major}{properties.minor}",
        compute_capability=capability,
        memory_bytes=properties.total_memory,
        memory_bytes_per_s=_copy_rate(device, seconds=COPY_SHARE * seconds),
        peak_flops_per_s=_product_rates(device, formats=formats, seconds=PRODUCT_SHARE * seconds),
        gpus_per_node=torch.cuda.device_count(),
        link="pcie4",
        link_bytes_per_s=find_hardware("a10").link_bytes_per_s,
        all_reduce_latency_s=find_hardware("a10").all_reduce_latency_s,
        launch_overhead_s=_launch_overhead(device, seconds=LAUNCH_SHARE * seconds),
        note=f"measured by precision-time probe with torch {torch.__version__}; its links are assumed to be PCIe 4",
    )


def _best_s(run: Callable[[], Any], device: "torch.device", *, seconds: float) -> float:
    """Seconds of the fastest run among those that fit into ``seconds``, after one that is not counted."""
    import torch

    def timed() -> float:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    timed()
    best, ends = timed(), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        best = min(best, timed())
    return best


def _product_rates(device: "torch.device", *, formats: tuple[str, ...], seconds: float) -> dict[str, float]:
    """FLOP/s (2 per multiply-add) of square matrix products in each format, the best over sizes that fit the time."""
    import torch

    dtypes = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    share = seconds / len(formats)
    rates: dict[str, float] = {}
    for form in formats:
        torch.set_float32_matmul_precision("high" if form == "tf32" else "highest")
        for side in PRODUCT_SIDES:
            factor = torch.rand(side, side, device=device).to(dtypes[form])
            took_s = _best_s(lambda factor=factor: torch.mm(factor, factor), device, seconds=0.0)  # type: ignore[misc]
            rates[form] = max(rates.get(form, 0.0), 2.0 * side**3 / took_s)
            # The next size takes eight times as long, and is run three times at least.
            if 8 * 3 * took_s > share / 2:
                break
        took_s = _best_s(lambda factor=factor: torch.mm(factor, factor), device, seconds=share / 2)  # type: ignore[misc]
        rates[form] = max(rates[form], 2.0 * side**3 / took_s)
    torch.set_float32_matmul_precision("highest")
    return rates


def _copy_rate(device: "torch.device", *, seconds: float) -> float:
    """Bytes per second, read plus written, of a copy inside the device's memory."""
    import torch

    source = torch.zeros(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * COPY_BYTES / _best_s(lambda: target.copy_(source), device, seconds=seconds)


def _launch_overhead(device: "torch.device", *, seconds: float) -> float:
    """Host seconds of one eager operation on a single value."""
    import torch

    value = torch.zeros(1, device=device)
    count = 1000

    def run() -> None:
        for _ in range(count):
            value.add_(1.0)

    return _best_s(run, device, seconds=seconds) / count


def _measure_all_reduce() -> tuple[float | None, float | None]:
    """(latency in s, bytes per second) of an all-reduce over two gloo ranks of this host; None if it failed.

    Two ranks: t = latency + S / B.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="precision-time-ranks-") as folder:
        ranks = [context.Process(target=_all_reduce_rank, args=(folder, rank), daemon=True) for rank in range(2)]
        for process in ranks:
            process.start()
        ends = time.monotonic() + ALL_REDUCE_TIMEOUT_S
        for process in ranks:
            process.join(max(0.0, ends - time.monotonic()))
            process.kill()
        with contextlib.suppress(OSError, ValueError):
            small_s, large_s = json.loads((Path(folder) / "seconds.json").read_text(encoding="utf-8"))
            return small_s, LARGE_MESSAGE_BYTES / max(large_s - small_s, 1e-9)
    return None, None


def _all_reduce_rank(folder: str, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from precision_time.tasks.ranks.rank import use_loopback

    torch.set_num_threads(1)
    use_loopback()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder) / "rendezvous"), 2),  # type: ignore[attr-defined]
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=ALL_REDUCE_TIMEOUT_S),
    )
    medians = []
    for size, repeats in ((SMALL_MESSAGE_BYTES, 100), (LARGE_MESSAGE_BYTES, 10)):
        message = torch.zeros(size // 4)
        times = []
        for _ in range(repeats + 2):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(message)
            times.append(time.perf_counter() - began)
        medians.append(statistics.median(times[2:]))
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(medians), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m precision_time.tasks.probing.probe_device")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    try:
        report = _probe(options.device, seconds=options.seconds)
    except InputError as error:
        stated = {key: value for key, value in error.to_dict().items() if key != "code"}
        options.json.write_text(json.dumps(stated), encoding="utf-8")
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    options.json.write_text(json.dumps(report.to_dict(), indent=2), encoding="utf-8")


if __name__ == "__main__":
    _main()
