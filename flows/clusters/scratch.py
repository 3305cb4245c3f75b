"""The scratch folder for the files of running ranks: where it lies, and how it is removed, also after a kill."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from precision_time.flows.clusters.settings import is_local
from precision_time.storage.errors import InputError, StorageError

__all__ = ["find_scratch", "open_scratch"]

PREFIX = "precision-time-scratch-"
#: Names the host of the process that made the folder, and is locked while that process lives.
OWNER = "owner.json"
#: Where the lock says nothing (another host, a folder without an owner), older folders than this are removed.
STALE_S = 24 * 3600.0


def find_scratch(*, data: str, scratch: str | None) -> Path:
    """The folder that all hosts share: ``scratch``, else a folder ``scratch`` beside a local ``data``.

    Raises ``InputError`` that says what to set when the data lie in an object store.
    """
    if scratch is not None:
        return Path(scratch).expanduser().absolute()
    parts = urlsplit(data)
    if parts.scheme and parts.scheme != "file":
        raise InputError(
            "ranks on several hosts need a folder that all hosts see",
            got=f"data: {data}, and no scratch",
            expected="scratch: with a folder on a shared file system",
        )
    return Path(parts.path if parts.scheme else data).expanduser().absolute().parent / "scratch"


@contextlib.contextmanager
def open_scratch(*, cluster: str, data: str, scratch: str | None = None) -> Iterator[Path]:
    """A folder for the files of the ranks, removed at the end of the block; those of killed campaigns go first.

    A local cluster uses the temporary folder, unless ``scratch`` names another. Other clusters need a folder that all
    hosts share: ``scratch``, else the folder of this name beside the data. Raises ``InputError`` when there is neither,
    and ``StorageError`` when it cannot be written.
    """
    if is_local(cluster) and scratch is None:
        parent = Path(tempfile.gettempdir())
    else:
        parent = find_scratch(data=data, scratch=scratch)
    with contextlib.ExitStack() as stack:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _sweep(parent)
            temporary = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(temporary))
            stack.enter_context(_claim(folder))
        except OSError as error:
            raise StorageError(
                "the scratch folder cannot be written", got=f"{parent}: {error.strerror}", expected="a writable folder"
            ) from error
        yield folder


def _claim(folder: Path) -> TextIO:
    """Lock ``folder`` until the file is closed; the kernel frees the lock however this process ends."""
    owner = (folder / OWNER).open("w", encoding="utf-8")
    # On a file system without locks the folder's age decides.
    with contextlib.suppress(OSError):
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Written under the lock, so a reader of the host's name can rely on the lock.
        json.dump({"host": socket.gethostname()}, owner)
        owner.flush()
    return owner


def _sweep(parent: Path) -> None:
    """Remove the folders of killed campaigns, except those of other users and those that cannot be removed."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            entry = folder.lstat()
            if folder.is_symlink() or not folder.is_dir() or entry.st_uid != os.getuid():
                continue
            is_abandoned = _is_abandoned(folder)
            if is_abandoned is None:
                # Each new cell changes the folder, and no cell may take longer than a day.
                is_abandoned = time.time() - entry.st_mtime > STALE_S
            if is_abandoned:
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool | None:
    """Whether the process that made ``folder`` on this host is gone; None where that is unknown."""
    try:
        with (folder / OWNER).open("r+", encoding="utf-8") as owner:
            if json.load(owner)["host"] != socket.gethostname():
                return None
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True
    except (OSError, ValueError, KeyError, TypeError):
        return None
