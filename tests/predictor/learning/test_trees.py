"""Flat trees predict as XGBoost does, and a broken structure is never evaluated."""

import dataclasses
import io
import json
import tracemalloc
import zipfile
import zlib

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import numpy as np
import pytest
import xgboost

from precision_time.predictor.learning.trees import FlatForest, flatten_xgboost, forests_from_bytes, forests_to_bytes
from precision_time.storage.errors import InputError, IntegrityError

FEATURES = 6


def train(*, rows: int = 400, trees: int = 40, depth: int = 5, seed: int = 0) -> xgboost.Booster:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    matrix[rng.random(matrix.shape) < 0.1] = np.nan
    target = np.nan_to_num(matrix) @ rng.normal(size=FEATURES) + rng.normal(size=rows) * 0.1
    data = xgboost.DMatrix(matrix, target)
    return xgboost.train({"max_depth": depth, "seed": seed, "nthread": 1, "eta": 0.3}, data, num_boost_round=trees)


@pytest.fixture(scope="module")
def booster() -> xgboost.Booster:
    return train()


@pytest.fixture(scope="module")
def forest(booster: xgboost.Booster) -> FlatForest:
    return flatten_xgboost(bytes(booster.save_raw("json")))


@pytest.mark.parametrize("seed", range(5))
def test_flat_trees_equal_xgboost_on_random_rows_with_missing_and_huge_values(seed: int) -> None:
    booster = train(seed=seed, depth=3 + seed)
    forest = flatten_xgboost(bytes(booster.save_raw("json")))
    forest.check(feature_count=FEATURES)
    rng = np.random.default_rng(100 + seed)
    rows = (rng.normal(size=(500, FEATURES)) * 3).astype(np.float32)
    rows[rng.random(rows.shape) < 0.2] = np.nan
    rows[0] = 1e30
    rows[1] = -1e30
    np.testing.assert_array_equal(forest.predict(rows), booster.predict(xgboost.DMatrix(rows)))


def test_a_value_on_a_threshold_goes_right_as_in_xgboost(booster: xgboost.Booster, forest: FlatForest) -> None:
    rows = np.zeros((50, FEATURES), np.float32)
    for row, split in zip(rows, range(0, 500, 10), strict=True):
        row[forest.split_feature[split]] = forest.split_threshold[split]
    np.testing.assert_array_equal(forest.predict(rows), booster.predict(xgboost.DMatrix(rows)))


def test_missing_values_take_both_directions_as_in_xgboost(booster: xgboost.Booster, forest: FlatForest) -> None:
    assert {bool(left) for left in forest.split_missing_left} == {True, False}
    rows = np.where(np.eye(FEATURES, dtype=np.bool_), np.nan, np.zeros((FEATURES, FEATURES)))
    rows = np.concatenate([rows, np.full((1, FEATURES), np.nan)])
    np.testing.assert_array_equal(forest.predict(rows), booster.predict(xgboost.DMatrix(rows)))


def test_infinite_values_go_the_way_of_huge_ones(forest: FlatForest) -> None:
    infinite = np.array([[np.inf] * FEATURES, [-np.inf] * FEATURES])
    np.testing.assert_array_equal(forest.predict(infinite), forest.predict(np.sign(infinite) * 3e38))


def test_many_rows_answer_as_each_alone(forest: FlatForest) -> None:
    rows = np.random.default_rng(3).normal(size=(2500, FEATURES))  # more than two chunks of a walk
    rows[::7, 2] = np.nan
    alone = [forest.predict(row[None])[0] for row in rows[::10]]
    np.testing.assert_array_equal(forest.predict(rows)[::10], alone)
    np.testing.assert_array_equal(
        forest.leaf_values(rows)[::10], [forest.leaf_values(row[None])[0] for row in rows[::10]]
    )


