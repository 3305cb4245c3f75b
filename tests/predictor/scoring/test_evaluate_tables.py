"""Scores of a user's table: by hand, by group, every row counted, and no odd row stops them."""

import csv
import dataclasses
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precision_time.predictor.answering.answers import Answers, answer_queries
from precision_time.predictor.closed_form.fit_links import evaluate_collectives
from precision_time.predictor.learning.blending import CLOSED_FORM_ONLY, Blend
from precision_time.predictor.learning.regimes import REGIMES
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.observations import observe_table
from precision_time.predictor.rows.public_table import load_public_table, shipped_collectives, shipped_measurements
from precision_time.predictor.scoring import evaluate_tables
from precision_time.predictor.scoring.evaluate_tables import evaluate_curves, predict_table
from precision_time.storage.errors import InputError, IntegrityError
from precision_time.storage.tables import write_table

SCORES = {"n", "mape", "median_ape", "p90_ape", "within_10", "within_25", "bias", "rmse_s", "coverage_90", "mape_ci"}
PLAIN = {"model": "resnet50", "gpu": "A100-SXM4-80GB", "num_gpus": "8", "precision": "amp_bf16", "task_input": "224",
         "parallelism": "ddp", "batch_size_per_gpu": "128", "seconds_per_iteration": "0.1"}  # fmt: skip
UNKNOWN = {"model": "nobodys-net", "model_params": "30000000", "fwd_flops_per_sample": "6e9"}


def write(tmp_path: Path, *rows: dict[str, str], drop: tuple[str, ...] = ()) -> str:
    path = tmp_path / "table.csv"
    filled = [PLAIN | row for row in rows]
    names = [name for name in dict.fromkeys([*PLAIN, *(name for row in filled for name in row)]) if name not in drop]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(filled)
    return str(path)


def evaluate(path: str, *by: str, clean: bool = False) -> dict[str, Any]:
    result = predict_table(path, published=None, by=by, clean=clean).summarise(by=by)
    check_sums(result)
    return result


def check_sums(result: dict[str, Any]) -> None:
    json.dumps(result, allow_nan=False)
    assert result["rows"] == result["predicted"] + sum(result["refused"].values())
    assert result["overall"]["n"] == result["predicted"]
    for groups in result["by"].values():
        assert sum(scores["n"] for scores in groups.values()) == result["predicted"]
    for scores in [result["overall"], *(scores for groups in result["by"].values() for scores in groups.values())]:
        assert set(scores) == SCORES


def test_the_scores_of_four_rows_are_those_worked_by_hand(tmp_path: Path) -> None:
    (predicted,) = predict_table(write(tmp_path, {}), published=None).predicted_s
    rows = [{"seconds_per_iteration": repr(float(predicted / factor)), "run": name}
            for factor, name in ((1.0, "a"), (1.2, "a"), (2.0, "b"), (4.0, ""))]  # fmt: skip
    result = evaluate(write(tmp_path, *rows), "run")
    # errors 0, 0.2, 1 and 3; the closed forms' interval is a factor of 2.5 each way
    assert result["overall"] == {
        "n": 4,
        "mape": pytest.approx(1.05),
        "median_ape": pytest.approx(0.6),
        "p90_ape": pytest.approx(2.4),
        "within_10": 0.25,
        "within_25": 0.5,
        "bias": pytest.approx(9.6**0.25 - 1),
        "rmse_s": pytest.approx(predicted * math.sqrt(((1 / 6) ** 2 + 0.5**2 + 0.75**2) / 4)),
        "coverage_90": 0.75,
        "mape_ci": result["overall"]["mape_ci"],
    }
    low, high = result["overall"]["mape_ci"]
    assert 0 <= low < 1.05 < high <= 3
    groups = result["by"]["run"]
    assert {value: scores["n"] for value, scores in groups.items()} == {"": 1, "a": 2, "b": 1}
    assert groups["a"]["mape"] == pytest.approx(0.1)
    assert groups[""]["mape_ci"] == pytest.approx([3, 3])


