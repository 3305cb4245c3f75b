"""The loop over the cells of a campaign: start them, some side by side, until none is left or a limit is reached."""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from precision_time.flows.campaigns.interrupts import Interrupts
from precision_time.flows.campaigns.progress import CampaignProgress
from precision_time.flows.planning.budget import Budget
from precision_time.flows.planning.plan import CampaignPlan, PlannedCell
from precision_time.storage.errors import ClusterLostError, NoWorkersError
from precision_time.storage.schema import CellOutcome
from precision_time.tasks.gangs.leases import LeaseWait

__all__ = [
    "CellNotStartedError",
    "CellStoppedError",
    "Choose",
    "Measure",
    "MeasuredCells",
    "Submit",
    "measure_missing",
    "watch_wait",
]

Outcomes = dict[str, CellOutcome]
Measure = Callable[[PlannedCell], CellOutcome]
#: Starts a function in a thread of its own, under the name of a cell.
Submit = Callable[[PlannedCell, Callable[[], CellOutcome]], "Future[Any]"]
#: The next batch of cells, chosen by the outcomes so far; an empty one when nothing is left.
Choose = Callable[[Mapping[str, CellOutcome]], list[PlannedCell]]

INTERRUPTED = "interrupted"
POLL_S = 0.5
#: How long stopped cells may take to end their ranks; after that the cluster ends with what still runs.
STOPPING_S = 20.0


class CellStoppedError(KeyboardInterrupt):
    """Raised in the thread of a cell that must stop now; like Ctrl-C, it passes every ``except Exception``."""


class CellNotStartedError(Exception):
    """A cell that still waited for workers is given up, since no more cells are to be started."""


def watch_wait(
    planned: PlannedCell, *, progress: CampaignProgress, interrupts: Interrupts
) -> Callable[[LeaseWait], None]:
    """The function that is called while ``planned`` waits for workers, which others may hold for days.

    It shows the wait, and raises ``CellNotStartedError`` after a Ctrl-C, since this cell has not started.
    """

    def watch(wait: LeaseWait) -> None:
        if interrupts.requested:
            raise CellNotStartedError(f"interrupted while it was {wait}")
        progress.show_wait(planned, wait)

    return watch


@dataclass(slots=True)
class MeasuredCells:
    """The last outcome of each cell by id, and in words the limit or interrupt that ended the loop early, or empty."""

    outcomes: Outcomes = field(default_factory=dict)
    ended_by: str = ""


def measure_missing(
    plan: CampaignPlan,
    *,
    measure: Measure,
    progress: CampaignProgress,
    after_cell: Callable[[], None] = lambda: None,
    choose: Choose | None = None,
    budget: Budget | None = None,
    at_once: int = 1,
    submit: Submit | None = None,
    interrupts: Interrupts | None = None,
    started: float | None = None,
) -> MeasuredCells:
    """Measure the missing cells of ``plan`` in their order, or the batches that ``choose`` returns.

    ``at_once`` cells run side by side, and no more than these are handed to ``submit``. Failed cells are tried again
    after the others, up to ``max_attempts`` in all; refused cells are not. An error of ``measure`` ends the
    campaign after the running cells, and is then raised; but a lost cluster only becomes ``ended_by`` when this run has
    recorded a cell. An exception in this thread (a second Ctrl-C, a cancelled run) stops the running cells at once.
    ``started`` is the begin of the run by ``time.monotonic``, by default now.
    """
    with ThreadPoolExecutor(at_once, thread_name_prefix="cell") as pool:
        loop = _Loop(
            plan=plan,
            measure=measure,
            progress=progress,
            after_cell=after_cell,
            choose=choose or _once(plan.missing),
            budget=budget or Budget(),
            at_once=at_once,
            submit=submit or (lambda planned, run: pool.submit(run)),
            interrupts=interrupts or Interrupts(),
            started=time.monotonic() if started is None else started,
        )
        return loop.run()


def _once(cells: list[PlannedCell]) -> Choose:
    batches = [cells]
    return lambda outcomes: batches.pop() if batches else []


