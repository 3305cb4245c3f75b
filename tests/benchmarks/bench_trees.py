"""Speed and size of the flat trees, beside XGBoost and a masked walk; run: python tests/benchmarks/bench_trees.py

Prints one JSON object for 600 trees of depth 6 on 40 features, one thread. Each time is a median of paired runs, and
each ratio is ours over the reference. The masked walk evaluates trees whose leaves are not their own children: at each
level it looks up both children, tests every cell for a missing value, and masks the rows that have reached a leaf.
"""

import json
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy and xgboost look at it

import numpy as np
import numpy.typing as npt
import xgboost
from bench_predict import paired_ratio, timed

from precision_time.predictor.answering.explain import path_contributions
from precision_time.predictor.learning.trees import FlatForest, flatten_xgboost, forests_from_bytes, forests_to_bytes

FEATURES = 40


def train() -> tuple[xgboost.Booster, npt.NDArray[np.float32]]:
    """A model with enough noise to grow full trees, and its rows; half of the columns hold whole numbers."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(4000, FEATURES)).astype(np.float32)
    rows[:, 20:] = np.round(rows[:, 20:] * 2)
    target = np.sin(rows[:, 0] * 2) + rows @ rng.normal(size=FEATURES) * 0.2 + rows[:, 1] * rows[:, 25]
    target += rng.normal(size=len(rows)) * 0.3
    rows[rng.random(rows.shape) < 0.02] = np.nan
    parameters = {"max_depth": 6, "nthread": 1, "eta": 0.05, "subsample": 0.8, "min_child_weight": 3}
    return xgboost.train(parameters, xgboost.DMatrix(rows, target), num_boost_round=600), rows


def walk_masked(forest: FlatForest, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The sum of leaf values, rows walked with masks."""
    nodes = forest.nodes
    is_leaf = forest.split == 0
    left, right = np.where(is_leaf, -1, nodes.child), np.where(is_leaf, -1, nodes.child + 1)
    feature, missing_left = nodes.column // 2, nodes.column % 2 == 0
    node = np.broadcast_to(nodes.roots, (len(rows), len(nodes.roots))).copy()
    index = np.arange(len(rows))[:, None]
    while (inner := (child := left[node]) != -1).any():
        cell = rows[index, feature[node]]
        goes_left = np.where(np.isnan(cell), missing_left[node], cell < nodes.threshold[node])
        node = np.where(inner, np.where(goes_left, child, right[node]), node)
    return nodes.value[node].sum(axis=1)


def measure() -> dict[str, object]:
    """All figures by name."""
    booster, rows = train()
    forest = flatten_xgboost(bytes(booster.save_raw("json")))
    data, binary = forests_to_bytes({"all": forest}), booster.save_raw("ubj")
    bare = forests_to_bytes({"all": flatten_xgboost(bytes(booster.save_raw("json")), keep_cover=False)})
    results: dict[str, object] = {
        "nodes": len(forest.split),
        "file_bytes": len(data),
        "file_bytes_without_covers": len(bare),
        "file_bytes_over_xgboost_binary": len(data) / len(binary),
        "load_and_check_over_xgboost_load": paired_ratio(
            lambda: timed(lambda: forests_from_bytes(data, feature_counts={"all": FEATURES}), repeat=5),
            lambda: timed(lambda: xgboost.Booster(model_file=binary), repeat=5),
            pairs=9,
        ),
    }
    for count, repeat in ((1, 50), (100, 10), (10_000, 1)):
        some = np.resize(rows, (count, FEATURES))

        def ours(some: npt.NDArray[np.float32] = some, repeat: int = repeat) -> float:
            return timed(lambda: forest.predict(some), repeat=repeat)

        def theirs(some: npt.NDArray[np.float32] = some, repeat: int = repeat) -> float:
            # A new matrix each time: a booster caches its answers to a known matrix.
            return timed(lambda: booster.predict(xgboost.DMatrix(some, nthread=1)), repeat=repeat)

        def masked(some: npt.NDArray[np.float32] = some, repeat: int = repeat) -> float:
            return timed(lambda: walk_masked(forest, some), repeat=repeat)

        results[f"predict_{count}_over_xgboost"] = paired_ratio(ours, theirs, pairs=5)
        results[f"predict_{count}_over_masked_walk"] = paired_ratio(ours, masked, pairs=5)
    path_contributions(forest, rows[:1])  # preparation, once for all answers
    first = xgboost.DMatrix(rows[:1], nthread=1)
    results["path_contributions_1_over_xgboost"] = paired_ratio(
        lambda: timed(lambda: path_contributions(forest, rows[:1]), repeat=10),
        lambda: timed(lambda: booster.predict(first, pred_contribs=True, approx_contribs=True), repeat=10),
        pairs=5,
    )
    return results


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
