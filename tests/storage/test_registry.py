"""The registry: a version is whole and unchanged or it does not exist, and no name leads out of the registry."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from precision_time.storage.errors import (
    IntegrityError,
    NotFoundError,
    PrecisionTimeError,
    StorageFullError,
    VersionExistsError,
)
from precision_time.storage.filesystem import open_store
from precision_time.storage.local import LocalStore
from precision_time.storage.manifests import ArtifactFile, ArtifactManifest
from precision_time.storage.registry import Registry
from precision_time.storage.store import Store

Publish = Callable[..., ArtifactManifest]

FILES = {"trees.npz": b"trees", "compute.ubj": b"model"}


@pytest.fixture
def registry(store_url: str) -> Registry:
    return Registry(store_url)


@pytest.fixture
def store(registry: Registry) -> Store:
    return open_store(registry.url)


@pytest.fixture
def local(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry")


# --- publishing and loading, over every kind of store


def test_a_published_artifact_is_loaded(registry: Registry, store: Store, publish: Publish) -> None:
    published = publish(registry)
    manifest, files = registry.load("demo")
    assert manifest == published
    assert files == FILES
    assert manifest.artifact_id == "demo@1"
    assert registry.verify("demo@1") == registry.manifest("demo@champion") == published
    assert store.list_files() == [
        "demo/1/compute.ubj",
        "demo/1/manifest.json",
        "demo/1/trees.npz",
        "demo/aliases/champion.json",
    ]


def test_versions_increase_and_the_alias_follows(registry: Registry, publish: Publish) -> None:
    assert [publish(registry).version for _ in range(3)] == [1, 2, 3]
    publish(registry, "other", alias=None)
    assert registry.names() == ["demo", "other"]
    assert registry.versions("demo") == [1, 2, 3]
    assert registry.aliases("demo") == {"champion": 3}
    assert registry.aliases("other") == {}
    assert registry.resolve("demo") == ("demo", 3)
    assert registry.resolve("demo@2") == ("demo", 2)


def test_an_explicit_version_is_taken_once(registry: Registry, publish: Publish) -> None:
    publish(registry, version=7)
    with pytest.raises(VersionExistsError, match="demo@7"):
        publish(registry, version=7, files={"x": b"other"})
    assert registry.load("demo@7")[1] == FILES
    assert publish(registry).version == 8


def test_automatic_versions_of_eight_publishers_are_distinct_and_whole(registry: Registry, publish: Publish) -> None:
    barrier = threading.Barrier(8)

    def run(number: int) -> int:
        barrier.wait()
        return publish(registry, files={"number": str(number).encode()}).version

    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(run, range(8)))
    assert sorted(versions) == list(range(1, 9))
    for number, version in enumerate(versions):
        assert registry.load(f"demo@{version}")[1] == {"number": str(number).encode()}
    assert registry.aliases("demo")["champion"] in versions


def test_of_eight_publishers_of_one_version_exactly_one_wins(registry: Registry, publish: Publish) -> None:
    barrier = threading.Barrier(8)

    def run(number: int) -> bool:
        barrier.wait()
        try:
            publish(registry, files={"number": str(number).encode()}, version=5)
        except VersionExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(run, range(8)))
    assert won.count(True) == 1
    assert registry.load("demo@5")[1] == {"number": str(won.index(True)).encode()}


def test_an_alias_moves_and_rolls_back_step_by_step(registry: Registry, store: Store, publish: Publish) -> None:
    for _ in range(3):
        publish(registry)
    registry.set_alias("demo", "stable", 1)
    assert registry.aliases("demo") == {"champion": 3, "stable": 1}
    assert json.loads(store.read_bytes("demo/aliases/champion.json")) == {"version": 3, "history": [1, 2]}
    assert registry.roll_back("demo") == 2
    assert registry.resolve("demo") == ("demo", 2)
    assert registry.roll_back("demo") == 1
    with pytest.raises(NotFoundError, match="no earlier version"):
        registry.roll_back("demo")
    assert registry.aliases("demo") == {"champion": 1, "stable": 1}
    registry.set_alias("demo", "champion", 3)
    registry.set_alias("demo", "champion", 3)
    assert registry.roll_back("demo") == 1


def test_a_missing_artifact_is_named_with_those_that_exist(registry: Registry, publish: Publish) -> None:
    with pytest.raises(NotFoundError, match="demo@champion"):
        registry.load("demo")
    publish(registry)
    for reference, expected in (
        ("demo@2", "version 1"),
        ("demo@best", "champion"),
        ("dmeo", "demo"),
        ("demo2@1", "demo"),
    ):
        with pytest.raises(NotFoundError, match=expected):
            registry.load(reference)
    with pytest.raises(NotFoundError):
        registry.set_alias("demo", "champion", 2)
    with pytest.raises(NotFoundError):
        registry.roll_back("demo", "stable")
    assert registry.aliases("demo") == {"champion": 1}
    assert registry.versions("nothing") == []


# --- damage


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda store: store.write_bytes("demo/2/trees.npz", b"treez"), "demo/2/trees.npz is changed"),
        (lambda store: store.write_bytes("demo/2/trees.npz", b"tree"), "demo/2/trees.npz is changed"),
        (lambda store: store.write_bytes("demo/2/trees.npz", b"trees and more"), "demo/2/trees.npz is changed"),
        (lambda store: store.write_bytes("demo/2/trees.npz", b""), "demo/2/trees.npz is changed"),
        (lambda store: store.remove("demo/2/trees.npz"), "demo/2/trees.npz is missing"),
        (lambda store: store.write_bytes("demo/2/extra", b"x"), "demo/2/extra is not in the manifest"),
        (lambda store: store.write_bytes("demo/2/deep/extra", b"x"), "demo/2/deep/extra is not in the manifest"),
        (
            lambda store: store.move("demo/2/trees.npz", "demo/2/renamed.npz"),
            "demo/2/renamed.npz is not in the manifest",
        ),
    ],
)
def test_any_change_of_the_files_is_found_and_named(
    registry: Registry, store: Store, damage: Callable[[Store], None], named: str, publish: Publish
) -> None:
    publish(registry)
    publish(registry)
    damage(store)
    for check in (registry.load, registry.verify):
        with pytest.raises(IntegrityError, match=named) as caught:
            check("demo@2")
        assert caught.value.exit_code == 4
    assert registry.load("demo@1")[1] == FILES


def test_files_swapped_between_each_other_or_between_versions_are_found(local: Registry, publish: Publish) -> None:
    publish(local, files={"a": b"1111", "b": b"2222"})
    publish(local, files={"a": b"3333", "b": b"4444"})
    store = open_store(local.url)
    first, second = store.read_bytes("demo/1/a"), store.read_bytes("demo/1/b")
    store.write_bytes("demo/1/a", second)
    store.write_bytes("demo/1/b", first)
    with pytest.raises(IntegrityError, match=r"demo/1/a is changed; demo/1/b is changed"):
        local.verify("demo@1")
    store.write_bytes("demo/2/a", first)
    with pytest.raises(IntegrityError, match="demo/2/a is changed"):
        local.load("demo@2")
    store.write_bytes("demo/1/manifest.json", store.read_bytes("demo/2/manifest.json"))
    with pytest.raises(IntegrityError, match="belongs to another artifact"):
        local.load("demo@1")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"3",
        b"{}",
        b'{"version": "1", "history": []}',
        b'{"version": 0, "history": []}',
        b'{"version": 1}',
        b'{"version": 1, "history": ["../x"]}',
        b'{"version": 1, "version": 1, "history": []}',
        b"[" * 100_000,
    ],
)
def test_a_broken_alias_is_refused(local: Registry, content: bytes, publish: Publish) -> None:
    publish(local)
    (Path(local.url) / "demo/aliases/champion.json").write_bytes(content)
    for act in (local.load, local.aliases, local.roll_back):
        with pytest.raises(IntegrityError, match=r"demo/aliases/champion\.json"):
            act("demo")
    assert local.load("demo@1")[1] == FILES


def test_a_link_inside_an_artifact_is_never_followed_out(local: Registry, tmp_path: Path, publish: Publish) -> None:
    publish(local)
    canary = tmp_path / "canary"
    canary.write_bytes(b"trees")
    file = Path(local.url) / "demo/1/trees.npz"
    file.unlink()
    file.symlink_to(canary)
    with pytest.raises(IntegrityError, match=r"demo/1/trees\.npz is changed: a link leads out"):
        local.load("demo@1")


def test_a_fifo_in_place_of_a_file_is_refused_without_waiting(local: Registry, publish: Publish) -> None:
    publish(local)
    file = Path(local.url) / "demo/1/trees.npz"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(IntegrityError, match=r"trees\.npz"):
        local.load("demo@1")


def test_a_huge_file_is_refused_without_reading_it(local: Registry, publish: Publish) -> None:
    publish(local)
    with open(Path(local.url) / "demo/1/trees.npz", "r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(IntegrityError, match=r"trees\.npz is changed: this file is too large"):
        local.load("demo@1")


def test_folders_that_are_no_artifacts_are_not_listed(local: Registry, publish: Publish) -> None:
    publish(local)
    store = open_store(local.url)
    for path in (
        "Demo/1/manifest.json",
        "demo/x/manifest.json",
        "demo/01/manifest.json",
        "demo/2/other.json",
        "demo/3/deep/manifest.json",
        "manifest.json",
        "demo/aliases/BAD.json",
        "demo/aliases/x.txt",
    ):
        store.write_bytes(path, b"{}")
    assert local.names() == ["demo"]
    assert local.versions("demo") == [1]
    assert local.aliases("demo") == {"champion": 1}


# --- failures and crashes


def test_an_error_while_describing_leaves_nothing(local: Registry) -> None:
    def fail(version: int, files: tuple[ArtifactFile, ...]) -> ArtifactManifest:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        local.publish("demo", FILES, describe=fail)
    assert [path for path in Path(local.url).rglob("*") if path.is_file()] == []


def test_a_full_disk_leaves_no_version(local: Registry, monkeypatch: pytest.MonkeyPatch, publish: Publish) -> None:
    publish(local)
    real = LocalStore.create_bytes

    def fill(self: LocalStore, path: str, data: bytes) -> None:
        if path.endswith("trees.npz"):
            raise StorageFullError("no room")
        real(self, path, data)

    monkeypatch.setattr(LocalStore, "create_bytes", fill)
    with pytest.raises(StorageFullError):
        publish(local)
    monkeypatch.undo()
    assert local.versions("demo") == [1]
    assert local.resolve("demo") == ("demo", 1)
    assert sorted(os.listdir(Path(local.url) / "demo" / "2")) == []
    assert publish(local).version == 2


class Killed(BaseException):
    """The process ends here, and nothing more reaches the store."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", range(5), ids=["claim", "file 1", "file 2", "manifest", "alias"])