@dataclass(slots=True, kw_only=True)
class _Loop:
    plan: CampaignPlan
    measure: Measure
    progress: CampaignProgress
    after_cell: Callable[[], None]
    choose: Choose
    budget: Budget
    at_once: int
    submit: Submit
    interrupts: Interrupts
    started: float
    measured: MeasuredCells = field(default_factory=MeasuredCells)
    waiting: deque[PlannedCell] = field(default_factory=deque)
    failed: deque[PlannedCell] = field(default_factory=deque)
    attempts: dict[str, int] = field(default_factory=dict)
    running: dict["Future[Any]", "_Running"] = field(default_factory=dict)
    error: BaseException | None = None

    def run(self) -> MeasuredCells:
        try:
            while True:
                while len(self.running) < self.at_once and (planned := self._next()) is not None:
                    self._start(planned)
                if not self.running:
                    break
                done, _ = wait(self.running, timeout=POLL_S, return_when=FIRST_COMPLETED)
                for future in done:
                    self._finish(future)
        except BaseException:
            self._stop_now()
            raise
        if self.error is not None:
            has_some = any(outcome.status == "recorded" for outcome in self.measured.outcomes.values())
            if not has_some or not isinstance(self.error, ClusterLostError | NoWorkersError):
                raise self.error
            self.measured.ended_by = f"the loss of the cluster ({self.error})"
        elif self.interrupts.requested:
            # Also in the last cell: the user who pressed Ctrl-C expects this answer.
            self.measured.ended_by = INTERRUPTED
        return self.measured

    def _next(self) -> PlannedCell | None:
        """The cell to start now, or None when there is none, or none may start."""
        if self.error is not None:
            return None
        if not self.waiting and not self.running:
            # A batch is chosen by all outcomes of the one before.
            self.waiting.extend(self.choose(self.measured.outcomes))
        queue = self.waiting
        if self.waiting and (limit := self.budget.forbid_new(cells=len(self.attempts))):
            self.measured.ended_by = limit
            self.waiting.clear()
        if not self.waiting:
            queue = self.failed
        if not queue:
            return None
        failures = sum(outcome.status == "failed" for outcome in self.measured.outcomes.values())
        limit = self.budget.forbid_any(elapsed_s=time.monotonic() - self.started, failures=failures)
        if self.interrupts.requested:
            limit = INTERRUPTED
        if limit:
            self.measured.ended_by = limit
            return None
        return queue.popleft()

    def _start(self, planned: PlannedCell) -> None:
        self.attempts[planned.cell_id] = self.attempts.get(planned.cell_id, 0) + 1
        self.progress.start_cell(planned)
        run = _Running(planned=planned, measure=self.measure)
        self.running[self.submit(planned, run)] = run

    def _finish(self, future: "Future[Any]") -> None:
        run = self.running.pop(future)
        if isinstance(run.error, CellNotStartedError):
            self.progress.drop_cell(run.planned)
            return
        if run.error is not None:
            self.error = self.error or run.error
            return
        # Without an outcome the start failed, not the cell: the API of the pages may be away.
        outcome = run.outcome or run()
        planned = run.planned
        self.measured.outcomes[planned.cell_id] = outcome
        again = outcome.status == "failed" and self.attempts[planned.cell_id] < self.plan.spec.max_attempts
        if again:
            self.failed.append(planned)
        self.progress.finish_cell(planned, outcome, is_last_attempt=not again)
        self.after_cell()

    def _stop_now(self) -> None:
        for run in self.running.values():
            run.stop()
        wait(self.running, timeout=STOPPING_S)


class _Running:
    """One attempt at a cell: the function of its thread, its outcome or error, and a way to stop it from outside."""

    def __init__(self, *, planned: PlannedCell, measure: Measure) -> None:
        self.planned = planned
        self.outcome: CellOutcome | None = None
        self.error: BaseException | None = None
        self._measure = measure
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_stopped = False

    def __call__(self) -> CellOutcome:
        with self._lock:
            if self._is_stopped:
                raise CellStoppedError
            self._thread = threading.get_ident()
        try:
            outcome = self._measure(self.planned)
        except BaseException as error:
            self.error = error
            raise
        finally:
            with self._lock:
                self._thread = None
        self.outcome = outcome
        return outcome

    def stop(self) -> None:
        """Raise in the thread: its own clean-up ends the ranks and gives the workers back."""
        with self._lock:
            self._is_stopped = True
            if self._thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(CellStoppedError)
                )
