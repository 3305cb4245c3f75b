"""Run options of a cell from the worker to the dataset, with real ranks and tiny limits."""

import os
from dataclasses import replace

import pytest
from distributed import Client, LocalCluster

from precision_time.storage.schema import GridCell
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.gangs.record_cell import record_cell
from precision_time.tasks.ranks.job import MeasurementLimits
from precision_time.tests.tasks.builders import profile_alone

pytestmark = pytest.mark.usefixtures("a_busy_machine_is_no_fault")

LIMITS = MeasurementLimits(warmup_steps=2, measured_steps=4, seconds_per_cell=5.0, timeout_s=120.0)
#: Compiling takes 10 to 20 s on an idle machine.
COMPILING = replace(LIMITS, timeout_s=240.0)

#: The weights of the mlp.
PARAMETERS = 3_159_050

#: A network that fails unless its tensors are channels-last; the fake tensors that count its card have no order.
CONVOLUTIONS = """
import torch
from precision_time.tasks.workloads import OPTIMIZERS, Workload

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, images):
        hidden = self.second(torch.relu(self.first(images)))
        if type(images) is torch.Tensor:
            for name, values in (("images", images), ("weights", self.first.weight), ("activations", hidden)):
                if not values.is_contiguous(memory_format=torch.channels_last):
                    raise ValueError(f"the {name} are not channels-last")
        return self.head(hidden.mean((2, 3)))

def build():
    return Workload(
        name="convolutions",
        family="resnet",
        task_input="16",
        module=Network(),
        make_batch=lambda samples, device: torch.randn(samples, 3, 16, 16, device=device),
        compute_loss=lambda module, batch: module(batch).square().mean(),
        make_optimizer=OPTIMIZERS["sgd_momentum"],
        optimizer_name="sgd_momentum",
    )
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    # Workers and their ranks must find the workload.
    folder = tmp_path_factory.mktemp("workloads")
    (folder / "convolutions.py").write_text(CONVOLUTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
        with (
            LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
            Client(cluster) as client,
        ):
            yield client


def record(client, folder, *, model="mlp", limits=LIMITS, **options):
    cell = GridCell(model=model, precision="fp32", per_gpu_batch_size=4, **options)
    receipt = profile_alone(cell, client=client, scratch=folder / "scratch", limits=limits)
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
    assert {row["bucket_bytes"] for row in rows} == {2 * PARAMETERS}
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


def test_two_ranks_that_accumulate_gradients_send_them_once_an_iteration(client, tmp_path):
    dataset, outcome = record(client, tmp_path, world_size=2, gradient_accumulation_steps=3)
    assert (outcome.status, outcome.message) == ("recorded", "")
    (measured,) = dataset.measurements(strict=True)
    assert measured.gradient_accumulation_steps == 3
    rows = dataset.read().to_pylist()
    assert {row["rank"] for row in rows} == {0, 1}
    assert {row["bucket_bytes"] for row in rows} == {4 * PARAMETERS}
    assert measured.communication_time_s > 0


def test_channels_last_is_the_order_in_which_every_rank_computes(client, tmp_path):
    model = "convolutions:build"
    dataset, outcome = record(client, tmp_path / "last", model=model, world_size=2, channels_last=True)
    assert (outcome.status, outcome.message) == ("recorded", "")
    (measured,) = dataset.measurements(strict=True)
    assert measured.channels_last
    _, outcome = record(client, tmp_path / "first", model=model, world_size=1)
    assert (outcome.status, outcome.cause) == ("failed", "exception")
    assert "the images are not channels-last" in outcome.message


@pytest.mark.compiler
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_compiled_cell_runs_kernels_of_the_compiler(client, tmp_path, world_size):
    # An empty cache, so that the kernels in it afterwards were compiled in this cell.
    kernels = tmp_path / "inductor"
    client.run(lambda: os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(kernels)))
    dataset, outcome = record(client, tmp_path, world_size=world_size, compiled=True, limits=COMPILING)
    assert (outcome.status, outcome.message) == ("recorded", "")
    (measured,) = dataset.measurements(strict=True)
    assert measured.compiled
    assert list(kernels.rglob("*.so"))
