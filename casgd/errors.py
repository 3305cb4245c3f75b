"""Errors of the solver: each says what is wrong, which value was given, which was expected, and how to fix it."""

import difflib
from collections.abc import Iterable

__all__ = [
    "CasgdError",
    "CommunicationError",
    "InputError",
    "NotConvergedWarning",
    "PrecisionWarning",
    "unknown_name",
]


def _printable(text: str) -> str:
    """``text`` with newlines and escape codes spelled out: values come from users, files and other ranks."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class CasgdError(Exception):
    """Root of the hierarchy.

    ``code`` is the stable name in logs and JSON, ``exit_code`` the exit code of the command line (1 internal, 2 bad
    input).
    """

    code = "E-CASGD"
    exit_code = 1

    def __init__(self, what: str, *, got: object = None, expected: str | None = None, fix: str | None = None) -> None:
        self.what = what
        self.got = None if got is None else str(got)
        self.expected = expected
        self.fix = fix
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The whole text on one line: what; got; expected; fix."""
        parts = [self.what]
        if self.got is not None:
            parts.append(f"got: {self.got}")
        if self.expected is not None:
            parts.append(f"expected: {self.expected}")
        if self.fix is not None:
            parts.append(f"fix: {self.fix}")
        return _printable("; ".join(parts))

    def __str__(self) -> str:
        return self.message

    def to_dict(self) -> dict[str, str | None]:
        """The parts of the message as JSON values."""
        return {"code": self.code, "what": self.what, "got": self.got, "expected": self.expected, "fix": self.fix}


class InputError(CasgdError, ValueError):
    """The input cannot be used: data, labels, an option, or ranks that disagree."""

    code = "E-INPUT"
    exit_code = 2


def unknown_name(kind: str, name: object, known: Iterable[str]) -> InputError:
    """The error for a ``name`` of some ``kind`` that is not among the ``known`` ones; it offers the nearest."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    return InputError(
        f"unknown {kind}",
        got=repr(name),
        expected=", ".join(names),
        fix=f"did you mean {close[0]!r}?" if close else None,
    )


class CommunicationError(CasgdError, RuntimeError):
    """A rank died or did not answer before the deadline, or a message was incomplete."""

    code = "E-COMMUNICATION"
    exit_code = 1


class NotConvergedWarning(UserWarning):
    """The last epoch ended before the loss stopped falling."""


class PrecisionWarning(UserWarning):
    """The predicted excess loss of a precision policy is above the limit."""
