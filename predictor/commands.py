"""Command line of the predictor: ``precision-time predict``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from precision_time.storage.errors import InputError

__all__ = ["predict"]


def _name_model(
    model: str | None, *, params: str | None, forward_flops: str | None, activations: str | None
) -> str | dict[str, str]:
    """The name of the model, or a card of the given sizes with that name, if any."""
    sizes = {"params": params, "forward_flops": forward_flops, "activations": activations}
    card = {key: value for key, value in sizes.items() if value is not None}
    if not card:
        if model is None:
            raise InputError(
                "no model was given",
                expected="--model with a name, module:factory or the path of a config.json, or --params with "
                "--forward-flops",
            )
        return model
    return card | ({"name": model} if model is not None else {})


def predict(
    batch_size: Annotated[int, typer.Option(help="Samples that one GPU takes in one micro-step.")],
    precision: Annotated[str, typer.Option(help="Precision in any common spelling, e.g. fp32, tf32, bf16-mixed.")],
    model: Annotated[
        str | None,
        typer.Option(help="Name of the model, your own as module:factory, or the path of a Hugging Face config.json."),
    ] = None,
    params: Annotated[
        str | None, typer.Option(help="Parameters of a model without a name, e.g. 25.6M; needs --forward-flops.")
    ] = None,
    forward_flops: Annotated[
        str | None, typer.Option(help="FLOPs of the forward pass of one sample, 2 per multiply-add, e.g. 8.2G.")
    ] = None,
    activations: Annotated[
        str | None, typer.Option(help="Elements that its products write in the forward pass of one sample, e.g. 11M.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs over all nodes.")] = 1,
    gpu: Annotated[
        str | None, typer.Option(help="Device, e.g. A100-SXM4-80GB or cpu; by default the usual one of the artifact.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes; by default as few as hold the GPUs.")] = None,
    gradient_accumulation_steps: Annotated[int, typer.Option(help="Micro-steps in one optimizer step.")] = 1,
    strategy: Annotated[
        str, typer.Option(help="ddp, fsdp, zero1 to zero3, or degrees such as tp4-pp8 with replicas on the other GPUs.")
    ] = "ddp",
    task_input: Annotated[str, typer.Option(help="Resolution or sequence length, if not the usual one.")] = "",
    sample_input: Annotated[
        str | None,
        typer.Option(help="Input of your own module for one sample: 3x224x224, or tokens:512 for token ids."),
    ] = None,
    activation_checkpointing: Annotated[
        str | None, typer.Option(help="none, selective or full; by default unknown.")
    ] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--eager", help="Whether the step is compiled; by default unknown.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of the job.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs of the job; needs --dataset-size.")] = None,
    dataset_size: Annotated[int | None, typer.Option(help="Samples in the data set.")] = None,
    network_bandwidth: Annotated[
        str | None, typer.Option(help="Network of one node in one direction, with its unit: '25 Gbit/s'.")
    ] = None,
    hardware_file: Annotated[
        Path | None, typer.Option(help="TOML file of devices that are not shipped, in the format of gpus.toml.")
    ] = None,
    artifact: Annotated[
        str | None, typer.Option(help="Published predictor: URL/name, URL/name@3, name@champion.")
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Ask the registry of the artifact now; an error if it does not answer.")
    ] = False,
    measured: Annotated[
        Path | None,
        typer.Option(help="Iterations that you timed (CSV, Parquet), or a calibration from `probe --save` (JSON)."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse to answer outside the training data (exit code 6).")
    ] = False,
    allow_fallback: Annotated[
        bool,
        typer.Option("--allow-fallback", help="Answer for the nearest precision where the device lacks this one."),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the parts of the closed form and the learned factors.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; times are in seconds.")] = False,
) -> None:
    """Predict how long a training job takes, before it starts, and explain why."""
    from precision_time.predictor.api import predict_time

    estimate = predict_time(
        model=_name_model(model, params=params, forward_flops=forward_flops, activations=activations),
        precision=precision,
        gpus=gpus,
        gpu=gpu,
        nodes=nodes,
        batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        strategy=strategy,
        task_input=task_input,
        sample_input=sample_input,
        activation_checkpointing=activation_checkpointing,
        compiled=compiled,
        steps=steps,
        epochs=epochs,
        dataset_size=dataset_size,
        network_bandwidth=network_bandwidth,
        hardware_file=hardware_file,
        artifact=artifact,
        refresh=refresh,
        measured=measured,
        strict=strict,
        explain=explain,
        allow_fallback=allow_fallback,
    )
    typer.echo(json.dumps(estimate.to_dict(), allow_nan=False) if as_json else repr(estimate))
