"""The S3 servers and buckets that are allowed, and the errors that count as no answer."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from precision_time.storage.errors import InputError, NotFoundError, StorageError, UnreachableError
from precision_time.storage.filesystem import open_store
from precision_time.storage.remote import check_endpoint


@pytest.fixture(autouse=True)
def _fresh(fresh_s3: Path) -> None:
    """Each test has its own user and connections."""


@pytest.mark.parametrize(
    "url",
    [
        "https://s3.amazonaws.com",
        "https://s3.eu-west-1.amazonaws.com",
        "https://S3.cn-north-1.amazonaws.com.cn.",
        "http://localhost:9000",
        "http://127.8.9.1:9000",
        "http://[::1]:9000",
        "https://minio.example.org:9000",
        "https://a.storage.example.org",
    ],
)
def test_amazon_this_machine_and_listed_hosts_may_be_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECISION_TIME_ALLOWED_HOSTS", "minio.example.org,.storage.example.org")
    check_endpoint(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254",
        "https://evil-amazonaws.com",
        "https://amazonaws.com.evil.org",
        "https://s3.amazonaws.com@evil.org",
        "http://localhost.evil.org",
        "http://2130706433",
        "http://0177.0.0.1",
        "http://0.0.0.0",
        "http://10.0.0.1",
        "https://x.minio.example.org",
        "https://storage.example.org",
        "http://[::1",
        "nonsense",
        "",
    ],
)
def test_any_other_host_is_refused_with_the_way_to_allow_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECISION_TIME_ALLOWED_HOSTS", "minio.example.org,.storage.example.org")
    with pytest.raises(InputError, match="export PRECISION_TIME_ALLOWED_HOSTS="):
        check_endpoint(url)


def _name_by_environment(url: str, home: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("AWS_ENDPOINT_URL", url)


def _name_by_profile(url: str, home: Path, patch: pytest.MonkeyPatch) -> None:
    (home / "aws").write_text(f"[default]\nendpoint_url = {url}\n")
    patch.delenv("AWS_ENDPOINT_URL")
    patch.setenv("AWS_CONFIG_FILE", str(home / "aws"))


def _name_by_fsspec(url: str, home: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(__import__("fsspec").config.conf, "s3", {"endpoint_url": url})


@pytest.mark.parametrize("name", [_name_by_environment, _name_by_profile, _name_by_fsspec])
def test_a_server_off_the_list_gets_no_request_wherever_it_is_named(
    name: Callable[[str, Path, pytest.MonkeyPatch], None], fresh_s3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: socket.socket, address: object) -> int:
        raise AssertionError(f"a connection to {address}")

    name("http://192.0.2.1:9", fresh_s3, monkeypatch)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for act in (
        lambda store: store.read_bytes("x", max_bytes=9),
        lambda store: store.list_files(),
        lambda store: store.exists("x"),
        lambda store: store.create_bytes("x", b"1"),
    ):
        with pytest.raises(InputError, match=r"192\.0\.2\.1"):
            act(open_store("s3://timings-test/x"))


def test_where_buckets_are_listed_no_other_is_opened(fresh_s3: Path) -> None:
    (fresh_s3 / ".config" / "precision_time").mkdir(parents=True)
    (fresh_s3 / ".config" / "precision_time" / "config.toml").write_text(
        '[storage]\nallowed_buckets = ["timings-test"]\n'
    )
    open_store("s3://timings-test/allowed").write_bytes("x", b"1")
    with pytest.raises(InputError, match="allowed_buckets"):
        open_store("s3://timings-tests/x")


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_that_cannot_serve_now_does_not_answer(serve: Callable[[int], None], status: int) -> None:
    serve(status)
    with pytest.raises(UnreachableError):
        open_store("s3://timings-test/x", timeout_s=2).read_bytes("x", max_bytes=9)


def test_silence_and_a_closed_port_are_no_answer_within_the_time(
    serve: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(0)
    with pytest.raises(UnreachableError):
        open_store("s3://timings-test/x", timeout_s=0.5).read_bytes("x", max_bytes=9)
    with pytest.raises(UnreachableError):
        open_store("s3://timings-test/x", timeout_s=0.5).write_bytes("x", b"1")
    with pytest.raises(UnreachableError):
        open_store("s3://timings-test/x", timeout_s=0.5).create_bytes("x", b"1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        __import__("s3fs").S3FileSystem.clear_instance_cache()
        with pytest.raises(UnreachableError):
            open_store("s3://timings-test/x", timeout_s=0.5).read_bytes("x", max_bytes=9)


@pytest.mark.parametrize(("status", "error"), [(403, StorageError), (404, NotFoundError)])
def test_a_refusal_is_an_answer(serve: Callable[[int], None], status: int, error: type[Exception]) -> None:
    serve(status)
    with pytest.raises(error) as caught:
        open_store("s3://timings-test/x", timeout_s=2).read_bytes("x", max_bytes=9)
    assert not isinstance(caught.value, UnreachableError)
