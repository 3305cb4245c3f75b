"""The code behind a row: the version of this package, and the digest of a user's model, found without importing it."""

import hashlib
import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

__all__ = ["digest_code", "find_tool_version"]


def find_tool_version() -> str | None:
    """The version of this package; None where it runs from source without being installed."""
    try:
        return importlib.metadata.version("precision-time")
    except importlib.metadata.PackageNotFoundError:
        return None


def digest_code(model: str) -> str | None:
    """SHA-256 of the file that ``module`` of ``module:factory`` names, ``__init__.py`` for a package.

    The module is searched for as by ``import_factory``, the current folder first. Modules that it imports do not count.
    None for a named model, and where there is no such file or it cannot be read.
    """
    module, colon, _ = model.partition(":")
    if not colon:
        return None
    path: Sequence[str] | None = ["", *sys.path]
    spec: ModuleSpec | None = None
    names = module.split(".")
    for depth in range(1, len(names) + 1):
        if path is None:
            return None
        spec = _find_spec(".".join(names[:depth]), path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    try:
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    except OSError:
        return None


def _find_spec(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Like ``importlib.util.find_spec``, but without importing the packages above the module."""
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except (ImportError, AttributeError, ValueError):
            continue
        if spec is not None:
            return spec
    return None
