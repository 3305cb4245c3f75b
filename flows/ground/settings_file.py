"""Settings files in YAML, TOML or JSON: read as typed values, never as code, and checked with file and line."""

import datetime
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from precision_time.storage.errors import InputError, NotFoundError, StorageError, nearest

if TYPE_CHECKING:
    import yaml

__all__ = ["Document", "build_model", "parse_duration", "read_document"]

Location = tuple[str | int, ...]
ModelT = TypeVar("ModelT", bound=BaseModel)

MAX_BYTES = 1_000_000
MAX_DEPTH = 20
#: Counted after aliases are expanded: ten short lines of aliases can stand for billions of values.
MAX_VALUES = 100_000
MAX_ALIASES = 1_000

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][-+]?[0-9]{1,3})?")
#: What YAML 1.1 reads as a number to base 60: 12:30:00 becomes 45000.
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_CLOCK = re.compile(r"([0-9]{1,4}):([0-5][0-9]):([0-5][0-9](?:\.[0-9]+)?)")
_UNITS = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_EXPECTED = 'seconds, or text such as "90s", "2m", "1h30m" or "00:01:30"'


@dataclass(frozen=True, slots=True)
class Document:
    """A settings file as plain values; ``lines`` gives the line of each key where the format keeps it (YAML)."""

    name: str
    values: dict[str, Any]
    lines: Mapping[Location, int] = field(default_factory=dict)

    def place(self, location: Location) -> str:
        """``file`` or ``file line 7`` for messages: the line of the key, else of the key around it."""
        for length in range(len(location), 0, -1):
            if location[:length] in self.lines:
                return f"{self.name} line {self.lines[location[:length]]}"
        return self.name


def parse_duration(value: object) -> float:
    """Seconds of a number or of a text: ``90s``, ``2m``, ``1h30m``, ``500ms`` or ``HH:MM:SS``.

    Raises ``InputError`` for anything else, a bool, a negative number and a number that is not finite.
    """
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value) if abs(value) < 1e15 else math.nan
    elif isinstance(value, str):
        text = value.strip().casefold().replace(" ", "")
        parts = _UNITS.findall(text)
        if clock := _CLOCK.fullmatch(text):
            seconds = int(clock[1]) * 3600.0 + int(clock[2]) * 60.0 + float(clock[3])
        elif parts and "".join(number + unit for number, unit in parts) == text:
            if len({unit for _, unit in parts}) == len(parts):
                seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)
        elif len(text) < 20 and _DECIMAL.fullmatch(text):
            seconds = float(text)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise InputError("not a duration", got=_shown(value), expected=_DURATION_EXPECTED)
    return seconds


def read_document(path: str | Path) -> Document:
    """The file at ``path``, read by its suffix: ``.yaml`` or ``.yml``, ``.toml``, ``.json``.

    Words such as ``no`` and ``on`` stay text. Refused are duplicate keys, tags, a file over 1 MB, more than 20 levels,
    and an unquoted ``12:30:00``, which YAML reads as a number and TOML as a time of day. Raises ``InputError`` with
    the line, or ``NotFoundError``.
    """
    path = Path(path)
    parse = _PARSERS.get(path.suffix.casefold())
    if parse is None:
        raise InputError(
            f"{path} is not a settings file by its suffix", got=path.suffix or "none", expected=", ".join(_PARSERS)
        )
    text = _read_text(path)
    try:
        values, lines = parse(text, path.name)
    except RecursionError as error:
        raise _too_deep(path.name) from error
    if not isinstance(values, dict):
        raise InputError(
            f"{path.name} does not hold settings",
            got="an empty file" if values is None else type(values).__name__,
            expected="keys with values, such as 'name: first-light'",
        )
    _check_values(values, path.name)
    return Document(path.name, values, lines)


def build_model(model: type[ModelT], document: Document) -> ModelT:
    """The validated ``model``, or one ``InputError`` that lists every problem: place, key, got and expected.

    For an unknown key it names the nearest key.
    """
    try:
        return model.model_validate(document.values)
    except ValidationError as error:
        raise _explain(error, model, document) from error


