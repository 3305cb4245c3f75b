"""The command line: joins the sub-commands of the folders, loads one only when it is used, and prints errors."""

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


# Help and completion read only this table and import none of its modules.
_COMMANDS = {
    "predict": _Command("predictor.commands", "predict", "Predict how long a training job will take, and why."),
    "evaluate": _Command("predictor.evaluate_commands", "evaluate", "Compare predictions with measured times."),
    "campaign": _Command("flows.commands", "campaign", "Time real training runs over a grid of cells."),
    "retrain": _Command("flows.commands", "retrain", "Fit, validate and publish a predictor."),
    "probe": _Command("flows.commands", "probe", "Measure in seconds what this machine's device can do."),
    "up": _Command("flows.stack.commands", "up", "Run Prefect's pages, a worker and a Dask cluster on this machine."),
    "doctor": _Command("flows.stack.commands", "doctor", "Find what is set up wrongly, and say how to fix it."),
    "glm": _Command("casgd.commands", "glm_app", "Fit generalised linear models by CA-SGD, on any number of ranks."),
    "registry": _Command("storage.commands", "registry_app", "List, check and roll back published predictors."),
    "data": _Command("storage.commands", "data_app", "List and check recorded timings."),
}

#: A library -> the extra that installs it.
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
    """A group that knows only name and help of its commands, and loads the one that is used."""

    def __init__(self, **settings: Any) -> None:
        settings["commands"] = {name: TyperCommand(name, help=entry.help) for name, entry in _COMMANDS.items()}
        super().__init__(**settings)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else _load(name), rest


def _load(name: str) -> Any:
    entry = _COMMANDS[name]
    command = getattr(importlib.import_module(f"precision_time.{entry.module}"), entry.attribute)
    holder = typer.Typer(add_completion=False)
    if isinstance(command, typer.Typer):
        holder.add_typer(command, name=name)
        return get_group(holder).commands[name]
    holder.command(name)(command)
    return get_command(holder)


def _print_versions(is_given: bool) -> None:
    if not is_given:
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
    epilog="Exit codes: 0 success, 1 internal error, 2 bad input, 3 goal not met, 4 damaged data or artifact, "
    "5 partial result, 6 outside the training data, 130 interrupted.",
)


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_versions, help="Print versions and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Predict before it starts how long a training job will take, at any precision and GPU count, and why."""


@runtime_checkable
class _Reportable(Protocol):
    """An error like those of storage.errors; the solver imports nothing from the package and has its own class."""

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
    """The error to show for ``error``, which a library may have raised."""
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
        "an unexpected error occurred", got=f"{type(error).__name__}: {error}", fix="run it again with --debug"
    )


def _run(arguments: list[str], *, as_json: bool) -> int:
    # With --json a usage error is raised as an exception instead of printed in typer's coloured box.
    result = get_command(app).main(arguments, prog_name="precision-time", standalone_mode=not as_json)
    return result if isinstance(result, int) else 0


def _usage_error(error: Exception) -> InputError | None:
    """Typer's own errors by their message, because their class differs between releases; exit code 2."""
    format_message = getattr(error, "format_message", None)
    if format_message is None:
        return None
    return InputError(" ".join(format_message().split()), fix="precision-time --help")


def run(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code; errors go to stderr."""
    end_of_options = arguments.index("--") if "--" in arguments else len(arguments)
    options, rest = list(arguments[:end_of_options]), list(arguments[end_of_options:])
    debug = "--debug" in options
    as_json = "--json" in options
    # Removed here, so that it may also stand behind a sub-command.
    options = [option for option in options if option != "--debug"]
    try:
        code = _run([*options, *rest], as_json=as_json)
        sys.stdout.flush()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The reader of a pipe has gone; without this the interpreter's last flush would report it again.
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
