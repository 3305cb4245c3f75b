"""Devices: every figure has a source, is dense and ordered, and what a device lacks is refused by name."""

import dataclasses
import json
import math

import pytest

from precision_time.predictor.hardware import (
    HardwareSpec,
    check_precision,
    find_hardware,
    hardware_sources,
    known_hardware,
    load_hardware,
    parse_bandwidth,
    supported_precisions,
)
from precision_time.predictor.precision import parse_precision
from precision_time.storage.errors import InputError, NotFoundError, PrecisionUnsupportedError, UnknownNameError

GPUS = {name: spec for name, spec in known_hardware().items() if spec.kind == "gpu"}


@pytest.mark.parametrize("name", known_hardware())
def test_every_number_has_a_source(name):
    spec, sources = known_hardware()[name], hardware_sources(name)
    numbers = {field for field, value in spec.to_dict().items() if isinstance(value, int | float)}
    numbers |= {f"peak_flops_per_s.{unit}" for unit in spec.peak_flops_per_s}
    assert set(sources) == numbers
    assert all(len(text) > 20 for text in sources.values())


@pytest.mark.parametrize("name", GPUS)
def test_formats_begin_with_their_architecture_and_narrower_ones_are_not_slower(name):
    spec = GPUS[name]
    peaks, capability = spec.peak_flops_per_s, spec.compute_capability
    assert ("tf32" in peaks) == (capability >= 8.0)
    assert ("bf16" in peaks) == (capability >= 8.0)
    assert ("fp8" in peaks) == (capability >= 8.9)
    assert ("nvfp4" in peaks) == (capability >= 10.0)
    rates = [peaks[unit] for unit in ("fp32", "tf32", "fp16", "fp8", "nvfp4") if unit in peaks]
    assert rates == sorted(rates)
    assert peaks.get("bf16", peaks["fp16"]) == peaks["fp16"]


@pytest.mark.parametrize(
    ("name", "unit", "sparse"),
    [
        ("a100", "tf32", 312e12),
        ("a100", "fp16", 624e12),
        ("a10", "fp16", 250e12),
        ("a30", "fp16", 330e12),
        ("a40", "fp16", 299.4e12),
        ("l4", "tf32", 120e12),
        ("l4", "bf16", 242e12),
        ("l4", "fp8", 485e12),
        ("l40s", "fp16", 724e12),
        ("h100", "tf32", 989e12),
        ("h100", "fp16", 1979e12),
        ("h100", "fp8", 3958e12),
        ("h100-pcie", "fp8", 3026e12),
        ("h100-nvl", "fp16", 1671e12),
        ("h200", "fp8", 3958e12),
        ("rtx-4090", "fp16", 330.3e12),
        ("rtx-5090", "nvfp4", 3352e12),
        ("b200", "nvfp4", 18000e12),
    ],
)
def test_the_sparse_figure_of_the_sheet_is_stored_halved(name, unit, sparse):
    assert find_hardware(name).peak_flops_per_s[unit] == pytest.approx(sparse / 2, rel=0.01)


def test_tensor_core_ratios_are_those_of_dense_products():
    for spec in GPUS.values():
        peaks = spec.peak_flops_per_s
        if "tf32" in peaks:
            assert peaks["fp16"] / peaks["tf32"] == pytest.approx(2.0, rel=0.03)
        if "fp8" in peaks:
            assert peaks["fp8"] / peaks["fp16"] == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("a100", "A100-SXM4-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("NVIDIA GeForce RTX 3090", "RTX3090-24GB"),
        ("RTX3090-24GB", "RTX3090-24GB"),
        ("nvidia h100 80gb hbm3", "H100-SXM5-80GB"),
        ("H100_PCIe", "H100-PCIe-80GB"),
        ("Tesla T4", "T4-16GB"),
    ],
)
def test_driver_names_and_short_names_find_the_device(spelling, name):
    assert find_hardware(spelling).name == name


def test_an_unknown_device_is_answered_with_the_nearest_three():
    with pytest.raises(UnknownNameError) as caught:
        find_hardware("a1000")
    assert len(caught.value.nearest) == 3
    assert all(name.startswith("A100") for name in caught.value.nearest)


def test_cpu_is_the_single_measured_one_else_the_generic_entry():
    generic = find_hardware("cpu")
    one = dataclasses.replace(generic, name="cpu-amd-epyc-2c", memory_bytes_per_s=50e9)
    two = dataclasses.replace(generic, name="cpu-intel-xeon-8c")
    assert find_hardware("cpu", measured=[one]) == one
    assert find_hardware("cpu", measured=[one, two]) == generic
    assert find_hardware("cpu-intel-xeon-8c", measured=[one, two]) == two


def test_a_measured_device_wins_over_the_shipped_one():
    measured = dataclasses.replace(find_hardware("h100"), memory_bytes_per_s=3.0e12)
    assert find_hardware("h100", measured=[measured]).memory_bytes_per_s == 3.0e12


def test_bf16_on_a_v100_is_refused_with_the_reason_and_the_nearest_policy():
    with pytest.raises(PrecisionUnsupportedError) as caught:
        check_precision(find_hardware("v100"), parse_precision("bf16"))
    assert caught.value.code == "E-PRECISION-UNSUPPORTED"
    for text in ("V100-SXM2-16GB", "bf16", "compute capability 7.0", "use amp_fp16", "loss scaling"):
        assert text in caught.value.message


