"""LiveGrid: where each cell of a running campaign stands, shown by a thread of its own as a table that fills."""

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

#: The page is written when a cell begins or ends, and no sooner than this after the last time.
EVERY_S = 2.0
#: What a write under way may take before the end of the run goes on without it.
LAST_WRITE_S = 10.0

_WAITING = "waiting"


class LiveGrid:
    """The state of every cell of ``plan``, and the pages that show it while the ``with`` block runs.

    States are ``waiting``, ``measuring``, ``recorded``, ``failed`` (it may be tried again) and ``refused``. Cells are
    noted from any thread and cost no call; ``fraction`` says how much of the run is done.
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
        # One of its own: what a reading leaves out is noted in the dataset, and the campaign reads as well.
        self._dataset = TimingsDataset(dataset.url)
        self._table = table
        self._bar = bar
        self._fraction = fraction
        self._states = {
            planned.cell_id: _WAITING if planned.state == "missing" else planned.state for planned in plan.cells
        }
        self._causes = {planned.cell_id: planned.refusal.cause for planned in plan.cells if planned.refusal is not None}
        self._times: dict[str, float] = {}
        self._looked_for: set[str] = set()
        self._lock = threading.Lock()
        self._changed, self._ended = threading.Event(), threading.Event()
        # The run's own context, so that the thread asks the API that the run asks.
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
        """Show ``planned`` as measuring, until the function it gives is told the outcome, which that returns.

        Without an outcome, because the cell was stopped, it waits again.
        """
        outcomes: list[CellOutcome] = []

        def show_outcome(outcome: CellOutcome) -> CellOutcome:
            outcomes.append(outcome)
            return outcome

        self._note(planned.cell_id, "measuring")
        try:
            yield show_outcome
        finally:
            if outcomes:
                self._note(planned.cell_id, outcomes[-1].status, cause=outcomes[-1].cause)
            else:
                self._note(planned.cell_id, _WAITING)

    def wake(self) -> None:
        """Something that the pages show has changed."""
        self._changed.set()

    def rows(self) -> list[GridRow]:
        """The whole grid as it stands now."""
        with self._lock:
            states, causes, times = dict(self._states), dict(self._causes), dict(self._times)
        return fill_rows(self._plan, states=states, times=times, causes=causes)

    def read_times(self) -> None:
        """Look for the times of cells that were recorded since the last look."""
        with self._lock:
            recorded = {cell_id for cell_id, state in self._states.items() if state == "recorded"}
        fresh = recorded - self._looked_for
        if not fresh:
            return
        try:
            found = {seen.cell_id: seen.iteration_time_s for seen in self._dataset.measurements(cells=fresh)}
        except PrecisionTimeError as error:
            log_of_run().warning("the times of the grid could not be read: %s", error)
            found = {}
        # Rows are written before their cell is noted, so one that was not found now has no usable time.
        self._looked_for |= recorded
        with self._lock:
            self._times |= found

    def _note(self, cell_id: str, state: str, *, cause: str | None = None) -> None:
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
