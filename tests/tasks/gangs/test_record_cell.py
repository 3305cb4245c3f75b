import json
from dataclasses import replace
from pathlib import Path

import pytest

from precision_time.predictor.workloads.workload import find_workload
from precision_time.storage.schema import GridCell
from precision_time.storage.timings import TimingsDataset, write_fragment
from precision_time.tasks.gangs.record_cell import record_cell
from precision_time.tasks.ranks.job import Attempt
from precision_time.tasks.ranks.timed_loop import LoopResult
from precision_time.tasks.work_kinds import refuse_unstarted
from precision_time.tests.tasks.builders import ENVIRONMENT, make_job, make_step, rows_of

CELL = GridCell(model="own:factory", precision="bf16", world_size=2, per_gpu_batch_size=4)
CARD = find_workload("mlp").to_dict() | {"name": CELL.model}


def make_fragment_rows(job, rank):
    step = make_step(communication_s=0.125, buckets=(8,))
    return rows_of(job, LoopResult(warmup=[step] * 2, synced=[step] * 3, local=[step] * 3, steady=True), rank=rank)


@pytest.fixture
def job(tmp_path):
    job = make_job(tmp_path / "scratch", CELL)
    job.lay_out()
    return job


def write_rows(job, *ranks, **changes):
    """The fragments of ``ranks``, both by default, with ``changes`` in every row."""
    for rank in ranks or range(2):
        rows = [replace(row, **changes) for row in make_fragment_rows(job, rank)]
        write_fragment(job.fragment_path(rank), rows)


@pytest.fixture
def receipt(job):
    write_rows(job)
    job.card_path.write_text(json.dumps(CARD))
    return job.conclude(cause="", message="", host="here", started_at=1.0, duration_s=2.0)


@pytest.fixture
def dataset(tmp_path):
    return TimingsDataset(str(tmp_path / "data"))


def test_the_trace_of_a_recorded_cell_is_kept_beside_its_rows(dataset, receipt, job, tmp_path):
    job.trace_path.write_bytes(b"gzipped")
    record_cell(dataset, replace(receipt, trace=str(job.trace_path)))
    path = tmp_path / "data" / "traces" / "v1" / f"cell-{receipt.cell_id}.json.gz"
    assert path.read_bytes() == b"gzipped"
    assert dataset.trace_bytes() == 7


def assert_refused_as_corrupt(dataset, receipt, said):
    outcome = record_cell(dataset, receipt)
    assert (outcome.status, outcome.cause, outcome.rows) == ("failed", "corrupt fragment", 0)
    assert said in outcome.message
    assert dataset.recorded_cells() == set()
    assert dataset.read_cards("workloads") == []
    assert dataset.outcomes() == [outcome]


def test_good_fragments_become_one_recorded_cell_with_its_card(dataset, receipt, tmp_path):
    outcome = record_cell(dataset, receipt)
    assert (outcome.status, outcome.cause, outcome.rows, outcome.host) == ("recorded", "", 10, "here")
    assert dataset.recorded_cells() == {receipt.cell_id}
    assert dataset.outcomes() == [outcome]
    assert dataset.read_cards("workloads") == [CARD]
    assert dataset.measurements()[0].iteration_time_s == 1.0
    assert not (tmp_path / "scratch").exists()


def test_a_failed_attempt_leaves_its_outcome_and_no_rows(dataset, receipt, tmp_path):
    failed = replace(receipt, cause="signal 9", message="killed", fragments=())
    outcome = record_cell(dataset, failed)
    assert (outcome.status, outcome.cause, outcome.message, outcome.rows) == ("failed", "signal 9", "killed", 0)
    assert dataset.recorded_cells() == set()
    assert (tmp_path / "scratch").exists()  # the logs of a failure are kept


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_flipped_byte_fails_the_cell(dataset, receipt, job, place):
    path = job.fragment_path(1)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 0x10
    path.write_bytes(data)
    assert_refused_as_corrupt(dataset, receipt, "rank-1.parquet")


def test_a_cut_fragment_fails_the_cell(dataset, receipt, job):
    path = job.fragment_path(0)
    path.write_bytes(path.read_bytes()[:-100])
    assert_refused_as_corrupt(dataset, receipt, "rank-0.parquet")


def test_a_missing_fragment_fails_the_cell(dataset, receipt, job):
    job.fragment_path(1).unlink()
    assert_refused_as_corrupt(dataset, receipt, "rank 1 cannot be read")


def test_a_receipt_that_names_too_few_fragments_fails_the_cell(dataset, receipt):
    assert_refused_as_corrupt(dataset, replace(receipt, fragments=receipt.fragments[:1]), "lacks fragments")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda rows: rows[:2] + rows[3:], "fragment of rank 1 is incomplete"),
        (lambda rows: rows[:2], "fragment of rank 1 is incomplete"),
        (lambda rows: rows[:4], "took different steps"),
        (lambda rows: [replace(row, rank=0) for row in rows], "it belongs to"),
        (lambda rows: [replace(row, attempt=2) for row in rows], "it belongs to"),
        (lambda rows: [replace(row, effective_precision="fp32") for row in rows], "it ran in fp32 instead of bf16"),
        (lambda rows: [*rows[:-1], replace(rows[-1], forward_time_s=float("nan"))], "forward_time_s is nan"),
        (lambda rows: [*rows[:-1], replace(rows[-1], compute_time_s=None)], "compute_time_s is None"),
        (lambda rows: [*rows[:-1], replace(rows[-1], iteration_time_s=2.0)], "its parts sum to 1.0 s of 2.0 s"),
        (
            lambda rows: [*rows[:-1], replace(rows[-1], exposed_communication_s=float("inf"))],
            "exposed_communication_s is inf",
        ),
    ],
)
def test_rows_that_cannot_be_of_this_cell_fail_it(dataset, receipt, job, spoil, said):
    write_fragment(job.fragment_path(1), spoil(make_fragment_rows(job, 1)))
    assert_refused_as_corrupt(dataset, receipt, said)


