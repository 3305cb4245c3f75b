"""CA-SGD cells over real MPI into the tables of campaigns."""

import os
import platform
import time
from dataclasses import replace
from itertools import product

import pytest

from precision_time.__main__ import run
from precision_time.casgd.precision import POLICIES
from precision_time.storage.errors import InputError
from precision_time.storage.schema import Environment, GridCell
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.casgd_cells import launch
from precision_time.tasks.casgd_cells.cells import NO_CARD, CasgdCell, casgd_environment
from precision_time.tasks.casgd_cells.profile import run_casgd_cell, run_casgd_cells
from precision_time.tasks.publishing.snapshot import take_snapshot
from precision_time.tasks.ranks.job import MeasurementLimits, RankJob

pytestmark = pytest.mark.usefixtures("a_busy_machine_is_no_fault")

LIMITS = MeasurementLimits(warmup_steps=2, measured_steps=5, seconds_per_cell=5, timeout_s=60)


@pytest.fixture
def environment() -> Environment:
    machine = Environment(device_type="cpu", gpu="cpu-test-2c", cpu_model=platform.machine(), cpu_cores=2)
    return casgd_environment(machine)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cell_keeps_its_name_both_ways(policy):
    cell = CasgdCell(objective="poisson", columns=28, s=8, batch_size=16, policy=policy, ranks=2)
    assert CasgdCell.of(cell.grid_cell) == cell
    assert cell.grid_cell.gradient_accumulation_steps == 8
    assert cell.grid_cell.label.startswith("casgd-poisson-n28 ")


