"""Why an answer is what it is: reasons in words, the closed form by parts, and the learned factors that correct it."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precision_time.predictor.answering.answers import Answers
from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.closed_form.solve import ClosedForm, solve_closed_form
from precision_time.predictor.learning.blending import Blend
from precision_time.predictor.learning.contributions import expected_value, gain_importances, path_contributions
from precision_time.predictor.learning.hierarchy import STAGE_FEATURES, HierarchicalPredictor
from precision_time.predictor.rows.features import FEATURE_GROUPS, Query, feature_matrix
from precision_time.predictor.setup.hardware import supported_precisions
from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.predictor.setup.training_setup import TrainingSetup

__all__ = ["Explanation", "explain_query", "explain_time", "feature_importances", "judge_answer"]

#: Two times whose ratio is this near to 1 count as equal.
_NO_DIFFERENCE = 0.005


def _tell_gains(name: str, seconds: float, others: dict[str, float]) -> str:
    """In words, how much faster or slower ``name`` is than each of the ``others`` (seconds by name)."""
    parts = []
    for other, other_s in others.items():
        if abs(other_s / seconds - 1) < _NO_DIFFERENCE:
            parts.append(f"is as fast as {other}")
        elif other_s > seconds:
            parts.append(f"is {other_s / seconds:.2f} times as fast as {other}")
        else:
            parts.append(f"takes {seconds / other_s:.2f} times as long as {other}")
    return f"{name} {' and '.join(parts)}"


def _compare_precisions(setup: TrainingSetup, closed: ClosedForm) -> list[str]:
    """The policy compared with fp32, and with tf32 on devices that have it, by the closed forms."""

    def time_as(name: str) -> float:
        return solve_closed_form(dataclasses.replace(setup, precision=PRECISIONS[name])).iteration_time_s

    policy, supported = setup.precision, supported_precisions(setup.hardware)
    policy_s, has_tf32 = closed.iteration_time_s, "tf32" in supported
    if policy.name == "fp32":
        if not has_tf32:
            return []
        tf32_s = time_as("tf32")
        gains = [_tell_gains("tf32", tf32_s, {"strict fp32": policy_s})]
        mixed = next((name for name in ("amp_bf16", "amp_fp16") if name in supported), None)
        if mixed:
            gains.append(_tell_gains(mixed, time_as(mixed), {"tf32": tf32_s, "strict fp32": policy_s}))
        return [
            "frameworks may run fp32 products as tf32 on this device unless that is switched off (torch: "
            "set_float32_matmul_precision('highest') and cudnn.allow_tf32 = False); the closed forms take fp32 as "
            "strict fp32",
            f"by the closed forms {', '.join(gains)} here",
        ]
    fp32_s = time_as("fp32")
    others = {"strict fp32" if has_tf32 else "fp32": fp32_s}
    if has_tf32 and policy.name != "tf32":
        others = {"tf32": time_as("tf32")} | others
    reasons = [f"by the closed forms {_tell_gains(policy.name, policy_s, others)} here"]
    if policy_s > (1 + _NO_DIFFERENCE) * fp32_s:
        if closed.launch_bound and policy.is_mixed:
            scaling = " and loss scaling" if policy.loss_scaling else ""
            cause = f"casts{scaling} add operations that the host must launch, and the device waits for the host"
        elif setup.hardware.peak_flops_per_s[policy.compute] <= setup.hardware.peak_flops_per_s["fp32"]:
            cause = f"this device computes {policy.compute} products no faster than fp32 ones"
        else:
            cause = "the casts around the narrower products cost more than the products save"
        reasons.append(f"{policy.name} does not pay here: {cause}")
    return reasons


def explain_time(setup: TrainingSetup, closed: ClosedForm, *, exposed_share: float) -> list[str]:
    """Reasons, from the closed forms, why the iteration takes as long as it does."""
    reasons = []
    if closed.launch_bound:
        reasons.append(
            "launch-bound: the host launches operations more slowly than the device runs them, so a narrower "
            "precision gains little; a larger batch or compilation helps"
        )
    reasons += _compare_precisions(setup, closed)
    bubble = closed.pipeline_bubble_s / closed.iteration_time_s
    if bubble > 0.1:
        reasons.append(
            f"{bubble:.0%} of the iteration is the pipeline's bubble: more micro-steps or virtual stages shrink it"
        )
    if exposed_share > 0.1:
        reasons.append(f"{exposed_share:.0%} of the iteration waits for communication that no compute hides")
    return reasons


def judge_answer(
    answers: Answers, published: PublishedPredictor | None, setup: TrainingSetup, *, why: str
) -> list[str]:
    """Reasons that say who answered the one query, and which parts of it are new."""
    if published is None:
        return [f"{why}: answered by the closed forms, whose interval is a rule of thumb"]
    artifact_id = published.manifest.artifact_id
    reasons = [f"{artifact_id}: {gap}" for gap in answers.gaps[0]]
    if not answers.by_artifact[0]:
        subject = answers.regimes[0].subject(setup)
        reasons.append(
            f"{artifact_id} has no answer for {subject}: answered by the closed forms, whose interval is a rule of "
            "thumb"
        )
    elif not answers.has_own_interval[0]:
        reasons.append("no interval was fitted for a question like this: the widest one is given")
    return reasons


#: The stage that decides the iteration where it was trained, else the one that decides most of it.
_DECIDING = ("total", "compute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """``closed_form_s`` by part, in seconds, and learned ``factors`` by group of features.

    The parts add up to the iteration by the closed forms. That iteration times all factors is the predicted iteration
    where a model of the whole iteration was trained; else the factors correct its compute alone. All queries share
    the factor ``overall``.
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
    """The parts and factors of one answer, in which the trees count by ``blend``; without a predictor the parts alone.

    Factors come from the path through each tree: the change of the mean at a split is assigned to the feature of the
    split (Saabas, "Interpreting random forests", 2014), and summed over groups of features.
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
    """Share of the gain of all splits by feature, largest first; empty for a predictor loaded without XGBoost JSON."""
    stage = next((name for name in _DECIDING if name in predictor.boosters), None)
    return {} if stage is None else gain_importances(predictor.boosters[stage], STAGE_FEATURES[stage])
