"""The fork client, with stand-ins for the interpreter that fail in one way each."""

import os
import socket
import stat
import sys

import psutil
import pytest

from precision_time.tasks.processes import fork_client
from precision_time.tasks.processes.fork_client import ForkClient, RankRequest


@pytest.fixture
def interpreter(tmp_path, monkeypatch):
    """Make ``sys.executable`` a script that notes each start and then runs the commands of the test."""

    def use(text):
        script = tmp_path / "interpreter"
        script.write_text(f"#!/bin/sh\necho $$ >> {tmp_path / 'starts'}\n{text}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))

    yield use
    for pid in starts(tmp_path):
        if psutil.pid_exists(pid):
            psutil.Process(pid).kill()


def starts(folder):
    path = folder / "starts"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def make_request(folder, **environment):
    values = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return RankRequest(job=str(folder / "job.json"), rank=0, log=str(folder / "rank-0.log"), environment=values)


def fork(client, request, *, is_over=lambda: False):
    return client.fork(request, is_over=is_over)


def test_a_fork_server_that_cannot_start_is_tried_twice_and_then_no_more(tmp_path, interpreter):
    interpreter("echo no such library >&2; exit 1")
    client, request = ForkClient(), make_request(tmp_path)
    assert fork(client, request) is None
    assert len(starts(tmp_path)) == 2
    assert fork(client, request) is None
    assert len(starts(tmp_path)) == 2
    log = (tmp_path / "rank-0.log").read_text()
    assert "no such library" in log
    assert log.count("no fork server: the fork server of the worker is gone") == 2


def test_a_changed_environment_gets_a_fork_server_of_its_own_but_what_differs_by_rank_does_not(tmp_path, interpreter):
    interpreter("exit 1")
    client = ForkClient()
    fork(client, make_request(tmp_path, CUDA_VISIBLE_DEVICES="2"))
    fork(client, make_request(tmp_path, CUDA_VISIBLE_DEVICES="3", OMP_NUM_THREADS="7"))
    assert len(starts(tmp_path)) == 2
    fork(client, make_request(tmp_path, LD_LIBRARY_PATH="/elsewhere"))
    assert len(starts(tmp_path)) == 4


def test_a_fork_server_that_is_slow_to_load_is_left_to_go_on(tmp_path, interpreter, monkeypatch):
    interpreter("exec sleep 600")
    monkeypatch.setattr(fork_client, "READY_S", 0.5)
    client, request = ForkClient(), make_request(tmp_path)
    assert fork(client, request) is None
    assert fork(client, request) is None
    assert len(starts(tmp_path)) == 1
    monkeypatch.setattr(fork_client, "LOADING_S", 0.0)
    assert fork(client, request) is None
    assert len(starts(tmp_path)) == 2


def test_a_rank_that_is_not_wanted_any_more_does_not_wait(tmp_path, interpreter, monkeypatch):
    interpreter("exec sleep 600")
    monkeypatch.setattr(fork_client, "READY_S", 1e9)
    assert fork(ForkClient(), make_request(tmp_path), is_over=lambda: True) is None


def test_a_fork_server_that_ends_in_mid_answer_is_lost(tmp_path):
    ours, theirs = socket.socketpair()
    lines = fork_client._Lines(ours)
    with ours, theirs:
        theirs.sendall(b"pid 12\nend")
        assert lines.read() == ("pid", "12")
        ours.settimeout(0.01)
        with pytest.raises(TimeoutError):
            lines.read()
        theirs.sendall(b"ed -9\n")
        assert lines.read() == ("ended", "-9")
        theirs.close()
        with pytest.raises(fork_client.ForkServerLost, match="is gone"):
            lines.read()
