"""A digest over a whole Parquet file, checked before a parser reads the file, and ignored by other readers."""

import hashlib

from precision_time.storage.errors import IntegrityError

__all__ = ["add_seal", "check_seal", "damaged"]

# Page checksums do not cover the footer, and some damaged footers abort the process inside Arrow. So a digest of the
# whole file lies between the pages and the footer, and is checked first.
_SEAL = b"\x89PT-SEAL"
_SEAL_BYTES = len(_SEAL) + hashlib.sha256().digest_size


def add_seal(data: bytes) -> bytes:
    """The Parquet file ``data`` with its seal."""
    footer = _footer_start(data, "this table")
    return data[:footer] + _SEAL + hashlib.sha256(data).digest() + data[footer:]


def check_seal(data: bytes, name: str, *, needed: bool = False) -> None:
    """Raise ``IntegrityError`` naming the file if its seal does not match, or is missing and ``needed``."""
    footer = _footer_start(data, name)
    start = footer - _SEAL_BYTES
    if start > 0 and data.startswith(_SEAL, start):
        digest = hashlib.sha256(data[:start])
        digest.update(data[footer:])
        if digest.digest() != data[start + len(_SEAL) : footer]:
            raise damaged(name, "content that does not match its seal")
    elif _SEAL in data:
        raise damaged(name, "a seal that is not where it belongs")
    elif needed:
        raise damaged(name, "no seal before the footer")


def _footer_start(data: bytes, name: str) -> int:
    """Where the footer begins; magic bytes and length are checked before a parser allocates the claimed size."""
    if len(data) < 12 or data[:4] != b"PAR1" or data[-4:] != b"PAR1":
        raise damaged(name, f"{len(data)} bytes that are not a complete Parquet file")
    length = int.from_bytes(data[-8:-4], "little")
    if not 0 < length <= len(data) - 12:
        raise damaged(name, f"a footer of {length} bytes in a file of {len(data)}")
    return len(data) - 8 - length


def damaged(name: str, got: str) -> IntegrityError:
    """The error for a Parquet file called ``name`` that is not what was written."""
    return IntegrityError(
        f"{name} is damaged",
        got=got[:300],
        expected="an undamaged Parquet file",
        fix="set it aside and measure its cell again, or reinstall the package if it came with it",
    )
