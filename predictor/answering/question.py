"""Question: the arguments of ``predict_time``, resolved to one training setup and its assumptions."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.answering.user_models import resolve_model
from precision_time.predictor.setup.hardware import (
    HardwareSpec,
    choose_precision,
    find_hardware,
    load_hardware,
    parse_bandwidth,
)
from precision_time.predictor.setup.implementation import Implementation
from precision_time.predictor.setup.parallelism import parse_parallelism
from precision_time.predictor.setup.precision import Precision, parse_precision
from precision_time.predictor.setup.training_setup import TrainingSetup, fill_pipeline
from precision_time.predictor.setup.values import check_checkpointing, check_compiled, check_count, count_nodes
from precision_time.predictor.workloads.workload import WorkloadFeatures
from precision_time.storage.errors import InputError

__all__ = ["DEFAULT_GPU", "JobLength", "Question", "plan_length", "resolve_question"]

#: The device that is assumed, and named in the answer, when neither the caller nor an artifact gives one.
DEFAULT_GPU = "A100-SXM4-80GB"
_MOST_EPOCHS = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One training setup, the precision as the caller spelled it, and in words what was assumed.

    ``model_reasons`` hold the assumptions about a user's own model, ``assumptions`` those about the rest.
    ``described_hardware`` holds the devices of the caller's hardware file.
    """

    setup: TrainingSetup
    described_hardware: tuple[HardwareSpec, ...]
    requested_precision: str
    model_reasons: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.setup.batch_size * self.setup.layout.data * self.setup.gradient_accumulation_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLength:
    """Optimizer steps of the whole job and of one epoch; None where the caller gave no length."""

    steps: int | None
    steps_per_epoch: int | None


def resolve_question(
    model: Any,
    precision: str | Precision,
    *,
    published: PublishedPredictor | None,
    hardware: Sequence[HardwareSpec],
    workloads: Sequence[WorkloadFeatures],
    gpu: str | None,
    gpus: Any,
    nodes: Any,
    batch_size: Any,
    gradient_accumulation_steps: Any,
    strategy: str,
    network_bandwidth: str | None,
    hardware_file: str | Path | None,
    allow_fallback: bool,
    task_input: str,
    sample_input: Any,
    loss: Callable[[Any], Any] | None,
    activation_checkpointing: str | None,
    compiled: bool | None,
) -> Question:
    """The setup that these arguments of ``predict_time`` describe; raises what ``predict_time`` raises for them.

    Devices of ``hardware_file``, ``hardware`` and ``published`` come before shipped ones, and so do models of
    ``workloads`` and ``published``.
    """
    assumptions: list[str] = []
    world_size = check_count("gpus", gpus, at_most=1_000_000)
    micro_steps = check_count("gradient_accumulation_steps", gradient_accumulation_steps, at_most=1_000_000)
    if gpu is None:
        gpu = published.manifest.default_gpu if published else DEFAULT_GPU
        assumptions.append(f"no gpu was given: assumed {gpu}")
    layout = parse_parallelism(strategy, world_size=world_size)
    described = tuple(load_hardware(hardware_file).values()) if hardware_file is not None else ()
    device = find_hardware(gpu, measured=[*(published.hardware if published else ()), *described, *hardware])
    policy, fallback = choose_precision(device, parse_precision(precision), allow_fallback=allow_fallback)
    if fallback:
        assumptions.append(fallback)
    if network_bandwidth is not None:
        device = dataclasses.replace(device, network_bytes_per_s=parse_bandwidth(network_bandwidth))
    number_of_nodes = count_nodes(world_size, nodes, device)
    assumptions += _describe_nodes(world_size // number_of_nodes, number_of_nodes, device, is_given=nodes is not None)
    samples = check_count("batch_size", batch_size, at_most=1_000_000_000)
    batch_per_step, step_count = fill_pipeline(stages=layout.pipeline, batch_size=samples, micro_steps=micro_steps)
    if (batch_per_step, step_count) != (samples, micro_steps):
        assumptions.append(f"assumed {step_count} micro-steps of one sample in the pipeline")
    counted = resolve_model(
        model,
        task_input=str(task_input or ""),
        sample_input=sample_input,
        loss=loss,
        measured=(*(published.workloads if published else ()), *workloads),
    )
    setup = TrainingSetup(
        workload=counted.workload,
        hardware=device,
        precision=policy,
        world_size=world_size,
        nodes=number_of_nodes,
        batch_size=batch_per_step,
        gradient_accumulation_steps=step_count,
        parallelism=layout,
        implementation=Implementation(
            checkpointing=check_checkpointing(activation_checkpointing),
            compiled=check_compiled(compiled),
            trainable_share=counted.trainable_share,
        ),
    )
    return Question(
        setup=setup,
        described_hardware=described,
        requested_precision=str(precision.name if isinstance(precision, Precision) else precision),
        model_reasons=tuple(counted.reasons),
        assumptions=tuple(assumptions),
    )


def _describe_nodes(per_node: int, nodes: int, device: HardwareSpec, *, is_given: bool) -> list[str]:
    """What to say about the placement of the ranks, if anything."""
    if not is_given:
        return [f"assumed {nodes} nodes of {per_node} GPUs"] if nodes > 1 else []
    usual = device.gpus_per_node
    return [f"{per_node} GPUs on a node, which usually has {usual} {device.name}"] if per_node > usual else []


def plan_length(*, steps: Any, epochs: Any, dataset_size: Any, global_batch_size: int) -> JobLength:
    """The steps of a job; a short last batch of an epoch counts as a step.

    Raises ``InputError`` for a length that is given twice, epochs without the size of the data, and unusable numbers.
    """
    if steps is not None and epochs is not None:
        raise InputError(
            "the length of the job is given twice",
            got=f"steps={steps}, epochs={epochs}",
            expected="steps=, or epochs= with dataset_size=",
        )
    per_epoch = None
    if dataset_size is not None:
        per_epoch = math.ceil(check_count("dataset_size", dataset_size) / global_batch_size)
    if steps is not None:
        return JobLength(steps=check_count("steps", steps), steps_per_epoch=per_epoch)
    if epochs is None:
        return JobLength(steps=None, steps_per_epoch=per_epoch)
    if per_epoch is None:
        raise InputError(
            "epochs without the size of the data", got=f"epochs={epochs}", expected="dataset_size= in samples"
        )
    number = float(epochs) if isinstance(epochs, numbers.Real) and not isinstance(epochs, bool) else math.nan
    if not 0 < number <= _MOST_EPOCHS:
        raise InputError(
            "epochs is not usable", got=repr(epochs), expected=f"a number above 0, at most {_MOST_EPOCHS:.0e}"
        )
    return JobLength(steps=math.ceil(number * per_epoch), steps_per_epoch=per_epoch)
