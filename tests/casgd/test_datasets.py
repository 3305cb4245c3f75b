import bz2
import json
import multiprocessing
import os
import time

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import dump_svmlight_file
from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor

from precision_time.casgd import column_cache
from precision_time.casgd.column_cache import convert_libsvm, map_labels, open_cache, split_columns
from precision_time.casgd.datasets import Standardiser, load_builtin, synth
from precision_time.casgd.errors import InputError
from precision_time.casgd.objectives import find_objective


def _write_libsvm(path, *, m=200, n=11, density=0.4, seed=0, classes=(0, 1)):
    rng = np.random.default_rng(seed)
    values = sparse.random(m, n, density=density, random_state=rng, format="csr").astype(np.float32)
    labels = np.where(np.arange(m) % 3 == 0, classes[1], classes[0])
    dump_svmlight_file(values.astype(np.float64), labels, str(path), zero_based=False)
    return values, labels


@pytest.mark.parametrize("layout", ["dense", "csr"])
@pytest.mark.parametrize("blocks", [1, 4, 99])
def test_the_columns_of_all_ranks_together_are_the_matrix_in_the_file(tmp_path, layout, blocks):
    values, labels = _write_libsvm(tmp_path / "a.txt")
    cache = convert_libsvm(
        tmp_path / "a.txt", tmp_path / "cache", n_features=11, layout=layout, blocks=blocks, chunk_bytes=500
    )
    assert cache.shape == (200, 11)
    assert np.array_equal(cache.targets(), np.where(labels == 1, 1.0, -1.0))
    for size in (1, 2, 3, 11):
        parts = [cache.features(rank=rank, size=size) for rank in range(size)]
        assert all(part.shape[1] >= 1 and part.dtype == np.float32 for part in parts)
        if layout == "csr":
            assert all(part.format == "csr" and part.has_sorted_indices for part in parts)
            parts = [part.toarray() for part in parts]
        assert np.array_equal(np.hstack(parts), values.toarray())


def test_dense_columns_of_one_block_are_mapped_not_copied(tmp_path):
    _write_libsvm(tmp_path / "a.txt", n=8)
    cache = convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=8, blocks=2)
    assert isinstance(cache.features(rank=1, size=2), np.memmap)


@pytest.mark.parametrize("suffix", [".bz2", ".xz", ".gz"])
def test_compressed_text_is_read(tmp_path, suffix):
    values, _ = _write_libsvm(tmp_path / "a.txt")
    packed = tmp_path / f"a{suffix}"
    with column_cache._OPENERS[suffix](packed, "wb") as out:
        out.write((tmp_path / "a.txt").read_bytes())
    cache = convert_libsvm(packed, tmp_path / "cache", n_features=11, chunk_bytes=1000)
    assert np.array_equal(cache.features(), values.toarray())


def test_empty_last_columns_of_a_file_are_kept(tmp_path):
    (tmp_path / "a.txt").write_text("1 1:0.5 # a comment\n\n-1 2:0.25")
    cache = convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=5)
    assert np.array_equal(cache.features(), [[0.5, 0, 0, 0, 0], [0, 0.25, 0, 0, 0]])


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("1 12:3", "n_features"),
        ("1 0:3", "0"),
        ("1 1:abc", "abc"),
        ("1 1:nan", "NaN"),
        ("1 2:1 1:1", "sorted"),
        ("x 1:1", "x 1:1"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_and_leaves_no_cache(tmp_path, line, cause):
    (tmp_path / "a.txt").write_text("1 1:1\n-1 1:2\n" * 50 + line + "\n" + "1 1:1\n" * 50)
    with pytest.raises(InputError, match="line 101 ") as raised:
        convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=11, chunk_bytes=64)
    assert cause in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache.lock", "a.txt"]


def test_a_value_too_large_for_the_cache_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("1 1:1e39\n-1 1:2\n")
    with pytest.raises(InputError, match="too large"):
        convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=1)
    assert convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=1, dtype="float64").features()[0] == 1e39


def test_a_second_conversion_opens_the_first_and_a_changed_source_or_option_is_refused(tmp_path, monkeypatch):
    _write_libsvm(tmp_path / "a.txt")
    convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=11)
    with monkeypatch.context() as patch:
        patch.setattr(column_cache, "_write", lambda *_, **__: pytest.fail("converted twice"))
        convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=11)
    with pytest.raises(InputError, match="dtype differ"):
        convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=11, dtype="float64")
    os.utime(tmp_path / "a.txt", (1, 1))
    with pytest.raises(InputError, match="changed_ns differ"):
        convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=11)


