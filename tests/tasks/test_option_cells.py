"""Options of a cell from the worker to the dataset, with real ranks and tiny limits."""

import pytest
from distributed import Client, LocalCluster

from precision_time.storage.schema import Environment, GridCell
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.job import MeasurementLimits
from precision_time.tasks.profile import profile_cell
from precision_time.tasks.record import record_cell

ENVIRONMENT = Environment(device_type="cpu", gpu="cpu-test-2c", cpu_model="test", cpu_cores=2, backend="gloo")
LIMITS = MeasurementLimits(warmup_steps=2, measured_steps=4, seconds_per_cell=5.0, timeout_s=120.0)


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        yield client


def record(client, folder, **options):
    cell = GridCell(model="mlp", precision="fp32", per_gpu_batch_size=4, **options)
    receipt = profile_cell(
        cell, attempt=1, environment=ENVIRONMENT, limits=LIMITS, client=client, scratch=folder / "scratch"
    )
    dataset = TimingsDataset(str(folder / "data"))
    return dataset, record_cell(dataset, receipt)


def test_a_cell_with_options_is_measured_with_them(client, tmp_path):
    options = {"checkpointing": "full", "fused_optimizer": True, "compression": "bf16"}
    dataset, outcome = record(client, tmp_path, world_size=2, **options)
    assert (outcome.status, outcome.message) == ("recorded", "")
    (measured,) = dataset.measurements(strict=True)
    assert {name: getattr(measured, name) for name in options} == options
    rows = [row for row in dataset.read().to_pylist() if not row["is_warmup"]]
    # Two bytes a gradient instead of four.
    assert {row["bucket_bytes"] for row in rows} == {2 * 3_159_050}
    assert measured.isolated_communication_s > 0
    assert measured.skew_s >= 0
    assert (measured.skipped_steps, measured.energy_j) == (0, None)
    assert {row["energy_reason"] for row in rows} == {"a CPU rank has no energy counter of its own"}


def test_an_option_without_effect_is_recorded_as_refused(client, tmp_path):
    dataset, outcome = record(client, tmp_path, world_size=1, channels_last=True)
    assert (outcome.status, outcome.cause) == ("refused", "option-unsupported")
    assert "channels_last has no effect" in outcome.message
    assert dataset.recorded_cells() == set()
    assert dataset.outcomes() == [outcome]