def test_a_crash_at_any_step_leaves_a_version_valid_or_absent(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, step: int, after: bool, publish: Publish
) -> None:
    publish(registry)
    kind = type(open_store(registry.url))
    reals = {name: getattr(kind, name) for name in ("create_bytes", "write_bytes", "remove")}
    calls: list[str] = []

    def dying(name: str) -> Callable[..., None]:
        def call(self: Store, path: str, *data: bytes) -> None:
            if len(calls) > step:
                raise Killed
            calls.append(path)
            if len(calls) > step and not after:
                raise Killed
            reals[name](self, path, *data)
            if len(calls) > step:
                raise Killed

        return call

    for name in reals:
        monkeypatch.setattr(kind, name, dying(name))
    with pytest.raises(Killed):
        publish(registry, files={"a": b"1", "b": b"2"})
    monkeypatch.undo()
    is_visible = step > 3 or (step == 3 and after)
    assert registry.versions("demo") == ([1, 2] if is_visible else [1])
    if is_visible:
        assert registry.load("demo@2")[1] == {"a": b"1", "b": b"2"}
    assert registry.resolve("demo") == ("demo", 2 if step == 4 and after else 1)
    registry.verify("demo")
    later = publish(registry, files={"c": b"3"})
    assert later.version >= 2
    assert registry.load("demo")[1] == {"c": b"3"}
    for version in registry.versions("demo"):
        registry.verify(f"demo@{version}")


