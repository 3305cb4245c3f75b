"""The registry and data commands: data on stdout, errors with our exit codes, and names that cannot forge output."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from precision_time.storage.commands import data_app, registry_app
from precision_time.storage.errors import (
    InputError,
    IntegrityError,
    NotFoundError,
    PartialError,
    PrecisionTimeError,
    StorageError,
)
from precision_time.storage.filesystem import open_store
from precision_time.storage.registry import Registry
from precision_time.storage.schema import CellOutcome, IterationTiming
from precision_time.storage.timings import TimingsDataset

Rows = Callable[..., list[IterationTiming]]


@pytest.fixture(autouse=True)
def _no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PRECISION_TIME_REGISTRY", raising=False)


@pytest.fixture
def registry(tmp_path: Path, publish: Callable[..., object]) -> Registry:
    registry = Registry(tmp_path / "registry")
    for _ in range(2):
        publish(registry)
    return registry


@pytest.fixture
def dataset(tmp_path: Path, cell_rows: Rows, outcome: CellOutcome) -> TimingsDataset:
    dataset = TimingsDataset(tmp_path / "data")
    dataset.record(cell_rows())
    dataset.record(cell_rows("00000000000000bb", model="evil\x1b[31m\nname"))
    outcome = replace(outcome, cell_id="00000000000000cc")
    dataset.record_outcome(outcome)
    dataset.record_outcome(replace(outcome, attempt=2))
    dataset.record_outcome(replace(outcome, cell_id="00000000000000aa", status="recorded", cause=""))
    return dataset


def run(app: object, *arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))  # type: ignore[arg-type]
    if result.exception is not None and not isinstance(result.exception, SystemExit | PrecisionTimeError):
        raise result.exception
    return result


def run_json(app: object, *arguments: str) -> object:
    result = run(app, *arguments, "--json")
    assert result.exception is None
    return json.loads(result.stdout)


def test_list_shows_versions_and_aliases(registry: Registry) -> None:
    assert run_json(registry_app, "list", "--url", registry.url) == [
        {
            "name": "demo",
            "version": version,
            "aliases": aliases,
            "created_at": "2026-01-02T03:04:05+00:00",
            "training_rows": 33,
            "hardware": ["cpu-x-2c"],
        }
        for version, aliases in ((1, []), (2, ["champion"]))
    ]
    shown = run(registry_app, "list", "--url", registry.url).stdout
    assert "champion" in shown
    assert "demo" in shown


def test_the_registry_comes_from_the_environment_or_is_asked_for(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = run(registry_app, "list").exception
    assert isinstance(error, InputError)
    assert "PRECISION_TIME_REGISTRY" in str(error)
    monkeypatch.setenv("PRECISION_TIME_REGISTRY", registry.url)
    assert len(run_json(registry_app, "list")) == 2  # type: ignore[arg-type]


def test_an_empty_registry_says_so(tmp_path: Path) -> None:
    url = str(tmp_path / "nothing")
    assert "nothing is published" in run(registry_app, "list", "--url", url).stdout
    assert run_json(registry_app, "list", "--url", url) == []


def test_show_prints_the_manifest(registry: Registry) -> None:
    shown = run_json(registry_app, "show", "demo", "--url", registry.url)
    assert shown == registry.manifest("demo@2").model_dump(mode="json")
    text = run(registry_app, "show", "demo@1", "--url", registry.url).stdout
    for expected in ("trees.npz", "0.125", "mape", "mlp", "2026-01-02"):
        assert expected in text


def test_verify_checks_one_or_all_and_ends_with_integrity(registry: Registry) -> None:
    assert run(registry_app, "verify", "--url", registry.url).stdout == "demo@1: sound\ndemo@2: sound\n"
    open_store(registry.url).write_bytes("demo/1/trees.npz", b"treez")
    result = run(registry_app, "verify", "--url", registry.url)
    assert isinstance(result.exception, IntegrityError)
    assert "demo/1/trees.npz is changed" in result.stdout
    assert "demo@2: sound" in result.stdout
    assert run(registry_app, "verify", "demo@2", "--url", registry.url).exception is None
    open_store(registry.url).write_bytes("demo/2/extra", b"x")
    result = run(registry_app, "verify", "--url", registry.url, "--json")
    assert isinstance(result.exception, IntegrityError)
    assert [entry["sound"] for entry in json.loads(result.stdout)] == [False, False]
    assert isinstance(run(registry_app, "verify", "demo@9", "--url", registry.url).exception, NotFoundError)


def test_alias_and_rollback_move_the_champion(registry: Registry) -> None:
    shown = run(registry_app, "alias", "demo", "stable", "1", "--url", registry.url).stdout
    assert shown == "demo@stable is version 1\n"
    assert run_json(registry_app, "rollback", "demo", "--url", registry.url) == {
        "name": "demo",
        "alias": "champion",
        "version": 1,
    }
    assert registry.aliases("demo") == {"champion": 1, "stable": 1}
    assert isinstance(run(registry_app, "rollback", "demo", "--url", registry.url).exception, NotFoundError)


@pytest.mark.parametrize("name", ["../x", "", "a/../../b", "%2e%2e%2f", "Demo", "demo."])
def test_a_bad_name_is_the_same_error_as_in_the_interface(registry: Registry, name: str) -> None:
    for arguments in (["show", name], ["verify", name], ["alias", name, "champion", "1"], ["rollback", name]):
        assert type(run(registry_app, *arguments, "--url", registry.url).exception) is InputError


def test_summary_counts_cells_rows_and_failures(dataset: TimingsDataset) -> None:
    shown = run_json(data_app, "summary", dataset.url)
    assert shown == {
        "url": dataset.url,
        "cells": 2,
        "rows": 28,
        "models": [
            {"model": "evil\x1b[31m\nname", "gpu": "cpu-x-2c", "cells": 1, "rows": 14},
            {"model": "mlp", "gpu": "cpu-x-2c", "cells": 1, "rows": 14},
        ],
        "attempts": 3,
        "failures": [{"status": "failed", "cause": "signal 9", "attempts": 2}],
        "failed_cells": 1,
        "problems": [],
    }
    text = run(data_app, "summary", dataset.url).stdout
    assert "2 cells, 28 rows, 3 attempts, 1 cells that only failed, 0 unsound files" in text
    assert "\x1b[31m" not in text
    assert r"evil\x1b[31m\nname" in text


def test_markup_in_a_name_is_shown_and_not_obeyed(tmp_path: Path, cell_rows: Rows) -> None:
    dataset = TimingsDataset(tmp_path / "data")
    dataset.record(cell_rows(model="[red]m[/red]"))
    assert "[red]m[/red]" in run(data_app, "summary", dataset.url).stdout


@pytest.mark.parametrize("command", ["summary", "verify"])
def test_a_dataset_that_is_not_there_is_an_error_and_never_sound(tmp_path: Path, command: str) -> None:
    assert isinstance(run(data_app, command, str(tmp_path / "nothing")).exception, NotFoundError)
    (tmp_path / "campaign.yaml").write_text("name: x")
    assert isinstance(run(data_app, command, str(tmp_path / "campaign.yaml")).exception, StorageError)


def test_verify_names_damage_and_can_set_it_aside(dataset: TimingsDataset) -> None:
    assert run(data_app, "verify", dataset.url).exception is None
    bad = "timings/v1/model=mlp/precision=amp_bf16/cell-00000000000000aa.parquet"
    open_store(dataset.url).write_bytes(bad, b"")
    result = run(data_app, "verify", dataset.url)
    assert isinstance(result.exception, PartialError)
    assert result.exception.exit_code == 5
    assert bad in result.stdout
    assert isinstance(run(data_app, "verify", dataset.url, "--strict").exception, IntegrityError)
    assert bad in run(data_app, "summary", dataset.url).stderr
    result = run(data_app, "verify", dataset.url, "--set-aside", "--json")
    assert isinstance(result.exception, PartialError)
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem["moved_to"] == f"quarantine/{bad}"
    assert dataset.recorded_cells() == {"00000000000000bb"}
    assert run(data_app, "verify", dataset.url).exception is None


def test_the_console_script_prints_errors_with_exit_codes(dataset: TimingsDataset, registry: Registry) -> None:
    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "precision_time", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    open_store(dataset.url).write_bytes("outcomes/v1/x.parquet", b"")
    partial = script("data", "verify", dataset.url)
    assert partial.returncode == 5
    assert "E-PARTIAL" in partial.stderr
    assert "Traceback" not in partial.stderr
    open_store(registry.url).write_bytes("demo/2/trees.npz", b"treez")
    broken = script("registry", "verify", "demo", "--url", registry.url)
    assert broken.returncode == 4
    assert broken.stderr.count("\n") == 1
    refused = script("registry", "show", "../x", "--url", registry.url)
    assert refused.returncode == 2
    assert refused.stdout == ""


def test_registry_commands_do_not_load_pyarrow(registry: Registry) -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from precision_time.storage.commands import registry_app; "
        "result = CliRunner().invoke(registry_app, ['verify', '--url', sys.argv[1]]); "
        "print(result.exit_code, [m for m in ('pyarrow', 'pandas', 'fsspec') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, registry.url]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=dict(os.environ))
    assert shown.stdout.strip() == "0 []"
