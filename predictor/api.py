"""predict_time: resolve the question, build one feature row, predict, and say how far to trust the answer."""

import dataclasses
import math
import numbers
import operator
from pathlib import Path
from typing import SupportsIndex

from precision_time.predictor.answers import Answers, answer_queries
from precision_time.predictor.artifact import PublishedPredictor, load_artifact, standing_artifact
from precision_time.predictor.closed_form import ClosedForm, TrainingSetup, fill_pipeline, solve_closed_form
from precision_time.predictor.estimate import TimeEstimate
from precision_time.predictor.explain import explain_query
from precision_time.predictor.features import Query
from precision_time.predictor.hardware import (
    HardwareSpec,
    choose_precision,
    find_hardware,
    load_hardware,
    parse_bandwidth,
    supported_precisions,
)
from precision_time.predictor.implementation import Checkpointing, Implementation
from precision_time.predictor.parallelism import Parallelism, parse_parallelism
from precision_time.predictor.precision import PRECISIONS, Precision, parse_precision
from precision_time.predictor.workload import find_workload
from precision_time.storage.errors import InputError, OutOfDomainError, UnknownNameError

__all__ = ["predict_time"]

#: The device that is assumed, and named in the answer, when neither the caller nor an artifact gives one.
DEFAULT_GPU = "A100-SXM4-80GB"
_LARGEST_COUNT = 10**15


def _checkpointing(text: str | None) -> Checkpointing | None:
    if text not in (None, "none", "selective", "full"):
        raise UnknownNameError("activation checkpointing", str(text), ("none", "selective", "full"))
    return text  # type: ignore[return-value]


def _check_compiled(compiled: bool | None) -> bool | None:
    if compiled is not None and not isinstance(compiled, bool):
        raise InputError("compiled is not usable", got=repr(compiled), expected="True, False, or None for not known")
    return compiled


def _count(name: str, value: SupportsIndex | None, *, at_most: int = _LARGEST_COUNT) -> int:
    try:
        if value is None or isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InputError(
            f"{name} is not a count", got=repr(value), expected=f"an integer from 1 to {at_most}"
        ) from None
    if not 1 <= number <= at_most:
        raise InputError(f"{name} is out of range", got=number, expected=f"an integer from 1 to {at_most}")
    return number


def _place_ranks(world_size: int, nodes: SupportsIndex | None, hardware: HardwareSpec) -> tuple[int, str | None]:
    """How many nodes hold the ranks, and what was assumed."""
    if nodes is None:
        number = math.ceil(world_size / hardware.gpus_per_node)
        if world_size % number:
            raise InputError(
                "the GPUs do not divide over nodes of this kind",
                got=f"{world_size} GPUs on nodes of {hardware.gpus_per_node}: {world_size} / {number} nodes",
                expected="a whole number of GPUs per node",
                fix="give nodes= or another number of GPUs",
            )
        assumed = f"assumed {number} nodes of {world_size // number} GPUs" if number > 1 else None
        return number, assumed
    number = _count("nodes", nodes)
    if world_size % number:
        raise InputError(
            "the GPUs do not divide over the nodes",
            got=f"{world_size} / {number}",
            expected="a whole number of GPUs per node",
        )
    per_node = world_size // number
    if per_node > hardware.gpus_per_node:
        return number, f"{per_node} GPUs on a node, where {hardware.gpus_per_node} are usual"
    return number, None


def _plan_steps(
    *, steps: SupportsIndex | None, epochs: float | None, dataset_size: SupportsIndex | None, global_batch_size: int
) -> tuple[int | None, int | None]:
    """(steps of the whole job, steps of one epoch); the last batch of an epoch may be short and counts as one."""
    if steps is not None and epochs is not None:
        raise InputError(
            "the length of the job is given twice",
            got=f"steps={steps}, epochs={epochs}",
            expected="steps=, or epochs= with dataset_size=",
        )
    per_epoch = None
    if dataset_size is not None:
        per_epoch = math.ceil(_count("dataset_size", dataset_size) / global_batch_size)
    if steps is not None:
        return _count("steps", steps), per_epoch
    if epochs is None:
        return None, per_epoch
    if per_epoch is None:
        raise InputError(
            "epochs without the size of the data", got=f"epochs={epochs}", expected="dataset_size= in samples"
        )
    number = float(epochs) if isinstance(epochs, numbers.Real) and not isinstance(epochs, bool) else math.nan
    if not 0 < number <= _LARGEST_COUNT:
        raise InputError(
            "epochs is not usable", got=repr(epochs), expected=f"a number above 0, at most {_LARGEST_COUNT:.0e}"
        )
    return math.ceil(number * per_epoch), per_epoch


#: A ratio of two times this near to 1 is no difference.
_NO_DIFFERENCE = 0.005


