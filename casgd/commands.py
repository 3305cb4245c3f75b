"""Command line of the solver: ``precision-time glm fit | plan | bench``, alone or under ``mpiexec -n P``."""

import contextlib
import json
from collections.abc import Iterator, Sequence
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
    help="Logistic, linear and Poisson regression by communication-avoiding SGD, one rank or many (mpiexec -n P).",
)

ObjectiveName = Literal["logistic", "squared", "poisson"]
Data = Annotated[
    str,
    typer.Argument(
        help="breast_cancer, digits, diabetes, synth-logistic, synth-squared, synth-poisson, a LIBSVM file, or a cache "
        "made from one.",
        show_default=False,
    ),
]
ObjectiveOption = Annotated[
    ObjectiveName | None, typer.Option("--objective", help="By default that of a named set; logistic for a file.")
]
Features = Annotated[int | None, typer.Option("--n-features", help="Columns of a LIBSVM file or of a made-up set.")]
Cache = Annotated[
    Path | None, typer.Option(help="Folder for the converted LIBSVM file; by default beside it, FILE.columns.")
]
Sparse = Annotated[bool, typer.Option("--sparse", help="Hold a LIBSVM file as CSR.")]
Rows = Annotated[int, typer.Option(help="Rows of a made-up set.")]
Seed = Annotated[int, typer.Option(help="Of the order of the rows, and of made-up data.")]
Standardise = Annotated[
    bool, typer.Option("--standardise/--as-is", help="Columns to mean 0 and deviation 1 before rounding.")
]
Alpha = Annotated[float, typer.Option(help="Weight of the L2 penalty.")]
BatchSize = Annotated[int, typer.Option(help="Rows of a step.")]
Precision = Annotated[
    str, typer.Option(help="auto, or a policy: fp64, fp32, recipe, paper, fp16, bf16-gram. auto is a guarded recipe.")
]
Ranks = Annotated[
    Literal["auto", "none", "mpi"], typer.Option("--comm", help="auto is MPI under mpiexec, else one process.")
]
OnRisk = Annotated[
    Literal["fallback", "warn", "raise"] | None,
    typer.Option(
        "--on-risk",
        help="Where rounding costs too much loss: by default fallback for auto, warn for a named precision.",
    ),
]
LargestExcess = Annotated[float, typer.Option(help="Share of the loss that rounding may add before that is a risk.")]
Prefetch = Annotated[bool, typer.Option("--prefetch", help="Send the next Gram blocks during the recurrence.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to compute.")]
Delay = Annotated[float, typer.Option("--delay-us", help="Microseconds added to every sum: emulates a network.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; times in seconds.")]


@contextlib.contextmanager
def _open_data(
    data: str, *, comm: str, device: str = "auto", delay_us: float = 0.0, **options: Any
) -> Iterator[tuple["CommandData", "Communicator"]]:
    """The data (``options`` are those of ``read_data``) and the ranks; of bad input on every rank, rank 0 tells."""
    from precision_time.casgd.command_data import join_ranks, place_data, read_data

    ranks = join_ranks(comm, delay_us=delay_us)
    try:
        yield place_data(read_data(data, comm=ranks, **options), device=device, comm=ranks), ranks
    except InputError as error:
        if ranks.rank == 0:
            raise
        raise typer.Exit(error.exit_code) from None


