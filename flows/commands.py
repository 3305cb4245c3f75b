"""The commands ``campaign``, ``retrain`` and ``probe``; each imports its libraries only when it runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from precision_time.flows.campaigns.summary import CampaignResult

__all__ = ["campaign", "probe", "retrain"]

Device = Literal["auto", "cpu", "cuda"]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def campaign(
    file: Annotated[Path, typer.Argument(help="Campaign file: YAML, TOML or JSON.", show_default=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the grid and its expected duration, and exit.")
    ] = False,
    data: Annotated[str | None, typer.Option(help="Folder or URL of the timings; overrides the campaign file.")] = None,
    device: Annotated[Device | None, typer.Option(help="Device; overrides the campaign file.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="local, local-cuda, slurm or tcp://host:port of a Dask scheduler; overrides the campaign file."
        ),
    ] = None,
    max_hours: Annotated[float | None, typer.Option(help="Start no more cells after this many hours.")] = None,
    max_cells: Annotated[int | None, typer.Option(help="Try at most this many cells in this run.")] = None,
    max_failures: Annotated[int | None, typer.Option(help="Start no more cells after this many have failed.")] = None,
    budget_cells: Annotated[
        int | None, typer.Option(help="Record this many cells in all; a predictor chooses where it is least sure.")
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Continue although recorded cells were measured with other settings or code."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time real training runs over a grid of cells; run it again to measure the cells that are still missing.

    The exit code is 5 when cells failed (their cause is recorded) or a limit ended the run early; measured cells are
    kept. Ctrl-C lets running cells finish, a second Ctrl-C stops them at once; the exit code is 130 in both cases.
    """
    from precision_time.flows.campaigns.terminal import open_console, print_plan, print_result, say
    from precision_time.flows.ground.prefect_settings import prefect_api
    from precision_time.flows.planning.plan import plan_campaign
    from precision_time.flows.planning.spec import read_campaign
    from precision_time.storage.errors import PartialError

    options = {
        "data": data,
        "device": device,
        "cluster": cluster,
        "max_hours": max_hours,
        "max_cells": max_cells,
        "max_failures": max_failures,
        "budget_cells": budget_cells,
        "accept_changes": accept_changes or None,
    }
    spec = read_campaign(file, overrides={name: value for name, value in options.items() if value is not None})
    say(f"{spec.name}: checking the data folder and the device")
    plan = plan_campaign(spec)
    if dry_run and as_json:
        typer.echo(json.dumps(plan.to_dict(), indent=2))
        return
    print_plan(plan, console=open_console(to_stderr=as_json))
    if dry_run:
        return
    if plan.cells_to_measure:
        say("starting; Ctrl-C lets running cells finish and then stops; run the campaign again to continue")

    def show(result: "CampaignResult") -> None:
        if as_json:
            typer.echo(result.model_dump_json(indent=2))
        else:
            print_result(plan, result, console=open_console())

    try:
        with prefect_api():
            from precision_time.flows.campaigns.campaign import run_campaign

            result = run_campaign(spec, report=show)
    except KeyboardInterrupt:
        say("interrupted; recorded cells are kept; run the campaign again to measure the others")
        raise
    if result.status != "complete":
        from precision_time.tasks.ranks.job import REFUSAL_CAUSES

        causes = [f"{cell.label}: {cell.cause}" for cell in result.failed[:10]]
        refused = [cell for cell in result.failed if cell.cause in REFUSAL_CAUSES]
        advice = ["see the causes"] if causes else ["run the campaign again"]
        if len(refused) < len(result.failed):
            advice.append("run the campaign again to retry the failed cells")
        if refused:
            advice.append(f"exclude the {len(refused)} refused cells, which are not tried again")
        raise PartialError(
            f"campaign {result.name}: {result.cells_planned - result.cells_recorded} of {result.cells_planned} cells "
            "have no timings",
            got="; ".join([*([result.end] if result.end else []), *causes]),
            fix="; ".join(advice),
        )


