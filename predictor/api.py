"""predict_time: resolve the question, build one feature row, predict, and say how far to trust the answer."""

import dataclasses
import math
import numbers
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsIndex

from precision_time.predictor.answering.answers import answer_queries
from precision_time.predictor.answering.artifact import (
    PublishedPredictor,
    load_artifact,
    refresh_artifacts,
    standing_artifact,
)
from precision_time.predictor.answering.calibration import Calibration, calibrate
from precision_time.predictor.answering.estimate import TimeEstimate
from precision_time.predictor.answering.explain import explain_query
from precision_time.predictor.answering.reasons import explain_time, judge_answer
from precision_time.predictor.answering.user_models import resolve_model
from precision_time.predictor.closed_form.memory import estimate_memory, explain_memory
from precision_time.predictor.rows.features import Query
from precision_time.predictor.setup.hardware import (
    HardwareSpec,
    choose_precision,
    find_hardware,
    load_hardware,
    parse_bandwidth,
)
from precision_time.predictor.setup.implementation import Checkpointing, Implementation
from precision_time.predictor.setup.parallelism import Parallelism, parse_parallelism
from precision_time.predictor.setup.precision import Precision, parse_precision
from precision_time.predictor.setup.training_setup import TrainingSetup, fill_pipeline
from precision_time.storage.errors import InputError, OutOfDomainError, UnknownNameError, UnreachableError

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


def _choose_artifact(artifact: str | None, *, refresh: bool) -> tuple[PublishedPredictor | None, str]:
    """What answers, and in words why where none was named."""
    if refresh:
        refresh_artifacts()
    published, why = standing_artifact() if artifact is None else (load_artifact(str(artifact)), "")
    if refresh and published is not None and not published.is_current:
        raise UnreachableError(
            "no newer artifact could be looked for",
            got="; ".join(published.notes),
            expected="an answer of the registry",
            fix="check the connection, or leave refresh out to be answered by the local copy",
        )
    return published, why


def _find_saved(measured: object, published: PublishedPredictor | None) -> Calibration | None:
    """What was calibrated before, held against the artifact that answers; None for rows."""
    if isinstance(measured, Calibration) or str(measured).casefold().endswith(".json"):
        return calibrate(measured, artifact=published)
    return None


