"""A campaign whose recorded cells were measured with other settings or code: what counts, what accepts it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from precision_time.flows.planning.changed_settings import check_unchanged, list_changes, note_measured, note_settings
from precision_time.flows.planning.plan import plan_campaign
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.storage.errors import InputError
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tasks.ranks.code_versions import digest_code

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
    note_measured(spec, planned.cell_id)
    monkeypatch.setattr(TimingsDataset, "recorded_cells", lambda self: {planned.cell_id})


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("name", ["trial", "another"])
def test_other_settings_are_shown_as_a_diff_and_refused_whatever_the_name(
    tmp_path: Path, probe: Probe, name: str
) -> None:
    spec = make_spec(tmp_path, name=name, batch_sizes=[8, 16], measured_steps=30, seconds_per_cell=90)
    said = r"measured_steps: 20 -> 30 \(cells: 1\); seconds_per_cell: 60.0 -> 90.0 \(cells: 1\).*accept-changes"
    with pytest.raises(InputError, match=said):
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
        {"warmup_steps": 9},  # nothing is left to measure otherwise
        {"batch_sizes": [16], "warmup_steps": 9},  # none of its cells is recorded
    ],
    ids=str,
)
def test_what_changes_no_recorded_cell_is_planned(tmp_path: Path, probe: Probe, changes: dict[str, object]) -> None:
    assert plan_campaign(make_spec(tmp_path, **changes), probe=probe).cells


def test_each_cell_keeps_the_settings_it_was_measured_with(tmp_path: Path) -> None:
    first, other = make_spec(tmp_path), make_spec(tmp_path, name="other", measured_steps=30)
    for spec, cells in ((first, "ab"), (other, "cde")):
        note_settings(spec)
        for cell in cells:
            note_measured(spec, cell)
    # A cell that two campaigns recorded has both notes, and counts as unchanged for both.
    note_measured(other, "a")
    everything = set("abcdefg")
    assert list_changes(first, cells=everything) == ["measured_steps: 30 -> 20 (cells: 3)"]
    assert list_changes(other, cells=everything) == ["measured_steps: 20 -> 30 (cells: 1)"]
    assert list_changes(other, cells=set("acg")) == []
    assert list_changes(make_spec(tmp_path, warmup_steps=9), cells=everything) == [
        "warmup_steps: 5 -> 9 (cells: 5)",
        "measured_steps: 30 -> 20 (cells: 4)",
    ]


@pytest.mark.parametrize("text", ["{", "[]", None], ids=["cut", "list", "gone"])
def test_a_damaged_document_stops_nothing_and_is_written_anew(tmp_path: Path, text: str | None) -> None:
    spec, other = make_spec(tmp_path), make_spec(tmp_path, warmup_steps=9)
    note_settings(spec)
    note_measured(spec, "a")
    (document,) = (tmp_path / "data" / "settings" / "v1").glob("*.json")
    if text is None:
        document.unlink()
    else:
        document.write_text(text, encoding="utf-8")
    assert list_changes(other, cells={"a"}) == []
    note_settings(spec)
    assert list_changes(other, cells={"a"}) == ["warmup_steps: 5 -> 9 (cells: 1)"]


def test_a_setting_that_an_older_version_did_not_know_counts_as_its_default(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    note_settings(spec)
    note_measured(spec, "a")
    (document,) = (tmp_path / "data" / "settings" / "v1").glob("*.json")
    document.write_text('{"measured_steps": 30, "warmup_steps": 5, "unknown": 3}', encoding="utf-8")
    other = make_spec(tmp_path, timeout_per_cell=301)
    assert list_changes(other, cells={"a"}) == [
        "measured_steps: 30 -> 20 (cells: 1)",
        "timeout_s: 300.0 -> 301.0 (cells: 1)",
    ]


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the current folder, with a model of which a cell is recorded."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nets_of_mine.py"
    path.write_text("def net():\n    return 1\n", encoding="utf-8")
    card = {"name": "nets_of_mine:net", "code_sha256": digest_code("nets_of_mine:net")}
    TimingsDataset(str(tmp_path / "data")).write_card("code", "nets_of_mine:net", card)
    return path


def test_a_changed_source_of_an_own_model_is_refused_until_it_is_taken_back_or_accepted(
    tmp_path: Path, own_model: Path
) -> None:
    spec = make_spec(tmp_path, models=["mlp", "nets_of_mine:net"])
    accepting = spec.model_copy(update={"accept_changes": True})
    check_unchanged(spec, cells=set())
    before = own_model.read_text(encoding="utf-8")
    own_model.write_text(before.replace("1", "2"), encoding="utf-8")
    said = r"source file of nets_of_mine:net: [0-9a-f]{8} -> [0-9a-f]{8}; expected.*accept-changes"
    with pytest.raises(InputError, match=said):
        check_unchanged(spec, cells=set())
    check_unchanged(make_spec(tmp_path), cells=set())  # without the model nothing is the matter
    own_model.write_text(before, encoding="utf-8")
    check_unchanged(spec, cells=set())
    own_model.write_text(before.replace("1", "2"), encoding="utf-8")
    note_settings(spec)  # accepts nothing, and lets nothing go
    with pytest.raises(InputError, match=said):
        check_unchanged(spec, cells=set())
    check_unchanged(accepting, cells=set())
    note_settings(accepting)
    check_unchanged(spec, cells=set())


def test_what_is_not_known_of_a_source_stops_nothing(tmp_path: Path, own_model: Path) -> None:
    own_model.unlink()
    check_unchanged(make_spec(tmp_path, models=["nets_of_mine:net"]), cells=set())
    check_unchanged(make_spec(tmp_path, models=["elsewhere.nets:net"]), cells=set())
