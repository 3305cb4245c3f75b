"""Open the store that a path or URL names: a local folder, memory, or S3."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from precision_time.storage.configuration import read_configuration
from precision_time.storage.errors import InputError
from precision_time.storage.local import LocalStore
from precision_time.storage.remote import RemoteStore
from precision_time.storage.store import Store, check_path

__all__ = ["open_store"]

_SCHEMES = ("file", "s3", "memory")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


def open_store(url: str | Path, *, timeout_s: float | None = None) -> Store:
    """The store at a bare path or a ``file:``, ``s3://bucket/...`` or ``memory://...`` URL.

    ``timeout_s`` bounds the wait for a connection to S3 and for each answer, without a second try; with None the
    library waits a minute and tries again. If ``[storage] allowed_buckets`` of the configuration file lists buckets,
    no other bucket is opened; ``remote.check_endpoint`` says which servers are allowed.

    Raises ``InputError`` for every other scheme, for chained URLs (``::``), for a bucket that is not on that list,
    and for credentials in the URL: they must come from the environment.
    """
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
    return RemoteStore(kind, base, timeout_s=timeout_s)


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
    # The text before an @ may be a secret, and messages end up in logs.
    shown = re.sub(r"//[^/]*@", "//...@", text)[:300]
    return InputError("this place cannot be used as a store", got=repr(shown), expected=expected)