def _read_text(path: Path) -> str:
    if not path.exists():
        raise NotFoundError("no such file", got=path, expected="a file in YAML, TOML or JSON")
    if not path.is_file():
        raise InputError("not a regular file", got=path, expected="a file in YAML, TOML or JSON")
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise StorageError(f"{path} cannot be read", got=error.strerror) from error
    if len(data) > MAX_BYTES:
        raise InputError(f"{path.name} is too large", expected=f"at most {MAX_BYTES:,} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path.name} is not text", got=f"byte {data[error.start]:#04x} at {error.start}", expected="UTF-8"
        ) from error


def _too_deep(name: str) -> InputError:
    return InputError(f"{name} is nested too deeply", expected=f"at most {MAX_DEPTH} levels")


def _check_values(values: object, name: str) -> None:
    """Refuse too many levels, and values that no setting takes: dates, times, infinities, huge integers."""
    pending: list[tuple[object, int, str]] = [(values, 1, "")]
    while pending:
        value, depth, key = pending.pop()
        if depth > MAX_DEPTH:
            raise _too_deep(name)
        if isinstance(value, dict):
            pending.extend((item, depth + 1, f"{key}.{k}" if key else str(k)) for k, item in value.items())
        elif isinstance(value, list):
            pending.extend((item, depth + 1, f"{key}[{i}]") for i, item in enumerate(value))
        elif isinstance(value, datetime.time):
            raise _unquoted_clock(f"{name}: {key}", value.isoformat())
        elif isinstance(value, datetime.date):
            raise InputError(f"{name}: {key} is a date", got=value.isoformat(), expected="a number or quoted text")
        elif isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{name}: {key} is not a finite number", got=value)
        elif isinstance(value, int) and abs(value) >= 10**18:
            raise InputError(f"{name}: {key} is too large a number", expected="less than 10^18")


def _unquoted_clock(what: str, text: str) -> InputError:
    hours, minutes, *_ = [*text.split(":"), "0"]
    written = f"{int(hours)}h{int(minutes)}m" if hours.isdigit() and minutes.isdigit() else "1h30m"
    return InputError(
        f"{what}: unquoted {text} is not read as a duration but as a number or a time of day",
        got=text,
        expected=_DURATION_EXPECTED,
        fix=f'write "{written}", or put it in quotes: "{text}"',
    )


def _parse_json(text: str, name: str) -> tuple[Any, dict[Location, int]]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise InputError(f"{name} gives a key twice", got=repr(key))
            values[key] = value
        return values

    def refuse_constant(constant: str) -> NoReturn:
        raise InputError(f"{name} holds a value that JSON does not have", got=constant, expected="a finite number")

    try:
        values = json.loads(text, object_pairs_hook=refuse_duplicates, parse_constant=refuse_constant)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"{name} line {error.lineno} is not JSON", got=error.msg) from error
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"{name} holds a number that cannot be used", got=str(error)) from error
    return values, {}


def _parse_toml(text: str, name: str) -> tuple[Any, dict[Location, int]]:
    try:
        return tomllib.loads(text), {}
    except ValueError as error:
        raise InputError(f"{name} is not TOML", got=str(error)) from error


def _parse_yaml(text: str, name: str) -> tuple[Any, dict[Location, int]]:
    import yaml

    try:
        _check_yaml_events(yaml.parse(text, Loader=yaml.SafeLoader), name)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name} line {mark.line + 1}" if mark else name
        raise InputError(f"{where} is not YAML", got=error.problem or error.context) from error
    except yaml.YAMLError as error:
        raise InputError(f"{name} is not YAML", got=str(error)) from error
    if root is None:
        return None, {}
    reader = _YamlReader(name)
    return reader.value(root, ()), reader.lines