def test_each_row_is_predicted_as_its_own_query(tmp_path: Path) -> None:
    path = write(
        tmp_path, {}, {"gpu": "Banana-9"}, {"num_gpus": "1", "batch_size_per_gpu": "64"}, {"precision": "tf32"}
    )
    table = predict_table(path, published=None)
    observations, _ = observe_table(load_public_table(path).kept)
    assert table.predicted_s == pytest.approx([observation.closed.iteration_time_s for observation in observations])
    assert table.frame["num_gpus"].tolist() == [8, 1, 8]
    assert len(set(table.predicted_s)) == 3


def test_a_row_that_states_only_micro_steps_is_scored_on_one(tmp_path: Path) -> None:
    several = {"grad_accumulation_steps": "4", "seconds_per_iteration": ""}
    path = write(tmp_path, several | {"seconds_per_micro_step": "0.05"}, several | {"seconds_per_iteration": "0.2"},
                 several | {"samples_per_second": "20480", "flag": "unit_ambiguous"})  # fmt: skip
    table = predict_table(path, published=None)
    # 4 x 8 x 128 samples at 20480 a second take 0.2 s
    assert table.measured_s == pytest.approx([0.05, 0.2, 0.2])
    assert table.predicted_s[1] == pytest.approx(4 * table.predicted_s[0])
    assert table.predicted_s[2] == pytest.approx(table.predicted_s[1])
    errors = np.abs(table.predicted_s / table.measured_s - 1)
    assert errors == pytest.approx([errors[0]] * 3)


def test_an_unknown_model_is_predicted_from_its_work_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path, UNKNOWN, UNKNOWN | {"model_params": ""}, UNKNOWN | {"fwd_flops_per_sample": ""}, {})
    result = evaluate(path, "model")
    assert result["refused"] == {"model unknown": 2}
    assert {value: scores["n"] for value, scores in result["by"]["model"].items()} == {"nobodys-net": 1, "resnet50": 1}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"gpu": "Banana-9"}, "hardware unknown"),
        ({"gpu": "V100-SXM2-16GB"}, "precision unsupported"),
        ({"precision": "fp8"}, "precision unsupported"),
        ({"precision": "?"}, "precision unknown"),
        ({"gpu": "", "precision": "", "flag": "suspect"}, "hardware unknown"),
        ({"seconds_per_iteration": ""}, "time missing"),
        ({"parallelism": "sideways", "flag": "suspect"}, "parallelism unknown"),
        ({"seconds_per_iteration": "-1"}, "number unusable"),
        ({"seconds_per_iteration": "1e-200"}, "number unusable"),
        ({"seconds_per_iteration": "1e200"}, "number unusable"),
        ({"batch_size_per_gpu": "2000000000"}, "number unusable"),
        ({"num_gpus": "2000000"}, "number unusable"),
        ({"grad_accumulation_steps": "2000000"}, "number unusable"),
        (UNKNOWN | {"model_params": "1e-9"}, "number unusable"),
        (UNKNOWN | {"fwd_flops_per_sample": "1e305"}, "no finite answer"),
    ],
)  # fmt: skip
def test_a_row_is_refused_under_one_reason(tmp_path: Path, values: dict[str, str], reason: str) -> None:
    result = evaluate(write(tmp_path, values, {}))
    assert result["refused"] == {reason: 1}
    assert result["predicted"] == 1


def test_rows_in_doubt_are_predicted_unless_only_clean_rows_are_scored(tmp_path: Path) -> None:
    path = write(tmp_path, {}, {"flag": "suspect"}, {"flag": "duplicate,gpu_ambiguous"}, {"flag": "eval_inside"})
    result = evaluate(path, "reason")
    assert (result["predicted"], result["refused"]) == (4, {})
    assert set(result["by"]["reason"]) == {"", "suspect", "gpu_ambiguous, duplicate"}
    result = evaluate(path, clean=True)
    assert (result["predicted"], result["refused"]) == (2, {"suspect": 1, "gpu_ambiguous": 1})


