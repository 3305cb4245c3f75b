"""Layouts by every spelling of people and tables, and a refusal of degrees that do not fill the world."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision_time.predictor.setup.parallelism import Parallelism, parse_parallelism
from precision_time.storage.errors import InputError


@pytest.mark.parametrize(
    ("text", "world", "expected"),
    [
        ("", 8, {"data": 8}),
        ("ddp", 4, {"data": 4}),
        ("dp", 4, {"data": 4}),
        ("DistributedDataParallel", 4, {"data": 4}),
        ("data parallel", 4, {"data": 4}),
        ("dp (nn.DataParallel)", 3, {"data": 3, "single_process": True}),
        ("nn.DataParallel", 3, {"data": 3, "single_process": True}),
        ("fsdp", 8, {"data": 8, "sharding": "parameters"}),
        ("FULL_SHARD", 8, {"data": 8, "sharding": "parameters"}),
        ("shard_grad_op", 8, {"data": 8, "sharding": "gradients"}),
        ("zero3", 8, {"data": 8, "sharding": "parameters"}),
        ("deepspeed zero-2", 8, {"data": 8, "sharding": "gradients"}),
        ("ZeRO Stage 1", 8, {"data": 8, "sharding": "optimizer"}),
        ("optimizer-sharding", 8, {"data": 8, "sharding": "optimizer"}),
        ("tp4-pp8", 64, {"data": 2, "tensor": 4, "pipeline": 8}),
        ("tp=8, pp = 2", 32, {"data": 2, "tensor": 8, "pipeline": 2}),
        ("tp1-pp4-cp1-ep64-dp64-vp4", 256, {"data": 64, "pipeline": 4, "expert": 64, "virtual_stages": 4}),
        ("tp4-pp8-cp1-epn/a-dp8-vp4", 256, {"data": 8, "tensor": 4, "pipeline": 8, "virtual_stages": 4}),
        ("tp2-pp1-cp1-ep64-dp32", 64, {"data": 32, "tensor": 2, "expert": 64}),
        ("dp1-fsdp256-tp1", 256, {"data": 256, "sharding": "parameters"}),
        ("dp64-fsdp1-tp1", 64, {"data": 64}),
        ("dp32-fsdp4-tp2", 256, {"data": 128, "tensor": 2, "sharding": "parameters"}),
        ("fsdp1-cp8-tp8-pp8", 512, {"context": 8, "tensor": 8, "pipeline": 8, "sharding": "parameters"}),
        ("tp1-pp1-cp1-epn/a-dp64-fsdp", 64, {"data": 64, "sharding": "parameters"}),
        ("dp4-mp8", 32, {"data": 4, "tensor": 8}),
        ("zero2(dp8)", 8, {"data": 8, "sharding": "gradients"}),
        ("zero1(dp2)+tp2+pp4", 16, {"data": 2, "tensor": 2, "pipeline": 4, "sharding": "optimizer"}),
        ("gpipe pp8 microbatches32", 8, {"pipeline": 8}),
        ("ddp + spatial", 72, {"data": 72}),
        ("ddp + model-parallel embedding", 8, {"data": 8}),
        ("model-parallel head", 8, {"data": 8}),
        ("partial-fc model-parallel head", 8, {"data": 8}),
    ],
)
def test_a_spelling_gives_its_layout(text: str, world: int, expected: dict[str, object]) -> None:
    assert parse_parallelism(text, world_size=world) == Parallelism(**expected)  # type: ignore[arg-type]


def test_the_sharding_argument_counts_where_the_text_names_none() -> None:
    assert parse_parallelism("ddp", world_size=8, sharding="FULL_SHARD").sharding == "parameters"
    assert parse_parallelism("zero1", world_size=8, sharding="zero3").sharding == "optimizer"
    assert parse_parallelism("ddp", world_size=8, sharding="").sharding == "none"
    with pytest.raises(InputError, match="unknown sharding"):
        parse_parallelism("ddp", world_size=8, sharding="half")
    with pytest.raises(InputError, match=r"unknown sharding.*gradients"):
        Parallelism(data=8, sharding="half")


@pytest.mark.parametrize(
    ("text", "world", "message"),
    [
        ("tp3", 8, "3 ranks a replica in a world of 8"),
        ("dp4-tp4", 8, "data 4 x tensor 4 x pipeline 1 x context 1 = 16 ranks in a world of 8"),
        ("ep16", 8, "16 expert groups over 8 ranks"),
        ("tp0", 8, "degree of parallelism is 0"),
        ("tp2-tp4", 8, "two degrees of tensor"),
        ("sideways", 8, "not understood.*fsdp.*tp4-pp8"),
        ("model parallel", 8, "not understood"),
        ("ddp", 0, "world size is not usable"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_numbers(text: str, world: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_parallelism(text, world_size=world)


def test_a_layout_is_checked_against_the_world() -> None:
    layout = Parallelism(data=2, tensor=2)
    assert parse_parallelism(layout, world_size=4) is layout
    with pytest.raises(InputError, match="= 4 ranks in a world of 8"):
        parse_parallelism(layout, world_size=8)


@given(st.text(max_size=40), st.integers(1, 64))
def test_any_text_is_laid_out_whole_or_refused(text: str, world: int) -> None:
    try:
        layout = parse_parallelism(text, world_size=world)
    except InputError:
        return
    assert layout.world_size == world
