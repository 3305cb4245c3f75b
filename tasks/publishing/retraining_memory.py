"""What one retraining leaves for the next: which challenger the gate held back, and which drift was told."""

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

__all__ = ["Notes"]

_HELD_BACK, _DRIFT = "held-back", "drift-told"
_MAX_NOTE_BYTES = 20_000
_MAX_REASONS_CHARACTERS = 2_000


class Notes:
    """The notes beside one alias: files of the registry that are no part of a version. Each says the last of its kind.

    A note that cannot be understood counts as none: the work is then done once more.
    """

    def __init__(self, registry: str, *, name: str, alias: str) -> None:
        self._store = open_store(registry)
        self._name, self._alias = check_name(name), check_alias(alias)

    def hold_back(
        self, data_sha256: str, *, champion: PublishedPredictor | None, settings_sha256: str, reasons: Sequence[str]
    ) -> None:
        """Note that the gate did not let the challenger from this data through, and why.

        ``settings_sha256`` is the digest of what the retraining was told. Raises what ``Store`` raises.
        """
        judged = _judged(data_sha256, champion=champion, settings_sha256=settings_sha256)
        self._write(_HELD_BACK, judged | {"reasons": "; ".join(reasons)[:_MAX_REASONS_CHARACTERS]})

    def find_held_back(
        self, data_sha256: str, *, champion: PublishedPredictor | None, settings_sha256: str
    ) -> str | None:
        """Why the same challenger was held back; None where the last one differs in anything that the gate sees.

        That is the data, the champion, the settings and the installed version of this package.
        """
        noted = self._read(_HELD_BACK)
        reasons = noted.pop("reasons", None)
        judged = _judged(data_sha256, champion=champion, settings_sha256=settings_sha256)
        return str(reasons) if noted == judged else None

    def tell_drift(self, rows: Sequence[Observation], *, champion: PublishedPredictor) -> None:
        """Note that it was told how ``rows`` drift from ``champion``; raises what ``Store`` raises."""
        self._write(_DRIFT, _drift(rows, champion=champion))

    def is_drift_told(self, rows: Sequence[Observation], *, champion: PublishedPredictor) -> bool:
        """Whether the last drift that was told is that of the same rows from the same champion."""
        return self._read(_DRIFT) == _drift(rows, champion=champion)

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


def _judged(data_sha256: str, *, champion: PublishedPredictor | None, settings_sha256: str) -> dict[str, Any]:
    return {
        "training_data_sha256": data_sha256,
        "champion": None if champion is None else champion.manifest.version,
        "settings_sha256": settings_sha256,
        "package_version": importlib.metadata.version("precision-time"),
    }


def _drift(rows: Sequence[Observation], *, champion: PublishedPredictor) -> dict[str, Any]:
    told = sorted((seen.measurement.cell_id, seen.measurement.iteration_time_s) for seen in rows)
    digest = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    return {"champion": champion.manifest.version, "rows_sha256": digest}
