"""Artifacts of a remote registry are fetched once, verified on every load, and used if the registry does not answer."""

import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from precision_time.storage import artifact_cache
from precision_time.storage.artifact_cache import FetchedArtifact, fetch_artifact
from precision_time.storage.errors import IntegrityError, NotFoundError, PrecisionTimeError, UnreachableError
from precision_time.storage.filesystem import open_store
from precision_time.storage.manifests import ArtifactManifest
from precision_time.storage.registry import Registry

Publish = Callable[..., ArtifactManifest]
Serve = Callable[[int], None]

FILES = {"trees.npz": b"trees", "predictor.json": b"{}", "xgboost-compute.json": b"large"}
SERVING = ("trees.npz", "predictor.json", "workloads.json")


@pytest.fixture
def url(s3_bucket: str, fresh_s3: Path, publish: Publish) -> str:
    """A registry on S3 with one version of ``demo``."""
    url = f"s3://{s3_bucket}/{fresh_s3.name}"
    publish(Registry(url), files=FILES)
    return url


@pytest.fixture
def cache(fresh_s3: Path) -> Path:
    """The folder of the cache."""
    return fresh_s3 / ".cache" / "precision_time" / "artifacts"


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Keys of the objects whose content was requested."""
    import s3fs

    keys: list[str] = []
    real = s3fs.S3FileSystem._call_s3

    async def count(self: object, method: str, *positional: object, **named: object) -> object:
        if method == "get_object":
            keys.append(str(named.get("Key") or positional[0]))
        return await real(self, method, *positional, **named)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", count)
    return keys


def fetch(url: str, reference: str = "demo") -> FetchedArtifact:
    return fetch_artifact(url, reference, only=SERVING)


def test_fetched_files_come_from_the_cache_and_only_alias_and_manifest_from_the_registry(
    url: str, cache: Path, fetched: list[str], publish: Publish
) -> None:
    first = fetch(url)
    assert first.files == {name: data for name, data in FILES.items() if name in SERVING}
    assert first.origin == f"loaded from {url}"
    assert not any("xgboost" in key for key in fetched)
    fetched.clear()
    again = fetch(url)
    assert (again.manifest, again.files) == (first.manifest, first.files)
    assert again.origin == f"loaded from {url} (its files from the local cache)"
    assert [key.rpartition("/")[2] for key in fetched] == ["champion.json", "manifest.json"]
    publish(Registry(url), files={"trees.npz": b"newer", "predictor.json": b"{}"})
    assert fetch(url).files["trees.npz"] == b"newer"
    assert len(list(cache.glob("*/manifest.json"))) == 2


def test_the_cache_stands_in_for_a_registry_that_does_not_answer_and_says_so(
    url: str, serve: Serve, publish: Publish
) -> None:
    publish(Registry(url), files=FILES | {"trees.npz": b"second"})
    fetch(url)
    fetch(url, "demo@1")
    serve(503)
    cached = fetch(url)
    assert (cached.manifest.version, cached.files["trees.npz"], cached.is_current) == (2, b"second", False)
    assert re.search(
        rf"{re.escape(url)} did not answer: version 2, which demo led to on \d{{4}}-\d\d-\d\d \d\d:\d\d UTC",
        cached.origin,
    )
    assert fetch(url, "demo@1").manifest.version == 1
    # A reference that was never resolved is not guessed from another one.
    with pytest.raises(UnreachableError, match="there is none"):
        fetch(url, "demo@2")
    with pytest.raises(UnreachableError):
        fetch(f"{url}x")


def test_a_registry_lost_in_mid_fetch_is_stood_in_for_too(
    url: str, monkeypatch: pytest.MonkeyPatch, publish: Publish
) -> None:
    fetch(url)
    publish(Registry(url), files=FILES | {"trees.npz": b"second"})

    def lose(*_: object, **__: object) -> None:
        raise UnreachableError("the connection broke")

    monkeypatch.setattr(Registry, "load", lose)
    cached = fetch(url)
    assert (cached.manifest.version, cached.is_current) == (1, False)


def test_silence_ends_after_the_stated_time(url: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(url)
    monkeypatch.setattr(artifact_cache, "ANSWER_TIMEOUT_S", 0.5)
    serve(0)
    assert not fetch(url).is_current


def test_a_refusal_is_an_error_whatever_the_cache_knows(url: str, serve: Serve) -> None:
    fetch(url)
    serve(403)
    with pytest.raises(PrecisionTimeError) as caught:
        fetch(url)
    assert not isinstance(caught.value, UnreachableError)


def test_a_version_that_was_removed_is_not_found_though_it_is_cached(url: str) -> None:
    fetch(url, "demo@1")
    for path in open_store(url).list_files("demo/1"):
        open_store(url).remove(path)
    with pytest.raises(NotFoundError):
        fetch(url, "demo@1")


def _swap(entry: Path) -> None:
    (entry / "trees.npz").write_bytes(b"TREES")


def _link(entry: Path) -> None:
    (entry / "trees.npz").unlink()
    (entry / "trees.npz").symlink_to("/etc/hostname")


def _edit_manifest(entry: Path) -> None:
    data = (entry / "manifest.json").read_bytes()
    (entry / "manifest.json").write_bytes(data.replace(b'"fp32"', b'"bf16"'))


def _replace_whole(entry: Path) -> None:
    """Another sound artifact under the digest of this one must be refused."""
    other = next(folder for folder in entry.parent.iterdir() if folder not in (entry, entry.parent / "notes"))
    for file in other.iterdir():
        (entry / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize("damage", [_swap, _link, _edit_manifest, _replace_whole])
def test_a_damaged_copy_never_answers_and_is_fetched_again(
    url: str, cache: Path, damage: Callable[[Path], None], serve: Serve, publish: Publish
) -> None:
    sound = fetch(url, "demo@1")
    publish(Registry(url), "demo", files={"trees.npz": b"OTHER", "predictor.json": b"{}"})
    fetch(url, "demo@2")
    damage(cache / sound.manifest.manifest_sha256)
    assert fetch(url, "demo@1").files == sound.files
    serve(503)
    assert fetch(url, "demo@1").files == sound.files
    damage(cache / sound.manifest.manifest_sha256)
    with pytest.raises(UnreachableError):
        fetch(url, "demo@1")


def test_fetched_files_are_verified_before_they_are_cached(url: str, cache: Path) -> None:
    open_store(url).write_bytes("demo/1/trees.npz", b"treez")
    with pytest.raises(IntegrityError, match=r"trees\.npz is changed"):
        fetch(url)
    open_store(url).write_bytes("demo/1/trees.npz", b"trees")
    open_store(url).write_bytes("demo/1/extra", b"x")
    with pytest.raises(IntegrityError, match="extra is not in the manifest"):
        fetch(url)
    assert not list(cache.glob("*/*"))


def test_other_users_cannot_read_the_cache(url: str, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    fetch(url)
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_the_cache_is_bounded_and_keeps_the_last_used_artifacts(
    url: str, cache: Path, monkeypatch: pytest.MonkeyPatch, publish: Publish
) -> None:
    monkeypatch.setattr(artifact_cache, "_MOST_ARTIFACTS", 3)
    monkeypatch.setattr(artifact_cache, "_MOST_NOTES", 4)
    abandoned = cache / ("a" * 64)
    abandoned.mkdir(parents=True)
    os.utime(abandoned, (0, 0))
    for version in range(2, 7):
        publish(Registry(url), files=FILES | {"trees.npz": b"%d" % version})
        fetch(url, f"demo@{version}")
        for age, manifest in enumerate(sorted(cache.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime)):
            os.utime(manifest, (time.time() - 1000 + age, time.time() - 1000 + age))
        fetch(url, "demo@2")  # used again each time
    versions = {int(re.search(rb'"version": (\d+)', path.read_bytes())[1]) for path in cache.glob("*/manifest.json")}  # type: ignore[index]
    assert versions == {2, 5, 6}
    assert len(list(cache.glob("notes/*.json"))) <= 5
    assert not abandoned.exists()


def test_without_a_cache_the_registry_is_asked_for_everything(
    url: str, cache: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_TIME_CACHE", "off")
    assert fetch(url).files["trees.npz"] == b"trees"
    assert not cache.exists()
    serve(503)
    with pytest.raises(UnreachableError):
        fetch(url)


def test_a_cache_that_cannot_be_written_takes_nothing_away(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECISION_TIME_CACHE", "/proc")
    assert fetch(url).files["trees.npz"] == b"trees"


def test_a_local_registry_is_read_in_place(tmp_path: Path, cache: Path, publish: Publish) -> None:
    publish(Registry(tmp_path / "registry"), files=FILES)
    assert fetch(str(tmp_path / "registry")).origin == f"loaded from {tmp_path / 'registry'}"
    assert not cache.exists()