def test_leaf_values_are_those_of_the_leaves_xgboost_names(booster: xgboost.Booster, forest: FlatForest) -> None:
    rows = np.random.default_rng(4).normal(size=(30, FEATURES)).astype(np.float32)
    leaves = booster.predict(xgboost.DMatrix(rows), pred_leaf=True).astype(int)
    trees = json.loads(bytes(booster.save_raw("json")))["learner"]["gradient_booster"]["model"]["trees"]
    values = [[trees[t]["split_conditions"][leaf] for t, leaf in enumerate(row)] for row in leaves]
    np.testing.assert_array_equal(forest.leaf_values(rows), np.array(values, dtype=np.float32))


def test_every_training_row_counts_once_in_each_tree(forest: FlatForest) -> None:
    assert set(forest.node_cover[forest.nodes.roots].tolist()) == {400.0}


def test_covers_beyond_float16_saturate(booster: xgboost.Booster) -> None:
    model = json.loads(bytes(booster.save_raw("json")))
    for tree in model["learner"]["gradient_booster"]["model"]["trees"]:
        tree["sum_hessian"] = [1e9 if number % 2 else 0.0 for number in range(len(tree["sum_hessian"]))]
    forest = flatten_xgboost(json.dumps(model).encode())
    forest.check(feature_count=FEATURES)
    assert np.isfinite(forest.node_cover).all()


def test_covers_can_be_left_out_and_are_then_refused(booster: xgboost.Booster, forest: FlatForest) -> None:
    bare = flatten_xgboost(bytes(booster.save_raw("json")), keep_cover=False)
    rows = np.zeros((2, FEATURES))
    data = forests_to_bytes({"a": bare})
    assert len(data) < len(forests_to_bytes({"a": forest}))
    loaded = forests_from_bytes(data, feature_counts={"a": FEATURES})["a"]
    np.testing.assert_array_equal(loaded.predict(rows), forest.predict(rows))
    with pytest.raises(InputError, match="carry no covers"):
        _ = loaded.node_cover


def test_no_rows_give_no_answers(forest: FlatForest) -> None:
    none = np.empty((0, FEATURES))
    assert forest.predict(none).shape == (0,)
    assert forest.leaf_values(none).shape == (0, 40)


@pytest.mark.parametrize("shape", [(FEATURES,), (2, FEATURES - 1), (2, 2, FEATURES), ()])
def test_rows_of_another_shape_are_refused(forest: FlatForest, shape: tuple[int, ...]) -> None:
    for ask in (forest.predict, forest.leaf_values):
        with pytest.raises(InputError, match="rows do not fit the trees"):
            ask(np.zeros(shape))


def test_trees_without_a_split_answer_their_only_leaf() -> None:
    data = xgboost.DMatrix(np.zeros((20, 2)), np.full(20, 4.0))
    booster = xgboost.train({"base_score": 2.0}, data, num_boost_round=3)
    forest = flatten_xgboost(bytes(booster.save_raw("json")))
    loaded = forests_from_bytes(forests_to_bytes({"a": forest}), feature_counts={"a": 2})["a"]
    np.testing.assert_array_equal(loaded.predict(np.zeros((3, 2))), booster.predict(xgboost.DMatrix(np.zeros((3, 2)))))


def test_more_splits_than_16_bits_count_are_kept(forest: FlatForest) -> None:
    wide = dataclasses.replace(forest, split=forest.split.astype(np.uint32))
    loaded = forests_from_bytes(forests_to_bytes({"a": wide}), feature_counts={"a": FEATURES})["a"]
    rows = np.random.default_rng(6).normal(size=(20, FEATURES))
    np.testing.assert_array_equal(loaded.predict(rows), forest.predict(rows))


def test_pruned_nodes_vanish() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, FEATURES)).astype(np.float32)
    data = xgboost.DMatrix(rows, rows[:, 0] + rng.normal(size=300))
    booster = xgboost.train(
        {"tree_method": "exact", "max_depth": 6, "gamma": 3.0, "nthread": 1}, data, num_boost_round=5
    )
    model = json.loads(bytes(booster.save_raw("json")))
    stored = sum(len(tree["left_children"]) for tree in model["learner"]["gradient_booster"]["model"]["trees"])
    forest = flatten_xgboost(bytes(booster.save_raw("json")))
    forest.check(feature_count=FEATURES)
    assert len(forest.split) < stored
    np.testing.assert_array_equal(forest.predict(rows), booster.predict(data))