def test_rows_are_grouped_by_raw_parsed_derived_and_further_columns(tmp_path: Path) -> None:
    rows = [
        {"precision": "bf16-mixed", "team": " x ", "load": "2", "chip": "mine"},
        {"num_gpus": "16", "team": "", "load": "0.5"},
        {"model": "bert_base", "task_input": "128", "num_gpus": "2", "load": "nan", "team": "ä|\x1b"},
    ]
    by = evaluate(write(tmp_path, *rows), "precision", "policy", "num_gpus", "team", "load", "chip", "kind", "network",
                  "hardware", "family", "regime", "answered_by", "is_mlperf", "system", "team")["by"]  # fmt: skip
    counts = {column: {value: scores["n"] for value, scores in groups.items()} for column, groups in by.items()}
    assert counts["precision"] == {"amp_bf16": 2, "bf16-mixed": 1}
    assert counts["policy"] == {"amp_bf16": 3}
    assert list(counts["num_gpus"]) == ["2", "8", "16"]
    assert counts["team"] == {"": 1, "x": 1, "ä|\x1b": 1}
    assert counts["load"] == {"": 1, "0.5": 1, "2": 1}
    # a column of the file replaces a derived one
    assert counts["chip"] == {"": 2, "mine": 1}
    assert counts["kind"] == {"cnn": 2, "language_encoder": 1}
    assert counts["network"]["resnet50"] == 2
    assert counts["hardware"] == {"A100-SXM4-80GB": 3}
    assert "" not in counts["regime"]
    assert counts["answered_by"] == {"closed forms": 3}
    assert counts["is_mlperf"] == {"False": 3}
    assert counts["system"] == {"": 3}


def test_an_unknown_column_to_group_by_is_refused_with_the_known_columns(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"got: colour, size; expected: .*precision.*team.*family.*regime"):
        evaluate(write(tmp_path, {"team": "x"}), "colour", "team", "size")


def test_a_table_without_predicted_rows_has_scores_of_none(tmp_path: Path) -> None:
    result = evaluate(write(tmp_path, {"gpu": ""}), "model")
    assert result["overall"] == dict.fromkeys(SCORES) | {"n": 0}
    assert result["by"] == {"model": {}}


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no rows"):
        evaluate(write(tmp_path))


def test_the_answers_of_the_artifact_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(queries: Sequence[Query], *, published: object) -> Answers:
        answers = answer_queries(queries, published=None)
        parts = dataclasses.replace(
            answers.parts,
            compute_time_s=np.array([1.0, 2.0, 3.0]),
            exposed_communication_s=np.array([0.0, 0.0, 0.5]),
        )
        return dataclasses.replace(
            answers, parts=parts, low_s=np.array([0.9, 1.9, 3.4]), high_s=np.array([1.1, 2.1, 3.6]), level=level,
            regimes=tuple(REGIMES[name] for name in ("known", "new gpu", "known")),
            blends=(Blend(1.0, 1.0), CLOSED_FORM_ONLY, Blend(1.0, 1.0)),
        )  # fmt: skip

    monkeypatch.setattr(evaluate_tables, "answer_queries", answer)
    path = write(
        tmp_path,
        *({"seconds_per_iteration": text, "notes": name} for text, name in (("1", "a"), ("1", "b"), ("3.5", ""))),
    )
    level = 0.9
    result = evaluate(path, "regime", "answered_by")
    assert result["overall"]["mape"] == pytest.approx(1 / 3)
    assert result["overall"]["coverage_90"] == pytest.approx(2 / 3)
    assert result["by"]["regime"]["known"]["mape"] == 0
    assert result["by"]["regime"]["new gpu"]["mape_ci"] == [1, 1]
    assert {value: scores["n"] for value, scores in result["by"]["answered_by"].items()} == {
        "artifact": 2, "closed forms": 1,
    }  # fmt: skip
    level = 0.8
    assert evaluate(path)["overall"]["coverage_90"] is None


