"""One of our own errors appears once in a run's log, as its message alone; any other error with its traceback."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from precision_time.flows.planning.spec import CampaignSpec
from precision_time.flows.retraining.spec import RetrainSpec, RollBackSpec
from precision_time.storage.errors import InputError, NotFoundError, StorageError

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    """The log records of flow runs and task runs."""
    from prefect.logging.configuration import setup_logging

    setup_logging()  # a first run would do it, and take the handlers of others away
    log_records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = log_records.append  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("prefect.flow_runs", "prefect.task_runs")]
    for logger in loggers:
        logger.addHandler(handler)
    yield log_records
    for logger in loggers:
        logger.removeHandler(handler)


def test_a_flow_says_the_error_once_and_its_caller_gets_the_error(records, tmp_path: Path) -> None:
    from precision_time.flows.retraining.roll_back import roll_back_predictor

    spec = RollBackSpec(registry=str(tmp_path / "registry"), name="nobody")
    with pytest.raises(NotFoundError):
        roll_back_predictor(spec)
    assert not [record for record in records if record.exc_info]
    assert len([record for record in records if "there is no such artifact" in record.getMessage()]) == 1
    state = roll_back_predictor(spec, return_state=True)
    assert state.is_failed()
    assert "nobody" in str(state.message)


def test_a_campaign_that_cannot_be_planned_says_why_without_a_traceback(records, tmp_path: Path) -> None:
    from precision_time.flows.campaigns.campaign import profiling_campaign

    (tmp_path / "data").write_text("a file where the folder should be")
    spec = CampaignSpec(
        name="no-folder", models=["mlp"], precisions=["fp32"], gpus=[1], batch_sizes=[2], data=str(tmp_path / "data")
    )
    with pytest.raises((InputError, StorageError)) as caught:
        profiling_campaign(spec)
    assert not [record for record in records if record.exc_info]
    assert len([record for record in records if str(caught.value) in record.getMessage()]) == 1


def test_a_step_of_a_retraining_fails_with_its_words_and_a_fault_of_ours_with_its_traceback(
    records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from precision_time.flows.retraining import retrain

    def fail(error: Exception) -> None:
        def raise_it(*parts: object, **settings: object) -> None:
            raise error

        monkeypatch.setattr(retrain, "take_snapshot", raise_it)

    spec = RetrainSpec(data=str(tmp_path / "data"), registry=str(tmp_path / "registry"))
    fail(InputError("the colour is wrong", got="red", expected="blue"))
    with pytest.raises(InputError, match="the colour is wrong"):
        retrain.retrain_predictor(spec)
    assert not [record for record in records if record.exc_info]
    assert len([record for record in records if "the colour is wrong" in record.getMessage()]) == 2  # step and run
    records.clear()
    fail(ZeroDivisionError("a fault"))
    with pytest.raises(ZeroDivisionError):
        retrain.retrain_predictor(spec)
    assert [record for record in records if record.exc_info]
