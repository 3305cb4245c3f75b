"""The command line: joins the sub-commands of the folders, loads one only when it is asked for, and prints errors."""

import importlib
import importlib.metadata
import json
import os
import platform
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from precision_time.storage.errors import InputError, PrecisionTimeError

__all__ = ["main"]


class _Command(NamedTuple):
    module: str
    attribute: str
    help: str


# Help and completion read this table, so they import none of the modules in it.
_COMMANDS = {
    "predict": _Command("predictor.commands", "predict", "How long one training job will take, and why."),
    "evaluate": _Command("predictor.evaluate_commands", "evaluate", "How far predictions are from measured times."),
    "campaign": _Command("flows.commands", "campaign", "Time real training runs over a grid of cells."),
    "retrain": _Command("flows.commands", "retrain", "Fit, validate and publish a predictor."),
    "probe": _Command("flows.commands", "probe", "What this machine's device can do, measured in seconds."),
    "up": _Command("flows.stack.commands", "up", "Prefect's pages, a worker and a Dask cluster on this machine."),
    "doctor": _Command("flows.stack.commands", "doctor", "What is not set up as it must be, and how to mend it."),
    "glm": _Command("casgd.commands", "glm_app", "Logistic, linear and Poisson regression by CA-SGD, on any ranks."),
    "registry": _Command("storage.commands", "registry_app", "Published predictors: list, check, roll back."),
    "data": _Command("storage.commands", "data_app", "Recorded timings: what is there, is it sound."),
}

#: A library that an extra brings -> the extra.
_EXTRAS = {
    "xgboost": "train",
    "prefect": "campaign",
    "prefect_dask": "campaign",
    "dask": "campaign",
    "distributed": "campaign",
    "torch": "campaign",
    "transformers": "campaign",
    "matplotlib": "campaign",
    "yaml": "campaign",
    "psutil": "campaign",
    "dask_cuda": "gpu-cu12",
    "cupy": "gpu-cu12",
    "mpi4py": "mpi",
    "scipy": "glm",
    "sklearn": "glm",
    "ml_dtypes": "glm",
    "s3fs": "s3",
}

_VERSIONS_SHOWN = (
    "numpy", "pyarrow", "pandas", "pydantic", "typer", "fsspec", "xgboost-cpu", "xgboost", "prefect", "dask",
    "distributed", "torch", "transformers", "mpi4py",
)  # fmt: skip


class _LazyGroup(TyperGroup):
    """A group whose commands are a name and one line of help until one of them is asked for."""

    def __init__(self, **settings: Any) -> None:
        settings["commands"] = {name: TyperCommand(name, help=entry.help) for name, entry in _COMMANDS.items()}
        super().__init__(**settings)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else _load(name), rest


def _load(name: str) -> Any:
    entry = _COMMANDS[name]
    found = getattr(importlib.import_module(f"precision_time.{entry.module}"), entry.attribute)
    holder = typer.Typer(add_completion=False)
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
        return get_group(holder).commands[name]
    holder.command(name)(found)
    return get_command(holder)


def _print_versions(asked: bool) -> None:
    if not asked:
        return
    typer.echo(f"precision-time {importlib.metadata.version('precision-time')}")
    typer.echo(f"python {platform.python_version()}")
    for name in _VERSIONS_SHOWN:
        try:
            typer.echo(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    raise typer.Exit


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 ok, 1 internal, 2 bad input, 3 goal not met, 4 trust or integrity, 5 partial, "
    "6 out of domain, 130 interrupted.",
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_versions, help="Print versions and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """How long a training job will take, at any precision and GPU count, before it starts, and why."""


@runtime_checkable
class _Reportable(Protocol):
    """An error as storage.errors has them; the solver, which imports nothing of ours, brings its own."""

    code: str
    exit_code: int

    def to_dict(self) -> dict[str, str | None]: ...


def _report(error: _Reportable, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(error.to_dict()), file=sys.stderr)
    else:
        print(f"error {error.code}: {error}", file=sys.stderr)
    return error.exit_code


def _explain(error: Exception) -> _Reportable:
    """The error to show for one that a library raised."""
    if isinstance(error, _Reportable):
        return error
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        extra = _EXTRAS.get(error.name.partition(".")[0])
        if extra is not None:
            return InputError(
                f"this command needs the extra {extra!r}",
                got=f"no module named {error.name}",
                fix=f"pip install 'precision-time[{extra}]'",
            )
    return PrecisionTimeError(
        "something inside went wrong", got=f"{type(error).__name__}: {error}", fix="run it again with --debug"
    )


def _run(arguments: list[str], *, as_json: bool) -> int:
    # With --json a usage error comes back as an exception instead of typer's coloured box.
    result = get_command(app).main(arguments, prog_name="precision-time", standalone_mode=not as_json)
    return result if isinstance(result, int) else 0


def _usage_error(error: Exception) -> InputError | None:
    """Typer's own errors: they carry a message and the exit code 2, whichever class this release gives them."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    return InputError(" ".join(format_message().split()), fix="precision-time --help")


def run(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code; errors go to stderr."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = list(arguments[:cut]), list(arguments[cut:])
    debug = "--debug" in options
    as_json = "--json" in options
    # Taken out here so that it may stand behind a sub-command too.
    options = [option for option in options if option != "--debug"]
    try:
        code = _run([*options, *rest], as_json=as_json)
        sys.stdout.flush()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of a pipe went away; the interpreter's last flush must not complain about it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        code = _report(_usage_error(error) or _explain(error), as_json=as_json)
    return code


def main() -> NoReturn:
    """The console script ``precision-time``."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