def test_forests_survive_the_file_bit_for_bit(forest: FlatForest) -> None:
    data = forests_to_bytes({"a": forest, "b": forest})
    loaded = forests_from_bytes(data, feature_counts={"a": FEATURES, "b": FEATURES})
    for column in dataclasses.fields(FlatForest):
        np.testing.assert_array_equal(getattr(loaded["a"], column.name), getattr(forest, column.name))


def _with(forest: FlatForest, column: str, index: int, value: float) -> FlatForest:
    array = getattr(forest, column).copy()
    array[index] = value
    return dataclasses.replace(forest, **{column: array})


def _small(split: list[int], *, sizes: list[int]) -> FlatForest:
    """A forest that splits on one feature at 0, all of whose columns fit ``split``."""
    leaves = split.count(0)
    return FlatForest(
        tree_sizes=np.array(sizes, np.int32),
        split=np.array(split, np.uint16),
        split_feature=np.zeros(1, np.uint16),
        split_threshold=np.zeros(1, np.float32),
        split_missing_left=np.zeros(1, np.bool_),
        value=np.arange(leaves, dtype=np.float32),
        cover=np.ones(leaves, np.float16),
        base_score=np.zeros(1, np.float32),
    )


def _deep_chain(depth: int) -> FlatForest:
    return _small([1, *[1, 0] * (depth - 1), 0, 0], sizes=[2 * depth + 1])


