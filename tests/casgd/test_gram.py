"""Tests of the packed buffer of Gram blocks and margins, and of the stored features behind it."""

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse

from precision_time.casgd.arrays import library_of, store_features, work_type
from precision_time.casgd.errors import InputError
from precision_time.casgd.gram import PackedGram, fill_gram, fill_margins, packed_gram_words
from precision_time.casgd.precision import POLICIES, round_to


def packed_from(block, sizes, weights, kind=np.float64):
    packed = PackedGram(sizes, dtype=np.dtype(kind))
    packed.buffer[:] = np.nan
    fill_gram(packed, block)
    fill_margins(packed, block, weights)
    return packed


# The shapes cover both products: block row by block row, and the whole product.
@pytest.mark.parametrize(("sizes", "n"), [([3] * 5, 11), ([16] * 8, 130), ([4] * 8, 20), ([5, 5, 5, 2], 7), ([6], 4)])
@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_matrix, scipy.sparse.csr_array])
def test_the_buffer_has_the_strictly_lower_blocks_and_the_margins(sizes, n, form):
    rng = np.random.default_rng(1)
    rows, weights = rng.normal(size=(sum(sizes), n)), rng.normal(size=n)
    packed = packed_from(form(rows), sizes, weights)
    gram = rows @ rows.T
    expected = []
    for j, size in enumerate(sizes):
        start = sum(sizes[:j])
        expected.append(gram[start : start + size, :start].ravel())
    np.testing.assert_allclose(packed.buffer, np.concatenate([*expected, rows @ weights]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("policy", ["recipe", "paper", "fp16"])
@pytest.mark.parametrize("sizes", [[1, 1], [2, 2]])
def test_a_gram_of_ones_in_16_bits_counts_them_all(policy, sizes):
    """A BF16 accumulator stops at 256 of 4096 ones, an FP16 one at 2048."""
    stored = store_features(np.ones((sum(sizes), 4096)), POLICIES[policy])
    assert stored.values.dtype.itemsize == 2
    packed = PackedGram(sizes, dtype=np.dtype(np.float32))
    block = stored.gather(slice(0, sum(sizes)))
    fill_gram(packed, block)
    fill_margins(packed, block, np.ones(4096, dtype=np.float32))
    assert (packed.gram == 4096).all()
    assert (packed.margins == 4096).all()


def test_words_are_half_of_the_gram_without_its_diagonal_blocks_and_the_margins():
    for s, b in ((1, 16), (8, 16), (32, 4)):
        assert packed_gram_words(s * b, b) == b * b * s * (s - 1) // 2
    for sizes in ([16], [16] * 8, [4] * 32, [5, 5, 5, 2], [7, 1]):
        packed = PackedGram(sizes, dtype=np.dtype(np.float32))
        assert packed.gram.size == packed_gram_words(sum(sizes), sizes[0])
        assert packed.buffer.size == packed.gram.size + sum(sizes)


def test_another_type_on_the_wire_than_in_the_product_changes_only_the_rounding():
    rng = np.random.default_rng(2)
    rows, weights = rng.normal(size=(12, 9)).astype(np.float32), rng.normal(size=9).astype(np.float32)
    wide = packed_from(rows, [4] * 3, weights, np.float64)
    np.testing.assert_array_equal(
        wide.buffer.astype(np.float32), packed_from(rows, [4] * 3, weights, np.float32).buffer
    )


@pytest.mark.parametrize("policy", ["fp64", "fp32", "recipe", "fp16"])
@pytest.mark.parametrize("order", ["slice", "rows"])
def test_gathered_rows_are_the_rounded_features_in_the_type_of_the_arithmetic(policy, order):
    features = np.random.default_rng(3).normal(size=(50, 6))
    stored = store_features(features, POLICIES[policy])
    rows = slice(5, 17) if order == "slice" else np.array([3, 49, 3, 0])
    expected = round_to(features, POLICIES[policy].x_storage)[rows]
    block = stored.gather(rows)
    assert block.dtype == work_type(POLICIES[policy])
    np.testing.assert_array_equal(block, expected)
    sparse = store_features(scipy.sparse.csr_matrix(features), POLICIES[policy]).gather(rows)
    np.testing.assert_array_equal(np.asarray(sparse), expected)


def test_bf16_features_take_two_bytes_and_stored_features_are_not_copied():
    features = np.random.default_rng(4).normal(size=(8, 3)).astype(np.float32)
    assert store_features(features, POLICIES["recipe"]).values.dtype == ml_dtypes.bfloat16
    assert store_features(features, POLICIES["fp32"]).values is features


def test_blocks_of_two_slots_live_side_by_side():
    features = np.arange(12.0).reshape(6, 2).astype(np.float32)
    stored = store_features(features, POLICIES["fp32"])
    first, second = stored.gather(np.array([0, 1]), 0), stored.gather(np.array([4, 5]), 1)
    np.testing.assert_array_equal(first, features[:2])
    np.testing.assert_array_equal(second, features[4:])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("policy", ["fp32", "recipe", "fp16"])
@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_matrix])
def test_features_that_are_not_finite_are_refused(bad, policy, form):
    features = np.ones((5, 4))
    features[3, 2] = bad
    with pytest.raises(InputError, match="NaN or infinity"):
        store_features(form(features), POLICIES[policy])


def test_features_past_the_range_of_fp16_are_named_with_their_place():
    features = np.ones((5, 4))
    features[3, 2] = 7e4
    with pytest.raises(InputError, match=r"range of fp16.*\(3, 2\): 70000"):
        store_features(features, POLICIES["fp16"])
    store_features(features, POLICIES["recipe"])


def test_the_library_of_an_array_is_recognised():
    assert library_of(np.ones((2, 2))) == "numpy"
    assert library_of(scipy.sparse.csr_array(np.eye(2))) == "scipy"
    with pytest.raises(InputError, match="tocsr"):
        library_of(scipy.sparse.csc_matrix(np.eye(2)))
    with pytest.raises(InputError, match="list"):
        library_of([[1.0]])
