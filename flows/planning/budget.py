"""The limits of one run of a campaign: how long it may take, how many cells it may try, and how many may fail."""

from dataclasses import dataclass
from typing import Self

from precision_time.flows.planning.spec import CampaignSpec

__all__ = ["Budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one run; None is no limit.

    They are checked before a cell starts. A cell under way is finished, so a run may exceed ``max_hours`` by the time
    limit of a cell.
    """

    max_hours: float | None = None
    max_cells: int | None = None
    max_failures: int | None = None

    @classmethod
    def of(cls, spec: CampaignSpec) -> Self:
        """The limits that ``spec`` states."""
        return cls(max_hours=spec.max_hours, max_cells=spec.max_cells, max_failures=spec.max_failures)

    def forbid_any(self, *, elapsed_s: float, failures: int) -> str:
        """The limit, in words, that forbids any further attempt; empty when none does.

        ``failures`` counts the cells whose last attempt in this run failed; a refused cell is no failure.
        """
        if self.max_hours is not None and elapsed_s >= 3600 * self.max_hours:
            return f"max_hours {self.max_hours:g}"
        if self.max_failures is not None and failures >= self.max_failures:
            return f"max_failures {self.max_failures}"
        return ""

    def forbid_new(self, *, cells: int) -> str:
        """The limit that forbids another cell once ``cells`` were tried; those may still be tried again."""
        return f"max_cells {self.max_cells}" if self.max_cells is not None and cells >= self.max_cells else ""