def test_a_row_that_overflows_costs_no_other_row_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(queries: Sequence[Query], *, published: object) -> Answers:
        if any(query.setup.batch_size == 7 for query in queries):
            raise OverflowError
        return answer_queries(queries, published=None)

    def observe(frame: pd.DataFrame) -> Any:
        if frame["batch_size_per_gpu"].eq(9).any():
            raise ZeroDivisionError
        return observe_table(frame)

    monkeypatch.setattr(evaluate_tables, "answer_queries", answer)
    monkeypatch.setattr(evaluate_tables, "observe_table", observe)
    sizes = ["9", "1", "2", "7", "3", "9", "4", "5"]
    result = evaluate(write(tmp_path, *({"batch_size_per_gpu": size} for size in sizes)), "batch_size_per_gpu")
    assert result["refused"] == {"no finite answer": 3}
    assert list(result["by"]["batch_size_per_gpu"]) == ["1", "2", "3", "4", "5"]
    plain, mixed = (
        predict_table(write(tmp_path, *({"batch_size_per_gpu": size} for size in batches)), published=None)
        for batches in ("12345", sizes)
    )
    assert mixed.predicted_s == pytest.approx(plain.predicted_s)


def test_an_error_of_the_artifact_is_no_reason_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(queries: Sequence[Query], *, published: object) -> Answers:
        raise IntegrityError("the trees do not fit")

    monkeypatch.setattr(evaluate_tables, "answer_queries", answer)
    with pytest.raises(IntegrityError):
        evaluate(write(tmp_path, {}))


def test_csv_and_parquet_of_the_same_rows_have_the_same_scores(tmp_path: Path) -> None:
    path = write(tmp_path, {"team": "x"}, {"precision": "fp32", "team": ""}, {"gpu": "?"})
    write_table(tmp_path / "table.parquet", pd.read_csv(path))
    assert evaluate(str(tmp_path / "table.parquet"), "team") == evaluate(path, "team")


@pytest.mark.slow
def test_the_shipped_table_is_predicted_except_rows_that_lack_facts(tmp_path: Path) -> None:
    path = tmp_path / "shipped.csv"
    shipped_measurements().to_csv(path, index=False)
    result = evaluate(str(path), "precision", "source", "family", "kind", "network", "is_mlperf", "reason")
    assert result["rows"] == 12429
    assert result["predicted"] > 11_400
    assert set(result["refused"]) <= {
        "time missing", "batch missing", "model unknown", "precision unknown", "device count missing",
        "hardware unknown", "parallelism unknown",
    }  # fmt: skip
    assert result["overall"]["mape"] < 0.5
    assert result == predict_table(published=None).summarise(by=list(result["by"]))


def test_every_mutilated_copy_of_a_shipped_row_is_counted(tmp_path: Path) -> None:
    rng = random.Random(0)
    frame = shipped_measurements().sample(300, random_state=0).astype(object)
    odd = ["", "nan", "-1", "0", "1e300", "many", "ü漢字", "tp8-pp2", "1e9", "V100-SXM2-16GB", "fp8", "99999x99999"]
    for column in frame.columns.drop("num_gpus"):
        mask = [rng.random() < 0.05 for _ in range(len(frame))]
        frame.loc[mask, column] = [rng.choice(odd) for _ in range(sum(mask))]
    for dropped in (
        [],
        ["row_id", "notes", "flag", "parallelism"],
        ["model_params", "fwd_flops_per_sample", "task_input"],
        ["seconds_per_iteration", "seconds_per_micro_step", "source_repo"],
    ):
        frame.drop(columns=dropped).to_csv(tmp_path / "odd.csv", index=False)
        result = evaluate(str(tmp_path / "odd.csv"), "gpu", "precision", "notes", "regime")
        assert result["rows"] == 300
        assert result["predicted"] > 50


ODD_CELLS = st.one_of(
    st.sampled_from(
        ["", " ", "0", "-1", "1e300", "1e-300", "1e18", "nan", "inf", "8", "1.5", "many", "tp8-pp2", "dp2-tp4", "fsdp",
         "fp8", "bf16", "fp32", "B200", "cpu", "16x16", "suspect", "1e6", "999999"]
    ),
    st.floats().map(repr),
    st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=12),
)  # fmt: skip
COLUMNS = (*PLAIN, *UNKNOWN, "num_nodes", "gpus_per_node", "grad_accumulation_steps", "global_batch_size", "notes",
           "samples_per_second", "seconds_per_micro_step", "flag", "interconnect", "framework", "team")  # fmt: skip


