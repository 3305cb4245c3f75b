"""The GPU check in an environment with only its stated needs, as far as it runs on a CPU."""

import importlib.util
import os
import re
import subprocess
import venv
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow.parquet as pq
import pytest

from precision_time.storage.schema import CellOutcome, Environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
#: The needs that check.sh states, beside CUDA.
NEEDS = ("torch", "pyarrow", "pytest")


def list_distributions(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """The distributions of ``names`` and all that they require here, extras left out."""
    found: dict[str, metadata.Distribution] = {}
    wanted = list(names)
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).casefold()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another platform
            continue
        requires = found[name].requires or []
        wanted += [re.match(r"[\w.-]+", line)[0] for line in requires if "extra ==" not in line]
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with links to the needs and nothing else."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for distribution in list_distributions(NEEDS).values():
        for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(distribution.locate_file(name))
    return folder / "bin" / "python"


def run(command: list[str | Path], *, seconds: float = 240, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    environment = inherited | {"CUDA_VISIBLE_DEVICES": ""} | variables
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
    )


def test_the_environment_lacks_what_the_check_does_not_ask_for(python: Path) -> None:
    for name in ("pandas", "pydantic"):
        assert f"No module named '{name}'" in run([python, "-c", f"import {name}"]).stderr


def test_without_a_gpu_the_check_says_so_and_nothing_else_is_missing(python: Path, tmp_path: Path) -> None:
    done = run(["sh", "tests/gpu/check.sh", tmp_path / "out"], PYTHON=str(python))
    said = done.stdout + done.stderr
    assert done.returncode == 1
    # Two tests ask for a GPU, those of the trace need none; others are not collected.
    assert re.search(r"\d passed, .*2 errors in", said), said
    assert "tests/gpu/test_loop_on_gpu.py" in said
    assert "no CUDA GPU can be used here: torch" in said
    assert said.splitlines()[-1].startswith("precision_time.storage.errors.InputError: no CUDA GPU can be used here")
    assert "No module named" not in said


def test_cells_are_measured_with_what_the_check_asks_for_and_written_one_by_one(python: Path, tmp_path: Path) -> None:
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "precision_time").symlink_to(ROOT)
    script = tmp_path / "measure.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "import measure_cells\n"
        "from precision_time.storage.schema import GridCell\n"
        "out = Path(sys.argv[1])\n"
        "def measure(cell, **rest):\n"
        "    print('so far', sorted(path.name for path in out.iterdir()))\n"
        "    return measure_cell(cell, **rest)\n"
        "measure_cell, measure_cells.measure_cell = measure_cells.measure_cell, measure\n"
        "cells = [GridCell(model='mlp', precision=name, world_size=1, per_gpu_batch_size=8)\n"
        "         for name in ('fp32', 'amp_bf16', 'tf32')]\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(measure_cells.main(out, seconds=600, device='cpu', cells=cells))\n"
    )
    out = tmp_path / "out"
    path = os.pathsep.join([str(tmp_path / "link"), str(ROOT / "tests" / "gpu")])
    done = run([python, script, out], PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"so far (.*)", done.stdout) == ["[]", *["['results.md', 'timings.parquet']"] * 2]
    table = pq.read_table(out / "timings.parquet")
    assert set(table["requested_precision"].to_pylist()) == {"fp32", "amp_bf16"}
    page = (out / "results.md").read_text()
    assert "2 of 3 cells" in page
    assert "| mlp | tf32 | 8 | precision-unsupported |" in page


@pytest.fixture
def measure_cells() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("measure_cells", ROOT / "tests" / "gpu" / "measure_cells.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_cell_begins_that_could_end_too_late(measure_cells: ModuleType, tmp_path: Path, monkeypatch, capsys) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    begun = []

    def fail_cell(cell, *, report, **_):
        begun.append(clock.now - 1000.0)
        clock.now += 30.0
        return CellOutcome(
            cell_id=cell.cell_id(report.environment), attempt=1, status="failed", cause="timed out", model=cell.model,
            precision=cell.precision, world_size=1, nodes=1, per_gpu_batch_size=cell.per_gpu_batch_size,
            gradient_accumulation_steps=1, strategy="ddp", gpu="g", host="h", started_at=0.0, duration_s=30.0,
        )  # fmt: skip

    environment = Environment(device_type="cuda", gpu="H200", cpu_model="c", cpu_cores=1, backend="nccl")
    monkeypatch.setattr(measure_cells, "time", clock)
    monkeypatch.setattr(measure_cells, "probe_device", lambda device: SimpleNamespace(environment=environment))
    monkeypatch.setattr(measure_cells, "measure_cell", fail_cell)
    seconds = measure_cells.LIMITS.timeout_s + 60.0
    assert measure_cells.main(tmp_path, seconds=seconds) == 1
    assert begun == [0.0, 30.0, 60.0]
    assert "45 cells do not fit into" in capsys.readouterr().out
    page = (tmp_path / "results.md").read_text()
    assert "0 of 48 cells in 90 s" in page
    assert page.count("| timed out |") == 3


def test_the_check_fits_into_eight_minutes_and_its_cells_begin_with_one_of_each(measure_cells: ModuleType) -> None:
    script = (ROOT / "tests" / "gpu" / "check.sh").read_text()
    limits = [int(seconds) for seconds in re.findall(r"^timeout (\d+) ", script, flags=re.MULTILINE)]
    assert len(limits) == 2
    assert sum(limits) <= 480
    (seconds,) = re.findall(r"measure_cells.py \S+ (\d+) ", script)
    assert int(seconds) < limits[1]
    cells = measure_cells.list_cells()
    assert len(set(cells)) == 48
    assert len({(cell.model, cell.precision) for cell in cells[:16]}) == 16