def _tell_gains(name: str, seconds: float, others: dict[str, float]) -> str:
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
    """What the policy gains or loses against fp32, and against tf32 on devices that have it, by the closed forms."""

    def time_as(name: str) -> float:
        return solve_closed_form(dataclasses.replace(setup, precision=PRECISIONS[name])).iteration_time_s

    policy, supported = setup.precision, supported_precisions(setup.hardware)
    own_s, has_tf32 = closed.iteration_time_s, "tf32" in supported
    if policy.name == "fp32":
        if not has_tf32:
            return []
        tf32_s = time_as("tf32")
        gains = [_tell_gains("tf32", tf32_s, {"strict fp32": own_s})]
        mixed = next((name for name in ("amp_bf16", "amp_fp16") if name in supported), None)
        if mixed:
            gains.append(_tell_gains(mixed, time_as(mixed), {"tf32": tf32_s, "strict fp32": own_s}))
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
    reasons = [f"by the closed forms {_tell_gains(policy.name, own_s, others)} here"]
    if own_s > (1 + _NO_DIFFERENCE) * fp32_s:
        if closed.launch_bound and policy.is_mixed:
            scaling = " and loss scaling" if policy.loss_scaling else ""
            cause = f"casts{scaling} add operations that the host has to issue, and the device waits for the host"
        elif setup.hardware.peak_flops_per_s[policy.compute] <= setup.hardware.peak_flops_per_s["fp32"]:
            cause = f"this device computes {policy.compute} products no faster than fp32 ones"
        else:
            cause = "what is added around the narrower products costs more than they save"
        reasons.append(f"{policy.name} does not pay here: {cause}")
    return reasons


