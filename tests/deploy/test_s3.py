"""Team mode on S3 (a mock server): measure, retrain and predict without a folder that the commands share."""

import json
import os

import pytest

from precision_time.storage.registry import Registry
from precision_time.storage.timings import TimingsDataset

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def s3():
    """The environment that reaches a bucket ``team`` on a mock S3 server; this process has it as well."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "5up3rs3cr3tkey", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1",
        "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in settings.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="team")
        yield settings
    server.stop()


def test_timings_and_registry_on_s3_serve_the_whole_loop(team, s3, record, measure) -> None:
    data, registry = "s3://team/timings", "s3://team/registry"
    # As if others had measured these cells; the campaign below adds to them.
    record(data, measure(models=("vit_tiny", "bert_mini", "gpt2_mini")))
    spec = {
        "name": "s3", "models": ["mlp"], "precisions": ["fp32"], "gpus": [1], "batch_sizes": [4, 8, 16, 32],
        "device": "cpu", "data": data, "warmup_steps": 2, "measured_steps": 3, "seconds_per_cell": 5,
        "timeout_per_cell": 120,
    }  # fmt: skip
    (team.data / "s3.json").write_text(json.dumps(spec), encoding="utf-8")

    measured = team.run("worker", "precision-time", "campaign", "s3.json", "--json", timeout=200, **s3)
    assert measured.returncode == 0, measured.stderr
    assert len(TimingsDataset(data).recorded_cells()) == 36 + 4

    trained = team.run("worker", "precision-time", "retrain", "--data", data, "--registry", registry, "--json",
                       timeout=200, **s3)  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    assert Registry(registry).aliases("default") == {"champion": 1}

    question = "--model bert_mini --precision fp32 --batch-size 16 --gpu A100-SXM4-80GB --json"
    artifact = f"{registry}/default@champion"
    predicted = team.run("worker", "precision-time", "predict", *question.split(), "--artifact", artifact, **s3)
    assert predicted.returncode == 0, predicted.stderr
    assert json.loads(predicted.stdout)["artifact_id"] == "default@1"
    for done in (measured, trained, predicted):
        assert s3["AWS_SECRET_ACCESS_KEY"] not in done.stdout + done.stderr
    assert not (team.data / "s3:").exists()
