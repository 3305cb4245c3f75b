"""Precision names: every framework's spelling means one policy; an unknown one is answered with the nearest three."""

from collections import Counter

import pytest

from precision_time.predictor.setup.precision import PRECISIONS, SPELLINGS, parse_precision
from precision_time.storage.errors import InputError, UnknownNameError

# The value a user finds in a configuration of each framework, and the policy it means.
FRAMEWORK_SPELLINGS = {
    "fp32": [
        "fp32-strict",
        "32-true",
        "32",
        32,
        "no",
        "float32",
        "fp32",
        "FP32",
        "torch.float32",
        "torch.float",
        "ieee",
    ],
    "tf32": ["tf32", "TF32", "high", "tensorfloat32"],
    "amp_fp16": ["16-mixed", "16", 16, "fp16-mixed", "amp_fp16", "mixed_fp16_fp32", "O1", "O2", "half", "native_amp"],
    "amp_bf16": ["bf16-mixed", "bfloat16", "amp_bf16", "BF16-Mixed", "mixed bf16"],
    "fp16": ["16-true", "O3", "fp16", "pure_fp16"],
    "bf16": ["bf16-true", "bf16", "pure_bf16", "torch.bfloat16", "bfloat16-true"],
    "fp8": [
        "transformer-engine",
        "transformer-engine-float16",
        "fp8",
        "float8_e4m3fn",
        "float8_e5m2",
        "amp_fp8",
        "FP8",
        "hybrid",
        "torch.float8_e4m3fn",
    ],
    "nvfp4": ["nvfp4", "NVFP4", "fp4", "torch.float4_e2m1fn_x2"],
}


@pytest.mark.parametrize(
    ("spelling", "name"),
    [(spelling, name) for name, spellings in FRAMEWORK_SPELLINGS.items() for spelling in spellings],
)
def test_the_spellings_of_frameworks_resolve(spelling, name):
    assert parse_precision(spelling).name == name


def test_at_least_forty_spellings_are_accepted_and_none_means_two_policies():
    counts = Counter(spelling for spellings in SPELLINGS.values() for spelling in spellings)
    assert len(counts) >= 40
    assert max(counts.values()) == 1
    # Case, blanks and dashes do not matter, so two policies must not differ by them alone either.
    folded = Counter(
        (spelling.casefold().replace("-", "_"), name) for name, spellings in SPELLINGS.items() for spelling in spellings
    )
    assert len({spelling for spelling, _ in folded}) == len(folded)


def test_every_listed_spelling_and_canonical_name_means_its_policy():
    for name, spellings in SPELLINGS.items():
        assert parse_precision(name) is PRECISIONS[name]
        assert parse_precision(PRECISIONS[name]) is PRECISIONS[name]
        for spelling in spellings:
            assert parse_precision(f" {spelling.upper()} ") is PRECISIONS[name]


@pytest.mark.parametrize("unknown", ["bf17", "fp12-mixed", "mixed16", "", "quadruple"])
def test_an_unknown_spelling_is_answered_with_the_nearest_three(unknown):
    with pytest.raises(UnknownNameError) as caught:
        parse_precision(unknown)
    assert len(caught.value.nearest) == 3
    assert all(parse_precision(spelling) for spelling in caught.value.nearest)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("spelling", "message", "offered"),
    [
        ("64-true", "fp64 training is not covered", "fp32"),
        (64, "fp64 training is not covered", "fp32"),
        ("Double", "fp64 training is not covered", "fp32"),
        ("torch.float64", "fp64 training is not covered", "fp32"),
        ("int8-training", "quantised weights is not covered", "amp_bf16"),
        ("nf4_dq", "quantised weights is not covered", "amp_bf16"),
        ("MXFP8", "microscaling formats is not covered", "fp8"),
    ],
)
def test_a_format_that_is_known_but_not_covered_has_its_own_error(spelling, message, offered):
    with pytest.raises(InputError, match=message) as caught:
        parse_precision(spelling)
    assert not isinstance(caught.value, UnknownNameError)
    assert offered in (caught.value.fix or "")
    assert caught.value.exit_code == 2


def test_autocast_keeps_fp32_gradients_on_the_wire_and_only_fp16_scales_the_loss():
    assert {name for name, policy in PRECISIONS.items() if policy.loss_scaling} == {"amp_fp16"}
    assert PRECISIONS["amp_bf16"].communicate == "fp32"
    assert PRECISIONS["bf16"].communicate == "bf16"
    assert not PRECISIONS["tf32"].is_mixed
