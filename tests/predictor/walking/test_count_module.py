"""Counting a module on a sample of its input: batches, losses, tied and frozen weights, and errors."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from precision_time.predictor.walking import count_module as counting
from precision_time.predictor.walking.count_module import count_module, make_sample
from precision_time.storage.errors import InputError


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PRECISION_TIME_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "walks"


def count(module, sample, **options):
    return count_module(module, sample_input=sample, **options)


def flops(module, sample, **options):
    return count(module, sample, **options).workload.forward_flops_per_sample


class Two(nn.Module):
    """Takes an image-like and a vector argument, and a switch."""

    def __init__(self):
        super().__init__()
        self.wide, self.deep = nn.Linear(16, 8), nn.Linear(4, 8)

    def forward(self, wide, deep=None, *, double=False):
        both = self.wide(wide)
        if deep is not None:
            both = both + self.deep(deep)
        return both * 2 if double else both


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_the_counts_are_of_one_sample_whatever_batch_the_sample_holds(rows):
    work = count(nn.Linear(16, 8), torch.randn(rows, 16)).workload
    assert work.forward_flops_per_sample == 2 * 16 * 8
    assert (work.params, work.parameter_tensors) == (16 * 8 + 8, 2)
    assert set(work.walks) == {"fp32", "amp"}
    assert work.walks["amp"].total("flops", number_format="narrow") > 0


def test_arguments_go_by_place_or_by_name():
    wide, deep = torch.randn(3, 16), torch.randn(3, 4)
    both = 2 * (16 + 4) * 8
    assert flops(Two(), wide) == 2 * 16 * 8
    assert flops(Two(), (wide, deep)) == flops(Two(), [wide, deep]) == both
    assert flops(Two(), {"wide": wide, "deep": deep, "double": True}) == both


def test_a_tensor_of_another_leading_size_is_no_part_of_the_batch():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, rows, table):
            return self.layer(rows) @ self.layer(table).T

    work = count(Mixed(), (torch.randn(4, 8), torch.randn(5, 8))).workload
    assert work.forward_flops_per_sample == 2 * 8 * 8 + 2 * 8 * 5
    assert work.walks["fp32"].total("flops_fixed", phase="forward") == 5 * 2 * 8 * 8


def test_ids_stay_ids_and_name_their_length():
    work = count(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4)), torch.randint(50, (3, 12))).workload
    assert (work.task_input, work.sequence_length) == ("12", 12)
    assert work.forward_flops_per_sample == 12 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("3x224x224", (1, 3, 224, 224), torch.float32),
        ("tokens:512", (1, 512), torch.long),
        ("7", (1, 7), torch.float32),
    ],
)
def test_a_shape_as_text_is_one_sample(text, shape, dtype):
    sample = make_sample(text)
    assert (tuple(sample.shape), sample.dtype) == (shape, dtype)


@pytest.mark.parametrize("text", ["", "3x", "3x0x4", "words:4", "tokens:", "-3", "3 x 4", "1e9", "9999999999"])
def test_text_that_is_no_shape_is_bad_input(text):
    with pytest.raises(InputError, match="is not a shape"):
        make_sample(text)


@pytest.mark.parametrize(
    ("sample", "task_input"),
    [
        (torch.randn(3, 32, 32), "32"),
        (torch.zeros(2, 3, 32, 48), "32x48"),
        (torch.zeros(2, 1, 8, 16, 16), "8x16x16"),
        (torch.zeros(2, 10, 4), "10"),
    ],
)
def test_the_input_is_named_by_its_size(sample, task_input):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(sample.shape[-1], 2)

        def forward(self, values):
            return self.layer(values)

    assert count(Sum(), sample).workload.task_input == task_input


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (np.zeros((2, 16)), "got: numpy.ndarray.*from_numpy"),
        ([1.0, 2.0], "no tensor in it"),
        ({}, "no tensor in it"),
        ({0: torch.zeros(2, 16)}, "keys that are not text"),
        (torch.tensor(1.0), "no batch"),
        (torch.zeros(0, 16), "no batch"),
    ],
)
def test_a_sample_that_cannot_be_used_is_bad_input(sample, message):
    with pytest.raises(InputError, match=message):
        count(nn.Linear(16, 8), sample)


def test_the_error_of_the_users_code_is_named_with_its_message():
    class Picky(nn.Linear):
        def forward(self, values):
            raise KeyError("the colour of the input")

    with pytest.raises(InputError, match=r"forward pass fails on this input; got: KeyError: .*the colour of the input"):
        count(Picky(16, 8), torch.zeros(2, 16))
    with pytest.raises(InputError, match=r"forward pass fails.*RuntimeError"):
        count(nn.Linear(16, 8), torch.zeros(2, 15))
    with pytest.raises(InputError, match=r"forward pass fails.*TypeError.*deeep"):
        count(Two(), {"wide": torch.zeros(2, 16), "deeep": torch.zeros(2, 4)})


def test_a_module_that_leaves_torch_runs_but_cannot_be_walked():
    class Leaves(nn.Linear):
        def forward(self, values):
            return super().forward(torch.from_numpy(values.detach().numpy() * 2))

    with pytest.raises(InputError, match="runs, but cannot be walked"):
        count(Leaves(16, 8), torch.zeros(2, 16))


def test_nothing_to_differentiate_is_bad_input():
    class Detached(nn.Linear):
        def forward(self, values):
            return super().forward(values).detach()

    class Silent(nn.Linear):
        def forward(self, values):
            return None

    for kind in (Detached, Silent):
        with pytest.raises(InputError, match="nothing to differentiate"):
            count(kind(16, 8), torch.zeros(2, 16))
    with pytest.raises(InputError, match="trains nothing"):
        count(nn.Linear(16, 8).requires_grad_(False), torch.zeros(2, 16))


def test_a_module_without_products_does_no_work():
    with pytest.raises(InputError, match="no work that can be counted"):
        count(nn.LayerNorm(16), torch.zeros(2, 16))


@pytest.mark.parametrize("wrap", [lambda y: (y, {"a": [y]}), lambda y: {"x": y, "n": 3}, lambda y: [y.argmax(-1), y]])
def test_without_a_loss_the_mean_of_all_outputs_is_taken_and_reported(wrap):
    class Returns(nn.Linear):
        def forward(self, values):
            return wrap(super().forward(values))

    counted = count(Returns(16, 8), torch.zeros(2, 16))
    assert any("took the mean" in reason for reason in counted.reasons)
    assert counted.workload.backward_flops_per_sample == 2 * 16 * 8


def test_a_loss_that_the_module_returns_is_its_loss():
    class Output:
        def __init__(self, logits):
            self.loss, self.logits = (logits @ logits.detach().T).mean(), logits

    class Own(nn.Linear):
        def forward(self, values):
            return Output(super().forward(values))

    counted = count(Own(16, 8), torch.zeros(2, 16))
    assert not any("took the mean" in reason for reason in counted.reasons)
    assert counted.workload.forward_flops_per_sample > 2 * 16 * 8


def test_a_loss_of_the_user_is_taken_and_checked():
    layer, sample = nn.Linear(16, 8), torch.zeros(2, 16)
    head = torch.zeros(8, 32)
    counted = count(layer, sample, loss=lambda output: (output @ head).square().mean())
    assert counted.workload.forward_flops_per_sample == 2 * 16 * 8 + 2 * 8 * 32
    assert not any("took the mean" in reason for reason in counted.reasons)
    wrongs = {
        "shape": lambda output: output,
        "float": lambda output: 3.0,
        "requires_grad False": lambda output: output.sum().detach(),
    }
    for got, wrong in wrongs.items():
        with pytest.raises(InputError, match=f"loss is not usable; got: .*{got}"):
            count(layer, sample, loss=wrong)
    with pytest.raises(InputError, match="loss is not usable; got: str"):
        count(layer, sample, loss="mse")


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(40, 8), nn.Linear(8, 40, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids))

    work = count(Tied(), torch.randint(40, (2, 6))).workload
    assert (work.params, work.parameter_tensors) == (320, 1)
    assert work.walks["fp32"].gradient_bytes == 4 * 320


def test_frozen_parameters_have_no_gradients_and_the_closed_form_gets_the_counted_work():
    frozen, plain = (nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2))
    frozen[0].requires_grad_(False)
    frozen[1].requires_grad_(False)
    counted = count(frozen, torch.zeros(2, 16))
    work, share = counted.workload, counted.trainable_share
    assert share == pytest.approx(1 / 3)
    assert any("33.3% of its parameters are trained" in reason for reason in counted.reasons)
    assert work.params == count(plain, torch.zeros(2, 16)).workload.params
    # the weight gradient of the last layer alone, which the roofline gets back from the sums
    assert work.walks["fp32"].total("flops", phase="backward") == 2 * 16 * 16
    assert work.backward_flops_per_sample * (1 - 0.5 * (1 - share)) == pytest.approx(2 * 16 * 16)


class LooksAtValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.layer(inputs) if inputs.sum().item() < 1e9 else inputs


def test_a_module_that_looks_at_values_is_run_for_real_reported_and_not_kept(cache):
    counted = count(LooksAtValues(), torch.zeros(2, 4))
    assert counted.workload.forward_flops_per_sample == 2 * 4 * 4
    assert any("looks at values" in reason for reason in counted.reasons)
    assert not cache.exists()


def test_a_module_that_looks_at_values_and_has_none_is_bad_input():
    for module in (LooksAtValues().to("meta"), LooksAtValues().half()):
        with pytest.raises(InputError, match="looks at values"):
            count(module, torch.zeros(2, 4))


@pytest.mark.parametrize("move", [lambda m: m.half(), lambda m: m.double(), lambda m: m.to("meta"), torch.compile])
def test_weights_of_any_format_and_device_are_walked_as_fp32(move):
    def build():
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8))

    plain, moved = (count(module, torch.zeros(2, 16)).workload for module in (build(), move(build())))
    assert moved.walks == plain.walks
    assert moved.params == plain.params


def test_the_module_stays_as_it_was():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    count(module, torch.randn(2, 4))
    assert not module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_the_same_module_is_walked_once(monkeypatch, cache):
    walks = []
    real = counting.walk_module
    monkeypatch.setattr(counting, "walk_module", lambda *a, **k: walks.append(1) or real(*a, **k))

    def mean(output):
        return output.mean()

    first = count(nn.Linear(16, 8), torch.randn(2, 16))
    assert count(nn.Linear(16, 8), torch.randn(8, 16)) == first
    assert len(walks) == 1
    count(nn.Linear(16, 9), torch.randn(2, 16))
    count(nn.Linear(16, 8), torch.randn(2, 5, 16))
    count(nn.Linear(16, 8), torch.randn(2, 16), loss=mean)
    assert len(walks) == len(list(cache.iterdir())) == 4
    monkeypatch.setenv("PRECISION_TIME_CACHE", "off")
    assert count(nn.Linear(16, 8), torch.randn(2, 16)) == first
    assert len(walks) == 5
