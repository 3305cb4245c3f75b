"""The state of each cell of a running campaign, shown by a background thread as a table that fills."""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from precision_time.flows.campaigns.summary import GridRow, fill_rows, table_rows
from precision_time.flows.campaigns.terminal import log_of_run
from precision_time.flows.ground.prefect_artifacts import LiveTable, ProgressArtifact
from precision_time.flows.planning.plan import CampaignPlan, PlannedCell
from precision_time.storage.errors import PrecisionTimeError
from precision_time.storage.schema import CellOutcome
from precision_time.storage.timings import TimingsDataset

__all__ = ["LiveGrid"]

#: The page is written when a cell begins or ends, at most once in this time.
EVERY_S = 2.0
#: How long the end of the run waits for the last write.
LAST_WRITE_S = 10.0

_WAITING = "waiting"


class LiveGrid:
    """The state of every cell of ``plan``, and the pages that show it while the ``with`` block runs.

    States are ``waiting``, ``measuring``, ``recorded``, ``failed`` (it may be tried again) and ``refused``. Any thread
    may set them, without a call to Prefect; ``fraction`` returns how much of the run is done.
    """

    def __init__(
        self,
        plan: CampaignPlan,
        *,
        dataset: TimingsDataset,
        table: LiveTable,
        bar: ProgressArtifact,
        fraction: Callable[[], float],
    ) -> None:
        self._plan = plan
        # A separate object, because a dataset keeps the problems of its last reading and the campaign reads as well.
        self._dataset = TimingsDataset(dataset.url)
        self._table = table
        self._bar = bar
        self._fraction = fraction
        self._states = {
            planned.cell_id: _WAITING if planned.state == "missing" else planned.state for planned in plan.cells
        }
        self._causes = {planned.cell_id: planned.refusal.cause for planned in plan.cells if planned.refusal is not None}
        self._times: dict[str, float] = {}
        self._read_cells: set[str] = set()
        self._lock = threading.Lock()
        self._changed, self._ended = threading.Event(), threading.Event()
        # The thread gets the run's context, and with it the run's API.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._show,), name="campaign pages", daemon=True)

    def __enter__(self) -> "LiveGrid":
        self._changed.set()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._changed.set()
        self._thread.join(LAST_WRITE_S)

    @contextlib.contextmanager
    def show_cell(self, planned: PlannedCell) -> Iterator[Callable[[CellOutcome], CellOutcome]]:
        """Show ``planned`` as measuring; the yielded function takes the outcome to show, and returns it.

        A cell that was stopped has no outcome and is shown as waiting again.
        """
        outcomes: list[CellOutcome] = []

        def show_outcome(outcome: CellOutcome) -> CellOutcome:
            outcomes.append(outcome)
            return outcome

        self._set_state(planned.cell_id, "measuring")
        try:
            yield show_outcome
        finally:
            if outcomes:
                self._set_state(planned.cell_id, outcomes[-1].status, cause=outcomes[-1].cause)
            else:
                self._set_state(planned.cell_id, _WAITING)

    def wake(self) -> None:
        """Let the thread write the pages, because something that they show has changed."""
        self._changed.set()

    def rows(self) -> list[GridRow]:
        """The whole grid in its present state."""
        with self._lock:
            states, causes, times = dict(self._states), dict(self._causes), dict(self._times)
        return fill_rows(self._plan, states=states, times=times, causes=causes)

    def read_times(self) -> None:
        """Read the times of the cells that were recorded since the last call."""
        with self._lock:
            recorded = {cell_id for cell_id, state in self._states.items() if state == "recorded"}
        unread = recorded - self._read_cells
        if not unread:
            return
        try:
            times = {row.cell_id: row.iteration_time_s for row in self._dataset.measurements(cells=unread)}
        except PrecisionTimeError as error:
            log_of_run().warning("the times of the grid could not be read: %s", error)
            times = {}
        # Rows are written before their cell's state is set, so a cell without a time now has no usable rows.
        self._read_cells |= recorded
        with self._lock:
            self._times |= times

    def _set_state(self, cell_id: str, state: str, *, cause: str | None = None) -> None:
        with self._lock:
            self._states[cell_id] = state
            if cause is not None:
                self._causes[cell_id] = cause
        self.wake()

    def _show(self) -> None:
        while self._changed.wait() and not self._ended.is_set():
            self._changed.clear()
            self.read_times()
            self._table.write_rows(table_rows(self.rows()))
            self._bar.update(self._fraction())
            self._ended.wait(EVERY_S)
