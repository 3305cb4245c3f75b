"""The content of a module as text to hash: structure, settings and code; read without importing torch."""

import enum
import functools
import hashlib
import itertools
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

__all__ = ["describe_module", "describe_value"]

#: Limits on reading containers; longer or deeper ones are described by type and length alone.
_MOST_ITEMS = 1000
_DEEPEST = 6
_MOST_VALUES = 100_000
_MOST_FILES = 500
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
#: Attributes of ``torch.nn.Module`` that are read by its own methods, or do not matter to a walk.
_BOOKKEEPING = frozenset({"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})


def _name(kind: Any) -> str:
    return f"{getattr(kind, '__module__', '?')}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, type)


def _describe_tensor(tensor: Any) -> str:
    trained = getattr(tensor, "requires_grad", False)
    return f"tensor {tuple(tensor.shape)} {tensor.dtype} {getattr(tensor, 'device', '')} {trained}"


class _Reader:
    """Turns values into text; an object met again, in a circle too, gets the text of the first time."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.values_left = _MOST_VALUES

    def read(self, value: Any, *, depth: int = 0) -> str:
        self.values_left -= 1
        if value is None or isinstance(value, bool | int | float | complex | enum.Enum):
            return repr(value)
        if isinstance(value, str | bytes):
            text = repr(value)
            return text if len(text) <= _MOST_ITEMS else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        if _is_tensor(value):
            return _describe_tensor(value)
        if isinstance(value, type):
            return _name(value)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if hasattr(value, "named_parameters"):
            return f"module {_name(type(value))}"
        if depth >= _DEEPEST or self.values_left < 0:
            return f"{_name(type(value))} {len(value) if isinstance(value, Sized) else ''} below"
        if isinstance(value, Mapping):
            items = [(str(key), self.read(item, depth=depth + 1)) for key, item in _first(value.items())]
            return f"{_name(type(value))} {len(value)} {items}"
        if isinstance(value, list | tuple | set | frozenset):
            parts = [self.read(item, depth=depth + 1) for item in _first(value)]
            if isinstance(value, set | frozenset):
                parts.sort()
            return f"{_name(type(value))} {len(value)} {parts}"
        if isinstance(value, functools.partial):
            inner = (value.func, value.args, value.keywords)
            return f"partial {self.read(inner, depth=depth + 1)}"
        if isinstance(value, types.FunctionType | types.MethodType):
            return self._read_function(value, depth=depth)
        return self._read_object(value, depth=depth)

    def _read_function(self, function: Any, *, depth: int) -> str:
        function = getattr(function, "__func__", function)
        if not hasattr(function, "__code__"):
            return _name(function)
        defaults = self.read((function.__defaults__, function.__kwdefaults__), depth=depth + 1)
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.read(cell.cell_contents, depth=depth + 1))
            except ValueError:  # not filled yet
                cells.append("empty")
        code = f"{_hash_code(function.__code__)} {defaults} {cells} {_hash_sources(function.__module__)}"
        return f"{_name(function)} {code}"

    def _read_object(self, value: Any, *, depth: int) -> str:
        if id(value) in self.texts:
            return self.texts[id(value)]
        self.texts[id(value)] = _name(type(value))
        attributes = getattr(value, "__dict__", None)
        if attributes:
            text = f"{_name(type(value))} {self.read(attributes, depth=depth + 1)}"
        else:
            text = f"{_name(type(value))} {_ADDRESS.sub('', repr(value))[:_MOST_ITEMS]}"
        self.texts[id(value)] = text
        return text


def _first(values: Iterable[Any]) -> list[Any]:
    return list(itertools.islice(values, _MOST_ITEMS))


def describe_value(value: Any) -> str:
    """``value`` as text, the same for equal values: numbers and text as they are, tensors by shape and format,
    functions by their code and the files it uses, other objects by class and attributes.
    """
    return _Reader().read(value)


def _hash_code(code: types.CodeType) -> str:
    digest = hashlib.sha256(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            digest.update(_hash_code(constant).encode())
        else:
            text = sorted(map(repr, constant)) if isinstance(constant, frozenset) else repr(constant)
            digest.update(repr(text).encode())
    return digest.hexdigest()


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(str(Path(paths[name]).resolve()) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def _source_file(name: str) -> Path | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).resolve() if file and Path(file).is_file() else None


@functools.lru_cache(maxsize=4096)
def _hash_file(path: Path, modified_ns: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hash_sources(name: str | None) -> str:
    """Hash of the file of module ``name`` and of the user's files that it imports from.

    A class may call functions of its own file and of others. The files that installed packages import from are left
    out.
    """
    digest, waiting, visited = hashlib.sha256(), [name or ""], set[str]()
    while waiting and len(visited) < _MOST_FILES:
        current = waiting.pop()
        if current in visited or current.partition(".")[0] in ("torch", "builtins"):
            continue
        visited.add(current)
        file = _source_file(current)
        if file is None:
            continue
        status = file.stat()
        digest.update(f"{current} {_hash_file(file, status.st_mtime_ns, status.st_size)}".encode())
        if str(file).startswith(_installed_folders()):
            continue
        used = {
            value.__name__ if isinstance(value, types.ModuleType) else str(getattr(value, "__module__", "") or "")
            for value in list(vars(sys.modules[current]).values())
        }
        waiting += sorted(used - visited, reverse=True)
    return digest.hexdigest()


def _describe_class(kind: type) -> Iterator[str]:
    """The code of a class and of its bases, torch's own left out."""
    for base in kind.__mro__:
        if base is object or base.__module__.partition(".")[0] == "torch":
            continue
        yield f"class {_name(base)} {_hash_sources(base.__module__)}"
        for name, value in sorted(vars(base).items()):
            inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
            if hasattr(inner, "__code__"):
                yield f"{name} {_hash_code(inner.__code__)}"
            elif not name.startswith("__"):
                yield f"{name} {_Reader().read(value, depth=_DEEPEST - 1)}"


def describe_module(module: Any) -> Iterator[str]:
    """A ``torch.nn.Module`` as text: class, settings and code of every submodule; shape, format and ``requires_grad``
    of every parameter; and which of them are the same object.

    Values of parameters and buffers are left out: they do not change the counts of a walk.
    """
    owners, reader = dict[int, str](), _Reader()
    classes: set[type] = set()
    for path, part in module.named_modules():
        yield f"{path} {_name(type(part))}"
        if type(part) not in classes:
            classes.add(type(part))
            yield from _describe_class(type(part))
        try:
            yield str(part.extra_repr())
        except Exception as error:  # the user's own code may raise anything; a walk may never call it
            yield f"extra_repr {type(error).__name__}"
        for name, child in part._modules.items():
            yield f"{name} is {'nothing' if child is None else owners.setdefault(id(child), f'{path}.{name}')}"
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(part, kind).items():
                if tensor is None:
                    yield f"{kind} {name} None"
                else:
                    owner = owners.setdefault(id(tensor), f"{path}.{name}")
                    yield f"{kind} {name} {_describe_tensor(tensor)} of {owner}"
        for name, value in vars(part).items():
            if name not in _BOOKKEEPING:
                # the keys of hooks count all hooks of the process
                yield f"{name} {reader.read(list(value.values()) if name.endswith('_hooks') else value)}"
