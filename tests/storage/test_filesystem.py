"""Every store keeps one contract: whole files, one winner, nothing outside the root."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from precision_time.storage.errors import (
    InputError,
    IntegrityError,
    NotFoundError,
    StorageError,
    VersionExistsError,
)
from precision_time.storage.filesystem import open_store
from precision_time.storage.store import Store


@pytest.fixture
def store(store_url: str) -> Store:
    return open_store(store_url)


# --- the contract, over every kind of store


def test_a_written_file_is_read_back(store: Store) -> None:
    store.write_bytes("a/b/c.bin", b"\0one")
    assert store.read_bytes("a/b/c.bin") == b"\0one"
    assert store.exists("a/b/c.bin")
    assert not store.exists("a/b")


def test_an_empty_file_is_a_file(store: Store) -> None:
    store.write_bytes("empty", b"")
    assert store.read_bytes("empty", max_bytes=10) == b""
    assert store.list_files() == ["empty"]


def test_a_write_replaces(store: Store) -> None:
    store.write_bytes("x", b"long content")
    store.write_bytes("x", b"short")
    assert store.read_bytes("x") == b"short"


def test_the_bytes_of_a_folder_are_those_of_its_files(store: Store) -> None:
    for path, size in (("v1/a", 3), ("v1/b/c", 5), ("v10/x", 7), ("v1/.tmp-1", 11)):
        store.write_bytes(path, bytes(size))
    assert (store.total_bytes("v1"), store.total_bytes(), store.total_bytes("nothing")) == (8, 15, 0)


def test_a_missing_file_is_named(store: Store) -> None:
    for path in ("nothing", "no/folder/either"):
        with pytest.raises(NotFoundError, match=path):
            store.read_bytes(path)
        with pytest.raises(NotFoundError, match=path):
            store.read_bytes(path, max_bytes=10)
        with pytest.raises(NotFoundError, match=path):
            store.remove(path)
    store.write_bytes("folder/file", b"1")
    with pytest.raises(NotFoundError):
        store.read_bytes("folder")


def test_creation_is_exclusive_and_the_first_content_stays(store: Store) -> None:
    store.create_bytes("v/claim", b"first")
    with pytest.raises(VersionExistsError, match="claim"):
        store.create_bytes("v/claim", b"second")
    assert store.read_bytes("v/claim") == b"first"
    assert store.list_files() == ["v/claim"]


def test_of_eight_creators_one_wins(store: Store) -> None:
    barrier = threading.Barrier(8)

    def create(number: int) -> bool:
        barrier.wait()
        try:
            store.create_bytes("race", str(number).encode())
        except VersionExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(create, range(8)))
    assert won.count(True) == 1
    assert store.read_bytes("race") == str(won.index(True)).encode()


def test_a_listing_is_sorted_recursive_and_below_its_prefix(store: Store) -> None:
    assert store.list_files() == []
    assert store.list_files("v1") == []
    for path in ("v10/x", "v1/b/2", "v1/a", "top", "v1/b/1"):
        store.write_bytes(path, b"1")
    assert store.list_files() == ["top", "v1/a", "v1/b/1", "v1/b/2", "v10/x"]
    assert store.list_files("v1") == ["v1/a", "v1/b/1", "v1/b/2"]
    assert store.list_files("v1/b") == ["v1/b/1", "v1/b/2"]


def test_temporary_and_private_names_are_not_listed(store: Store) -> None:
    for path in (".tmp-1", "a/.tmp-2", "a/_x", "_quarantine/y", ".hidden/z", "a/seen"):
        store.write_bytes(path, b"1")
    assert store.list_files() == ["a/seen"]
    assert store.list_files("a") == ["a/seen"]
    assert store.list_files(".hidden") == []
    assert store.read_bytes("a/.tmp-2") == b"1"


def test_a_removed_file_is_gone(store: Store) -> None:
    store.write_bytes("x", b"1")
    store.remove("x")
    assert not store.exists("x")
    assert store.list_files() == []


def test_a_moved_file_keeps_its_content_and_never_replaces(store: Store) -> None:
    store.write_bytes("old", b"1")
    store.write_bytes("taken", b"2")
    with pytest.raises(VersionExistsError):
        store.move("old", "taken")
    assert store.read_bytes("old") == b"1"
    store.move("old", "far/new")
    assert store.list_files() == ["far/new", "taken"]
    assert store.read_bytes("far/new") == b"1"
    with pytest.raises(NotFoundError):
        store.move("old", "anywhere")


def test_a_file_above_the_cap_is_refused(store: Store) -> None:
    store.write_bytes("big", bytes(11))
    assert len(store.read_bytes("big", max_bytes=11)) == 11
    with pytest.raises(IntegrityError, match="too large"):
        store.read_bytes("big", max_bytes=10)


def test_a_writable_store_passes_and_the_probe_is_gone(store: Store) -> None:
    store.check_writable(required_bytes=1)
    assert store.list_files() == []


BAD_PATHS = [
    "",
    ".",
    "..",
    "../canary",
    "a/../../canary",
    "a/./b",
    "/etc/passwd",
    "a//b",
    "a/",
    "a\\b",
    "..\\canary",
    "a\0b",
    "a\nb",
    "a\u202eb",
    "a\x7f",
    "\ud800",
    "x" * 256,
]


@pytest.mark.parametrize("path", BAD_PATHS, ids=repr)
def test_a_path_that_could_leave_the_root_is_refused_everywhere(store: Store, path: str) -> None:
    for act in (
        lambda: store.read_bytes(path),
        lambda: store.write_bytes(path, b"1"),
        lambda: store.create_bytes(path, b"1"),
        lambda: store.exists(path),
        lambda: store.remove(path),
        lambda: store.move(path, "x"),
    ):
        with pytest.raises(InputError, match="path"):
            act()
    if path:
        with pytest.raises(InputError, match="path"):
            store.list_files(path)


def test_odd_but_harmless_names_work(store: Store) -> None:
    names = ["model=a%2Fb%3Ac/x", "per cent%", "star*[1]?#&=+", "émoji-🙂", "x" * 200]
    for name in names:
        store.write_bytes(name, name.encode())
    assert store.list_files() == sorted(names)
    for name in names:
        assert store.read_bytes(name) == name.encode()


# --- URLs


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://169.254.169.254/latest",
        "https://localhost/x",
        "http://[::1]/x",
        "data:text/plain,hello",
        "simplecache::s3://bucket/x",
        "s3://bucket/x::memory://y",
        "reference://x",
        "github://a:b@c/",
        "ssh://host/x",
        "file://host/x",
        "file:relative",
        "s3://",
        "s3:///key",
        "s3:bucket/key",
        "s3://Bucket_/x",
        "s3://bucket/a/../b",
        "s3://bucket/x?versionId=1",
        "memory://a/../b",
        "C:x",
        "/tmp/a\0b",
    ],
)
def test_a_url_off_the_allow_list_is_refused(url: str) -> None:
    with pytest.raises(InputError):
        open_store(url)


def test_a_secret_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(InputError) as caught:
        open_store("s3://AKIAKEY:verysecret@bucket/x")
    assert "verysecret" not in str(caught.value)
    assert "AKIAKEY" not in str(caught.value)


def test_local_spellings_name_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "with space"
    open_store(root).write_bytes("x", b"1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spelling in (root, str(root), root.as_uri(), "with space", "./with space", "~/with space"):
        assert open_store(spelling).read_bytes("x") == b"1"


def test_the_url_of_a_store_opens_it_again(store: Store) -> None:
    store.write_bytes("x", b"1")
    assert open_store(store.url).read_bytes("x") == b"1"
    assert open_store(store.url + "/").url == store.url


def test_an_unreachable_bucket_is_a_storage_error(s3_bucket: str) -> None:
    missing = open_store("s3://no-such-bucket-here/x")
    with pytest.raises(StorageError):
        missing.write_bytes("a", b"1")
    with pytest.raises(StorageError):
        missing.create_bytes("a", b"1")
    with pytest.raises(NotFoundError):
        missing.read_bytes("a")


def test_a_base_install_without_s3_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def refuse(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", refuse)
    with pytest.raises(InputError, match=r"precision-time\[s3\]"):
        open_store("s3://bucket/x")


def test_local_files_need_no_fsspec_and_no_pyarrow() -> None:
    code = (
        "import sys; from precision_time.storage.registry import Registry; "
        "from precision_time.storage.filesystem import open_store; open_store('.').list_files('nothing'); "
        "print([m for m in ('fsspec', 's3fs', 'pyarrow', 'pandas', 'torch') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "[]"
