"""What each feature adds to one answer of a forest, and how much of a model's gain it has."""

import itertools
import json
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.trees import FlatForest
from precision_time.storage.errors import InputError

__all__ = [
    "expected_value",
    "gain_importances",
    "path_contributions",
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
    """Mean output over the training rows, from which every sum of contributions starts.

    Raises ``InputError`` when the forest carries no covers.
    """
    return float(forest.base_score[0]) + float(_node_means(forest)[forest.nodes.roots].sum())


def path_contributions(forest: FlatForest, rows: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """What each feature adds to each output by the path method; rows and result have shape (n, features).

    Each step of a row down a tree changes the mean of the leaves that remain; the change is assigned to the feature of
    the split (A. Saabas, "Interpreting random forests", 2014; XGBoost's ``approx_contribs``). Each row of the result
    sums to the prediction minus ``expected_value``. Splits near the root get less than by Shapley values, which take
    far longer. Raises ``InputError`` for rows that do not fit the trees or a forest without covers.
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


def gain_importances(model_json: bytes, names: Sequence[str]) -> dict[str, float]:
    """Each feature's share of the loss reduction of all splits of an XGBoost JSON model, largest first.

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
