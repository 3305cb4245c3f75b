"""Catalogue files: every figure has a source and every spelling one device; errors name the field."""

import pytest

from precision_time.predictor.setup.catalogue import fold_name, parse_catalogue
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.storage.errors import InputError, UnknownNameError

ENTRY = """
[hardware."{name}"]
aliases = {aliases}
kind = "gpu"
architecture = "Ampere"
chip = "GA102"
link = "pcie4"
compute_capability = {{ value = 8.6, source = "mine" }}
memory_bytes = {{ value = 8_000_000_000, source = "mine" }}
memory_bytes_per_s = {{ value = 448e9, source = "mine" }}
peak_flops_per_s.fp32 = {{ value = 20e12, source = "sheet of {name}" }}
gpus_per_node = {{ value = 1, source = "mine" }}
link_bytes_per_s = {{ value = 31.5e9, source = "mine" }}
network_bytes_per_s = {{ value = 1.25e9, source = "mine" }}
all_reduce_latency_s = {{ value = 50e-6, source = "mine" }}
launch_overhead_s = {{ value = 6e-6, source = "mine" }}
"""
SOURCES = '[sources]\nmine = "measured by me"\n'


def write_entry(name="Card", aliases="[]", extra=""):
    return ENTRY.format(name=name, aliases=aliases) + extra


def parse(text):
    return parse_catalogue(text, record=HardwareSpec, where="a test")


def test_an_entry_gives_plain_values():
    extra = (
        'sm_count = { value = 46, source = "mine" }\nachieved_flops_per_s.fp32 = { value = 18e12, source = "me too" }\n'
    )
    catalogue = parse(SOURCES + write_entry(aliases='["the card"]', extra=extra))
    values = catalogue.entries["Card"]
    assert (values["name"], values["chip"], values["sm_count"]) == ("Card", "GA102", 46)
    assert values["achieved_flops_per_s"] == {"fp32": 18e12}
    assert "nvlink_domain" not in values
    assert catalogue.names == {"card": "Card", "thecard": "Card"}


@pytest.mark.parametrize(
    ("spelling", "folded"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100sxm480gb"),
        ("Tesla V100 SXM2", "v100sxm2"),
        ("GB10 (DGX Spark)", "gb10dgxspark"),
        ("QuadroRTX8000-48GB", "quadrortx800048gb"),
        ("Quadro RTX 8000", "rtx8000"),
    ],
)
def test_a_name_is_folded_to_its_letters_and_digits(spelling, folded):
    assert fold_name(spelling) == folded


def test_two_devices_cannot_share_a_spelling():
    with pytest.raises(InputError, match=r"one name to two devices.*'THE-CARD'.*only Card"):
        parse(SOURCES + write_entry(aliases='["the card"]') + write_entry("Other", '["THE-CARD"]'))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("sm_count = 46", "sm_count of hardware 'Card' has no source"),
        ('power_w = { value = 300, source = " " }', "source of power_w"),
        ("achieved_flops_per_s = 18e12", "achieved_flops_per_s of hardware 'Card' is not usable"),
        ("achieved_flops_per_s.fp32 = 18e12", r"achieved_flops_per_s.fp32 of hardware 'Card' has no source"),
    ],
)
def test_an_optional_figure_needs_a_source_too(extra, message):
    with pytest.raises(InputError, match=message):
        parse(SOURCES + write_entry(extra=extra))


def test_an_unknown_field_is_answered_with_the_nearest_ones():
    with pytest.raises(UnknownNameError, match=r"'sm_counts'.*sm_count"):
        parse(SOURCES + write_entry(extra='sm_counts = { value = 46, source = "mine" }'))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (write_entry(aliases='"card"'), "aliases of hardware 'Card' are not usable"),
        (write_entry(aliases="[1]"), "aliases of hardware 'Card' are not usable"),
        ('hardware = "all"', "a test is not usable"),
        ('[hardware]\nCard = "fast"', "hardware 'Card' is not usable"),
        ("[sources]", "a test is incomplete"),
        ("[hardware", "a test cannot be read"),
    ],
)
def test_a_text_that_is_no_catalogue_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        parse(text)
