"""The deployments: the code and deploy/prefect.yaml say the same, Quick run is a real campaign, the form holds."""

import importlib.metadata
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.schema_tools.validation import validate

from precision_time.flows.planning.spec import CampaignSpec
from precision_time.flows.retraining.spec import NightlySpec, RetrainSpec, RollBackSpec
from precision_time.flows.stack.deployments import POOL, Nightly, load_forms, plan_deployments
from precision_time.storage.errors import InputError

HOME = "/srv/precision-time"


@pytest.fixture(scope="module")
def forms() -> dict[str, dict[str, Any]]:
    return load_forms(plan_deployments(HOME))


def read_yaml() -> dict[str, dict[str, Any]]:
    text = Path(__file__).parents[3].joinpath("deploy", "prefect.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(text.replace("{{ $HOME }}", HOME))
    assert document["pull"] == []
    return {entry["name"]: entry for entry in document["deployments"]}


def as_yaml(name: str) -> dict[str, Any]:
    """The entry that prefect.yaml should have for the deployment ``name``."""
    (planned,) = [deployment for deployment in plan_deployments(HOME) if deployment.name == name]
    job_variables = dict(planned.job_variables)
    job_variables["command"] = job_variables["command"].replace(sys.executable, "python")
    entry: dict[str, Any] = {
        "name": planned.name,
        "version": importlib.metadata.version("precision-time"),
        "entrypoint": planned.entrypoint,
        "description": planned.description,
        "tags": list(planned.tags),
        "parameters": planned.parameters,
        "work_pool": {"name": POOL, "job_variables": job_variables},
        "concurrency_limit": {"limit": planned.concurrency_limit, "collision_strategy": planned.collision_strategy},
    }
    return entry | ({"schedules": [asdict(planned.nightly)]} if planned.nightly else {})


def test_the_file_for_teams_says_what_the_code_says() -> None:
    written = read_yaml()
    names = {deployment.name for deployment in plan_deployments(HOME)}
    assert names == {"profiling-campaign", "retrain-predictor", "nightly-retrain", "roll-back"}
    assert written == {name: as_yaml(name) for name in names}


def test_every_deployment_starts_with_parameters_that_its_flow_takes(forms: dict[str, dict[str, Any]]) -> None:
    specs = {
        "profiling-campaign": CampaignSpec,
        "retrain-predictor": RetrainSpec,
        "nightly-retrain": NightlySpec,
        "roll-back": RollBackSpec,
    }
    for planned in plan_deployments(HOME):
        assert specs[planned.name].model_validate(planned.parameters["spec"])
        assert validate(planned.parameters, forms[planned.full_name]) == []
        assert all(value.startswith(HOME) for value in planned.parameters["spec"].values() if str(value)[:1] == "/")


def test_a_quick_run_is_a_small_campaign_on_the_cluster_that_is_up() -> None:
    planned = plan_deployments(HOME, cluster="tcp://127.0.0.1:8786", ranks=(1,))[0]
    spec = CampaignSpec.model_validate(planned.parameters["spec"])
    assert len(spec.cells()) == 4
    assert len(spec.cells()) * spec.seconds_per_cell < 60
    assert spec.cluster == "tcp://127.0.0.1:8786"
    assert (spec.retrain_after, spec.registry) == (False, f"{HOME}/precision-time-registry")


def test_the_form_has_chips_for_what_is_built_in_and_takes_what_is_not(forms: dict[str, dict[str, Any]]) -> None:
    form = forms["profiling-campaign/profiling-campaign"]
    fields = form["definitions"]["CampaignSpec"]["properties"]
    models, precisions = (fields[name]["anyOf"][0]["items"]["enum"] for name in ("models", "precisions"))
    assert {"mlp", "resnet50"} <= set(models)
    assert {"fp32", "amp_bf16"} <= set(precisions)
    assert fields["device"]["enum"] == ["auto", "cpu", "cuda"]
    assert fields["checkpointing"]["items"]["enum"] == ["none", "full"]
    assert fields["gpus"]["items"] == {"type": "integer", "minimum": 1, "maximum": 65_536}

    spec = plan_deployments(HOME)[0].parameters["spec"]
    typed = spec | {"models": ["mine.models:make_net"], "precisions": ["16-mixed"]}
    assert validate({"spec": typed}, form) == []
    assert CampaignSpec.model_validate(typed).precisions == ("amp_fp16",)
    for wrong in (
        {"gpus": [0]},
        {"batch_sizes": []},
        {"device": "tpu"},
        {"measured_steps": 0},
        {"checkpointing": ["x"]},
    ):
        assert validate({"spec": spec | wrong}, form) != []


@pytest.mark.parametrize(
    ("cron", "timezone"), [("every night", "UTC"), ("15 2 * * *", "Mars/Olympus"), ("99 2 * * *", "UTC")]
)
def test_a_schedule_that_cannot_be_is_refused(cron: str, timezone: str) -> None:
    with pytest.raises(InputError, match="five fields"):
        Nightly(cron=cron, timezone=timezone).to_prefect()


@pytest.mark.usefixtures("prefect_server")
def test_registering_again_renews_and_keeps_the_schedule_unless_another_is_given(
    forms: dict[str, dict[str, Any]],
) -> None:
    from prefect.client.orchestration import get_client

    from precision_time.flows.stack.deployments import register_deployments

    def nightly_schedule() -> tuple[str, str, bool]:
        with get_client(sync_client=True) as client:
            (entry,) = client.read_deployment_by_name("nightly-retrain/nightly-retrain").schedules
        return entry.schedule.cron, entry.schedule.timezone, entry.active

    first = register_deployments(plan_deployments(HOME), forms, version="1", keep_schedules=True)
    assert nightly_schedule() == ("15 2 * * *", "UTC", False)
    theirs = Nightly(cron="0 4 * * 1", timezone="Europe/Berlin", active=True)
    assert register_deployments(plan_deployments(HOME, nightly=theirs), forms, version="2") == first
    register_deployments(plan_deployments(f"{HOME}/moved"), forms, version="3", keep_schedules=True)
    assert nightly_schedule() == ("0 4 * * 1", "Europe/Berlin", True)
    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("profiling-campaign/profiling-campaign")
    assert deployment.version == "3"
    assert deployment.parameters["spec"]["data"] == f"{HOME}/moved/precision-time-data"
    assert deployment.global_concurrency_limit is not None
    assert deployment.global_concurrency_limit.limit == 1
    assert deployment.concurrency_options is not None
    assert deployment.concurrency_options.collision_strategy == "ENQUEUE"
    assert deployment.enforce_parameter_schema


@pytest.mark.usefixtures("prefect_server")
def test_registering_again_keeps_when_a_predictor_is_stale_unless_it_is_given(forms: dict[str, dict[str, Any]]) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentUpdate

    from precision_time.flows.stack.deployments import register_deployments

    def stale_after() -> float | None:
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name("nightly-retrain/nightly-retrain")
        assert validate(deployment.parameters, forms["nightly-retrain/nightly-retrain"]) == []
        return deployment.parameters["spec"].get("stale_after_days")

    ids = register_deployments(plan_deployments(HOME), forms, version="1")
    assert stale_after() is None
    spec = plan_deployments(HOME)[2].parameters["spec"] | {"stale_after_days": 14.0, "catch_up": "all"}
    with get_client(sync_client=True) as client:
        client.update_deployment(ids["nightly-retrain/nightly-retrain"], DeploymentUpdate(parameters={"spec": spec}))
    register_deployments(plan_deployments(HOME), forms, version="2")
    assert stale_after() == 14.0
    register_deployments(plan_deployments(HOME, stale_after_days=7), forms, version="3")
    assert stale_after() == 7
