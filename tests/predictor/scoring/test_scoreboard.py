"""Figures stand beside their goals and baselines, and the worst groups are found."""

import numpy as np
import pytest

from precision_time.predictor.rows.observations import Observation, observe
from precision_time.predictor.scoring.cross_validation import METHODS, CrossValidation, cross_validate_all
from precision_time.predictor.scoring.scoreboard import format_cross_validation, worst_groups


def result_of(rows: list[Observation], factors: list[float], *, split: str = "row") -> CrossValidation:
    """Predictions that are ``factors`` times the measured seconds; the closed forms are half of them."""
    measured = np.array([seen.measurement.iteration_time_s for seen in rows])
    return CrossValidation(
        split=split,
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


def cells(text: str, title: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {title} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_line_shows_goal_reached_coverage_and_baselines(rows) -> None:
    factors = [1.04] * (len(rows) - 1) + [1.3]
    text = format_cross_validation({"row": result_of(rows, factors)})
    assert cells(text, "split") == ["split", "rows", "goal", "predictor", "met", "covered", "closed forms"]
    mape = (0.04 * 17 + 0.3) / 18
    assert cells(text, "5-fold by row") == [
        "5-fold by row", "18", "5.0 / 2.5", f"{100 * mape:.1f} / 4.0", "no", f"{1700 / 18:.1f}", "50.0 / 50.0",
    ]  # fmt: skip


def test_a_goal_is_met_only_when_both_figures_meet_it(rows) -> None:
    def met(factor: float) -> str:
        return cells(format_cross_validation({"row": result_of(rows, [factor] * len(rows))}), "5-fold by row")[4]

    assert met(1.02) == "yes"
    assert met(1.03) == "no"  # a MAPE of 3 is under 5, a median of 3 is above 2.5


def test_every_line_of_a_real_run_is_as_long_as_the_others(rows) -> None:
    text = format_cross_validation(cross_validate_all(rows, splits=["row", "leave-model-out"], processes=1))
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 2 + 3  # with the speed-up
    assert len(cells(text, "leave model out")) == 5 + 1 + len(METHODS) - 1
    assert cells(text, "speed-up over fp32 or tf32")[2] == "- / 7.0"


def test_the_worst_groups_come_first_with_their_bias(rows) -> None:
    factor = {"mlp": 1.1, "vit_tiny": 0.5, "bert_mini": 1.3}
    result = result_of(rows, [factor[seen.measurement.model] for seen in rows])
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
    groups = worst_groups(result_of(few, [1.5] * len(few)), few)
    assert [(group["network"], group["n"]) for group in groups] == [(rows[0].network, 6)]


def test_groups_of_a_split_that_predicts_some_rows_are_of_those_rows(rows) -> None:
    result = result_of(rows, [1.1] * len(rows))
    half = result.restrict(np.array([seen.measurement.model == "mlp" for seen in rows]), split="row without MLPerf")
    assert [group["network"] for group in worst_groups(half, rows)] == ["mlp"]
