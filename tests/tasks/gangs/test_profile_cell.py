"""profile_cell and record_cell on a real Dask cluster with real ranks; every run has tiny limits."""

import contextlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from distributed import Client, Future, LocalCluster

from precision_time.storage.errors import InputError, StorageError
from precision_time.storage.schema import GridCell
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.casgd_cells.profile import profile_casgd_cell
from precision_time.tasks.gangs import leases
from precision_time.tasks.gangs import profile_cell as profile
from precision_time.tasks.gangs.leases import gang_state
from precision_time.tasks.gangs.profile_cell import profile_cell
from precision_time.tasks.gangs.record_cell import read_fragments, record_cell
from precision_time.tasks.processes.rank_process import assign_devices
from precision_time.tasks.processes.running_ranks import end_ranks
from precision_time.tasks.ranks.job import MeasurementLimits
from precision_time.tests.tasks.builders import CELL, profile_alone

LIMITS = MeasurementLimits(warmup_steps=2, measured_steps=7, seconds_per_cell=5.0, timeout_s=60.0)


@pytest.fixture(scope="module")
def client():
    # Workers and their ranks must find the workloads beside this file.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        with (
            LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
            Client(cluster) as client,
        ):
            yield client


def run_cell(client, scratch, model, *, limits=LIMITS, **changes):
    client.wait_for_workers(2, timeout=30)
    return profile_alone(replace(CELL, model=model, **changes), client=client, scratch=scratch, limits=limits)


def started_ranks(scratch):
    return len(list(scratch.glob("*/rank-*.log")))


def living_processes_of(folder):
    """Command lines that name ``folder``; a zombie has none. The kernel ends orphans a moment after their parent."""
    for _ in range(50):
        commands = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                commands += [text for text in [entry.read_bytes().decode(errors="replace")] if str(folder) in text]
        if not commands:
            break
        time.sleep(0.1)
    return commands


def assert_workers_are_free(client):
    client.wait_for_workers(2, timeout=30)
    state = gang_state(client)
    for _ in range(100):
        if not state["draining"]:
            break
        time.sleep(0.1)
        state = gang_state(client)
    assert not any(state.values())
    assert set(client.run(end_ranks).values()) == {0}


def test_two_ranks_leave_rows_whose_parts_make_sense(client, tmp_path):
    receipt = run_cell(client, tmp_path / "scratch", "mlp")
    assert (receipt.status, receipt.cause, receipt.message) == ("recorded", "", "")
    assert receipt.workload is None  # the card of mlp is shipped

    rows = read_fragments(receipt)
    measured = [row for row in rows if not row.is_warmup]
    assert sorted({row.rank for row in rows}) == [0, 1]
    # On a very busy machine the cap comes first, but never before three steps.
    assert len(measured) in [2 * steps for steps in range(3, LIMITS.measured_steps + 1)]
    assert {row.step for row in rows if row.rank == 0} == {row.step for row in rows if row.rank == 1}
    # DDP starts with one bucket and cuts it after the first step; measured steps all have the same two.
    assert next(row.bucket_count for row in rows if row.step == 0) == 1
    assert {(row.bucket_count, row.bucket_bytes) for row in measured} == {(2, 4 * 3_159_050)}
    for row in measured:
        assert 0 < row.communication_time_s < row.backward_time_s
        assert row.compute_time_s > 0
        assert row.forward_time_s + row.backward_time_s + row.optimizer_time_s == pytest.approx(row.iteration_time_s)
    assert all(row.compute_time_s is None for row in rows if row.is_warmup)
    assert {(row.threads_per_rank, row.model_params, row.effective_precision) for row in rows} == {
        (1, 3_159_050, "fp32")
    }

    dataset = TimingsDataset(str(tmp_path / "data"))
    outcome = record_cell(dataset, receipt)
    assert (outcome.status, outcome.rows) == ("recorded", len(rows))
    assert dataset.recorded_cells() == {receipt.cell_id}
    assert not Path(receipt.scratch).exists()
    assert dataset.measurements()[0].world_size == 2


