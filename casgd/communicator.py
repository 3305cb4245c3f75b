"""The contract between the solver and the ranks of a job, the job of one process, and an emulated network delay."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

import numpy as np

from precision_time.casgd.errors import CasgdError, CommunicationError, InputError

__all__ = [
    "ABORT_STATUS",
    "RAISED_TYPES",
    "SPIN_S",
    "WIRE_TYPES",
    "Communicator",
    "DelayedCommunicator",
    "Done",
    "OneProcess",
    "Pending",
    "agree",
    "check_agreement",
    "check_buffer",
    "check_deadline",
    "describe_loss",
    "refuse_if_lost",
    "say",
    "to_json",
    "without_delay",
]

T = TypeVar("T")

ABORT_STATUS = 3
WIRE_TYPES = ("float32", "float64")
RAISED_TYPES = ("bfloat16", "float16")  # summed in float32, then rounded once
#: A shorter wait is polled without giving up the core, because short waits are the ones that are timed.
SPIN_S = 0.002


class Pending(Protocol):
    """A sum under way; the buffer may be neither read nor written before `wait` has returned."""

    def wait(self) -> None:
        """Return when the buffer holds the sum; CommunicationError after the communicator's deadline."""


@runtime_checkable
class Communicator(Protocol):
    """The calls that the solver makes. Every rank makes the same calls in the same order.

    ``reductions`` counts the sums started so far, by `sum` and `start_sum`; `gather` and `barrier` are not counted.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def reductions(self) -> int: ...

    def sum(self, buffer: Any) -> None:
        """Replace ``buffer``, of the same shape on all ranks, by its sum over the ranks.

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
    # NumPy builds the name of a type at each access, which takes long against a sum of few words.
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


def check_deadline(deadline_s: float) -> None:
    """InputError unless ``deadline_s`` is above zero."""
    if not deadline_s > 0:
        raise InputError("the deadline of a communicator must be positive", got=deadline_s, expected="seconds > 0")


def describe_loss(comm: Communicator, call: str, reason: str) -> CommunicationError:
    """The error of a rank whose ``call`` (a sum, a barrier, ...) failed for ``reason``."""
    return CommunicationError(
        f"rank {comm.rank} of {comm.size} waited in vain in {call}",
        got=reason,
        expected="every rank makes the same calls and is alive",
        fix="look in the output of the other ranks for the first error; raise deadline_s if one is only slow",
    )


def refuse_if_lost(lost: CommunicationError | None) -> None:
    """CommunicationError if an earlier call has already ended with the error ``lost``."""
    if lost is not None:
        raise CommunicationError("this communicator has already lost a rank", got=lost.what)


def to_json(value: object) -> bytes:
    """``value`` as JSON; NumPy scalars become numbers, anything else that JSON lacks is an InputError."""

    def plain(scalar: object) -> object:
        if isinstance(scalar, np.generic):
            return scalar.item()
        raise InputError("only JSON values travel between ranks", got=type(scalar).__name__)

    return json.dumps(value, default=plain, sort_keys=True).encode()


def say(message: str) -> None:
    """Write one line to standard error at once: the process may end next."""
    print(message, file=sys.stderr, flush=True)


class OneProcess:
    """The communicator of a job with one rank: a sum changes nothing and is only counted."""

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

    `sum` busy-waits before it sums. The delay of `start_sum` begins at its call, so work done before ``wait`` hides it.
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


def without_delay(comm: Communicator) -> Any:
    """The communicator inside a DelayedCommunicator, or ``comm`` itself."""
    return getattr(comm, "inner", comm)


def check_agreement(comm: Communicator, values: Mapping[str, object]) -> None:
    """Return if all ranks pass equal ``values`` (JSON values); otherwise every rank raises the same InputError.

    The error names each value that differs, the ranks that differ from the majority, and the value of the majority
    (rank 0's if there is none). Call it before anything whose size follows from the values: ranks that reduce buffers
    of different lengths corrupt memory or wait for ever.
    """
    values_of_ranks = comm.gather(dict(values))
    differences = []
    for name in sorted({name for of_rank in values_of_ranks for name in of_rank}):
        texts = [json.dumps(of_rank[name]) if name in of_rank else "nothing" for of_rank in values_of_ranks]
        if len(set(texts)) == 1:
            continue
        usual = Counter(texts).most_common(1)[0][0]
        others = [f"rank {rank} has {name}={text}" for rank, text in enumerate(texts) if text != usual]
        shown = others if len(others) <= 4 else [*others[:4], f"{len(others) - 4} more ranks differ"]
        differences.append(f"{', '.join(shown)} where the others have {usual}")
    if differences:
        raise InputError(
            "the ranks do not agree",
            got="; ".join(differences),
            expected="the same values on every rank",
            fix="start every rank with the same options and the same rows",
        )


def agree(comm: Communicator, work: Callable[[], T]) -> T:
    """``work()``; if it fails on one rank, all ranks raise, so that none waits for the others.

    Raises:
        InputError: on ranks whose own work succeeded; names the first rank whose work failed.
    """
    if comm.size == 1:
        return work()
    failure: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except (CasgdError, ValueError, TypeError, OSError) as error:
        failure = error
    messages = comm.gather(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise InputError(f"rank {rank} cannot go on", got=message)
    return result  # type: ignore[return-value]  # it is set where nothing failed
