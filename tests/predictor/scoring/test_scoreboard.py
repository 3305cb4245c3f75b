"""The table shows errors beside goals and baselines, and the worst groups are found."""

import numpy as np
import pytest

from precision_time.predictor.rows.observations import Observation, observe
from precision_time.predictor.scoring.cross_validation import METHODS, CrossValidation, cross_validate_all
from precision_time.predictor.scoring.scoreboard import format_cross_validation, worst_groups


def make_result(rows: list[Observation], factors: list[float]) -> CrossValidation:
    """Predictions that are ``factors`` times the measured seconds; the closed forms are half of them."""
    measured = np.array([row.measurement.iteration_time_s for row in rows])
    return CrossValidation(
        split="row",
        rows=np.arange(len(rows)),
        measured_s=measured,
        predicted_s={"predictor": measured * factors, "closed_form": measured * 0.5},
        folds=np.zeros(len(rows), dtype=np.int64),
        regimes=("known",) * len(rows),
        covered=np.array([factor < 1.2 for factor in factors]),
        level=0.9,
    )


@pytest.fixture(scope="module")
def rows(measure) -> list[Observation]:
    return observe(measure(batches=(8, 16, 32), world_sizes=(1,)))  # six rows a model


def read_line(text: str, title: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {title} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_shows_goal_reached_coverage_and_baselines(rows) -> None:
    factors = [1.04] * (len(rows) - 1) + [1.3]
    text = format_cross_validation({"row": make_result(rows, factors)})
    assert read_line(text, "split") == ["split", "rows", "goal", "predictor", "met", "covered", "closed forms"]
    mape = (0.04 * 17 + 0.3) / 18
    assert read_line(text, "5-fold by row") == [
        "5-fold by row", "18", "5.0 / 2.5", f"{100 * mape:.1f} / 4.0", "no", f"{1700 / 18:.1f}", "50.0 / 50.0",
    ]  # fmt: skip


def test_a_goal_is_met_only_when_both_errors_meet_it(rows) -> None:
    def met(factor: float) -> str:
        return read_line(format_cross_validation({"row": make_result(rows, [factor] * len(rows))}), "5-fold by row")[4]

    assert met(1.02) == "yes"
    assert met(1.03) == "no"  # a MAPE of 3 is under 5, a median of 3 is above 2.5


def test_all_lines_of_a_real_run_have_the_same_length(rows) -> None:
    text = format_cross_validation(cross_validate_all(rows, splits=["row", "leave-model-out"], processes=1))
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 2 + 3  # with the speed-up
    assert len(read_line(text, "leave model out")) == 5 + 1 + len(METHODS) - 1
    assert read_line(text, "speed-up over fp32 or tf32")[2] == "- / 7.0"


def test_the_worst_groups_come_first_with_their_bias(rows) -> None:
    factor = {"mlp": 1.1, "vit_tiny": 0.5, "bert_mini": 1.3}
    result = make_result(rows, [factor[row.measurement.model] for row in rows])
    groups = worst_groups(result, rows)
    assert [group["network"] for group in groups] == ["vit_tiny", "bert_mini", "mlp"]
    worst = groups[0]
    assert worst["gpu"] == "A100-SXM4-80GB"
    assert worst["n"] == 6
    assert worst["mape"] == pytest.approx(0.5)
    assert worst["bias"] == pytest.approx(-0.5)
    assert worst["closed_form_bias"] == pytest.approx(-0.5)
    assert worst["error_share"] == pytest.approx(0.5 / (0.5 + 0.3 + 0.1))
    assert [group["network"] for group in worst_groups(result, rows, count=1)] == ["vit_tiny"]


def test_groups_of_fewer_than_five_rows_are_not_listed(rows) -> None:
    few = rows[: 6 + 4]  # all rows of one network and four of another
    groups = worst_groups(make_result(few, [1.5] * len(few)), few)
    assert [(group["network"], group["n"]) for group in groups] == [(rows[0].network, 6)]


def test_the_groups_of_a_part_of_a_split_hold_only_its_rows(rows) -> None:
    result = make_result(rows, [1.1] * len(rows))
    half = result.restrict(np.array([row.measurement.model == "mlp" for row in rows]), split="row without MLPerf")
    assert [group["network"] for group in worst_groups(half, rows)] == ["mlp"]