def test_a_users_workload_brings_its_card_and_scales_its_loss(client, tmp_path):
    receipt = run_cell(
        client, tmp_path, "faulty_workloads:tiny", world_size=1, precision="amp_fp16", gradient_accumulation_steps=2
    )
    assert (receipt.status, receipt.message) == ("recorded", "")
    assert receipt.workload["name"] == "faulty_workloads:tiny"
    assert receipt.workload["params"] == 64 * 64 + 64 + 64 * 8 + 8
    measured = [row for row in read_fragments(receipt) if not row.is_warmup]
    assert {row.loss_scale for row in measured} == {1024.0}
    assert not any(row.step_skipped for row in measured)
    assert all(row.compute_time_s == row.iteration_time_s for row in measured)
    assert {(row.communication_time_s, row.exposed_communication_s, row.bucket_count) for row in measured} == {
        (0.0, 0.0, 0)
    }


@pytest.mark.parametrize(
    ("model", "cause", "said"),
    [
        ("faulty_workloads:raises_on_rank_1", "exception", "rank 1: ValueError: the data of rank 1 are gone"),
        ("faulty_workloads:killed_on_rank_0", "signal 9", "rank 0: the process was ended by SIGKILL"),
        ("scripted_ranks:ends", "exit code 0", "the process ended with exit code 0 without a result"),
    ],
)
def test_a_rank_that_dies_ends_its_peer_and_is_named_as_the_cause(client, tmp_path, model, cause, said):
    receipt = run_cell(client, tmp_path, model)
    assert (receipt.status, receipt.cause) == ("failed", cause)
    assert said in receipt.message
    assert receipt.duration_s < LIMITS.timeout_s / 2
    assert_workers_are_free(client)

    dataset = TimingsDataset(str(tmp_path / "data"))
    outcome = record_cell(dataset, receipt)
    assert (outcome.status, outcome.cause, outcome.rows) == ("failed", cause, 0)
    assert dataset.recorded_cells() == set()
    assert [kept.cause for kept in dataset.outcomes()] == [cause]


def test_a_hung_rank_is_killed_at_the_deadline(client, tmp_path):
    limits = MeasurementLimits(warmup_steps=2, measured_steps=3, seconds_per_cell=2.0, timeout_s=6.0)
    receipt = run_cell(client, tmp_path, "faulty_workloads:sleeps_on_rank_1", limits=limits)
    assert (receipt.status, receipt.cause) == ("failed", "timed out")
    assert "after 6 s" in receipt.message
    assert_workers_are_free(client)


def test_a_rank_over_its_memory_limit_costs_only_its_cell(client, tmp_path):
    limits = MeasurementLimits(timeout_s=60.0, memory_limit_bytes=3 * 2**30)
    receipt = run_cell(client, tmp_path, "faulty_workloads:allocates_without_end", world_size=1, limits=limits)
    assert (receipt.status, receipt.cause) == ("failed", "memory-limit")
    assert_workers_are_free(client)


def test_a_precision_that_the_device_lacks_is_refused_by_name(client, tmp_path):
    receipt = run_cell(client, tmp_path, "mlp", world_size=1, precision="tf32")
    assert (receipt.status, receipt.cause) == ("refused", "precision-unsupported")
    assert "this CPU does not run tf32" in receipt.message


def test_a_worker_that_vanishes_ends_the_cell_and_its_ranks(client, tmp_path):
    client.wait_for_workers(2, timeout=30)
    victim = sorted(client.scheduler_info(n_workers=-1)["workers"])[1]
    pids = client.run(os.getpid)

    def kill_worker_once_its_rank_runs():
        for _ in range(300):
            if started_ranks(tmp_path) == 2:
                os.kill(pids[victim], 9)
                return
            time.sleep(0.1)

    killer = threading.Thread(target=kill_worker_once_its_rank_runs)
    killer.start()
    receipt = run_cell(client, tmp_path, "faulty_workloads:sleeps_on_rank_1")
    killer.join()
    assert (receipt.status, receipt.cause) == ("failed", "lost contact")
    assert receipt.duration_s < LIMITS.timeout_s / 2
    assert_workers_are_free(client)
    assert living_processes_of(tmp_path) == []


