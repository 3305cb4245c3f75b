"""The stores of the storage tests: a local folder, memory, and S3 (a mock server on the loopback)."""

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from precision_time.storage.manifests import ArtifactFile, ArtifactManifest
from precision_time.storage.registry import Registry
from precision_time.storage.schema import CellOutcome, IterationTiming

Describe = Callable[[int, tuple[ArtifactFile, ...]], ArtifactManifest]


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """Name of a bucket on a mock S3 server; credentials and end point are in the environment."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("NO_PROXY", "127.0.0.1")
        boto3.client("s3").create_bucket(Bucket="timings-test")
        yield "timings-test"
    server.stop()


@pytest.fixture
def fresh_s3(s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Home of a user without configuration and cache, with new connections to S3, which s3fs would share."""
    import s3fs

    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PRECISION_TIME_ALLOWED_HOSTS", "PRECISION_TIME_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    s3fs.S3FileSystem.clear_instance_cache()
    yield tmp_path
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def serve(fresh_s3: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Starts an S3 server with one answer to every request (0: no answer), which all stores use from then on."""
    servers = []
    done = threading.Event()

    def start(status: int) -> None:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if status == 0:
                    done.wait(30)
                    return
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_HEAD = do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        __import__("s3fs").S3FileSystem.clear_instance_cache()

    yield start
    done.set()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(params=["local", "memory", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty store, of each kind in turn."""
    if request.param == "local":
        return str(tmp_path / "store")
    name = uuid.uuid4().hex
    if request.param == "memory":
        return f"memory://{name}"
    return f"s3://{request.getfixturevalue('s3_bucket')}/{name}"


def _timing(**changes: object) -> IterationTiming:
    values: dict[str, object] = {
        "cell_id": "00000000000000aa",
        "attempt": 1,
        "model": "mlp",
        "task_input": "64",
        "requested_precision": "amp_bf16",
        "effective_precision": "amp_bf16",
        "world_size": 2,
        "nodes": 1,
        "per_gpu_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "strategy": "ddp",
        "rank": 0,
        "step": 0,
        "is_warmup": False,
        "is_steady": True,
        "iteration_time_s": 0.1,
        "forward_time_s": 0.03,
        "backward_time_s": 0.06,
        "optimizer_time_s": 0.01,
        "compute_time_s": 0.08,
        "communication_time_s": 0.04,
        "exposed_communication_s": 0.02,
        "bucket_count": 2,
        "bucket_bytes": 4096,
        "loss_scale": None,
        "step_skipped": False,
        "peak_memory_bytes": 1_000,
        "model_params": 1_024,
        "device_type": "cpu",
        "gpu": "cpu-x-2c",
        "cpu_model": "x",
        "cpu_cores": 2,
        "threads_per_rank": 1,
        "driver_version": "",
        "cuda_version": "",
        "framework": "pytorch",
        "framework_version": "2",
        "backend": "gloo",
        "float32_matmul_precision": "highest",
        "host": "here",
        "load_average": 0.5,
        "recorded_at": 1.0,
    }
    return IterationTiming(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def timing() -> Callable[..., IterationTiming]:
    """Makes one row; keywords change fields."""
    return _timing


@pytest.fixture
def cell_rows() -> Callable[..., list[IterationTiming]]:
    """Makes the rows of one cell: 2 warm-up and 5 measured steps of 2 ranks; keywords change fields of all rows."""

    def make(cell_id: str = "00000000000000aa", **changes: object) -> list[IterationTiming]:
        rows = []
        for step in range(7):
            for rank in range(2):
                parts = {"compute_time_s": None, "communication_time_s": None, "exposed_communication_s": None}
                values: dict[str, object] = {
                    "cell_id": cell_id,
                    "rank": rank,
                    "step": step,
                    "is_warmup": step < 2,
                    "iteration_time_s": 0.1 + 0.01 * step + 0.001 * rank,
                    **(parts if step < 2 else {}),
                }
                rows.append(_timing(**(values | changes)))
        return rows

    return make


@pytest.fixture
def outcome() -> CellOutcome:
    """A failed first attempt."""
    return CellOutcome(
        cell_id="00000000000000aa",
        attempt=1,
        status="failed",
        cause="signal 9",
        message="rank 1 died\nbadly",
        model="mlp",
        precision="amp_bf16",
        world_size=2,
        nodes=1,
        per_gpu_batch_size=8,
        gradient_accumulation_steps=1,
        strategy="ddp",
        gpu="cpu-x-2c",
        host="here",
        started_at=1.5,
        duration_s=2.5,
    )


def _describe_as(name: str, **changes: object) -> Describe:
    def describe(version: int, files: tuple[ArtifactFile, ...]) -> ArtifactManifest:
        values: dict[str, object] = {
            "name": name,
            "version": version,
            "created_at": "2026-01-02T03:04:05+00:00",
            "files": files,
            "feature_names": {"compute": ["a", "b"]},
            "hardware": ["cpu-x-2c"],
            "default_gpu": "cpu-x-2c",
            "precisions": ["fp32"],
            "training_data_sha256": "0" * 64,
            "training_rows": 33,
            "training_configurations": 3,
            "holdout_models": ["mlp"],
            "seed": 0,
            "parameters": {"eta": 0.1, "depth": 3, "method": "hist"},
            "accuracy": {"cv": {"predictor": {"mape": 0.125, "coverage": None}}},
            "package_versions": {"numpy": "2"},
        }
        return ArtifactManifest(**(values | changes))  # type: ignore[arg-type]

    return describe


@pytest.fixture
def describe_as() -> Callable[..., Describe]:
    """Makes the ``describe`` argument of ``Registry.publish``; keywords change fields of the manifest."""
    return _describe_as


@pytest.fixture
def publish() -> Callable[..., ArtifactManifest]:
    """Publishes two small files, or ``files=``, with a fitting manifest."""

    def publish(registry: Registry, name: str = "demo", **options: object) -> ArtifactManifest:
        files = options.pop("files", {"trees.npz": b"trees", "compute.ubj": b"model"})
        return registry.publish(name, files, describe=_describe_as(name), **options)  # type: ignore[arg-type]

    return publish