BROKEN = {
    "leaf before its parent": lambda f: _small([0, 0, 1], sizes=[3]),
    "inner node without children": lambda f: _small([1, 1, 0], sizes=[3]),
    "two roots in one tree": lambda f: _small([0, 0], sizes=[2]),
    "children in the next tree": lambda f: _small([1, 0, 0, 0], sizes=[1, 3]),
    "loop beside a closed tree": lambda f: _small([0, 1, 1, 0, 0], sizes=[5]),
    "sizes moved between trees": lambda f: _with(
        _with(f, "tree_sizes", 0, f.tree_sizes[0] - 2), "tree_sizes", 1, f.tree_sizes[1] + 2
    ),
    "empty tree": lambda f: _small([1, 0, 0], sizes=[3, 0]),
    "negative size": lambda f: _small([1, 0, 0], sizes=[5, -2]),
    "sizes beyond the end": lambda f: _with(f, "tree_sizes", -1, 10**6),
    "sizes that overflow": lambda f: _small([0] * 4, sizes=[2**31 - 1, 2**31 - 1, 2, 4]),
    "split beyond the table": lambda f: _with(f, "split", 0, len(f.split_feature) + 1),
    "leaf made a split": lambda f: _with(f, "split", -1, 1),
    "split made a leaf": lambda f: _with(f, "split", 0, 0),
    "feature out of range": lambda f: _with(f, "split_feature", 3, FEATURES),
    "NaN leaf": lambda f: _with(f, "value", -1, np.nan),
    "infinite threshold": lambda f: _with(f, "split_threshold", 0, np.inf),
    "NaN threshold": lambda f: _with(f, "split_threshold", 0, np.nan),
    "NaN base score": lambda f: _with(f, "base_score", 0, np.nan),
    "two base scores": lambda f: dataclasses.replace(f, base_score=np.zeros(2, np.float32)),
    "no cover at a leaf": lambda f: _with(f, "cover", 5, 0),
    "negative cover": lambda f: _with(f, "cover", 5, -1),
    "NaN cover": lambda f: _with(f, "cover", 5, np.nan),
    "infinite cover": lambda f: _with(f, "cover", 5, np.inf),
    "unequal values": lambda f: dataclasses.replace(f, value=f.value[:-1]),
    "unequal covers": lambda f: dataclasses.replace(f, cover=f.cover[:-1]),
    "unequal split table": lambda f: dataclasses.replace(f, split_threshold=f.split_threshold[:-1]),
    "wrong type": lambda f: dataclasses.replace(f, split_threshold=f.split_threshold.astype(np.float64)),
    "signed splits": lambda f: dataclasses.replace(f, split=f.split.astype(np.int16)),
    "two dimensions": lambda f: dataclasses.replace(f, value=f.value[None]),
    "no trees": lambda f: dataclasses.replace(f, tree_sizes=f.tree_sizes[:0]),
    "no nodes": lambda f: _small([], sizes=[]),
    "ten thousand levels": lambda f: _deep_chain(10_000),
    "one level too many": lambda f: _deep_chain(65),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_structure_is_refused_by_name(forest: FlatForest, name: str) -> None:
    broken = BROKEN[name](forest)
    with pytest.raises(IntegrityError, match="tree arrays"):
        broken.check(feature_count=FEATURES)
    with pytest.raises(IntegrityError):
        forests_from_bytes(forests_to_bytes({"a": broken}), feature_counts={"a": FEATURES})


def test_a_chain_at_the_depth_limit_passes() -> None:
    chain = _deep_chain(64)
    chain.check(feature_count=1)
    # To the right goes a leaf at each level but the last, where both are leaves.
    np.testing.assert_array_equal(chain.predict([[1.0], [-1.0], [np.nan]]), [0.0, 63.0, 0.0])


@hypothesis.given(
    split=hypothesis.extra.numpy.arrays(np.uint16, st.integers(1, 15), elements=st.sampled_from([0, 0, 1])),
    cut=st.integers(0, 14),
)
def test_a_checked_forest_leads_every_row_to_a_leaf(split: np.ndarray, cut: int) -> None:
    sizes = [cut, len(split) - cut] if 0 < cut < len(split) else [len(split)]
    forest = _small(split.tolist(), sizes=sizes)
    try:
        forest.check(feature_count=1)
    except IntegrityError:
        return
    for leaves in forest.find_leaves([[-1.0], [1.0], [np.nan]]):
        assert (forest.split[leaves] == 0).all()
        assert (np.searchsorted(forest.nodes.roots, leaves, side="right") == np.arange(1, len(sizes) + 1)).all()


def test_ten_million_nodes_are_refused_before_they_are_unpacked() -> None:
    big = dataclasses.replace(_deep_chain(1), split=np.zeros(10_000_001, np.uint32))
    with pytest.raises(IntegrityError, match="too large when unpacked"):
        forests_from_bytes(forests_to_bytes({"a": big}), feature_counts={"a": 1})


def test_nodes_beyond_the_limit_are_refused() -> None:
    big = _small([0] * 2_000_001, sizes=[1] * 2_000_001)
    with pytest.raises(IntegrityError, match="too many"):
        big.check(feature_count=1)


@hypothesis.settings(max_examples=200)
@hypothesis.given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_changes_nothing(place: float, byte: int) -> None:
    data = bytearray(forests_to_bytes({"a": _deep_chain(3)}))
    data[int(place * len(data))] = byte
    try:
        loaded = forests_from_bytes(bytes(data), feature_counts={"a": 1})["a"]
    except IntegrityError:
        return
    np.testing.assert_array_equal(loaded.predict([[1.0], [-1.0]]), _deep_chain(3).predict([[1.0], [-1.0]]))


def _replace_member(data: bytes, *, member: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name == member else old.read(name))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000000,), }",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (7,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
        "{'descr': [1, 2], 'fortran_order': False, 'shape': (1,), }",
        "[" * 5000,
        "'",
    ],
    ids=["endless", "longer than the data", "objects", "odd type", "nested", "cut"],
)
def test_a_column_with_a_crafted_header_is_refused(forest: FlatForest, header: str) -> None:
    column = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(4)
    data = _replace_member(forests_to_bytes({"a": forest}), member="a.value.npy", content=column)
    with pytest.raises(IntegrityError, match="cannot be read"):
        forests_from_bytes(data, feature_counts={"a": FEATURES})


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\x03\x04 not an archive", b"\x80\x04K\x01.", b"{}"],
    ids=["empty", "cut archive", "pickle", "json"],
)
def test_a_file_that_is_no_archive_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="cannot be read"):
        forests_from_bytes(data, feature_counts={"a": 1})


