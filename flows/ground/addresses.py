"""Addresses of servers: whether one is this machine, and how to show one without its password."""

from urllib.parse import urlsplit, urlunsplit

__all__ = ["is_loopback", "without_password"]


def is_loopback(url: str) -> bool:
    """Whether the host of ``url`` is this machine, reached without a network."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def without_password(url: str) -> str:
    """``url`` without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
