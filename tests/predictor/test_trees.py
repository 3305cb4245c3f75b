"""Flat trees say what XGBoost says, and a broken structure never reaches the evaluator."""

import dataclasses
import io
import json
import zipfile

import numpy as np
import pytest
import xgboost

from precision_time.predictor.trees import FlatForest, flatten_xgboost, forests_from_bytes, forests_to_bytes
from precision_time.storage.errors import IntegrityError

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
    inner = forest.left != -1
    rows = np.zeros((50, FEATURES), np.float32)
    for row, node in zip(rows, np.flatnonzero(inner)[:50], strict=True):
        row[forest.feature[node]] = forest.threshold[node]
    np.testing.assert_array_equal(forest.predict(rows), booster.predict(xgboost.DMatrix(rows)))


def test_forests_survive_the_file_bit_for_bit(forest: FlatForest) -> None:
    data = forests_to_bytes({"a": forest, "b": forest})
    loaded = forests_from_bytes(data, feature_counts={"a": FEATURES, "b": FEATURES})
    for column in dataclasses.fields(FlatForest):
        np.testing.assert_array_equal(getattr(loaded["a"], column.name), getattr(forest, column.name))


def _first_inner(forest: FlatForest) -> int:
    return int(np.flatnonzero(forest.left != -1)[0])


def _with(forest: FlatForest, column: str, index: int, value: float) -> FlatForest:
    array = getattr(forest, column).copy()
    array[index] = value
    return dataclasses.replace(forest, **{column: array})


def _deep_chain(depth: int) -> FlatForest:
    count = 2 * depth + 1
    left = np.full(count, -1, np.int32)
    right = np.full(count, -1, np.int32)
    left[0 : count - 1 : 2] = np.arange(1, count, 2)
    right[0 : count - 1 : 2] = np.arange(2, count, 2)
    return FlatForest(
        feature=np.zeros(count, np.int32),
        threshold=np.zeros(count, np.float32),
        left=left,
        right=right,
        missing_left=np.zeros(count, np.bool_),
        value=np.zeros(count, np.float32),
        roots=np.zeros(1, np.int32),
        base_score=np.zeros(1, np.float32),
    )


BROKEN = {
    "child beyond the end": lambda f: _with(f, "left", _first_inner(f), len(f.left) + 7),
    "negative child": lambda f: _with(f, "right", _first_inner(f), -5),
    "child in another tree": lambda f: _with(f, "left", 0, int(f.roots[1]) + 1),
    "self loop": lambda f: _with(f, "left", _first_inner(f), _first_inner(f)),
    "cycle": lambda f: _with(f, "left", int(f.left[0]), 0),
    "shared child": lambda f: _with(f, "left", _first_inner(f), int(f.right[_first_inner(f)])),
    "one child": lambda f: _with(f, "left", _first_inner(f), -1),
    "negative feature": lambda f: _with(f, "feature", _first_inner(f), -1),
    "feature out of range": lambda f: _with(f, "feature", _first_inner(f), FEATURES),
    "NaN leaf": lambda f: _with(f, "value", -1, np.nan),
    "infinite threshold": lambda f: _with(f, "threshold", _first_inner(f), np.inf),
    "NaN base score": lambda f: _with(f, "base_score", 0, np.nan),
    "roots out of order": lambda f: _with(f, "roots", 1, 0),
    "root beyond the end": lambda f: _with(f, "roots", -1, 10**6),
    "unequal arrays": lambda f: dataclasses.replace(f, value=f.value[:-1]),
    "wrong type": lambda f: dataclasses.replace(f, threshold=f.threshold.astype(np.float64)),
    "no trees": lambda f: dataclasses.replace(f, roots=f.roots[:0]),
    "ten thousand levels": lambda f: _deep_chain(10_000),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_structure_is_refused_by_name(forest: FlatForest, name: str) -> None:
    broken = BROKEN[name](forest)
    with pytest.raises(IntegrityError, match="tree arrays"):
        broken.check(feature_count=FEATURES)
    with pytest.raises(IntegrityError):
        forests_from_bytes(forests_to_bytes({"a": broken}), feature_counts={"a": FEATURES})


def test_a_chain_at_the_depth_limit_passes() -> None:
    _deep_chain(64).check(feature_count=1)


def test_ten_million_nodes_are_refused_before_they_are_unpacked() -> None:
    count = 10_000_001
    zeros = np.zeros(count, np.int32)
    big = dataclasses.replace(
        _deep_chain(1),
        **{
            name: zeros.astype(np.float32) if name in ("threshold", "value") else zeros
            for name in ("feature", "threshold", "left", "right", "value")
        },
        missing_left=zeros.astype(np.bool_),
    )
    with pytest.raises(IntegrityError, match="unpacked size"):
        forests_from_bytes(forests_to_bytes({"a": big}), feature_counts={"a": 1})


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\x03\x04 not an archive", b"\x80\x04K\x01.", b"{}"],
    ids=["empty", "cut archive", "pickle", "json"],
)
def test_a_file_that_is_no_archive_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="cannot be read"):
        forests_from_bytes(data, feature_counts={"a": 1})


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
    with pytest.raises(IntegrityError, match="booster kind"):
        flatten_xgboost(json.dumps(model).encode())
