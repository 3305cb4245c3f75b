"""The figures behind an answer: its closed form by part, and the learned factors by group of features."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.blending import Blend
from precision_time.predictor.learning.hierarchy import STAGE_FEATURES, HierarchicalPredictor
from precision_time.predictor.learning.trees import FlatForest
from precision_time.predictor.rows.features import FEATURE_GROUPS, Query, feature_matrix
from precision_time.storage.errors import InputError

__all__ = [
    "Explanation",
    "expected_value",
    "explain_query",
    "feature_importances",
    "gain_importances",
    "path_contributions",
]

#: The stage that decides the iteration where it was trained, else the one that decides most of it.
_DECIDING = ("total", "compute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """``closed_form_s`` by part, in seconds, and learned ``factors`` by group of features.

    The parts add up to the iteration by the closed forms. Where a model of the whole iteration was trained, that
    iteration times all factors is the predicted one; otherwise the factors correct its compute alone. All queries
    share the factor ``overall``.
    """

    closed_form_s: Mapping[str, float]
    factors: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"closed_form_s": dict(self.closed_form_s), "factors": dict(self.factors)}


def _split_closed_form(query: Query) -> dict[str, float]:
    closed = query.closed
    parts = {
        "forward": closed.forward_time_s,
        "recomputation": closed.recompute_time_s,
        "backward": closed.backward_time_s,
        "pipeline bubble": closed.pipeline_bubble_s,
        "host copy": closed.host_copy_s,
        "optimizer": closed.optimizer_time_s,
        "exposed communication": closed.exposed_communication_s,
    }
    return {name: seconds for name, seconds in parts.items() if seconds > 0}


def explain_query(query: Query, *, predictor: HierarchicalPredictor | None, blend: Blend) -> Explanation:
    """The parts and factors of one answer, with the trees weighted by ``blend``; the parts alone without a predictor.

    Factors are the ``path_contributions`` summed over groups of features.
    """
    parts = _split_closed_form(query)
    stage = next((name for name in _DECIDING if predictor is not None and name in predictor.forests), None)
    if predictor is None or stage is None:
        return Explanation(closed_form_s=parts, factors={})
    names = STAGE_FEATURES[stage]
    contributions = path_contributions(predictor.forests[stage], feature_matrix([query.row], names))[0]
    shared = blend.weight * expected_value(predictor.forests[stage]) + (1.0 - blend.weight) * math.log(blend.factor)
    factors = {"overall": math.exp(shared)}
    for group, members in FEATURE_GROUPS.items():
        logs = sum(float(value) for name, value in zip(names, contributions, strict=True) if name in members)
        factors[group] = math.exp(blend.weight * logs)
    return Explanation(closed_form_s=parts, factors=factors)


def feature_importances(predictor: HierarchicalPredictor) -> dict[str, float]:
    """Each feature's share of the gain of all splits, largest first; empty for a predictor without XGBoost JSON."""
    stage = next((name for name in _DECIDING if name in predictor.boosters), None)
    return {} if stage is None else gain_importances(predictor.boosters[stage], STAGE_FEATURES[stage])


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
    """How much each feature adds to each output by the path method; rows and result have shape (n, features).

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
    shares = zip(names, (gain / total if total > 0 else gain).tolist(), strict=True)
    return dict(sorted(shares, key=lambda share: -share[1]))
