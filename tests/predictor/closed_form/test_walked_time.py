"""Seconds of a pass from a walk, against hand-made sums over a walk of round numbers."""

import dataclasses
import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_time.predictor.closed_form import walked_time
from precision_time.predictor.closed_form.walked_time import (
    FUSIBLE,
    SLOWDOWNS,
    TRAFFIC,
    UNITS,
    NominalWork,
    choose_walk,
    describe_nominal,
    time_pass,
)
from precision_time.predictor.setup.hardware import HardwareSpec, find_hardware, known_hardware, supported_precisions
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.precision import PRECISIONS, parse_precision
from precision_time.predictor.workloads.walk import PRODUCTS, READY_POINTS, RIDGES, OpCount, Walk
from precision_time.predictor.workloads.workload import find_workload
from precision_time.storage.errors import IntegrityError

ONES = dict.fromkeys(SLOWDOWNS, 1.0)


def make_walk(scale: float = 1.0) -> Walk:
    counts = {
        ("forward", "dense", "wide"): OpCount(flops=6e9 * scale, bytes=3e6, bytes_fixed=8e6, ops=2.0),
        ("forward", "attention", "wide"): OpCount(flops=4e9 * scale, bytes=1e6, ops=1.0),
        ("forward", "normalization", "wide"): OpCount(bytes=2e6, bytes_fixed=1e6, ops=3.0),
        ("forward", "elementwise", "wide"): OpCount(bytes=5e6, ops=4.0),
        ("forward", "pooling", "wide"): OpCount(bytes=1e6, ops=1.0),
        ("forward", "gather", "wide"): OpCount(bytes=7e6, ops=1.0),
        ("forward", "cast", "narrow"): OpCount(bytes=9e6, ops=1.0),
        ("backward", "dense", "wide"): OpCount(flops=12e9 * scale, bytes=6e6, bytes_fixed=16e6, ops=4.0),
    }
    return Walk(
        counts=counts,
        roof_forward=(1e6,) * len(RIDGES),
        roof_backward=(1e6,) * len(RIDGES),
        saved=0.0, saved_fixed=0.0, peak=0.0, peak_fixed=0.0, scores=5e5, narrow_flops_share=0.0,
        aligned_flops_share=0.0, serial_steps=0.0, gradient_bytes=4e6, gradient_tensors=2.0,
        ready=tuple(point / READY_POINTS for point in range(1, READY_POINTS + 1)),
    )  # fmt: skip


WALKS = {"fp32": make_walk(), "amp": make_walk(2.0)}


def make_device(**changes: object) -> HardwareSpec:
    peaks = {"fp32": 1e12, "tf32": 2e12, "fp16": 4e12, "bf16": 4e12, "fp8": 8e12}
    plain = {"peak_flops_per_s": peaks, "memory_bytes_per_s": 1e9, "launch_overhead_s": 1e-5}
    return dataclasses.replace(find_hardware("h100"), **plain | changes)


def nominal(precision: str = "fp32", *, phase: str = "forward", samples: float = 3.0, **options: object) -> NominalWork:
    options.setdefault("device", make_device())
    device = options.pop("device")
    return describe_nominal(WALKS, device, parse_precision(precision), phase=phase, samples=samples, **options)


def of(values: tuple[float, ...], names: tuple[str, ...]) -> dict[str, float]:
    return {name: value for name, value in zip(names, values, strict=True) if value}


def test_nominal_work_is_flops_over_the_peak_bytes_over_the_bandwidth_and_operations_times_an_overhead() -> None:
    work = nominal()
    assert of(work.products, PRODUCTS) == pytest.approx({"dense": 3 * 6e-3, "attention": 3 * 4e-3})
    assert work.fp32_products == work.products
    assert of(work.traffic, tuple(TRAFFIC)) == pytest.approx(
        # of three samples: dense and attention, normalization with pooling, elementwise, casts, gathers
        {
            "product_traffic": 3 * 4e-3,
            "normalization_traffic": 3 * 3e-3,
            "elementwise_traffic": 3 * 5e-3,
            "cast_traffic": 3 * 9e-3,
            "gather_traffic": 3 * 7e-3,
        }
    )
    assert work.weights == pytest.approx(9e-3)
    assert work.launches == pytest.approx(13e-5)
    assert (work.scores, work.unit, work.attention_unit, work.fused) == (0.0, None, None, False)
    back = nominal(phase="backward", samples=1.0)
    assert of(back.products, PRODUCTS) == pytest.approx({"dense": 12e-3})
    assert (back.weights, back.launches) == pytest.approx((16e-3, 4e-5))