@pytest.mark.parametrize(
    ("device", "precision", "offered"),
    [
        ("v100", "amp_bf16", "amp_fp16"),
        ("v100", "tf32", "fp32"),
        ("t4", "fp8", "amp_fp16"),
        ("a100", "fp8", "amp_bf16"),
        ("h100", "nvfp4", "fp8"),
        ("cpu", "tf32", "fp32"),
        ("cpu", "amp_fp16", "amp_bf16"),
    ],
)
def test_an_unsupported_policy_names_the_nearest_supported_one(device, precision, offered):
    spec = find_hardware(device)
    assert offered in supported_precisions(spec)
    with pytest.raises(PrecisionUnsupportedError, match=rf"use {offered}\b"):
        check_precision(spec, parse_precision(precision))


def test_a_cpu_runs_bf16_and_runs_fp16_once_its_rate_is_known():
    cpu = find_hardware("cpu")
    for name in ("fp32", "amp_bf16", "bf16"):
        check_precision(cpu, parse_precision(name))
    faster = dataclasses.replace(cpu, peak_flops_per_s={**cpu.peak_flops_per_s, "fp16": 1e11})
    check_precision(faster, parse_precision("amp_fp16"))


def test_a_specification_survives_json():
    for spec in known_hardware().values():
        assert HardwareSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_bytes_per_s", 0.0),
        ("memory_bytes_per_s", math.nan),
        ("link_bytes_per_s", math.inf),
        ("network_bytes_per_s", -1.0),
        ("launch_overhead_s", True),
        ("gpus_per_node", 2.5),
        ("memory_bytes", "80"),
        ("kind", "tpu"),
        ("link", "string"),
        ("compute_capability", None),
        ("peak_flops_per_s", {"fp16": 1e12}),
        ("peak_flops_per_s", {"fp32": 1e12, "fp7": 1e12}),
        ("peak_flops_per_s", {"fp32": 0.0}),
    ],
)
def test_a_value_that_is_not_usable_is_refused_by_field_name(field, value):
    with pytest.raises(InputError, match=field):
        dataclasses.replace(find_hardware("a100"), **{field: value})


def test_from_dict_names_the_missing_and_the_unknown_field():
    values = find_hardware("a100").to_dict()
    with pytest.raises(InputError, match="no link_bytes_per_s"):
        HardwareSpec.from_dict({k: v for k, v in values.items() if k != "link_bytes_per_s"})
    with pytest.raises(UnknownNameError, match=r"'link_byte_per_s'.*link_bytes_per_s"):
        HardwareSpec.from_dict({**values, "link_byte_per_s": 1.0})


OWN = """
[sources]
mine = "measured by me"

[hardware."My Card"]
aliases = ["mc"]
kind = "gpu"
architecture = "Ampere"
link = "pcie4"
compute_capability = { value = 8.6, source = "mine" }
memory_bytes = { value = 8_000_000_000, source = "mine" }
memory_bytes_per_s = { value = 448e9, source = "mine" }
peak_flops_per_s.fp32 = { value = 20e12, source = "mine" }
gpus_per_node = { value = 1, source = "mine" }
link_bytes_per_s = { value = 31.5e9, source = "mine" }
network_bytes_per_s = { value = 1.25e9, source = "mine" }
all_reduce_latency_s = { value = 50e-6, source = "mine" }
launch_overhead_s = { value = 6e-6, source = "mine" }
"""


def test_a_users_file_is_read_in_the_same_form(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    assert load_hardware(path)["My Card"].peak_flops_per_s == {"fp32": 20e12}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("gpus_per_node = { value = 1, source", "gpus_per_nod = { value = 1, source", "gpus_per_node"),
        ("memory_bytes_per_s = { value = 448e9, source", "# ", "no memory_bytes_per_s"),
        ('{ value = 448e9, source = "mine" }', "448e9", "memory_bytes_per_s.* has no source"),
        ('value = 448e9, source = "mine"', 'value = 448e9, source = ""', "source of memory_bytes_per_s"),
        ("value = 448e9", "value = -1", "memory_bytes_per_s"),
        ('compute_capability = { value = 8.6, source = "mine" }', "", "no compute_capability"),
        ("peak_flops_per_s.fp32", "peak_flops_per_s.fp33", "peak_flops_per_s"),
        ("[sources]", "[source]", "sources"),
        ("kind = ", "kind ", "cannot be read"),
    ],
)
def test_a_users_file_that_does_not_fit_is_refused_by_name(tmp_path, old, new, told):
    path = tmp_path / "mine.toml"
    assert old in OWN
    path.write_text(OWN.replace(old, new))
    with pytest.raises(InputError, match=told):
        load_hardware(path)


def test_a_file_that_is_missing_or_not_text_is_told_apart(tmp_path):
    with pytest.raises(NotFoundError):
        load_hardware(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        load_hardware(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("2.5 Gbit/s", 312.5e6),
        ("25 gbit/s", 3.125e9),
        ("25Gb/s", 3.125e9),
        ("25 Gbps", 3.125e9),
        ("25GB/s", 25e9),
        ("400 Gbit/s", 50e9),
        ("1 GiB/s", 2**30),
        ("1.5e3 MB/s", 1.5e9),
        ("100 kbit/s", 12.5e3),
    ],
)
def test_a_bandwidth_with_its_unit_is_read_in_bytes_per_second(text, bytes_per_s):
    assert parse_bandwidth(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "text",
    ["25", "25 G", "25Gb", "-1 GB/s", "0 GB/s", "1e400 GB/s", "nan GB/s", "25 Xbit/s", "1 iB/s", "1,4 Gbit/s", "", 25],
)
def test_a_bandwidth_without_a_unit_or_not_positive_is_refused(text):
    with pytest.raises(InputError, match="bandwidth"):
        parse_bandwidth(text)
