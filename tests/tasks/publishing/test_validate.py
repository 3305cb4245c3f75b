"""Every split is scored beside its baselines, and only intervals that hold on their split are kept."""

import pytest

from precision_time.predictor.learning.regimes import REGIMES
from precision_time.predictor.learning.splits import SPLITS
from precision_time.predictor.scoring.metrics import score
from precision_time.tasks.publishing import validate
from precision_time.tasks.publishing.gate import GateDecision
from precision_time.tasks.publishing.report import write_report
from precision_time.tasks.publishing.validate import (
    chance_of_coverage,
    coverage_holds,
    validate_predictor,
)
from precision_time.tests.tasks.publishing.made_up import make_snapshot

#: What 36 cells of three families on one GPU and at most two ranks allow.
SCORED = {
    "configuration", "source-model-gpu", "leave-model-out", "leave-family-out", "precision-transfer", "speed-up",
    "holdout",
}  # fmt: skip


def test_every_split_stands_beside_both_baselines(validation) -> None:
    assert set(validation.accuracy) == SCORED
    for methods in validation.accuracy.values():
        assert set(methods) == {"predictor", "precision_blind", "roofline", "closed_form"}
    assert (
        {"known", "new model", "new family"}
        <= set(validation.radii)
        <= {"known", "new pair", "new model", "new family"}
    )


def test_what_is_not_scored_is_named_with_its_reason(validation) -> None:
    assert set(validation.left_out) == set(SPLITS) - SCORED == {"row", "leave-gpu-out", "scale"}
    assert validation.left_out["row"] != validation.left_out["scale"]
    card = write_card(validation)
    for line in (
        "- 5-fold by row: with few rows",
        "- leave GPU out: the rows do not",
        "- up to 8 GPUs to more: the rows",
    ):
        assert line in card


def test_the_card_tells_the_errors_of_every_method_by_precision(validation, snapshot) -> None:
    result = validation.cross_validations["configuration"]
    assert list(validation.by_precision) == ["fp32", "amp_bf16"]
    for policy, methods in validation.by_precision.items():
        of_policy = [snapshot.training[row].setup.precision.name == policy for row in result.rows]
        assert sum(of_policy) == 18
        assert set(methods) == set(result.predicted_s)
        for method, metrics in methods.items():
            expected = score(result.predicted_s[method][of_policy], result.measured_s[of_policy])
            assert {name: metrics[name] for name in ("n", "mape", "median_ape")} == {
                name: expected[name] for name in ("n", "mape", "median_ape")
            }
    blind = validation.by_precision["amp_bf16"]["precision_blind"]
    line = f"| amp_bf16 | precision-blind | 18 | {blind['mape']:.1%} | {blind['median_ape']:.1%} |"
    assert line in write_card(validation).splitlines()


def write_card(validation) -> str:
    return write_report(make_snapshot(), validation, GateDecision(passed=True, reasons=()), holdout_models=())


@pytest.mark.parametrize(("covered", "holds"), [(36, True), (30, True), (20, False), (0, False)])
def test_coverage_holds_within_what_chance_allows(covered: int, holds: bool) -> None:
    metrics = {"predictor": {"n": 36.0, "coverage": covered / 36}}
    assert coverage_holds(metrics, level=0.9) is holds


def test_an_interval_that_does_not_hold_on_its_split_is_not_given_out(snapshot, validation, monkeypatch) -> None:
    # The folds of the fixture, which took seconds.
    monkeypatch.setattr(validate, "cross_validate_all", lambda *rows, **settings: validation.cross_validations)
    monkeypatch.setattr(validate, "coverage_holds", lambda metrics, level: metrics["predictor"]["coverage"] > 0.999)
    radii = validate_predictor(snapshot, level=0.9, seed=0)
    held = {split for split, methods in radii.accuracy.items() if (methods["predictor"]["coverage"] or 0) > 0.999}
    splits_used = {
        name: next((split for split in regime.interval_splits if split in radii.cross_validations), "")
        for name, regime in REGIMES.items()
    }
    assert set(radii.radii) == {regime for regime, split in splits_used.items() if split in held}
    assert len(radii.radii) < len([split for split in splits_used.values() if split])


def test_chance_of_coverage_is_the_binomial_tail() -> None:
    assert chance_of_coverage(10, 10, 0.9) == pytest.approx(1.0)
    assert chance_of_coverage(0, 10, 0.9) == pytest.approx(0.1**10)
    assert chance_of_coverage(8, 10, 0.9) == pytest.approx(1 - 0.9**10 - 10 * 0.9**9 * 0.1)
