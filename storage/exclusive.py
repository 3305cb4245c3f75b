"""One writer at a time, wherever the data lies: a lock that is a file, and that outlives no owner for long."""

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
    """Hold the lock at ``path`` for the block; yields the ``time.monotonic()`` up to which it is held for sure.

    The lock is a file that exactly one writer can create. An owner that died leaves its file: who sees the same
    content for ``stale_after_s`` takes the lock over (by its own clock, so that clocks of hosts need not agree), and
    an owner must be done by then. ``token`` names the owner, who gets in again at once when it failed before.
    Raises ``StorageError`` after ``wait_s``, and what ``Store`` raises.
    """
    deadline = time.monotonic() + wait_s
    seen, since = None, time.monotonic()
    own = f"{token} {uuid.uuid4().hex}".encode()
    while True:
        # Asked first: time that the answer takes is time of the owner.
        began = time.monotonic()
        try:
            store.create_bytes(path, own)
            break
        except VersionExistsError:
            current = _read(store, path)
        if current == own:
            break
        if current != seen:
            seen, since = current, time.monotonic()
        is_dead = current is not None and (
            current.startswith(f"{token} ".encode()) or time.monotonic() - since > stale_after_s
        )
        if current is not None and is_dead and _take_over(store, path, current, own):
            break
        if time.monotonic() > deadline:
            raise StorageError(
                "another run holds this lock",
                got=f"{store.url}/{path}",
                expected=f"its end within {wait_s:g} s",
                fix="wait for that run; remove the file when there is none",
            )
        time.sleep(min(1.0, stale_after_s / 10))
    try:
        yield began + stale_after_s
    finally:
        # A store that is away keeps the file; it is taken over when it is stale.
        with contextlib.suppress(PrecisionTimeError):
            if _read(store, path) == own:
                store.remove(path)


def _read(store: Store, path: str) -> bytes | None:
    try:
        return store.read_bytes(path, max_bytes=_MAX_TOKEN_BYTES)
    except NotFoundError:
        return None


def _take_over(store: Store, path: str, stale: bytes, own: bytes) -> bool:
    """Replace the file of a dead owner; of several that try one succeeds, since one can create the claim on it."""
    claim = f"{path}-over"
    try:
        store.create_bytes(claim, own)
    except VersionExistsError:
        return False
    try:
        # Another may have done all this between our look and our claim.
        if _read(store, path) != stale:
            return False
        store.write_bytes(path, own)
        return True
    finally:
        store.remove(claim)
