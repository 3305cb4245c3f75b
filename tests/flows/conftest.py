"""A made-up machine for tests that measure nothing, and one Prefect server for those that run a flow."""

import os
import tempfile
from collections.abc import Callable, Iterator

import pytest

from precision_time.flows.ground.prefect_settings import prepare_prefect
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tests.made_up_machine import make_machine

# Before a test module imports Prefect: no tracking, none of this user's profiles, servers and databases.
_prefect_home = tempfile.TemporaryDirectory(prefix="prefect-", ignore_cleanup_errors=True)
os.environ["PREFECT_HOME"] = _prefect_home.name
os.environ.pop("PREFECT_API_URL", None)
prepare_prefect()


@pytest.fixture(scope="session")
def device() -> ProbeReport:
    """A CPU of two cores that lacks fp8 and tf32."""
    return make_machine(2)


@pytest.fixture
def probe(device: ProbeReport) -> Callable[[str], ProbeReport]:
    """Stands in for the measuring probe."""
    return lambda wanted: device


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """Prefect's own test server, started once, because its start takes longer than all of these tests."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield
