"""Stores that fsspec reaches: S3 and memory."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from precision_time.storage.errors import (
    InputError,
    NotFoundError,
    PrecisionTimeError,
    StorageError,
    VersionExistsError,
)
from precision_time.storage.filesystem import Store, check_path, check_size, is_hidden, storage_error

__all__ = ["RemoteStore"]

# fsspec's memory file system looks before it creates, without a lock of its own.
_MEMORY_LOCK = threading.Lock()

_CONFLICT_TRIES = 5


class RemoteStore(Store):
    """A prefix of an S3 bucket or of fsspec's process-wide memory. One PUT is whole or absent by itself."""

    def __init__(self, kind: str, base: str) -> None:
        super().__init__(f"{kind}://{base}")
        self._base = f"/{base}".rstrip("/") if kind == "memory" else base
        # Listings must show what other processes wrote, so nothing is cached.
        options = {"use_listings_cache": False} if kind == "s3" else {}
        try:
            import fsspec

            self._files: Any = fsspec.filesystem(kind, **options)
        except ImportError as error:
            raise InputError(
                f"{kind}:// needs a package that is not installed",
                got=str(error),
                fix="pip install 'precision-time[s3]'",
            ) from error
        self._kind = kind

    def read_bytes(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """See ``Store``."""
        full = self._locate(path)
        with self._translated("read", path):
            if max_bytes is not None:
                # Asked first, so that an endless object is not fetched to learn that it is one.
                check_size(b"", path, max_bytes=max_bytes)
                size = self._files.info(full)["size"]
                if size > max_bytes:
                    return check_size(bytes(max_bytes + 1), path, max_bytes=max_bytes)
            data: bytes = self._files.cat_file(full)
        return check_size(data, path, max_bytes=max_bytes)

    def write_bytes(self, path: str, data: bytes) -> None:
        """See ``Store``."""
        with self._translated("written", path):
            self._files.pipe_file(self._locate(path), data)

    def create_bytes(self, path: str, data: bytes) -> None:
        """See ``Store``: by ``If-None-Match: *`` on S3, by a lock in this process in memory."""
        full = self._locate(path)
        for attempt in range(_CONFLICT_TRIES):
            try:
                with self._translated("written", path), _lock(self._kind):
                    self._files.pipe_file(full, data, mode="create")
                return
            except PrecisionTimeError as error:
                code = _response_code(error.__cause__)
                if code in ("PreconditionFailed", "412") or isinstance(error.__cause__, FileExistsError):
                    raise VersionExistsError(
                        "this file exists already", got=f"{self.url}/{path}", expected="a name that is free"
                    ) from error
                # S3 answers 409 while another conditional write is under way: its outcome decides.
                if code not in ("ConditionalRequestConflict", "409") or attempt + 1 == _CONFLICT_TRIES:
                    raise
                time.sleep(0.1 * 2**attempt)

    def list_files(self, prefix: str = "") -> list[str]:
        """See ``Store``."""
        start = self._locate(prefix) if prefix else self._base
        with self._translated("read", prefix):
            try:
                found = self._files.find(start)
            except FileNotFoundError:
                found = []
        root = self._base.lstrip("/")
        skip = len(root) + 1 if root else 0
        below = f"{prefix}/" if prefix else ""
        relative = (name.lstrip("/")[skip:] for name in found)
        return sorted(name for name in relative if name.startswith(below) and name and not is_hidden(name))

    def exists(self, path: str) -> bool:
        """See ``Store``."""
        with self._translated("read", path):
            return bool(self._files.isfile(self._locate(path)))

    def remove(self, path: str) -> None:
        """See ``Store``."""
        # S3 deletes what is not there without a word.
        if not self.exists(path):
            raise NotFoundError("there is no such file", got=f"{self.url}/{path}")
        with self._translated("removed", path):
            self._files.rm_file(self._locate(path))

    def _locate(self, path: str) -> str:
        return f"{self._base}/{check_path(path)}"

    @contextmanager
    def _translated(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except PrecisionTimeError:
            raise
        except OSError as error:
            raise storage_error(error, action, f"{self.url}/{path}") from error
        # botocore and aiohttp have their own hierarchies: no credentials, no connection, time-outs.
        except Exception as error:
            raise StorageError(
                f"the file cannot be {action}",
                got=f"{self.url}/{path}: {type(error).__name__}: {error}"[:500],
                fix="check the connection and the credentials in the environment",
            ) from error


@contextmanager
def _lock(kind: str) -> Iterator[None]:
    if kind == "memory":
        with _MEMORY_LOCK:
            yield
    else:
        yield


def _response_code(error: BaseException | None) -> str:
    """The error code S3 answered with, wherever in the chain it is kept."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        error = error.__cause__
    return ""
