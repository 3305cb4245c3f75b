"""Families of processes on Linux: a session with all of its descendants, which end together."""

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["kill_family", "list_processes"]


def list_processes() -> dict[int, tuple[str, int, int, int]]:
    """(state, parent, group, session) of every visible process of this host, by its number; empty without /proc."""
    processes = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name stands in brackets and may hold anything.
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            processes[int(entry.name)] = (fields[0], int(fields[1]), int(fields[2]), int(fields[3]))
    return processes


def _family(pid: int) -> set[int]:
    """Living processes of the session and group ``pid``, and their descendants, whatever session those are in."""
    processes = list_processes()
    children: dict[int, list[int]] = {}
    for child, (_, parent, _, _) in processes.items():
        children.setdefault(parent, []).append(child)
    waiting = [pid, *(other for other, (_, _, group, session) in processes.items() if pid in (group, session))]
    family: set[int] = set()
    while waiting:
        member = waiting.pop()
        if member not in family:
            family.add(member)
            waiting += children.get(member, [])
    return {member for member in family if member in processes and processes[member][0] not in "ZX"}


def kill_family(pid: int) -> None:
    """Kill the session ``pid`` and all of its descendants, also those in sessions of their own."""
    stopped: set[int] = set()
    # Stopped first: the death of one would orphan the others, and then nothing shows where they belonged.
    while fresh := _family(pid) - stopped:
        _signal_each(fresh, signal.SIGSTOP)
        stopped |= fresh
    _signal_each(stopped, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _signal_each(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