@glm_app.command()
def fit(
    data: Data,
    objective: ObjectiveOption = None,
    n_features: Features = None,
    cache: Cache = None,
    sparse: Sparse = False,
    rows: Rows = 20_000,
    alpha: Alpha = 1e-4,
    batch_size: BatchSize = 32,
    s: Annotated[str, typer.Option(help="Steps between two communications, or auto.")] = "auto",
    precision: Precision = "auto",
    on_risk: OnRisk = None,
    largest_excess: LargestExcess = 0.005,
    prefetch: Prefetch = False,
    max_iter: Annotated[int, typer.Option(help="The most epochs.")] = 200,
    tol: Annotated[float, typer.Option(help="Share of what there is to explain; stop when epochs gain less.")] = 1e-4,
    learning_rate: Annotated[
        Literal["optimal", "invscaling", "constant"], typer.Option(help="optimal falls as 1/t after ten epochs.")
    ] = "optimal",
    eta0: Annotated[float | None, typer.Option(help="First step; by default from the data.")] = None,
    power_t: Annotated[float, typer.Option(help="Exponent of invscaling.")] = 0.5,
    intercept: Annotated[bool, typer.Option("--intercept/--no-intercept", help="Whether to learn one.")] = True,
    standardise: Standardise = True,
    seed: Seed = 0,
    device: Device = "auto",
    comm: Ranks = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            help="NumPy file (.npz) for coef and intercept, in the units of the data, and for what was chosen: "
            "precision, s, predicted_excess."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train one model and tell how well it fits, what was chosen, and where the time went."""
    from precision_time.casgd.command_runs import fit_model, save_model

    with _open_data(
        data, comm=comm, objective=objective, n_features=n_features, cache=cache, sparse=sparse, rows=rows,
        seed=seed, standardise=standardise,
    ) as (found, ranks):  # fmt: skip
        report, model = fit_model(
            found,
            comm=ranks,
            settings={
                "alpha": alpha,
                "batch_size": batch_size,
                "s": _read_s(s),
                "precision": precision,
                "on_risk": on_risk,
                "largest_excess": largest_excess,
                "prefetch": prefetch,
                "max_iter": max_iter,
                "tol": tol,
                "learning_rate": learning_rate,
                "eta0": eta0,
                "power_t": power_t,
                "fit_intercept": intercept,
                "random_state": seed,
                "device": device,
            },
        )
        if out is not None:
            save_model(out, model, comm=ranks)
            report["out"] = str(out)
    if ranks.rank == 0:
        _tell(report, as_json=as_json)


@glm_app.command("plan")
def plan_command(
    data: Data,
    objective: ObjectiveOption = None,
    n_features: Features = None,
    cache: Cache = None,
    sparse: Sparse = False,
    rows: Rows = 20_000,
    alpha: Alpha = 1e-4,
    batch_size: BatchSize = 32,
    precision: Precision = "auto",
    on_risk: OnRisk = None,
    prefetch: Prefetch = False,
    standardise: Standardise = True,
    seed: Seed = 0,
    device: Device = "auto",
    comm: Ranks = "auto",
    delay_us: Delay = 0.0,
    as_json: AsJson = False,
) -> None:
    """Time a dozen short runs, choose s and the precision, and predict the time of an epoch."""
    from precision_time.casgd.command_runs import plan_run

    with _open_data(
        data, comm=comm, device=device, delay_us=delay_us, objective=objective, n_features=n_features, cache=cache,
        sparse=sparse, rows=rows, seed=seed, standardise=standardise,
    ) as (found, ranks):  # fmt: skip
        made = plan_run(
            found, comm=ranks, alpha=alpha, batch_size=batch_size, precision=precision, on_risk=on_risk,
            prefetch=prefetch, seed=seed,
        )  # fmt: skip
    if ranks.rank:
        return
    if as_json:
        typer.echo(json.dumps(made.to_dict() | {"ranks": ranks.size}, allow_nan=False))
        return
    seconds = f"{made.seconds_per_epoch:.4g} s ({made.low_s:.4g} to {made.high_s:.4g} s at {made.level:.0%})"
    typer.echo(f"s={made.s}, {made.policy.name}, batch size {made.batch_size}: an epoch takes {seconds}")
    for reason in made.reasons:
        typer.echo(f"  {reason}")


@glm_app.command()
def bench(
    data: Data,
    objective: ObjectiveOption = None,
    n_features: Features = None,
    cache: Cache = None,
    sparse: Sparse = False,
    rows: Rows = 20_000,
    alpha: Alpha = 1e-4,
    s: Annotated[list[int] | None, typer.Option(help="Repeatable; by default 1, 4 and 16.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="Repeatable; by default 16.")] = None,
    precision: Annotated[list[str] | None, typer.Option(help="Repeatable; by default fp32 and recipe.")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of a run.")] = 1,
    repeats: Annotated[int, typer.Option(help="Runs of each; the fastest counts.")] = 3,
    prefetch: Prefetch = False,
    standardise: Standardise = True,
    seed: Seed = 0,
    device: Device = "auto",
    comm: Ranks = "auto",
    delay_us: Delay = 0.0,
    as_json: AsJson = False,
) -> None:
    """Time CA-SGD against FP32 SGD of the same batch size, and compare their losses on the features before rounding."""
    from precision_time.casgd.command_runs import time_runs

    with _open_data(
        data, comm=comm, device=device, delay_us=delay_us, objective=objective, n_features=n_features, cache=cache,
        sparse=sparse, rows=rows, seed=seed, standardise=standardise,
    ) as (found, ranks):  # fmt: skip
        timed = time_runs(
            found, comm=ranks, alpha=alpha, s=s or (1, 4, 16), batch_sizes=batch_size or (16,),
            precisions=precision or ("fp32", "recipe"), epochs=epochs, repeats=repeats, seed=seed,
            prefetch=prefetch,
        )  # fmt: skip
    if ranks.rank:
        return
    if as_json:
        settings = {"data": found.name, "objective": found.objective, "rows": len(found.targets), "ranks": ranks.size,
                    "columns": found.columns, "delay_us": delay_us, "prefetch": prefetch, "runs": timed}  # fmt: skip
        typer.echo(json.dumps(settings, allow_nan=False))
        return
    emulated = f", {delay_us:g} us added to every sum (emulation)" if delay_us else ""
    typer.echo(
        f"{found.name}: {len(found.targets)} x {found.columns}, {found.objective}, ranks: {ranks.size}{emulated}"
    )
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
            for run in timed
        ],
    )


def _read_s(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise InputError("s is not usable", got=repr(text), expected="auto, or a whole number of at least 1")
    return int(text)


def _tell(report: dict[str, Any], *, as_json: bool) -> None:
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
        typer.echo(f"coef, intercept and what was chosen are in {report['out']}")


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    for row in (header, *rows):
        typer.echo("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
