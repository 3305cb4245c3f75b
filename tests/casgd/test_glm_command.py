"""``precision-time glm``: what it prints and writes, its exit codes, and one voice under mpiexec."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes

from precision_time.__main__ import run


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["glm", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def libsvm_file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    features = np.round(rng.normal(size=(200, 5)), 3)
    labels = (features[:, 0] - features[:, 3] + 0.3 * rng.normal(size=200) > 0).astype(int)
    path = tmp_path / "train.svm"
    path.write_text(
        "".join(
            f"{label} {' '.join(f'{k + 1}:{value}' for k, value in enumerate(row))}\n"
            for label, row in zip(labels, features, strict=True)
        ),
        encoding="ascii",
    )
    return path


def test_fit_tells_the_score_the_choices_and_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(["fit", "breast_cancer"], capsys)
    assert report["score_name"] == "accuracy"
    assert report["score"] > 0.95
    assert (report["rows"], report["columns"], report["ranks"], report["s"]) == (569, 30, 1, 1)
    assert report["precision"] == "recipe"
    assert report["predicted_excess"] < 0.005
    assert set(report["seconds"]) == {"gather", "gram", "communicate", "recurrence", "update"}
    assert report["converged"] is True


@pytest.mark.parametrize(("name", "score"), [("diabetes", "R2"), ("synth-poisson", "D2")])
def test_fit_prints_lines_for_people(name: str, score: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["glm", "fit", name, "--rows", "500", "--s", "4", "--precision", "fp32"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{name}: ")
    assert f"{score} 0." in printed
    assert "s=4, batch size 32, precision fp32" in printed


@pytest.mark.parametrize("how", ["--standardise", "--as-is"])
def test_the_written_coefficients_are_in_the_units_of_the_data(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model.npz"
    report = run_json(["fit", "diabetes", how, "--out", str(out)], capsys)
    with np.load(out, allow_pickle=False) as model:
        coef, intercept, objective = model["coef"], float(model["intercept"]), str(model["objective"])
    features, targets = load_diabetes(return_X_y=True)
    residuals = targets - features @ coef - intercept
    assert 1 - residuals.var() / targets.var() - (residuals.mean() ** 2) / targets.var() == pytest.approx(
        report["score"], abs=1e-4
    )
    assert objective == "squared"
    assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]


def test_a_libsvm_file_is_cached_and_its_dense_and_sparse_models_agree(
    libsvm_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--n-features", "5", "--as-is", "--precision", "fp64"]
    dense = run_json(["fit", str(libsvm_file), *given], capsys)
    again = run_json(["fit", f"{libsvm_file}.columns", "--as-is", "--precision", "fp64"], capsys)
    cache = str(libsvm_file.parent / "sparse")
    sparse = run_json(["fit", str(libsvm_file), *given, "--sparse", "--cache", cache], capsys)
    assert dense["score"] > 0.8
    assert dense["loss"] == again["loss"] == pytest.approx(sparse["loss"], rel=1e-6)


def test_plan_predicts_an_epoch_and_gives_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    made = run_json(["plan", "synth-logistic", "--rows", "4000", "--batch-size", "16", "--delay-us", "50"], capsys)
    assert made["s"] > 1
    assert made["low_s"] < made["seconds_per_epoch"] < made["high_s"]
    assert run(["glm", "plan", "diabetes"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("s=1, ")
    assert "one process" in printed


def test_bench_shows_fewer_sums_and_the_same_loss(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "synth-squared", "--rows", "640", "--s", "1", "--s", "8", "--batch-size", "16",
                 "--precision", "fp32", "--repeats", "1", "--delay-us", "20"]  # fmt: skip
    told = run_json(arguments, capsys)
    plain, unrolled = told["runs"]
    assert (plain["reductions_per_epoch"], unrolled["reductions_per_epoch"]) == (40, 5)
    assert unrolled["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert plain["speedup"] == 1
    assert run(["glm", *arguments]) == 0
    assert "(emulation)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fit", "nowhere.svm"], "there are no such data"),
        (["fit", "diabetes", "--objective", "logistic"], "labels of two classes"),
        (["fit", "breast_cancer", "--objective", "poisson"], "counts"),
        (["fit", "diabetes", "--s", "0"], "s is not usable"),
        (["fit", "diabetes", "--precision", "fp8"], "unknown precision policy"),
        (["fit", "diabetes", "--alpha", "-1"], "alpha is not usable"),
        (["fit", "diabetes", "--out", "nowhere/model.npz"], "cannot be written"),
        (["fit", "diabetes", "--eta0", "1000", "--learning-rate", "constant", "--precision", "fp32"], "diverged"),
        (["bench", "diabetes", "--s", "0"], "s is not usable"),
        (["plan", "diabetes", "--delay-us", "nan"], "delay"),
    ],
)
def test_bad_input_ends_with_2_and_one_json_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["glm", *arguments, "--json"]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    error = json.loads(printed.err)
    assert error["code"] == "E-INPUT"
    assert said in error["what"]


def test_a_libsvm_file_needs_its_number_of_columns(libsvm_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["glm", "fit", str(libsvm_file)]) == 2
    assert "--n-features" in capsys.readouterr().err


def test_the_table_of_commands_and_its_help_load_no_solver() -> None:
    code = """
import sys
from precision_time.__main__ import run
assert run(["glm", "--help"]) == 0
loaded = {name for name in ("numpy", "sklearn", "scipy", "mpi4py") if name in sys.modules}
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("fit", "plan", "bench"):
        assert name in done.stdout


@pytest.mark.mpi
def test_two_ranks_speak_with_one_voice(tmp_path: Path) -> None:
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert mpiexec, "pip install mpich"

    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [mpiexec, "-n", "2", sys.executable, "-m", "precision_time", "glm", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)

    out = tmp_path / "model.npz"
    done = start("fit", "breast_cancer", "--s", "8", "--precision", "fp64", "--json", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["ranks"], report["s"]) == (2, 8)
    with np.load(out, allow_pickle=False) as model:
        margins = load_breast_cancer().data @ model["coef"] + model["intercept"]
    assert ((margins > 0) == load_breast_cancer().target).mean() == pytest.approx(report["score"])
    failed = start("fit", "diabetes", "--objective", "logistic")
    assert failed.returncode == 2
    assert not failed.stdout
    assert failed.stderr.count("labels of two classes") == 1
