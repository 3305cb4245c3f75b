"""The commands that run the product for others: ``up`` and ``doctor``; each imports its libraries when it runs."""

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["doctor", "up"]

HOME = "~/precision-time"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]


def up(
    home: Annotated[
        str, typer.Option(help="Folder for database, logs, timings and registry.", metavar="<path>")
    ] = HOME,
    port: Annotated[int, typer.Option(help="Port of Prefect's pages and API on 127.0.0.1.", min=1, max=65535)] = 4200,
    cluster: Annotated[
        str,
        typer.Option(
            help="Where campaigns measure: auto, local (CPU workers), local-cuda (one worker a GPU), tcp://host:port "
            "of a Dask scheduler that runs already, or none: each campaign starts workers of its own."
        ),
    ] = "auto",
    workers: Annotated[
        int | None, typer.Option(help="CPU workers, so the most ranks of a cell; by default the cores, 2 to 8.", min=1)
    ] = None,
    no_worker: Annotated[bool, typer.Option("--no-worker", help="Start no worker: runs wait for one.")] = False,
    nightly: Annotated[
        str | None, typer.Option(help="Retrain by this cron line, such as '15 2 * * *'; 'off' switches it off.")
    ] = None,
    timezone: Annotated[str, typer.Option(help="Time zone of --nightly, such as Europe/Berlin.")] = "UTC",
    stale_after: Annotated[
        float | None,
        typer.Option(help="Days after which a champion is stale; else as it was, at first 30.", min=0.001, max=36500),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Bring everything up on this machine: Prefect with its pages, the deployments, a worker, a Dask cluster.

    It stays until Ctrl-C, which stops everything; all of it listens on 127.0.0.1 only. Without --nightly the nightly
    retraining keeps the schedule that it has, at first one that is switched off.
    """
    from precision_time.flows.stack.deployments import NIGHTLY_CRON, Nightly
    from precision_time.flows.stack.services import adopt_environment
    from precision_time.flows.stack.up import Addresses, UpSettings, stay_up

    folder = _find_home(home)
    adopt_environment(folder, port)
    schedule = None
    if nightly is not None:
        is_on = nightly != "off"
        schedule = Nightly(cron=nightly if is_on else NIGHTLY_CRON, timezone=timezone, active=is_on)
        schedule.schedule()

    def announce(addresses: Addresses) -> None:
        if as_json:
            typer.echo(json.dumps(addresses.to_dict()))
        else:
            typer.echo(addresses.describe())

    settings = UpSettings(
        home=folder,
        port=port,
        cluster=cluster,
        workers=workers,
        with_worker=not no_worker,
        nightly=schedule,
        stale_after_days=stale_after,
    )
    stay_up(settings, announce=announce, say=lambda text: typer.echo(text, err=True))


def doctor(
    home: Annotated[str, typer.Option(help="Folder of precision-time up.", metavar="<path>")] = HOME,
    cluster: Annotated[
        str | None, typer.Option(help="Scheduler to look at; else the one of up, or of the deployed campaign.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder or URL of the timings; else those in the home.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check versions, Prefect, worker, deployments, Dask, GPUs, storage, login and encryption; each finding has a fix.

    Asks only PREFECT_API_URL or the server of --home, the scheduler, and the places of timings and registry. Ends
    with 3 when there are problems; warnings do not count.
    """
    from precision_time.flows.stack.doctor import Installation, examine
    from precision_time.flows.stack.findings import describe_findings

    findings = examine(Installation.find(_find_home(home), cluster=cluster, data=data))
    is_well = all(found.level != "problem" for found in findings)
    if as_json:
        typer.echo(json.dumps({"ok": is_well, "findings": [found.to_dict() for found in findings]}, indent=2))
    else:
        typer.echo(describe_findings(findings))
    if not is_well:
        raise typer.Exit(3)


def _find_home(text: str) -> Path:
    from precision_time.storage.errors import InputError

    if not text.strip():
        # An empty path is the current folder, and more likely a variable that was not set.
        raise InputError("no home for the stack", got="an empty --home", expected="a folder, such as ~/precision-time")
    return Path(text).expanduser().absolute()
