"""Notes from one retraining for the next: a challenger held back, a drift reported, a publication unfinished."""

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.rows.observations import Observation
from precision_time.storage.errors import NotFoundError
from precision_time.storage.filesystem import open_store
from precision_time.storage.manifests import check_alias, check_name

__all__ = ["RetrainingMemory"]

_HELD_BACK, _DRIFT, _UNFINISHED = "held-back", "drift-told", "unfinished"
_MAX_NOTE_BYTES = 20_000
_MAX_REASONS_CHARACTERS = 2_000


class RetrainingMemory:
    """Notes beside one alias: small files of the registry outside every version, each the last of its kind.

    A damaged note counts as missing: the work is then done once more. Whatever writes raises what ``Store`` raises.
    """

    def __init__(self, registry: str, *, name: str, alias: str) -> None:
        self._store = open_store(registry)
        self._name, self._alias = check_name(name), check_alias(alias)

    def remember_held_back(
        self, data_sha256: str, *, champion: PublishedPredictor | None, settings_sha256: str, reasons: Sequence[str]
    ) -> None:
        """Note that the gate held back the challenger from this data, and why.

        ``settings_sha256`` is the digest of the retraining's settings.
        """
        judged = _describe_judged(data_sha256, champion=champion, settings_sha256=settings_sha256)
        self._write(_HELD_BACK, judged | {"reasons": "; ".join(reasons)[:_MAX_REASONS_CHARACTERS]})

    def recall_held_back(
        self, data_sha256: str, *, champion: PublishedPredictor | None, settings_sha256: str
    ) -> str | None:
        """Why the same challenger was held back; None where the last one differs in anything that the gate sees.

        That is the data, the champion, the settings and the installed version of this package.
        """
        note = self._read(_HELD_BACK)
        reasons = note.pop("reasons", None)
        judged = _describe_judged(data_sha256, champion=champion, settings_sha256=settings_sha256)
        return str(reasons) if note == judged else None

    def remember_drift(self, rows: Sequence[Observation], *, champion: PublishedPredictor) -> None:
        """Note that the drift of ``rows`` from ``champion`` was reported."""
        self._write(_DRIFT, _describe_drift(rows, champion=champion))

    def has_reported_drift(self, rows: Sequence[Observation], *, champion: PublishedPredictor) -> bool:
        """Whether the last drift that was reported is that of the same rows from the same champion."""
        return self._read(_DRIFT) == _describe_drift(rows, champion=champion)

    def remember_unfinished(self, data_sha256: str) -> None:
        """Note that a version from this data is being written and the alias does not point to it yet."""
        self._write(_UNFINISHED, {"training_data_sha256": data_sha256})

    def forget_unfinished(self) -> None:
        """Take that note away: the alias has moved."""
        with contextlib.suppress(NotFoundError):
            self._store.remove(self._path(_UNFINISHED))

    def is_unfinished(self, data_sha256: str) -> bool:
        """Whether the publication of a version from this data was begun and not finished."""
        return self._read(_UNFINISHED).get("training_data_sha256") == data_sha256

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        self._store.write_bytes(self._path(kind), (json.dumps(values) + "\n").encode())

    def _read(self, kind: str) -> dict[str, Any]:
        try:
            values = json.loads(self._store.read_bytes(self._path(kind), max_bytes=_MAX_NOTE_BYTES))
        except (NotFoundError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}

    def _path(self, kind: str) -> str:
        return f"{self._name}/.{kind}-{self._alias}"


def _describe_judged(data_sha256: str, *, champion: PublishedPredictor | None, settings_sha256: str) -> dict[str, Any]:
    return {
        "training_data_sha256": data_sha256,
        "champion": None if champion is None else champion.manifest.version,
        "settings_sha256": settings_sha256,
        "package_version": importlib.metadata.version("precision-time"),
    }


def _describe_drift(rows: Sequence[Observation], *, champion: PublishedPredictor) -> dict[str, Any]:
    times = sorted((row.measurement.cell_id, row.measurement.iteration_time_s) for row in rows)
    digest = hashlib.sha256(json.dumps(times).encode()).hexdigest()
    return {"champion": champion.manifest.version, "rows_sha256": digest}
