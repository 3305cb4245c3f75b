"""The reasons that an answer prints: who answered, what the training data lacks, why the iteration takes so long."""

import dataclasses

from precision_time.predictor.answering.answers import Answers
from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.closed_form.solve import ClosedForm, solve_closed_form
from precision_time.predictor.setup.hardware import supported_precisions
from precision_time.predictor.setup.precision import PRECISIONS
from precision_time.predictor.setup.training_setup import TrainingSetup

__all__ = ["explain_origin", "explain_time"]

#: Two times whose ratio is this near to 1 count as equal.
_NO_DIFFERENCE = 0.005


def _describe_gain(name: str, seconds: float, others: dict[str, float]) -> str:
    """How much faster or slower ``name`` is than each of the ``others`` (seconds by name)."""
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
    """The precision compared with fp32, and with tf32 on devices that have it, by the closed forms."""

    def time_as(name: str) -> float:
        return solve_closed_form(dataclasses.replace(setup, precision=PRECISIONS[name])).iteration_time_s

    policy, supported = setup.precision, supported_precisions(setup.hardware)
    policy_s, has_tf32 = closed.iteration_time_s, "tf32" in supported
    if policy.name == "fp32":
        if not has_tf32:
            return []
        tf32_s = time_as("tf32")
        gains = [_describe_gain("tf32", tf32_s, {"strict fp32": policy_s})]
        mixed = next((name for name in ("amp_bf16", "amp_fp16") if name in supported), None)
        if mixed:
            gains.append(_describe_gain(mixed, time_as(mixed), {"tf32": tf32_s, "strict fp32": policy_s}))
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
    reasons = [f"by the closed forms {_describe_gain(policy.name, policy_s, others)} here"]
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
    """Why the iteration takes as long as it does, by the closed forms."""
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
        reasons.append(f"{exposed_share:.0%} of the iteration waits for communication that does not overlap compute")
    return reasons


def explain_origin(
    answers: Answers, published: PublishedPredictor | None, setup: TrainingSetup, *, why: str
) -> list[str]:
    """Who answered the one query, and what the training data lacks for it; empty for a known configuration.

    ``why`` says why there is no ``published`` artifact, where there is none.
    """
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
        reasons.append("no interval was fitted for a question like this, so the widest interval is given")
    return reasons
