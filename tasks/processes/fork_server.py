"""The fork server: a clean process with torch imported, which forks itself into the ranks that its worker asks for.

The two talk over a socket pair. For each rank the worker sends one byte and one end of a new socket pair; on that the
rank says ``pid N`` and reads what to run, and the server says ``ended CODE`` or ``refused WHY``. Either side sees the
death of the other as the end of the stream. The worker's side is ``fork_client``.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from precision_time.tasks.process_ties import adopt_orphans, end_with_parent
from precision_time.tasks.processes.process_families import kill_family, list_processes
from precision_time.tasks.ranks import rank as ranks
from precision_time.tasks.ranks.rank import PARENT_VARIABLE

__all__ = ["LOADING_SETTINGS", "TITLE_BYTES", "serve", "show_command", "unfit_reason"]

#: The modules that every rank needs before its first step. Optimizers import ``torch._dynamo`` on first use (2 s).
MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.profiler",
    "torch._dynamo",
    "precision_time.tasks.ranks.timed_loop",
    "precision_time.tasks.ranks.apply_precision",
    "precision_time.tasks.ranks.rank",
    "precision_time.tasks.workloads",
)

#: Variables while the server loads its modules; its ranks have their own.
LOADING_SETTINGS = {
    # Arrow's jemalloc would start a thread when it is imported.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # OpenBLAS would start its threads when numpy is imported.
    "OPENBLAS_NUM_THREADS": "1",
    # A module may ask for GPUs while it is imported: NVML answers that without initialising CUDA.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
#: The modules that write rows; not imported where a build of Arrow starts a thread on import all the same.
ARROW_MODULES = ("precision_time.storage.timings", "pyarrow.parquet")

#: Room for the command line that ``ps`` shows for a rank.
TITLE_BYTES = 1024


def unfit_reason() -> str:
    """Why this process must not fork ranks, empty if it may: threads and a CUDA context do not survive a fork."""
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"{threads} threads run instead of one"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised"
    return ""


def _start_no_thread(names: tuple[str, ...]) -> bool:
    """Whether these modules can be imported without starting a thread; a child process tries it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(Exception):
            for name in names:
                importlib.import_module(name)
            code = 1 if unfit_reason() else 0
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


