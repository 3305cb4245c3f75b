"""A note is recalled while nothing that it depends on differs; a damaged note counts as missing."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from precision_time.predictor.rows.observations import observe
from precision_time.tasks.publishing import retraining_memory
from precision_time.tasks.publishing.retraining_memory import RetrainingMemory


class Champion:
    """As much of a published predictor as a note keeps."""

    def __init__(self, version: int) -> None:
        self.manifest = self
        self.version = version


def champion(version: int) -> Any:
    return Champion(version)


@pytest.fixture
def memory(tmp_path: Path) -> RetrainingMemory:
    return RetrainingMemory(str(tmp_path), name="default", alias="champion")


def test_a_held_back_challenger_is_known_by_data_champion_settings_and_version(
    memory: RetrainingMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    same: dict[str, Any] = {"data_sha256": "d", "champion": champion(3), "settings_sha256": "s"}
    assert memory.recall_held_back(**same) is None
    memory.remember_held_back(**same, reasons=["worse on 36 rows"])
    assert memory.recall_held_back(**same) == "worse on 36 rows"
    for other in ({"data_sha256": "e"}, {"champion": champion(4)}, {"champion": None}, {"settings_sha256": "t"}):
        assert memory.recall_held_back(**same | other) is None
    assert RetrainingMemory(str(tmp_path), name="default", alias="canary").recall_held_back(**same) is None
    with monkeypatch.context() as patch:
        patch.setattr(retraining_memory.importlib.metadata, "version", lambda package: "99")
        assert memory.recall_held_back(**same) is None

    memory.remember_held_back(**same, reasons=["very worse" * 10_000])
    assert len(str(memory.recall_held_back(**same))) == 2_000


@pytest.mark.parametrize("damaged", [b"", b"[1]", b'{"reasons": "x"}', b"\xff", b"9" * 50_000])
def test_a_damaged_note_counts_as_none(memory: RetrainingMemory, tmp_path: Path, damaged: bytes) -> None:
    same: dict[str, Any] = {"data_sha256": "d", "champion": None, "settings_sha256": "s"}
    memory.remember_held_back(**same, reasons=["worse"])
    (note,) = [path for path in (tmp_path / "default").iterdir() if path.name.startswith(".held-back")]
    note.write_bytes(damaged)
    assert memory.recall_held_back(**same) is None


def test_a_drift_is_told_once_of_the_same_rows_from_the_same_champion(memory: RetrainingMemory, measure) -> None:
    rows = observe(measure(models=("mlp",)))
    assert not memory.has_reported_drift(rows, champion=champion(1))
    memory.remember_drift(rows, champion=champion(1))
    assert memory.has_reported_drift(list(reversed(rows)), champion=champion(1))
    assert not memory.has_reported_drift(rows, champion=champion(2))
    assert not memory.has_reported_drift(rows[1:], champion=champion(1))
    slower = [
        dataclasses.replace(
            row,
            measurement=dataclasses.replace(row.measurement, iteration_time_s=2 * row.measurement.iteration_time_s),
        )
        for row in rows
    ]
    assert not memory.has_reported_drift(slower, champion=champion(1))
