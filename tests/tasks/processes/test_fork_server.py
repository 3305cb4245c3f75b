"""The fork server without its imports: what it kills, what ps shows of it, when it refuses to fork."""

import os
import socket
import subprocess
import sys
import threading

import pytest

from precision_time.tasks.processes.fork_server import unfit_reason
from precision_time.tasks.processes.process_families import kill_family
from precision_time.tasks.ranks.rank import PARENT_VARIABLE
from precision_time.tests.tasks.scripted_runs import lives, wait_until_gone

#: A session with a child, a grandchild in a session of its own, and an orphan in the session; prints their numbers.
TREE = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
alone = f"import subprocess, sys, time; print(subprocess.Popen({sleep}, start_new_session=True).pid, flush=True)"
child = subprocess.Popen([sys.executable, "-c", alone + "; time.sleep(600)"], stdout=subprocess.PIPE, text=True)
orphan = f"import subprocess, sys; print(subprocess.Popen({sleep}, stdout=subprocess.DEVNULL).pid)"
left = subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE, text=True, check=True)
print(os.getpid(), child.pid, int(child.stdout.readline()), int(left.stdout), flush=True)
time.sleep(600)
"""


def test_a_whole_family_dies_with_what_left_its_session_or_lost_its_parent():
    root = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True, start_new_session=True)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        pids = [int(word) for word in root.stdout.readline().split()]
        assert pids[0] == root.pid
        assert all(map(lives, pids))
        kill_family(root.pid)
        assert wait_until_gone(pids) == []
        assert lives(stranger.pid)
    finally:
        stranger.kill()
        stranger.wait()
        root.wait()
        root.stdout.close()


def test_a_family_that_is_gone_is_no_error():
    ended = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    ended.wait()
    kill_family(ended.pid)


def test_ps_shows_the_words_that_were_set():
    code = (
        "from precision_time.tasks.processes.fork_server import show_command; "
        "show_command(['python', '-m', 'a.rank', '/scratch/cell']); "
        "print(open('/proc/self/cmdline').read().rstrip(chr(0)).replace(chr(0), ' '))"
    )
    shown = subprocess.run([sys.executable, "-c", code, "-" * 100], capture_output=True, text=True, check=True)
    assert shown.stdout == "python -m a.rank /scratch/cell\n"


def test_a_process_with_a_second_thread_is_unfit_to_fork():
    release = threading.Event()
    second = threading.Thread(target=release.wait)
    second.start()
    try:
        assert "threads run instead of one" in unfit_reason()
    finally:
        release.set()
        second.join()


def test_modules_that_start_a_thread_are_not_imported_into_the_fork_server(tmp_path):
    (tmp_path / "starts_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    (tmp_path / "quiet_module.py").write_text("")
    code = (
        "import sys; from precision_time.tasks.processes.fork_server import _start_no_thread as check; "
        "print(check(('quiet_module',)), check(('starts_thread',)), check(('missing_module',)), "
        "{'quiet_module', 'starts_thread'} & set(sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    checked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert checked.stdout == "True False False set()\n"


@pytest.mark.parametrize("parent", ["1", None])
def test_a_fork_server_whose_worker_is_gone_ends_before_it_loads_anything(parent):
    ours, theirs = socket.socketpair()
    environment = {key: value for key, value in os.environ.items() if key != PARENT_VARIABLE}
    if parent is not None:
        environment[PARENT_VARIABLE] = parent
    with ours, theirs:
        command = [sys.executable, "-m", "precision_time.tasks.processes.fork_server", str(theirs.fileno())]
        started = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        assert ours.recv(100) == b""
        assert started.wait() == 0
