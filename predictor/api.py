"""predict_time: resolve the question, answer it, and compose the estimate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from precision_time.predictor.answering.answers import Answers, answer_queries
from precision_time.predictor.answering.artifact import (
    StandingArtifact,
    load_artifact,
    refresh_artifacts,
    standing_artifact,
)
from precision_time.predictor.answering.calibration import interpret_measured
from precision_time.predictor.answering.estimate import TimeEstimate
from precision_time.predictor.answering.explain import explain_query
from precision_time.predictor.answering.question import JobLength, Question, plan_length, resolve_question
from precision_time.predictor.answering.reasons import explain_origin, explain_time
from precision_time.predictor.closed_form.memory import estimate_memory, explain_memory
from precision_time.predictor.rows.features import Query
from precision_time.predictor.setup.precision import Precision
from precision_time.storage.errors import OutOfDomainError, UnreachableError

__all__ = ["predict_time"]


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

    Args:
        model: the name of a known model, or your own: a ``torch.nn.Module`` (with ``sample_input``), the text
            ``module:factory``, the path of a Hugging Face ``config.json``, or a card such as
            ``{"params": 25.6e6, "forward_flops": 8.2e9}``; see ``user_models.resolve_model``.
        precision: the precision in any common spelling: ``fp32``, ``tf32``, ``mixed_fp16_fp32``, ``bf16-mixed``, ...
        batch_size: samples that one GPU takes in one micro-step (the batch size of the DataLoader).
        gpus: number of GPUs over all nodes; 1 by default.
        gpu: name of the device, or ``cpu``; by default the artifact's usual one, which ``reasons`` name.
        nodes: number of nodes; by default as few as hold the GPUs.
        gradient_accumulation_steps: micro-steps in one optimizer step; 1 by default.
        strategy: ``ddp`` (the default), ``fsdp``, ``zero1`` to ``zero3``, or degrees such as ``tp4-pp8``; the rest of
            the GPUs are replicas, each with ``batch_size``.
        task_input: another resolution or sequence length than the model's usual one, the default, such as ``384``.
        sample_input: for a module: a tensor of shape [batch, ...], a tuple or dict of tensors, or a shape such as
            ``3x224x224`` or ``tokens:512``; None by default.
        loss: for a module whose output is not a loss: a function from the output to a scalar; None by default.
        activation_checkpointing: ``none``, ``selective`` or ``full``; None (the default) where it is not known.
        compiled: whether the step is compiled; None (the default) where it is not known.
        steps: optimizer steps of the job; None by default, which gives no totals.
        epochs: epochs of the job, in place of ``steps``; needs ``dataset_size``; None by default.
        dataset_size: samples in the data set; None by default.
        network_bandwidth: the network of one node in one direction, with its unit: ``25 Gbit/s``; by default that of
            the device's usual node.
        hardware_file: TOML file of devices that are not shipped, in the form of ``predictor/data/gpus.toml``; none by
            default.
        artifact: a published predictor, such as ``s3://bucket/artifacts/default@champion`` or
            ``/data/registry/default@3``. The default is the first that is found in ``PRECISION_TIME_ARTIFACT``, the
            configuration file, the configured registry and the package. A process loads each artifact once.
        refresh: ask the artifact's registry again; False by default. When a remote registry does not answer, the copy
            on this machine answers and ``reasons`` say so; with ``refresh`` this is an error.
        measured: iterations that you timed, of this model or on this GPU, which correct the answer and its interval:
            rows (a row without a model is of this one), a file of rows, or a calibration; see ``calibrate``. None by
            default.
        strict: refuse to answer outside the training data; False by default.
        explain: add the closed form by part and the learned factors as ``explanation``; False by default.
        allow_fallback: where the device lacks ``precision``, answer for the nearest precision that it has, which
            ``effective_precision`` and ``reasons`` name; False by default.

    Returns:
        A ``TimeEstimate``: times in seconds, with an interval, the regime and the reasons.

    Raises:
        UnknownNameError: a model, GPU or precision that is not known, with the nearest names.
        InputError: an argument that cannot be used.
        PrecisionUnsupportedError: the device lacks the precision, and no fallback is allowed.
        OutOfDomainError: with ``strict``, a question outside the training data.
        IntegrityError: an artifact that differs from what was published.
        UnreachableError: a registry that does not answer.

    Example:
        >>> from precision_time import predict_time
        >>> estimate = predict_time("resnet50", "mixed_fp16_fp32", batch_size=256, gpus=8, gpu="A100-SXM4-80GB")
        >>> estimate.global_batch_size, estimate.effective_precision, estimate.regime
        (2048, 'amp_fp16', 'known')
        >>> estimate.low_s < estimate.iteration_time_s < estimate.high_s
        True
    """
    standing = _choose_artifact(artifact, refresh=refresh)
    published = standing.published
    measurements = None if measured is None else interpret_measured(measured)
    question = resolve_question(
        model,
        precision,
        published=published,
        hardware=measurements.hardware if measurements else (),
        workloads=measurements.workloads if measurements else (),
        gpu=gpu,
        gpus=gpus,
        nodes=nodes,
        batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        strategy=strategy,
        network_bandwidth=network_bandwidth,
        hardware_file=hardware_file,
        allow_fallback=allow_fallback,
        task_input=task_input,
        sample_input=sample_input,
        loss=loss,
        activation_checkpointing=activation_checkpointing,
        compiled=compiled,
    )
    length = plan_length(
        steps=steps, epochs=epochs, dataset_size=dataset_size, global_batch_size=question.global_batch_size
    )
    query = Query.of(question.setup)
    answers = answer_queries([query], published=published)
    if measurements is not None:
        workload = question.setup.workload
        calibration = measurements.against(
            published, workloads=(workload,), hardware=question.described_hardware, asked=workload
        )
        answers = calibration.correct([query], answers)
    origin_reasons = explain_origin(answers, published, query.setup, why=standing.why)
    if strict and (answers.regimes[0].gaps or origin_reasons):
        raise OutOfDomainError(
            "the question is outside the training data",
            got=f"regime {answers.regimes[0].name!r}: {'; '.join(origin_reasons)}",
            expected="a measured configuration: the model on this GPU, its batch sizes, precision and number of GPUs",
            fix="measure it in a campaign, or leave strict out",
        )
    return _compose(question, length, query, answers, standing, origin_reasons, epochs=epochs, explain=explain)


