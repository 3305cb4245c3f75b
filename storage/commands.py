"""Command line of the storage: ``precision-time registry`` and ``precision-time data``."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from precision_time.storage.configuration import configured_registry_url
from precision_time.storage.errors import (
    InputError,
    IntegrityError,
    NotFoundError,
    PartialError,
    PrecisionTimeError,
    printable,
)
from precision_time.storage.registry import Registry

if TYPE_CHECKING:
    from precision_time.storage.timings import TimingsDataset

__all__ = ["data_app", "registry_app"]

registry_app = typer.Typer(no_args_is_help=True, help="Published predictors: list, check, move an alias, roll back.")
data_app = typer.Typer(no_args_is_help=True, help="Recorded timings: summary, check, import.")

Url = Annotated[
    str | None,
    typer.Option(
        "--url", help="Folder or URL of the registry; by default PRECISION_TIME_REGISTRY, else the configuration file."
    ),
]
Reference = Annotated[str, typer.Argument(help="name, name@version or name@alias; a bare name is name@champion.")]
DataUrl = Annotated[str, typer.Argument(metavar="DATASET", help="Folder or URL of the timings dataset.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]

_FILE_WIDTH = 160


@registry_app.command("list")
def list_artifacts(url: Url = None, as_json: AsJson = False) -> None:
    """List all published versions and the aliases that point to them."""
    registry = _open_registry(url)
    rows = []
    for name in registry.names():
        aliases = registry.aliases(name)
        for version in registry.versions(name):
            manifest = registry.manifest(f"{name}@{version}")
            rows.append(
                {
                    "name": name,
                    "version": version,
                    "aliases": sorted(alias for alias, target in aliases.items() if target == version),
                    "created_at": manifest.created_at,
                    "training_rows": manifest.training_rows,
                    "hardware": manifest.hardware,
                }
            )
    if as_json:
        _print_json(rows)
    elif rows:
        _print_table(list(rows[0]), (row.values() for row in rows))
    else:
        typer.echo(f"nothing is published in {printable(registry.url)}")


@registry_app.command("show")
def show_artifact(reference: Reference, url: Url = None, as_json: AsJson = False) -> None:
    """Print the manifest of one version: its files, training data and accuracy."""
    manifest = _open_registry(url).manifest(reference)
    if as_json:
        _print_json(manifest.model_dump(mode="json"))
        return
    values = manifest.model_dump(mode="json", exclude={"files", "accuracy", "feature_names"})
    _print_table(["field", "value"], values.items())
    _print_table(["file", "bytes", "sha256"], ((file.path, file.size_bytes, file.sha256) for file in manifest.files))
    _print_table(
        ["split", "method", "metric", "value"],
        (
            (split, method, metric, value)
            for split, methods in manifest.accuracy.items()
            for method, metrics in methods.items()
            for metric, value in metrics.items()
        ),
    )


@registry_app.command("verify")
def verify_artifacts(
    reference: Annotated[str | None, typer.Argument(help="One artifact; by default all versions.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Check the files of one version, or of all, against their manifests (exit code 4 if one does not match)."""
    registry = _open_registry(url)
    if reference is None:
        references = [f"{name}@{version}" for name in registry.names() for version in registry.versions(name)]
    else:
        references = [reference]
    if not references:
        raise NotFoundError("nothing is published here", got=registry.url, expected="the URL or folder of a registry")
    problems: dict[str, IntegrityError] = {}
    for artifact in references:
        try:
            registry.verify(artifact)
        except IntegrityError as error:
            problems[artifact] = error
    broken = {artifact: str(error) for artifact, error in problems.items()}
    if as_json:
        _print_json(
            [
                {"artifact": artifact, "sound": artifact not in broken, "problem": broken.get(artifact)}
                for artifact in references
            ]
        )
    else:
        for artifact in references:
            typer.echo(f"{artifact}: {printable(broken.get(artifact, 'sound'))}")
    if len(problems) == 1:
        raise next(iter(problems.values()))
    if problems:
        raise IntegrityError(
            "artifacts are not what was published",
            got=", ".join(broken),
            expected="the files of their manifests",
            fix="publish them again, or roll the aliases back",
        )


