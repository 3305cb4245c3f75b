"""The commands of the flows: ``campaign``, ``retrain`` and ``probe``; each imports its libraries when it runs."""

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
        bool, typer.Option("--dry-run", help="Check, print the grid and its duration, and stop.")
    ] = False,
    data: Annotated[str | None, typer.Option(help="Folder or URL of the timings; replaces the file's.")] = None,
    device: Annotated[Device | None, typer.Option(help="Device; replaces the file's.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="local, local-cuda, slurm or tcp://host:port of a Dask scheduler; replaces the file's."),
    ] = None,
    max_hours: Annotated[float | None, typer.Option(help="Start no cell after so many hours of this run.")] = None,
    max_cells: Annotated[int | None, typer.Option(help="Try so many cells at most in this run.")] = None,
    max_failures: Annotated[int | None, typer.Option(help="Start no cell after so many failed ones.")] = None,
    budget_cells: Annotated[
        int | None, typer.Option(help="Record so many cells in all, which a predictor chooses as it learns.")
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on although recorded cells were measured otherwise.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time real training runs over a grid of cells; run it again to measure what is still missing.

    Ends with 5 when some cells failed, which are recorded with their cause, or when a limit ended the run early; what
    was measured is kept. One Ctrl-C finishes the cells under way, a second one stops them; both end with 130.
    """
    from precision_time.flows.campaigns.terminal import open_console, print_plan, print_result, say
    from precision_time.flows.ground.prefect_settings import prefect_api
    from precision_time.flows.planning.plan import plan_campaign
    from precision_time.flows.planning.spec import read_campaign
    from precision_time.storage.errors import PartialError

    given = {
        "data": data,
        "device": device,
        "cluster": cluster,
        "max_hours": max_hours,
        "max_cells": max_cells,
        "max_failures": max_failures,
        "budget_cells": budget_cells,
        "accept_changes": accept_changes or None,
    }
    spec = read_campaign(file, overrides={key: value for key, value in given.items() if value is not None})
    say(f"{spec.name}: checking the data folder and the device")
    plan = plan_campaign(spec)
    if dry_run and as_json:
        typer.echo(json.dumps(plan.to_dict(), indent=2))
        return
    print_plan(plan, console=open_console(to_stderr=as_json))
    if dry_run:
        return
    if plan.cells_to_measure:
        say("starting; Ctrl-C ends it after the cell under way, and running it again goes on from there")

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
        say("interrupted; recorded cells are kept, and running it again measures the others")
        raise
    if result.status != "complete":
        from precision_time.tasks.ranks.job import REFUSAL_CAUSES

        causes = [f"{cell.label}: {cell.cause}" for cell in result.failed[:10]]
        refused = [cell for cell in result.failed if cell.cause in REFUSAL_CAUSES]
        advice = ["see the causes"] if causes else ["run the campaign again"]
        if len(refused) < len(result.failed):
            advice.append("running the campaign again tries the failed cells again")
        if refused:
            advice.append(f"the {len(refused)} that were refused are not tried again: exclude them")
        raise PartialError(
            f"campaign {result.name}: {result.cells_planned - result.cells_recorded} of {result.cells_planned} cells "
            "have no timings",
            got="; ".join([*([result.end] if result.end else []), *causes]),
            fix="; ".join(advice),
        )


def retrain(
    registry: Annotated[str, typer.Option(help="Folder or URL of the artifact registry.", show_default=False)],
    data: Annotated[str | None, typer.Option(help="Folder or URL of the timings.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Train on the shipped public measurements too.")] = False,
    measurements: Annotated[
        str | None, typer.Option(help="CSV or Parquet file with the public table's columns to train on too.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name to publish under.")] = "default",
    alias: Annotated[str, typer.Option(help="Moved to the new version after it is published.")] = "champion",
    holdout: Annotated[
        list[str] | None, typer.Option(help="A model that is never trained on and reported by itself; repeatable.")
    ] = None,
    level: Annotated[float, typer.Option(help="Share of measurements that intervals are to hold.")] = 0.9,
    seed: Annotated[int, typer.Option(help="Decides folds and trees.")] = 0,
    export: Annotated[
        str | None, typer.Option(help="Folder for what of the artifact in use answers questions, without the rest.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fit a predictor on recorded timings, public measurements or both, validate it, and publish it if it passes.

    At least one of --data, --public and --measurements names what to train on. Ends with 3 when the gate holds the
    predictor back: the champion then stays in use.
    """
    from precision_time.flows.campaigns.terminal import open_console, print_retraining, say
    from precision_time.flows.ground.prefect_settings import prefect_api
    from precision_time.flows.ground.settings_file import Document, build_model
    from precision_time.flows.retraining.spec import RetrainSpec
    from precision_time.storage.errors import GoalNotMetError

    given = {
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
    spec = build_model(RetrainSpec, Document("retrain", given))
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
        say(f"{result.artifact_id} answers as {bundle.artifact_id} from {export}")


def probe(
    device: Annotated[Device, typer.Option(help="Which device to look at.")] = "auto",
    model: Annotated[
        str | None,
        typer.Option(help="Time real iterations of this model too: a workload's name, or your own as module:factory."),
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="Precision to tell of; repeatable. By default fp32 and mixed ones.")
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Samples of one GPU; repeatable. By default 8 and 32.")
    ] = None,
    gpus: Annotated[list[int] | None, typer.Option(help="Number of GPUs to predict; repeatable.")] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="Another GPU to predict; repeatable.")] = None,
    measure: Annotated[
        list[str] | None,
        typer.Option(
            help="What is timed, as precision:batch; repeatable. By default the first precision at the smallest and "
            "the largest batch, and each other one at the smallest."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Iterations timed of each, by default 20.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How often each is timed, in turn; by default once.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Time what else is predicted for one device here, and compare.")
    ] = False,
    artifact: Annotated[
        str | None, typer.Option(help="Published predictor: URL/name, URL/name@3, name@champion.")
    ] = None,
    save: Annotated[
        str | None, typer.Option(help="JSON file for the calibration, which predict takes as measured rows.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What this machine's device is, which precisions it runs, and how fast it is: measured in a few seconds.

    With --model a few real iterations of the model are timed too, and its other precisions, batches, numbers of GPUs
    and GPUs predicted from them.
    """
    from precision_time.flows.campaigns.terminal import open_console, print_model_probe, print_probe, say
    from precision_time.storage.errors import InputError
    from precision_time.tasks.probing.probe_device import probe_device

    about_model: dict[str, Any] = {
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
    given = {name: value for name, value in about_model.items() if value not in (None, [])}
    if model is None:
        if given or save:
            raise InputError(
                "options of a model's probe without a model",
                got=", ".join([*given, *(["save"] if save else [])]),
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

    found = probe_model(model, device, announce=say, **given)
    if save:
        found.calibration.save(save)
        say(f"the calibration is in {save}")
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        print_model_probe(found, console=open_console())


def _parse_setting(text: str) -> tuple[str, int]:
    from precision_time.storage.errors import InputError

    precision, _, batch = text.rpartition(":")
    if not precision or not batch.isdecimal():
        raise InputError("this is nothing to measure", got=repr(text), expected="precision:batch, such as fp32:8")
    return precision, int(batch)
