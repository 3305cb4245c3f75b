"""Errors say what, got, expected and fix, in one safe line."""

import pytest

from precision_time.storage import errors
from precision_time.storage.errors import PrecisionTimeError, StorageFullError, UnknownNameError, nearest

KINDS = [getattr(errors, name) for name in errors.__all__ if name not in ("nearest", "printable")]


def test_a_message_has_its_four_parts_in_order() -> None:
    error = StorageFullError("no room", got="3 bytes", expected="9 bytes", fix="free some")
    assert str(error) == "no room; got: 3 bytes; expected: 9 bytes; fix: free some"
    assert error.to_dict() == {
        "code": "E-STORE-FULL",
        "what": "no room",
        "got": "3 bytes",
        "expected": "9 bytes",
        "fix": "free some",
    }


def test_parts_that_are_unknown_are_left_out() -> None:
    assert str(PrecisionTimeError("only this")) == "only this"
    assert str(PrecisionTimeError("zero", got=0)) == "zero; got: 0"


def test_a_message_is_one_line_without_escape_codes() -> None:
    text = str(PrecisionTimeError("bad name", got="a\nb\x1b[31m\u202ec"))
    assert text.isprintable()
    assert "a\\nb\\x1b[31m\\u202ec" in text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_has_a_code_and_is_also_a_built_in_class(kind: type[PrecisionTimeError]) -> None:
    assert kind.code.startswith("E-")
    assert kind.exit_code in range(1, 7)
    bases = {base for base in kind.__mro__ if base.__module__ == "builtins"}
    assert kind is PrecisionTimeError or bases - {Exception, BaseException, object}


@pytest.mark.parametrize(
    ("kind", "built_in", "exit_code"),
    [
        (errors.InputError, ValueError, 2),
        (errors.UnknownNameError, LookupError, 2),
        (errors.NotFoundError, FileNotFoundError, 2),
        (errors.StorageReadOnlyError, PermissionError, 2),
        (errors.VersionExistsError, FileExistsError, 2),
        (errors.GoalNotMetError, RuntimeError, 3),
        (errors.IntegrityError, ValueError, 4),
        (errors.PartialError, RuntimeError, 5),
        (errors.OutOfDomainError, ValueError, 6),
    ],
)
def test_exit_codes_and_built_in_classes(kind: type[PrecisionTimeError], built_in: type, exit_code: int) -> None:
    assert issubclass(kind, built_in)
    assert kind.exit_code == exit_code


def test_an_unknown_name_offers_the_nearest_three() -> None:
    error = UnknownNameError("GPU", "a10O", ["A100", "A10", "L40S", "H100", "B200"])
    assert len(error.nearest) == 3
    assert set(error.nearest[:2]) == {"A10", "A100"}
    assert "'a10O'" in str(error)
    assert "A100" in str(error)


def test_nearest_ignores_case_and_copes_with_few_names() -> None:
    assert nearest("RESNET50", ["resnet50", "bert"])[0] == "resnet50"
    assert nearest("x", []) == []
