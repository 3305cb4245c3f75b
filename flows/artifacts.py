"""The Prefect artifacts of a run: progress, a table, and a report; keys stay the same over runs."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast
from uuid import UUID

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

__all__ = ["ProgressArtifact", "publish_pages"]

#: a page with more rows helps nobody, and Prefect bounds what it stores; the dataset holds everything
TABLE_ROWS = 1000

_log = logging.getLogger(__name__)


class ProgressArtifact:
    """A bar on the page of the run."""

    def __init__(self, key: str, *, description: str) -> None:
        # a coroutine only in asynchronous callers
        self._id = cast(UUID, create_progress_artifact(0.0, key=key, description=description))

    def update(self, fraction: float) -> None:
        """Move the bar to ``fraction`` of its length; an API that is away must not stop the work."""
        try:
            update_progress_artifact(self._id, round(100 * fraction, 1))
        except Exception as error:
            _log.warning("the progress artifact was not updated: %s", error)


def publish_pages(*, table: Sequence[Mapping[str, Any]], report: str, key: str, description: str) -> None:
    """Write the table under ``key`` and the report beside it; an API that is away costs the pages, not the run."""
    more = f" (the first {TABLE_ROWS} of {len(table)} rows)" if len(table) > TABLE_ROWS else ""
    try:
        create_table_artifact([dict(row) for row in table[:TABLE_ROWS]], key=key, description=description + more)
        create_markdown_artifact(report, key=f"{key}-report", description=f"Report: {description}")
    except Exception as error:
        _log.warning("the artifacts were not written: %s", error)