def predict_time(
    model: Any,
    precision: str | Precision,
    *,
    batch_size: int,
    gpus: int = 1,
    gpu: str | None = None,
    nodes: int | None = None,
    gradient_accumulation_steps: int = 1,
    strategy: str = "ddp",
    task_input: str = "",
    sample_input: Any = None,
    loss: Callable[[Any], Any] | None = None,
    activation_checkpointing: str | None = None,
    compiled: bool | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    dataset_size: int | None = None,
    network_bandwidth: str | None = None,
    hardware_file: str | Path | None = None,
    artifact: str | None = None,
    refresh: bool = False,
    measured: object = None,
    strict: bool = False,
    explain: bool = False,
    allow_fallback: bool = False,
) -> TimeEstimate:
    """How long one training iteration of ``model`` takes, and with ``steps`` or ``epochs`` the whole job.

    ``model`` is the name of a known one, or your own: a ``torch.nn.Module`` with ``sample_input`` (a tensor
    [batch, ...], a tuple or dict of them, or a shape such as ``3x224x224`` or ``tokens:512``) and, where what it
    returns is no loss, ``loss`` (a function from that to a scalar); the text ``module:factory``; the path of a Hugging
    Face ``config.json``; or a card ``{"params": ..., "forward_flops": ...}``; see ``own_models.resolve_model``.
    ``precision`` in any common spelling (``mixed_fp16_fp32``, ``bf16-mixed``, ``tf32``, ...); ``batch_size`` is what
    one GPU takes in one micro-step, ``gpus`` the number of GPUs over all nodes, ``gpu`` the device's name (what was
    assumed without one is said in ``reasons``). ``strategy`` is ``ddp``, ``fsdp``, ``zero1`` to ``zero3``, or degrees
    such as ``tp4-pp8`` (the rest of the GPUs are replicas, each of batch ``batch_size``); ``task_input`` another
    resolution or sequence length than the model's usual one; ``activation_checkpointing`` ``none``, ``selective`` or
    ``full``; ``compiled`` whether the step is compiled; None where you do not know.

    ``dataset_size`` counts samples. ``measured`` are iterations that you timed, of this model or on this GPU: rows
    (one without a model is of this one), a file of them, or a saved calibration (see ``calibrate``); they correct the
    answer and its interval. ``network_bandwidth`` is that of one node in one direction with its unit (``25 Gbit/s``);
    ``hardware_file`` describes devices that are not shipped, in the form of ``predictor/data/gpus.toml``.

    ``artifact`` names a published predictor, such as ``s3://bucket/artifacts/default@champion`` or
    ``/data/registry/default@3``; without one ``PRECISION_TIME_ARTIFACT``, the configuration file and the configured
    registry are asked, and else the artifact that comes with the package answers. It is loaded once in a process;
    ``refresh`` asks its registry again. Where a remote registry does not answer, the copy that it last gave to this
    machine does, and ``reasons`` say so; with ``refresh`` that is an error. ``explain`` adds the closed form by part
    and the learned factors (``explanation``). ``allow_fallback`` answers for the nearest supported policy where the
    device lacks ``precision``: ``effective_precision`` names it and ``reasons`` say why.

    Raises ``UnknownNameError`` (model, GPU, precision; with the nearest names), ``InputError`` for a number that
    makes no sense, ``PrecisionUnsupportedError`` when the device lacks the precision and no fallback is allowed,
    ``IntegrityError`` for an artifact that is not what was published, ``UnreachableError`` for a registry that does
    not answer, and with ``strict`` ``OutOfDomainError`` outside the training data.
    """
    published, unpublished = _choose_artifact(artifact, refresh=refresh)
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
    # a saved calibration carries the devices and models that it was measured on
    kept = _find_saved(measured, published)
    if kept is not None:
        described += kept.hardware
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
    found = resolve_model(
        model,
        task_input=str(task_input or ""),
        sample_input=sample_input,
        loss=loss,
        measured=(*(published.workloads if published else ()), *(kept.workloads if kept is not None else ())),
    )
    setup = TrainingSetup(
        workload=found.workload,
        hardware=hardware,
        precision=policy,
        world_size=world_size,
        nodes=number_of_nodes,
        batch_size=samples,
        gradient_accumulation_steps=micro_steps,
        strategy=strategy,
        parallelism=None if layout == Parallelism(data=world_size) else layout,
        implementation=Implementation(
            checkpointing=_checkpointing(activation_checkpointing),
            compiled=_check_compiled(compiled),
            trainable_share=found.trainable_share,
        ),
    )
    global_batch_size = setup.batch_size * layout.data * micro_steps
    job_steps, epoch_steps = _plan_steps(
        steps=steps, epochs=epochs, dataset_size=dataset_size, global_batch_size=global_batch_size
    )

    query = Query.of(setup)
    closed = query.closed
    answers = answer_queries([query], published=published)
    if measured is not None:
        calibration = kept or calibrate(
            measured, artifact=published, workloads=(setup.workload,), hardware=described, asked=setup.workload
        )
        answers = calibration.correct([query], answers)
    memory = estimate_memory(setup)
    warned = explain_memory(setup, memory)
    regime, judged = answers.regimes[0], judge_answer(answers, published, setup, why=unpublished)
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
        reasons=(
            *([warned] if warned else []),
            *(published.notes if published is not None else ()),
            *filter(None, answers.corrections),
            *found.reasons,
            *reasons,
            *judged,
            *explain_time(setup, closed, exposed_share=exposed / iteration),
        ),
        memory_bytes=memory.total_bytes,
        memory_fits=memory.fits,
        largest_batch=memory.largest_batch,
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