@registry_app.command("alias")
def set_alias(
    name: Annotated[str, typer.Argument(help="Name of the artifact.")],
    alias: Annotated[str, typer.Argument(help="The alias, e.g. champion.")],
    version: Annotated[int, typer.Argument(help="The version that the alias will point to.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Point an alias to a version."""
    _open_registry(url).set_alias(name, alias, version)
    _print_alias(name, alias, version, as_json=as_json)


@registry_app.command("rollback")
def roll_back(
    name: Annotated[str, typer.Argument(help="Name of the artifact.")],
    alias: Annotated[str, typer.Option(help="The alias to move back.")] = "champion",
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Point an alias back to the version before the current one."""
    version = _open_registry(url).roll_back(name, alias)
    _print_alias(name, alias, version, as_json=as_json)


@data_app.command("summary")
def summarize(dataset: DataUrl, as_json: AsJson = False) -> None:
    """Count recorded cells and rows, and the causes of failed attempts."""
    timings = _open_dataset(dataset)
    table = timings.read()
    outcomes = timings.outcomes()
    recorded = timings.recorded_cells()
    grid = Counter(zip(*(table.column(name).to_pylist() for name in ("model", "gpu", "cell_id")), strict=True))
    cells = Counter((model, gpu) for model, gpu, _ in grid)
    rows: Counter[tuple[str, str]] = Counter()
    for (model, gpu, _), count in grid.items():
        rows[model, gpu] += count
    failures = Counter((outcome.status, outcome.cause) for outcome in outcomes if outcome.status != "recorded")
    only_failed = {outcome.cell_id for outcome in outcomes if outcome.status != "recorded"} - recorded
    summary = {
        "url": timings.url,
        "cells": len(recorded),
        "rows": table.num_rows,
        "models": [
            {"model": model, "gpu": gpu, "cells": cells[model, gpu], "rows": rows[model, gpu]}
            for model, gpu in sorted(cells)
        ],
        "attempts": len(outcomes),
        "failures": [
            {"status": status, "cause": cause, "attempts": count} for (status, cause), count in sorted(failures.items())
        ],
        "failed_cells": len(only_failed),
        "problems": [{"path": path, "reason": reason} for path, reason in timings.problems],
    }
    if as_json:
        _print_json(summary)
        return
    _print_table(["model", "gpu", "cells", "rows"], (entry.values() for entry in summary["models"]))
    _print_table(["status", "cause", "attempts"], (entry.values() for entry in summary["failures"]))
    typer.echo(
        f"{len(recorded)} cells, {table.num_rows} rows, {len(outcomes)} attempts, {len(only_failed)} cells that only "
        f"failed, {len(timings.problems)} unsound files"
    )
    _warn(timings.problems)


@data_app.command("verify")
def verify_data(
    dataset: DataUrl,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with code 4 instead of 5.")] = False,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Move unsound files to quarantine/, so that their cells run again.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every file and check its seal, schema and times (exit code 5 if one cannot be used, 4 with --strict)."""
    timings = _open_dataset(dataset)
    problems = timings.check()
    unsound = timings.unsound_files if set_aside else []
    moved = {path: timings.set_aside(path, reason) for path, reason in unsound}
    if as_json:
        _print_json(
            {
                "url": timings.url,
                "cells": len(timings.recorded_cells()),
                "problems": [
                    {"path": path, "reason": reason, "moved_to": moved.get(path)} for path, reason in problems
                ],
            }
        )
    else:
        typer.echo(f"{printable(timings.url)}: {len(timings.recorded_cells())} cells, {len(problems)} problems")
        for path, reason in problems:
            typer.echo(f"{printable(path)}: {printable(reason)}")
    if problems:
        kind: type[PrecisionTimeError] = IntegrityError if strict else PartialError
        raise kind(
            f"{len(problems)} parts of the dataset cannot be used",
            got=problems[0][0],
            expected="files as they were recorded",
            fix="the other files are still used; move unsound files away by --set-aside and run the campaign again",
        )


@data_app.command("import")
def import_measurements(
    file: Annotated[str, typer.Argument(metavar="FILE", help="CSV or Parquet with the columns of the public table.")],
    into: Annotated[str, typer.Option("--into", help="Parquet table to append to; created if missing.")],
    as_json: AsJson = False,
) -> None:
    """Append the measured rows of a file to a table, all or none; rows that the table has already are skipped."""
    # Here, so that `registry` and --help do not wait for pandas and pyarrow.
    from precision_time.storage.tables import import_rows

    counts = import_rows(file, into=into)
    if as_json:
        _print_json({"file": file, "into": into, **counts._asdict()})
    else:
        typer.echo(
            f"{counts.read} rows read, {counts.added} added, {counts.skipped} skipped as already there; "
            f"{printable(into)} has {counts.total}"
        )


def _open_registry(url: str | None) -> Registry:
    url = url or configured_registry_url()
    if url is None:
        raise InputError(
            "no registry is named",
            expected="--url, PRECISION_TIME_REGISTRY, or [registry] url in ~/.config/precision_time/config.toml",
        )
    return Registry(url)


def _open_dataset(url: str) -> "TimingsDataset":
    # Here, so that `registry` and --help do not wait for pyarrow.
    from precision_time.storage.timings import TimingsDataset

    dataset = TimingsDataset(url)
    if dataset.is_empty():
        raise NotFoundError(
            "there is no dataset here", got=dataset.url, expected="the folder or URL of a campaign's data"
        )
    return dataset


def _print_alias(name: str, alias: str, version: int, *, as_json: bool) -> None:
    if as_json:
        _print_json({"name": name, "alias": alias, "version": version})
    else:
        typer.echo(f"{name}@{alias} is version {version}")


def _print_json(values: object) -> None:
    typer.echo(json.dumps(values, indent=2, allow_nan=False))


def _print_table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(printable(_text(cell) or "")) for cell in row))
    if table.row_count:
        # A file has no terminal width to cut lines to.
        Console(width=None if sys.stdout.isatty() else _FILE_WIDTH).print(table)


def _warn(problems: Iterable[tuple[str, str]]) -> None:
    for path, reason in problems:
        typer.echo(f"left out {printable(path)}: {printable(reason)}", err=True)


def _text(value: object) -> str | None:
    if value is None:
        return None
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
