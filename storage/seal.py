"""A digest over a whole Parquet file, where no reader of Parquet looks: damage is found before a parser meets it."""

import hashlib

from precision_time.storage.errors import IntegrityError

__all__ = ["add_seal", "check_seal"]

# Page checksums leave the footer out, and some damaged footers abort the process inside Arrow. So a digest of the
# whole file stands between the pages and the footer, and is checked first.
_SEAL = b"\x89PT-SEAL"
_SEAL_BYTES = len(_SEAL) + hashlib.sha256().digest_size


def add_seal(data: bytes) -> bytes:
    """The Parquet file ``data`` with its seal."""
    footer = _footer_start(data, "this table")
    return data[:footer] + _SEAL + hashlib.sha256(data).digest() + data[footer:]


def check_seal(data: bytes, name: str, *, needed: bool = False) -> None:
    """Raise ``IntegrityError`` naming the file if its seal does not match; without one only where it is ``needed``."""
    footer = _footer_start(data, name)
    start = footer - _SEAL_BYTES
    if start > 0 and data.startswith(_SEAL, start):
        digest = hashlib.sha256(data[:start])
        digest.update(data[footer:])
        if digest.digest() != data[start + len(_SEAL) : footer]:
            raise _damaged(name, "content that does not match its seal")
    elif _SEAL in data:
        raise _damaged(name, "a seal that is not where it belongs")
    elif needed:
        raise _damaged(name, "no seal before the footer")


def _footer_start(data: bytes, name: str) -> int:
    """Where the footer begins, by magic bytes and length, before a parser allocates what they claim."""
    if len(data) < 12 or data[:4] != b"PAR1" or data[-4:] != b"PAR1":
        raise _damaged(name, f"{len(data)} bytes that are not a complete Parquet file")
    length = int.from_bytes(data[-8:-4], "little")
    if not 0 < length <= len(data) - 12:
        raise _damaged(name, f"a footer of {length} bytes in a file of {len(data)}")
    return len(data) - 8 - length


def _damaged(name: str, got: str) -> IntegrityError:
    return IntegrityError(
        f"{name} is damaged",
        got=got,
        expected="an undamaged Parquet file",
        fix="set it aside and measure its cell again, or install the package anew where it came with it",
    )
