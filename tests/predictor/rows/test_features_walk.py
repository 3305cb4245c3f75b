"""The columns of a walk, each worked by hand for a small walk."""

import dataclasses
import math

import pytest

from precision_time.predictor.rows.features import CLOSED_FORM_FEATURES, WALK_FEATURES, describe_walk
from precision_time.predictor.setup.hardware import HardwareSpec, find_hardware
from precision_time.predictor.setup.precision import parse_precision
from precision_time.predictor.workloads.walk import READY_POINTS, RIDGES, OpCount, Walk

EVEN = tuple(point / READY_POINTS for point in range(1, READY_POINTS + 1))


def make_walk(counts: dict[tuple[str, str, str], OpCount], **changes: object) -> Walk:
    plain = {
        # of 100 bytes that a sample moves, by ridge
        "roof_forward": (160.0, 80.0, 40.0, 40.0, 40.0),
        "roof_backward": (320.0, 120.0, 60.0, 60.0, 60.0),
        "saved": 30.0,
        "saved_fixed": 2.0,
        "peak": 50.0,
        "peak_fixed": 5.0,
        "scores": 15.0,
        "narrow_flops_share": 0.25,
        "aligned_flops_share": 0.5,
        "serial_steps": 7.0,
        "gradient_bytes": 80.0,
        "gradient_tensors": 4.0,
        "ready": EVEN,
    }
    return Walk(counts=counts, **plain | changes)


FULL = make_walk(
    {
        ("forward", "dense", "wide"): OpCount(flops=600.0, bytes=20.0, bytes_fixed=40.0, fused=20.0, ops=3.0),
        ("forward", "attention", "wide"): OpCount(flops=200.0, bytes=10.0, fused=10.0, ops=1.0),
        ("forward", "softmax", "wide"): OpCount(bytes=10.0, ops=2.0),
        ("backward", "dense", "wide"): OpCount(flops=1200.0, bytes=40.0, bytes_fixed=60.0, fused=40.0, ops=6.0),
        ("backward", "copy", "wide"): OpCount(bytes=20.0, ops=4.0),
    }
)
#: The same under autocast: half of the products' bytes, and casts.
HALF = make_walk(
    {
        ("forward", "dense", "narrow"): OpCount(flops=600.0, bytes=10.0, bytes_fixed=20.0, fused=10.0, ops=3.0),
        ("forward", "attention", "narrow"): OpCount(flops=200.0, bytes=5.0, fused=5.0, ops=1.0),
        ("forward", "softmax", "wide"): OpCount(bytes=10.0, ops=2.0),
        ("forward", "cast", "narrow"): OpCount(bytes=15.0, bytes_fixed=30.0, ops=5.0),
        ("backward", "dense", "narrow"): OpCount(flops=1200.0, bytes=20.0, bytes_fixed=30.0, fused=20.0, ops=6.0),
        ("backward", "copy", "wide"): OpCount(bytes=20.0, ops=4.0),
    },
    roof_forward=(160.0, 80.0, 40.0, 40.0, 40.0),
    roof_backward=(320.0, 100.0, 40.0, 40.0, 40.0),
    scores=0.0,
    ready=(0.5,) * 15 + (1.0,),
)
WALKS = {"fp32": FULL, "amp": HALF}


def make_device() -> HardwareSpec:
    # 0.7 of the peak over the bandwidth: ridges of 16 in fp32 and 64 in 16 bits
    return dataclasses.replace(
        find_hardware("a100"),
        peak_flops_per_s={"fp32": 16e9 / 0.7, "bf16": 64e9 / 0.7},
        memory_bytes_per_s=1e9,
        launch_overhead_s=1e-8,
    )


def describe(precision: str = "fp32", *, samples: float = 2.0, device: HardwareSpec | None = None) -> dict[str, float]:
    return describe_walk(WALKS, device or make_device(), parse_precision(precision), samples=samples)


