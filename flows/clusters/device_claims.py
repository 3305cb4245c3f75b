"""Locks on the devices of this machine, so that two clusters never measure on the same device by accident."""

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

#: The environment variable that names the folder of the locks; ``off`` switches them off.
LOCKS_VARIABLE = "PRECISION_TIME_LOCKS"


@contextlib.contextmanager
def claim_devices(devices: Iterable[str], *, scheduler: str | None = None) -> Iterator[None]:
    """Lock ``devices``, named as by ``name_devices``, for this process; the kernel frees the locks of dead processes.

    ``scheduler`` is the address of a Dask scheduler that others may use while the devices are locked. Raises
    ``InputError`` that names the process that holds one of them, and ``StorageError`` where a lock cannot be written.
    """
    with contextlib.ExitStack() as stack:
        folder = _lock_folder()
        if folder is not None:
            # In a fixed order: of two processes that start at once, one gets all its devices.
            for device in sorted(devices):
                stack.enter_context(_claim(folder, device, scheduler=scheduler))
        yield


def _lock_folder() -> Path | None:
    configured = os.environ.get(LOCKS_VARIABLE)
    if configured == "off":
        return None
    # Not XDG_RUNTIME_DIR: services and batch jobs have none, and all processes of a user must use the same folder.
    folder = Path(configured) if configured else Path(tempfile.gettempdir()) / f"precision-time-{os.getuid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = folder.lstat().st_uid
    except OSError as error:
        raise _unwritable(f"{folder}: {error.strerror}") from error
    if not configured and owner != os.getuid():
        # Anyone may create files in the temporary folder: another user could have put links there.
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
        # Emptied while the lock is held, so that its next holder finds nothing old in it.
        stack.callback(lock.truncate, 0)
        yield


def _unwritable(got: str) -> StorageError:
    return StorageError(
        "the locks of this machine's devices cannot be written",
        got=got,
        expected="a folder of this user on a disk of this machine",
        fix=f"name another folder in {LOCKS_VARIABLE}",
    )


def _command() -> list[str]:
    return ["precision-time" if sys.argv[0].endswith("__main__.py") else sys.argv[0], *sys.argv[1:]]


def _read_holder(lock: TextIO) -> dict[str, Any]:
    try:
        lock.seek(0)
        holder = json.load(lock)
    except ValueError:  # its holder has not written to it yet
        return {}
    return holder if isinstance(holder, dict) else {}


def _held(device: str, holder: dict[str, Any]) -> InputError:
    scheduler = holder.get("scheduler")
    who = f"process {holder['pid']}: {str(holder.get('command'))[:160]}" if "pid" in holder else "another process"
    return InputError(
        f"{'the CPU of this machine' if device == 'cpu' else device} is in use by another cluster",
        got=f"{who}; its scheduler: {scheduler}" if scheduler else who,
        expected="one cluster at a time on a device: two would disturb each other's timings",
        fix=f"use its scheduler: --cluster {scheduler}" if scheduler else "wait until it ends, or end it",
    )
