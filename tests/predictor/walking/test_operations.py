import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from precision_time.predictor.walking.operation_recorder import OperationRecorder
from precision_time.predictor.walking.operations import find_rule
from precision_time.predictor.walking.walk_module import walk_module

ATEN = torch.ops.aten


def record(call, *tensors):
    """The operations of ``call(*tensors)`` on fake tensors."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
        with OperationRecorder(fakes) as recorder:
            call(*fakes)
    return recorder.operations


def only(operations):
    assert len(operations) == 1
    return operations[0]


def walk(module, make_batch):
    return walk_module(module, make_batch, loss_of=lambda module, batch: module(batch).sum())["fp32"]


def draw(*shape):
    return lambda samples: torch.randn(samples, *shape)


def look_up_three(samples):
    return torch.zeros(samples, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("layer", "family", "pair"),
    [
        # (input, output) channels that one multiply-add joins
        (nn.Conv2d(64, 64, 3, padding=1, groups=32, bias=False), "grouped", 64 * 2),
        (nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False), "depthwise", 64),
        (nn.Conv2d(64, 128, 3, padding=1, groups=64, bias=False), "depthwise", 128),
        (nn.ConvTranspose2d(64, 64, 3, padding=1, bias=False), "convolution", 64 * 64),
        (nn.ConvTranspose2d(64, 64, 3, padding=1, groups=32, bias=False), "grouped", 64 * 2),
        (nn.ConvTranspose2d(64, 64, 3, padding=1, groups=64, bias=False), "depthwise", 64),
    ],
)
def test_convolutions_respect_their_groups_in_every_direction(layer, family, pair):
    counted = walk(nn.Sequential(nn.Conv2d(64, 64, 1, bias=False), layer), draw(64, 8, 8))
    first, second = 2 * 8 * 8 * 64 * 64, 2 * 8 * 8 * 9 * pair
    expected = second + (first if family == "convolution" else 0)
    assert counted.total("flops", phase="forward", families=[family]) == expected
    assert counted.total("flops", phase="backward") == first + 2 * second


def test_a_strided_transposed_convolution_counts_by_its_input():
    counted = walk(nn.ConvTranspose2d(8, 16, 4, stride=2, padding=1), draw(8, 5, 5))
    assert counted.total("flops", phase="forward") == 2 * 5 * 5 * 8 * 16 * 16
    assert counted.total("flops", phase="backward") == counted.total("flops", phase="forward")


MATRIX, SQUARE, VECTOR = torch.ones(3, 5), torch.ones(3, 3), torch.ones(5)
BATCH = torch.ones(2, 3, 5)


@pytest.mark.parametrize(
    ("call", "tensors", "flops", "dimensions"),
    [
        (torch.mm, (MATRIX, torch.ones(5, 7)), 2 * 3 * 7 * 5, (3, 7, 5)),
        (torch.addmm, (torch.ones(7), MATRIX, torch.ones(5, 7)), 2 * 3 * 7 * 5, (3, 7, 5)),
        (torch.bmm, (BATCH, torch.ones(2, 5, 7)), 2 * 2 * 3 * 7 * 5, (3, 7, 5)),
        (torch.baddbmm, (torch.ones(2, 3, 7), BATCH, torch.ones(2, 5, 7)), 2 * 2 * 3 * 7 * 5, (3, 7, 5)),
        (torch.addbmm, (torch.ones(3, 7), BATCH, torch.ones(2, 5, 7)), 2 * 2 * 3 * 7 * 5, (3, 7, 5)),
        (torch.mv, (MATRIX, VECTOR), 2 * 3 * 5, (3, 5)),
        (torch.dot, (VECTOR, VECTOR), 2 * 5, (5,)),
        (torch.addr, (MATRIX, torch.ones(3), VECTOR), 2 * 3 * 5, (3, 5)),
    ],
)
def test_products_take_two_flops_per_multiply_add(call, tensors, flops, dimensions):
    operation = only(record(call, *tensors))
    assert (operation.flops, operation.dimensions, operation.family) == (flops, dimensions, "dense")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_grouped_product_gives_every_row_to_one_group(transposed, dtype):
    rows, inner, outer, groups = 96, 32, 48, 4
    ends = torch.tensor([16, 48, 64, 96], dtype=torch.int32)
    tokens, weights = torch.ones(rows, inner, dtype=dtype), torch.ones(groups, inner, outer, dtype=dtype)
    gradient = torch.ones(rows, outer, dtype=dtype)
    if transposed:  # the weights' gradient
        operation = only(record(lambda a, b, c: torch._grouped_mm(a.t(), b, offs=c), tokens, gradient, ends))
    else:
        operation = only(record(lambda a, b, c: torch._grouped_mm(a, b, offs=c), tokens, weights, ends))
    assert operation.flops == 2 * rows * inner * outer
    assert (operation.family, operation.narrow) == ("dense", dtype == torch.bfloat16)


def test_einsum_and_bilinear_count_as_their_products():
    operations = record(lambda a, b: torch.einsum("bij,bjk->bik", a, b), BATCH, torch.ones(2, 5, 7))
    assert sum(operation.flops for operation in operations) == 2 * 2 * 3 * 7 * 5
    operations = record(F.bilinear, torch.ones(4, 3), torch.ones(4, 5), torch.ones(7, 3, 5))
    assert sum(operation.flops for operation in operations) == 2 * 4 * 3 * 5 * 7


@pytest.mark.parametrize(
    ("call", "family"),
    [
        (lambda x: F.layer_norm(x, (8,)), "normalization"),
        (lambda x: F.batch_norm(x, None, None, training=True), "normalization"),
        (lambda x: F.softmax(x, -1), "softmax"),
        (lambda x: F.mse_loss(x, x[:1].expand(8, 8)), "softmax"),
        (F.gelu, "elementwise"),
        (lambda x: x + 1, "elementwise"),
        (lambda x: torch.where(x > 0, x, 0), "elementwise"),
        (lambda x: x.sum(), "reduction"),
        (lambda x: x.amax(0), "reduction"),
        (lambda x: x.topk(2), "reduction"),
        (lambda x: F.max_pool2d(x[None], 2), "pooling"),
        (lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"), "pooling"),
        (lambda x: x[torch.zeros(2, dtype=torch.long)], "gather"),
        (lambda x: x.scatter_add(0, torch.zeros(8, 8, dtype=torch.long), x), "gather"),
        (lambda x: torch.cat([x, x]), "copy"),
        (lambda x: F.pad(x, (1, 1)), "copy"),
        (lambda x: x.t().contiguous(), "copy"),
        (lambda x: x.half(), "cast"),
        (lambda x: torch.empty(8, 8, dtype=torch.half).copy_(x), "cast"),
    ],
)
def test_operations_belong_to_families(call, family):
    assert record(call, torch.ones(8, 8))[-1].family == family


def test_a_backward_operation_belongs_where_its_forward_does():
    for name, family in (
        ("native_layer_norm_backward", "normalization"),
        ("_log_softmax_backward_data", "softmax"),
        ("max_pool2d_with_indices_backward", "pooling"),
        ("embedding_dense_backward", "gather"),
        ("threshold_backward", "elementwise"),
        ("slice_backward", "copy"),
    ):
        assert find_rule(getattr(ATEN, name).default).family == family


def test_bytes_are_read_once_of_each_distinct_input_and_written_once():
    square = only(record(lambda x: x * x, torch.ones(8, 8)))
    assert square.bytes == 4 * (64 + 64)
    expanded = only(record(lambda x, y: x * y.expand(8, 8), torch.ones(8, 8), torch.ones(1, 8)))
    assert expanded.bytes == 4 * (64 + 8 + 64)
    filled = only(record(lambda x: x.zero_(), torch.ones(8, 8)))
    assert filled.bytes == 4 * 64
    added = only(record(lambda x, y: x.add_(y), torch.ones(8, 8), torch.ones(8, 8)))
    assert added.bytes == 4 * 3 * 64


def test_only_products_and_gathers_stay_when_a_compiler_merges_the_rest():
    product = only(record(torch.mm, MATRIX, torch.ones(5, 7)))
    assert product.fused == product.bytes == 4 * (15 + 35 + 21)
    gathered = only(record(lambda x, i: x[i], torch.ones(100, 8), torch.zeros(3, dtype=torch.long)))
    assert gathered.fused == gathered.bytes == 4 * (24 + 24) + 8 * 3
    assert only(record(F.relu, MATRIX)).fused == 0


def test_a_cast_counts_in_the_format_of_its_result_and_others_in_that_of_their_input():
    full, half = torch.ones(4, 4), torch.ones(4, 4).bfloat16()
    assert only(record(lambda x: x.bfloat16(), full)).narrow
    assert not only(record(lambda x: x.float(), half)).narrow
    assert only(record(lambda x: x.sum(dtype=torch.float32), half)).narrow
    assert not only(record(lambda x: x + 1, torch.ones(3, dtype=torch.long))).narrow


@pytest.mark.parametrize("hot", [1, 5])
def test_a_bag_reads_a_row_of_its_table_for_each_index_and_writes_their_sum(hot):
    layer, bags = nn.EmbeddingBag(1000, 8, mode="sum"), torch.zeros(3, hot, dtype=torch.long)
    bag = record(lambda table, indices: F.embedding_bag(indices, table, mode="sum"), layer.weight, bags)[-1]
    assert (bag.name, bag.family) == ("aten::_embedding_bag", "gather")
    # beside rows and sums: indices, offsets, and the kernel's notes on the bags for the backward pass
    noted = bag.bytes - 4 * 8 * (3 * hot + 3)
    assert 0 <= noted <= 8 * (3 * hot + 3) + 8 * (3 * hot + 3 * 3)
    assert bag.fused == bag.bytes


def test_a_bag_that_looks_everything_up_reads_its_table_once():
    table, bags = torch.ones(10, 8), torch.zeros(3, 50, dtype=torch.long)
    bag = record(lambda table, indices: F.embedding_bag(indices, table, mode="sum"), table, bags)[-1]
    assert bag.bytes < 4 * 8 * (10 + 3) + 8 * (3 * 50 + 3) + 8 * (3 * 50 + 3 * 3) + 1


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_the_sparse_gradient_of_a_table_has_no_bytes(table):
    class Net(nn.Module):
        def __init__(self, *, sparse):
            super().__init__()
            self.table = table(1000, 8, sparse=sparse)
            self.top = nn.Linear(8, 16, bias=False)

        def forward(self, words):
            return self.top(self.table(words))

    dense, few = (walk(Net(sparse=sparse), look_up_three) for sparse in (False, True))
    assert dense.gradient_bytes == 4 * (1000 * 8 + 16 * 8)
    assert few.gradient_bytes == 4 * 16 * 8
    assert few.gradient_tensors == dense.gradient_tensors == 2


def test_a_sparse_gradient_of_an_embedding_writes_no_table():
    walked = walk(nn.Embedding(1000, 8, sparse=True), look_up_three)
    assert walked.total("bytes_fixed", phase="backward") < 4 * 1000 * 8


def test_a_product_without_a_rule_is_named_instead_of_counted_as_nothing():
    with pytest.warns(RuntimeWarning, match="_weight_int8pack_mm has no rule"):
        operations = record(
            torch._weight_int8pack_mm,
            torch.ones(4, 8).bfloat16(),
            torch.ones(6, 8).to(torch.int8),
            torch.ones(6).bfloat16(),
        )
    assert operations[-1].flops == 0
