"""The progress of a running campaign on stderr: a bar with the time left on a terminal, plain lines elsewhere."""

import sys
import threading
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from precision_time.flows.planning.plan import CampaignPlan, PlannedCell
from precision_time.predictor.answering.estimate import format_duration
from precision_time.storage.errors import printable
from precision_time.storage.schema import CellOutcome
from precision_time.tasks.gangs.leases import LeaseWait

__all__ = ["CampaignProgress"]

#: Without a terminal, a line at least this often says that a long cell is alive.
LINE_EVERY_S = 30.0
#: A wait for workers is reported after this time, and then repeatedly, because it may last for hours.
WAIT_SAID_AFTER_S = 15.0
WAIT_SAID_EVERY_S = 60.0
#: Waits are reported about every second, so a cell without a report for this long has got its workers.
WAIT_OVER_S = 10.0
#: The weight of the newest cell in the running ratio of taken to estimated time.
NEWEST_WEIGHT = 0.3


class CampaignProgress:
    """Counts cells, estimates what is left, and shows both while the ``with`` block runs."""

    def __init__(self, plan: CampaignPlan, *, stream: TextIO | None = None) -> None:
        self.name = plan.spec.name
        self.total = min(plan.cells_to_measure, plan.spec.max_cells or plan.cells_to_measure)
        self.done = 0
        self.failed = 0
        self._running: dict[str, tuple[PlannedCell, float]] = {}
        self._said = time.monotonic()
        self._due: dict[str, float] = {}
        self._waits: dict[str, float] = {}
        # A cell beside others takes only its share of the cluster, and so of the remaining time.
        self._waiting = plan.occupied_s(plan.missing)
        self._share = {
            planned.cell_id: self._waiting[planned.cell_id] / planned.estimated_s
            for planned in plan.missing
            if planned.estimated_s > 0
        }
        self._ratio: float | None = None
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._stop = threading.Event()
        self._reminder = threading.Thread(target=self._remind, name="campaign progress", daemon=True)

    def __enter__(self) -> "CampaignProgress":
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _TimeLeft(self),
                console=self._console, transient=True,
            )  # fmt: skip
            self._bar.add_task(self.name, total=max(1, self.total))
            self._bar.start()
        else:
            self._reminder.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._bar is not None:
            self._bar.stop()
        else:
            self._reminder.join()

    @property
    def fraction(self) -> float:
        """The share of the missing cells that are done."""
        return self.done / self.total if self.total else 1.0

    @property
    def seconds_left(self) -> float | None:
        """The estimates of the cells that are left, scaled by the ratio of taken to estimated time so far.

        None before the first cell is done.
        """
        if self._ratio is None:
            return None
        left = self.total - self.done
        # An adaptive campaign measures only a part of the waiting cells.
        share = min(1.0, left / len(self._waiting)) if self._waiting else 0.0
        left_s = sum(self._waiting.values()) * share * self._ratio
        now = time.monotonic()
        running_s = sum(
            (now - started) * self._share.get(planned.cell_id, 0.0)
            for planned, started in tuple(self._running.values())
        )
        return max(0.0, left_s - running_s)

    def start_cell(self, planned: PlannedCell) -> None:
        """Show that ``planned`` is being measured now."""
        self._running[planned.cell_id] = planned, time.monotonic()
        self._due.pop(planned.cell_id, None)
        self._describe()

    def show_wait(self, planned: PlannedCell, wait: LeaseWait) -> None:
        """Report now and then that ``planned`` waits for workers, and who has them; called about every second."""
        now = time.monotonic()
        # A cell's time starts when it has its workers.
        self._running[planned.cell_id] = planned, now
        # A new dictionary each time, because threads of other cells may be reading the old one.
        recent = {cell_id: reported for cell_id, reported in self._waits.items() if now - reported < WAIT_OVER_S}
        self._waits = recent | {planned.cell_id: now}
        # Only the first in the queue reports: on a large cluster dozens of a campaign's own cells may wait.
        is_first = next(iter(self._waits)) == planned.cell_id
        if is_first and wait.seconds >= self._due.get(planned.cell_id, WAIT_SAID_AFTER_S):
            self._due[planned.cell_id] = wait.seconds + WAIT_SAID_EVERY_S
            others = len(recent.keys() - {planned.cell_id})
            more = f" and {others} more" if others else ""
            self._print(f"{planned.cell.label}{more}: {wait}, for {format_duration(wait.seconds)} so far")

    def drop_cell(self, planned: PlannedCell) -> None:
        """Forget ``planned``, which was given up before it started."""
        self._running.pop(planned.cell_id, None)

    def finish_cell(self, planned: PlannedCell, outcome: CellOutcome, *, is_last_attempt: bool) -> None:
        """Count ``planned``, unless it failed and will be tried again, and report its outcome."""
        now = time.monotonic()
        taken_s = now - self._running.pop(planned.cell_id, (planned, now))[1]
        self._describe()
        if outcome.rows and planned.estimated_s > 0:
            ratio = taken_s / planned.estimated_s
            self._ratio = ratio if self._ratio is None else (1 - NEWEST_WEIGHT) * self._ratio + NEWEST_WEIGHT * ratio
        if is_last_attempt:
            self.done += 1
            self.total = max(self.total, self.done)
            self.failed += outcome.status != "recorded"
            self._waiting.pop(planned.cell_id, None)
        text = f"{planned.cell.label}: {outcome.status}"
        if outcome.status != "recorded":
            text += f", {outcome.cause}: {outcome.message}" if outcome.message else f", {outcome.cause}"
            text += "" if is_last_attempt else "; it will be tried again"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.done)
            if outcome.status != "recorded":
                self._print(text)
        else:
            self._print(f"[{self.done}/{self.total}] {text} ({format_duration(taken_s)}){self._left()}")

    def _describe(self) -> None:
        if self._bar is not None and self._running:
            others = f" and {len(self._running) - 1} more" if len(self._running) > 1 else ""
            planned, _ = next(iter(self._running.values()))
            self._bar.update(self._bar.task_ids[0], description=f"{planned.cell.label}{others}")

    def _left(self) -> str:
        left_s = self.seconds_left
        return "" if left_s is None or self.done >= self.total else f", about {format_duration(max(1.0, left_s))} left"

    def _remind(self) -> None:
        while not self._stop.wait(max(0.001, self._said + LINE_EVERY_S - time.monotonic())):
            running = tuple(self._running.values())
            if time.monotonic() - self._said < LINE_EVERY_S:
                continue  # another line was printed meanwhile
            self._said = time.monotonic()
            for planned, started in running:
                lasting_s = time.monotonic() - started
                if lasting_s < LINE_EVERY_S / 2:
                    continue  # it waits for workers, which show_wait reports
                lasting = format_duration(lasting_s)
                self._print(f"[{self.done}/{self.total}] {planned.cell.label}: measuring for {lasting}{self._left()}")

    def _print(self, text: str) -> None:
        self._said = time.monotonic()
        self._console.print(printable(text), markup=False)


class _TimeLeft(ProgressColumn):
    def __init__(self, progress: CampaignProgress) -> None:
        super().__init__()
        self.progress = progress

    def render(self, task: Task) -> Text:
        left_s = self.progress.seconds_left
        return Text("estimating" if left_s is None else f"{format_duration(max(1.0, left_s))} left")
