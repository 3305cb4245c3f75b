"""All-reduce times: near public measurements, monotone in bytes and links, and right about slow networks."""

import dataclasses

import pytest

from precision_time.predictor.hardware import LINKS, find_hardware, parse_bandwidth
from precision_time.predictor.network import LINK_CLASSES, all_reduce_time_s
from precision_time.predictor.overlap import estimate_overlap
from precision_time.predictor.precision import parse_precision
from precision_time.predictor.workload import find_workload
from precision_time.storage.errors import InputError

MIB = 2**20

# Seconds of NCCL all-reduces inside one server, VIA-Research/vTrain f8dda8473a48b373b1d25f51f52d685bff5150c5,
# trace/<gpu>/AR_GPU<n>_1M_1024M_LUT: the published sizes nearest to 25 and 256 MiB.
MEASURED = [
    ("v100", 2, 24, 0.0011365),
    ("v100", 4, 24, 0.0004722),
    ("v100", 8, 24, 0.0003656),
    ("v100", 2, 264, 0.0122850),
    ("v100", 4, 264, 0.0048958),
    ("v100", 8, 264, 0.0036358),
    ("a100", 2, 24, 0.0001765),
    ("a100", 4, 24, 0.0002202),
    ("a100", 8, 24, 0.0002653),
    ("a100", 2, 264, 0.0015007),
    ("a100", 4, 264, 0.0019664),
    ("a100", 8, 264, 0.0021902),
]


@pytest.mark.parametrize(("gpu", "ranks", "mib", "seconds"), MEASURED)
def test_one_node_is_within_a_fifth_of_the_measured_time(gpu, ranks, mib, seconds):
    predicted = all_reduce_time_s(mib * MIB, ranks=ranks, nodes=1, hardware=find_hardware(gpu))
    assert predicted == pytest.approx(seconds, rel=0.2)


@pytest.mark.parametrize(
    ("gpu", "nodes", "ranks", "network", "bus_bytes_per_s"),
    [
        # Bus bandwidth of large messages in public nccl-tests logs.
        ("v100", 2, 16, "400 Gbit/s", 54.1e9),  # NVIDIA DeepOps slurm-perf guide
        ("v100", 2, 16, "100 Gbit/s", 16.2e9),  # Azure ML NCCL baselines
        ("a100", 3, 24, "800 Gbit/s", 87.8e9),  # NVIDIA/nccl-tests issue 119
        ("h100", 4, 32, "3200 Gbit/s", 358.1e9),  # NVIDIA/nccl-tests issue 309
        ("gh200", 2, 8, "800 Gbit/s", 122.6e9),  # eth-cscs/cscs-docs 80abed1
    ],
)
def test_several_nodes_are_within_a_quarter_of_the_measured_bandwidth(gpu, nodes, ranks, network, bus_bytes_per_s):
    hardware = dataclasses.replace(find_hardware(gpu), network_bytes_per_s=parse_bandwidth(network))
    size = 2**30
    predicted = all_reduce_time_s(size, ranks=ranks, nodes=nodes, hardware=hardware)
    assert 2 * (ranks - 1) / ranks * size / predicted == pytest.approx(bus_bytes_per_s, rel=0.25)


def test_every_kind_of_link_has_constants_and_no_share_above_one():
    assert set(LINK_CLASSES) == set(LINKS)
    assert all(0 < share <= 1 for link in LINK_CLASSES.values() for share in link.efficiency.values())


@pytest.mark.parametrize("gpu", ["v100", "a100", "h100", "t4", "rtx-4090", "cpu"])
@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (8, 1), (16, 2), (4, 4), (64, 8)])
def test_more_bytes_or_a_slower_link_never_take_less_time(gpu, ranks, nodes):
    hardware = find_hardware(gpu)
    times = [all_reduce_time_s(n * MIB, ranks=ranks, nodes=nodes, hardware=hardware) for n in (0, 1, 25, 256, 4096)]
    assert times == sorted(times)
    assert times[0] > 0
    for field in ("link_bytes_per_s", "network_bytes_per_s"):
        slower = dataclasses.replace(hardware, **{field: getattr(hardware, field) / 4})
        assert all_reduce_time_s(25 * MIB, ranks=ranks, nodes=nodes, hardware=slower) >= times[2]


def test_latency_grows_with_the_ranks_and_with_the_nodes():
    hardware = find_hardware("a100")
    inside = [all_reduce_time_s(0, ranks=n, nodes=1, hardware=hardware) for n in (2, 4, 8)]
    across = [all_reduce_time_s(0, ranks=8 * n, nodes=n, hardware=hardware) for n in (1, 2, 8, 64)]
    assert inside == sorted(set(inside))
    assert across == sorted(set(across))


def test_one_rank_sends_nothing():
    assert all_reduce_time_s(MIB, ranks=1, nodes=1, hardware=find_hardware("a100")) == 0.0


def test_ranks_that_do_not_divide_and_impossible_sizes_are_refused():
    with pytest.raises(InputError, match="8 ranks / 3 nodes"):
        all_reduce_time_s(MIB, ranks=8, nodes=3, hardware=find_hardware("a100"))
    for size in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="message_bytes"):
            all_reduce_time_s(size, ranks=8, nodes=1, hardware=find_hardware("a100"))


def test_a_second_node_costs_time_on_25_gbit_and_saves_it_on_400_gbit():
    # NVIDIA/nccl issue 318: 340 M fp32 parameters, 0.2 s a step on one node of 8.
    model = dataclasses.replace(find_workload("bert_base"), params=340_000_000)
    compute_s = 0.2

    def step_s(nodes, network):
        hardware = dataclasses.replace(find_hardware("v100"), network_bytes_per_s=parse_bandwidth(network))
        overlap = estimate_overlap(
            model, hardware, parse_precision("fp32"), backward_s=compute_s * 2 / 3, ranks=8 * nodes, nodes=nodes
        )
        return compute_s + overlap.exposed_communication_s

    one_node_s = step_s(1, "25 Gbit/s")
    assert one_node_s == pytest.approx(0.2, rel=0.01)
    # Two nodes need half the steps for the same samples.
    assert step_s(2, "25 Gbit/s") / 2 > one_node_s
    assert step_s(2, "400 Gbit/s") / 2 < one_node_s