def test_every_column_of_a_small_walk_is_as_worked_by_hand() -> None:
    columns = describe()
    # 2 samples x (80 + 120) bytes at the ridge of 16 and 100 of weights, at 1e9 a second
    operations_s = (2 * 200 + 100) / 1e9
    # 2 x 2000 FLOPs at 16e9 a second against 2 x 100 + 100 bytes
    whole_s = max(4000 / 16e9, 300 / 1e9)
    expected = {
        "log_operation_roofline_s": math.log(operations_s),
        "log_operations_over_whole": math.log(operations_s / whole_s),
        "product_share_of_roofline": 2.5e-7 / 5e-7,
        "log_launch_over_roofline": math.log(16 * 1e-8 / operations_s),
        "log_walked_flops": math.log(4000),
        "log_flops_per_operation": math.log(4000 / 16),
        "log_walked_bytes": math.log(200),
        "log_walked_intensity": math.log(4000 / 200),
        "weight_traffic_share": 100 / 300,
        "bytes_over_fp32": 1.0,
        "log_walked_operations": math.log(16),
        "fused_share": 70 / 100,
        "flops_dense": 600 / 800,
        "flops_convolution": 0.0,
        "flops_grouped": 0.0,
        "flops_depthwise": 0.0,
        "flops_attention": 200 / 800,
        "flops_recurrent": 0.0,
        "bytes_depthwise": 0.0,
        "bytes_grouped": 0.0,
        "bytes_attention": 10 / 100,
        "bytes_recurrent": 0.0,
        "bytes_normalization": 0.0,
        "bytes_softmax": 10 / 100,
        "bytes_elementwise": 0.0,
        "bytes_reduction": 0.0,
        "bytes_pooling": 0.0,
        "bytes_gather": 0.0,
        "bytes_cast": 0.0,
        "bytes_copy": 20 / 100,
        "log_saved_bytes": math.log(30),
        "saved_share": 0.3,
        "log_scores": math.log(16),
        "narrow_share": 0.25,
        "aligned_share": 0.5,
        "log_serial_steps": math.log(8),
        "roof_4": math.log(480 / 100),
        "roof_16": math.log(200 / 100),
        "roof_64": 0.0,
        "roof_256": 0.0,
        "roof_1024": 0.0,
        "backward_flops_ratio": 1200 / 800,
        "backward_bytes_share": 60 / 100,
        "ready_at_half": 0.5,
        "log_gradient_bytes": math.log(80),
        "log_gradient_tensors": math.log(4),
    }
    assert columns == pytest.approx(expected)
    assert tuple(columns) == WALK_FEATURES


def test_columns_of_the_network_are_equal_for_all_batches_and_the_others_are_not() -> None:
    few, many = describe(samples=2.0), describe(samples=32.0)
    changed = {name for name in WALK_FEATURES if few[name] != many[name]}
    assert changed == {
        *(name for name in CLOSED_FORM_FEATURES if name in WALK_FEATURES), "log_walked_flops",
        "log_flops_per_operation", "log_walked_bytes", "weight_traffic_share",
    }  # fmt: skip
    assert many["log_walked_flops"] - few["log_walked_flops"] == pytest.approx(math.log(16))
    assert many["weight_traffic_share"] == pytest.approx(100 / 3300)
    assert many["log_operation_roofline_s"] == pytest.approx(math.log((32 * 200 + 100) / 1e9))
    # a larger batch hides launches
    assert many["log_launch_over_roofline"] < few["log_launch_over_roofline"]


def test_autocast_is_described_by_its_own_walk() -> None:
    columns = describe("amp_bf16")
    # (40 + 40) bytes at the ridge of 64, and 80 that no sample adds to
    assert columns["log_operation_roofline_s"] == pytest.approx(math.log((2 * 80 + 80) / 1e9))
    assert columns["bytes_over_fp32"] == pytest.approx(80 / 100)
    assert columns["bytes_cast"] == pytest.approx(15 / 80)
    assert columns["log_walked_operations"] == pytest.approx(math.log(21))
    assert (columns["log_scores"], columns["ready_at_half"]) == (0.0, 0.5)


def test_a_pure_16_bit_format_does_the_operations_of_fp32_on_half_of_the_bytes() -> None:
    full, columns = describe(), describe("bf16")
    # half of the bytes: an operation waits for memory up to 32 FLOPs per byte of the walk's own
    waited = math.sqrt(80 * 40) + math.sqrt(120 * 60)
    assert columns["log_operation_roofline_s"] == pytest.approx(math.log((2 * waited + 100) / 2 / 1e9))
    assert columns["bytes_over_fp32"] == 0.5
    assert columns["log_walked_bytes"] == pytest.approx(full["log_walked_bytes"] - math.log(2))
    assert columns["weight_traffic_share"] == full["weight_traffic_share"]
    assert columns["bytes_softmax"] == full["bytes_softmax"]


def test_the_roofline_summed_over_operations_is_never_below_that_of_the_whole() -> None:
    for precision in ("fp32", "amp_bf16", "bf16"):
        for samples in (1.0, 64.0, 1e6):
            columns = describe(precision, samples=samples)
            assert columns["log_operations_over_whole"] >= 0
            assert 0 < columns["product_share_of_roofline"] <= 1


def test_a_device_without_the_format_computes_in_fp32() -> None:
    device = dataclasses.replace(make_device(), peak_flops_per_s={"fp32": 16e9 / 0.7})
    columns = describe("bf16", device=device)
    # the ridge of 16 on half of the bytes stands at 8 FLOPs per byte of the walk's own
    waited = math.sqrt(160 * 80) + math.sqrt(320 * 120)
    assert columns["log_operation_roofline_s"] == pytest.approx(math.log((2 * waited + 100) / 2 / 1e9))


def test_a_network_that_was_never_walked_has_no_values() -> None:
    columns = describe_walk(None, make_device(), parse_precision("fp32"), samples=2.0)
    assert tuple(columns) == WALK_FEATURES
    assert all(math.isnan(value) for value in columns.values())


def test_there_is_a_column_for_every_ridge() -> None:
    assert {f"roof_{ridge:.0f}" for ridge in RIDGES} <= set(WALK_FEATURES)
    assert len(set(WALK_FEATURES)) == len(WALK_FEATURES)
