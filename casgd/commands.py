"""Command line of the solver: ``precision-time glm fit | plan | bench``, alone or under ``mpiexec -n P``."""

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from precision_time.casgd.errors import InputError

if TYPE_CHECKING:
    from precision_time.casgd.command_data import CommandData
    from precision_time.casgd.communicator import Communicator

__all__ = ["glm_app"]

glm_app = typer.Typer(
    no_args_is_help=True,
    help="Logistic, linear and Poisson regression by communication-avoiding SGD, on one rank or many (mpiexec -n P).",
)


@dataclass(frozen=True)
class CommonOptions:
    """The options of all three commands, as Typer reads them."""

    data: Annotated[
        str,
        typer.Argument(
            help="breast_cancer, digits, diabetes, synth-logistic, synth-squared, synth-poisson, a LIBSVM file, or a "
            "cache made from one.",
            show_default=False,
        ),
    ]
    objective: Annotated[
        Literal["logistic", "squared", "poisson"] | None,
        typer.Option(help="Loss; by default the one of a named data set, and logistic for a file."),
    ] = None
    n_features: Annotated[int | None, typer.Option(help="Columns of a LIBSVM file or of a made-up data set.")] = None
    cache: Annotated[
        Path | None, typer.Option(help="Folder for the converted LIBSVM file; by default FILE.columns beside it.")
    ] = None
    sparse: Annotated[bool, typer.Option("--sparse", help="Hold a LIBSVM file as CSR.")] = False
    rows: Annotated[int, typer.Option(help="Rows of a made-up data set.")] = 20_000
    alpha: Annotated[float, typer.Option(help="Weight of the L2 penalty.")] = 1e-4
    prefetch: Annotated[
        bool, typer.Option("--prefetch", help="Send the Gram blocks of the next outer step during the recurrence.")
    ] = False
    standardise: Annotated[
        bool, typer.Option("--standardise/--as-is", help="Scale columns to mean 0 and deviation 1 before rounding.")
    ] = True
    seed: Annotated[int, typer.Option(help="Seed of the order of the rows and of made-up data.")] = 0
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")] = "auto"
    comm: Annotated[
        Literal["auto", "none", "mpi"], typer.Option(help="Ranks; auto is MPI under mpiexec, else one process.")
    ] = "auto"
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; times in seconds.")] = False


BatchSize = Annotated[int, typer.Option(help="Rows of a step.")]
Precision = Annotated[
    str,
    typer.Option(help="auto (recipe with a guard), or a policy: fp64, fp32, recipe, paper, fp16, bf16-gram."),
]
OnRisk = Annotated[
    Literal["fallback", "warn", "raise"] | None,
    typer.Option(
        help="What to do if rounding costs too much loss; by default fallback for precision auto, and for a named "
        "precision warn (fit) or no check (plan)."
    ),
]
Delay = Annotated[float, typer.Option(help="Microseconds added to every sum, to emulate a network.")]


