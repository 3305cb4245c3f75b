import math
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from precision_time.predictor.walking import walk_module as walking
from precision_time.predictor.walking.walk_module import count_workload, walk_module
from precision_time.storage.errors import InputError
from precision_time.tasks.workloads import LanguageModel, build_workload, count_card


def sum_output(module, batch):
    return module(batch).sum()


def walk(module, *shape, loss_of=sum_output, policy="fp32"):
    return walk_module(module, lambda samples: torch.randn(samples, *shape), loss_of=loss_of)[policy]


def flops(walk, phase, *families):
    return walk.total("flops", phase=phase, families=families or None)


@cache
def build_shapes(name):
    with torch.device("meta"):  # drawing random weights takes long
        return build_workload(name)


@cache
def card_of(name):
    return count_card(build_shapes(name), name=name)


def walk_named(name):
    workload = build_shapes(name)
    return walk_module(
        workload.module, lambda samples: workload.make_batch(samples, "cpu"), loss_of=workload.compute_loss
    )


# Stages of ResNet-50: (blocks, width, side of the images inside), each block 1 x 1, 3 x 3 and 1 x 1 convolutions.
def resnet50_products():
    products, channels, side = 112 * 112 * 64 * 3 * 49, 64, 56
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            stride = 2 if width > 64 and block == 0 else 1
            out = side // stride
            products += side**2 * channels * width + out**2 * 9 * width**2 + out**2 * width * 4 * width
            if block == 0:
                products += out**2 * channels * 4 * width
            channels, side = 4 * width, out
    return products + 2048 * 1000


def transformer_products(*, length, width, layers, vocabulary):
    linear = layers * 12 * width**2 * length
    attention = layers * 2 * length**2 * width
    return linear + attention + length * width * vocabulary


@pytest.mark.parametrize(
    ("name", "params", "products", "published"),
    [
        ("resnet50", 25_557_032, resnet50_products(), 8.178e9),
        (
            "bert_base",
            109_514_298,
            # and the layer before the masked tokens' head
            transformer_products(length=128, width=768, layers=12, vocabulary=30522) + 128 * 768**2,
            28.499e9,
        ),
        (
            "gpt2",
            124_439_808,
            transformer_products(length=1024, width=768, layers=12, vocabulary=50257),
            291.65e9,
        ),
    ],
)
def test_hand_sums_of_products_and_published_counts_are_met(name, params, products, published):
    card = card_of(name)
    assert card.params == params
    assert card.forward_flops_per_sample == 2 * products
    assert card.forward_flops_per_sample == pytest.approx(published, rel=1e-4)


def test_resnet50_backward_leaves_out_the_gradient_of_the_image():
    card = card_of("resnet50")
    stem = 2 * 112 * 112 * 64 * 3 * 7 * 7
    assert card.backward_flops_per_sample == 2 * card.forward_flops_per_sample - stem


def test_attention_is_the_part_of_gpt2_that_grows_with_the_square_of_its_length():
    card = card_of("gpt2")
    attention = 12 * 4 * 12 * 1024 * 1024 * 64
    assert card.attention_flops_share * card.forward_flops_per_sample == pytest.approx(attention)
    # Two gradients for every product, and 2.5 times the attention: its kernel computes the scores again.
    assert card.backward_flops_per_sample == pytest.approx(2 * card.forward_flops_per_sample + attention / 2)


def test_the_same_products_are_narrow_under_autocast_and_wide_without_it():
    walks = walk_named("bert_mini")
    assert walks["fp32"].total("flops", number_format="narrow") == 0
    assert walks["amp"].total("flops", number_format="wide") == 0
    assert walks["amp"].total("flops") == walks["fp32"].total("flops")
    assert walks["amp"].total("bytes") < walks["fp32"].total("bytes")
    assert walks["amp"].total("bytes", families=["cast"]) > 0 == walks["fp32"].total("bytes", families=["cast"])


def test_the_second_policy_counts_as_if_it_came_first(monkeypatch):
    module = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    second = walk(module, 16, policy="amp")
    monkeypatch.setattr(walking, "POLICIES", ("amp",))
    assert walk(module, 16, policy="amp") == second


