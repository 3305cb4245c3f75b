"""Command line of scoring: ``precision-time evaluate``."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from precision_time.storage.errors import InputError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from precision_time.predictor.answering.artifact import PublishedPredictor

__all__ = ["evaluate"]

#: Width of tables without a terminal, so that nothing is cut or wrapped.
_FILE_WIDTH = 160
#: Of a column with more values the largest groups are shown; --json has all of them.
_MOST_GROUPS = 60


def evaluate(
    measurements: Annotated[
        str | None, typer.Option(metavar="FILE", help="CSV or Parquet of training runs in the public table's columns.")
    ] = None,
    collectives: Annotated[
        str | None, typer.Option(metavar="FILE", help="CSV or Parquet of collective curves: score the network model.")
    ] = None,
    cv: Annotated[
        bool, typer.Option("--cv", help="Cross-validate the predictor and its baselines on the public table.")
    ] = False,
    artifact: Annotated[
        str | None, typer.Option(help="Published predictor: URL/name or URL/name@3; by default that of predict.")
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(metavar="COL,...", help="Columns to score by: of the file, or added ones such as policy, regime."),
    ] = None,
    plots: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Draw predicted against measured, and errors by distance, into FOLDER."),
    ] = None,
    worst: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="With --cv: list the N groups of rows with the largest MAPE.")
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="Leave out rows with doubtful flags or figures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: fractions and seconds.")] = False,
) -> None:
    """Score predictions against measured times: those of your file, or held-out rows of the public table.

    Give one of --measurements, --collectives and --cv. Each row is predicted, or counted with the reason why it is not.
    """
    mode = _choose_mode(
        {"--measurements": measurements is not None, "--collectives": collectives is not None, "--cv": cv}
    )
    columns = [column.strip() for part in by or [] for column in part.split(",") if column.strip()]
    _check_options(
        mode,
        {
            "--artifact": artifact is not None,
            "--by": bool(columns),
            "--clean": clean,
            "--plots": plots is not None,
            "--worst": worst is not None,
        },
    )
    if plots is not None:
        from precision_time.predictor.scoring.plots import check_plots

        check_plots(plots)
    if measurements is not None:
        _evaluate_rows(measurements, artifact=artifact, by=columns, clean=clean, plots=plots, as_json=as_json)
    elif collectives is not None:
        _evaluate_curves(collectives, by=columns, as_json=as_json)
    else:
        _cross_validate(plots=plots, worst=worst, as_json=as_json)


def _choose_mode(given: Mapping[str, bool]) -> str:
    modes = [option for option, is_given in given.items() if is_given]
    if len(modes) != 1:
        raise InputError(
            "evaluate needs one thing to score",
            got=" and ".join(modes) or "none",
            expected=f"exactly one of {', '.join(given)}",
            fix="precision-time evaluate --measurements FILE",
        )
    return modes[0]


_OPTIONS = {
    "--measurements": ("--artifact", "--by", "--clean", "--plots"),
    "--collectives": ("--by",),
    "--cv": ("--plots", "--worst"),
}


def _check_options(mode: str, given: Mapping[str, bool]) -> None:
    for option, is_given in given.items():
        if is_given and option not in _OPTIONS[mode]:
            allowed = ", ".join((*_OPTIONS[mode], "--json"))
            raise InputError(f"{option} does not go with {mode}", got=option, expected=f"{mode} with {allowed}")


def _evaluate_rows(
    path: str, *, artifact: str | None, by: Sequence[str], clean: bool, plots: str | None, as_json: bool
) -> None:
    from precision_time.predictor.scoring.evaluate_tables import predict_table

    published = _find_published(artifact)
    table = predict_table(path, published=published, by=by, clean=clean)
    result = table.summarise(by=by)
    if as_json:
        _print_json(result)
    else:
        _show_rows(result, answered_by="the closed forms" if published is None else published.manifest.artifact_id)
    if plots is None:
        return
    if not result["predicted"]:
        _say("no row was predicted, so there is nothing to draw")
        return
    from precision_time.predictor.scoring.plots import draw_table, write_plots

    domain = None if published is None else published.predictor.domain
    _say_drawn(write_plots(draw_table(table, title=Path(path).name, domain=domain), plots))


def _say_drawn(paths: Iterable[str]) -> None:
    for path in paths:
        _say(f"drawn: {path}")


def _show_rows(result: Mapping[str, Any], *, answered_by: str) -> None:
    groups = [("all rows", "", result["overall"]), *_list_groups(result["by"])]
    _print_table(
        ["by", "value", "rows", *_HEADINGS, "RMSE s"],
        (
            [column, value, scores["n"], *(_percent(scores[name]) for name in _HEADINGS.values()), _format_rmse(scores)]
            for column, value, scores in groups
        ),
    )
    typer.echo(f"{result['predicted']} of {result['rows']} rows predicted by {printable(answered_by)}")
    _print_refused(result["refused"])


#: Columns in per cent: heading and score.
_HEADINGS = {
    "MAPE %": "mape", "95 % interval": "mape_ci", "median": "median_ape", "p90": "p90_ape", "in 10 %": "within_10",
    "in 25 %": "within_25", "bias": "bias", "covered": "coverage_90",
}  # fmt: skip


def _format_rmse(scores: Mapping[str, Any]) -> str:
    return "" if scores["rmse_s"] is None else f"{scores['rmse_s']:.3g}"


def _find_published(artifact: str | None) -> "PublishedPredictor | None":
    from precision_time.predictor.answering.artifact import load_artifact, standing_artifact

    return standing_artifact().published if artifact is None else load_artifact(artifact)


def _evaluate_curves(path: str, *, by: Sequence[str], as_json: bool) -> None:
    from precision_time.predictor.scoring.evaluate_tables import evaluate_curves

    result = evaluate_curves(path, by=by)
    if as_json:
        _print_json(result)
        return
    groups = [("all rows", "", result["overall"]), *_list_groups(result["by"])]
    _print_table(
        ["by", "value", "rows", "median %", "p90 %"],
        (
            [column, value, scores["n"], _percent(scores["median_ape"]), _percent(scores["p90_ape"])]
            for column, value, scores in groups
        ),
    )
    _print_refused(result["refused"])


def _cross_validate(*, plots: str | None, worst: int | None, as_json: bool) -> None:
    from precision_time.predictor.rows.observations import observe_table
    from precision_time.predictor.rows.public_table import load_public_table
    from precision_time.predictor.scoring.calibration_curve import (
        CURVES,
        curve_table,
        format_curves,
        measure_calibration,
        plot_calibration,
    )
    from precision_time.predictor.scoring.cross_validation import cross_validate_all, cross_validation_table
    from precision_time.predictor.scoring.scoreboard import format_cross_validation, worst_groups

    _say("reading the public table")
    observations, refused = observe_table(load_public_table().kept)
    _say(f"cross-validating {len(observations)} rows, without {len(refused)} of unknown models; this takes minutes")
    results = cross_validate_all(observations, progress=_say_progress)
    split = _WORST_OF if _WORST_OF in results else next(iter(results))
    groups = [] if worst is None else worst_groups(results[split], observations, count=worst)
    curves = [measure_calibration(results[name], observations) for name in CURVES if name in results]
    if as_json:
        table: dict[str, Any] = dict(cross_validation_table(results)) | {"calibration": curve_table(curves)}
        _print_json(table if worst is None else table | {"worst": {"split": split, "groups": groups}})
    else:
        typer.echo(format_cross_validation(results), nl=False)
        typer.echo("\nbefore and after some measured rows, on the same rows (MAPE / median error, %)")
        typer.echo(format_curves(curves), nl=False)
        if worst is not None:
            _show_worst(groups, split=split)
    if plots is not None:
        from precision_time.predictor.scoring.plots import draw_cross_validation, write_plots

        pictures = draw_cross_validation(results, observations)
        if any(curve.points for curve in curves):
            pictures["calibration.png"] = plot_calibration(curves)
        _say_drawn(write_plots(pictures, plots))


#: The split whose worst groups are listed, because it leaves out each group as a whole.
_WORST_OF = "source-model-gpu"


def _show_worst(groups: Sequence[Mapping[str, str | float]], *, split: str) -> None:
    from precision_time.predictor.scoring.scoreboard import title_split

    typer.echo(f"\nworst groups of {title_split(split)}, with at least 5 rows each")
    _print_table(
        ["source", "network", "GPU", "rows", *_WORST_HEADINGS],
        (
            [group["source"], group["network"], group["gpu"], f"{group['n']:.0f}"]
            + [_percent(float(group[name])) if name in group else "" for name in _WORST_HEADINGS.values()]
            for group in groups
        ),
    )


_WORST_HEADINGS = {
    "MAPE %": "mape", "bias": "bias", "of all error": "error_share", "closed forms": "closed_form_mape",
    "their bias": "closed_form_bias",
}  # fmt: skip


def _say_progress(done: int, total: int) -> None:
    _say(f"{done} of {total} fits")


def _list_groups(by: Mapping[str, Mapping[str, dict[str, Any]]]) -> list[tuple[str, str, dict[str, Any]]]:
    """Column, value and scores of the groups to show; of a long column only the largest groups."""
    shown = []
    for column, groups in by.items():
        largest = set(sorted(groups, key=lambda value: -groups[value]["n"])[:_MOST_GROUPS])
        shown += [(column, value or "(blank)", groups[value]) for value in groups if value in largest]
        if len(groups) > _MOST_GROUPS:
            _say(f"{column}: the {_MOST_GROUPS} largest of {len(groups)} groups are shown; --json prints all of them")
    return shown


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _percent(share: float | Sequence[float] | None) -> str:
    """A fraction, or both ends of an interval of fractions, in per cent."""
    if share is None:
        return ""
    return f"{100 * share:.1f}" if isinstance(share, float) else "-".join(map(_percent, share))


def _print_refused(refused: Mapping[str, int]) -> None:
    for reason, count in sorted(refused.items(), key=lambda item: -item[1]):
        typer.echo(f"not predicted: {count} {printable(reason)}")


def _print_json(values: object) -> None:
    typer.echo(json.dumps(values, indent=2, allow_nan=False))


def _print_table(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    _open_console().print(table)


def _open_console() -> "Console":
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_FILE_WIDTH)
