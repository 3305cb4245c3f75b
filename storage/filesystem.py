"""One contract over the places where data lives (a local folder, memory, S3): a file is there whole or not at all."""

import errno
import re
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from urllib.parse import unquote, urlsplit

from precision_time.storage.configuration import read_configuration
from precision_time.storage.errors import (
    InputError,
    IntegrityError,
    NotFoundError,
    PrecisionTimeError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
)

__all__ = ["Store", "check_path", "check_size", "is_hidden", "open_store", "storage_error"]

_SCHEMES = ("file", "s3", "memory")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MAX_PART_BYTES = 255

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# A file where a folder should be (ENOTDIR, EEXIST) stops every write below it, as missing permission does.
_UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}


class Store(ABC):
    """Files below one root. Paths are relative, with ``/`` between parts; what leaves the root is an ``InputError``.

    A write is visible whole or not at all: readers never meet half a file under its final name.
    """

    #: whether a network lies between this machine and the files
    is_remote = False

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def read_bytes(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """The content of a file.

        Raises ``NotFoundError``; ``IntegrityError`` for more than ``max_bytes`` or what is no plain file below the
        root; ``StorageError`` when the place cannot be read.
        """

    @abstractmethod
    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file, replacing what was there.

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
        """The sizes of what ``list_files`` lists, together."""

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
        """Write a probe file and delete it again, and compare the free space, where it is known.

        Raises ``StorageReadOnlyError``, ``StorageFullError`` or ``StorageError``: call it before work whose result
        has to be stored.
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


def open_store(url: str | Path, *, timeout_s: float | None = None) -> Store:
    """The store at a bare path or a ``file:``, ``s3://bucket/...`` or ``memory://...`` URL.

    ``timeout_s`` bounds the wait for a connection to S3 and for each answer, with no second try; None leaves both to
    the library, which waits a minute and tries again. Where ``[storage] allowed_buckets`` of the configuration file
    lists buckets, no other is opened; which servers may be asked see ``remote.check_endpoint``.

    Raises ``InputError`` for every other scheme, for chained URLs (``::``), for a bucket that is not on that list,
    and for credentials in the URL; they come from the environment.
    """
    from precision_time.storage.local import LocalStore

    text = str(url)
    if not text or "\0" in text or "::" in text:
        raise _bad_url(text, "one path or URL, without chaining (::)")
    scheme = _SCHEME.match(text)
    if isinstance(url, Path) or scheme is None:
        return LocalStore(Path(text).expanduser() if text.startswith("~/") else text)
    kind = scheme.group(1).lower()
    if kind not in _SCHEMES:
        raise _bad_url(text, f"a path or one of the schemes {', '.join(_SCHEMES)} (a path with a colon: ./{text[:40]})")
    parts = urlsplit(text)
    if kind == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise _bad_url(text, "file:///absolute/path")
        return LocalStore(unquote(parts.path))
    if "://" not in text or parts.query or parts.fragment or (kind == "s3" and not _BUCKET.fullmatch(parts.netloc)):
        raise _bad_url(text, "s3://bucket/folder, without credentials; they come from the environment")
    base = "/".join(part for part in (parts.netloc, parts.path.strip("/")) if part)
    if base:
        check_path(base)
    if kind == "s3":
        _check_bucket(parts.netloc)
    from precision_time.storage.remote import RemoteStore

    return RemoteStore(kind, base, timeout_s=timeout_s)


def check_path(path: str) -> str:
    """``path`` itself if it is a plain relative path; raises ``InputError`` for what could leave the root."""
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
    """``data`` itself if it is not longer than ``max_bytes``, else ``IntegrityError``."""
    if max_bytes is not None and len(data) > max_bytes:
        raise IntegrityError("this file is too large", got=f"{where}: over {max_bytes} bytes", expected="less")
    return data


def is_hidden(path: str) -> bool:
    """Whether a part of ``path`` marks it as temporary or private."""
    return any(part.startswith((".", "_")) for part in path.split("/"))


def storage_error(error: BaseException, action: str, where: str) -> PrecisionTimeError:
    """Our error for what the system said when ``where`` should be ``action`` (read, written, removed, ...)."""
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


def _check_bucket(bucket: str) -> None:
    allowed = read_configuration().allowed_buckets
    if allowed is not None and bucket not in allowed:
        raise InputError(
            "this bucket is not on the allow list",
            got=bucket,
            expected=f"one of {', '.join(allowed) or 'none at all'}",
            fix="add it to [storage] allowed_buckets in ~/.config/precision_time/config.toml if you trust it",
        )


def _bad_url(text: str, expected: str) -> InputError:
    # What stands before an @ may be a secret, and messages end in logs.
    shown = re.sub(r"//[^/]*@", "//...@", text)[:300]
    return InputError("this place cannot be used as a store", got=repr(shown), expected=expected)
