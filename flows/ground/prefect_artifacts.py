"""The Prefect artifacts of a run: tables, reports and progress bars that change while it runs, under stable keys."""

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

#: A longer page is of no use, and Prefect limits what it stores; the dataset holds everything.
TABLE_ROWS = 1000
#: How long a write waits for an earlier one, which may itself wait for an API that does not answer.
WAIT_S = 10.0
#: Prefect reads a whole page from its database whenever a run is shown, so larger pictures stay in their files.
MOST_PICTURE_BYTES = 60_000

_PICTURE = re.compile(r"!\[([^\]]*)\]\(plots/([A-Za-z0-9._-]+)\)")
_MEDIA_TYPES = {"png": "image/png", "svg": "image/svg+xml"}
#: Prefect renders the text of a table as markdown.
_MARKUP = str.maketrans({"\\": "\\\\", "`": "\\`", "*": "\\*", "[": "\\[", "<": "&lt;"})

_log = logging.getLogger(__name__)


class LiveArtifact:
    """One artifact of this run: the first write that succeeds creates it, later ones change it.

    Several threads may write. If the API does not answer, only the page is lost. Outside a run there is no page.
    """

    def __init__(self, kind: Literal["markdown", "progress", "table"], key: str, *, description: str) -> None:
        self.key = key
        self._kind = kind
        self._description = description
        self._flow_run_id = flow_run.id
        self._id: UUID | None = None
        self._lock = threading.Lock()

    def write(self, data: str | float, *, description: str | None = None) -> bool:
        """Show ``data`` (JSON of a table, markdown, per cent) from now on; False when Prefect did not accept it."""
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
        # Not client.update_artifact: it also sends all the data as an event, which the server keeps for a week.
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
        """Show ``rows`` (heading -> value) from now on, at most the first thousand."""
        self._subject = description or self._subject
        cut = f" (the first {TABLE_ROWS} of {len(rows)} rows)" if len(rows) > TABLE_ROWS else ""
        shown = [{heading: _as_cell(value) for heading, value in row.items()} for row in rows[:TABLE_ROWS]]
        return self.write(json.dumps(shown), description=self._subject + cut)


class ProgressArtifact(LiveArtifact):
    """A progress bar on the page of the run."""

    def __init__(self, key: str, *, description: str) -> None:
        super().__init__("progress", key, description=description)

    def update(self, fraction: float) -> None:
        """Move the bar to ``fraction`` of its length; the first call shows it."""
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
    """Write the table under ``key`` and the report beside it; if the API does not answer, only the pages are lost.

    ``pictures`` are the files that the report shows as ``plots/<name>``.
    """
    LiveTable(key, description=description).write_rows(table)
    page = LiveArtifact("markdown", f"{key}-report", description=f"Report: {description}")
    page.write(embed_pictures(report, pictures or {}))


def embed_pictures(report: str, pictures: Mapping[str, bytes]) -> str:
    """``report`` with its pictures ``plots/<name>`` embedded, because a page in Prefect has no files beside it.

    Both of Prefect's user interfaces show an image whose address is ``data:image/...``. A picture that is missing or
    larger than 60 kB is named instead.
    """

    def embed(match: re.Match[str]) -> str:
        caption, name = match.groups()
        data = pictures.get(name)
        media_type = _MEDIA_TYPES.get(name.rpartition(".")[2])
        if data is None or media_type is None or len(data) > MOST_PICTURE_BYTES:
            return f"({caption}: `plots/{name}` beside the stored report)"
        return f"![{caption}](data:{media_type};base64,{base64.b64encode(data).decode()})"

    return _PICTURE.sub(embed, report)