def test_shares_are_of_weights_of_operations_and_of_products_outside_attention() -> None:
    whole = nominal()
    part = nominal(weights_share=0.5, layers_share=0.25, products_share=0.5)
    assert (part.weights, part.launches) == pytest.approx((whole.weights / 2, whole.launches / 4))
    assert of(part.products, PRODUCTS) == pytest.approx({"dense": 3 * 3e-3, "attention": 3 * 4e-3})
    assert part.traffic == whole.traffic


@pytest.mark.parametrize(
    ("precision", "policy", "narrowed"),
    [
        ("fp32", "fp32", 1.0),
        ("tf32", "fp32", 1.0),
        ("amp_fp16", "amp", 1.0),
        ("amp_bf16", "amp", 1.0),
        # policies stored in 16 bits run the operations of fp32 on half of the bytes
        ("fp16", "fp32", 0.5),
        ("bf16", "fp32", 0.5),
        # 8-bit recipes keep all but the products in 16 bits
        ("fp8", "fp32", 0.5),
        ("nvfp4", "fp32", 0.5),
    ],
)
def test_a_policy_follows_its_walk_on_its_bytes(precision: str, policy: str, narrowed: float) -> None:
    assert choose_walk(WALKS, PRECISIONS[precision]) == (WALKS[policy], narrowed)


def test_every_policy_has_a_walk() -> None:
    for precision in PRECISIONS.values():
        assert choose_walk(WALKS, precision)[0] in WALKS.values()


def test_a_pure_format_halves_traffic_and_weights_and_autocast_follows_its_own_walk() -> None:
    full, pure, mixed = nominal("fp32"), nominal("bf16"), nominal("amp_bf16")
    assert pure.traffic == pytest.approx([seconds / 2 for seconds in full.traffic])
    assert pure.weights == pytest.approx(full.weights / 2)
    assert pure.products == pytest.approx([seconds / 4 for seconds in full.products])
    assert pure.fp32_products == full.products
    # the walk under autocast was made with twice the FLOPs
    assert mixed.products == pytest.approx([2 * seconds for seconds in pure.products])
    assert mixed.traffic == full.traffic


def test_attention_keeps_the_format_and_the_unit_of_the_activations_under_fp8() -> None:
    eighth, half = nominal("fp8"), nominal("bf16")
    dense, attention = PRODUCTS.index("dense"), PRODUCTS.index("attention")
    assert eighth.products[dense] == pytest.approx(half.products[dense] / 2)
    assert eighth.products[attention] == half.products[attention]
    assert (eighth.unit, eighth.attention_unit) == ("eighth", "half")
    # so the slow-down of 8-bit units does not apply to attention
    slowed = time_pass(eighth, ONES | {"eighth": 1.5}).seconds
    assert slowed < 1.5 * time_pass(eighth, ONES).seconds
    assert time_pass(dataclasses.replace(eighth, products=half.products, unit="half"), ONES) == time_pass(half, ONES)


def test_scores_are_written_where_attention_is_known_not_to_be_fused() -> None:
    for fused, written in ((None, 0.0), (True, 0.0), (False, 3 * 5e5 * 4 / 1e9)):
        assert nominal(implementation=Implementation(flash_attention=fused)).scores == pytest.approx(written)
    narrow = nominal("amp_bf16", implementation=Implementation(flash_attention=False))
    assert narrow.scores == pytest.approx(3 * 5e5 * 2 / 1e9)


