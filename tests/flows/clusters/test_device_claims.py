"""Two clusters never measure on the same devices of a machine by accident."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from precision_time.flows.clusters import device_claims
from precision_time.flows.clusters.cluster import open_cluster
from precision_time.flows.clusters.device_claims import LOCKS_VARIABLE, claim_devices
from precision_time.flows.stack.services import choose_port
from precision_time.flows.stack.up import Addresses, UpSettings, _Stack, stay_up
from precision_time.storage.errors import InputError, StorageError


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "locks"))
    return tmp_path / "locks"


#: Holds the CPU, prints so, and stays until its stdin is closed.
HOLDER = """
import sys
from precision_time.flows.clusters.device_claims import claim_devices
with claim_devices(["cpu"], scheduler=sys.argv[1] or None):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def holder(scheduler: str = "") -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, scheduler], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_local_cluster_beside_another_is_refused_with_who_measures_there() -> None:
    with (
        holder() as other,
        pytest.raises(InputError, match=rf"the CPU of this machine.*process {other.pid}: -c.*wait until it ends"),
        open_cluster("cpu", 1),
    ):
        pass


def test_beside_a_stack_the_address_of_its_scheduler_is_what_to_use() -> None:
    said = r"scheduler: tcp://127\.0\.0\.1:8786.*fix: use its scheduler: --cluster tcp://127\.0\.0\.1:8786"
    with holder("tcp://127.0.0.1:8786"), pytest.raises(InputError, match=said), open_cluster("cpu", 1):
        pass


def test_a_local_cluster_holds_its_devices_for_as_long_as_it_is_open() -> None:
    with open_cluster("cpu", 1):
        with pytest.raises(InputError, match=f"process {os.getpid()}"), claim_devices(["cpu"]):
            pass
        with claim_devices(["GPU-1"]):
            pass
    with claim_devices(["cpu"]):
        pass


def test_a_killed_holder_holds_nothing() -> None:
    with holder() as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
        with claim_devices(["cpu"]):
            pass


def test_of_several_devices_all_or_none_are_held() -> None:
    with claim_devices(["GPU-2"]):
        with pytest.raises(InputError, match="GPU-2 is in use"), claim_devices(["GPU-1", "GPU-2"]):
            pass
        with claim_devices(["GPU-1", "GPU-3"]):
            pass


def never(addresses: Addresses) -> None:
    raise AssertionError("it must not come up")


@pytest.fixture
def up_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], UpSettings]:
    """Settings of a stack with a cluster of this kind, in the environment that ``up`` adopts."""
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    return lambda cluster: UpSettings(home=tmp_path / "home", port=choose_port(4200), cluster=cluster)


def test_a_stack_does_not_start_on_devices_that_a_campaign_measures_on(
    up_settings: Callable[[str], UpSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Stack, "start", lambda *_, **__: pytest.fail("it started"))
    with holder() as other, pytest.raises(InputError, match=f"process {other.pid}"):
        stay_up(up_settings("local"), announce=never)


@pytest.mark.parametrize(("cluster", "is_held"), [("local", True), ("none", False)])
def test_a_stack_with_a_cluster_holds_its_devices_and_names_its_scheduler(
    up_settings: Callable[[str], UpSettings], monkeypatch: pytest.MonkeyPatch, cluster: str, is_held: bool
) -> None:
    states: list[str] = []

    def start(stack: _Stack, *, since: float) -> None:
        with contextlib.suppress(InputError), claim_devices(["cpu"]):
            states.append("free")
        if not states:
            with pytest.raises(InputError, match=f"--cluster {stack.dask_address}"), claim_devices(["cpu"]):
                pass
            states.append("held")

    monkeypatch.setattr(_Stack, "start", start)
    stay_up(up_settings(cluster), announce=never)
    assert states == ["held" if is_held else "free"]
    with claim_devices(["cpu"]):
        pass


def test_the_locks_of_a_user_lie_in_one_place_which_nobody_else_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LOCKS_VARIABLE)
    monkeypatch.setattr(device_claims.tempfile, "tempdir", str(tmp_path))
    with claim_devices(["cpu"]):
        (folder,) = (path for path in tmp_path.iterdir() if path.name != "home")
        assert folder.name == f"precision-time-{os.getuid()}"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert json.loads((folder / "cpu.lock").read_text(encoding="utf-8"))["pid"] == os.getpid()
    assert (folder / "cpu.lock").read_text(encoding="utf-8") == ""
    # Another user's folder of this name may be full of links.
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    folder.rename(tmp_path / f"precision-time-{owner + 1}")
    with pytest.raises(StorageError, match="belongs to another user"), claim_devices(["cpu"]):
        pass


def test_locks_that_cannot_be_written_are_told_of_and_may_be_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(LOCKS_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(StorageError, match=LOCKS_VARIABLE), claim_devices(["cpu"]):
        pass
    monkeypatch.setenv(LOCKS_VARIABLE, "off")
    with claim_devices(["cpu"]), claim_devices(["cpu"]):
        pass
