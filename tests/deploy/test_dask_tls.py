"""Dask over TLS with the script's certificates: a client with a certificate measures, others are refused."""

import json
import re
import stat
import subprocess

import pytest

from precision_time.storage.timings import TimingsDataset

pytestmark = pytest.mark.faults

WAIT_S = 200


@pytest.fixture(scope="module")
def cluster(make_team, deploy):
    """The scheduler and the workers of docker-compose.yml, with certificates that deploy/make_certificates.sh made."""
    team = make_team()
    subprocess.run(
        [deploy / "make_certificates.sh", team.folder / "certificates", "2"], check=True, capture_output=True
    )
    for service in ("dask-scheduler", "dask-worker"):
        team.start(service)
    return team


@pytest.fixture(scope="module")
def client_settings(cluster, deploy):
    """The settings of a campaign in .env.example, with the folder of this machine."""
    lines = re.findall(r"^#(DASK_\w+)=(.+)$", (deploy / ".env.example").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name.rsplit("__", 1)[1] for name, _ in lines} == {"CA_FILE", "CERT", "KEY"}
    return {name: cluster.localise(value) for name, value in lines}


def run_campaign(cluster, *, data: str = "refused", **settings: str) -> "subprocess.CompletedProcess[str]":
    spec = {
        "name": "tls", "models": ["mlp"], "precisions": ["fp32"], "gpus": [1, 2], "batch_sizes": [4], "device": "cpu",
        "data": data, "warmup_steps": 2, "measured_steps": 3, "seconds_per_cell": 5, "timeout_per_cell": 120,
        "cluster": f"tls://127.0.0.1:{cluster.ports['8786']}", "workers_timeout": 60,
    }  # fmt: skip
    (cluster.data / "tls.json").write_text(json.dumps(spec), encoding="utf-8")
    environment = cluster.environment() | settings
    return subprocess.run(
        ["precision-time", "campaign", "tls.json", "--json"], cwd=cluster.data, env=environment, capture_output=True,
        text=True, timeout=WAIT_S,
    )  # fmt: skip


def test_a_campaign_with_a_certificate_measures_over_tls(cluster, client_settings) -> None:
    done = run_campaign(cluster, data="data", **client_settings)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cells_measured"] == 2
    assert len(TimingsDataset(str(cluster.data / "data")).recorded_cells()) == 2


def test_a_client_without_a_certificate_is_refused(cluster) -> None:
    done = run_campaign(cluster)
    assert done.returncode == 2
    assert "the cluster requires TLS" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(cluster.data.glob("refused/**/*.parquet"))


def test_a_certificate_of_another_authority_is_refused(cluster, client_settings, deploy, tmp_path) -> None:
    subprocess.run([deploy / "make_certificates.sh", tmp_path / "other"], check=True, capture_output=True)
    # It trusts the scheduler's authority, and the scheduler does not trust its own.
    settings = {name: value for name, value in client_settings.items() if name.endswith("CA_FILE")}
    for name, file in (("CERT", "client.pem"), ("KEY", "client-key.pem")):
        settings[f"DASK_DISTRIBUTED__COMM__TLS__CLIENT__{name}"] = str(tmp_path / "other" / file)
    done = run_campaign(cluster, **settings)
    assert done.returncode == 2, done.stderr
    assert "no scheduler answers" in done.stderr
    assert not list(cluster.data.glob("refused/**/*.parquet"))


def test_keys_are_their_owners_alone_and_are_not_written_twice(cluster, deploy) -> None:
    folder = cluster.folder / "certificates"
    keys = sorted(folder.glob("*-key.pem"))
    assert [key.name for key in keys] == ["ca-key.pem", "client-key.pem", "scheduler-key.pem", "worker-key.pem"]
    settings = (folder / "tls.sh").read_text(encoding="utf-8")
    assert all(f"'{folder}/{file.name}'" in settings for file in folder.glob("*.pem") if file.name != "ca-key.pem")
    assert "ca-key" not in settings
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    before = [key.read_bytes() for key in keys]
    again = subprocess.run([deploy / "make_certificates.sh", folder], capture_output=True, text=True)
    assert again.returncode == 2
    assert "move them away" in again.stderr
    assert [key.read_bytes() for key in keys] == before
