"""Fixtures for tests that record cells of real ranks."""

import pytest

from precision_time.tasks.gangs import verdicts


@pytest.fixture
def a_busy_machine_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record cells whose times are of no use, as those of ranks that share their cores with other tests may be."""
    monkeypatch.setattr(verdicts, "MOST_SPREAD", float("inf"))
    monkeypatch.setattr(verdicts, "MOST_OTHERS", 2.0)
