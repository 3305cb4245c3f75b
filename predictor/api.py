"""predict_time: resolve the question, build one feature row, predict, and say how far to trust the answer."""

import dataclasses
import math
import numbers
import operator
from pathlib import Path
from typing import SupportsIndex

from precision_time.predictor.artifact import PublishedPredictor, load_artifact, standing_artifact
from precision_time.predictor.closed_form import ClosedForm, TrainingSetup, solve_closed_form
from precision_time.predictor.estimate import TimeEstimate
from precision_time.predictor.features import Query
from precision_time.predictor.hardware import (
    HardwareSpec,
    check_precision,
    find_hardware,
    load_hardware,
    parse_bandwidth,
)
from precision_time.predictor.hierarchy import PredictedParts
from precision_time.predictor.precision import Precision, parse_precision
from precision_time.predictor.workload import find_workload
from precision_time.storage.errors import InputError, OutOfDomainError

__all__ = ["predict_time"]

#: The device that is assumed, and named in the answer, when neither the caller nor an artifact gives one.
DEFAULT_GPU = "A100-SXM4-80GB"
#: Half width of the interval where no artifact applies, in log seconds: a rule of thumb. Of 960 public rows of
#: ResNet-18 and -50, BERT-base and ViT-B/16 (1 to 32 GPUs, 20 kinds, GTX 1080 Ti to B200) 90 % lie within a factor
#: of 1.55; of BERT-base alone, the worst, within 2.5. The closed forms' constants were fitted on some of these rows.
CLOSED_FORM_RADIUS = math.log(2.5)
CLOSED_FORM_LEVEL = 0.9
_LARGEST_COUNT = 10**15


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


def _explain(setup: TrainingSetup, closed: ClosedForm, *, exposed_share: float) -> list[str]:
    """Why the iteration takes what it takes, from the closed forms."""
    reasons = []
    if closed.launch_bound:
        reasons.append(
            "launch-bound: the host issues operations more slowly than the device runs them, so a narrower "
            "precision gains little; a larger batch or compilation helps"
        )
    if setup.precision.name != "fp32":
        fp32 = solve_closed_form(dataclasses.replace(setup, precision=parse_precision("fp32")))
        gain = fp32.iteration_time_s / closed.iteration_time_s
        reasons.append(f"by the closed forms {setup.precision.name} is {gain:.2f} times as fast as fp32 here")
    if exposed_share > 0.1:
        reasons.append(f"{exposed_share:.0%} of the iteration waits for communication that no compute hides")
    return reasons


