"""Short runs of CA-SGD at several s and batch sizes, taken in turn, whose times the planner uses."""

import dataclasses
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.communicator import Communicator
from precision_time.casgd.costs import Sample
from precision_time.casgd.problem import PARTS, Options, Problem, Schedule

__all__ = ["Probes"]

_MOST_PROBES = 13  # seven s, and two other batch sizes with up to three each
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 10


@dataclass(kw_only=True)
class _Probe:
    """One s and batch size: the seconds of a call beside its steps, and those of a step by part in each round."""

    s: int
    batch_size: int
    step_s: float
    call_s: float
    outer_steps: int = 1
    rounds: list[Mapping[str, float]] = field(default_factory=list)

    @property
    def round_s(self) -> float:
        return self.call_s + self.outer_steps * self.s * self.step_s


class Probes:
    """Runs on the first rows; their number follows from gathered seconds, so that all ranks make the same calls.

    Each round runs all probes in turn, so that a slow spell of the machine affects all of them and not one s alone.
    """

    def __init__(self, problem: Problem, options: Options, comm: Communicator, *, outer_steps: int) -> None:
        self._problem, self._comm, self._outer_steps = problem, comm, outer_steps
        # Times do not depend on the step sizes; tiny ones cannot overflow.
        self._options = dataclasses.replace(
            options, schedule=Schedule(kind="constant", eta0=1e-6), tol=None, earlier_losses=()
        )
        stored = getattr(problem.features, "nnz", None)
        entries = problem.rows * max(problem.columns, 1)
        shapes = comm.gather([problem.columns, 1.0 if stored is None else stored / entries])
        self._features = sum(int(columns) for columns, _ in shapes)
        self._columns, self._density = (float(value) for value in max(shapes, key=math.prod))
        self._batch_size = min(options.batch_size, problem.rows)
        self._time(1, self._batch_size, 1)  # warms up
        seconds, call_s = self._time(1, self._batch_size, outer_steps)
        plain = _Probe(s=1, batch_size=self._batch_size, step_s=sum(seconds.values()), call_s=call_s, rounds=[seconds])
        plain.outer_steps = outer_steps
        self._probes = [plain]

    @property
    def sgd_step_s(self) -> float:
        """Seconds of a step of plain SGD, by its first probe."""
        return self._probes[0].step_s

    def least_s(self, limit: int) -> float:
        """The least seconds for the grid up to s = ``limit``, by the first probe of plain SGD."""
        grid = [2**k for k in range(limit.bit_length())]
        one_round_s = sum(self._probes[0].call_s + s * self.sgd_step_s for s in grid)
        one_round_s += sum(self._probes[0].call_s + s * self.sgd_step_s for s, _ in self._others(limit))
        return float(one_round_s * (1 + _FEWEST_ROUNDS))

    def _others(self, reached: int) -> list[tuple[int, int]]:
        """s and batch size of the probes at a smaller and a larger batch size."""
        b, rows = self._batch_size, self._problem.rows
        settings = [(s, max(1, b // 4)) for s in (1, 4, 16)] + [(s, min(2 * b, rows)) for s in (1, 4)]
        return [(s, size) for s, size in settings if size != b and s <= reached and s * size <= rows]

    def open_grid(self, limit: int) -> None:
        """Probe s = 1, 2, 4, ... at the batch size until it only gets slower, then a few s at two other batch sizes."""
        b = self._batch_size
        self._probes[0].rounds.clear()
        slow = 0
        for s in [2**k for k in range(1, limit.bit_length())]:
            least = min(probe.step_s for probe in self._probes)
            probe = self._open(s, b)
            if probe.step_s > 2 * least:
                # Probed once more: a single slow spell must not end the grid.
                probe.step_s = min(probe.step_s, self._open(s, b).step_s)
            self._probes.append(probe)
            slow = slow + 1 if probe.step_s > 2 * least else 0
            if slow == 2:
                break
        self._probes += [self._open(s, other) for s, other in self._others(self._probes[-1].s)]

    def run_rounds(self, budget_s: float) -> None:
        """Three to ten more rounds, with fewer outer steps if ``budget_s`` seconds are not enough."""
        share_s = budget_s / _MOST_PROBES / _FEWEST_ROUNDS
        for probe in self._probes:
            affordable = int(share_s / max(probe.step_s * probe.s, 1e-9))
            probe.outer_steps = max(1, min(self._outer_steps, affordable))
        round_s = sum(probe.round_s for probe in self._probes)
        for _ in range(max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(budget_s / max(round_s, 1e-9))))):
            for probe in self._probes:
                probe.rounds.append(self._time(probe.s, probe.batch_size, probe.outer_steps)[0])

    def samples(self) -> tuple[Sample, ...]:
        """The results of the rounds so far."""
        return tuple(self._describe(probe) for probe in self._probes)

    def _describe(self, probe: _Probe) -> Sample:
        # Each part at its fastest: other work on the machine rarely slows the same part in every round.
        parts_s = {part: min(seconds[part] for seconds in probe.rounds) for part in PARTS}
        rounds_s = tuple(sum(seconds.values()) for seconds in probe.rounds)
        return Sample(
            objective=self._problem.objective.name,
            policy=self._options.policy.name,
            rows=self._problem.rows,
            features=self._features,
            columns=int(self._columns),
            density=self._density,
            ranks=self._comm.size,
            s=probe.s,
            batch_size=probe.batch_size,
            outer_steps=probe.outer_steps * len(rounds_s),
            step_s=sum(parts_s.values()),
            usual_step_s=statistics.median(rounds_s),
            parts_s=MappingProxyType(parts_s),
            rounds_s=rounds_s,
        )

    def _open(self, s: int, b: int) -> _Probe:
        seconds, call_s = self._time(s, b, 1)
        return _Probe(s=s, batch_size=b, step_s=sum(seconds.values()), call_s=call_s)

    def _time(self, s: int, b: int, outer_steps: int) -> tuple[dict[str, float], float]:
        """Seconds of a step of the slowest rank by part, and the seconds of the call beside its steps."""
        block = s * b
        rows = min(outer_steps, self._problem.rows // block) * block
        weights = self._problem.sample_weight
        began = time.perf_counter()
        part = dataclasses.replace(
            self._problem,
            features=self._problem.features[:rows],
            targets=np.asarray(self._problem.targets)[:rows],
            sample_weight=None if weights is None else np.asarray(weights)[:rows],
        )
        epochs = math.ceil(outer_steps * block / rows)
        run = dataclasses.replace(self._options, s=s, batch_size=b, epochs=epochs)
        self._comm.barrier()
        solution = run_ca_sgd(part, run, comm=self._comm)
        beside_s = time.perf_counter() - began - sum(solution.seconds.values())
        own_seconds = {name: solution.seconds[name] / max(solution.steps, 1) for name in PARTS}
        of_ranks = self._comm.gather([own_seconds, beside_s])
        slowest = max((seconds for seconds, _ in of_ranks), key=lambda seconds: sum(seconds.values()))
        return {name: slowest[name] for name in PARTS}, max(float(beside_s) for _, beside_s in of_ranks)
