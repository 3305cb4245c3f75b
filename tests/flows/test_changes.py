"""A campaign that is resumed with other settings: what counts as a change, how it reads, and what accepts it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from precision_time.flows.changes import list_changes, note_settings
from precision_time.flows.plan import plan_campaign
from precision_time.flows.spec import CampaignSpec
from precision_time.storage.errors import InputError
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.probe import ProbeReport

Probe = Callable[[str], ProbeReport]


def make_spec(folder: Path, **changes: object) -> CampaignSpec:
    values = {
        "name": "trial", "models": ["mlp"], "precisions": ["fp32"], "gpus": [1], "batch_sizes": [8],
        "data": str(folder / "data"),
    }  # fmt: skip
    return CampaignSpec.model_validate(values | changes)


@pytest.fixture
def recorded(tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one cell of the campaign is recorded, with the settings of ``make_spec``."""
    spec = make_spec(tmp_path)
    note_settings(spec)
    (planned,) = plan_campaign(spec, probe=probe).cells
    monkeypatch.setattr(TimingsDataset, "recorded_cells", lambda self: {planned.cell_id})


@pytest.mark.usefixtures("recorded")
def test_other_settings_are_shown_as_a_diff_and_refused(tmp_path: Path, probe: Probe) -> None:
    spec = make_spec(tmp_path, batch_sizes=[8, 16], measured_steps=30, seconds_per_cell=90)
    with pytest.raises(InputError, match=r"measured_steps: 20 -> 30; seconds_per_cell: 60.0 -> 90.0.*accept-changes"):
        plan_campaign(spec, probe=probe)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    "changes",
    [
        {"models": ["mlp", "gpt2_mini"]},
        {"precisions": ["fp32", "amp_bf16"]},
        {"gpus": [1, 2]},
        {"batch_sizes": [8, 16], "max_cells": 3, "max_attempts": 5},
        {"batch_sizes": [8, 16], "warmup_steps": 9, "accept_changes": True},
        {"batch_sizes": [8, 16], "warmup_steps": 9, "name": "another"},
        {"warmup_steps": 9},  # nothing is left to measure otherwise
        {"batch_sizes": [16], "warmup_steps": 9},  # none of its cells is recorded
    ],
    ids=str,
)
def test_what_changes_no_recorded_cell_is_planned(tmp_path: Path, probe: Probe, changes: dict[str, object]) -> None:
    assert plan_campaign(make_spec(tmp_path, **changes), probe=probe).cells


def test_what_was_accepted_is_what_the_next_run_is_compared_with(tmp_path: Path) -> None:
    first, other = make_spec(tmp_path), make_spec(tmp_path, measured_steps=30)
    assert list_changes(first) == []
    note_settings(first)
    assert list_changes(other) == ["measured_steps: 20 -> 30"]
    note_settings(other)
    note_settings(other)
    assert list_changes(other) == []
    assert list_changes(first) == ["measured_steps: 30 -> 20"]
    document = tmp_path / "data" / "campaigns" / "v1" / "trial.json"
    assert document.read_text(encoding="utf-8").count('"measured_steps"') == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"measured_with": 3}', '{"measured_with": [3]}'])
def test_a_damaged_document_stops_nothing_and_is_written_anew(tmp_path: Path, text: str) -> None:
    spec = make_spec(tmp_path)
    note_settings(spec)
    document = tmp_path / "data" / "campaigns" / "v1" / "trial.json"
    document.write_text(text, encoding="utf-8")
    assert list_changes(make_spec(tmp_path, warmup_steps=9)) == []
    note_settings(spec)
    assert list_changes(make_spec(tmp_path, warmup_steps=9)) == ["warmup_steps: 5 -> 9"]
