import pytest
import torch
import torch.nn.functional as F
from torch import nn

from precision_time.predictor.graph import count_phases, count_workload
from precision_time.storage.errors import InputError
from precision_time.tasks.workloads import build_workload, count_card


def count(module, *shape, **options):
    return count_phases(module, torch.randn(*shape, **options), loss_of=lambda module, batch: module(batch).sum())


@pytest.mark.parametrize(
    ("name", "params", "forward_flops"),
    [
        ("resnet50", 25_557_032, 8.178e9),
        ("bert_base", 109_514_298, 28.499e9),
        ("gpt2", 124_439_808, 291.65e9),
    ],
)
def test_published_parameter_and_flop_counts_are_met(name, params, forward_flops):
    card = count_card(build_workload(name), name=name)
    assert card.params == params
    assert card.forward_flops_per_sample == pytest.approx(forward_flops, rel=1e-4)


def test_resnet50_backward_leaves_out_the_gradient_of_the_image():
    card = count_card(build_workload("resnet50"), name="resnet50")
    stem = 2 * 112 * 112 * 64 * 3 * 7 * 7
    assert card.backward_flops_per_sample == 2 * card.forward_flops_per_sample - stem


def test_attention_is_the_part_of_gpt2_that_grows_with_the_square_of_its_length():
    card = count_card(build_workload("gpt2"), name="gpt2")
    attention = 12 * 4 * 12 * 1024 * 1024 * 64
    assert card.attention_flops_share * card.forward_flops_per_sample == pytest.approx(attention)
    # Two gradients for every product, and 2.5 times the attention: its kernel computes the scores again.
    assert card.backward_flops_per_sample == pytest.approx(2 * card.forward_flops_per_sample + attention / 2)


@pytest.mark.parametrize("groups", [1, 4, 32])
def test_groups_divide_the_flops_of_a_convolution_in_both_directions(groups):
    module = nn.Sequential(nn.Conv2d(32, 32, 1), nn.Conv2d(32, 64, 3, groups=groups, bias=False))
    forward, backward = count(module, 2, 32, 8, 8)
    first = 2 * 2 * 8 * 8 * 32 * 32
    second = 2 * 2 * 6 * 6 * 64 * (32 // groups) * 9
    assert forward.flops == forward.convolution_flops == first + second
    # The first layer has a weight gradient only: nobody asked for that of its input.
    assert backward.flops == first + 2 * second


def test_a_transposed_convolution_counts_by_its_input():
    module = nn.ConvTranspose2d(8, 16, 4, stride=2, padding=1)
    forward, backward = count(module, 2, 8, 5, 5)
    assert forward.flops == 2 * 2 * 5 * 5 * 8 * 16 * 16
    assert backward.flops == forward.flops


def test_a_frozen_layer_takes_no_weight_gradient():
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    module[1].requires_grad_(False)
    forward, backward = count(module, 4, 16)
    assert forward.flops == 2 * 2 * 4 * 16 * 16
    assert backward.flops == forward.flops


class Attention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.options = options

    def forward(self, tokens):
        query, key, value = (
            part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(tokens).chunk(3, dim=-1)
        )
        return F.scaled_dot_product_attention(query, key, value, **self.options)


def test_fused_attention_is_counted_though_no_matrix_product_shows():
    projection, attention = 2 * 2 * 16 * 32 * 96, 4 * 2 * 4 * 16 * 16 * 8
    forward, backward = count(Attention(is_causal=True), 2, 16, 32)
    assert (forward.flops, forward.attention_flops) == (projection + attention, attention)
    assert (backward.flops, backward.attention_flops) == (projection + 2.5 * attention, 2.5 * attention)


def test_attention_taken_apart_is_counted_by_its_products():
    projection, attention = 2 * 2 * 16 * 32 * 96, 4 * 2 * 4 * 16 * 16 * 8
    forward, backward = count(Attention(dropout_p=0.1), 2, 16, 32)
    assert (forward.flops, forward.attention_flops) == (projection + attention, 0)
    assert backward.flops == projection + 2 * attention


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, inputs):
        turned = inputs.view(8, 8).t().reshape(4, 16).flatten().view(8, 8).unsqueeze(0)[0]
        return turned.detach() @ self.weight.expand(3, 8, 8)[0]


def test_views_cost_neither_bytes_nor_operations():
    forward, _ = count_phases(Views(), torch.zeros(64), loss_of=lambda module, inputs: module(inputs).sum())
    # One copy that a reshape of a transposed matrix needs, the product, the sum.
    assert forward.ops == 3
    assert forward.bytes == 4 * (2 * 64 + 3 * 64 + (64 + 1))


def test_an_expanded_tensor_and_a_gather_read_only_what_they_touch():
    table = nn.Embedding(1000, 4)
    forward, _ = count_phases(
        table,
        torch.zeros(2, 3, dtype=torch.long),
        loss_of=lambda module, words: (module(words) + torch.ones(1).expand(2, 3, 4)).sum(),
    )
    embedding = 6 * 8 + 2 * 24 * 4
    ones, addition, total = 4, (24 + 1 + 24) * 4, (24 + 1) * 4
    assert forward.bytes == embedding + ones + addition + total


def test_counting_leaves_the_module_as_it_was():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    count(module, 2, 4)
    assert not module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(module[1].running_mean, torch.zeros(4))


class LooksAtValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.layer(inputs) if inputs.sum().item() < 1e9 else inputs


def test_a_module_that_looks_at_values_is_run_for_real():
    forward, _ = count(LooksAtValues(), 2, 4)
    assert forward.flops == 2 * 2 * 4 * 4


def test_bytes_split_into_a_part_per_sample_and_a_fixed_one():
    card = count_workload(
        nn.Linear(64, 32, bias=False),
        lambda samples: torch.randn(samples, 64),
        loss_of=lambda module, batch: module(batch).sum(),
        name="one-layer",
        family="mlp",
        task_input="64",
        optimizer="sgd",
    )
    assert card.forward_flops_per_sample == 2 * 64 * 32
    # The product reads 64 and writes 32 values a sample, the sum reads them again; weights and result are fixed.
    assert card.forward_bytes_per_sample == 4 * (64 + 32 + 32)
    assert card.forward_bytes_fixed == 4 * (64 * 32 + 1)
    assert (card.params, card.parameter_tensors) == (64 * 32, 1)


def test_a_workload_without_countable_work_is_bad_input():
    with pytest.raises(InputError, match="does no work that can be counted"):
        count_workload(
            nn.LayerNorm(4),
            lambda samples: torch.randn(samples, 4),
            loss_of=lambda module, batch: module(batch).sum(),
            name="nothing",
            family="none",
            task_input="4",
            optimizer="sgd",
        )
