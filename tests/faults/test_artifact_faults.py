"""Artifacts in other processes: fetched, cached, killed while fetching, and used when the registry does not answer."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

ASKED = ["predict", "--model", "mlp", "--precision", "fp32", "--batch-size", "16", "--gpu", "A100-SXM4-80GB"]


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """An S3 server with the bucket ``models``, named by the environment; a call stops it."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in [name for name in os.environ if name.startswith(("AWS_", "PRECISION_TIME_", "XDG_"))]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "NO_PROXY": "127.0.0.1",
        "HOME": str(tmp_path / "home"),
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket="models")
    running = [server]

    def stop() -> None:
        while running:
            running.pop().stop()

    yield stop
    stop()
    s3fs.S3FileSystem.clear_instance_cache()


def ask(*options: str, **environment: str) -> tuple[int, dict[str, object]]:
    """Exit code and JSON answer of the command in a new process; for an error its stderr under ``error``."""
    done = subprocess.run(
        [sys.executable, "-m", "precision_time", *ASKED, "--json", *options],
        env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout or "{}") or {"error": done.stderr}


def test_what_was_published_to_s3_answers_in_new_processes_also_when_the_server_is_gone(
    s3: Callable[[], None], measure: Callable[..., list], publish_made_up: Callable[..., None], tmp_path: Path
) -> None:
    url = "s3://models/artifacts"
    publish_made_up(url, measure())
    reference = f"{url}/default@champion"
    code, first = ask("--artifact", reference)
    assert (code, first["artifact_id"]) == (0, "default@1")
    assert f"default@1: loaded from {url}" in first["reasons"]
    _, again = ask("--artifact", reference)
    assert f"default@1: loaded from {url} (its files from the local cache)" in again["reasons"]

    s3()
    code, cached = ask(PRECISION_TIME_ARTIFACT=reference)
    assert (code, cached["artifact_id"], cached["iteration_time_s"]) == (0, "default@1", first["iteration_time_s"])
    assert any(reason.startswith(f"default@1: the registry {url} did not answer") for reason in cached["reasons"])
    code, refused = ask("--artifact", reference, "--refresh")
    assert code == 2
    assert "no newer artifact could be looked for" in str(refused)
    code, refused = ask("--artifact", reference, PRECISION_TIME_CACHE="off")
    assert code == 2
    assert "there is none" in str(refused)
    code, bundled = ask("--artifact", "bundled")
    assert (code, str(bundled["artifact_id"]).partition("@")[0]) == (0, "bundled")

    # With a damaged cache and no registry there is no answer, not another artifact's.
    trees = next((tmp_path / "home").rglob("trees.npz"))
    trees.write_bytes(trees.read_bytes()[:-1])
    assert ask("--artifact", reference)[0] == 2


def test_a_process_killed_while_it_keeps_an_artifact_leaves_a_whole_one_or_none(
    tmp_path: Path, measure: Callable[..., list], publish_made_up: Callable[..., None]
) -> None:
    """SIGKILL in a child before one system call after another; a folder stands for the remote registry."""
    publish_made_up(str(tmp_path / "registry"), measure(models=("mlp",)))
    code = (
        "import itertools, os, sys\n"
        "from pathlib import Path\n"
        "from precision_time.storage.artifact_cache import fetch_artifact\n"
        "from precision_time.storage.errors import UnreachableError\n"
        "from precision_time.storage.local import LocalStore\n"
        "from precision_time.storage.registry import Registry\n"
        "LocalStore.is_remote = True\n"
        "ONLY = ('trees.npz', 'predictor.json')\n"
        "def run(deadline):\n"
        "    calls = itertools.count()\n"
        "    def counted(call):\n"
        "        def go(*args, **kwargs):\n"
        "            if next(calls) == deadline: os.kill(os.getpid(), 9)\n"
        "            return call(*args, **kwargs)\n"
        "        return go\n"
        "    for name in ('open', 'fsync', 'unlink', 'replace', 'mkdir'):\n"
        "        setattr(os, name, counted(getattr(os, name)))\n"
        "    fetch_artifact(sys.argv[1], 'default', only=ONLY)\n"
        "    os._exit(1)\n"
        "sound = Registry(sys.argv[1]).load('default', only=ONLY)[1]\n"
        "real, kept, deadline = Registry.manifest, [], -1\n"
        "def lose(*_): raise UnreachableError('gone')\n"
        "while True:\n"
        "    deadline += 1\n"
        "    os.environ['PRECISION_TIME_CACHE'] = sys.argv[2] + '/%d' % deadline\n"
        "    if os.fork() == 0: run(deadline)\n"
        "    ended = os.waitstatus_to_exitcode(os.wait()[1])\n"
        "    Registry.manifest = lose\n"
        "    try: kept.append(fetch_artifact(sys.argv[1], 'default', only=ONLY).files == sound)\n"
        "    except UnreachableError: kept.append(None)\n"
        "    Registry.manifest = real\n"
        "    assert fetch_artifact(sys.argv[1], 'default', only=ONLY).files == sound\n"
        "    Registry.manifest = lose\n"
        "    assert fetch_artifact(sys.argv[1], 'default', only=ONLY).files == sound\n"
        "    Registry.manifest = real\n"
        "    if ended == 1: break\n"
        "print(deadline, kept.count(True), kept.count(None), kept.count(False))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "registry"), str(tmp_path / "cache")],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps, whole, none, wrong = map(int, done.stdout.split())
    assert steps > 20
    assert whole >= 1
    assert none > 10
    assert wrong == 0
