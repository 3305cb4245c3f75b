"""The configuration file is read strictly, and environment variables override it."""

from pathlib import Path

import pytest

from precision_time.storage.configuration import (
    allowed_hosts,
    cache_folder,
    configured_registry_url,
    read_configuration,
)
from precision_time.storage.errors import InputError


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the configuration file of a new user."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PRECISION_TIME_ALLOWED_HOSTS", "PRECISION_TIME_CACHE", "PRECISION_TIME_REGISTRY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".config" / "precision_time").mkdir(parents=True)
    return tmp_path / ".config" / "precision_time" / "config.toml"


def test_everything_the_file_may_say_is_read(config: Path) -> None:
    assert read_configuration().allowed_buckets is None
    config.write_text(
        '[artifact]\nreference = "s3://models/default@champion"\n[registry]\nurl = "/models"\n'
        '[storage]\nallowed_hosts = ["minio.example.org"]\nallowed_buckets = []\n[of-another-tool]\nx = 1\n'
    )
    read = read_configuration()
    assert (read.artifact_reference, read.registry_url) == ("s3://models/default@champion", "/models")
    assert (read.allowed_hosts, read.allowed_buckets) == (("minio.example.org",), ())


@pytest.mark.parametrize(
    "text",
    [
        '[storage]\nallowed_bucket = ["mine"]\n',
        '[storage]\nallowed_buckets = "mine"\n',
        '[storage]\nallowed_hosts = [""]\n',
        "[storage]\nallowed_hosts = [1]\n",
        "storage = []\n",
        '[artifact]\nreference = ""\n',
        '[artifact]\nname = "default"\n',
    ],
)
def test_a_misspelt_restriction_is_refused(config: Path, text: str) -> None:
    config.write_text(text)
    with pytest.raises(InputError, match=r"config\.toml"):
        read_configuration()


def test_the_environment_names_the_registry_before_the_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert configured_registry_url() is None
    config.write_text('[registry]\nurl = "s3://bucket/models"\n')
    assert configured_registry_url() == "s3://bucket/models"
    monkeypatch.setenv("PRECISION_TIME_REGISTRY", "/somewhere")
    assert configured_registry_url() == "/somewhere"
    monkeypatch.setenv("PRECISION_TIME_REGISTRY", "")
    assert configured_registry_url() == "s3://bucket/models"


@pytest.mark.parametrize("text", ["", "[other]\nx = 1\n", "[registry]\n"])
def test_a_file_without_a_registry_names_none(config: Path, text: str) -> None:
    config.write_text(text)
    assert configured_registry_url() is None


@pytest.mark.parametrize("data", [b"[registry", b"\xff\xfe", b"registry = 3\n", b"[registry]\nurl = 3\n",
                                  b'[registry]\nurl = ""\n', b"a = " + b"[" * 5_000])  # fmt: skip
def test_a_file_that_makes_no_sense_is_refused_by_name(config: Path, data: bytes) -> None:
    config.write_bytes(data)
    with pytest.raises(InputError, match=r"config\.toml"):
        configured_registry_url()


def test_the_environment_names_hosts_instead_of_the_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text('[storage]\nallowed_hosts = ["MinIO.example.org"]\n')
    assert allowed_hosts() == ("minio.example.org",)
    monkeypatch.setenv("PRECISION_TIME_ALLOWED_HOSTS", " a.example.org,,.b.example.org ")
    assert allowed_hosts() == ("a.example.org", ".b.example.org")


def test_the_cache_is_where_the_user_says_or_nowhere(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = config.parents[2]
    assert cache_folder("artifacts") == home / ".cache" / "precision_time" / "artifacts"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder("artifacts") == home / ".cache" / "precision_time" / "artifacts"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder("artifacts") == Path("/elsewhere/precision_time/artifacts")
    monkeypatch.setenv("PRECISION_TIME_CACHE", "~/mine")
    assert cache_folder("artifacts") == home / "mine" / "artifacts"
    monkeypatch.setenv("PRECISION_TIME_CACHE", "Off")
    assert cache_folder("artifacts") is None
