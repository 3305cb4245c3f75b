"""The Prefect artifacts of a run: tables, reports and bars that change as it goes on; keys stay the same over runs."""

import base64
import json
import logging
import math
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.runtime import flow_run

__all__ = ["LiveArtifact", "LiveTable", "ProgressArtifact", "embed_pictures", "publish_pages"]

#: a page with more rows helps nobody, and Prefect bounds what it stores; the dataset holds everything
TABLE_ROWS = 1000
#: What a write waits for one under way, which may be waiting for an API that is away.
WAIT_S = 10.0
#: A page is read whole from the database with every look at a run: what is heavier stays in its file.
MOST_PICTURE_BYTES = 60_000

_PICTURE = re.compile(r"!\[([^\]]*)\]\(plots/([A-Za-z0-9._-]+)\)")
_MEDIA_TYPES = {"png": "image/png", "svg": "image/svg+xml"}
#: The pages render every text of a table as markdown.
_MARKUP = str.maketrans({"\\": "\\\\", "`": "\\`", "*": "\\*", "[": "\\[", "<": "&lt;"})

_log = logging.getLogger(__name__)


class LiveArtifact:
    """One artifact of this run: the first write that gets through creates it, those after it change it.

    Several threads may write. An API that is away costs the page, never the run, and outside a run there is no page.
    """

    def __init__(self, kind: Literal["markdown", "progress", "table"], key: str, *, description: str) -> None:
        self.key = key
        self._kind = kind
        self._description = description
        self._flow_run_id = flow_run.id
        self._id: UUID | None = None
        self._lock = threading.Lock()

    def write(self, data: str | float, *, description: str | None = None) -> bool:
        """Show ``data`` (JSON of a table, markdown, per cent) from now on; False when Prefect did not take it."""
        if self._flow_run_id is None:
            return False
        if not self._lock.acquire(timeout=WAIT_S):
            _log.warning("the page %s was not written: an earlier write still waits for Prefect", self.key)
            return False
        try:
            self._description = description or self._description
            self._send(data)
        except Exception as error:
            _log.warning("the page %s was not written: %s", self.key, error)
            return False
        finally:
            self._lock.release()
        return True

    def _send(self, data: str | float) -> None:
        client = get_client(sync_client=True)
        if self._id is None:
            created = ArtifactCreate(
                type=self._kind,
                key=self.key,
                description=self._description,
                data=data,
                flow_run_id=UUID(self._flow_run_id),
            )
            self._id = client.create_artifact(created).id
            return
        # Not client.update_artifact: it also sends all of the data as an event, which the server keeps for a week.
        client.request(
            "PATCH",
            "/artifacts/{id}",
            json={"data": data, "description": self._description},
            path_params={"id": str(self._id)},
        )


class LiveTable(LiveArtifact):
    """A table on the page of the run."""

    def __init__(self, key: str, *, description: str) -> None:
        super().__init__("table", key, description=description)
        self._subject = description

    def write_rows(self, rows: Sequence[Mapping[str, Any]], *, description: str | None = None) -> bool:
        """Show ``rows`` (heading -> value) from now on, the first thousand of them."""
        self._subject = description or self._subject
        cut = f" (the first {TABLE_ROWS} of {len(rows)} rows)" if len(rows) > TABLE_ROWS else ""
        shown = [{heading: _as_cell(value) for heading, value in row.items()} for row in rows[:TABLE_ROWS]]
        return self.write(json.dumps(shown), description=self._subject + cut)


class ProgressArtifact(LiveArtifact):
    """A bar on the page of the run."""

    def __init__(self, key: str, *, description: str) -> None:
        super().__init__("progress", key, description=description)

    def update(self, fraction: float) -> None:
        """Move the bar to ``fraction`` of its length; the first time shows it."""
        self.write(round(100 * min(1.0, max(0.0, fraction)), 1))


def _as_cell(value: Any) -> Any:
    if isinstance(value, str):
        return value.translate(_MARKUP)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def publish_pages(
    *,
    table: Sequence[Mapping[str, Any]],
    report: str,
    key: str,
    description: str,
    pictures: Mapping[str, bytes] | None = None,
) -> None:
    """Write the table under ``key`` and the report beside it; an API that is away costs the pages, not the run.

    ``pictures`` are the files that the report shows as ``plots/<name>``.
    """
    LiveTable(key, description=description).write_rows(table)
    page = LiveArtifact("markdown", f"{key}-report", description=f"Report: {description}")
    page.write(embed_pictures(report, pictures or {}))


def embed_pictures(report: str, pictures: Mapping[str, bytes]) -> str:
    """``report`` with the pictures it shows as ``plots/<name>`` inside it: a page in Prefect has no files beside it.

    Both of Prefect's user interfaces show an image whose address is ``data:image/...``. One that is missing or heavier
    than 60 kB is named instead.
    """

    def embed(match: re.Match[str]) -> str:
        shows, name = match.groups()
        data = pictures.get(name)
        kind = _MEDIA_TYPES.get(name.rpartition(".")[2])
        if data is None or kind is None or len(data) > MOST_PICTURE_BYTES:
            return f"({shows}: `plots/{name}` beside the stored report)"
        return f"![{shows}](data:{kind};base64,{base64.b64encode(data).decode()})"

    return _PICTURE.sub(embed, report)