def _with_common_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` whose first parameter, a CommonOptions, Typer sees as the single options."""
    own = list(inspect.signature(command).parameters.values())[1:]
    shared = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=field.type,
        )
        for field in fields(CommonOptions)
    ]

    def run(**values: Any) -> None:
        command(CommonOptions(**{option.name: values.pop(option.name) for option in shared}), **values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # inspect reads it
        [*shared, *(option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in own)]
    )
    return run


@contextlib.contextmanager
def _open_data(
    common: CommonOptions, *, place: bool = True, delay_us: float = 0.0
) -> Iterator[tuple["CommandData", "Communicator"]]:
    """The data and the ranks; if the input is bad on every rank, only rank 0 reports it.

    ``place`` moves the features to ``common.device``.
    """
    from precision_time.casgd.command_data import join_ranks, read_data

    ranks = join_ranks(common.comm, delay_us=delay_us)
    try:
        data = read_data(
            common.data,
            comm=ranks,
            objective=common.objective,
            n_features=common.n_features,
            cache=common.cache,
            sparse=common.sparse,
            rows=common.rows,
            seed=common.seed,
            standardise=common.standardise,
            device=common.device if place else "auto",
        )
        yield data, ranks
    except InputError as error:
        if ranks.rank == 0:
            raise
        raise typer.Exit(error.exit_code) from None


@glm_app.command()
@_with_common_options
def fit(
    common: CommonOptions,
    *,
    batch_size: BatchSize = 32,
    s: Annotated[str, typer.Option(help="Steps between two communications, or auto.")] = "auto",
    precision: Precision = "auto",
    on_risk: OnRisk = None,
    largest_excess: Annotated[
        float, typer.Option(help="Share of the loss above which the loss that rounding adds is a risk.")
    ] = 0.005,
    max_iter: Annotated[int, typer.Option(help="Largest number of epochs.")] = 200,
    tol: Annotated[
        float, typer.Option(help="Stop when epochs gain less than this share of the explainable loss.")
    ] = 1e-4,
    learning_rate: Annotated[
        Literal["optimal", "invscaling", "constant"],
        typer.Option(help="Step sizes; optimal falls as 1/t after ten epochs."),
    ] = "optimal",
    eta0: Annotated[float | None, typer.Option(help="First step size; by default estimated from the data.")] = None,
    power_t: Annotated[float, typer.Option(help="Exponent of invscaling.")] = 0.5,
    intercept: Annotated[
        bool, typer.Option("--intercept/--no-intercept", help="Whether to learn an intercept.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            help="NumPy file (.npz) for coef and intercept, in the units of the data, and for the chosen precision, s "
            "and predicted_excess."
        ),
    ] = None,
) -> None:
    """Train one model; print its score, the choices made, and where the time went."""
    from precision_time.casgd.command_runs import fit_model, save_model

    # The estimator places the features itself.
    with _open_data(common, place=False) as (data, ranks):
        report, model = fit_model(
            data,
            comm=ranks,
            settings={
                "alpha": common.alpha,
                "batch_size": batch_size,
                "s": _read_s(s),
                "precision": precision,
                "on_risk": on_risk,
                "largest_excess": largest_excess,
                "prefetch": common.prefetch,
                "max_iter": max_iter,
                "tol": tol,
                "learning_rate": learning_rate,
                "eta0": eta0,
                "power_t": power_t,
                "fit_intercept": intercept,
                "random_state": common.seed,
                "device": common.device,
            },
        )
        if out is not None:
            save_model(out, model, comm=ranks)
            report["out"] = str(out)
    if ranks.rank == 0:
        _print_fit(report, as_json=common.as_json)


@glm_app.command()
@_with_common_options
def plan(
    common: CommonOptions,
    *,
    batch_size: BatchSize = 32,
    precision: Precision = "auto",
    on_risk: OnRisk = None,
    delay_us: Delay = 0.0,
    bounds: Annotated[
        bool,
        typer.Option(
            "--bounds",
            help="Also print how far rounding moves one outer step, for each precision that the planner considers: the "
            "first-order bound, and the error measured in an emulation on the same data (one process only).",
        ),
    ] = False,
) -> None:
    """Time a dozen short runs, choose s and the precision, and predict the time of an epoch."""
    from precision_time.casgd.command_runs import bound_errors, plan_run

    with _open_data(common, delay_us=delay_us) as (data, ranks):
        question: dict[str, Any] = {
            "comm": ranks, "alpha": common.alpha, "batch_size": batch_size, "precision": precision,
            "on_risk": on_risk, "seed": common.seed,
        }  # fmt: skip
        study = bound_errors(data, **question) if bounds else None
        planned = plan_run(data, prefetch=common.prefetch, **question)
    if ranks.rank:
        return
    if common.as_json:
        report = planned.to_dict() | {"ranks": ranks.size} | ({} if study is None else {"bounds": study})
        typer.echo(json.dumps(report, allow_nan=False))
        return
    seconds = (
        f"{planned.seconds_per_epoch:.4g} s ({planned.low_s:.4g} to {planned.high_s:.4g} s at {planned.level:.0%})"
    )
    typer.echo(f"s={planned.s}, {planned.policy.name}, batch size {planned.batch_size}: an epoch takes {seconds}")
    for reason in planned.reasons:
        typer.echo(f"  {reason}")
    if study is not None:
        _print_bounds(study)


@glm_app.command()
@_with_common_options
def bench(
    common: CommonOptions,
    *,
    s: Annotated[list[int] | None, typer.Option(help="Repeatable; by default 1, 4 and 16.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Repeatable; by default 16.")] = None,
    precision: Annotated[list[str] | None, typer.Option(help="Repeatable; by default fp32 and recipe.")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of a run.")] = 1,
    repeats: Annotated[int, typer.Option(help="Runs of each setting; the fastest counts.")] = 3,
    delay_us: Delay = 0.0,
) -> None:
    """Time CA-SGD against FP32 SGD of the same batch size, and compare their losses on the features before rounding."""
    from precision_time.casgd.command_runs import time_runs

    with _open_data(common, delay_us=delay_us) as (data, ranks):
        runs = time_runs(
            data, comm=ranks, alpha=common.alpha, s=s or (1, 4, 16), batch_sizes=batch_size or (16,),
            precisions=precision or ("fp32", "recipe"), epochs=epochs, repeats=repeats, seed=common.seed,
            prefetch=common.prefetch,
        )  # fmt: skip
    if ranks.rank:
        return
    if common.as_json:
        report = {"data": data.name, "objective": data.objective, "rows": len(data.targets), "ranks": ranks.size,
                  "columns": data.columns, "delay_us": delay_us, "prefetch": common.prefetch, "runs": runs}  # fmt: skip
        typer.echo(json.dumps(report, allow_nan=False))
        return
    emulated = f", {delay_us:g} us added to every sum (emulation)" if delay_us else ""
    typer.echo(f"{data.name}: {len(data.targets)} x {data.columns}, {data.objective}, ranks: {ranks.size}{emulated}")
    _print_table(
        ["s", "batch", "precision", "s/epoch", "speed-up", "sums/epoch", "loss", "loss gap"],
        [
            [
                str(run["s"]),
                str(run["batch_size"]),
                run["precision"],
                f"{run['seconds_per_epoch']:.4g}",
                f"{run['speedup']:.2f}",
                f"{run['reductions_per_epoch']:g}",
                f"{run['loss']:.6g}",
                f"{run['loss_gap']:+.4%}",
            ]
            for run in runs
        ],
    )


def _read_s(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise InputError("s is not usable", got=repr(text), expected="auto, or a whole number of at least 1")
    return int(text)


def _print_fit(report: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report, allow_nan=False))
        return
    typer.echo(
        f"{report['data']}: {report['rows']} x {report['columns']}, {report['objective']}, ranks: {report['ranks']}"
    )
    ended = "converged" if report["converged"] else "not converged"
    typer.echo(
        f"{report['score_name']} {report['score']:.4f}, loss {report['loss']:.6g} after {report['epochs']} epochs "
        f"({ended}) in {report['total_s']:.3g} s"
    )
    typer.echo(
        f"s={report['s']}, batch size {report['batch_size']}, precision {report['precision']}, "
        f"first step {report['eta0']:.4g}, {report['reductions']} sums over the ranks"
    )
    typer.echo("seconds: " + ", ".join(f"{part} {seconds:.3g}" for part, seconds in report["seconds"].items()))
    if report["staging"]:
        typer.echo(f"arrays go between ranks through host memory: {report['staging']}")
    for text in report["warnings"]:
        typer.echo(f"warning: {text}", err=True)
    if report["out"]:
        typer.echo(f"coef, intercept, precision, s and predicted_excess are in {report['out']}")


def _print_bounds(study: dict[str, Any]) -> None:
    worst = "unbounded" if study["worst_propagation"] is None else f"{study['worst_propagation']:.3g} times"
    typer.echo(
        f"relative error of one outer step (s={study['s']}, batch size {study['batch_size']}) by each rounding; growth "
        f"of a margin error within the step: {study['propagation']:.3g} times on these data, {worst} at worst"
    )
    rows = [
        [policy, error["choice"], error["format"], _show(error["bound"]), _show(error["measured"])]
        for policy, errors in study["policies"].items()
        for error in errors
    ]
    _print_table(["precision", "rounding", "format", "bound", "measured"], rows)


def _show(error: float | None) -> str:
    return "out of range" if error is None else f"{error:.2e}"


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        typer.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
