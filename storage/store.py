"""The contract of every store: files below one root, each there whole or not at all."""

import errno
import uuid
from abc import ABC, abstractmethod

from precision_time.storage.errors import (
    InputError,
    IntegrityError,
    NotFoundError,
    PrecisionTimeError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
)

__all__ = ["Store", "check_path", "check_size", "is_hidden", "storage_error"]

_MAX_PART_BYTES = 255

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# A file where a folder should be (ENOTDIR, EEXIST) stops every write below it, as missing permission does.
_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


class Store(ABC):
    """Files below one root. Paths are relative, with ``/`` between parts; to leave the root is an ``InputError``.

    A write is visible whole or not at all: no reader finds half a file under its final name.
    """

    #: whether a network lies between this machine and the files
    is_remote = False

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def read_bytes(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The content of a file.

        Raises ``NotFoundError``; ``IntegrityError`` for more than ``max_bytes`` or for anything but a plain file below
        the root; ``StorageError`` if the file cannot be read.
        """

    @abstractmethod
    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file, replacing an earlier one.

        Raises ``StorageFullError``, ``StorageReadOnlyError`` or ``StorageError``; then the earlier file is intact.
        """

    @abstractmethod
    def create_bytes(self, path: str, data: bytes) -> None:
        """Write a file that must not exist yet: of several writers exactly one succeeds.

        Raises ``VersionExistsError`` for the others, else as ``write_bytes``.
        """

    @abstractmethod
    def list_files(self, prefix: str = "") -> list[str]:
        """All files below the folder ``prefix``, at any depth, sorted, as paths from the root.

        Names with a part that starts with ``.`` or ``_`` are left out: they are temporary or private.
        """

    @abstractmethod
    def total_bytes(self, prefix: str = "") -> int:
        """The total size of the files that ``list_files`` lists."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is a file at ``path``."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Delete a file; raises ``NotFoundError``."""

    def move(self, source: str, target: str) -> None:
        """Give a file another name that must be free; raises ``NotFoundError`` or ``VersionExistsError``."""
        self.create_bytes(target, self.read_bytes(source))
        self.remove(source)

    def check_writable(self, *, required_bytes: int = 0) -> None:
        """Write a probe file and delete it again, and compare the free space, if it is known, with ``required_bytes``.

        Raises ``StorageReadOnlyError``, ``StorageFullError`` or ``StorageError``: call it before work whose result
        must be stored.
        """
        probe = f".tmp-probe-{uuid.uuid4().hex}"
        self.write_bytes(probe, bytes(4096))
        self.remove(probe)
        free = self._free_bytes()
        if free is not None and free < required_bytes:
            raise StorageFullError(
                f"not enough room in {self.url}",
                got=f"{free} bytes free",
                expected=f"{required_bytes} bytes",
                fix="free some space or choose another place",
            )

    def _free_bytes(self) -> int | None:
        return None


def check_path(path: str) -> str:
    """``path`` itself if it is a plain relative path; raises ``InputError`` for a path that could leave the root."""
    for part in path.split("/"):
        if (
            part in ("", ".", "..")
            or "\\" in part
            or not part.isprintable()
            or len(part.encode("utf-8", "surrogatepass")) > _MAX_PART_BYTES
        ):
            raise InputError(
                "this path cannot be used in a store",
                got=repr(path[:300]),
                expected="relative parts joined by /, without . or .. or empty ones, backslashes or control characters",
            )
    return path


def check_size(data: bytes, where: str, *, max_bytes: int | None) -> bytes:
    """``data`` itself; raises ``IntegrityError`` if it is longer than ``max_bytes``."""
    if max_bytes is not None and len(data) > max_bytes:
        raise IntegrityError("this file is too large", got=f"{where}: over {max_bytes} bytes", expected="less")
    return data


def is_hidden(path: str) -> bool:
    """Whether a part of ``path`` marks it as temporary or private."""
    return any(part.startswith((".", "_")) for part in path.split("/"))


def storage_error(error: BaseException, action: str, where: str) -> PrecisionTimeError:
    """Our error for an ``error`` of the system while ``where`` was to be ``action`` (read, written, removed, ...)."""
    if isinstance(error, FileNotFoundError) and action != "written":
        return NotFoundError("there is no such file", got=where)
    number = error.errno if isinstance(error, OSError) else None
    reason = f"{where}: {getattr(error, 'strerror', None) or str(error) or type(error).__name__}"
    if number in _FULL:
        return StorageFullError(
            f"no room is left, the file was not {action}", got=reason, fix="free some space or choose another place"
        )
    if action != "read" and (number in _UNWRITABLE or isinstance(error, PermissionError)):
        return StorageReadOnlyError(
            f"the file cannot be {action}", got=reason, fix="check the permissions, or choose another place"
        )
    if number == errno.ENOTDIR:
        return NotFoundError("there is no such file", got=where)
    return StorageError(f"the file cannot be {action}", got=reason)
