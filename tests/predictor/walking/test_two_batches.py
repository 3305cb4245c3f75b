import torch
from torch import nn

from precision_time.predictor.walking.walk_module import walk_module


def walk(module, width, policy="fp32"):
    return walk_module(
        module, lambda samples: torch.randn(samples, width), loss_of=lambda module, batch: module(batch).sum()
    )[policy]


def test_saved_bytes_are_those_that_the_backward_pass_needs():
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32))
    wide = walk(module, 16)
    # The ReLU's result (the norm's input too), and mean and deviation of the norm; the input is the batch's.
    assert (wide.saved, wide.saved_fixed) == (4 * 32 + 8, 0)
    half = walk(module, 16, policy="amp")
    # A 16-bit copy of the input, the ReLU's result, its fp32 copy for the norm, mean and deviation.
    assert half.saved == 2 * 16 + 2 * 32 + 4 * 32 + 8


def test_16_bit_copies_of_weights_are_saved_once_for_all_samples():
    module = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False))
    half = walk(module, 16, policy="amp")
    # The first layer computes no gradient of its input and needs no weight for it.
    assert (half.saved, half.saved_fixed) == (2 * 16 + 2 * 32, 2 * 32 * 8)


def test_the_peak_is_at_the_turn_for_many_samples_and_at_the_gradients_for_few():
    walked = walk(nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU()), 16)
    # ReLU's result and the gradient before it; the loss and the gradient of that.
    assert (walked.peak, walked.peak_fixed) == (4 * (32 + 32), 8)
    # The gradient of the product, the loss and its gradient, the gradient of the weight.
    assert (walked.peak_small, walked.peak_small_fixed) == (4 * 32, 8 + 4 * 16 * 32)


def test_gradients_become_ready_from_the_last_layer_to_the_first():
    walked = walk(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3))), 64)
    assert (walked.gradient_bytes, walked.gradient_tensors) == (3 * 4 * 64 * 64, 3)
    # Every product of a sample moves 2 x 64 values, more than its 2 x 64 x 64 FLOPs take at 64 per byte. The last
    # layer's read the gradient of a sum, one value, so move half; the first layer has one product in place of two.
    moved = [256, 256, 512, 512, 512]
    shares = [sum(moved[:2]) / sum(moved), sum(moved[:4]) / sum(moved), 1.0]
    assert walked.ready == (*[shares[0]] * 5, *[shares[1]] * 5, *[shares[2]] * 6)


def test_a_shared_weight_is_ready_once_at_its_last_use():
    shared = nn.Linear(64, 64, bias=False)
    walked = walk(nn.Sequential(shared, nn.ReLU(), shared), 64)
    assert (walked.gradient_bytes, walked.gradient_tensors) == (4 * 64 * 64, 1)
    assert walked.ready[0] == walked.ready[-1] == 1.0


class Grows(nn.Module):
    """Takes one more step for every two samples, so the passes at two batch sizes do not match."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, inputs):
        for _ in range(len(inputs) // 2):
            inputs = self.layer(inputs)
        return inputs


def test_where_the_operations_differ_the_large_batch_stands_for_its_samples():
    walked = walk(Grows(), 8)
    product, total = 4 * (8 + 8) + 4 * 64 / 4, 4 * 8 + 4 / 4
    assert walked.roof_forward[-1] == 2 * product + total