def test_a_member_larger_than_the_directory_says_is_not_unpacked(forest: FlatForest) -> None:
    deflate = zlib.compressobj(wbits=-15)
    packed = b"".join([*(deflate.compress(bytes(2**20)) for _ in range(256)), deflate.flush()])
    member = zipfile.ZipInfo("a.value.npy")
    member.compress_type, member.file_size, member.compress_size = zipfile.ZIP_DEFLATED, 100, len(packed)
    member.CRC = zlib.crc32(bytes(100))
    data, buffer = forests_to_bytes({"a": forest}), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            if name != member.filename:
                new.writestr(name, old.read(name))
        member.header_offset = buffer.tell()
        buffer.write(member.FileHeader(zip64=False) + packed)
        new.start_dir = buffer.tell()
        new.filelist.append(member)
        new._didModify = True
    tracemalloc.start()
    with pytest.raises(IntegrityError, match=r"a\.value is no array"):
        forests_from_bytes(buffer.getvalue(), feature_counts={"a": FEATURES})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24


def test_an_array_of_python_objects_is_never_unpickled(forest: FlatForest) -> None:
    buffer = io.BytesIO()
    columns = {f"a.{column.name}": getattr(forest, column.name) for column in dataclasses.fields(FlatForest)}
    np.savez(buffer, **(columns | {"a.value": np.array([print], dtype=object)}))
    with pytest.raises(IntegrityError, match="cannot be read"):
        forests_from_bytes(buffer.getvalue(), feature_counts={"a": FEATURES})


def test_a_missing_or_extra_array_is_refused(forest: FlatForest) -> None:
    data = forests_to_bytes({"a": forest})
    with pytest.raises(IntegrityError, match="members"):
        forests_from_bytes(data, feature_counts={"a": FEATURES, "b": FEATURES})
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("extra.npy", b"")
    with pytest.raises(IntegrityError, match="members"):
        forests_from_bytes(buffer.getvalue(), feature_counts={"a": FEATURES})


def test_other_boosters_are_refused_at_writing(booster: xgboost.Booster) -> None:
    model = json.loads(bytes(booster.save_raw("json")))
    model["learner"]["gradient_booster"]["name"] = "gblinear"
    with pytest.raises(IntegrityError, match="kind of booster"):
        flatten_xgboost(json.dumps(model).encode())


def test_several_classes_and_categorical_splits_are_refused_at_writing(booster: xgboost.Booster) -> None:
    model = json.loads(bytes(booster.save_raw("json")))
    model["learner"]["learner_model_param"]["num_class"] = "3"
    with pytest.raises(IntegrityError, match="several classes"):
        flatten_xgboost(json.dumps(model).encode())
    model = json.loads(bytes(booster.save_raw("json")))
    model["learner"]["gradient_booster"]["model"]["trees"][3]["split_type"][0] = 1
    with pytest.raises(IntegrityError, match="categorical"):
        flatten_xgboost(json.dumps(model).encode())


@pytest.mark.parametrize("child", ["left_children", "right_children"])
def test_a_cycle_is_refused_at_writing(booster: xgboost.Booster, child: str) -> None:
    model = json.loads(bytes(booster.save_raw("json")))
    model["learner"]["gradient_booster"]["model"]["trees"][0][child][0] = 0
    with pytest.raises(IntegrityError, match="too deep"):
        flatten_xgboost(json.dumps(model).encode())
