"""A made-up CPU machine, for tests and benchmarks that measure nothing."""

from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.storage.schema import Environment
from precision_time.tasks.probing.probe_device import ProbeReport

__all__ = ["make_machine"]


def make_machine(cores: int) -> ProbeReport:
    """What a probe would report of a CPU with this many cores, which lacks fp8 and tf32."""
    name = f"cpu-test-{cores}c"
    return ProbeReport(
        environment=Environment(
            device_type="cpu", gpu=name, cpu_model="test", cpu_cores=cores, framework_version="0", backend="gloo"
        ),
        device_count=cores,
        unsupported={"fp8": "needs Hopper or newer", "tf32": "needs Ampere or newer"},
        hardware=HardwareSpec(
            name=name,
            kind="cpu",
            architecture="x86-64",
            compute_capability=None,
            memory_bytes=2**33,
            memory_bytes_per_s=1e10,
            peak_flops_per_s={"fp32": 1e11, "bf16": 1e11, "fp16": 1e10},
            gpus_per_node=cores,
            link="shared-memory",
            link_bytes_per_s=1e9,
            network_bytes_per_s=1e9,
            all_reduce_latency_s=1e-4,
            launch_overhead_s=1e-5,
        ),
    )
