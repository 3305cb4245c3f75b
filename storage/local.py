"""A local folder as a store: synced temporary files, renames, and hard links for exclusive creation."""

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from precision_time.storage.errors import (
    IntegrityError,
    NotFoundError,
    PrecisionTimeError,
    StorageError,
    VersionExistsError,
)
from precision_time.storage.store import Store, check_path, check_size, is_hidden, storage_error

__all__ = ["LocalStore"]

_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF}


class LocalStore(Store):
    """A folder of this machine; it is created at the first write."""

    def __init__(self, root: str | Path) -> None:
        self._root = os.path.abspath(root)
        if os.path.exists(self._root) and not os.path.isdir(self._root):
            raise StorageError("this is not a folder", got=self._root, expected="a folder, or a path to make one at")
        super().__init__(self._root)

    def read_bytes(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """See ``Store``. A symbolic link that leaves the root is refused, a FIFO or device is never waited for."""
        full = self._locate(path)
        with _translated("read", full):
            descriptor = self._open_inside(full)
            try:
                mode = os.fstat(descriptor).st_mode
                if stat.S_ISDIR(mode):
                    raise NotFoundError("there is no such file", got=full, expected="a file; this is a folder")
                if not stat.S_ISREG(mode):
                    raise IntegrityError("this is not a plain file", got=full, expected="a regular file")
                with open(descriptor, "rb", closefd=False) as file:
                    # One byte past the limit shows that the file is larger, also if it grows while it is read.
                    data = file.read(-1 if max_bytes is None else max_bytes + 1)
            finally:
                os.close(descriptor)
        return check_size(data, full, max_bytes=max_bytes)

    def write_bytes(self, path: str, data: bytes) -> None:
        """See ``Store``: a temporary file in the same folder, synced, then renamed over the target."""
        full = self._locate(path)
        with _translated("written", full):
            self._make_folder(os.path.dirname(full))
            with _temporary(full, data) as temporary:
                os.replace(temporary, full)
            _sync_folder(os.path.dirname(full))

    def create_bytes(self, path: str, data: bytes) -> None:
        """See ``Store``: links the finished temporary file to the name, because a local rename is not exclusive."""
        full = self._locate(path)
        with _translated("written", full):
            self._make_folder(os.path.dirname(full))
            with _temporary(full, data) as temporary:
                _link(temporary, full, otherwise=lambda: _create_in_place(full, data))
            _sync_folder(os.path.dirname(full))

    def check_writable(self, *, required_bytes: int = 0) -> None:
        """See ``Store``. Folders made for the check are removed again."""
        missing = []
        folder = self._root
        while not os.path.lexists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        try:
            super().check_writable(required_bytes=required_bytes)
        finally:
            with contextlib.suppress(OSError):
                for folder in missing:
                    os.rmdir(folder)

    def list_files(self, prefix: str = "") -> list[str]:
        """See ``Store``. Links to folders are listed as files and not followed, so that no link stays unseen."""
        start = self._locate(prefix) if prefix else self._root
        # Nothing below a hidden folder is listed.
        if is_hidden(prefix):
            return []
        self._check_inside(start)
        listed: list[str] = []
        with _translated("read", start):
            for folder, folders, files in os.walk(start, onerror=_raise_unless_vanished):
                links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
                folders[:] = [name for name in folders if not is_hidden(name) and name not in links]
                below = os.path.relpath(folder, self._root)
                parent = "" if below == os.curdir else below.replace(os.sep, "/") + "/"
                listed.extend(parent + name for name in files + links if not is_hidden(name))
        return sorted(listed)

    def total_bytes(self, prefix: str = "") -> int:
        """See ``Store``. A file that disappears meanwhile is not counted."""
        total = 0
        for path in self.list_files(prefix):
            with _translated("read", path), contextlib.suppress(FileNotFoundError):
                total += os.lstat(self._locate(path)).st_size
        return total

    def exists(self, path: str) -> bool:
        """See ``Store``."""
        return os.path.isfile(self._locate(path))

    def remove(self, path: str) -> None:
        """See ``Store``."""
        full = self._locate(path)
        with _translated("removed", full):
            self._check_inside(os.path.dirname(full))
            os.unlink(full)
            _sync_folder(os.path.dirname(full))

    def move(self, source: str, target: str) -> None:
        """See ``Store``; only names change, so files that ``read_bytes`` refuses can be moved too."""
        old, new = self._locate(source), self._locate(target)
        with _translated("moved", old):
            self._check_inside(os.path.dirname(old))
            if not os.path.lexists(old):
                raise NotFoundError("there is no such file", got=old)
            self._make_folder(os.path.dirname(new))
            _link(old, new, otherwise=lambda: self._copy(old, new))
            os.unlink(old)
            _sync_folder(os.path.dirname(new))
            _sync_folder(os.path.dirname(old))

    def _copy(self, old: str, new: str) -> None:
        with open(os.open(old, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            _create_in_place(new, file.read())

    def _locate(self, path: str) -> str:
        return os.path.join(self._root, *check_path(path).split("/"))

    def _check_inside(self, full: str) -> str:
        """The real path of ``full``; raises ``IntegrityError`` when a link leads out of the root."""
        root, real = os.path.realpath(self._root), os.path.realpath(full)
        if real != root and not real.startswith(root.rstrip(os.sep) + os.sep):
            raise IntegrityError("a link leads out of the store", got=full, expected=f"a place below {self._root}")
        return real

    def _open_inside(self, full: str) -> int:
        """Open the real path part by part without following links: a link that is swapped in meanwhile is refused."""
        real = self._check_inside(full)
        if os.path.islink(full) and not os.path.exists(real):
            raise IntegrityError("a link leads to nothing", got=full, expected="a file")
        *folders, name = os.path.relpath(real, os.path.realpath(self._root)).split(os.sep)
        here = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for folder in folders:
                below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                os.close(here)
                here = below
            # O_NONBLOCK: opening a FIFO would wait for its writer.
            return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=here)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise IntegrityError("a link appeared while the file was opened", got=full) from error
            raise
        finally:
            os.close(here)

    def _make_folder(self, folder: str) -> None:
        self._check_inside(folder)
        missing = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for new in reversed(missing):
            # exist_ok: another writer may make the same folder; a file in its place still raises.
            os.makedirs(new, exist_ok=True)
            _sync_folder(os.path.dirname(new))

    def _free_bytes(self) -> int | None:
        with _translated("read", self._root):
            return shutil.disk_usage(self._root).free


@contextlib.contextmanager
def _translated(action: str, where: str) -> Iterator[None]:
    try:
        yield
    except PrecisionTimeError:
        raise
    except OSError as error:
        raise storage_error(error, action, where) from error


@contextlib.contextmanager
def _temporary(full: str, data: bytes) -> Iterator[str]:
    """A finished, synced file beside ``full`` under a hidden name, which is removed in any case."""
    temporary = os.path.join(os.path.dirname(full), f".tmp-{uuid.uuid4().hex}")
    try:
        _create_in_place(temporary, data)
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _create_in_place(full: str, data: bytes) -> None:
    """Exclusive creation under the final name, only without hard links: a reader may find the file half written."""
    try:
        descriptor = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    except FileExistsError as error:
        raise _taken(full) from error
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(full)
        raise


def _link(source: str, target: str, *, otherwise: Callable[[], None]) -> None:
    """Give ``source`` the second name ``target``, which must be free; without hard links call ``otherwise``."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError as error:
        raise _taken(target) from error
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        otherwise()


def _taken(full: str) -> VersionExistsError:
    return VersionExistsError("this file exists already", got=full, expected="a name that is free")


def _sync_folder(folder: str) -> None:
    """Make a new name in ``folder`` survive a power cut; some file systems cannot sync folders."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def _raise_unless_vanished(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
