import pytest
import torch
import torch.nn.functional as F
from torch import nn

from precision_time.predictor.walking.cuda_autocast import APPEND_DTYPE, FP32, LOWER, PROMOTE, SET_DTYPE, cuda_autocast
from precision_time.predictor.walking.walk_module import walk_module

WIDE, NARROW = torch.float32, torch.bfloat16
HALF = torch.ones(4, 4, dtype=NARROW)
FULL = torch.ones(4, 4)

RESULTS = {
    "linear": (lambda: F.linear(FULL, FULL), NARROW),
    "matmul": (lambda: FULL @ FULL, NARROW),
    "einsum": (lambda: torch.einsum("ij,jk->ik", FULL, FULL), NARROW),
    "convolution": (lambda: F.conv1d(FULL[None], FULL[:, :, None]), NARROW),
    "convolution with named padding": (lambda: F.conv1d(FULL[None], FULL[:, :, None], padding="same"), NARROW),
    "prelu": (lambda: F.prelu(FULL, torch.ones(1)), NARROW),
    "mv": (lambda: torch.mv(FULL, FULL[0]), NARROW),
    "addmv": (lambda: torch.addmv(FULL[0], FULL, FULL[0]), NARROW),
    "rnn cell": (lambda: torch.rnn_tanh_cell(FULL, FULL, FULL, FULL), NARROW),
    "layer norm": (lambda: F.layer_norm(HALF, (4,)), WIDE),
    "group norm": (lambda: F.group_norm(HALF[None], 2), WIDE),
    "rms norm": (lambda: F.rms_norm(HALF, (4,)), WIDE),
    "softmax": (lambda: F.softmax(HALF, -1), WIDE),
    "softmax in a format asked for": (lambda: F.softmax(HALF, -1, dtype=NARROW), NARROW),
    "log softmax": (lambda: F.log_softmax(HALF, -1), WIDE),
    "cross entropy": (lambda: F.cross_entropy(HALF, torch.zeros(4, dtype=torch.long)), WIDE),
    "binary cross entropy": (lambda: F.binary_cross_entropy_with_logits(HALF, HALF), WIDE),
    "mse": (lambda: F.mse_loss(HALF, HALF), WIDE),
    "pow": (lambda: HALF**2, WIDE),
    "exp": (lambda: HALF.exp(), WIDE),
    "rsqrt": (lambda: HALF.rsqrt(), WIDE),
    "sum": (lambda: HALF.sum(), WIDE),
    "sum along": (lambda: HALF.sum(0), WIDE),
    "sum of integers": (lambda: torch.ones(3, dtype=torch.int64).sum(), torch.int64),
    "cumsum": (lambda: HALF.cumsum(0), WIDE),
    "prod": (lambda: HALF.prod(), WIDE),
    "norm": (lambda: HALF.norm(), WIDE),
    "norm along": (lambda: HALF.norm(dim=0), WIDE),
    "cosine similarity": (lambda: F.cosine_similarity(HALF, HALF), WIDE),
    "upsampling": (lambda: F.interpolate(HALF[None, None], scale_factor=2), WIDE),
    "cat promotes": (lambda: torch.cat([FULL, HALF]), WIDE),
    "cat of one format": (lambda: torch.cat([HALF, HALF]), NARROW),
    "stack promotes": (lambda: torch.stack([HALF, FULL]), WIDE),
    "addcmul promotes": (lambda: torch.addcmul(HALF, HALF, FULL), WIDE),
    "dot promotes": (lambda: torch.dot(HALF[0], FULL[0]), WIDE),
    "tensordot promotes": (lambda: torch.tensordot(HALF, FULL, 1), WIDE),
    "scatter_add promotes": (lambda: HALF.scatter_add(0, torch.zeros(4, 4, dtype=torch.long), FULL), WIDE),
    "mean follows": (lambda: HALF.mean(), NARROW),
    "pooling follows": (lambda: F.max_pool2d(HALF[None, None], 2), NARROW),
    "batch norm follows": (lambda: F.batch_norm(HALF, None, None, FULL[0], FULL[0], training=True), NARROW),
    "gelu follows": (lambda: F.gelu(HALF), NARROW),
    "padding follows": (lambda: F.pad(HALF[None], (1, 1), mode="reflect"), NARROW),
    "double stays": (lambda: FULL.double().exp(), torch.float64),
}


@pytest.mark.parametrize("case", RESULTS)
def test_results_have_the_format_that_cuda_gives_them(case):
    call, expected = RESULTS[case]
    with cuda_autocast(), torch.autocast("cpu", dtype=NARROW):
        assert call().dtype == expected


def test_the_lists_name_every_operation_that_torch_registered_for_cuda():
    registered = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
    }
    listed = [*LOWER, *FP32, *SET_DTYPE, *PROMOTE, *APPEND_DTYPE]
    assert len(listed) == len(set(listed))
    # behind the convolutions; no operation of a CPU reaches them
    assert registered - set(listed) == {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert set(listed) <= registered


def test_autocast_on_a_cpu_is_itself_again_outside():
    def ask():
        with torch.autocast("cpu", dtype=NARROW):
            return [F.softmax(HALF, -1).dtype, F.layer_norm(HALF, (4,)).dtype, torch.mv(FULL, FULL[0]).dtype]

    before = ask()
    with cuda_autocast():
        assert ask() == [WIDE, WIDE, NARROW]
    assert ask() == before == [NARROW, NARROW, WIDE]


def test_casts_stay_away_where_autocast_is_off():
    with cuda_autocast(), torch.autocast("cpu", dtype=NARROW):
        with torch.autocast("cpu", enabled=False):
            assert (FULL @ FULL).dtype == WIDE
        assert (FULL @ FULL).dtype == NARROW


def test_a_weight_is_cast_once_until_forgotten_and_its_gradient_is_wide():
    weight = nn.Parameter(torch.ones(4, 4))
    with cuda_autocast() as casts, torch.autocast("cpu", dtype=NARROW):
        first = casts.cast(weight, NARROW)
        assert casts.cast(weight, NARROW) is first
        assert casts.cast(FULL, NARROW) is not casts.cast(FULL, NARROW)
        F.linear(FULL, weight).sum().backward()
        casts.forget()
        assert casts.cast(weight, NARROW) is not first
    assert weight.grad.dtype == WIDE


def test_the_cast_traffic_of_one_layer_is_that_of_its_inputs_weights_and_gradients():
    walk = walk_module(
        nn.Linear(64, 32),
        lambda samples: torch.randn(samples, 64),
        loss_of=lambda module, batch: module(batch).sum(),
    )["amp"]
    weights = 64 * 32 + 32
    down = walk.counts["forward", "cast", "narrow"]
    assert (down.bytes, down.bytes_fixed, down.ops) == (6 * 64, 6 * weights, 3)
    # Gradients of weight and bias come back to fp32.
    up = walk.counts["backward", "cast", "wide"]
    assert (up.bytes, up.bytes_fixed, up.ops) == (0, 6 * weights, 2)
