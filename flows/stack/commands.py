"""The commands ``up`` and ``doctor``; each imports its libraries only when it runs."""

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
            help="Where campaigns measure: auto, local (CPU workers), local-cuda (one worker per GPU), tcp://host:port "
            "of a running Dask scheduler, or none: each campaign then starts its own workers."
        ),
    ] = "auto",
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of CPU workers, and so the most ranks of a cell; by default one per core, 2 to 8.", min=1
        ),
    ] = None,
    no_worker: Annotated[
        bool, typer.Option("--no-worker", help="Start no Prefect worker: runs wait until one is started elsewhere.")
    ] = False,
    nightly: Annotated[
        str | None,
        typer.Option(help="Cron line of the nightly retraining, such as '15 2 * * *'; 'off' switches it off."),
    ] = None,
    timezone: Annotated[str, typer.Option(help="Time zone of --nightly, such as Europe/Berlin.")] = "UTC",
    stale_after: Annotated[
        float | None,
        typer.Option(
            help="Days after which the predictor in use counts as stale; unchanged by default, 30 at first.",
            min=0.001,
            max=36500,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run everything on this machine: Prefect's server and pages, the deployments, a worker, a Dask cluster.

    It runs until Ctrl-C, which stops everything, and listens on 127.0.0.1 only. Without --nightly the nightly
    retraining keeps its schedule, which is switched off at first.
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
        schedule.to_prefect()  # refuses a bad one before anything starts

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
    home: Annotated[str, typer.Option(help="Home folder of precision-time up.", metavar="<path>")] = HOME,
    cluster: Annotated[
        str | None, typer.Option(help="Scheduler to check; by default that of up, or of the deployed campaign.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder or URL of the timings to check; by default those in the home folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check versions, Prefect, worker, deployments, Dask, GPUs, storage, login and encryption; say how to fix problems.

    It contacts only the Prefect server (PREFECT_API_URL, else that of --home), the Dask scheduler, and the storage of
    timings and registry. The exit code is 3 when there are problems; warnings do not count.
    """
    from precision_time.flows.stack.doctor import Installation, examine
    from precision_time.flows.stack.findings import describe_findings

    findings = examine(Installation.find(_find_home(home), cluster=cluster, data=data))
    is_well = all(finding.level != "problem" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": is_well, "findings": [finding.to_dict() for finding in findings]}, indent=2))
    else:
        typer.echo(describe_findings(findings))
    if not is_well:
        raise typer.Exit(3)


def _find_home(text: str) -> Path:
    from precision_time.storage.errors import InputError

    if not text.strip():
        # An empty path would be the current folder; more likely a shell variable was not set.
        raise InputError("no home folder is named", got="an empty --home", expected="a folder: ~/precision-time")
    return Path(text).expanduser().absolute()