def test_a_line_through_two_batches_gives_a_third(monkeypatch):
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    low = walk(module, 3, 8, 8)
    monkeypatch.setattr(walking, "BATCHES", (4, 8))
    high = walk(module, 3, 8, 8)
    for key, count in low.counts.items():
        other = high.counts[key]
        for quantity in ("flops", "bytes", "fused"):
            at_8 = getattr(count, quantity) * 8 + getattr(count, f"{quantity}_fixed")
            assert at_8 == pytest.approx(getattr(other, quantity) * 8 + getattr(other, f"{quantity}_fixed"))
    assert low.saved * 8 + low.saved_fixed == high.saved * 8 + high.saved_fixed


def test_a_longer_language_model_is_scaled_from_a_shorter_one():
    module = LanguageModel(vocabulary=512, positions=128, width=64, layers=2, heads=4, causal=True)

    def walk_at(length):
        return walk_module(
            module,
            lambda samples: torch.zeros(samples, length, dtype=torch.long),
            loss_of=lambda module, words: F.cross_entropy(module(words).flatten(0, 1), words.flatten()),
        )["fp32"]

    grown, longer = walk_at(64).resize(2.0, attention_factor=4.0), walk_at(128)
    for phase in ("forward", "backward"):
        assert flops(grown, phase) == flops(longer, phase)
    assert grown.scores == longer.scores


