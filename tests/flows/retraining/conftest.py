"""A retraining that validates quickly and lets every challenger through."""

import pytest


@pytest.fixture
def passing_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what happens to a predictor that passed, not of its validation and plots."""
    from precision_time.flows.retraining import retrain
    from precision_time.tasks.publishing.gate import GateDecision
    from precision_time.tasks.publishing.validate import Validation

    validation = Validation(accuracy={}, cross_validations={}, radii={"known": 0.2}, level=0.9)
    decision = GateDecision(passed=True, reasons=())
    monkeypatch.setattr(retrain, "validate_predictor", lambda snapshot, **settings: validation)
    monkeypatch.setattr(retrain, "judge_challenger", lambda snapshot, validation, **settings: decision)
    monkeypatch.setattr(retrain, "draw_retraining_plots", lambda *parts: {})
    monkeypatch.setattr(retrain, "write_report", lambda *parts, **settings: "# Accuracy\n")
    monkeypatch.setattr(retrain, "publish_pages", lambda **pages: None)