def _convert_slowly(source, target, started):
    parse = column_cache._parse

    def slow(*arguments, **options):
        started.set()
        time.sleep(0.05)
        return parse(*arguments, **options)

    column_cache._parse = slow
    convert_libsvm(source, target, n_features=11, chunk_bytes=100)


def test_a_killed_conversion_leaves_no_cache_and_the_next_one_clears_up(tmp_path):
    values, _ = _write_libsvm(tmp_path / "a.txt")
    context = multiprocessing.get_context("fork")
    started = context.Event()
    child = context.Process(target=_convert_slowly, args=(tmp_path / "a.txt", tmp_path / "cache", started))
    child.start()
    assert started.wait(30)
    child.kill()
    child.join()
    assert not (tmp_path / "cache").exists()
    assert (tmp_path / ".cache.part").exists()
    assert np.array_equal(
        convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=11).features(), values.toarray()
    )
    assert not (tmp_path / ".cache.part").exists()


@pytest.mark.parametrize("layout", ["dense", "csr"])
def test_one_changed_byte_in_any_file_of_a_cache_is_found(tmp_path, layout):
    _write_libsvm(tmp_path / "a.txt", m=30)
    convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=11, layout=layout, blocks=2)
    for path in sorted((tmp_path / "cache").iterdir()):
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[len(content) // 2] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(InputError, match=r"damaged|no cache"):
            _read_all(tmp_path / "cache")
        path.write_bytes(content[:-1])
        with pytest.raises(InputError, match=r"damaged|no cache"):
            _read_all(tmp_path / "cache")
        path.write_bytes(content)
    _read_all(tmp_path / "cache")


def _read_all(path):
    cache = open_cache(path)
    cache.targets()
    cache.features()
    if cache.header["layout"] == "dense":  # nothing else reads them there
        cache._map(cache.header["nonzeros"], np.dtype("<i8"))


def test_a_cache_of_another_version_is_refused(tmp_path):
    _write_libsvm(tmp_path / "a.txt", m=30)
    convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=11)
    header = json.loads((tmp_path / "cache" / "header.json").read_text())
    del header["sha256"]
    header["version"] = 99
    (tmp_path / "cache" / "header.json").write_text(json.dumps({**header, "sha256": column_cache._seal(header)}))
    with pytest.raises(InputError, match="another version"):
        open_cache(tmp_path / "cache")


@pytest.mark.parametrize("pair", [(-1, 1), (0, 1), (1, 2)])
def test_the_smaller_label_of_a_known_pair_becomes_minus_one(pair):
    assert map_labels(np.array([pair[1], pair[0], pair[0]], dtype=float)).tolist() == [1.0, -1.0, -1.0]


@pytest.mark.parametrize("labels", [[0.0, 0.0], [3.0, 7.0], [0.0, 1.0, 2.0]])
def test_labels_of_other_classes_are_refused_with_the_classes_found(tmp_path, labels):
    with pytest.raises(InputError, match=f"{len(set(labels))} classes: {labels[0]:g}"):
        map_labels(np.array(labels))
    (tmp_path / "a.txt").write_text("".join(f"{label} 1:1\n" for label in labels))
    with pytest.raises(InputError, match="two classes"):
        convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=1)
    cache = convert_libsvm(tmp_path / "a.txt", tmp_path / "numbers", n_features=1, labels="numbers")
    assert cache.targets().tolist() == labels


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("# nothing\n")
    with pytest.raises(InputError, match="no rows"):
        convert_libsvm(tmp_path / "a.txt", tmp_path / "cache", n_features=1)


def test_more_ranks_than_columns_is_refused():
    with pytest.raises(InputError, match="3 ranks for 2 columns"):
        split_columns(2, 3)


def test_sparse_columns_are_shared_out_by_non_zeros():
    nonzeros = np.array([1000] + [10] * 100)
    (_, first), (second, end) = split_columns(101, 2, nonzeros=nonzeros)
    assert first == second <= 52
    assert end == 101
    for ranks in (2, 50, 101):
        for kinds in (nonzeros, nonzeros[::-1], np.zeros(101, dtype=int)):
            ranges = split_columns(101, ranks, nonzeros=kinds)
            assert ranges[0][0] == 0
            assert ranges[-1][1] == 101
            assert all(end > first for first, end in ranges)
            assert all(ranges[i][1] == ranges[i + 1][0] for i in range(ranks - 1))