def make_work(**changes: object) -> NominalWork:
    plain = {
        "products": (0.0,) * len(PRODUCTS),
        "fp32_products": (0.0,) * len(PRODUCTS),
        "traffic": (0.0,) * len(TRAFFIC),
        "weights": 0.0,
        "scores": 0.0,
        "launches": 0.0,
        "unit": None,
        "attention_unit": None,
        "fused": False,
    }
    return NominalWork(**plain | changes)


def test_the_device_works_through_products_traffic_weights_and_scores_one_after_the_other() -> None:
    rates = ONES | {"dense": 2.0, "cast_traffic": 3.0, "weight_traffic": 5.0, "score_traffic": 7.0}
    work = make_work(
        products=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        fp32_products=(1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        traffic=(0.0, 0.0, 0.0, 10.0, 0.0),
        weights=100.0,
        scores=1000.0,
    )
    assert time_pass(work, rates).seconds == pytest.approx(2 + 30 + 500 + 7000)


@pytest.mark.parametrize(
    ("weights", "launches", "seconds", "launch_bound"),
    [
        (3.0, 0.0, 3.0, False),
        (0.0, 3.0, 6.0, True),
        # (2^4 + 2^4)^(1/4) = 2 x 2^(1/4)
        (2.0, 1.0, 2 * 2**0.25, False),
        (1.0, 1.0, 17**0.25, True),
        (0.0, 0.0, 0.0, False),
        (1e300, 1e299, 1e300 * (1 + 0.2**4) ** 0.25, False),
    ],
)
def test_device_and_host_are_joined_by_the_norm_of_order_four(
    weights: float, launches: float, seconds: float, launch_bound: bool
) -> None:
    passed = time_pass(make_work(weights=weights, launches=launches), ONES | {"launch": 2.0})
    assert passed.seconds == pytest.approx(seconds)
    assert passed.launch_bound is launch_bound


def test_fusing_saves_traffic_between_products_alone() -> None:
    seconds = {}
    for group in TRAFFIC:
        traffic = tuple(float(name == group) for name in TRAFFIC)
        seconds[group] = time_pass(make_work(traffic=traffic, fused=True), ONES | {"fused": 0.25}).seconds
    assert seconds == {group: 0.25 if group in FUSIBLE else 1.0 for group in TRAFFIC}
    assert {"normalization_traffic", "elementwise_traffic", "cast_traffic"} == FUSIBLE
    assert nominal(implementation=Implementation(compiled=True)).fused
    assert nominal(implementation=Implementation(fused_kernels=True)).fused
    assert not nominal(implementation=Implementation(compiled=False)).fused


def test_a_narrower_unit_has_its_slow_down_but_never_takes_longer_than_fp32_would() -> None:
    work = nominal("bf16")
    wide = sum(work.fp32_products)
    bare = dataclasses.replace(work, traffic=(0.0,) * len(TRAFFIC), weights=0.0, launches=0.0)
    assert time_pass(bare, ONES | {"half": 2.0}).seconds == pytest.approx(wide / 2)
    assert time_pass(bare, ONES | {"half": 50.0}).seconds == pytest.approx(wide)


def test_a_device_without_a_faster_unit_computes_as_it_does_in_fp32() -> None:
    # a slow-down below one means that tensor cores come nearer to their peak; a P100 has no tensor cores
    flat = make_device(peak_flops_per_s=dict.fromkeys(("fp32", "fp16"), 1e12))
    work = nominal("fp16", device=flat)
    assert (work.unit, work.attention_unit) == (None, None)
    assert work.products == work.fp32_products
    missing = nominal("fp16", device=make_device(peak_flops_per_s={"fp32": 1e12}))
    assert missing == work
    assert nominal("fp16").unit == "half"
    assert nominal("tf32").unit == "tf32"


def test_the_shipped_rates_are_complete_and_of_the_order_of_one() -> None:
    rates = walked_time._slowdowns()
    assert rates.keys() == set(SLOWDOWNS) == {*PRODUCTS, *TRAFFIC, "weight_traffic", "score_traffic", "launch",
                                              *UNITS.values(), "fused"}  # fmt: skip
    assert all(0.1 < value < 20 for value in rates.values())
    assert rates["fused"] < 1
    # no matrix product is done faster than its peak allows
    assert all(rates[family] * min(1.0, rates["half"]) > 0.9 for family in PRODUCTS)
    assert time_pass(nominal()) == time_pass(nominal(), rates)


@pytest.fixture
def rates_file(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[object]:
    monkeypatch.setattr(walked_time, "shipped_text", lambda name: (tmp_path / name).read_text(encoding="utf-8"))
    walked_time._slowdowns.cache_clear()
    yield tmp_path / "rates.toml"
    walked_time._slowdowns.cache_clear()


@pytest.mark.parametrize(
    "change",
    [
        lambda rates: rates.pop("dense"),
        lambda rates: rates.update(colour=1.0),
        lambda rates: rates.update(half=0.0),
        lambda rates: rates.update(half=-1.0),
        lambda rates: rates.update(half=math.nan),
        lambda rates: rates.update(half=math.inf),
    ],
)
def test_a_damaged_file_of_rates_is_refused(rates_file, change) -> None:
    rates = dict(ONES)
    rates_file.write_text("[slowdowns]\n" + "".join(f"{name} = {value}\n" for name, value in rates.items()))
    assert time_pass(nominal()).seconds > 0
    walked_time._slowdowns.cache_clear()
    change(rates)
    rates_file.write_text("[slowdowns]\n" + "".join(f"{name} = {value}\n" for name, value in rates.items()))
    with pytest.raises(IntegrityError, match="rates"):
        time_pass(nominal())


@pytest.mark.parametrize("text", ["[slowdowns", "", "[slowdowns]\ndense = 'much'\n", "slowdowns = 3\n"])
def test_a_file_that_holds_no_rates_is_refused(rates_file, text: str) -> None:
    rates_file.write_text(text)
    with pytest.raises(IntegrityError, match="rates"):
        time_pass(nominal())


@given(
    samples=st.floats(0.01, 1e4),
    factor=st.floats(1.0, 10.0),
    precision=st.sampled_from(sorted(PRECISIONS)),
    phase=st.sampled_from(["forward", "backward"]),
)
def test_more_samples_never_take_less_time(samples: float, factor: float, precision: str, phase: str) -> None:
    few, many = (nominal(precision, phase=phase, samples=count) for count in (samples, samples * factor))
    assert time_pass(few).seconds <= time_pass(many).seconds * (1 + 1e-12)


@pytest.mark.parametrize("model", ["resnet50", "mobilenet_v2", "bert_base", "gpt2", "gnmt", "unet3d"])
def test_a_narrower_format_is_not_slower_on_any_device_but_for_what_the_host_must_launch(model: str) -> None:
    walks = find_workload(model).walks
    assert walks is not None
    for device in (spec for spec in known_hardware().values() if spec.kind == "gpu"):
        supported = supported_precisions(device)
        for phase in ("forward", "backward"):
            seconds = {}
            for name in supported:
                work = describe_nominal(walks, device, parse_precision(name), phase=phase, samples=4096.0)
                seconds[name] = time_pass(dataclasses.replace(work, launches=0.0)).seconds
            for wide, narrow in (
                ("fp32", "tf32"), ("fp32", "amp_fp16"), ("tf32", "amp_bf16"), ("amp_fp16", "fp16"),
                ("amp_bf16", "bf16"), ("bf16", "fp8"), ("fp8", "nvfp4"),
            ):  # fmt: skip
                if wide in supported and narrow in supported:
                    assert seconds[narrow] <= seconds[wide] * (1 + 1e-12), (device.name, phase, wide, narrow)


def test_one_sample_of_a_large_network_waits_for_its_weights() -> None:
    walks, device = find_workload("llama2_7b", task_input="16").walks, find_hardware("h100")
    assert walks is not None
    work = describe_nominal(walks, device, parse_precision("bf16"), phase="forward", samples=1.0)
    assert work.weights > sum(work.products) + sum(work.traffic)
    assert time_pass(work).seconds > work.weights
