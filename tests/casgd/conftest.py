"""Fixtures of the solver's tests: ranks emulated by threads of this process, and small problems of the three kinds."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from precision_time.casgd.communicator import to_json
from precision_time.casgd.objectives import LOGISTIC, OBJECTIVES, SQUARED
from precision_time.casgd.probes import Probes
from precision_time.casgd.problem import Problem


class ThreadRank:
    """One of several ranks that are threads: a sum adds the buffers in the order of the ranks."""

    def __init__(self, rank: int, shared: "_Shared") -> None:
        self.rank, self.size, self.reductions = rank, len(shared.values), 0
        self.words: list[int] = []
        self._shared = shared

    def sum(self, buffer: np.ndarray) -> None:
        self.reductions += 1
        self.words.append(buffer.size)
        buffer[...] = sum(self._exchange(buffer.copy()))

    def start_sum(self, buffer: np.ndarray) -> Any:
        self.sum(buffer)
        return self

    def wait(self) -> None:
        return

    def gather(self, value: object) -> list[Any]:
        return [json.loads(text) for text in self._exchange(to_json(value))]

    def barrier(self) -> None:
        self._shared.barrier.wait()

    def abort(self, message: str) -> None:
        self._shared.barrier.abort()
        raise RuntimeError(message)

    def _exchange(self, value: Any) -> list[Any]:
        self._shared.values[self.rank] = value
        self._shared.barrier.wait()
        values = list(self._shared.values)
        self._shared.barrier.wait()
        return values


class _Shared:
    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)


def run_ranks(job: Callable[[ThreadRank], Any], size: int) -> list[Any]:
    """``job(comm)`` on every rank at once; the results in the order of the ranks, or the first error."""
    shared = _Shared(size)

    def guarded(rank: int) -> Any:
        try:
            return job(ThreadRank(rank, shared))
        except BaseException:
            shared.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
    errors = [future.exception() for future in futures if future.exception()]
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]  # type: ignore[misc]
    return [future.result() for future in futures]


def make_problem(objective: str, m: int = 203, n: int = 23, *, seed: int = 0, **more: Any) -> Problem:
    """Rows of norm about 1 with labels drawn from the model itself."""
    rng = np.random.default_rng((seed, 7))
    features = rng.normal(size=(m, n)) / np.sqrt(n)
    margins = features @ rng.normal(size=n) * 2
    loss = OBJECTIVES[objective]
    if loss is LOGISTIC:
        targets = np.where(rng.random(m) < 1 / (1 + np.exp(-margins)), 1.0, -1.0)
    elif loss is SQUARED:
        targets = margins + 0.3 * rng.normal(size=m)
    else:
        targets = rng.poisson(np.exp(margins / 2)).astype(float)
    return Problem(**{"features": features, "targets": targets, "objective": loss, **more})


@pytest.fixture
def simulate_probes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], dict[str, float]]], None]:
    """Probes that take the seconds of a cost model instead of running.

    ``simulate_probes(parts_of)``: ``parts_of(s, b)`` are the seconds of an outer step by part.
    """

    def simulate(parts_of: Callable[[int, int], dict[str, float]]) -> None:
        def time(_probes: Probes, s: int, b: int, _outer_steps: int) -> tuple[dict[str, float], float]:
            return {part: seconds / s for part, seconds in parts_of(s, b).items()}, 1e-4

        monkeypatch.setattr(Probes, "_time", time)

    return simulate


@pytest.fixture
def ranks() -> Callable[[Callable[[ThreadRank], Any], int], list[Any]]:
    return run_ranks


@pytest.fixture
def problem_of() -> Callable[..., Problem]:
    return make_problem
