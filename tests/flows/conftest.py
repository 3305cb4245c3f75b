"""A made-up machine for tests that measure nothing, and one Prefect server for those that run a flow."""

import os
import tempfile
from collections.abc import Callable, Iterator

import pytest

from precision_time.flows.ground.prefect_settings import prepare_prefect
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.storage.schema import Environment
from precision_time.tasks.probing.probe_device import ProbeReport

# Before a test module imports Prefect: no tracking, none of this user's profiles, servers and databases.
_prefect_home = tempfile.TemporaryDirectory(prefix="prefect-", ignore_cleanup_errors=True)
os.environ["PREFECT_HOME"] = _prefect_home.name
os.environ.pop("PREFECT_API_URL", None)
prepare_prefect()


@pytest.fixture(scope="session")
def device() -> ProbeReport:
    """A CPU of two cores that lacks fp8 and tf32."""
    return ProbeReport(
        environment=Environment(
            device_type="cpu", gpu="cpu-test-2c", cpu_model="test", cpu_cores=2, framework_version="0", backend="gloo"
        ),
        device_count=2,
        unsupported={"fp8": "needs Hopper or newer", "tf32": "needs Ampere or newer"},
        hardware=HardwareSpec(
            name="cpu-test-2c",
            kind="cpu",
            architecture="x86-64",
            compute_capability=None,
            memory_bytes=2**33,
            memory_bytes_per_s=1e10,
            peak_flops_per_s={"fp32": 1e11, "bf16": 1e11, "fp16": 1e10},
            gpus_per_node=2,
            link="shared-memory",
            link_bytes_per_s=1e9,
            network_bytes_per_s=1e9,
            all_reduce_latency_s=1e-4,
            launch_overhead_s=1e-5,
        ),
    )


@pytest.fixture
def probe(device: ProbeReport) -> Callable[[str], ProbeReport]:
    """Stands in for the measuring probe."""
    return lambda wanted: device


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Prefect's own test server, started once: it costs more than all of these tests."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield
