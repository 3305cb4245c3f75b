"""A lock for one writer at a time in any store: a file, which is taken over if its owner is dead."""

import contextlib
import time
import uuid
from collections.abc import Iterator

from precision_time.storage.errors import NotFoundError, PrecisionTimeError, StorageError, VersionExistsError
from precision_time.storage.store import Store

__all__ = ["hold_exclusively"]

_MAX_TOKEN_BYTES = 1000


@contextlib.contextmanager
def hold_exclusively(
    store: Store, path: str, *, token: str, stale_after_s: float = 120.0, wait_s: float = 600.0
) -> Iterator[float]:
    """Hold the lock at ``path`` for the block; yields the ``time.monotonic()`` up to which it is certainly held.

    The lock is a file that exactly one writer can create. An owner that dies leaves its file: a waiting process that
    sees the same content for ``stale_after_s`` by its own clock takes the lock over, so an owner must be done by then.
    ``token`` names the owner, which gets the lock again at once if an earlier attempt of it failed. Raises
    ``StorageError`` after ``wait_s``, and the errors of ``Store``.
    """
    deadline = time.monotonic() + wait_s
    last_content, since = None, time.monotonic()
    claim = f"{token} {uuid.uuid4().hex}".encode()
    while True:
        # Read before the request, so that the duration of the request counts as time of the owner.
        began = time.monotonic()
        try:
            store.create_bytes(path, claim)
            break
        except VersionExistsError:
            current = _read(store, path)
        if current == claim:
            break
        if current != last_content:
            last_content, since = current, time.monotonic()
        is_dead = current is not None and (
            current.startswith(f"{token} ".encode()) or time.monotonic() - since > stale_after_s
        )
        if current is not None and is_dead and _take_over(store, path, current, claim):
            break
        if time.monotonic() > deadline:
            raise StorageError(
                "another run holds this lock",
                got=f"{store.url}/{path}",
                expected=f"its end within {wait_s:g} s",
                fix="wait for that run; remove the file if there is no such run",
            )
        time.sleep(min(1.0, stale_after_s / 10))
    try:
        yield began + stale_after_s
    finally:
        # An unreachable store keeps the file, which is taken over once it is stale.
        with contextlib.suppress(PrecisionTimeError):
            if _read(store, path) == claim:
                store.remove(path)


def _read(store: Store, path: str) -> bytes | None:
    try:
        return store.read_bytes(path, max_bytes=_MAX_TOKEN_BYTES)
    except NotFoundError:
        return None


def _take_over(store: Store, path: str, stale: bytes, claim: bytes) -> bool:
    """Replace the file of a dead owner; of several processes that try, the one that creates a second lock succeeds."""
    second_lock = f"{path}-over"
    try:
        store.create_bytes(second_lock, claim)
    except VersionExistsError:
        return False
    try:
        # Another process may have taken the lock over since we read it.
        if _read(store, path) != stale:
            return False
        store.write_bytes(path, claim)
        return True
    finally:
        store.remove(second_lock)
