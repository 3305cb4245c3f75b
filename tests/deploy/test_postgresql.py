"""Team mode on a real PostgreSQL: the compose file's commands serve runs of the worker and of the command line."""

import json
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from precision_time.storage.timings import TimingsDataset

pytestmark = pytest.mark.faults

WAIT_S = 200

CAMPAIGN = {
    "name": "team", "models": ["mlp"], "precisions": ["fp32"], "gpus": [1], "batch_sizes": [4], "device": "cpu",
    "warmup_steps": 2, "measured_steps": 3, "seconds_per_cell": 5, "timeout_per_cell": 120,
}  # fmt: skip


def test_a_run_of_the_deployment_is_done_by_the_worker_and_kept_in_postgresql(team, secrets) -> None:
    login = tuple(secrets["PREFECT_AUTH_STRING"].split(":"))
    with httpx.Client(base_url=team.url, auth=login, timeout=30) as client:
        by_flow = {"flows": {"name": {"any_": ["profiling-campaign"]}}}
        (deployment,) = client.post("/deployments/filter", json=by_flow).json()
        spec = CAMPAIGN | {"data": "from-the-worker"}
        body = {"parameters": {"spec": spec}, "state": {"type": "SCHEDULED"}}
        run = client.post(f"/deployments/{deployment['id']}/create_flow_run", json=body).raise_for_status().json()
        deadline = time.monotonic() + WAIT_S
        while run["state_type"] not in {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}:
            assert time.monotonic() < deadline, (run["state"], team.log("worker")[-3000:])
            time.sleep(1)
            run = client.get(f"/flow_runs/{run['id']}").json()
    assert run["state_type"] == "COMPLETED", (run["state"], team.log("worker")[-3000:])
    # a relative folder lies in the volume
    assert len(TimingsDataset(str(team.data / "from-the-worker")).recorded_cells()) == 1
    assert team.ask_database(f"select state_type from flow_run where id = '{run['id']}'") == "COMPLETED"


def test_two_campaigns_at_once_both_end_well(team) -> None:
    campaigns = []
    for name in ("first", "second"):
        file = Path(team.data, f"{name}.json")
        file.write_text(json.dumps(CAMPAIGN | {"name": name, "data": f"data-{name}", "gpus": [1, 2]}), encoding="utf-8")
        campaigns.append(
            subprocess.Popen(
                ["precision-time", "campaign", str(file), "--json"],
                cwd=team.data,
                # They run at once on purpose: each has a local cluster on the same cores.
                env=team.environment("worker") | {"PRECISION_TIME_LOCKS": "off"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    for campaign in campaigns:
        out, err = campaign.communicate(timeout=WAIT_S)
        assert campaign.returncode == 0, err
        assert json.loads(out)["cells_measured"] == 2
    done = team.ask_database("select count(*) from flow_run where parameters::text ~ 'data-(first|second)'"
                             " and state_type = 'COMPLETED'")  # fmt: skip
    assert done == "2"
    assert "database is locked" not in team.log("server")
    assert not list(team.data.rglob("prefect.db"))


def test_registering_again_adds_nothing_and_leaves_the_switch_of_the_schedule(team) -> None:
    counts = [f"select count(*) from {table}" for table in ("deployment", "automation", "deployment_schedule")]
    before = [team.ask_database(count) for count in counts]
    team.ask_database("update deployment_schedule set active = true")
    done = team.run("deployments", *team.command("deployments"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nightly-retrain/nightly-retrain" in done.stdout
    assert [team.ask_database(count) for count in counts] == before
    assert "0" not in before
    assert team.ask_database("select distinct active from deployment_schedule") == "t"
    team.ask_database("update deployment_schedule set active = false")


def test_a_dump_of_the_database_restores_the_runs(team, secrets) -> None:
    reach = ["--host", "127.0.0.1", "--port", str(team.ports["5432"]), "--username", "prefect"]
    password = {"PGPASSWORD": secrets["POSTGRES_PASSWORD"]}
    dump = team.folder / "prefect.dump"
    for command in (
        ["pg_dump", *reach, "--format", "custom", "--file", str(dump), "prefect"],
        ["createdb", *reach, "restored"],
        ["pg_restore", *reach, "--clean", "--if-exists", "--exit-on-error", "--dbname", "restored", str(dump)],
    ):
        done = team.run("postgres", *command, **password)
        assert done.returncode == 0, done.stderr
    runs = "select count(*) from flow_run"
    assert team.ask_database(runs, database="restored") == team.ask_database(runs) != "0"
