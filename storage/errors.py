"""Errors of precision_time: each says what is wrong, which value was given, which was expected, and how to fix it."""

import difflib
from collections.abc import Iterable

__all__ = [
    "ClusterLostError",
    "GoalNotMetError",
    "InputError",
    "IntegrityError",
    "NoWorkersError",
    "NotFoundError",
    "OutOfDomainError",
    "PartialError",
    "PrecisionTimeError",
    "PrecisionUnsupportedError",
    "StorageError",
    "StorageFullError",
    "StorageReadOnlyError",
    "TooLittleDataError",
    "UnknownNameError",
    "UnreachableError",
    "VersionExistsError",
    "nearest",
    "printable",
]


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The ``count`` names in ``known`` closest to ``name``, best first; fewer only if ``known`` has fewer."""
    folded: dict[str, str] = {}
    for candidate in known:
        folded.setdefault(candidate.casefold(), candidate)
    close = difflib.get_close_matches(name.casefold(), folded, n=count, cutoff=0.0)
    return [folded[match] for match in close]


def printable(text: str) -> str:
    """``text`` with newlines and escape codes spelled out.

    Names come from files, users and ranks, and must not control a terminal or break a log.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


class PrecisionTimeError(Exception):
    """Root of the hierarchy.

    ``code`` is the stable name in logs and JSON, ``exit_code`` the exit code of the command line
    (0 ok, 1 internal, 2 bad input, 3 goal not met, 4 trust or integrity, 5 partial, 6 out of domain).

    Example:
        >>> from precision_time import PrecisionTimeError, predict_time
        >>> try:
        ...     predict_time("resnet51", "fp32", batch_size=32)
        ... except PrecisionTimeError as error:
        ...     print(error.code, error.exit_code, error.nearest)
        E-UNKNOWN-NAME 2 ['resnet51q', 'resnet50', 'resnet18']
    """

    code = "E-INTERNAL"
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
        return printable("; ".join(parts))

    def __str__(self) -> str:
        return self.message

    def to_dict(self) -> dict[str, str | None]:
        """The parts of the message as JSON values."""
        return {"code": self.code, "what": self.what, "got": self.got, "expected": self.expected, "fix": self.fix}


class InputError(PrecisionTimeError, ValueError):
    """A value from the caller cannot be used."""

    code = "E-INPUT"
    exit_code = 2


class UnknownNameError(InputError, LookupError):
    """A name (model, GPU, precision, field) is unknown; the message offers the nearest known names."""

    code = "E-UNKNOWN-NAME"

    def __init__(self, kind: str, name: str, known: Iterable[str], *, fix: str | None = None) -> None:
        self.nearest = nearest(name, known)
        super().__init__(
            f"unknown {kind}",
            got=repr(name),
            expected=f"a known {kind}; the nearest are {', '.join(self.nearest) or 'none'}",
            fix=fix,
        )


class TooLittleDataError(InputError):
    """There are too few measurements to train and validate a predictor."""

    code = "E-TOO-LITTLE-DATA"


class PrecisionUnsupportedError(InputError):
    """The device does not support the requested precision."""

    code = "E-PRECISION-UNSUPPORTED"


class NotFoundError(PrecisionTimeError, FileNotFoundError):
    """A file, artifact, version or alias does not exist."""

    code = "E-NOT-FOUND"
    exit_code = 2


class StorageError(PrecisionTimeError, OSError):
    """Storage cannot be read or written."""

    code = "E-STORE"
    exit_code = 2


class StorageFullError(StorageError):
    """There is no room for the data."""

    code = "E-STORE-FULL"


class StorageReadOnlyError(StorageError, PermissionError):
    """The place for the data cannot be written."""

    code = "E-STORE-READ-ONLY"


class UnreachableError(StorageError):
    """The server did not answer: no connection, no answer in time, or an answer that it cannot serve now.

    A copy on this machine may be used instead. A refusal or a missing file is an answer, and not this error.
    """

    code = "E-STORE-UNREACHABLE"


class VersionExistsError(PrecisionTimeError, FileExistsError):
    """Another publisher has already created this version or file."""

    code = "E-VERSION-EXISTS"
    exit_code = 2


class IntegrityError(PrecisionTimeError, ValueError):
    """Stored data differ from the written data: checksum, schema, digest or structure do not match."""

    code = "E-DATA-CORRUPT"
    exit_code = 4


class GoalNotMetError(PrecisionTimeError, RuntimeError):
    """A stated goal (a gate, a limit) was not reached; nothing is broken."""

    code = "E-GOAL-NOT-MET"
    exit_code = 3


class PartialError(PrecisionTimeError, RuntimeError):
    """A part of the work failed; the rest is done and stored."""

    code = "E-PARTIAL"
    exit_code = 5


class OutOfDomainError(PrecisionTimeError, ValueError):
    """In strict mode, a query lies outside the training data of the predictor."""

    code = "E-OUT-OF-DOMAIN"
    exit_code = 6


class NoWorkersError(PrecisionTimeError, RuntimeError):
    """The workers that a campaign needs did not start, or all have gone."""

    code = "E-NO-WORKERS"
    exit_code = 2


class ClusterLostError(PrecisionTimeError, RuntimeError):
    """The scheduler of the cluster has gone; nothing more can be measured on it."""

    code = "E-CLUSTER-LOST"
