"""JSON is read so that nothing ambiguous, endless or hostile becomes a value."""

import math

import pytest

from precision_time.storage.documents import MAX_JSON_BYTES, dump_json, parse_json
from precision_time.storage.errors import InputError, IntegrityError


def test_values_are_read_back_and_equal_values_give_equal_bytes() -> None:
    values = {"b": [1, 2.5, None, True], "a": {"x": 'é\n"[{'}, "big": 2**63}
    assert parse_json(dump_json(values), name="x") == values
    assert dump_json({"a": 1, "b": 2}) == dump_json({"b": 2, "a": 1})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"{",
        b'{"a": 1}}',
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b'{"a": "\xff"}',
        b"[" * 200_000,
        b"[" * 200_000 + b"]" * 200_000,
        b'{"a":' * 3_000 + b"1" + b"}" * 3_000,
        b"[" * 33 + b"]" * 33,
        b'{"a": NaN}',
        b"[Infinity]",
        b"[-Infinity]",
        b"[1e400]",
        b"[-1e400]",
        b"[" + b"9" * 5_000 + b"]",
        b"[" + b"9" * 21 + b"]",
        b'{"a": 1, "a": 2}',
        b'{"x": {"a": 1, "a": 1}}',
        b'{"a": 1} {"b": 2}',
        b"\x80\x04K\x01.",
        b'["' + b'\\"' * 200_000,
        b"0" * (MAX_JSON_BYTES + 1),
    ],
    ids=lambda data: repr(data[:20]) + str(len(data)),
)
def test_a_bad_document_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="the-file"):
        parse_json(data, name="the-file")


def test_brackets_inside_strings_do_not_nest() -> None:
    assert parse_json(b'["' + b"[{" * 100 + b'\\"]"]', name="x")


@pytest.mark.parametrize(
    "values", [math.nan, [math.inf], {"a": object()}, {1: 0, "1": 0}, 10**30, "x" * (MAX_JSON_BYTES + 1), "\ud800"]
)
def test_values_that_could_not_be_read_back_are_not_written(values: object) -> None:
    with pytest.raises(InputError):
        dump_json(values)


def test_a_circular_or_deep_value_is_refused() -> None:
    circular: list[object] = []
    circular.append(circular)
    deep: object = 0
    for _ in range(50):
        deep = [deep]
    for values in (circular, deep):
        with pytest.raises(InputError):
            dump_json(values)