def retrain(
    registry: Annotated[str, typer.Option(help="Folder or URL of the artifact registry.", show_default=False)],
    data: Annotated[str | None, typer.Option(help="Folder or URL of the timings.")] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Also train on the public measurements in the package.")
    ] = False,
    measurements: Annotated[
        str | None, typer.Option(help="CSV or Parquet file with the public table's columns, to train on as well.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name to publish under.")] = "default",
    alias: Annotated[str, typer.Option(help="Alias that points to the new version once it is published.")] = "champion",
    holdout: Annotated[
        list[str] | None,
        typer.Option(help="A model that is never trained on, and whose accuracy is reported; repeatable."),
    ] = None,
    level: Annotated[float, typer.Option(help="Share of measurements that intervals are to contain.")] = 0.9,
    seed: Annotated[int, typer.Option(help="Seed of folds and trees.")] = 0,
    export: Annotated[
        str | None, typer.Option(help="Folder to export the artifact in use to, as a bundle that only answers.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit a predictor on recorded timings, public measurements or both, validate it, and publish it if it passes.

    At least one of --data, --public and --measurements is needed. The exit code is 3 when the gate holds the predictor
    back: the champion then stays in use.
    """
    from precision_time.flows.campaigns.terminal import open_console, print_retraining, say
    from precision_time.flows.ground.prefect_settings import prefect_api
    from precision_time.flows.ground.settings_file import Document, build_model
    from precision_time.flows.retraining.spec import RetrainSpec
    from precision_time.storage.errors import GoalNotMetError

    options = {
        "data": data,
        "public": public,
        "measurements": measurements,
        "registry": registry,
        "name": name,
        "alias": alias,
        "holdout_models": holdout or [],
        "level": level,
        "seed": seed,
    }
    spec = build_model(RetrainSpec, Document("retrain", options))
    with prefect_api():
        from precision_time.flows.retraining.retrain import run_retraining

        say("training and validating")
        result = run_retraining(spec)
    for damaged in result.left_out:
        say(f"left out {damaged}")
    if as_json:
        typer.echo(result.model_dump_json(indent=2))
    else:
        print_retraining(result, console=open_console())
    if result.status == "held back":
        raise GoalNotMetError(
            "the new predictor was not published",
            got="; ".join(result.reasons),
            expected="a passed gate",
            fix="measure more cells and retrain",
        )
    if export is not None and result.artifact_id is not None:
        from precision_time.tasks.publishing.publish import export_bundle

        bundle = export_bundle(registry, result.artifact_id, into=export)
        say(f"exported {result.artifact_id} as {bundle.artifact_id} to {export}")


def probe(
    device: Annotated[Device, typer.Option(help="Device to probe.")] = "auto",
    model: Annotated[
        str | None,
        typer.Option(help="Also time real iterations of this model: a workload's name, or your own as module:factory."),
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="Precision to predict; repeatable. By default fp32 and the mixed ones.")
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Batch size per GPU to predict; repeatable. By default 8 and 32.")
    ] = None,
    gpus: Annotated[list[int] | None, typer.Option(help="Number of GPUs to predict; repeatable.")] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="Another GPU to predict; repeatable.")] = None,
    measure: Annotated[
        list[str] | None,
        typer.Option(
            help="Setting to time, as precision:batch; repeatable. By default the first precision at the smallest and "
            "the largest batch, and each other precision at the smallest."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Iterations timed per setting; by default 20.")] = None,
    rounds: Annotated[
        int | None, typer.Option(help="How often each setting is timed, in turns; by default once.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Also time the other settings on one local device, and compare.")
    ] = False,
    artifact: Annotated[
        str | None, typer.Option(help="Published predictor: URL/name, URL/name@3, name@champion.")
    ] = None,
    save: Annotated[
        str | None, typer.Option(help="JSON file to save the calibration to, for predict --measured.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure in a few seconds what this machine's device is, which precisions it runs, and how fast.

    With --model, a few real iterations of the model are timed as well, and from them its other precisions, batch
    sizes, numbers of GPUs and GPUs are predicted.
    """
    from precision_time.flows.campaigns.terminal import open_console, print_model_probe, print_probe, say
    from precision_time.storage.errors import InputError
    from precision_time.tasks.probing.probe_device import probe_device

    options: dict[str, Any] = {
        "precisions": precision,
        "batch_sizes": batch_size,
        "gpus": gpus,
        "other_gpus": gpu,
        "measure": [_parse_setting(text) for text in measure or []],
        "steps": steps,
        "rounds": rounds,
        "check": check or None,
        "artifact": artifact,
    }
    options = {name: value for name, value in options.items() if value not in (None, [])}
    if model is None:
        if options or save:
            raise InputError(
                "these options need a model",
                got=", ".join([*options, *(["save"] if save else [])]),
                expected="--model with the name of a workload, or module:factory",
            )
        say("measuring the device for a few seconds")
        report = probe_device(device)
        if as_json:
            typer.echo(json.dumps(report.to_dict(), indent=2))
        else:
            print_probe(report, console=open_console())
        return
    from precision_time.tasks.probing.probe_model import probe_model

    model_probe = probe_model(model, device, announce=say, **options)
    if save:
        model_probe.calibration.save(save)
        say(f"saved the calibration to {save}")
    if as_json:
        typer.echo(json.dumps(model_probe.to_dict(), indent=2, allow_nan=False))
    else:
        print_model_probe(model_probe, console=open_console())


def _parse_setting(text: str) -> tuple[str, int]:
    from precision_time.storage.errors import InputError

    precision, _, batch = text.rpartition(":")
    if not precision or not batch.isdecimal():
        raise InputError("not a setting to measure", got=repr(text), expected="precision:batch, such as fp32:8")
    return precision, int(batch)
