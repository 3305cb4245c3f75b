"""Times of collectives: near public measurements, monotone in bytes, nodes and links, right about slow networks."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_time.predictor.closed_form.collectives import (
    COLLECTIVES,
    NETWORKS,
    all_reduce_time_s,
    collective_time_s,
    parse_links,
    shipped_links,
)
from precision_time.predictor.closed_form.timelines import estimate_overlap
from precision_time.predictor.setup.hardware import find_hardware, known_hardware, parse_bandwidth
from precision_time.predictor.setup.links import LINK_KINDS
from precision_time.predictor.setup.precision import parse_precision
from precision_time.predictor.workloads.workload import find_workload
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


def test_every_kind_of_link_and_network_has_constants_and_no_share_above_one():
    links = shipped_links()
    assert set(links.links) == set(LINK_KINDS)
    assert set(links.networks) == set(NETWORKS)
    assert set(links.collectives) == set(COLLECTIVES)
    assert all(0 < link.efficiency <= 1 for link in links.links.values())
    assert all(0 < share <= 1 for link in links.links.values() for _, share in link.shares)
    assert all(0 < network.efficiency <= 1 for network in links.networks.values())
    # A switch that sums sends each value once: its bus bandwidth may pass the link rate, by less than half.
    assert all(0 <= link.in_switch < 1.5 for link in links.links.values())


def test_constants_that_lack_a_table_or_hold_an_unknown_field_are_refused():
    with pytest.raises(InputError, match="link"):
        parse_links("[link.pcie3]\nlatency = 1.0\n")
    names = [("link", LINK_KINDS), ("network", NETWORKS), ("collective", COLLECTIVES)]
    text = "".join(f'[{table}."{name}"]\nspeed = 1.0\n' for table, group in names for name in group)
    with pytest.raises(InputError, match="speed"):
        parse_links(text)


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


@given(
    kind=st.sampled_from(COLLECTIVES),
    gpu=st.sampled_from(sorted(known_hardware())),
    network=st.sampled_from(NETWORKS),
    inside=st.integers(1, 9),
    nodes=st.integers(1, 70),
    sizes=st.tuples(st.floats(0, 1e11), st.floats(0, 1e11)),
)
def test_no_collective_is_faster_with_more_bytes_or_more_nodes(kind, gpu, network, inside, nodes, sizes):
    if inside * nodes == 1:
        return
    hardware = find_hardware(gpu)

    def time_s(size, count):
        return collective_time_s(
            kind, size, ranks=inside * count, nodes=count, hardware=hardware, network=network
        )  # fmt: skip

    small, large = sorted(sizes)
    assert 0 < time_s(small, nodes) <= time_s(large, nodes) * (1 + 1e-12)
    # A node more may start a second rack, and then the network between racks counts.
    if hardware.nvlink_domain is None:
        assert time_s(large, nodes) <= time_s(large, nodes + 1) * (1 + 1e-12)


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("gpu", ["a100", "h100", "b200", "gh200", "t4", "rtx-4090", "cpu"])
def test_more_ranks_in_a_node_never_take_less_time_where_a_switch_or_bus_joins_them(kind, gpu):
    hardware = find_hardware(gpu)
    for size in (0, 65536, 25 * MIB, 2**30):
        times = [collective_time_s(kind, size, ranks=n, nodes=1, hardware=hardware) for n in range(2, 17)]
        assert all(fewer <= more * (1 + 1e-12) for fewer, more in itertools.pairwise(times))


def test_the_mesh_of_dgx1_is_faster_with_four_gpus_than_with_three_or_five():
    three, four, five = (
        all_reduce_time_s(256 * MIB, ranks=n, nodes=1, hardware=find_hardware("v100")) for n in (3, 4, 5)
    )
    assert four < three
    assert four < five


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("gpu", ["v100", "a100", "h100", "l40s"])
def test_half_the_network_rate_doubles_the_transfer_time_of_large_messages_between_nodes(kind, gpu):
    hardware = dataclasses.replace(find_hardware(gpu), network_bytes_per_s=2e9)
    half = dataclasses.replace(hardware, network_bytes_per_s=1e9)
    full_s, half_s = (collective_time_s(kind, 2**32, ranks=16, nodes=2, hardware=spec) for spec in (hardware, half))
    assert half_s / full_s == pytest.approx(2, rel=0.01)


def test_time_has_no_jump_in_the_bytes():
    for kind, (ranks, nodes) in itertools.product(COLLECTIVES, [(2, 1), (8, 1), (16, 2), (64, 8)]):
        sizes = [1000 * 1.01**step for step in range(1700)]
        times = [
            collective_time_s(kind, size, ranks=ranks, nodes=nodes, hardware=find_hardware("h100")) for size in sizes
        ]
        # Time over size never rises and size rises by 1 % a step: a rise of more would be a jump.
        assert all(after <= before * 1.0100001 for before, after in itertools.pairwise(times))


def test_two_nodes_sum_faster_than_their_network_carries_a_ring():
    # 469 GB/s on two nodes of 8 x 400 Gbit/s and 366 on four (NVIDIA/nccl-tests issue 309).
    hardware = dataclasses.replace(find_hardware("h100"), network_bytes_per_s=400e9)
    size = 2**33
    two, four = (
        2 * (1 - 1 / ranks) * size / all_reduce_time_s(size, ranks=ranks, nodes=ranks // 8, hardware=hardware)
        for ranks in (16, 32)
    )
    assert two == pytest.approx(469e9, rel=0.15)
    assert four == pytest.approx(366e9, rel=0.15)
    gathered = 15 / 16 * size / collective_time_s("all_gather", size, ranks=16, nodes=2, hardware=hardware)
    assert gathered < 400e9 < two


def test_a_rack_that_shares_nvlink_counts_as_one_node():
    # 839 GB/s over 72 GPUs of 18 nodes (coreweave/nccl-tests cb86553).
    hardware = find_hardware("gb200")
    size = 16 * 2**30
    rack_s = all_reduce_time_s(size, ranks=72, nodes=18, hardware=hardware)
    assert 2 * 71 / 72 * size / rack_s == pytest.approx(839e9, rel=0.2)
    assert all_reduce_time_s(size, ranks=144, nodes=36, hardware=hardware) > rack_s


def test_a_device_reaches_its_node_network_no_faster_than_its_pcie():
    hardware = dataclasses.replace(find_hardware("a100"), network_bytes_per_s=200e9)
    seconds = collective_time_s("point_to_point", 2**30, ranks=2, nodes=2, hardware=hardware)
    assert 2**30 / seconds < 31.5e9
    faster = dataclasses.replace(hardware, network_bytes_per_s=400e9)
    assert collective_time_s("point_to_point", 2**30, ranks=2, nodes=2, hardware=faster) == seconds


def test_networks_without_rdma_take_longer_steps_than_infiniband():
    hardware = find_hardware("h100")
    times = {
        network: collective_time_s("all_reduce", 8, ranks=16, nodes=2, hardware=hardware, network=network)
        for network in NETWORKS
    }
    assert times["infiniband"] < times["efa"]
    assert times["infiniband"] < times["ethernet"]


def test_an_unknown_collective_or_network_is_refused():
    for kind, network in (("alltoallv", "common"), ("all_reduce", "carrier pigeon")):
        with pytest.raises(InputError, match=f"{kind} over {network}"):
            collective_time_s(kind, 8, ranks=8, nodes=1, hardware=find_hardware("a100"), network=network)


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
    # The gradients of the embeddings, a fifth of all, are the last to be ready, so their transfer is exposed.
    assert one_node_s == pytest.approx(0.2, rel=0.03)
    # Two nodes need half the steps for the same samples.
    assert step_s(2, "25 Gbit/s") / 2 > one_node_s
    assert step_s(2, "400 Gbit/s") / 2 < one_node_s
