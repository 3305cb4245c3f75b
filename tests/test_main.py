"""The command line: where errors go, what they look like, and the exit codes."""

import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from precision_time import __main__ as command_line
from precision_time.__main__ import run
from precision_time.storage.errors import IntegrityError, PartialError

Register = Callable[[object], None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Register]:
    """Adds a command called ``job`` to the command line."""
    module = types.ModuleType("precision_time.job_commands")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = command_line._Command("job_commands", "job", "a job")
    monkeypatch.setitem(command_line._COMMANDS, "job", entry)

    def add(command: object) -> None:
        module.job = command  # type: ignore[attr-defined]

    return add


def raising(error: BaseException) -> Callable[[bool], None]:
    def job(as_json: bool = typer.Option(False, "--json")) -> None:
        raise error

    return job


@pytest.mark.parametrize("name", command_line._COMMANDS)
def test_each_command_that_help_lists_exists_and_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    assert f"precision-time {name}" in capsys.readouterr().out


def test_a_command_gets_its_arguments_and_ends_with_zero(
    register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(name: str, count: int = 1) -> None:
        print(name * count)

    register(job)
    assert run(["job", "ab", "--count", "2"]) == 0
    assert capsys.readouterr().out == "abab\n"


def test_a_group_of_commands_loads_under_its_name(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    group = typer.Typer()

    @group.command()
    def show() -> None:
        print("shown")

    @group.command()
    def hide() -> None:
        print("hidden")

    register(group)
    assert run(["job", "show"]) == 0
    assert capsys.readouterr().out == "shown\n"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (IntegrityError("the digest does not hold", got="aa", expected="bb", fix="fetch it again"), 4,
         "error E-DATA-CORRUPT: the digest does not hold; got: aa; expected: bb; fix: fetch it again\n"),
        (PartialError("3 of 9 cells failed"), 5, "error E-PARTIAL: 3 of 9 cells failed\n"),
        (RuntimeError("split\nline"), 1,
         "error E-INTERNAL: an unexpected error occurred; got: RuntimeError: split\\nline; "
         "fix: run it again with --debug\n"),
    ],
    ids=["integrity", "partial", "internal"],
)  # fmt: skip
def test_an_error_is_one_line_on_stderr_and_its_exit_code(
    error: Exception, code: int, text: str, register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register(raising(error))
    assert run(["job"]) == code
    assert capsys.readouterr() == ("", text)


def test_with_json_the_error_is_an_object_on_stderr(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register(raising(IntegrityError("the digest does not hold", got="aa", fix="fetch it again")))
    assert run(["job", "--json"]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert json.loads(err) == {
        "code": "E-DATA-CORRUPT", "what": "the digest does not hold", "got": "aa", "expected": None,
        "fix": "fetch it again",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "extra"), [("prefect", "campaign"), ("torch.nn", "campaign"), ("xgboost", "train"), ("s3fs", "s3")]
)
def test_a_missing_library_names_the_extra_that_brings_it(
    module: str, extra: str, register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register(raising(ModuleNotFoundError(f"No module named {module!r}", name=module)))
    assert run(["job"]) == 2
    assert f"pip install 'precision-time[{extra}]'" in capsys.readouterr().err


def test_a_missing_module_of_our_own_is_not_blamed_on_an_extra(
    register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register(raising(ModuleNotFoundError("No module named 'precision_time.x'", name="precision_time.x")))
    assert run(["job"]) == 1
    assert "pip install" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--debug", "job"], ["job", "--debug"]], ids=["before", "behind"])
def test_debug_shows_the_traceback_wherever_it_stands(
    arguments: list[str], register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register(raising(RuntimeError("inside")))
    assert run(arguments) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_interrupt_ends_with_130(register: Register) -> None:
    register(raising(KeyboardInterrupt()))
    assert run(["job"]) == 130
    assert run(["job", "--json"]) == 130


@pytest.mark.parametrize("extra", [[], ["--json"]], ids=["text", "json"])
def test_a_command_may_end_with_a_code_of_its_own(extra: list[str], register: Register) -> None:
    register(raising(typer.Exit(3)))
    assert run(["job", *extra]) == 3


@pytest.mark.parametrize("arguments", [["predcit"], ["job", "--no-such-option"]], ids=["command", "option"])
def test_a_usage_error_ends_with_two_and_says_so_on_stderr(
    arguments: list[str], register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    register(raising(RuntimeError("must not run")))
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert arguments[-1] in err
    assert run([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["code"] == "E-INPUT"


def test_a_misspelt_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["predcit", "--json"]) == 2
    assert "'predict'" in json.loads(capsys.readouterr().err)["what"]


def test_version_names_this_package_first_and_what_it_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    lines: list[Any] = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][0] == "precision-time"
    assert {"python", "numpy", "pyarrow"} <= {name for name, _ in lines}


def test_a_reader_that_goes_away_leaves_stderr_silent() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "precision_time", "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.wait(timeout=60)