@pytest.mark.parametrize(
    ("objective", "model", "least", "most"),
    [
        ("squared", LinearRegression(), 0.987, 0.993),
        ("logistic", LogisticRegression(C=1e6), 0.85, 0.95),
        ("poisson", PoissonRegressor(alpha=0, max_iter=1000), 0.15, 0.3),
    ],
)
def test_made_up_targets_follow_the_model_of_their_objective(objective, model, least, most):
    data = synth(objective, 20_000, 64, seed=3)
    assert (data.name, data.objective) == (f"synth-{objective}", objective)
    assert np.abs(data.features.std(axis=0) - 1).max() < 0.03
    assert least < model.fit(data.features, data.targets).score(data.features, data.targets) < most


def test_the_same_seed_gives_the_same_data_and_another_gives_others():
    first, again, other = (synth("logistic", 50, 6, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.features, again.features)
    assert np.array_equal(first.targets, again.targets)
    assert not np.array_equal(first.targets, other.targets)


@pytest.mark.parametrize("arguments", [("logistic", 0, 3), ("squared", 3, 0), ("hinge", 3, 3)])
def test_invalid_made_up_problems_are_refused(arguments):
    with pytest.raises(InputError):
        synth(*arguments)


@pytest.mark.parametrize(
    ("name", "shape", "classes"),
    [("breast_cancer", (569, 30), {-1, 1}), ("digits", (1797, 64), {-1, 1}), ("diabetes", (442, 10), None)],
)
def test_a_built_in_set_comes_by_name_with_targets_its_objective_takes(name, shape, classes):
    data = load_builtin(name)
    assert data.features.shape == shape
    assert data.targets.shape == shape[:1]
    assert classes is None or set(data.targets) == classes
    assert find_objective(data.objective).name == data.objective
    if name == "digits":
        assert np.array_equal(data.features * 16, np.round(data.features * 16))
        assert data.targets[:4].tolist() == [-1.0, 1.0, -1.0, 1.0]


def test_an_unknown_built_in_set_is_named():
    with pytest.raises(InputError, match=r"'iris'.*breast_cancer"):
        load_builtin("iris")


def test_standardised_columns_have_mean_zero_and_variance_one_and_constant_ones_become_zero():
    rng = np.random.default_rng(0)
    features = rng.normal(loc=[1e6, 3.0, 0.0], scale=[1.0, 100.0, 1e-9], size=(400, 3)).astype(np.float32)
    features = np.column_stack([features, np.full(400, 0.1, dtype=np.float32)])
    standard = Standardiser.fit(features).apply(features)
    assert standard.dtype == np.float32
    assert np.abs(standard[:, :3].mean(axis=0)).max() < 1e-6
    assert np.abs(standard[:, :3].std(axis=0) - 1).max() < 1e-6
    assert np.abs(standard[:, 3]).max() < 1e-6


def test_a_rank_standardises_its_own_columns_as_the_whole_would_be():
    features = synth("squared", 60, 7).features * 5 + 2
    whole = Standardiser.fit(features).apply(features)
    assert np.array_equal(Standardiser.fit(features[:, 4:]).apply(features[:, 4:]), whole[:, 4:])


def test_sparse_features_are_scaled_and_never_centred():
    features = sparse.random(300, 6, density=0.2, random_state=0, format="csr") * 4
    with pytest.raises(InputError, match="centred"):
        Standardiser.fit(features)
    with pytest.raises(InputError, match="centred"):
        Standardiser.fit(features.toarray() + 1).apply(features)
    scaled = Standardiser.fit(features, centre=False).apply(features)
    assert scaled.nnz == features.nnz
    assert np.allclose(np.sqrt((scaled.toarray() ** 2).mean(axis=0)), 1)
    dense = features.toarray()
    assert np.allclose(Standardiser.fit(dense, centre=False).apply(dense), scaled.toarray())


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_columns_without_a_finite_scale_are_named(bad):
    features = np.ones((5, 3))
    features[2, 1] = bad
    with pytest.raises(InputError, match="column 1"):
        Standardiser.fit(features)


def test_compressed_text_that_is_cut_short_leaves_no_cache(tmp_path):
    packed = bz2.compress(b"1 1:1\n-1 1:2\n" * 1000)
    (tmp_path / "a.bz2").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match="cut short or damaged"):
        convert_libsvm(tmp_path / "a.bz2", tmp_path / "cache", n_features=1)
    assert not (tmp_path / "cache").exists()
