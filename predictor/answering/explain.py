"""Why an answer is what it is: the closed form by parts, and the learned factors that correct it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precision_time.predictor.learning.contributions import expected_value, gain_importances, path_contributions
from precision_time.predictor.learning.hierarchy import STAGE_FEATURES, HierarchicalPredictor
from precision_time.predictor.rows.features import FEATURE_GROUPS, Query, feature_matrix

__all__ = ["Explanation", "explain_query", "feature_importances"]

#: The stage that decides the iteration, else the one that decides most of it.
_DECIDING = ("total", "compute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """``closed_form_s`` by part, in seconds, and ``factors`` by what they depend on.

    The parts add up to the iteration by the closed forms. Where a model of the whole iteration was trained, that
    iteration times all factors is the predicted one; else the factors correct its compute alone. ``overall`` is what
    all queries share.
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


def explain_query(query: Query, *, predictor: HierarchicalPredictor | None) -> Explanation:
    """The parts and factors of one answer; without a predictor the closed form alone.

    Factors come from the path through each tree: what a split changed in the mean of the rows below it is booked on
    the feature it asks (Saabas, "Interpreting random forests", 2014), summed over groups of features.
    """
    parts = _split_closed_form(query)
    stage = next((name for name in _DECIDING if predictor is not None and name in predictor.forests), None)
    if predictor is None or stage is None:
        return Explanation(closed_form_s=parts, factors={})
    weight, factor = predictor.lean_of(query)
    names = STAGE_FEATURES[stage]
    booked = path_contributions(predictor.forests[stage], feature_matrix([query.row], names))[0]
    shared = weight * expected_value(predictor.forests[stage]) + (1.0 - weight) * math.log(factor)
    factors = {"overall": math.exp(shared)}
    for group, members in FEATURE_GROUPS.items():
        logs = sum(float(value) for name, value in zip(names, booked, strict=True) if name in members)
        factors[group] = math.exp(weight * logs)
    return Explanation(closed_form_s=parts, factors=factors)


def feature_importances(predictor: HierarchicalPredictor) -> dict[str, float]:
    """Share of the gain of all splits by feature, largest first; empty for a predictor loaded without XGBoost JSON."""
    stage = next((name for name in _DECIDING if name in predictor.boosters), None)
    return {} if stage is None else gain_importances(predictor.boosters[stage], STAGE_FEATURES[stage])
