"""``precision-time glm``: its output and files, its exit codes, and that only rank 0 prints under mpiexec."""

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
from precision_time.casgd.command_data import read_data
from precision_time.casgd.command_runs import bound_errors
from precision_time.casgd.communicator import OneProcess
from precision_time.casgd.errors import InputError
from precision_time.casgd.precision import CHOICES
from precision_time.casgd.problem import PARTS


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
        settings = str(model["precision"]), int(model["s"]), float(model["predicted_excess"])
    features, targets = load_diabetes(return_X_y=True)
    residuals = targets - features @ coef - intercept
    assert 1 - residuals.var() / targets.var() - (residuals.mean() ** 2) / targets.var() == pytest.approx(
        report["score"], abs=1e-4
    )
    assert settings == (report["precision"], report["s"], report["predicted_excess"])
    assert objective == "squared"
    assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]


def test_a_libsvm_file_is_cached_and_its_dense_and_sparse_models_agree(
    libsvm_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--n-features", "5", "--as-is", "--precision", "fp64"]
    dense = run_json(["fit", str(libsvm_file), *options], capsys)
    again = run_json(["fit", f"{libsvm_file}.columns", "--as-is", "--precision", "fp64"], capsys)
    cache = str(libsvm_file.parent / "sparse")
    sparse = run_json(["fit", str(libsvm_file), *options, "--sparse", "--cache", cache], capsys)
    assert dense["score"] > 0.8
    assert dense["loss"] == again["loss"] == pytest.approx(sparse["loss"], rel=1e-6)


def test_an_excess_that_was_not_judged_is_nan_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.npz"
    report = run_json(["fit", "diabetes", "--precision", "fp32", "--out", str(out)], capsys)
    assert report["predicted_excess"] is None
    with np.load(out, allow_pickle=False) as model:
        assert np.isnan(model["predicted_excess"])
        assert str(model["precision"]) == "fp32"


def test_on_risk_of_a_command_decides_the_consequence_of_a_risk(capsys: pytest.CaptureFixture[str]) -> None:
    # 60 columns that are nearly enough to explain 70 rows.
    arguments = ["fit", "synth-squared", "--rows", "70", "--n-features", "60", "--max-iter", "300"]
    assert run(["glm", *arguments, "--on-risk", "raise", "--largest-excess", "1e-9", "--json"]) == 2
    assert "does not suit the data" in json.loads(capsys.readouterr().err)["what"]
    warned = run_json([*arguments, "--on-risk", "warn", "--largest-excess", "1e-9"], capsys)
    assert warned["precision"] == "recipe"
    assert any("near interpolation" in text for text in warned["warnings"])
    assert run_json([*arguments, "--largest-excess", "1e-9"], capsys)["precision"] == "fp32"
    assert run_json([*arguments, "--largest-excess", "1e9"], capsys)["precision"] == "recipe"


def test_prefetch_doubles_the_sums_of_a_fit_and_of_a_bench(capsys: pytest.CaptureFixture[str]) -> None:
    fit = ["fit", "diabetes", "--s", "4", "--precision", "fp32", "--max-iter", "2"]
    plain, ahead = run_json(fit, capsys), run_json([*fit, "--prefetch"], capsys)
    assert ahead["reductions"] == 2 * plain["reductions"]
    assert ahead["loss"] == plain["loss"]
    bench = ["bench", "diabetes", "--s", "4", "--batch-size", "16", "--precision", "fp32", "--repeats", "1"]
    sums = [run_json([*bench, *more], capsys)["runs"][-1]["reductions_per_epoch"] for more in ([], ["--prefetch"])]
    assert sums[1] == 2 * sums[0]
    assert run_json(["plan", "diabetes", "--prefetch"], capsys)["prefetch"] is True


@pytest.mark.parametrize("command", ["fit", "plan", "bench"])
def test_a_device_that_is_not_there_is_an_error_that_says_what_to_install(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert run(["glm", command, "diabetes", "--device", "cuda", "--json"]) == 2
    assert "CuPy is needed" in json.loads(capsys.readouterr().err)["what"]
    assert run(["glm", command, "synth-squared", "--rows", "64", "--device", "cpu"]) == 0


def test_a_fit_tells_why_arrays_go_through_the_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "the MPI library is not CUDA-aware"
    monkeypatch.setattr("precision_time.casgd.command_runs.explain_staging", lambda comm: reason)
    assert run(["glm", "fit", "diabetes", "--max-iter", "2"]) == 0
    assert f"through host memory: {reason}" in capsys.readouterr().out
    assert run_json(["fit", "diabetes"], capsys)["staging"] == reason


def test_plan_predicts_an_epoch_and_gives_reasons(capsys: pytest.CaptureFixture[str], simulate_probes: Any) -> None:
    simulate_probes(lambda s, b: dict.fromkeys(PARTS, 1e-6 * s) | {"communicate": 5e-4})
    report = run_json(["plan", "synth-logistic", "--rows", "4000", "--batch-size", "16", "--delay-us", "500"], capsys)
    assert report["s"] == 64
    assert report["low_s"] < report["seconds_per_epoch"] < report["high_s"]
    assert run(["glm", "plan", "diabetes"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("s=1, ")
    assert "one process" in printed


@pytest.mark.parametrize("data", ["diabetes", "breast_cancer", "synth-poisson"])
def test_plan_bounds_the_errors_that_it_measures(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", data, "--rows", "300", "--batch-size", "8", "--bounds"]
    study = run_json(arguments, capsys)["bounds"]
    assert (study["s"], study["batch_size"]) == (8, 8)
    assert 1 <= study["propagation"] <= (study["worst_propagation"] or np.inf)
    assert list(study["policies"]) == ["recipe", "fp16", "fp32"]
    for errors in study["policies"].values():
        assert [error["choice"] for error in errors] == [*CHOICES, "all"]
        assert all(error["bound"] >= error["measured"] > 0 for error in errors)
    rounded = {policy: errors[0] for policy, errors in study["policies"].items()}
    assert [error["format"] for error in rounded.values()] == ["bf16", "fp16", "fp32"]
    assert rounded["recipe"]["measured"] > 4 * rounded["fp16"]["measured"] > 1e3 * rounded["fp32"]["measured"]
    assert run(["glm", *arguments, "--precision", "paper"]) == 0
    _, header, *rows = capsys.readouterr().out.partition("relative error")[2].splitlines()
    assert header.split() == ["precision", "rounding", "format", "bound", "measured"]
    assert [row.split()[:2] for row in rows] == [["paper", choice] for choice in (*CHOICES, "all")]


def test_bounds_on_several_ranks_are_refused() -> None:
    ranks = OneProcess()
    ranks.size = 2
    data = read_data("diabetes", comm=OneProcess())
    with pytest.raises(InputError, match="bounds need all columns in one process; got: 2 ranks"):
        bound_errors(data, comm=ranks, alpha=0.0, batch_size=8, precision="auto", seed=0)


def test_a_number_beyond_the_format_has_no_measured_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "large.svm"
    path.write_text("".join(f"{row % 2} 1:{1e5 + row} 2:{row % 7}\n" for row in range(64)), encoding="ascii")
    arguments = ["plan", str(path), "--n-features", "2", "--as-is", "--bounds"]
    study = run_json(arguments, capsys)["bounds"]
    assert study["policies"]["fp16"][0]["measured"] is None
    assert run(["glm", *arguments]) == 0
    assert "out of range" in capsys.readouterr().out


def test_bench_shows_fewer_sums_and_the_same_loss(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "synth-squared", "--rows", "640", "--s", "1", "--s", "8", "--batch-size", "16",
                 "--precision", "fp32", "--repeats", "1", "--delay-us", "20"]  # fmt: skip
    report = run_json(arguments, capsys)
    plain, unrolled = report["runs"]
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
        (["plan", "diabetes", "--bounds", "--precision", "fp8"], "unknown precision policy"),
        (["plan", "diabetes", "--bounds", "--precision", "fp64"], "no rounding error to bound"),
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
def test_of_two_ranks_only_one_prints(tmp_path: Path) -> None:
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
    planned = start("plan", "synth-logistic", "--rows", "1000", "--batch-size", "16", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["ranks"] == plan["samples"][0]["ranks"] == 2
    assert plan["samples"][0]["columns"] == 14
    assert plan["s"] in (1, 2, 4, 8, 16, 32)
    timed = start("bench", "synth-logistic", "--rows", "640", "--s", "1", "--s", "8", "--repeats", "1", "--json")
    assert timed.returncode == 0, timed.stderr
    timings = json.loads(timed.stdout)
    assert timings["ranks"] == 2
    by_cell = {(run["precision"], run["s"]): run for run in timings["runs"]}
    assert {cell: run["reductions_per_epoch"] for cell, run in by_cell.items()} == {
        ("fp32", 1): 40, ("fp32", 8): 5, ("recipe", 1): 40, ("recipe", 8): 5,
    }  # fmt: skip
    assert by_cell["fp32", 8]["loss"] == pytest.approx(by_cell["fp32", 1]["loss"], rel=1e-5)
    failed = start("fit", "diabetes", "--objective", "logistic")
    assert failed.returncode == 2
    assert not failed.stdout
    assert failed.stderr.count("labels of two classes") == 1
