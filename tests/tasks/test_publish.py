"""The champion is what its alias points to now, and it knows which cells it has seen."""

from pathlib import Path

import pytest

from precision_time.storage.errors import IntegrityError
from precision_time.storage.registry import Registry
from precision_time.tasks.publish import find_champion, trained_cells


def test_the_champion_is_the_version_the_alias_points_to_now(tmp_path: Path, measure, publish_made_up) -> None:
    url = str(tmp_path)
    assert find_champion(url, "default@champion") is None
    publish_made_up(url, measure(models=("mlp",)))
    first = find_champion(url, "default@champion")
    publish_made_up(url, measure(models=("mlp", "vit_tiny")))
    second = find_champion(url, "default@champion")
    assert first is not None
    assert second is not None
    assert (first.manifest.version, second.manifest.version) == (1, 2)
    Registry(url).roll_back("default")
    assert find_champion(url, "default@champion") == first


def test_the_champion_knows_the_cells_it_was_trained_on(tmp_path: Path, measure, publish_made_up) -> None:
    measured = measure(models=("mlp",))
    publish_made_up(str(tmp_path), measured)
    champion = find_champion(str(tmp_path), "default@champion")
    assert champion is not None
    assert trained_cells(str(tmp_path), champion) == {row.cell_id for row in measured}


def test_an_artifact_without_its_list_of_cells_is_refused(
    tmp_path: Path, measure, publish_made_up, monkeypatch
) -> None:
    publish_made_up(str(tmp_path), measure(models=("mlp",)))
    champion = find_champion(str(tmp_path), "default@champion")
    assert champion is not None
    load = Registry.load
    without = lambda self, name: (load(self, name)[0], {"training.json": b"[]"})  # noqa: E731
    monkeypatch.setattr(Registry, "load", without)
    with pytest.raises(IntegrityError, match=r"training\.json"):
        trained_cells(str(tmp_path), champion)
