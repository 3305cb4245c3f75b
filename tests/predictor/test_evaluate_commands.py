"""The command evaluate: its output, its refusals, and that --cv shows the errors of every split."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from precision_time.__main__ import run
from precision_time.predictor import evaluate_commands
from precision_time.predictor.answering import artifact
from precision_time.predictor.rows.public_table import PublicTable, load_public_table
from precision_time.predictor.scoring import cross_validation, evaluate_tables
from precision_time.predictor.scoring.cross_validation import METHODS, CrossValidation
from precision_time.storage.errors import NotFoundError

HEADER = "model,gpu,num_gpus,precision,parallelism,batch_size_per_gpu,seconds_per_iteration,team"
ROW = "resnet50,A100-SXM4-80GB,8,amp_bf16,ddp,128,0.1,x"
SCORES = {"n", "mape", "median_ape", "p90_ape", "within_10", "within_25", "bias", "rmse_s", "coverage_90", "mape_ci"}

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _nothing_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("PRECISION_TIME_REGISTRY", "PRECISION_TIME_ARTIFACT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., str]:
    def write(*rows: str) -> str:
        path = tmp_path / "rows.csv"
        path.write_text("\n".join([HEADER, *rows]) + "\n", encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def curves(tmp_path: Path) -> str:
    path = tmp_path / "curves.csv"
    path.write_text(
        "collective,gpu,num_gpus,num_nodes,bytes,seconds\nall_reduce,H100 SXM,8,1,1048576,4e-5\n"
        "all_gather,H100 SXM,8,1,2097152,4e-5\nall_gather,MI300X,8,1,2097152,4e-5\n",
        encoding="utf-8",
    )
    return str(path)


def answer(arguments: list[str], capsys: Capture) -> Any:
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def error(arguments: list[str], capsys: Capture) -> str:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_measurements_as_json_are_one_object_that_counts_every_row(table: Callable[..., str], capsys: Capture) -> None:
    path = table(ROW, ROW.replace("0.1,x", "0.2,"), "resnet50,?,8,fp32,ddp,1,1,y")
    result = answer(["evaluate", "--measurements", path, "--by", "team, precision", "--by", "kind"], capsys)
    assert list(result) == ["rows", "predicted", "refused", "overall", "by"]
    assert (result["rows"], result["predicted"], result["refused"]) == (3, 2, {"hardware unknown": 1})
    assert set(result["overall"]) == SCORES
    assert {column: list(groups) for column, groups in result["by"].items()} == {
        "team": ["", "x"], "precision": ["amp_bf16"], "kind": ["cnn"],
    }  # fmt: skip
    assert set(result["by"]["team"]["x"]) == SCORES


def test_measurements_are_printed_as_a_table_with_the_refusals(table: Callable[..., str], capsys: Capture) -> None:
    path = table(ROW, ROW.replace(",x", ",[red]\x1b[31m"), ROW.replace("resnet50", "nobodys-net"))
    assert run(["evaluate", "--measurements", path, "--by", "team"]) == 0
    out = capsys.readouterr().out
    assert "MAPE %" in out
    assert "[red]\\x1b[31m" in out
    assert "\x1b" not in out
    assert "2 of 3 rows predicted by the closed forms\nnot predicted: 1 model unknown\n" in out


def test_only_the_largest_groups_of_a_long_column_are_shown(
    table: Callable[..., str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_commands, "_MOST_GROUPS", 2)
    rows = [ROW.replace(",x", f",{team}") for team in ("many", "many", "once", "more", "more", "more")]
    path = table(*rows)
    assert run(["evaluate", "--measurements", path, "--by", "team"]) == 0
    out, err = capsys.readouterr()
    assert "many" in out
    assert "more" in out
    assert "once" not in out
    assert "team: the 2 largest of 3 groups are shown" in err
    assert set(answer(["evaluate", "--measurements", path, "--by", "team"], capsys)["by"]["team"]) == {
        "many", "more", "once",
    }  # fmt: skip


def test_clean_leaves_out_rows_in_doubt(table: Callable[..., str], capsys: Capture) -> None:
    arguments = ["evaluate", "--measurements", table(ROW, ROW)]
    assert answer(arguments, capsys)["predicted"] == 2
    assert answer([*arguments, "--clean"], capsys)["refused"] == {"exact repeat": 1}


def test_the_named_artifact_answers_or_else_that_of_predict(
    table: Callable[..., str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    predict_table = evaluate_tables.predict_table

    def remember(path: str, *, published: Any, by: Any, clean: bool) -> Any:
        calls.append(published)
        return predict_table(path, published=None, by=by, clean=clean)

    def make(name: str) -> SimpleNamespace:
        return SimpleNamespace(manifest=SimpleNamespace(artifact_id=name))

    monkeypatch.setattr(evaluate_tables, "predict_table", remember)
    monkeypatch.setattr(artifact, "load_artifact", make)
    monkeypatch.setattr(
        artifact, "standing_artifact", lambda: artifact.StandingArtifact(make("standing@1"), "it stands")
    )
    assert run(["evaluate", "--measurements", table(ROW), "--artifact", "mine@3"]) == 0
    assert "1 of 1 rows predicted by mine@3" in capsys.readouterr().out
    assert run(["evaluate", "--measurements", table(ROW)]) == 0
    assert "1 of 1 rows predicted by standing@1" in capsys.readouterr().out
    assert len(calls) == 2


def test_collectives_are_scored_by_the_network_model(curves: str, capsys: Capture) -> None:
    result = answer(["evaluate", "--collectives", curves], capsys)
    assert set(result) == {"overall", "by", "refused"}
    assert set(result["overall"]) == {"n", "median_ape", "p90_ape"}
    assert (result["overall"]["n"], result["refused"]) == (2, {"no data of AMD devices": 1})
    assert list(result["by"]["collective"]) == ["all_gather", "all_reduce"]
    result = answer(["evaluate", "--collectives", curves, "--by", "num_gpus"], capsys)
    assert result["by"] == {"num_gpus": {"8": result["overall"]}}
    assert run(["evaluate", "--collectives", curves]) == 0
    out = capsys.readouterr().out
    assert "median %" in out
    assert "not predicted: 1 no data of AMD devices" in out


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ([], ["got: none", "exactly one of --measurements, --collectives, --cv"]),
        (["--measurements", "FILE", "--cv"], ["got: --measurements and --cv"]),
        (["--cv", "--by", "model"], ["--by does not go with --cv"]),
        (["--cv", "--clean"], ["--clean does not go with --cv"]),
        (["--measurements", "FILE", "--worst", "3"], ["--worst does not go with --measurements", "--plots, --json"]),
        (["--collectives", "FILE", "--plots", "out"], ["--plots does not go with --collectives"]),
        (["--measurements", "FILE", "--plots", "ftp://x/y"], ["ftp"]),
        (["--collectives", "FILE", "--artifact", "a"], ["--artifact does not go with --collectives", "--by, --json"]),
        (["--measurements", "FILE", "--by", "colour"], ["got: colour", "model", "team", "regime"]),
        (["--collectives", "FILE"], ["lacks columns", "collective"]),
        (["--measurements", "nowhere.csv"], ["nowhere.csv"]),
    ],
)  # fmt: skip
def test_wrong_options_and_files_are_errors_of_one_line(
    arguments: list[str], texts: list[str], table: Callable[..., str], capsys: Capture
) -> None:
    path = table(ROW)
    err = error(["evaluate", *(path if word == "FILE" else word for word in arguments)], capsys)
    for text in texts:
        assert text in err


def test_a_table_without_rows_is_an_error(table: Callable[..., str], capsys: Capture) -> None:
    assert "has no rows" in error(["evaluate", "--measurements", table()], capsys)


def test_a_missing_artifact_is_an_error(table: Callable[..., str], tmp_path: Path, capsys: Capture) -> None:
    reference = f"{tmp_path}/registry/default"
    with pytest.raises(NotFoundError):
        artifact.load_artifact(reference)
    assert "E-NOT-FOUND" in error(["evaluate", "--measurements", table(ROW), "--artifact", reference], capsys)


@pytest.fixture
def quick_cross_validation(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cross-validation that trains nothing, on a few rows of the table; returns the number of rows of each call."""
    row_counts: list[int] = []
    kept = load_public_table().kept.head(400)

    def cross_validate_all(observations: list[Any], *, progress: Callable[[int, int], None]) -> dict[str, Any]:
        row_counts.append(len(observations))
        measured = np.array([observation.measurement.iteration_time_s for observation in observations])
        progress(1, 2)
        return {
            split: CrossValidation(
                split=split,
                rows=np.arange(len(measured)),
                measured_s=measured,
                predicted_s={method: measured * (1.1 + number) for number, method in enumerate(METHODS)},
                folds=np.arange(len(measured)) % 2,
                regimes=("known",) * len(measured),
                covered=np.ones(len(measured), dtype=np.bool_),
                level=0.9,
            )
            for split in ("configuration", "leave-model-out")
        }

    monkeypatch.setattr(
        "precision_time.predictor.rows.public_table.load_public_table", lambda: PublicTable(kept, pd.DataFrame())
    )
    monkeypatch.setattr(cross_validation, "cross_validate_all", cross_validate_all)
    return row_counts