def test_a_scheduler_that_was_started_anew_is_named_as_the_cause(client, tmp_path):
    def forget_the_ranks_once_they_run():
        for _ in range(300):
            if started_ranks(tmp_path) == 2:
                client.cancel([Future(key, client) for key in list(client.futures)])
                return
            time.sleep(0.1)

    forgetter = threading.Thread(target=forget_the_ranks_once_they_run)
    forgetter.start()
    receipt = run_cell(client, tmp_path, "faulty_workloads:sleeps_on_rank_1")
    forgetter.join()
    assert (receipt.status, receipt.cause) == ("failed", "lost contact")
    assert "started anew" in receipt.message
    assert_workers_are_free(client)


def test_an_interrupt_kills_the_ranks_and_goes_on_up(client, tmp_path, monkeypatch):
    real_wait = profile.wait

    def interrupted_wait(*arguments, **options):
        if started_ranks(tmp_path) == 2:
            monkeypatch.setattr(profile, "wait", real_wait)
            raise KeyboardInterrupt
        return real_wait(*arguments, **options)

    monkeypatch.setattr(profile, "wait", interrupted_wait)
    with pytest.raises(KeyboardInterrupt):
        run_cell(client, tmp_path, "faulty_workloads:sleeps_on_rank_1")
    assert_workers_are_free(client)


SOLVER = GridCell(model="casgd-logistic-n8", precision="fp32", world_size=2, per_gpu_batch_size=4, strategy="columns")


@pytest.mark.parametrize(("profile", "cell"), [(profile_cell, CELL), (profile_casgd_cell, SOLVER)])
def test_nothing_is_started_on_workers_whose_lease_has_ended_meanwhile(client, tmp_path, profile, cell):
    def sleep_it_away(job, *, lease):
        leases._ask(client, "gang_release", lease=lease.identity, sweeps=1)
        return profile(job, lease=lease)

    client.wait_for_workers(2, timeout=30)
    receipt = profile_alone(
        cell, attempt=7, client=client, scratch=tmp_path, limits=LIMITS, profile=sleep_it_away
    )  # fmt: skip
    assert (receipt.status, receipt.cause, receipt.attempt) == ("failed", "lost contact", 7)
    assert receipt.message == "the scheduler no longer knows its lease"
    assert [path.name for path in tmp_path.glob("*/*")] == ["job.json"]
    assert_workers_are_free(client)


def test_a_cell_wider_than_the_cluster_is_bad_input(client, tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "GRACE_S", 0.2)
    with pytest.raises(InputError, match="fewer workers than the cell has ranks"):
        run_cell(client, tmp_path, "mlp", world_size=3)


def test_a_scratch_folder_that_cannot_be_made_is_no_failure_of_the_cell(client, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="scratch folder cannot be written"):
        run_cell(client, tmp_path / "file", "mlp")


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (["0,1", "0,1", "0,1,2", "0,1,2"], ("0", "1", "0", "1")),  # plain workers: all have the same list
        (["0,1", "1,0", "2,0", "0,2"], ("0", "1", "2", "0")),  # dask-cuda: a worker's own GPU comes first
        (["GPU-a", "GPU-b", "GPU-c", "GPU-d"], ("GPU-a", "GPU-b", "GPU-c", "GPU-d")),
        ([None, None, None, None], ("0", "1", "0", "1")),
    ],
)
def test_every_rank_of_a_host_gets_a_gpu_of_its_own(visible, devices):
    workers = ["tcp://10.0.0.1:1", "tcp://10.0.0.1:2", "tcp://10.0.0.2:1", "tcp://10.0.0.2:2"]
    assert assign_devices(workers, visible) == devices


def test_more_ranks_than_gpus_on_a_host_are_refused():
    with pytest.raises(InputError, match="fewer GPUs than ranks"):
        assign_devices(["tcp://10.0.0.1:1", "tcp://10.0.0.1:2"], ["0", "0"])