def _choose_artifact(artifact: str | None, *, refresh: bool) -> StandingArtifact:
    """The artifact that answers: the named one, else the standing one."""
    if refresh:
        refresh_artifacts()
    standing = standing_artifact() if artifact is None else StandingArtifact(load_artifact(str(artifact)), "")
    published = standing.published
    if refresh and published is not None and not published.is_current:
        raise UnreachableError(
            "no newer artifact could be looked for",
            got="; ".join(published.notes),
            expected="an answer of the registry",
            fix="check the connection, or leave refresh out to be answered by the local copy",
        )
    return standing


def _compose(
    question: Question,
    length: JobLength,
    query: Query,
    answers: Answers,
    standing: StandingArtifact,
    origin_reasons: list[str],
    *,
    epochs: float | None,
    explain: bool,
) -> TimeEstimate:
    """The estimate for one query: parts, interval, memory, totals and reasons."""
    setup, published = question.setup, standing.published
    parts = answers.parts
    iteration, low, high = (float(values[0]) for values in (parts.iteration_time_s, answers.low_s, answers.high_s))
    compute, communication, exposed = (
        float(values[0]) for values in (parts.compute_time_s, parts.communication_time_s, parts.exposed_communication_s)
    )
    memory = estimate_memory(setup)
    memory_warning = explain_memory(setup, memory)
    explanation = None
    if explain:
        predictor = published.predictor if published else None
        explanation = explain_query(query, predictor=predictor, blend=answers.blends[0]).to_dict()

    def repeat(count: int | None, seconds: float) -> float | None:
        return None if count is None else count * seconds

    return TimeEstimate(
        iteration_time_s=iteration,
        low_s=low,
        high_s=high,
        level=answers.level,
        compute_time_s=compute,
        communication_time_s=communication,
        exposed_communication_s=exposed,
        optimizer_time_s=compute * query.closed.optimizer_time_s / query.closed.compute_time_s,
        samples_per_s=question.global_batch_size / iteration,
        global_batch_size=question.global_batch_size,
        world_size=setup.world_size,
        model=setup.workload.name,
        requested_precision=question.requested_precision,
        effective_precision=setup.precision.name,
        gpu=setup.hardware.name,
        regime=answers.regimes[0].name,
        reasons=(
            *([memory_warning] if memory_warning else []),
            *(published.notes if published is not None else ()),
            *filter(None, answers.corrections),
            *question.model_reasons,
            *filter(None, [standing.remark]),
            *question.assumptions,
            *origin_reasons,
            *explain_time(setup, query.closed, exposed_share=exposed / iteration),
        ),
        memory_bytes=memory.total_bytes,
        memory_fits=memory.fits,
        largest_batch=memory.largest_batch,
        artifact_id=published.manifest.artifact_id if published is not None and answers.by_artifact[0] else None,
        steps=length.steps,
        epochs=epochs,
        total_time_s=repeat(length.steps, iteration),
        total_low_s=repeat(length.steps, low),
        total_high_s=repeat(length.steps, high),
        epoch_time_s=repeat(length.steps_per_epoch, iteration),
        explanation=explanation,
    )