def test_a_cell_that_is_recorded_already_keeps_its_first_rows_and_the_second_are_discarded(dataset, receipt, job):
    first = record_cell(dataset, receipt)
    job.lay_out()
    write_rows(job, attempt=2, iteration_time_s=2.0, forward_time_s=1.25)
    outcome = record_cell(dataset, replace(receipt, attempt=2))
    assert (outcome.status, outcome.message, outcome.rows) == ("recorded", "recorded before, discarded", 0)
    assert dataset.outcomes() == [first, outcome]
    assert dataset.read().num_rows == first.rows == 10
    assert dataset.measurements()[0].iteration_time_s == 1.0
    assert not Path(job.scratch).exists()


def test_rows_carry_the_marks_of_the_whole_cell(dataset, receipt):
    record_cell(dataset, receipt)
    assert set(dataset.read()["is_settled"].to_pylist()) == {True}
    assert set(dataset.read()["is_cold"].to_pylist()) == {False}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"throttled": True, "throttle_reasons": "hardware slowdown"}, "throttled"),
        ({"other_cpu_share": 0.99}, "contended"),
        ({"step_skipped": True}, "no usable step"),
    ],
)
def test_a_cell_whose_every_step_is_of_no_use_fails_with_its_reason(dataset, receipt, job, change, cause):
    write_rows(job, **change)
    outcome = record_cell(dataset, receipt)
    assert (outcome.status, outcome.cause, outcome.rows) == ("failed", cause, 0)
    assert outcome.message
    assert dataset.recorded_cells() == set()


@pytest.mark.parametrize("cause", ["option-unsupported", "strategy-unsupported", "precision-unsupported"])
def test_what_another_attempt_cannot_change_is_refused(dataset, receipt, cause):
    outcome = record_cell(dataset, replace(receipt, cause=cause, message="no", fragments=()))
    assert (outcome.status, outcome.cause) == ("refused", cause)


def test_a_cell_of_another_strategy_is_recorded_as_refused_without_a_start(dataset):
    attempt = Attempt(cell=replace(CELL, strategy="fsdp"), attempt=1, environment=ENVIRONMENT)
    record_cell(dataset, refuse_unstarted(attempt))
    (outcome,) = dataset.outcomes()
    assert (outcome.status, outcome.cause, outcome.strategy) == ("refused", "strategy-unsupported", "fsdp")
    assert "fsdp is not measured" in outcome.message
    assert refuse_unstarted(replace(attempt, cell=CELL)) is None


def test_an_outcome_names_the_options_of_its_cell(dataset, receipt):
    cell = replace(CELL, compiled=True, checkpointing="full", compression="fp16")
    record_cell(dataset, replace(receipt, cell=cell, cause="exception", fragments=()))
    (outcome,) = dataset.outcomes()
    assert (outcome.compiled, outcome.checkpointing, outcome.compression) == (True, "full", "fp16")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"framework_version": "9"}, "its framework_version is '9' instead of ''"),
        ({"driver_version": "9"}, "its driver_version is '9' instead of ''"),
        ({"compiled": True}, "it ran with compiled=True instead of False"),
    ],
)
def test_rows_of_another_environment_or_option_are_not_mixed_in(dataset, receipt, job, change, said):
    write_rows(job, 1, **change)
    assert_refused_as_corrupt(dataset, receipt, said)


def test_another_network_under_a_recorded_name_fails_and_keeps_the_card(dataset, receipt):
    dataset.write_card("workloads", str(CARD["name"]), CARD | {"params": 7})
    outcome = record_cell(dataset, receipt)
    assert (outcome.status, outcome.cause) == ("failed", "model changed")
    assert "params 7 -> " in outcome.message
    assert dataset.read_cards("workloads") == [CARD | {"params": 7}]
    assert dataset.recorded_cells() == set()


def test_a_recorded_cell_tells_the_source_its_model_came_from(dataset, receipt, job):
    write_rows(job, code_sha256="0123456789abcdef")
    assert record_cell(dataset, receipt).status == "recorded"
    assert dataset.read_cards("code") == [{"name": CELL.model, "code_sha256": "0123456789abcdef"}]
    assert set(dataset.read()["code_sha256"].to_pylist()) == {"0123456789abcdef"}


@pytest.mark.parametrize(("before", "status"), [("aaaaaaaaaaaa", "failed"), (None, "recorded")])
def test_a_model_whose_source_changed_fails_unless_the_earlier_one_was_let_go(dataset, receipt, job, before, status):
    dataset.write_card("code", CELL.model, {"name": CELL.model, "code_sha256": before})
    write_rows(job, code_sha256="bbbbbbbbbbbb")
    outcome = record_cell(dataset, receipt)
    assert outcome.status == status
    if status == "failed":
        assert outcome.cause == "model changed"
        assert "aaaaaaaa -> bbbbbbbb" in outcome.message
        assert "--accept-changes" in outcome.message
        assert dataset.recorded_cells() == set()


def test_ranks_that_loaded_different_sources_make_no_cell(dataset, receipt, job):
    write_rows(job, 0, code_sha256="a")
    write_rows(job, 1, code_sha256="b")
    assert_refused_as_corrupt(dataset, receipt, "code_sha256")
