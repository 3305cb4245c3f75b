"""Rows become observations: the facts that describe their network, the network of a node, and reasons of refusal."""

import csv
import dataclasses
import math
import operator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from precision_time.predictor.rows import observations
from precision_time.predictor.rows.observations import (
    Observation,
    describe_row,
    observe,
    observe_table,
    read_network,
    weigh_rows,
)
from precision_time.predictor.rows.public_table import load_public_table
from precision_time.predictor.setup.hardware import find_hardware
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import parse_parallelism
from precision_time.predictor.setup.precision import parse_precision
from precision_time.predictor.workloads.cards import Card, find_card
from precision_time.predictor.workloads.workload import WorkloadFeatures, describe_entry, find_workload
from precision_time.predictor.workloads.zoo import ZooEntry, find_entry
from precision_time.storage.run_options import OPTION_NAMES, RUN_OPTIONS, RunOption

ROW = {"model": "resnet50", "gpu": "A100-SXM4-80GB", "num_gpus": "8", "precision": "amp_fp16",
       "batch_size_per_gpu": "32", "task_input": "224", "seconds_per_micro_step": "0.1", "parallelism": "ddp",
       "source_repo": "me/mine", "framework": "PyTorch"}  # fmt: skip


def read_rows(tmp_path: Path, *rows: dict[str, str]) -> pd.DataFrame:
    path = tmp_path / "table.csv"
    filled = [ROW | row for row in rows]
    names = list(dict.fromkeys(name for row in filled for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(filled)
    return load_public_table(str(path)).kept


def observe_row(tmp_path: Path, **changes: str) -> Observation:
    (observation,), refused = observe_table(read_rows(tmp_path, changes))
    assert refused == {}
    return observation


def card_of(model: str, task_input: str = "") -> Card:
    card = find_card(model, task_input)
    assert card is not None
    return card


def entry_of(model: str, task_input: str = "") -> ZooEntry:
    entry = find_entry(model, task_input)
    assert entry is not None
    return entry


def described(model: str, task_input: str, params: float | None, flops: float | None) -> WorkloadFeatures:
    workload = describe_row(model, task_input, params, flops)
    assert workload is not None
    return workload


@pytest.mark.parametrize(
    ("text", "gbit_per_s"),
    [
        ("intra: NVLINK Gen4 900 GB/s + NVSWITCH Gen3; inter: 8x ConnectX-7 IB NDR 400Gb/s", 3200),
        ("intra: NVLINK 3.0, NVSWITCH 2.0 600GB/s; inter: 8x ConnectX-6 IB HDR 200Gb/Sec", 1600),
        ("inter: 4 x Mellanox Technologies MT28908 Family [ConnectX-6] HDR 200 Gb/Sec", 800),
        ("inter: 1x Ethernet 40Gb/Sec, 8x ConnectX-6 IB HDR 200Gb/Sec", 1600),
        ("inter: 8x ConnectX-7 IB NDR 400Gb/s + 200Gb/s Ethernet NIC", 3200),
        ("intra: PCIe Gen4; inter: BF3 200Gbps for NS and 2xBF3 400Gbps for EW", 800),
        ("inter: 1x 100Gb/s for storage and 8x 400Gb/s for training", 3200),
        ("inter: InfiniBand 100 Gb/sec (4X EDR)", 100),
        ("NVLink + InfiniBand 100Gb EDR", 100),
        ("NVLink + RDMA 400Gb/GPU", 3200),
        ("RoCE 1600Gbps/node", 1600),
        ("25 Gbit/s", 25),
        # a network for management: the times of such rows are too short for it
        ("intra: NVLINK2.0; inter: 1Gb Ethernet", None),
        ("NVLink + InfiniBand", None),
        ("intra: NVLINK Gen5 1800 GB/s", None),
        ("inter: ROCE2; Data bandwidth for GPU-PCIe: 504 GB/s; PCIe-NIC: 500 GB/s", None),
        ("", None),
    ],
)
def test_the_network_of_a_node_is_the_fastest_one_in_its_row(text: str, gbit_per_s: float | None) -> None:
    assert read_network(text) == (None if gbit_per_s is None else gbit_per_s * 1e9 / 8)


def test_the_zoo_describes_a_row_with_nearly_its_parameters() -> None:
    entry = entry_of("resnet50", "224")
    by_name = described("resnet50", "224", None, None)
    assert by_name == describe_entry(entry, name="resnet50")
    assert (by_name.params, by_name.source) == (entry.params, "zoo")
    # within 10 % of the parameters the zoo replaces the figures of the row, whatever its FLOPs are
    for share, is_same in ((0.90, False), (0.92, True), (1.11, True), (1.12, False)):
        assert (described("resnet50", "224", share * entry.params, 1e9) == by_name) is is_same


def test_a_card_of_the_size_of_the_row_replaces_a_zoo_entry_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    card = card_of("resnet50", "224")
    assert card.params is not None
    larger = dataclasses.replace(entry_of("resnet50", "224"), params=2 * card.params)
    monkeypatch.setattr(observations, "find_entry", lambda name, task_input: larger)
    workload = described("resnet50", "224", float(card.params), None)
    assert (workload.params, workload.walks, workload.source) == (card.params, None, "card")
    # the zoo describes a row without parameters
    assert described("resnet50", "224", None, None).params == larger.params


def test_a_row_of_another_size_is_described_by_its_own_figures() -> None:
    card = card_of("resnet50", "224")
    assert card.params is not None
    other = described("resnet50", "224", 1.2 * card.params, 5e9)
    assert (other.params, other.forward_flops_per_sample) == (round(1.2 * card.params), 5e9)
    assert other.walks is None
    # and still counts as the same network
    assert other.network == described("resnet50", "224", None, None).network


def test_the_work_of_another_size_grows_with_its_parameters_where_the_row_has_no_flops() -> None:
    card = card_of("resnet50", "224")
    assert card.params is not None
    assert card.forward_flops_per_sample is not None
    other = described("resnet50", "224", 3 * card.params, None)
    assert other.params == 3 * card.params
    assert other.forward_flops_per_sample == pytest.approx(3 * card.forward_flops_per_sample)


def test_the_zoo_describes_hifigan_whatever_parameters_its_rows_have() -> None:
    entry = entry_of("hifigan", "8192")
    generator_alone = described("hifigan", "8192", 14e6, 3e9)
    assert generator_alone.params == entry.params > 5 * 14e6
    assert generator_alone.forward_flops_per_sample == entry.fp32.total("flops", phase="forward")


def test_a_card_without_flops_takes_those_of_the_row() -> None:
    card = card_of("amoebanet_d_18_256")
    assert card.forward_flops_per_sample is None
    workload = described("amoebanet_d_18_256", "", card.params, 7e9)
    assert (workload.params, workload.forward_flops_per_sample) == (card.params, 7e9)
    assert describe_row("amoebanet_d_18_256", "", card.params, None) is None


def test_a_network_without_a_card_is_described_by_its_row_or_unknown() -> None:
    workload = described("my_own_net", "224", 1e6, 2e9)
    assert (workload.params, workload.forward_flops_per_sample, workload.network) == (10**6, 2e9, "")
    assert describe_row("my_own_net", "224", 1e6, None) is None
    assert describe_row("my_own_net", "224", None, 2e9) is None


def test_a_row_becomes_its_measurement_and_its_setup(tmp_path: Path) -> None:
    observation = observe_row(tmp_path, row_id="r1", num_gpus="16", num_nodes="2", grad_accumulation_steps="4",
                       interconnect="inter: 8x ConnectX-7 IB NDR 400Gb/s")  # fmt: skip
    measured, setup = observation.measurement, observation.setup
    assert (measured.source, measured.cell_id, measured.gpu, measured.precision) == (
        "me/mine", "r1", "A100-SXM4-80GB", "amp_fp16"
    )  # fmt: skip
    assert measured.iteration_time_s == pytest.approx(4 * 0.1)
    assert (setup.world_size, setup.nodes, setup.batch_size, setup.gradient_accumulation_steps) == (16, 2, 32, 4)
    assert setup.layout.data == 16
    assert setup.implementation.framework == "pytorch"
    assert setup.hardware.network_bytes_per_s == 400e9
    assert observation.index == 0
    assert observation.query.closed.iteration_time_s > 0


def test_the_network_counts_between_nodes_only(tmp_path: Path) -> None:
    observation = observe_row(tmp_path, interconnect="inter: 8x ConnectX-7 IB NDR 400Gb/s")
    assert observation.setup.hardware == find_hardware("A100-SXM4-80GB")


def test_a_pipeline_with_one_batch_runs_it_sample_by_sample(tmp_path: Path) -> None:
    pipeline = {"model": "llama2_7b", "task_input": "4096", "parallelism": "pp4-tp2"}
    whole = observe_row(tmp_path, **pipeline)
    assert (whole.setup.batch_size, whole.setup.gradient_accumulation_steps) == (1, 32)
    assert whole.measurement.per_gpu_batch_size == 1
    assert whole.measurement.gradient_accumulation_steps == 32
    assert whole.measurement.iteration_time_s == pytest.approx(0.1)
    divided = observe_row(tmp_path, **pipeline, grad_accumulation_steps="8")
    assert (divided.setup.batch_size, divided.setup.gradient_accumulation_steps) == (32, 8)
    flat = observe_row(tmp_path, **pipeline | {"parallelism": "tp8"})
    assert (flat.setup.batch_size, flat.setup.gradient_accumulation_steps) == (32, 1)


def test_rows_that_cannot_be_described_are_listed_by_position_and_the_others_observed(tmp_path: Path) -> None:
    frame = read_rows(tmp_path, {}, {"model": "my_own_net"}, {"model": "vgg16"})
    rows, refused = observe_table(frame)
    assert [(row.index, row.measurement.model) for row in rows] == [(0, "resnet50"), (2, "vgg16")]
    assert refused == {1: "model unknown"}


def test_an_error_of_one_row_refuses_only_that_row(tmp_path: Path) -> None:
    frame = read_rows(tmp_path, {}, {"num_gpus": "1"})
    frame["policy"] = ["amp_fp16", "fp64"]
    rows, refused = observe_table(frame)
    assert [row.index for row in rows] == [0]
    assert list(refused) == [1]
    assert "fp64" in refused[1]
    assert "\n" not in refused[1]


def test_an_empty_table_has_no_observations(tmp_path: Path) -> None:
    assert observe_table(read_rows(tmp_path, {}).iloc[:0]) == ([], {})


def test_names_of_one_network_share_it_and_sister_parts_their_chip(tmp_path: Path) -> None:
    frame = read_rows(
        tmp_path,
        {"model": "vit_b16", "gpu": "A100-SXM4-80GB"},
        {"model": "vit_base_patch16_224", "gpu": "A100-PCIe-40GB"},
        {"model": "resnet50", "gpu": "V100-SXM2-16GB"},
    )
    row, same, other = observe_table(frame)[0]
    assert row.network == same.network != other.network
    assert row.chip == same.chip != other.chip


def test_a_submission_to_a_contest_is_marked(tmp_path: Path) -> None:
    assert observe_row(tmp_path, source_repo="mlcommons/training_results_v4.0").is_contest
    assert not observe_row(tmp_path).is_contest


def test_on_one_rank_the_iteration_is_compute(tmp_path: Path) -> None:
    alone, eight = observe_row(tmp_path, num_gpus="1"), observe_row(tmp_path)
    assert alone.compute_time_s == alone.measurement.iteration_time_s
    assert eight.compute_time_s is None


def test_cards_and_devices_of_a_campaign_replace_shipped_ones(measure) -> None:
    measured = measure(models=("mlp",))[:1]
    card = dataclasses.replace(find_workload("mlp"), params=1)
    device = dataclasses.replace(find_hardware("A100-SXM4-80GB"), memory_bytes=1)
    (observation,) = observe(measured, workloads=[card], hardware=[device])
    assert observation.setup.workload is card
    assert observation.setup.hardware is device
    assert observation.index == -1


def test_a_fraction_of_a_sample_counts_as_one(tmp_path: Path) -> None:
    frame = read_rows(tmp_path, {})
    frame["per_gpu_batch_size"] = 0.4
    (observation,), _ = observe_table(frame)
    assert observation.setup.batch_size == 1


def test_a_blank_strategy_is_plain_data_parallelism(tmp_path: Path) -> None:
    values: list[Any] = ["", math.nan]
    for value in values:
        frame = read_rows(tmp_path, {})
        frame["parallelism"] = value
        (observation,), _ = observe_table(frame)
        assert observation.measurement.strategy == "ddp"


def test_the_rows_of_one_network_in_one_source_share_their_weight(tmp_path: Path) -> None:
    often = [{"batch_size_per_gpu": str(number)} for number in range(1, 17)]
    once = [{"model": "vgg16"}, {"source_repo": "another/one"}]
    weights = weigh_rows(observe_table(read_rows(tmp_path, *often, *once))[0])
    assert weights.mean() == pytest.approx(1.0)
    # 16 rows of one network weigh as 4 single ones; another network, or the same in another source, is on its own
    assert weights[:16] == pytest.approx(weights[16] / 4)
    assert weights[16] == weights[17]


def test_a_row_without_an_input_has_the_usual_one() -> None:
    assert describe_row("resnet50", "", None, None) == describe_row("resnet50", "224", None, None)


@pytest.mark.parametrize("option", RUN_OPTIONS, ids=OPTION_NAMES)
def test_every_run_option_is_a_fact_of_the_setup_and_its_default_says_nothing(measure, option: RunOption) -> None:
    plain = measure(models=("mlp",))[0]
    changed = dataclasses.replace(plain, **{option.name: option.choices[-1]}, world_size=2)
    (default,), (observation,) = observe([plain]), observe([changed])
    assert default.setup.implementation == Implementation()
    assert default.setup.precision == parse_precision(plain.precision)
    assert operator.attrgetter(option.setup_field)(observation.setup) == option.choices[-1]


def test_compressed_gradients_take_less_time_on_the_wire_and_the_policy_keeps_its_name(measure) -> None:
    plain = dataclasses.replace(measure(models=("mlp",))[0], precision="fp32", world_size=8)
    (full,), (compressed,) = observe([plain]), observe([dataclasses.replace(plain, compression="bf16")])
    assert compressed.setup.precision.name == full.setup.precision.name == "fp32"
    assert compressed.setup.precision.communicate == "bf16"
    assert compressed.closed.communication_time_s < full.closed.communication_time_s


@pytest.mark.parametrize(("strategy", "sharding"), [("ddp", "none"), ("fsdp", "parameters"), ("zero1", "optimizer")])
def test_a_measured_row_is_solved_with_its_own_strategy(measure, strategy: str, sharding: str) -> None:
    (*_, measured) = measure(models=("bert_base",), gpu="A100-SXM4-80GB", world_sizes=(4,))
    (observation,) = observe([dataclasses.replace(measured, strategy=strategy)])
    assert observation.setup.layout == parse_parallelism(strategy, world_size=4)
    assert observation.setup.layout.sharding == sharding
    plain = observe([measured])[0]
    assert (observation.closed.communication_time_s != plain.closed.communication_time_s) == (strategy != "ddp")