@given(
    rows=st.lists(
        st.fixed_dictionaries({}, optional={name: ODD_CELLS for name in dict.fromkeys(COLUMNS) if name != "num_gpus"}),
        min_size=1,
        max_size=4,
    ),
    devices=st.sampled_from(["8", "", "0", "-1", "2.5", "1e15", "3", "1000000", "64", "nan", "some"]),
    drop=st.sets(st.sampled_from(["task_input", "parallelism", "notes", "team", "model_params"])),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_odd_row_stops_the_evaluation(
    tmp_path: Path, rows: list[dict[str, str]], devices: str, drop: set[str]
) -> None:
    path = write(tmp_path, *({"num_gpus": devices, "team": ""} | row for row in rows), drop=tuple(drop - {"team"}))
    result = evaluate(path, "team", "model", "regime", "family")
    assert result["rows"] == len(rows)


CURVE = {"collective": "all_reduce", "gpu": "H100 SXM", "num_gpus": "8", "num_nodes": "1", "bytes": "1048576",
         "seconds": "4e-5"}  # fmt: skip


def write_curves(tmp_path: Path, *rows: dict[str, str], drop: str = "") -> str:
    path = tmp_path / "curves.csv"
    pd.DataFrame([CURVE | row for row in rows], columns=[*CURVE, *(rows[0] if rows else ())]).loc[
        :, lambda frame: ~frame.columns.duplicated() & (frame.columns != drop)
    ].to_csv(path, index=False)
    return str(path)


def test_a_file_of_the_shipped_curves_has_the_scores_of_the_table(tmp_path: Path) -> None:
    frame = shipped_collectives()
    frame.to_csv(tmp_path / "curves.csv", index=False)
    assert evaluate_curves(str(tmp_path / "curves.csv")) == evaluate_collectives(frame)
    assert set(evaluate_curves(str(tmp_path / "curves.csv"), by=["site"])["by"]) == {"site"}


def test_a_bad_cell_costs_only_its_own_curve_row(tmp_path: Path) -> None:
    odd = [{"bytes": "many"}, {"seconds": ""}, {"num_gpus": "1e300"}, {"bytes": "1e300"}, {"num_nodes": "-1"},
           {"gpu": "ü"}, {"collective": ""}, {"seconds": "inf"}]  # fmt: skip
    result = evaluate_curves(write_curves(tmp_path, {"team": "x"}, {}, *odd), by=["team"])
    assert result["overall"]["n"] == 2
    assert {value: scores["n"] for value, scores in result["by"]["team"].items()} == {"": 1, "x": 1}
    assert result["refused"] == {"bytes unusable": 2, "seconds unusable": 2, "num_gpus unusable": 1,
                                 "num_nodes unusable": 1, "hardware unknown": 1, "collective unknown": 1}  # fmt: skip


def test_curves_without_rows_or_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no rows"):
        evaluate_curves(write_curves(tmp_path))
    with pytest.raises(InputError, match=r"lacks columns.*expected: bytes"):
        evaluate_curves(write_curves(tmp_path, {}, drop="bytes"))
    with pytest.raises(InputError, match="colour"):
        evaluate_curves(write_curves(tmp_path, {}), by=["colour"])


ODD_CURVE = st.fixed_dictionaries({}, optional=dict.fromkeys((*CURVE, "inter_link"), ODD_CELLS))


@given(rows=st.lists(ODD_CURVE, min_size=1, max_size=4))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_odd_curve_row_stops_the_evaluation(tmp_path: Path, rows: list[dict[str, str]]) -> None:
    result = evaluate_curves(write_curves(tmp_path, *rows), by=["gpu", "size_band"])
    json.dumps(result, allow_nan=False)
    assert result["overall"]["n"] + sum(result["refused"].values()) == len(rows)