@pytest.mark.parametrize("groups", [1, 4, 32])
def test_groups_divide_the_flops_of_a_convolution_in_both_directions(groups):
    module = nn.Sequential(nn.Conv2d(32, 32, 1), nn.Conv2d(32, 64, 3, groups=groups, bias=False))
    counted = walk(module, 32, 8, 8)
    first = 2 * 8 * 8 * 32 * 32
    second = 2 * 6 * 6 * 64 * (32 // groups) * 9
    assert flops(counted, "forward") == first + second
    # The first layer computes the gradient of its weight alone, not of its input.
    assert flops(counted, "backward") == first + 2 * second
    family = {1: "convolution", 4: "grouped", 32: "depthwise"}[groups]
    assert flops(counted, "forward", family) == second + (first if groups == 1 else 0)


def test_a_frozen_layer_takes_no_weight_gradient():
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    module[1].requires_grad_(False)
    counted = walk(module, 16)
    assert flops(counted, "forward") == flops(counted, "backward") == 2 * 2 * 16 * 16
    assert counted.gradient_bytes == 4 * (16 * 16 + 16)


class Views(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, inputs):
        turned = inputs.view(-1, 8, 8).transpose(1, 2).reshape(-1, 4, 16).flatten(1).view(-1, 8, 8)
        return turned.detach()[:, 0] @ self.weight.expand(3, 8, 8)[0]


def test_views_cost_neither_bytes_nor_operations():
    counted = walk(Views(), 64)
    # One copy that a reshape of a transposed matrix needs, the product of one row of a sample, the sum.
    assert counted.total("ops", phase="forward") == 3
    assert counted.total("bytes", phase="forward") == 4 * (2 * 64 + 2 * 8 + 8)
    assert counted.total("bytes_fixed", phase="forward") == 4 * (64 + 1)


def test_an_expanded_tensor_and_a_gather_read_only_what_they_touch():
    counted = walk_module(
        nn.Embedding(1000, 4),
        lambda samples: torch.zeros(samples, 3, dtype=torch.long),
        loss_of=lambda module, words: (module(words) + torch.ones(1).expand(*words.shape, 4)).sum(),
    )["fp32"]
    embedding = 3 * 8 + 2 * 12 * 4
    addition, total = 2 * 12 * 4, 12 * 4
    assert counted.total("bytes", phase="forward") == embedding + addition + total
    # Written ones, the one read by the addition, the sum.
    assert counted.total("bytes_fixed", phase="forward") == 4 + 4 + 4
    assert counted.total("fused", phase="forward") == embedding


def test_walking_leaves_the_module_its_numbers_and_its_mode():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    weight = module[0].weight.clone()
    torch.manual_seed(3)
    expected = torch.randn(4, 4), torch.randn(2, 4), torch.randn(1)
    torch.manual_seed(3)
    walk_module(module, lambda samples: torch.zeros(samples, 4), loss_of=sum_output)
    assert torch.equal(torch.randn(4, 4), expected[0])
    assert not module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(module[1].running_mean, torch.zeros(4))
    assert torch.equal(module[0].weight, weight)


def test_a_module_without_numbers_is_walked_by_its_shapes():
    with torch.device("meta"):
        shapes = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    real = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    assert walk(shapes, 4, policy="amp") == walk(real, 4, policy="amp")
    assert shapes[0].weight.is_meta


class LooksAtValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.layer(inputs) if inputs.sum().item() < 1e9 else inputs


def test_a_module_that_looks_at_values_is_run_for_real():
    assert flops(walk(LooksAtValues(), 4), "forward") == 2 * 4 * 4
    with pytest.raises(InputError, match="looks at values"):
        walk(LooksAtValues().to("meta"), 4)


class FillsACache(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.cache = None

    def forward(self, inputs):
        if self.cache is None:
            self.cache = torch.ones(4) * 2
        return self.layer(inputs) * self.cache


def test_a_cache_filled_by_the_first_call_is_not_a_difference_between_batches():
    counted = walk(FillsACache(), 4)
    assert counted.total("ops", phase="forward") == 3
    assert counted.roof_forward[-1] == counted.total("bytes", phase="forward")


def test_old_weight_norm_and_shared_weights_can_be_walked():
    shared = nn.Linear(8, 8)
    module = nn.Sequential(shared, torch.nn.utils.weight_norm(nn.Linear(8, 8)), shared)
    counted = walk(module, 8)
    assert flops(counted, "forward") == 3 * 2 * 8 * 8
    assert counted.gradient_tensors == 2 + 3


def test_bytes_split_into_a_part_per_sample_and_a_fixed_one():
    card = count_workload(
        nn.Linear(64, 32, bias=False),
        lambda samples: torch.randn(samples, 64),
        loss_of=sum_output,
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


def test_a_roof_waits_for_the_products_or_for_the_traffic_operation_by_operation():
    counted = walk(nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU()), 512)
    product, moved = 2 * 512 * 512, 4 * 2 * 512
    relu_and_sum = 4 * (2 * 512 + 512)
    assert counted.roof_forward == tuple(
        max(product / ridge, moved) + relu_and_sum for ridge in (4.0, 16.0, 64.0, 256.0, 1024.0)
    )


def test_shares_of_narrow_and_aligned_products_leave_out_the_batch():
    counted = walk(nn.Sequential(nn.Linear(64, 100, bias=False), nn.Linear(100, 32, bias=False)), 64)
    first, second = 64 * 100, 100 * 32
    # The first has no gradient of its input.
    total = 2 * first + 3 * second
    assert counted.narrow_flops_share == pytest.approx(3 * second / total)
    assert counted.aligned_flops_share == 0.0
    assert walk(nn.Linear(64, 72), 64).aligned_flops_share == 1.0


def test_a_module_without_trained_parameters_is_bad_input():
    with pytest.raises(InputError, match="nothing to train"):
        walk(nn.Linear(4, 4).requires_grad_(False), 4)


def test_a_lazy_module_without_shapes_is_bad_input():
    with pytest.raises(InputError, match="cannot be walked yet"):
        walk(nn.LazyLinear(4), 4)


def test_a_workload_without_countable_work_is_bad_input():
    with pytest.raises(InputError, match="does no work that can be counted"):
        count_workload(
            nn.LayerNorm(4),
            lambda samples: torch.randn(samples, 4),
            loss_of=sum_output,
            name="nothing",
            family="none",
            task_input="4",
            optimizer="sgd",
        )


def test_a_failing_walk_leaves_torch_as_it_was():
    def fail(module, batch):
        module(batch)
        raise ArithmeticError("the loss is broken")

    with pytest.raises(ArithmeticError):
        walk(nn.Linear(4, 4), 4, loss_of=fail, policy="amp")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.softmax(torch.randn(2, 2).bfloat16(), -1).dtype == torch.bfloat16
    assert not math.isnan(F.dropout(torch.ones(8), 0.5).sum().item())
