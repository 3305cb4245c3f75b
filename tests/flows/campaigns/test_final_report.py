"""The end of a campaign: the retraining that may follow it, and a report that outlives the server."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from precision_time.flows.campaigns.cell_loop import INTERRUPTED
from precision_time.flows.campaigns.final_report import CampaignPages, retrain_after
from precision_time.flows.campaigns.summary import CampaignResult
from precision_time.flows.planning.plan import PlannedCell, plan_campaign
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.flows.retraining.result import RetrainResult
from precision_time.storage.errors import StorageFullError
from precision_time.storage.schema import CellOutcome, Measurement
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.probing.probe_device import ProbeReport
from precision_time.tests.flows.made_up import make_outcome, measure_by

Measure = Callable[..., list[Measurement]]
Record = Callable[[str, Sequence[Measurement]], None]


def make_spec(folder: Path, **changes: object) -> CampaignSpec:
    values = {
        "name": "end", "models": ["mlp"], "precisions": ["fp32"], "gpus": [1, 2], "batch_sizes": [8],
        "data": str(folder / "data"), "retrain_after": True, "registry": str(folder / "registry"), "max_attempts": 1,
    }  # fmt: skip
    return CampaignSpec.model_validate(values | changes)


def make_result(spec: CampaignSpec, **changes: object) -> CampaignResult:
    values = {
        "name": spec.name, "data": spec.data, "gpu": "cpu-test-2c", "cells_planned": 2, "cells_recorded": 2,
        "cells_measured": 2, "rows": 6, "rows_added": 6, "failed": (), "duration_s": 3.0,
    }  # fmt: skip
    return CampaignResult.model_validate(values | changes)


def test_nothing_is_retrained_unless_it_is_asked_for_and_there_is_something_new(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    assert retrain_after(make_spec(tmp_path, retrain_after=False), make_result(spec)) is None
    for changes, reason in [
        ({"cells_measured": 0}, "this run recorded no new cell"),
        ({"ended_by": INTERRUPTED}, "the run was interrupted"),
    ]:
        outcome = retrain_after(spec, make_result(spec, **changes))
        assert outcome is not None
        assert (outcome.status, outcome.reasons) == ("not tried", (reason,))


def test_too_few_cells_to_train_on_are_a_reason_and_no_failure(
    tmp_path: Path, measure: Measure, record: Record
) -> None:
    spec = make_spec(tmp_path)
    record(spec.data, measure(models=("mlp",), precisions=("fp32",), world_sizes=(1,)))
    outcome = retrain_after(spec, make_result(spec))
    assert outcome is not None
    assert outcome.status == "not tried"
    assert "too few measured cells to train and validate on; got: 3 cells" in outcome.reasons[0]


def test_the_report_is_kept_beside_the_data_and_a_full_disk_costs_no_more_than_it(
    tmp_path: Path, device: ProbeReport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from precision_time.storage.local import LocalStore

    spec = make_spec(tmp_path)
    pages = CampaignPages(plan_campaign(spec, probe=lambda wanted: device))
    pages.write_report(make_result(spec), dataset=TimingsDataset(spec.data))
    report = tmp_path / "data" / "campaigns" / "v1" / "end" / "report.md"
    assert report.read_text(encoding="utf-8").startswith("# Campaign end: complete\n")

    def fill(self: LocalStore, path: str, data: bytes) -> None:
        raise StorageFullError("no room")

    monkeypatch.setattr(LocalStore, "write_bytes", fill)
    pages.rewrite_report(make_result(spec))
    assert "the report was not kept in the data folder" in caplog.text


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("fails", [False, True])
def test_a_retraining_follows_the_campaign_and_stands_in_its_report(
    tmp_path: Path,
    device: ProbeReport,
    measure: Measure,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
) -> None:
    from precision_time.flows.campaigns import campaign
    from precision_time.flows.retraining import retrain
    from precision_time.flows.retraining.spec import RetrainSpec

    retrained = []

    def run_retraining(spec: RetrainSpec) -> RetrainResult:
        retrained.append((spec.data, spec.registry))
        if fails:
            raise ConnectionError("the registry is away")
        return RetrainResult(
            status="published", artifact_id="default@1", reasons=["it_is better"], left_out=[], rows=12,
            holdout_models=[], training_data_sha256="0" * 64, accuracy={},
        )  # fmt: skip

    def measure_cell(planned: PlannedCell, *, dataset: TimingsDataset, **_: object) -> CellOutcome:
        cell = planned.cell
        (made_up,) = measure(models=("mlp",), precisions=("fp32",), world_sizes=(cell.world_size,), batches=(8,))
        record(dataset.url, [replace(made_up, cell_id=planned.cell_id)])
        return make_outcome(planned)

    monkeypatch.setattr(retrain, "run_retraining", run_retraining)
    measure_by(measure_cell, device=device, monkeypatch=monkeypatch)
    spec = make_spec(tmp_path)
    state = campaign.profiling_campaign(spec, return_state=True)
    result = CampaignResult.model_validate(state.result())

    assert retrained == [(spec.data, spec.registry)]
    assert (result.status, result.cells_recorded) == ("complete", 2)
    report = (tmp_path / "data" / "campaigns" / "v1" / "end" / "report.md").read_text(encoding="utf-8")
    assert result.retraining is not None
    if fails:
        assert (state.type.value, state.name) == ("COMPLETED", "Retraining failed")
        assert "## Retraining: failed\n\n- ConnectionError: the registry is away" in report
    else:
        assert (state.name, result.retraining.artifact_id) == ("Completed", "default@1")
        assert "## Retraining: published\n\n- it\\_is better\n- in use: default@1" in report