def _judge(
    setup: TrainingSetup, published: PublishedPredictor | None, *, unpublished: str
) -> tuple[str, float, float, str | None, list[str]]:
    """(regime, interval radius in log seconds, level, artifact id, reasons)."""
    if published is None:
        reasons = [f"{unpublished}: answered by the closed forms, whose interval is a rule of thumb"]
        return "new model and gpu", CLOSED_FORM_RADIUS, CLOSED_FORM_LEVEL, None, reasons
    predictor, artifact_id = published.predictor, published.manifest.artifact_id
    regime = predictor.domain.regime_of(setup)
    if setup.hardware.name not in predictor.domain.gpus:
        reasons = [
            f"{artifact_id} was trained on {', '.join(predictor.domain.gpus)}, not on {setup.hardware.name}: answered "
            "by the closed forms, whose interval is a rule of thumb"
        ]
        return regime, CLOSED_FORM_RADIUS, CLOSED_FORM_LEVEL, None, reasons
    gaps = predictor.domain.list_gaps(setup)
    # The regime's own gap (the model, the scale) is what its radius was calibrated for; a further one is not.
    calibrated = regime in predictor.radii and len(gaps) == (regime != "known")
    reasons = [f"{artifact_id}: {gap}" for gap in gaps]
    if calibrated:
        return regime, predictor.radii[regime], predictor.level, artifact_id, reasons
    reasons.append("no interval was calibrated for such a question: the widest at hand is given")
    return regime, max([CLOSED_FORM_RADIUS, *predictor.radii.values()]), predictor.level, artifact_id, reasons


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
    steps: int | None = None,
    epochs: float | None = None,
    dataset_size: int | None = None,
    network_bandwidth: str | None = None,
    hardware_file: str | Path | None = None,
    artifact: str | None = None,
    strict: bool = False,
) -> TimeEstimate:
    """How long one training iteration of ``model`` takes, and with ``steps`` or ``epochs`` the whole job.

    ``precision`` in any common spelling (``mixed_fp16_fp32``, ``bf16-mixed``, ``tf32``, ...); ``batch_size`` is what
    one GPU takes in one micro-step, ``gpus`` the number of GPUs over all nodes, ``gpu`` the device's name (what was
    assumed without one is said in ``reasons``). ``dataset_size`` counts samples. ``network_bandwidth`` is that of one
    node in one direction with its unit (``25 Gbit/s``); ``hardware_file`` describes devices that are not shipped, in
    the form of ``predictor/data/gpus.toml``. ``artifact`` names a published predictor (``name@version`` with the
    registry's URL or folder before it); without one ``PRECISION_TIME_ARTIFACT`` and the configured registry are asked,
    and else the closed forms answer.

    Raises ``UnknownNameError`` (model, GPU, precision; with the nearest names), ``InputError`` for a number that
    makes no sense, ``PrecisionUnsupportedError`` when the device lacks the precision, ``IntegrityError`` for an
    artifact that is not what was published, and with ``strict`` ``OutOfDomainError`` outside the training data.
    """
    published, unpublished = standing_artifact() if artifact is None else (load_artifact(str(artifact)), "")
    world_size = _count("gpus", gpus, at_most=1_000_000)
    micro_steps = _count("gradient_accumulation_steps", gradient_accumulation_steps, at_most=1_000_000)
    reasons: list[str] = []
    if gpu is None:
        gpu = published.manifest.default_gpu if published else DEFAULT_GPU
        reasons.append(f"no gpu was given: assumed {gpu}")
    if strategy != "ddp":
        raise InputError(
            "the strategy is not covered",
            got=repr(strategy),
            expected="ddp",
            fix="no estimate is better than one for another strategy",
        )
    policy = parse_precision(precision)
    described = list(load_hardware(hardware_file).values()) if hardware_file is not None else []
    hardware = find_hardware(gpu, measured=[*(published.hardware if published else ()), *described])
    check_precision(hardware, policy)
    if network_bandwidth is not None:
        hardware = dataclasses.replace(hardware, network_bytes_per_s=parse_bandwidth(network_bandwidth))
    number_of_nodes, assumed = _place_ranks(world_size, nodes, hardware)
    if assumed:
        reasons.append(assumed)
    setup = TrainingSetup(
        workload=find_workload(model, measured=published.workloads if published else ()),
        hardware=hardware,
        precision=policy,
        world_size=world_size,
        nodes=number_of_nodes,
        batch_size=_count("batch_size", batch_size, at_most=1_000_000_000),
        gradient_accumulation_steps=micro_steps,
        strategy=strategy,
    )
    global_batch_size = setup.batch_size * world_size * micro_steps
    job_steps, epoch_steps = _plan_steps(
        steps=steps, epochs=epochs, dataset_size=dataset_size, global_batch_size=global_batch_size
    )

    query = Query.of(setup)
    closed = query.closed
    regime, radius, level, artifact_id, judged = _judge(setup, published, unpublished=unpublished)
    if strict and (regime != "known" or judged):
        raise OutOfDomainError(
            "the question is outside the training data",
            got=f"regime {regime!r}: {'; '.join(judged)}",
            expected="a known model on known hardware",
            fix="measure it in a campaign, or leave strict out",
        )
    if published is not None and artifact_id is not None:
        parts = published.predictor.predict([query])
        compute, communication, exposed = _first(parts)
    else:
        compute, communication, exposed = (
            closed.compute_time_s,
            closed.communication_time_s,
            closed.exposed_communication_s,
        )
    iteration = compute + exposed
    low, high = iteration * math.exp(-radius), iteration * math.exp(radius)
    return TimeEstimate(
        iteration_time_s=iteration,
        low_s=low,
        high_s=high,
        level=level,
        compute_time_s=compute,
        communication_time_s=communication,
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
        artifact_id=artifact_id,
        steps=job_steps,
        epochs=epochs,
        total_time_s=None if job_steps is None else job_steps * iteration,
        total_low_s=None if job_steps is None else job_steps * low,
        total_high_s=None if job_steps is None else job_steps * high,
        epoch_time_s=None if epoch_steps is None else epoch_steps * iteration,
    )


def _first(parts: PredictedParts) -> tuple[float, float, float]:
    return (
        float(parts.compute_time_s[0]),
        float(parts.communication_time_s[0]),
        float(parts.exposed_communication_s[0]),
    )
