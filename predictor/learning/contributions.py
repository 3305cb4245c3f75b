"""What each feature adds to the answer of a forest, for one answer (Shapley or path method) and over many."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.trees import FlatForest
from precision_time.storage.errors import InputError

__all__ = [
    "expected_value",
    "gain_importances",
    "mean_absolute_contributions",
    "path_contributions",
    "shapley_contributions",
]


@lru_cache(maxsize=16)
def _node_means(forest: FlatForest) -> npt.NDArray[np.float64]:
    """Mean of the leaves below each node, each leaf by its cover; shape (nodes,)."""
    cover, nodes = forest.node_cover, forest.nodes
    mean = nodes.value.astype(np.float64)
    for level in reversed(nodes.levels):
        left = nodes.child[level]
        mean[level] = (mean[left] * cover[left] + mean[left + 1] * cover[left + 1]) / cover[level]
    return mean


def expected_value(forest: FlatForest) -> float:
    """Mean output over the training rows: what every sum of contributions starts from.

    Raises ``InputError`` when the forest carries no covers.
    """
    return float(forest.base_score[0]) + float(_node_means(forest)[forest.nodes.roots].sum())


def path_contributions(forest: FlatForest, rows: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """What each feature adds to each output by the path method; rows and result have shape (n, features).

    Each step of a row down a tree changes the mean of the leaves that remain; the change is put down to the feature
    of the split (A. Saabas, "Interpreting random forests", 2014; XGBoost's ``approx_contribs``). Each row of the
    result sums to the prediction minus ``expected_value``. Fast, but splits near the root get less than their due:
    ``shapley_contributions`` is fair, and slower. Raises ``InputError`` for rows that do not fit the trees or a
    forest without covers.
    """
    nodes, mean = forest.nodes, _node_means(forest)
    chunks = forest.split_rows(rows)
    parts: list[npt.NDArray[np.float64]] = [np.empty((0, np.shape(rows)[-1]))]
    for chunk in chunks:
        first = (np.arange(len(chunk)) * chunk.shape[1])[:, None]
        total = np.zeros(chunk.size)
        for node, following in itertools.pairwise(forest.descend(chunk)):
            cell = nodes.column.take(node) // 2 + first  # at a leaf the change is 0, whatever the feature
            change = mean.take(following) - mean.take(node)
            total += np.bincount(cell.ravel(), weights=change.ravel(), minlength=chunk.size)
        parts.append(total.reshape(chunk.shape))
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True, eq=False)
class _LeafBoxes:
    """Each leaf as a box: its value, and for each feature on its path the interval that leads to it.

    ``value`` has shape (leaves,), the others (slots, leaves), with one slot for each different feature on a path. A
    cell fits from ``low`` to below ``high``, which is NaN where nothing bounds it; ``share`` is the part of the
    training weight that the splits of the slot let pass. An unused slot lets all pass.
    """

    value: npt.NDArray[np.float64]
    feature: npt.NDArray[np.int64]
    low: npt.NDArray[np.float32]
    high: npt.NDArray[np.float32]
    takes_missing: npt.NDArray[np.bool_]
    share: npt.NDArray[np.float64]


@lru_cache(maxsize=16)
def _leaf_boxes(forest: FlatForest) -> _LeafBoxes:
    nodes, cover = forest.nodes, forest.node_cover
    parent = np.full(len(nodes.child), -1)
    for level in nodes.levels:
        parent[nodes.child[level]] = parent[nodes.child[level] + 1] = level
    count, depth = len(nodes.leaves), max(1, len(nodes.levels))
    feature = np.full((depth, count), -1)
    low = np.full((depth, count), -np.inf, dtype=np.float32)
    high = np.full((depth, count), np.nan, dtype=np.float32)
    takes_missing = np.ones((depth, count), dtype=np.bool_)
    share = np.ones((depth, count))
    used = np.zeros(count, dtype=np.int64)
    leaf, node = np.arange(count), nodes.leaves
    while True:  # all leaves climb together; those at their root drop out
        climbs = parent[node] >= 0
        leaf, node = leaf[climbs], node[climbs]
        if not len(leaf):
            break
        above = parent[node]
        split_on = nodes.column[above] // 2
        seen = feature[:, leaf] == split_on
        slot = np.where(seen.any(axis=0), seen.argmax(axis=0), used[leaf])
        used[leaf] = np.maximum(used[leaf], slot + 1)
        place = (slot, leaf)
        feature[place] = split_on
        is_right = node != nodes.child[above]
        low[place] = np.where(is_right, np.maximum(low[place], nodes.threshold[above]), low[place])
        high[place] = np.where(is_right, high[place], np.fmin(high[place], nodes.threshold[above]))
        takes_missing[place] &= is_right == (nodes.column[above] % 2 == 1)
        share[place] *= cover[node] / cover[above]
        node = above
    slots = max(1, int(used.max()))  # one unused slot for a forest without splits
    return _LeafBoxes(
        value=nodes.value[nodes.leaves].astype(np.float64),
        feature=np.maximum(feature[:slots], 0),
        low=low[:slots],
        high=high[:slots],
        takes_missing=takes_missing[:slots],
        share=share[:slots],
    )


def shapley_contributions(forest: FlatForest, rows: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """What each feature adds to each output as its exact Shapley value; rows and result have shape (n, features).

    The game is that of path-dependent TreeSHAP (Lundberg et al., "From local explanations to global understanding
    with explainable AI for trees", 2020): a feature outside the coalition splits the row over both branches by their
    covers. A leaf of value v pays v times a product over its features of o (1 when the row fits the leaf's interval)
    or z (the share of the cover), so feature i earns v (o_i - z_i) times the integral over t in [0, 1] of the product
    over j != i of (t o_j + (1 - t) z_j), which Gauss-Legendre nodes integrate exactly. Each row of the result sums to
    the prediction minus ``expected_value``. Raises as ``path_contributions`` does.
    """
    boxes = _leaf_boxes(forest)
    points, weights = np.polynomial.legendre.leggauss(math.ceil(len(boxes.feature) / 2))
    chunks = forest.split_rows(rows)
    parts: list[npt.NDArray[np.float64]] = [np.empty((0, np.shape(rows)[-1]))]
    for row in itertools.chain.from_iterable(chunks):
        cell = row.take(boxes.feature)
        fits = np.where(np.isnan(cell), boxes.takes_missing, (boxes.low <= cell) & ~(cell >= boxes.high))
        gap = fits - boxes.share
        earned = np.zeros_like(gap)
        for point, weight in zip(points, weights, strict=True):
            factors = boxes.share + (point + 1) / 2 * gap
            earned += weight / 2 * factors.prod(axis=0) / factors
        earned *= gap
        earned *= boxes.value
        total = np.zeros(len(row))
        total += np.bincount(boxes.feature.ravel(), weights=earned.ravel(), minlength=len(row))
        parts.append(total[None])
    return np.concatenate(parts)


def mean_absolute_contributions(forest: FlatForest, rows: npt.ArrayLike, *, names: Sequence[str]) -> dict[str, float]:
    """How much each feature moves the outputs over ``rows`` (n, features): mean |path contribution|, largest first.

    Raises ``InputError`` for no rows, for names that are not one for each column, and as ``path_contributions``.
    """
    contributions = path_contributions(forest, rows)
    if not len(contributions) or contributions.shape[1] != len(names):
        raise InputError(
            "rows and names do not match",
            got=f"rows of shape {contributions.shape} and {len(names)} names",
            expected="at least one row, and a name for each column",
            fix="pass the matrix and the feature names of the stage",
        )
    return _rank(dict(zip(names, np.abs(contributions).mean(axis=0).tolist(), strict=True)))


def gain_importances(model_json: bytes, names: Sequence[str]) -> dict[str, float]:
    """Share of each feature in the loss that the splits of an XGBoost JSON model took away, largest first.

    XGBoost's ``total_gain``, normalised to a sum of 1; all 0 for a model without splits. Raises ``InputError`` when
    the model splits on a feature beyond ``names``.
    """
    gain = np.zeros(len(names))
    for tree in json.loads(model_json)["learner"]["gradient_booster"]["model"]["trees"]:
        inner = np.asarray(tree["left_children"]) >= 0
        feature = np.asarray(tree["split_indices"], dtype=np.int64)[inner]
        if len(feature) and feature.max() >= len(names):
            raise InputError(
                "a split on a feature without a name",
                got=f"feature {feature.max()}",
                expected=f"0..{len(names) - 1}",
                fix="pass the feature names the model was trained on, in order",
            )
        np.add.at(gain, feature, np.asarray(tree["loss_changes"], dtype=np.float64)[inner])
    total = gain.sum()
    return _rank(dict(zip(names, (gain / total if total > 0 else gain).tolist(), strict=True)))


def _rank(importances: dict[str, float]) -> dict[str, float]:
    return dict(sorted(importances.items(), key=lambda item: -item[1]))
