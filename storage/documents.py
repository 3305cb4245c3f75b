"""JSON documents: equal values give equal bytes, and hostile or ambiguous documents are refused."""

import json
import math
import re
from typing import Any

from precision_time.storage.errors import InputError, IntegrityError

__all__ = ["MAX_JSON_BYTES", "dump_json", "parse_json"]

MAX_JSON_BYTES = 1_000_000
_MAX_DEPTH = 32
_MAX_INTEGER_DIGITS = 20

# An escaped character first, so that a quote inside a string does not end it.
_TOKEN = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


def dump_json(values: object) -> bytes:
    """``values`` as JSON in UTF-8 with sorted keys, so that equal values give equal bytes.

    Raises ``InputError`` for values that ``parse_json`` would refuse: NaN, infinities, deep or large documents.
    """
    try:
        text = json.dumps(values, sort_keys=True, indent=2, allow_nan=False, ensure_ascii=False)
        data = (text + "\n").encode()
        parse_json(data, name="the document")
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            "these values cannot be written as JSON", got=str(error), expected="plain finite JSON values"
        ) from error
    return data


def parse_json(data: bytes, *, name: str) -> Any:
    """The value of a JSON document called ``name``.

    Raises ``IntegrityError`` for anything but small UTF-8 JSON without duplicate keys, NaN, infinities (``1e400``
    too), integers of more than 20 digits, or more than 32 levels: the json module accepts these or crashes on them.
    """
    if len(data) > MAX_JSON_BYTES:
        raise _refused(name, f"{len(data)} bytes", f"at most {MAX_JSON_BYTES} bytes")
    try:
        text = data.decode("utf-8")
        depth = _depth(text)
        if depth > _MAX_DEPTH:
            raise _refused(name, f"{depth} nested levels", f"at most {_MAX_DEPTH}")
        return json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_short_integer,
        )
    except IntegrityError:
        raise
    except (ValueError, RecursionError) as error:
        raise _refused(name, str(error)[:200], "a JSON document in UTF-8") from error


def _refused(name: str, got: str, expected: str) -> IntegrityError:
    return IntegrityError(f"{name} is not a usable JSON document", got=got, expected=expected)


def _depth(text: str) -> int:
    """The deepest nesting, by one linear pass, before the recursive parser reads the text."""
    depth = deepest = 0
    inside_string = False
    for token in _TOKEN.findall(text):
        if token == '"':
            inside_string = not inside_string
        elif inside_string:
            continue
        elif token in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif token in ("]", "}"):
            depth -= 1
    return deepest


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        repeated = sorted({key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1})
        raise ValueError(f"duplicate key {repeated[0]!r}")
    return values


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _short_integer(text: str) -> int:
    if len(text.lstrip("-")) > _MAX_INTEGER_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)
