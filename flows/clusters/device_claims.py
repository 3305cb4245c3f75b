"""Who measures on the devices of this machine: a lock a device, so that two clusters never share one by accident."""

import contextlib
import fcntl
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from precision_time.storage.errors import InputError, StorageError

__all__ = ["LOCKS_VARIABLE", "claim_devices"]

#: Names the folder of the locks; ``off`` does without.
LOCKS_VARIABLE = "PRECISION_TIME_LOCKS"


@contextlib.contextmanager
def claim_devices(devices: Iterable[str], *, scheduler: str | None = None) -> Iterator[None]:
    """Hold ``devices``, as ``name_devices`` calls them, for this process; the kernel frees those of the dead.

    ``scheduler`` is the address of a Dask scheduler that others may use instead, for as long as the devices are held.
    Raises ``InputError`` that says who holds one of them, and ``StorageError`` where the locks cannot be written.
    """
    with contextlib.ExitStack() as stack:
        folder = _lock_folder()
        if folder is not None:
            # In one order: of two that start at once, one gets all.
            for device in sorted(devices):
                stack.enter_context(_claim(folder, device, scheduler=scheduler))
        yield


def _lock_folder() -> Path | None:
    chosen = os.environ.get(LOCKS_VARIABLE)
    if chosen == "off":
        return None
    # Not XDG_RUNTIME_DIR, which a service or a batch job does not have: all shells of a user must find the same one.
    folder = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"precision-time-{os.getuid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = folder.lstat().st_uid
    except OSError as error:
        raise _unwritable(f"{folder}: {error.strerror}") from error
    if not chosen and owner != os.getuid():
        # Everybody may write beside it: another user could have laid links there.
        raise _unwritable(f"{folder} belongs to another user")
    return folder


@contextlib.contextmanager
def _claim(folder: Path, device: str, *, scheduler: str | None) -> Iterator[None]:
    path = folder / f"{re.sub(r'[^A-Za-z0-9-]', '_', device)}.lock"
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(path.open("a+", encoding="utf-8"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _held(device, _read_holder(lock)) from None
            lock.truncate(0)
            json.dump({"pid": os.getpid(), "command": shlex.join(_command()), "scheduler": scheduler}, lock)
            lock.flush()
        except OSError as error:
            raise _unwritable(f"{path}: {error.strerror}") from error
        # While it is still ours: whoever has it next finds nothing old in it.
        stack.callback(lock.truncate, 0)
        yield


def _unwritable(got: str) -> StorageError:
    return StorageError(
        "the locks of this machine's devices cannot be written",
        got=got,
        expected="a folder of this user's own on a disk of this machine",
        fix=f"name another one in {LOCKS_VARIABLE}",
    )


def _command() -> list[str]:
    return ["precision-time" if sys.argv[0].endswith("__main__.py") else sys.argv[0], *sys.argv[1:]]


def _read_holder(lock: TextIO) -> dict[str, Any]:
    try:
        lock.seek(0)
        holder = json.load(lock)
    except ValueError:  # it has the lock, and is about to say so
        return {}
    return holder if isinstance(holder, dict) else {}


def _held(device: str, holder: dict[str, Any]) -> InputError:
    scheduler = holder.get("scheduler")
    who = f"process {holder['pid']}: {str(holder.get('command'))[:160]}" if "pid" in holder else "another process"
    return InputError(
        f"{'the CPU of this machine' if device == 'cpu' else device} is being measured on",
        got=f"{who}; its scheduler: {scheduler}" if scheduler else who,
        expected="one cluster at a time on a device: two would be in each other's timings",
        fix=f"use its scheduler: --cluster {scheduler}" if scheduler else "wait for its end, or end it",
    )
