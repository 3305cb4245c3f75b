"""The version of this package, and which file a user's model comes from, without importing it."""

import hashlib
import importlib
import importlib.metadata
import sys

import pytest

from precision_time.tasks.ranks.code_versions import digest_code, find_tool_version


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a module and a package that must not be imported."""
    monkeypatch.chdir(tmp_path)
    for name in ("plain_net.py", "nets_package/__init__.py", "nets_package/inner.py", "loose_nets/inner.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"raise RuntimeError({name!r})\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("model", "file"),
    [
        ("plain_net:make", "plain_net.py"),
        ("nets_package:make", "nets_package/__init__.py"),
        ("nets_package.inner:make", "nets_package/inner.py"),
        ("loose_nets.inner:make", "loose_nets/inner.py"),
    ],
)
def test_the_digest_is_of_the_file_and_nothing_is_imported(folder, model, file):
    loaded = set(sys.modules)
    assert digest_code(model) == sha256(folder / file)
    assert set(sys.modules) == loaded
    (folder / file).write_text("x = 1\n", encoding="utf-8")
    assert digest_code(model) == sha256(folder / file)


@pytest.mark.parametrize(
    "model", ["mlp", "no_such_module:make", "plain_net.inner:make", "loose_nets:make", "sys:exit", ":"]
)
def test_what_has_no_file_has_no_digest(folder, model):
    assert digest_code(model) is None


def test_the_version_is_that_of_the_installed_package_and_unknown_without_one(monkeypatch):
    assert find_tool_version() == importlib.metadata.version("precision-time")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert find_tool_version() is None


def test_an_installed_module_is_found_as_it_is_imported(folder):
    module = importlib.import_module("precision_time.tasks.ranks.job")
    with open(module.__file__, "rb") as file:
        assert digest_code("precision_time.tasks.ranks.job:RankJob") == hashlib.sha256(file.read()).hexdigest()