def test_cross_validation_as_json_is_scores_by_split(quick_cross_validation: list[int], capsys: Capture) -> None:
    assert run(["evaluate", "--cv", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert list(result) == ["configuration", "leave-model-out", "calibration"]
    assert set(result["configuration"]) == set(METHODS)
    assert set(result["configuration"]["predictor"]) == {"n", "mape", "median_ape", "p90_ape", "coverage_90"}
    assert result["configuration"]["predictor"]["mape"] == pytest.approx(0.1)
    assert result["configuration"]["predictor"]["n"] == quick_cross_validation[0] > 0
    assert "1 of 2 fits" in err


def test_cross_validation_is_printed_as_a_table_with_goals(quick_cross_validation: list[int], capsys: Capture) -> None:
    assert run(["evaluate", "--cv"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("| split")
    assert "10.0 / 10.0" in out
    assert str(quick_cross_validation[0]) in out


def test_plots_of_a_file_are_drawn_beside_its_scores(
    table: Callable[..., str], tmp_path: Path, capsys: Capture
) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["evaluate", "--measurements", table(ROW), "--plots", str(tmp_path / "plots")]
    assert run([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == answer(arguments[:3], capsys)
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"predicted.png", "distance.png"}
    assert f"drawn: {tmp_path}/plots/predicted.png" in err


def test_without_predicted_rows_nothing_is_drawn_and_stderr_says_so(
    table: Callable[..., str], tmp_path: Path, capsys: Capture
) -> None:
    pytest.importorskip("matplotlib")
    path = table(ROW.replace("resnet50", "no_such_network"))
    assert run(["evaluate", "--measurements", path, "--plots", str(tmp_path / "plots")]) == 0
    out, err = capsys.readouterr()
    assert "0 of 1 rows predicted" in out
    assert "nothing to draw" in err
    assert not (tmp_path / "plots").exists() or not list((tmp_path / "plots").iterdir())


def test_a_folder_for_plots_that_cannot_be_used_stops_before_the_work(
    quick_cross_validation: list[int], tmp_path: Path, capsys: Capture
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("not a folder")
    assert "not a folder" in error(["evaluate", "--cv", "--plots", str(tmp_path / "file")], capsys)
    assert not quick_cross_validation


def test_cross_validation_draws_both_plots_of_every_split(
    quick_cross_validation: list[int], tmp_path: Path, capsys: Capture
) -> None:
    pytest.importorskip("matplotlib")
    assert run(["evaluate", "--cv", "--plots", str(tmp_path / "plots")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("| split")
    names = {
        f"{split}-{kind}.png" for split in ("configuration", "leave-model-out") for kind in ("predicted", "distance")
    } | {"calibration.png"}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == names
    assert err.count("drawn: ") == len(names)


def test_the_worst_groups_are_listed_only_on_request(quick_cross_validation: list[int], capsys: Capture) -> None:
    assert run(["evaluate", "--cv"]) == 0
    assert "worst groups" not in capsys.readouterr().out
    assert run(["evaluate", "--cv", "--worst", "2"]) == 0
    table, _, worst = capsys.readouterr().out.partition("\nworst groups of 5-fold by configuration")
    assert table.startswith("| split")
    lines = [line for line in worst.splitlines() if "10.0" in line]
    assert 1 <= len(lines) <= 2
    assert "of all error" in worst
    assert "worst" not in answer(["evaluate", "--cv"], capsys)
    listed = answer(["evaluate", "--cv", "--worst", "2"], capsys)["worst"]
    assert listed["split"] == "configuration"
    assert len(listed["groups"]) == len(lines)
    assert {"source", "network", "gpu", "n", "mape", "bias", "error_share"} <= set(listed["groups"][0])
    assert all(group["n"] >= 5 for group in listed["groups"])


def test_plots_of_an_artifact_measure_distances_from_its_training_data(
    table: Callable[..., str], tmp_path: Path, measure: Any, publish_made_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from precision_time.predictor.scoring import plots

    publish_made_up(f"{tmp_path}/registry", measure(models=("resnet50",)))
    drawn: list[plots.PredictedRows] = []
    monkeypatch.setattr(plots, "plot_distance", lambda rows: drawn.append(rows) or b"")
    arguments = ["--artifact", f"{tmp_path}/registry/default", "--plots", f"{tmp_path}/plots"]
    assert run(["evaluate", "--measurements", table(ROW), *arguments]) == 0
    batches, worlds = drawn[0].steps.values()
    assert (batches.tolist(), worlds.tolist()) == ([2.0], [2.0])  # 128 after 32, and 8 GPUs after 2