def test_cells_that_differ_have_different_names(environment):
    cells = [
        CasgdCell(objective=objective, columns=columns, s=s, batch_size=b, policy=policy, ranks=ranks)
        for objective, columns, s, b, policy, ranks in product(
            ("logistic", "squared"), (5, 28), (1, 4), (4, 16), POLICIES, (1, 2)
        )
    ]
    assert len({cell.grid_cell.cell_id(environment) for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    "wrong", [{"objective": "hinge"}, {"policy": "fp8"}, {"ranks": 9}], ids=["objective", "policy", "ranks"]
)
def test_a_cell_that_cannot_be_is_named(wrong):
    with pytest.raises(InputError):
        CasgdCell(**{"objective": "logistic", "columns": 8, "s": 1, "batch_size": 4, **wrong})


def test_a_cell_of_another_workload_is_refused():
    with pytest.raises(InputError, match="not a cell of CA-SGD"):
        CasgdCell.of(GridCell(model="resnet50", precision="fp32", world_size=1, per_gpu_batch_size=8))


def test_one_rank_is_recorded_listed_and_not_run_again(environment, tmp_path, capsys):
    dataset = TimingsDataset(tmp_path / "data")
    cells = [CasgdCell(objective="squared", columns=6, s=s, batch_size=4, policy="recipe") for s in (1, 4)]
    settings = {"dataset": dataset, "environment": environment, "scratch": tmp_path / "scratch", "limits": LIMITS}
    outcomes = run_casgd_cells(cells, **settings)
    assert [(outcome.status, outcome.rows) for outcome in outcomes] == [("recorded", 7), ("recorded", 7)]
    assert run_casgd_cells(cells, **settings) == []
    measured = dataset.measurements()
    assert dataset.problems == []
    assert {(row.model, row.task_input, row.precision, row.gradient_accumulation_steps) for row in measured} == {
        ("casgd-squared-n6", "n6", "amp_bf16", 1),
        ("casgd-squared-n6", "n6", "amp_bf16", 4),
    }
    assert list((tmp_path / "scratch").iterdir()) == []
    assert run(["data", "summary", str(tmp_path / "data")]) == 0
    assert "casgd-squared-n6" in capsys.readouterr().out


@pytest.mark.mpi
def test_two_ranks_write_two_fragments_of_one_cell(environment, tmp_path):
    dataset = TimingsDataset(tmp_path / "data")
    cell = CasgdCell(objective="logistic", columns=7, s=4, batch_size=4, ranks=2)
    (outcome,) = run_casgd_cells(
        [cell], dataset=dataset, environment=environment, scratch=tmp_path / "scratch", limits=LIMITS
    )
    assert (outcome.status, outcome.message, outcome.rows) == ("recorded", "", 14)
    (measured,) = dataset.measurements()
    assert (measured.world_size, measured.strategy, measured.iterations) == (2, "columns", 5)
    assert measured.exposed_communication_s > 0
    assert measured.compute_time_s + measured.communication_time_s == pytest.approx(measured.iteration_time_s, rel=0.5)


def test_ranks_that_take_too_long_are_ended(tmp_path):
    started = tmp_path / "pid"
    program = f"import os, pathlib, time; pathlib.Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(60)"
    began = time.monotonic()
    cause, _ = launch._run([os.sys.executable, "-c", program], log=tmp_path / "log", timeout_s=1.5)
    assert cause == "timed out"
    assert time.monotonic() - began < 10
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_a_rank_that_fails_is_an_outcome_with_its_last_words(environment, tmp_path):
    cell = CasgdCell(objective="logistic", columns=7, s=4, batch_size=4)
    job = RankJob(cell=cell.grid_cell, attempt=1, environment=environment, limits=LIMITS, scratch=str(tmp_path / "a"))
    job.lay_out()
    (tmp_path / "a" / "rank-0.parquet").mkdir()  # nothing can be written there
    report = launch.launch_ranks(job.to_json())
    assert report["cause"] == "exception"
    assert "rank-0.parquet" in report["message"]


def test_an_attempt_has_a_folder_of_its_own_and_leaves_other_files_alone(environment, tmp_path):
    cell = CasgdCell(objective="logistic", columns=7, s=4, batch_size=4)
    (tmp_path / "notes.txt").write_text("mine")
    receipts = [
        run_casgd_cell(cell, environment=environment, scratch=tmp_path, limits=LIMITS, attempt=attempt)
        for attempt in (1, 2)
    ]
    assert [receipt.status for receipt in receipts] == ["recorded", "recorded"]
    assert len({receipt.scratch for receipt in receipts}) == 2
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_retraining_leaves_the_rows_out_and_counts_them(environment, measure, record, tmp_path):
    url = str(tmp_path / "data")
    record(url, measure(models=("mlp", "vit_tiny")))
    networks = take_snapshot(url)
    cells = [CasgdCell(objective="squared", columns=6, s=s, batch_size=4) for s in (1, 4)]
    settings = {"environment": environment, "scratch": tmp_path / "scratch", "limits": LIMITS}
    run_casgd_cells(cells, dataset=TimingsDataset(url), **settings)
    snapshot = take_snapshot(url)
    assert [observation.measurement.cell_id for observation in snapshot.training] == [
        observation.measurement.cell_id for observation in networks.training
    ]
    assert snapshot.problems == ((url, f"2 cells cannot be used: {NO_CARD}"),)
    alone = str(tmp_path / "alone")
    run_casgd_cells(cells, dataset=TimingsDataset(alone), **settings)
    with pytest.raises(InputError, match=r"no measurements to train on.*2 cells of CA-SGD only"):
        take_snapshot(alone)


def test_without_mpiexec_the_outcome_says_what_to_install(environment, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_find_mpiexec", lambda: None)
    cell = CasgdCell(objective="logistic", columns=7, s=4, batch_size=4, ranks=2)
    receipt = run_casgd_cell(cell, environment=environment, scratch=tmp_path / "scratch", limits=LIMITS)
    assert (receipt.status, receipt.cause) == ("failed", "exception")
    assert "pip install 'precision-time[mpi]'" in receipt.message


def test_a_rank_with_other_software_than_planned_is_refused(environment, tmp_path):
    cell = CasgdCell(objective="logistic", columns=7, s=1, batch_size=4)
    planned = replace(environment, framework_version="numpy 0.1")
    receipt = run_casgd_cell(cell, environment=planned, scratch=tmp_path / "scratch", limits=LIMITS)
    assert receipt.cause == "environment changed"
    assert "planned with numpy 0.1" in receipt.message


def test_a_row_tells_how_busy_the_machine_was(environment, tmp_path):
    dataset = TimingsDataset(tmp_path / "data")
    cell = CasgdCell(objective="logistic", columns=6, s=1, batch_size=4)
    limits = MeasurementLimits(warmup_steps=2, measured_steps=20, seconds_per_cell=5, timeout_s=60)
    run_casgd_cells([cell], dataset=dataset, environment=environment, scratch=tmp_path / "scratch", limits=limits)
    rows = dataset.read().to_pylist()
    assert all(row["contended"] is not None for row in rows)
    assert rows[-1]["other_cpu_share"] is not None