def _explain(setup: TrainingSetup, closed: ClosedForm, *, exposed_share: float) -> list[str]:
    """Why the iteration takes what it takes, from the closed forms."""
    reasons = []
    if closed.launch_bound:
        reasons.append(
            "launch-bound: the host issues operations more slowly than the device runs them, so a narrower "
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


def _judge(answers: Answers, published: PublishedPredictor | None, setup: TrainingSetup, *, why: str) -> list[str]:
    """Who answered the one query, and what of it is new, as reasons."""
    if published is None:
        return [f"{why}: answered by the closed forms, whose interval is a rule of thumb"]
    artifact_id = published.manifest.artifact_id
    reasons = [f"{artifact_id}: {gap}" for gap in answers.gaps[0]]
    if not answers.by_artifact[0]:
        regime = answers.regimes[0]
        subject = setup.hardware.name if "gpu" in regime else setup.workload.name
        if regime == "beyond scale":
            subject = f"{setup.world_size} ranks"
        reasons.append(
            f"{artifact_id} does not speak of {subject}: answered by the closed forms, whose interval is a "
            "rule of thumb"
        )
    elif not answers.calibrated[0]:
        reasons.append("no interval was calibrated for such a question: the widest at hand is given")
    return reasons


def predict_time(
    model: str,
    precision: str | Precision,
    *,
    batch_size: int,
    gpus: int = 1,
    gpu: str | None = None,
    nodes: int | None = None,
    gradient_accumulation_steps: int = 1,
    strategy: str = "ddp",
    task_input: str = "",
    activation_checkpointing: str | None = None,
    compiled: bool | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    dataset_size: int | None = None,
    network_bandwidth: str | None = None,
    hardware_file: str | Path | None = None,
    artifact: str | None = None,
    strict: bool = False,
    explain: bool = False,
    allow_fallback: bool = False,
) -> TimeEstimate:
    """How long one training iteration of ``model`` takes, and with ``steps`` or ``epochs`` the whole job.

    ``precision`` in any common spelling (``mixed_fp16_fp32``, ``bf16-mixed``, ``tf32``, ...); ``batch_size`` is what
    one GPU takes in one micro-step, ``gpus`` the number of GPUs over all nodes, ``gpu`` the device's name (what was
    assumed without one is said in ``reasons``). ``strategy`` is ``ddp``, ``fsdp``, ``zero1`` to ``zero3``, or degrees
    such as ``tp4-pp8`` (the rest of the GPUs are replicas, each of batch ``batch_size``); ``task_input`` another
    resolution or sequence length than the model's usual one; ``activation_checkpointing`` ``none``, ``selective`` or
    ``full``; ``compiled`` whether the step is compiled; None where you do not know.

    ``dataset_size`` counts samples. ``network_bandwidth`` is that of one
    node in one direction with its unit (``25 Gbit/s``); ``hardware_file`` describes devices that are not shipped, in
    the form of ``predictor/data/gpus.toml``. ``artifact`` names a published predictor (``name@version`` with the
    registry's URL or folder before it); without one ``PRECISION_TIME_ARTIFACT`` and the configured registry are asked,
    and else the artifact that comes with the package answers. ``explain`` adds the closed form by part and the learned
    factors (``explanation``). ``allow_fallback`` answers for the nearest supported policy where the device lacks
    ``precision``: ``effective_precision`` names it and ``reasons`` say why.

    Raises ``UnknownNameError`` (model, GPU, precision; with the nearest names), ``InputError`` for a number that
    makes no sense, ``PrecisionUnsupportedError`` when the device lacks the precision and no fallback is
    allowed, ``IntegrityError`` for an
    artifact that is not what was published, and with ``strict`` ``OutOfDomainError`` outside the training data.
    """
    published, unpublished = standing_artifact() if artifact is None else (load_artifact(str(artifact)), "")
    world_size = _count("gpus", gpus, at_most=1_000_000)
    micro_steps = _count("gradient_accumulation_steps", gradient_accumulation_steps, at_most=1_000_000)
    reasons: list[str] = []
    if published is not None and unpublished.startswith("the configured registry holds no"):
        reasons.append(unpublished)
    if gpu is None:
        gpu = published.manifest.default_gpu if published else DEFAULT_GPU
        reasons.append(f"no gpu was given: assumed {gpu}")
    layout = parse_parallelism(strategy, world_size=world_size)
    described = list(load_hardware(hardware_file).values()) if hardware_file is not None else []
    hardware = find_hardware(gpu, measured=[*(published.hardware if published else ()), *described])
    policy, replaced = choose_precision(hardware, parse_precision(precision), allow_fallback=allow_fallback)
    if replaced:
        reasons.append(replaced)
    if network_bandwidth is not None:
        hardware = dataclasses.replace(hardware, network_bytes_per_s=parse_bandwidth(network_bandwidth))
    number_of_nodes, assumed = _place_ranks(world_size, nodes, hardware)
    if assumed:
        reasons.append(assumed)
    samples = _count("batch_size", batch_size, at_most=1_000_000_000)
    told = (samples, micro_steps)
    samples, micro_steps = fill_pipeline(stages=layout.pipeline, batch_size=samples, micro_steps=micro_steps)
    if (samples, micro_steps) != told:
        reasons.append(f"assumed {micro_steps} micro-steps of one sample in the pipeline")
    setup = TrainingSetup(
        workload=find_workload(
            model, task_input=str(task_input or ""), measured=published.workloads if published else ()
        ),
        hardware=hardware,
        precision=policy,
        world_size=world_size,
        nodes=number_of_nodes,
        batch_size=samples,
        gradient_accumulation_steps=micro_steps,
        strategy=strategy,
        parallelism=None if layout == Parallelism(data=world_size) else layout,
        implementation=Implementation(
            checkpointing=_checkpointing(activation_checkpointing), compiled=_check_compiled(compiled)
        ),
    )
    global_batch_size = setup.batch_size * layout.data * micro_steps
    job_steps, epoch_steps = _plan_steps(
        steps=steps, epochs=epochs, dataset_size=dataset_size, global_batch_size=global_batch_size
    )

    query = Query.of(setup)
    closed = query.closed
    answers = answer_queries([query], published=published)
    regime, judged = answers.regimes[0], _judge(answers, published, setup, why=unpublished)
    if strict and (regime != "known" or judged):
        raise OutOfDomainError(
            "the question is outside the training data",
            got=f"regime {regime!r}: {'; '.join(judged)}",
            expected="what was measured: the model on this GPU, its batch sizes, precision and number of GPUs",
            fix="measure it in a campaign, or leave strict out",
        )
    parts = answers.parts
    iteration, compute = float(parts.iteration_time_s[0]), float(parts.compute_time_s[0])
    exposed = float(parts.exposed_communication_s[0])
    low, high = float(answers.low_s[0]), float(answers.high_s[0])
    return TimeEstimate(
        iteration_time_s=iteration,
        low_s=low,
        high_s=high,
        level=answers.level,
        compute_time_s=compute,
        communication_time_s=float(parts.communication_time_s[0]),
        exposed_communication_s=exposed,
        optimizer_time_s=compute * closed.optimizer_time_s / closed.compute_time_s,
        samples_per_s=global_batch_size / iteration,
        global_batch_size=global_batch_size,
        world_size=world_size,
        model=setup.workload.name,
        requested_precision=str(precision.name if isinstance(precision, Precision) else precision),
        effective_precision=policy.name,
        gpu=hardware.name,
        regime=regime,
        reasons=(*reasons, *judged, *_explain(setup, closed, exposed_share=exposed / iteration)),
        artifact_id=published.manifest.artifact_id if published is not None and answers.by_artifact[0] else None,
        steps=job_steps,
        epochs=epochs,
        total_time_s=None if job_steps is None else job_steps * iteration,
        total_low_s=None if job_steps is None else job_steps * low,
        total_high_s=None if job_steps is None else job_steps * high,
        epoch_time_s=None if epoch_steps is None else epoch_steps * iteration,
        explanation=explain_query(query, predictor=published.predictor if published else None).to_dict()
        if explain
        else None,
    )