def test_a_publisher_killed_anywhere_leaves_versions_valid_or_absent(
    local: Registry, publish: Publish, tmp_path: Path
) -> None:
    """SIGKILL in a child before one system call after another."""
    code = (
        "import itertools, os, sys\n"
        "from precision_time.storage.registry import Registry\n"
        "from precision_time.storage.manifests import ArtifactManifest\n"
        "def describe(version, files):\n"
        "    return ArtifactManifest.model_validate_json(sys.argv[2]).model_copy(\n"
        "        update={'version': version, 'files': files})\n"
        "def run(deadline):\n"
        "    calls = itertools.count()\n"
        "    def counted(call):\n"
        "        def go(*args, **kwargs):\n"
        "            if next(calls) == deadline: os.kill(os.getpid(), 9)\n"
        "            return call(*args, **kwargs)\n"
        "        return go\n"
        "    for name in ('open', 'fsync', 'link', 'unlink', 'replace', 'mkdir'):\n"
        "        setattr(os, name, counted(getattr(os, name)))\n"
        "    Registry(sys.argv[1]).publish('demo', {'x': b'1', 'y': b'2'}, describe=describe)\n"
        "for deadline in range(0, 60):\n"
        "    if os.fork() == 0: run(deadline); os._exit(0)\n"
        "    os.wait()\n"
        "    registry = Registry(sys.argv[1])\n"
        "    for version in registry.versions('demo'): registry.verify(f'demo@{version}')\n"
        "    if registry.versions('demo') and registry.aliases('demo'): registry.verify('demo')\n"
    )
    manifest = publish(Registry(tmp_path / "other")).model_dump_json()
    subprocess.run([sys.executable, "-c", code, local.url, manifest], check=True, timeout=120)
    assert len(local.versions("demo")) > 10
    newest = publish(local).version
    assert local.resolve("demo") == ("demo", newest)
    assert local.load("demo")[1] == FILES


def test_an_unfinished_claim_is_skipped(registry: Registry, store: Store, publish: Publish) -> None:
    publish(registry)
    store.create_bytes("demo/2/.claim", b"someone")
    store.create_bytes("demo/2/trees.npz", b"half")
    assert registry.versions("demo") == [1]
    with pytest.raises(NotFoundError):
        registry.load("demo@2")
    with pytest.raises(VersionExistsError, match="left unfinished"):
        publish(registry, version=2)
    assert publish(registry).version == 3


def test_every_error_of_the_registry_is_ours(local: Registry) -> None:
    for reference in ("demo", "demo@1", "../x", "demo@x"):
        with pytest.raises(PrecisionTimeError):
            local.load(reference)


# --- which registry


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path: Path, publish) -> None:
    registry = Registry(tmp_path)
    publish(registry)
    path = next(tmp_path.rglob("manifest.json"))
    data, sound = path.read_bytes(), registry.manifest("demo@1")
    for position in range(0, 8 * len(data), 37):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        path.write_bytes(flipped)
        try:
            read = registry.manifest("demo@1")
        except IntegrityError:
            continue
        assert read == sound  # white space became other white space