class _ForkLoop:
    """The server's loop: fork a rank for each request, reap it with its children, end when the worker ends."""

    def __init__(self, control: socket.socket) -> None:
        self.control, self.worker, self.pid = control, os.getppid(), os.getpid()
        self.ranks: dict[int, socket.socket] = {}
        self.stopping = False
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        for name in MODULES:
            importlib.import_module(name)
        if _start_no_thread(ARROW_MODULES):
            for name in ARROW_MODULES:
                importlib.import_module(name)
        self._obey_signals()
        reason = unfit_reason()
        if reason:
            self.control.sendall(f"unfit {reason}\n".encode())
            return None
        # The log of this process's start is in the folder of the first cell, which will be removed.
        _redirect(os.devnull, (1, 2), os.O_WRONLY)
        # Imported objects stay: a collection in a rank need not visit them, and their pages stay shared.
        gc.collect()
        gc.freeze()
        self.control.sendall(b"ready\n")
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(self.wake_read, select.POLLIN)
        retiring = False
        while not (retiring and not self.ranks):
            ready = dict(poller.poll(1000))
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_read, 4096)
            self._reap()
            if self.stopping or os.getppid() != self.worker:
                return self._end_all()
            if self.control.fileno() in ready:
                order, files, _, _ = socket.recv_fds(self.control, 1, 1)
                if not order:
                    return self._end_all()
                if files:
                    self._fork(socket.socket(fileno=files[0]))
                retiring = retiring or order == b"q"
        return None

    def _obey_signals(self) -> None:
        def stop(*_: Any) -> None:
            self.stopping = True

        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Processes that outlive their rank become children of this one, which can then end them.
        adopt_orphans()
        # Until now the signal ended this process at once; from here on the ranks and their children must end first.
        signal.signal(signal.SIGTERM, stop)

    def _fork(self, report: socket.socket) -> None:
        reason = unfit_reason()
        if not reason:
            try:
                pid = os.fork()
            except OSError as error:
                reason = f"fork: {error.strerror}"
        if reason:
            with report, contextlib.suppress(OSError):
                report.sendall(f"refused {reason}\n".encode())
            return
        if pid == 0:
            try:
                self._become_rank(report)
            finally:
                os._exit(1)
        self.ranks[pid] = report

    def _become_rank(self, report: socket.socket) -> None:
        """Turn this fork into what a fresh interpreter would be, and run the rank; never returns."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for other in (self.control, *self.ranks.values()):
            other.close()
        os.close(self.wake_read)
        os.close(self.wake_write)
        # Known only after the fork: CUDA does not work in it if the server did so much as ask for its devices.
        if sys.modules["torch"].cuda._is_in_bad_fork():
            report.sendall(b"refused CUDA was touched\n")
            os._exit(1)
        with report, report.makefile("rb") as stream:
            # From here on the worker can end the whole session.
            report.sendall(f"pid {os.getpid()}\n".encode())
            request = json.loads(stream.readline())
        _redirect(request["log"], (1, 2), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        environment: dict[str, str] = request["environment"] | {PARENT_VARIABLE: str(self.pid)}
        os.environ.clear()
        os.environ.update(environment)
        job, rank = request["job"], request["rank"]
        sys.argv = [str(ranks.__file__), job, str(rank)]
        show_command([sys.executable, "-m", ranks.__name__, job, str(rank)])
        _use_openblas_threads(environment.get("OPENBLAS_NUM_THREADS", environment["OMP_NUM_THREADS"]))
        # Python reseeds its own generator in a fork; torch's has given no number yet.
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        # A module may have been written since the server started.
        importlib.invalidate_caches()
        ranks.main(job, rank)

    def _reap(self) -> None:
        """Report each rank that ended, after its children are killed, and reap the processes that it left behind."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            report = self.ranks.get(ended.si_pid)
            if report is not None:
                # Before it is reaped: until then no other process can have its number.
                kill_family(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            if report is not None:
                del self.ranks[ended.si_pid]
                self._kill_strays()
                with report, contextlib.suppress(OSError):
                    report.sendall(f"ended {os.waitstatus_to_exitcode(status)}\n".encode())

    def _kill_strays(self) -> None:
        """Kill processes that left their rank's session; not while a rank runs, since they may belong to it."""
        if not self.ranks:
            for pid, (state, parent, _, _) in list_processes().items():
                if parent == self.pid and state not in "ZX":
                    kill_family(pid)

    def _end_all(self) -> None:
        for pid in self.ranks:
            kill_family(pid)
        self.ranks = {}
        self._kill_strays()


def _redirect(path: str, targets: tuple[int, ...], flags: int) -> None:
    opened = os.open(path, flags, 0o644)
    for target in targets:
        os.dup2(opened, target)
    os.close(opened)


def show_command(words: list[str]) -> None:
    """Show ``words`` as the command line of this process in ``ps``, cut to the length of the original one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # proc_pid_stat(5): arg_start and arg_end are fields 48 and 49; the third is the first after the name.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        if 0 < start < end:
            text = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
            ctypes.memset(start, 0, end - start)
            ctypes.memmove(start, text, len(text))


def _use_openblas_threads(count: str) -> None:
    """Set the threads of numpy's OpenBLAS, which reads them from the environment only when it is loaded."""
    with contextlib.suppress(OSError, ValueError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        for path in set(re.findall(r"/\S*openblas\S*", maps)):
            library = ctypes.CDLL(path)
            for name in (
                "scipy_openblas_set_num_threads64_",
                "openblas_set_num_threads64_",
                "openblas_set_num_threads",
            ):
                if hasattr(library, name):
                    getattr(library, name)(int(count))


def serve(control: socket.socket) -> None:
    """Run the fork server of the process at the other end of ``control``, until that ends or says so."""
    # Tied to the thread that started this process; ``ForkServer._keep`` lives as long as the worker.
    end_with_parent(signal.SIGTERM)
    if str(os.getppid()) == os.environ.get(PARENT_VARIABLE):
        show_command([sys.executable, "-m", "precision_time.tasks.processes.fork_server"])
        _ForkLoop(control).run()
    sys.stdout.flush()
    # No teardown: no imported module has anything to save.
    os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