def _check_yaml_events(events: Iterator["yaml.Event"], name: str) -> None:
    """Refuse too many levels or aliases, tags, and several documents before a tree is built from the flat events."""
    import yaml

    depth = aliases = documents = 0
    for event in events:
        line = event.start_mark.line + 1 if event.start_mark else 0
        documents += isinstance(event, yaml.DocumentStartEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        tag = getattr(event, "tag", None)
        if depth > MAX_DEPTH:
            raise _too_deep(name)
        if aliases > MAX_ALIASES or documents > 1:
            what = "too many aliases" if documents <= 1 else "more than one document"
            raise InputError(f"{name} line {line}: {what}", expected="one plain document")
        if tag is not None and tag != "!":
            raise InputError(f"{name} line {line}: a tag", got=tag, expected="plain values; settings hold no types")


class _YamlReader:
    """Turns composed YAML nodes into values by our own strict rules, and keeps the line of each key."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[Location, int] = {}
        self.count = 0

    def value(self, node: "yaml.Node", location: Location) -> Any:
        import yaml

        line = node.start_mark.line + 1
        self.lines.setdefault(location, line)
        self.count += 1
        if self.count > MAX_VALUES or len(location) > MAX_DEPTH:
            raise InputError(
                f"{self.name} is too large when its aliases are followed", expected=f"at most {MAX_VALUES:,} values"
            )
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*location, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            values: dict[str, Any] = {}
            for key_node, item in node.value:
                place = f"{self.name} line {key_node.start_mark.line + 1}"
                if not isinstance(key_node, yaml.ScalarNode):
                    raise InputError(f"{place}: a key that is not text")
                key = str(key_node.value)
                if key in values:
                    raise InputError(f"{place} gives a key twice", got=repr(key), fix="keep one of them")
                self.lines[(*location, key)] = key_node.start_mark.line + 1
                values[key] = self.value(item, (*location, key))
            return values
        quoted = isinstance(node, yaml.ScalarNode) and node.style is not None
        return self._scalar(str(node.value), quoted=quoted, line=line)

    def _scalar(self, text: str, *, quoted: bool, line: int) -> str | int | float | bool | None:
        if quoted:
            return text
        if text in ("", "~", "null", "Null", "NULL"):
            return None
        if text in ("true", "True", "TRUE", "false", "False", "FALSE"):
            return text.casefold() == "true"
        if _INTEGER.fullmatch(text):
            return int(text)
        if _SEXAGESIMAL.fullmatch(text):
            raise _unquoted_clock(f"{self.name} line {line}", text)
        # A plain 010 is decimal to a person and octal in YAML 1.1: it stays text, which the field's own check refuses.
        if _DECIMAL.fullmatch(text) and not text.lstrip("+-").isdigit():
            return float(text)
        return text


_PARSERS: dict[str, Callable[[str, str], tuple[Any, dict[Location, int]]]] = {
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".toml": _parse_toml,
    ".json": _parse_json,
}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _spelled(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _explain(error: ValidationError, model: type[BaseModel], document: Document) -> InputError:
    problems: list[tuple[str, str | None, str | None]] = []
    for entry in error.errors(include_url=False):
        location: Location = entry["loc"]
        place = f"{document.place(location)}: {_spelled(location)}" if location else document.name
        cause = entry.get("ctx", {}).get("error")
        if entry["type"] == "extra_forbidden":
            known = _known_keys(model, location[:-1])
            close = nearest(str(location[-1]), known, count=1)
            problems.append(
                (f"{place} is not a known key", None, f"one of its keys; the nearest is {', '.join(close)}")
            )
        elif entry["type"] == "missing":
            problems.append((f"{place} is missing", None, f"the key {_spelled(location)}"))
        elif isinstance(cause, InputError):
            problems.append((f"{place}: {cause.what}", cause.got, cause.expected))
        else:
            problems.append((f"{place} cannot be used", _shown(entry["input"]), _plain(entry["msg"])))
    if len(problems) == 1:
        what, got, expected = problems[0]
        return InputError(what, got=got, expected=expected)
    listed = []
    for number, (what, got, expected) in enumerate(problems, 1):
        details = [f"({number}) {what}", got and f"got {got}", expected and f"expected {expected}"]
        listed.append(", ".join(part for part in details if part))
    return InputError(f"{document.name} has {len(problems)} problems: {' '.join(listed)}")


def _plain(message: str) -> str:
    return message.removeprefix("Input should be ").removeprefix("Value error, ")


def _known_keys(model: type[BaseModel], location: Location) -> list[str]:
    """The keys of ``model``, or of the model nested at ``location``."""
    schema = model.model_json_schema()
    node: dict[str, Any] = schema
    for part in location:
        node = node["items"] if isinstance(part, int) else node["properties"][part]
        # A key that may be left out is a choice between its model and null.
        node = next((choice for choice in node.get("anyOf", ()) if "$ref" in choice), node)
        while "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    return list(node.get("properties", {}))
