"""Devices: unusable values, unknown names and formats that a device lacks are refused by name."""

import dataclasses
import json
import math

import pytest

from precision_time.predictor.setup.hardware import (
    HardwareSpec,
    check_precision,
    find_hardware,
    known_hardware,
    load_hardware,
    parse_bandwidth,
)
from precision_time.predictor.setup.precision import parse_precision
from precision_time.storage.errors import InputError, NotFoundError, PrecisionUnsupportedError, UnknownNameError


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
    amd = dataclasses.replace(generic, name="cpu-amd-epyc-2c", memory_bytes_per_s=50e9)
    intel = dataclasses.replace(generic, name="cpu-intel-xeon-8c")
    assert find_hardware("cpu", measured=[amd]) == amd
    assert find_hardware("cpu", measured=[amd, intel]) == generic
    assert find_hardware("cpu-intel-xeon-8c", measured=[amd, intel]) == intel


def test_a_measured_device_wins_over_the_shipped_one():
    measured = dataclasses.replace(find_hardware("h100"), memory_bytes_per_s=3.0e12)
    assert find_hardware("h100", measured=[measured]).memory_bytes_per_s == 3.0e12


def test_bf16_on_a_v100_is_refused_with_the_reason_and_the_nearest_policy():
    with pytest.raises(PrecisionUnsupportedError) as caught:
        check_precision(find_hardware("v100"), parse_precision("bf16"))
    assert caught.value.code == "E-PRECISION-UNSUPPORTED"
    for text in ("V100-SXM2-16GB", "bf16", "compute capability 7.0", "use amp_fp16", "loss scaling"):
        assert text in caught.value.message


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
        ("chip", None),
        ("sm_count", 1.5),
        ("boost_clock_hz", 0.0),
        ("l2_bytes", -1),
        ("power_w", math.inf),
        ("nvlink_domain", 0),
        ("achieved_flops_per_s", None),
        ("achieved_flops_per_s", {"fp7": 1e12}),
        ("achieved_flops_per_s", {"bf16": math.nan}),
        ("achieved_memory_bytes_per_s", 0.0),
    ],
)
def test_a_value_that_is_not_usable_is_refused_by_field_name(field, value):
    with pytest.raises(InputError, match=field):
        dataclasses.replace(find_hardware("a100"), **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("achieved_flops_per_s", {"bf16": 1.06 * 312e12}),
        ("achieved_flops_per_s", {"fp8": 1e12}),
        ("achieved_memory_bytes_per_s", 1.06 * 2.039e12),
    ],
)
def test_a_file_cannot_claim_more_than_the_nominal_rate(field, value):
    values = find_hardware("a100").to_dict()
    assert HardwareSpec.from_dict({**values, "achieved_flops_per_s": {"bf16": 1.04 * 312e12}})
    with pytest.raises(InputError, match=rf"{field}.*nominal"):
        HardwareSpec.from_dict({**values, field: value})


def test_nominal_rates_can_be_replaced_without_the_measured_ones():
    slower = dataclasses.replace(find_hardware("a100"), peak_flops_per_s={"fp32": 1e12}, memory_bytes_per_s=1e9)
    assert slower.achieved_flops_per_s == find_hardware("a100").achieved_flops_per_s


def test_a_specification_written_before_the_optional_fields_still_loads():
    values = find_hardware("a100").to_dict()
    later = {"chip", "nvlink_domain", "sm_count", "boost_clock_hz", "l2_bytes", "power_w", "achieved_flops_per_s",
             "achieved_memory_bytes_per_s"}  # fmt: skip
    spec = HardwareSpec.from_dict({field: value for field, value in values.items() if field not in later})
    assert (spec.chip, spec.sm_count, spec.achieved_flops_per_s) == ("", None, {})
    assert spec.peak_flops_per_s == values["peak_flops_per_s"]


def test_from_dict_names_the_missing_and_the_unknown_field():
    values = find_hardware("a100").to_dict()
    with pytest.raises(InputError, match="no link_bytes_per_s"):
        HardwareSpec.from_dict({k: v for k, v in values.items() if k != "link_bytes_per_s"})
    with pytest.raises(UnknownNameError, match=r"'link_byte_per_s'.*link_bytes_per_s"):
        HardwareSpec.from_dict({**values, "link_byte_per_s": 1.0})


USER_FILE = """
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
    path.write_text(USER_FILE)
    assert load_hardware(path)["My Card"].peak_flops_per_s == {"fp32": 20e12}
    path.write_text(USER_FILE + 'chip = "GA104"\nachieved_flops_per_s.fp32 = { value = 18e12, source = "mine" }\n')
    spec = load_hardware(path)["My Card"]
    assert (spec.chip, spec.achieved_flops_per_s) == ("GA104", {"fp32": 18e12})
    path.write_text(USER_FILE + 'achieved_flops_per_s.fp32 = { value = 40e12, source = "mine" }\n')
    with pytest.raises(InputError, match=r"achieved_flops_per_s\.fp32 of hardware 'My Card'"):
        load_hardware(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
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
def test_a_users_file_that_does_not_fit_is_refused_by_name(tmp_path, old, new, message):
    path = tmp_path / "mine.toml"
    assert old in USER_FILE
    path.write_text(USER_FILE.replace(old, new))
    with pytest.raises(InputError, match=message):
        load_hardware(path)


def test_a_file_that_is_missing_and_one_that_is_not_text_raise_different_errors(tmp_path):
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
