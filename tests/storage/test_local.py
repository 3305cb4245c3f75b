"""A local folder: a full or read-only disk, a kill at any point, links and pipes never harm stored files."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from precision_time.storage.errors import (
    IntegrityError,
    NotFoundError,
    StorageError,
    StorageFullError,
    StorageReadOnlyError,
    VersionExistsError,
)
from precision_time.storage.filesystem import open_store
from precision_time.storage.local import LocalStore
from precision_time.storage.store import Store


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def failing(number: int) -> object:
    """An ``os.open`` that fails with ``number`` whenever it would create a file."""
    real = os.open

    def fail(path: str, flags: int, *args: object, **kwargs: object) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), path)
        return real(path, flags, *args, **kwargs)  # type: ignore[arg-type]

    return fail


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_leaves_no_file_and_keeps_the_earlier_one(
    local: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    local.write_bytes("a/x", b"earlier")

    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFullError) as caught:
        local.write_bytes("a/x", b"later")
    assert caught.value.exit_code == 2
    with pytest.raises(StorageFullError):
        local.create_bytes("a/y", b"later")
    with pytest.raises(StorageFullError):
        local.check_writable()
    monkeypatch.undo()
    assert local.read_bytes("a/x") == b"earlier"
    assert files_of(tmp_path) == ["store/a/x"]


def test_a_real_file_size_limit_is_reported_as_full(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from precision_time.storage.filesystem import open_store; "
        "from precision_time.storage.errors import StorageFullError; store = open_store(sys.argv[1]); "
        "store.write_bytes('x', b'earlier'); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "for act in (lambda: store.write_bytes('x', bytes(5000)), lambda: store.create_bytes('y', bytes(5000)), "
        "store.check_writable):\n"
        "    try: act()\n"
        "    except StorageFullError as error: print(error.code)\n"
    )
    root = tmp_path / "store"
    shown = subprocess.run(
        [sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True, timeout=60
    )
    assert shown.stdout.split() == ["E-STORE-FULL"] * 3
    assert files_of(root) == ["x"]
    assert (root / "x").read_bytes() == b"earlier"


def test_too_little_free_space_is_refused_before_work(local: Store) -> None:
    with pytest.raises(StorageFullError, match="bytes free"):
        local.check_writable(required_bytes=1 << 60)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_read_only_folder_is_one_clear_error(
    local: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    local.write_bytes("x", b"earlier")
    monkeypatch.setattr(os, "open", failing(number))
    for act in (
        lambda: local.write_bytes("x", b"later"),
        lambda: local.create_bytes("y", b"later"),
        local.check_writable,
    ):
        with pytest.raises(StorageReadOnlyError, match="permissions"):
            act()
    assert local.read_bytes("x") == b"earlier"
    assert files_of(tmp_path) == ["store/x"]


def test_a_place_below_a_plain_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    store = open_store(tmp_path / "file" / "store")
    with pytest.raises(StorageReadOnlyError):
        store.check_writable()
    with pytest.raises(NotFoundError):
        store.read_bytes("x")
    assert store.list_files() == []


def test_without_hard_links_creation_is_still_exclusive(
    local: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    local.create_bytes("x", b"first")
    with pytest.raises(VersionExistsError):
        local.create_bytes("x", b"second")
    local.write_bytes("y", b"1")
    with pytest.raises(VersionExistsError):
        local.move("y", "x")
    local.move("y", "z")
    assert local.read_bytes("x") == b"first"
    assert local.read_bytes("z") == b"1"
    assert files_of(tmp_path) == ["store/x", "store/z"]


def test_a_killed_writer_leaves_only_complete_files(tmp_path: Path) -> None:
    """SIGKILL at 50 points spread over the system calls of a write: visible files are always whole."""
    code = (
        "import os, sys, itertools; from precision_time.storage.filesystem import open_store\n"
        "store = open_store(sys.argv[1]); calls = itertools.count(); deadline = int(sys.argv[2])\n"
        "def counted(call):\n"
        "    def run(*args, **kwargs):\n"
        "        if next(calls) == deadline: os.kill(os.getpid(), 9)\n"
        "        return call(*args, **kwargs)\n"
        "    return run\n"
        "for name in ('open', 'fsync', 'link', 'replace', 'unlink', 'close', 'mkdir'):\n"
        "    setattr(os, name, counted(getattr(os, name)))\n"
        "for number in range(9):\n"
        "    store.write_bytes('a/x', bytes([number]) * 1000); store.create_bytes(f'b/{number}', bytes(1000))\n"
    )
    # One interpreter forks for each point, because starting 50 interpreters would take too long.
    driver = (
        "import os, sys\n"
        "import precision_time.storage.filesystem\n"
        "code = sys.argv[2]\n"
        "for point in range(50):\n"
        "    if os.fork() == 0:\n"
        "        sys.argv = ['', f'{sys.argv[1]}/{point}', str(point)]; exec(code); os._exit(0)\n"
        "    os.wait()\n"
    )
    subprocess.run([sys.executable, "-c", driver, str(tmp_path), code], check=True, timeout=120)
    writes = 0
    for point in range(50):
        store = open_store(tmp_path / str(point))
        for path in store.list_files():
            content = store.read_bytes(path)
            assert len(content) == 1000
            assert len(set(content)) == 1
            writes += 1
        store.write_bytes("a/x", b"resumed")
        assert store.read_bytes("a/x") == b"resumed"
    assert writes > 50


def test_a_link_that_leaves_the_root_is_never_opened(local: Store, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.mkdir()
    (canary / "secret").write_bytes(b"secret")
    local.write_bytes("a/x", b"1")
    root = tmp_path / "store"
    (root / "file").symlink_to(canary / "secret")
    (root / "folder").symlink_to(canary)
    (root / "dangling").symlink_to(tmp_path / "nothing")
    (root / "a" / "sibling").symlink_to(root / "a" / "x")
    for path in ("file", "folder/secret", "dangling"):
        with pytest.raises(IntegrityError, match="link"):
            local.read_bytes(path)
    for act in (
        lambda: local.write_bytes("folder/new", b"1"),
        lambda: local.create_bytes("folder/deep/new", b"1"),
        lambda: local.remove("folder/secret"),
        lambda: local.move("folder/secret", "x"),
        lambda: local.move("a/x", "folder/x"),
        lambda: local.list_files("folder"),
    ):
        with pytest.raises(IntegrityError, match="link"):
            act()
    assert local.read_bytes("a/sibling") == b"1"
    local.write_bytes("file", b"replaced the link, not its target")
    assert files_of(canary) == ["secret"]
    assert (canary / "secret").read_bytes() == b"secret"
    assert local.list_files() == ["a/sibling", "a/x", "dangling", "file", "folder"]


def test_a_folder_swapped_for_a_link_between_check_and_open_is_refused(
    local: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.write_bytes("a/x", b"1")
    (tmp_path / "canary").mkdir()
    (tmp_path / "canary" / "x").write_bytes(b"secret")
    real = LocalStore._check_inside

    def swap(self: LocalStore, full: str) -> str:
        resolved = real(self, full)
        folder = tmp_path / "store" / "a"
        if not folder.is_symlink():
            folder.rename(tmp_path / "moved")
            folder.symlink_to(tmp_path / "canary")
        return resolved

    monkeypatch.setattr(LocalStore, "_check_inside", swap)
    with pytest.raises((IntegrityError, NotFoundError)):
        local.read_bytes("a/x")


def test_a_fifo_is_refused_without_waiting(local: Store, tmp_path: Path) -> None:
    local.write_bytes("x", b"1")
    os.mkfifo(tmp_path / "store" / "pipe")
    with pytest.raises(IntegrityError, match="plain file"):
        local.read_bytes("pipe")


def test_no_descriptor_is_left_open(local: Store) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(20):
        local.write_bytes("x", b"1")
        local.create_bytes(f"y{number}", b"1")
        local.read_bytes("x")
        local.list_files()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_check_leaves_no_folder_that_was_not_there(tmp_path: Path) -> None:
    LocalStore(tmp_path / "new" / "data").check_writable()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old").mkdir()
    LocalStore(tmp_path / "old").check_writable()
    assert (tmp_path / "old").is_dir()


def test_a_file_where_a_folder_belongs_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="not a folder"):
        LocalStore(tmp_path / "file")
