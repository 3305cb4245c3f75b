"""A snapshot of made-up cells with a held-out model, and its validation, which takes seconds."""

import pytest

from precision_time.predictor.rows.observations import observe
from precision_time.tasks.publishing.snapshot import Snapshot
from precision_time.tasks.publishing.validate import Validation, validate_predictor
from precision_time.tests.tasks.publishing.made_up import make_snapshot


@pytest.fixture(scope="session")
def snapshot(measure) -> Snapshot:
    return make_snapshot(observe(measure()), observe(measure(models=("gpt2_mini",))))


@pytest.fixture(scope="session")
def validation(snapshot: Snapshot) -> Validation:
    return validate_predictor(snapshot, level=0.9, seed=0)
