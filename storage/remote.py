"""Stores on S3 and in memory, through fsspec."""

import ipaddress
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from urllib.parse import urlsplit

from precision_time.storage.configuration import allowed_hosts
from precision_time.storage.errors import (
    InputError,
    NotFoundError,
    PrecisionTimeError,
    StorageError,
    UnreachableError,
    VersionExistsError,
)
from precision_time.storage.store import Store, check_path, check_size, is_hidden, storage_error

__all__ = ["RemoteStore", "check_endpoint"]

# fsspec's memory file system looks before it creates, without a lock of its own.
_MEMORY_LOCK = threading.Lock()

_CONFLICT_TRIES = 5
# The time-out of a write if the caller gave none: enough for the largest file of an artifact over a slow line.
_MOST_WRITE_S = 600.0
_AMAZON = ("amazonaws.com", "amazonaws.com.cn")
#: HTTP statuses of a server, or of a proxy in front of it, that cannot serve now.
_OUT_OF_SERVICE = {500, 502, 503, 504}


def check_endpoint(url: str) -> None:
    """Refuse an S3 server that is not allowed, wherever its address came from.

    Allowed are Amazon's hosts, this machine, and the hosts of ``configuration.allowed_hosts``, where ``.example.org``
    stands for every host below it. Raises ``InputError`` for any other.
    """
    try:
        host = (urlsplit(url).hostname or "").rstrip(".").casefold()
    except ValueError:
        host = ""
    if _is_loopback(host) or any(host == name or host.endswith(f".{name}") for name in _AMAZON):
        return
    if not any(host == name or (name.startswith(".") and host.endswith(name)) for name in allowed_hosts()):
        raise InputError(
            "this S3 server is not on the allow list",
            got=host or repr(url)[:100],
            expected="a host of amazonaws.com, this machine, or a host that you allowed",
            fix=f"if you trust it, export PRECISION_TIME_ALLOWED_HOSTS={host or '<host>'}, or list it in [storage] "
            "allowed_hosts of ~/.config/precision_time/config.toml; else unset AWS_ENDPOINT_URL",
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        # Only dotted decimal counts as an address: not 2130706433 or 0177.0.0.1, which a resolver may accept.
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class RemoteStore(Store):
    """A prefix of an S3 bucket or of fsspec's process-wide memory. One PUT is whole or absent, without further care."""

    def __init__(self, kind: str, base: str, *, timeout_s: float | None = None) -> None:
        super().__init__(f"{kind}://{base}")
        self.is_remote = kind == "s3"
        self._base = f"/{base}".rstrip("/") if kind == "memory" else base
        # Listings must show the files that other processes wrote, so nothing is cached.
        options: dict[str, Any] = {"use_listings_cache": False} if kind == "s3" else {}
        if kind == "s3" and timeout_s is not None:
            options["config_kwargs"] = {
                "connect_timeout": timeout_s,
                "read_timeout": timeout_s,
                "retries": {"total_max_attempts": 1},
            }
        # A PUT waits until the server agrees to receive the body (Expect: 100-continue); the library has no time-out
        # for that wait.
        self._write_options: dict[str, Any] = {"timeout": timeout_s or _MOST_WRITE_S} if kind == "s3" else {}
        try:
            import fsspec

            self._files: Any = fsspec.filesystem(kind, **options)
            if timeout_s is not None:
                # s3fs has retries of its own; this instance is shared only by stores with the same time-out.
                self._files.retries = 1
        except ImportError as error:
            raise InputError(
                f"{kind}:// needs a package that is not installed",
                got=str(error),
                fix="pip install 'precision-time[s3]'",
            ) from error
        self._kind = kind
        self._is_checked = kind != "s3"

    def read_bytes(self, path: str, *, max_bytes: int | None = None) -> bytes:
        """See ``Store``."""
        full = self._locate(path)
        with self._translated("read", path):
            if max_bytes is not None:
                # The size is read first, so that an oversized object is not fetched.
                check_size(b"", path, max_bytes=max_bytes)
                size = self._files.info(full)["size"]
                if size > max_bytes:
                    return check_size(bytes(max_bytes + 1), path, max_bytes=max_bytes)
            data: bytes = self._files.cat_file(full)
        return check_size(data, path, max_bytes=max_bytes)

    def write_bytes(self, path: str, data: bytes) -> None:
        """See ``Store``."""
        with self._translated("written", path):
            self._files.pipe_file(self._locate(path), data, **self._write_options)

    def create_bytes(self, path: str, data: bytes) -> None:
        """See ``Store``: by ``If-None-Match: *`` on S3, by a lock in this process in memory."""
        full = self._locate(path)
        for attempt in range(_CONFLICT_TRIES):
            try:
                with self._translated("written", path), _lock(self._kind):
                    self._files.pipe_file(full, data, mode="create", **self._write_options)
                return
            except PrecisionTimeError as error:
                code = _response_code(error.__cause__)
                if code in ("PreconditionFailed", "412") or isinstance(error.__cause__, FileExistsError):
                    raise VersionExistsError(
                        "this file exists already", got=f"{self.url}/{path}", expected="a name that is free"
                    ) from error
                # S3 answers 409 while another conditional write is under way, whose outcome decides.
                if code not in ("ConditionalRequestConflict", "409") or attempt + 1 == _CONFLICT_TRIES:
                    raise
                time.sleep(0.1 * 2**attempt)

    def list_files(self, prefix: str = "") -> list[str]:
        """See ``Store``."""
        return sorted(self._sizes(prefix))

    def total_bytes(self, prefix: str = "") -> int:
        """See ``Store``."""
        return sum(self._sizes(prefix).values())

    def _sizes(self, prefix: str) -> dict[str, int]:
        start = self._locate(prefix) if prefix else self._base
        with self._translated("read", prefix):
            try:
                entries = self._files.find(start, detail=True)
            except FileNotFoundError:
                entries = {}
        root = self._base.lstrip("/")
        skip = len(root) + 1 if root else 0
        below = f"{prefix}/" if prefix else ""
        sizes = {name.lstrip("/")[skip:]: int(entry["size"]) for name, entry in entries.items()}
        return {name: size for name, size in sizes.items() if name.startswith(below) and name and not is_hidden(name)}

    def exists(self, path: str) -> bool:
        """See ``Store``."""
        with self._translated("read", path):
            return bool(self._files.isfile(self._locate(path)))

    def remove(self, path: str) -> None:
        """See ``Store``."""
        # S3 reports no error for a file that is not there.
        if not self.exists(path):
            raise NotFoundError("there is no such file", got=f"{self.url}/{path}")
        with self._translated("removed", path):
            self._files.rm_file(self._locate(path))

    def _locate(self, path: str) -> str:
        return f"{self._base}/{check_path(path)}"

    @contextmanager
    def _translated(self, action: str, path: str) -> Iterator[None]:
        try:
            self._check_server()
            yield
        except PrecisionTimeError:
            raise
        except Exception as error:
            if self.is_remote and _is_unanswered(error):
                raise UnreachableError(
                    "the S3 server does not answer",
                    got=f"{self.url}/{path}: {type(error).__name__}: {error}"[:500],
                    fix="check the connection, AWS_ENDPOINT_URL and AWS_REGION",
                ) from error
            self._raise_translated(error, action, path)

    def _check_server(self) -> None:
        """Check the server before the first request: its address may come from the environment or from many files."""
        if not self._is_checked:
            self._files.connect()
            check_endpoint(self._files.s3.meta.endpoint_url)
            self._is_checked = True

    def _raise_translated(self, error: Exception, action: str, path: str) -> NoReturn:
        if isinstance(error, OSError):
            raise storage_error(error, action, f"{self.url}/{path}") from error
        # botocore and aiohttp have hierarchies of their own.
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


def _is_unanswered(error: BaseException) -> bool:
    """Whether ``error`` means that no connection was made, that it broke, or that the server cannot serve now."""
    from aiohttp import ClientError
    from botocore import exceptions  # type: ignore[import-untyped]

    lost = (ConnectionError, TimeoutError, ClientError, exceptions.ConnectionError, exceptions.HTTPClientError)
    status = _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")
    return isinstance(error, lost) or status in _OUT_OF_SERVICE


def _response_code(error: BaseException | None) -> str:
    """The error code S3 answered with."""
    return str(_response(error).get("Error", {}).get("Code", ""))


def _response(error: BaseException | None) -> dict[str, Any]:
    """The answer of S3 in ``error`` or one of its causes; empty if S3 did not answer."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return response
        error = error.__cause__
    return {}
