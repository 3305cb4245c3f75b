"""What an import, a prediction and the help may load, and that the import rules catch what they forbid."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import precision_time

ROOT = Path(precision_time.__file__).parent
HEAVY = {
    "torch",
    "transformers",
    "prefect",
    "dask",
    "distributed",
    "xgboost",
    "cupy",
    "mpi4py",
    "matplotlib",
    "sklearn",
}
TABLES = {"pandas", "pyarrow", "fsspec"}

PREDICTION = "precision_time.predict_time(model='resnet50', precision='mixed_fp16_fp32', gpus=8, batch_size=256)"
HELP = "from precision_time.__main__ import run; assert run({arguments}) == 0"


def loaded_by(statement: str, folder: Path) -> set[str]:
    """Top-level names of the modules that a fresh process holds after the statement."""
    report = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PRECISION_")}
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{report}"],
        cwd=folder, env=environment | {"HOME": str(folder)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_no_library(tmp_path: Path) -> None:
    loaded = loaded_by("import precision_time", tmp_path)
    assert not loaded & (HEAVY | TABLES | {"numpy", "pydantic", "typer", "rich"})


def test_a_prediction_loads_no_heavy_library_and_of_tables_only_arrow(tmp_path: Path) -> None:
    loaded = loaded_by(f"import precision_time\nprint({PREDICTION})", tmp_path)
    assert {"numpy", "pyarrow"} <= loaded
    assert not loaded & (HEAVY | TABLES - {"pyarrow"})


@pytest.mark.parametrize("arguments", [["--help"], ["predict", "--help"]], ids=" ".join)
def test_help_loads_neither_heavy_libraries_nor_tables(arguments: list[str], tmp_path: Path) -> None:
    assert not loaded_by(HELP.format(arguments=arguments), tmp_path) & (HEAVY | TABLES)


def test_every_public_name_resolves_and_there_are_under_ten() -> None:
    assert len(precision_time.__all__) < 10
    for name in precision_time.__all__:
        assert getattr(precision_time, name) is not None
        assert name in dir(precision_time)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="predict_tmie"):
        _ = precision_time.predict_tmie  # type: ignore[attr-defined]


# Contract of pyproject.toml -> the file that breaks it, and how.
VIOLATIONS = {
    "floors": ("storage/errors.py", "import precision_time.predictor.setup.precision"),
    "casgd-alone": ("casgd/__init__.py", "import precision_time.storage.errors"),
    "predictor-rooms": ("predictor/workloads/walk.py", "import precision_time.predictor.setup.precision"),
    "tasks-rooms": ("tasks/ranks/job.py", "import precision_time.tasks.gangs.leases"),
    "flows-rooms": ("flows/clusters/settings.py", "import precision_time.flows.planning.spec"),
    "door-prefect": ("predictor/workloads/workload.py", "import prefect"),
    "door-dask": ("flows/planning/spec.py", "import distributed"),
    "door-torch": ("predictor/setup/precision.py", "import torch"),
    "door-transformers": ("predictor/setup/precision.py", "import transformers"),
    "door-xgboost": ("predictor/workloads/workload.py", "import xgboost"),
    "door-pyarrow": ("predictor/workloads/workload.py", "import pyarrow.parquet"),
    "door-mpi": ("storage/schema.py", "from mpi4py import MPI"),
    "door-cupy": ("casgd/__init__.py", "import cupy"),
}


def contracts() -> dict[str, str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return {contract["id"]: contract["name"] for contract in settings["contracts"]}


def broken_contracts(folder: Path) -> set[str]:
    program = "from importlinter.cli import lint_imports; lint_imports(no_cache=True, no_logo=True)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    verdicts = {
        key: next(
            (line for line in done.stdout.splitlines() if line.startswith((f"{name} KEPT", f"{name} BROKEN"))), ""
        )
        for key, name in contracts().items()
    }
    assert all(verdicts.values()), done.stdout + done.stderr
    return {key for key, line in verdicts.items() if "BROKEN" in line}


@pytest.fixture
def package_copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    target = tmp_path / "precision_time"
    for source in (ROOT / name for name in git_files()):
        copy = target / source.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)
    return target


def git_files() -> list[str]:
    """The Python files of the package in this checkout, also those that are not committed yet."""
    folders = ("*.py", "flows", "tasks", "predictor", "casgd", "storage")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [
        name for name in listed if name.endswith(".py") and not name.startswith("tests/") and (ROOT / name).is_file()
    ]


def test_the_import_rules_hold_and_each_of_them_catches_its_violation(package_copy: Path) -> None:
    assert set(VIOLATIONS) == set(contracts())
    assert broken_contracts(package_copy.parent) == set()
    for file, line in VIOLATIONS.values():
        path = package_copy / file
        path.write_text(f"{path.read_text()}\n{line}\n")
    assert broken_contracts(package_copy.parent) == set(VIOLATIONS)
