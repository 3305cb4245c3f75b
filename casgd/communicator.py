"""What the solver asks of the ranks of a job, the job of one process, and any job with an added delay."""

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, runtime_checkable

import numpy as np

from precision_time.casgd.errors import InputError

__all__ = [
    "ABORT_STATUS",
    "RAISED_TYPES",
    "WIRE_TYPES",
    "Communicator",
    "DelayedCommunicator",
    "Done",
    "OneProcess",
    "Pending",
    "check_agreement",
    "check_buffer",
    "say",
    "to_json",
]

ABORT_STATUS = 3
WIRE_TYPES = ("float32", "float64")
RAISED_TYPES = ("bfloat16", "float16")  # summed in float32, then rounded once


class Pending(Protocol):
    """A sum under way; the buffer may be neither read nor written before `wait` has returned."""

    def wait(self) -> None:
        """Return when the buffer holds the sum; CommunicationError after the communicator's deadline."""


@runtime_checkable
class Communicator(Protocol):
    """What the solver asks of the ranks. Every rank makes the same calls in the same order.

    ``reductions`` counts the sums started so far, by `sum` and `start_sum`; `gather` and `barrier` are not counted.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def reductions(self) -> int: ...

    def sum(self, buffer: Any) -> None:
        """Replace ``buffer``, of any one shape on all ranks, by its sum over the ranks.

        float32 and float64 travel as they are; float16 and bfloat16 are summed in float32 and rounded once at the
        end. Any other type is an InputError. A GPU buffer is summed in the order of its stream.
        """

    def start_sum(self, buffer: Any) -> Pending:
        """Start `sum` and return at once."""

    def gather(self, value: object) -> list[Any]:
        """The JSON values of all ranks, in the order of the ranks, on every rank (tuples come back as lists)."""

    def barrier(self) -> None:
        """Return when every rank has called."""

    def abort(self, message: str) -> NoReturn:
        """Write ``message`` to standard error and end all ranks with status 3."""


class Done:
    """A sum that is already done."""

    def wait(self) -> None:
        return


def check_buffer(buffer: Any) -> None:
    """InputError unless ``buffer`` is a writeable array of a type that can be summed over ranks."""
    # Numpy puts a name together each time it is asked, which a sum of few words would feel.
    is_plain = isinstance(buffer, np.ndarray) and buffer.dtype.char in "fd"
    name = "" if is_plain else getattr(getattr(buffer, "dtype", None), "name", type(buffer).__name__)
    if not is_plain and name not in WIRE_TYPES + RAISED_TYPES:
        raise InputError(
            "this type of buffer cannot be summed over ranks",
            got=name,
            expected="an array of " + ", ".join(WIRE_TYPES + RAISED_TYPES),
            fix="convert it to float32 or float64 first",
        )
    if isinstance(buffer, np.ndarray) and not buffer.flags.writeable:
        raise InputError("the sum over ranks replaces the buffer, and this one is read-only", fix="pass a copy")


def to_json(value: object) -> bytes:
    """``value`` as JSON; numpy scalars become numbers, anything else that JSON lacks is an InputError."""

    def plain(other: object) -> object:
        if isinstance(other, np.generic):
            return other.item()
        raise InputError("only JSON values travel between ranks", got=type(other).__name__)

    return json.dumps(value, default=plain, sort_keys=True).encode()


def say(message: str) -> None:
    """Write one line to standard error at once: the process may end next."""
    print(message, file=sys.stderr, flush=True)


class OneProcess:
    """The communicator of a job without other ranks: a sum changes nothing and is only counted."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.reductions = 0

    def sum(self, buffer: Any) -> None:
        check_buffer(buffer)
        self.reductions += 1

    def start_sum(self, buffer: Any) -> Pending:
        self.sum(buffer)
        return Done()

    def gather(self, value: object) -> list[Any]:
        return [json.loads(to_json(value))]

    def barrier(self) -> None:
        return

    def abort(self, message: str) -> NoReturn:
        say(message)
        raise SystemExit(ABORT_STATUS)


class _DelayedSum:
    def __init__(self, inner: Pending, ready_s: float) -> None:
        self._inner, self._ready_s = inner, ready_s

    def wait(self) -> None:
        while time.perf_counter() < self._ready_s:
            pass
        self._inner.wait()


class DelayedCommunicator:
    """``inner`` with ``delay_s`` seconds added to every sum: an emulation of a network, not a measurement of one.

    `sum` busy-waits before it sums. The delay of `start_sum` runs from its call, so work done before ``wait`` hides it.
    """

    def __init__(self, inner: Communicator, delay_s: float) -> None:
        if not delay_s >= 0:
            raise InputError("a delay cannot be negative", got=delay_s, expected="seconds >= 0")
        self.inner, self.delay_s = inner, delay_s

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def reductions(self) -> int:
        return self.inner.reductions

    def sum(self, buffer: Any) -> None:
        _DelayedSum(Done(), time.perf_counter() + self.delay_s).wait()
        self.inner.sum(buffer)

    def start_sum(self, buffer: Any) -> Pending:
        ready_s = time.perf_counter() + self.delay_s
        return _DelayedSum(self.inner.start_sum(buffer), ready_s)

    def gather(self, value: object) -> list[Any]:
        return self.inner.gather(value)

    def barrier(self) -> None:
        self.inner.barrier()

    def abort(self, message: str) -> NoReturn:
        self.inner.abort(message)


def check_agreement(comm: Communicator, values: Mapping[str, object]) -> None:
    """Return if all ranks pass equal ``values`` (JSON values); otherwise every rank raises the same InputError.

    The error names each value that differs, the ranks that stand alone with theirs, and what most ranks hold (rank 0's
    where there is no majority). Call it before anything whose size follows from the values: ranks that reduce buffers
    of different lengths corrupt memory or wait for ever.
    """
    everyone = comm.gather(dict(values))
    differences = []
    for name in sorted({name for told in everyone for name in told}):
        told = [json.dumps(each[name]) if name in each else "nothing" for each in everyone]
        if len(set(told)) == 1:
            continue
        usual = Counter(told).most_common(1)[0][0]
        others = [f"rank {rank} has {name}={text}" for rank, text in enumerate(told) if text != usual]
        shown = others if len(others) <= 4 else [*others[:4], f"{len(others) - 4} more ranks differ"]
        differences.append(f"{', '.join(shown)} where the others have {usual}")
    if differences:
        raise InputError(
            "the ranks do not agree",
            got="; ".join(differences),
            expected="the same values on every rank",
            fix="start every rank with the same options and the same rows",
        )
