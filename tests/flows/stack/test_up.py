"""``precision-time up``: what it refuses before it starts anything, the addresses it prints, and its processes."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from precision_time.flows.stack.commands import doctor, up
from precision_time.flows.stack.services import Service, choose_port, dask_services, require_scheduler
from precision_time.flows.stack.up import Addresses, UpSettings, prefilled_form, read_addresses, stay_up
from precision_time.storage.errors import InputError, PrecisionTimeError

ADDRESSES = Addresses(
    pid=17, home="/h", ui="http://127.0.0.1:4200", api="http://127.0.0.1:4200/api", campaign_form="http://form",
    scheduler="tcp://127.0.0.1:8786", dashboard=None, deployments={}, started_in_s=9.5,
)  # fmt: skip


@pytest.fixture
def taken_port() -> Any:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def never(addresses: Addresses) -> None:
    raise AssertionError("it must not come up")


def test_a_port_in_use_is_refused_with_who_has_it(tmp_path: Path, taken_port: int) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(InputError, match=f"port {taken_port}.*process {os.getpid()}.*--port"):
        stay_up(UpSettings(home=tmp_path, port=taken_port), announce=never)
    assert not (tmp_path / "logs").exists()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_stack_in_the_same_home_is_refused_with_where_the_first_is(tmp_path: Path) -> None:
    (tmp_path / "up.json").write_text(json.dumps(ADDRESSES.to_dict()), encoding="utf-8")
    with (tmp_path / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="process 17, pages at http:"):
            stay_up(UpSettings(home=tmp_path), announce=never)
        assert read_addresses(tmp_path) == ADDRESSES


def test_what_a_dead_stack_left_is_taken_over(tmp_path: Path, taken_port: int) -> None:
    (tmp_path / "up.json").write_text(json.dumps(ADDRESSES.to_dict()), encoding="utf-8")
    (tmp_path / "up.lock").touch()
    assert read_addresses(tmp_path) is None
    said: list[str] = []
    with pytest.raises(InputError, match="in use"):
        stay_up(UpSettings(home=tmp_path, port=taken_port), announce=never, say=said.append)
    assert said == ["the precision-time up of process 17 ended without cleaning up; taking over"]


@pytest.mark.parametrize("cluster", ["slurm", "tcp://host", "gpu"])
def test_a_cluster_that_up_cannot_offer_is_refused(tmp_path: Path, cluster: str) -> None:
    with pytest.raises(InputError, match="local-cuda, none"):
        UpSettings(home=tmp_path, cluster=cluster)


def test_a_home_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PrecisionTimeError, match="home folder cannot be written"):
        stay_up(UpSettings(home=tmp_path / "file"), announce=never)


def test_the_prefilled_form_carries_its_parameters_encoded_twice() -> None:
    parameters = {"spec": {"name": "a b", "gpus": [1, 2], "data": "/h/ü"}}
    url = urlsplit(prefilled_form("http://127.0.0.1:4200", "11-22", parameters))
    assert url.path == "/deployments/deployment/11-22/run"
    assert json.loads(unquote(parse_qs(url.query)["parameters"][0])) == parameters


def make_service(tmp_path: Path, code: str, *, stop_wait_s: float = 10.0) -> Service:
    return Service(
        "the service", [sys.executable, "-c", code], dict(os.environ), tmp_path / "service.log", stop_wait_s=stop_wait_s
    )


def wait_until_said(service: Service, word: str) -> None:
    deadline = time.monotonic() + 60
    while word not in service.tail():
        assert time.monotonic() < deadline, service.tail()
        time.sleep(0.02)


def test_a_part_that_does_not_stop_is_killed_with_its_children(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print('child', child.pid, 'ready', flush=True); time.sleep(600)"
    )
    service = make_service(tmp_path, code, stop_wait_s=0.2)
    service.start()
    wait_until_said(service, "ready")
    child = int(service.tail().split()[1])
    service.stop()
    assert not service.is_running
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_part_that_ends_by_itself_tells_its_last_words(tmp_path: Path) -> None:
    service = make_service(tmp_path, "raise SystemExit('no such table')")
    service.start()
    assert service.process is not None
    service.process.wait(timeout=60)
    with pytest.raises(PrecisionTimeError, match="the service ended right after the start; got: no such table"):
        service.require_running()


def test_a_tied_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    parent = (
        "import subprocess, sys; from precision_time.tasks.process_ties import tied_command; "
        f"print(subprocess.Popen(tied_command([sys.executable, '-c', {child!r}]), stdout=subprocess.PIPE, text=True)"
        ".stdout.readline().strip(), flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True, timeout=60)
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "it outlived its parent"
        time.sleep(0.02)


def test_the_scheduler_listens_on_this_machine_only_and_runs_no_rank_again(tmp_path: Path) -> None:
    scheduler, workers = dask_services(port=1, dashboard_port=2, workers=3, on_gpus=False, logs=tmp_path)
    assert "127.0.0.1" in scheduler.command
    assert scheduler.environment["DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES"] == "0"
    assert list(workers.command)[-4:] == ["--nthreads", "1", "--nworkers", "3"]
    on_gpus = dask_services(port=1, dashboard_port=2, workers=3, on_gpus=True, logs=tmp_path)[1]
    assert "cuda" in on_gpus.command
    assert "--nworkers" not in on_gpus.command


def test_a_port_that_is_taken_is_replaced_by_a_free_one(taken_port: int) -> None:
    other = choose_port(taken_port)
    assert other != taken_port
    assert choose_port(other) == other


def test_a_scheduler_that_does_not_run_is_refused_before_anything_starts(tmp_path: Path, taken_port: int) -> None:
    settings = UpSettings(home=tmp_path, port=choose_port(0), cluster="tcp://127.0.0.1:9")
    with pytest.raises(InputError, match=r"tcp://127\.0\.0\.1:9.*start it first"):
        stay_up(settings, announce=never)
    assert not (tmp_path / "logs").exists()
    require_scheduler(f"tcp://127.0.0.1:{taken_port}")


def test_an_empty_home_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (up, doctor):
        with pytest.raises(InputError, match="empty --home"):
            command(home="")
    assert not list(tmp_path.iterdir())
