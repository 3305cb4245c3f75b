"""Run options of a cell: each is put in force, or refused with a reason."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from precision_time.storage.run_options import RUN_OPTIONS, RunOptions
from precision_time.storage.schema import GridCell
from precision_time.tasks.ranks import run_options as options
from precision_time.tasks.ranks.job import REFUSAL_CAUSES
from precision_time.tasks.ranks.refusals import CellRefusedError, refuse_cell
from precision_time.tasks.ranks.run_options import (
    APPLIED,
    check_complete,
    checkpoint_blocks,
    fuse_optimizer,
    prepare_training,
)


def prepare(module, **options):
    return prepare_training(module, RunOptions(**options), device=torch.device("cpu"), world_size=1)


@pytest.mark.parametrize("other", [{"unheard": None}, {}])
def test_an_option_that_no_rank_applies_stops_the_import(other):
    entries = dict.fromkeys([option.name for option in RUN_OPTIONS][1:]) | other
    with pytest.raises(TypeError, match=", ".join(sorted({"channels_last", *other}))):
        check_complete(entries)
    check_complete(APPLIED)


def test_plain_training_is_left_as_it_is():
    module, batch = nn.Linear(2, 2), torch.ones(1, 2)
    training = prepare(module)
    assert training.module is module
    assert training.lay_out_batch(batch) is batch
    assert training.wire_dtype is None
    training.check_first_steps()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        return torch.tanh(self.inner(inputs))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def gradients(module, inputs):
    module.zero_grad()
    module(inputs).square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def test_repeated_blocks_are_computed_again_in_the_backward_pass():
    module, inputs = Classifier(), torch.randn(4, 8)
    plain = gradients(module, inputs)
    assert [block.calls for block in module.blocks] == [1, 1, 1]
    assert checkpoint_blocks(module) == "3 blocks of Block"
    again = gradients(module, inputs)
    assert [block.calls for block in module.blocks] == [3, 3, 3]
    assert all(map(torch.equal, plain, again))


def test_a_plain_sequence_is_cut_into_segments():
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(9)])
    inputs = torch.randn(4, 8, requires_grad=True)
    plain = gradients(module, inputs)
    assert checkpoint_blocks(module) == "a sequence of 9 layers in 3 segments"
    assert all(map(torch.equal, plain, gradients(module, inputs)))


def test_a_model_without_blocks_is_not_called_checkpointed():
    with pytest.raises(CellRefusedError, match="no blocks to checkpoint") as caught:
        checkpoint_blocks(nn.Linear(8, 8))
    assert caught.value.cause == "option-unsupported"


def test_channels_last_turns_weights_and_images_and_needs_both():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 4))
    training = prepare(module, channels_last=True)
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    images, labels = training.lay_out_batch((torch.zeros(2, 3, 8, 8), torch.zeros(2)))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.shape == (2,)
    with pytest.raises(CellRefusedError, match="channels_last has no effect"):
        prepare(nn.Linear(8, 8), channels_last=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.5, betas=(0.8, 0.9)),
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    ],
)
def test_a_fused_optimizer_keeps_its_settings_and_takes_the_same_step(make):
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    modules[1].load_state_dict(modules[0].state_dict())
    plain, fused = make(modules[0].parameters()), fuse_optimizer(make(modules[1].parameters()))
    assert type(fused) is type(plain)
    assert fused.param_groups[0]["fused"]
    assert {key: fused.defaults[key] for key in ("lr", "weight_decay")} == {
        key: plain.defaults[key] for key in ("lr", "weight_decay")
    }
    for module, optimizer in zip(modules, (plain, fused), strict=True):
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert torch.allclose(modules[0].weight, modules[1].weight)


def test_an_optimizer_without_fused_kernels_is_refused():
    with pytest.raises(CellRefusedError, match="no fused kernels; got: RMSprop"):
        fuse_optimizer(torch.optim.RMSprop(nn.Linear(2, 2).parameters()))
    with pytest.raises(CellRefusedError, match="fused AdamW does not run here"):
        fuse_optimizer(torch.optim.AdamW(nn.Linear(2, 2).parameters(), differentiable=True))


def test_a_machine_without_a_compiler_refuses_to_compile(monkeypatch):
    from torch._inductor import cpp_builder

    def missing():
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(CellRefusedError, match="No working C\\+\\+ compiler"):
        prepare(nn.Linear(2, 2), compiled=True)


def test_compiling_nothing_is_no_compilation(monkeypatch):
    from torch._dynamo.utils import counters

    monkeypatch.setattr(options, "_compiler_missing", lambda device: None)
    # The eager backend runs the same code of torch.compile, without a minute of C++.
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: real(module, backend="eager"))
    monkeypatch.setitem(counters, "stats", counters.default_factory())
    training = prepare(nn.Linear(2, 2), compiled=True)
    with pytest.raises(CellRefusedError, match="no graph was compiled"):
        training.check_first_steps()
    training.module(torch.ones(1, 2))
    training.check_first_steps()


def test_blocks_are_checkpointed_before_the_whole_is_compiled(monkeypatch):
    monkeypatch.setattr(options, "_compiler_missing", lambda device: None)
    monkeypatch.setattr(torch, "compile", lambda module: nn.Sequential(module))
    training = prepare(Classifier(), checkpointing="full", compiled=True)
    assert all(block.forward.func is options.checkpoint for block in training.module[0].blocks)


CELL = GridCell(model="mlp", precision="fp32", world_size=2, per_gpu_batch_size=4)


@pytest.mark.parametrize(
    ("changes", "cause", "said"),
    [
        ({"strategy": "fsdp"}, "strategy-unsupported", "strategy fsdp is not measured"),
        ({"compression": "fp16", "world_size": 1}, "option-unsupported", "one rank sends no gradients"),
        ({"compression": "bf16", "precision": "bf16"}, "option-unsupported", "the gradients of bf16 have that format"),
    ],
)
def test_some_cells_are_refused_before_anything_starts(changes, cause, said):
    refused_cause, message = refuse_cell(replace(CELL, **changes))
    assert refused_cause == cause
    assert cause in REFUSAL_CAUSES
    assert said in message


def test_an_ordinary_cell_is_not_refused():
    assert refuse_cell(CELL) is None
    assert refuse_cell(replace(CELL, compression="fp16", precision="amp_bf16")) is None
