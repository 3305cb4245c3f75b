"""The deployments of a Prefect server: which flows, with which defaults, when, and how many runs at once."""

import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from precision_time.storage.errors import InputError
from precision_time.tasks.process_ties import tied_command

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule

__all__ = ["POOL", "Nightly", "PlannedDeployment", "load_forms", "plan_deployments", "register_deployments"]

#: The work pool of processes on the machine with the devices.
POOL = "campaigns"
TAGS = ("precision-time",)
NIGHTLY_CRON = "15 2 * * *"
#: Parameters that registering again keeps as a person has set them on the deployment's page.
KEPT_PARAMETERS = ("stale_after_days",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nightly:
    """When the nightly retraining runs: a cron line in a time zone, and whether the schedule is switched on."""

    cron: str = NIGHTLY_CRON
    timezone: str = "UTC"
    active: bool = False

    def to_prefect(self) -> "CronSchedule":
        """Prefect's own schedule; raises ``InputError`` for a bad cron line or an unknown time zone."""
        from prefect.client.schemas.schedules import CronSchedule

        try:
            return CronSchedule(cron=self.cron, timezone=self.timezone)
        except ValueError as error:
            raise InputError(
                "not a schedule",
                got=f"{self.cron!r} in {self.timezone!r}",
                expected="a cron line of five fields such as '15 2 * * *', and a time zone such as Europe/Berlin",
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDeployment:
    """One deployment to register; ``parameters`` are those of a Quick run, and prefill the form of a Custom run."""

    flow_name: str
    name: str
    entrypoint: str
    description: str
    parameters: dict[str, Any]
    job_variables: dict[str, Any]
    nightly: Nightly | None = None
    tags: tuple[str, ...] = TAGS
    # Two campaigns at once would share the devices, two retrainings would race for the alias: the second run waits.
    concurrency_limit: int = 1
    collision_strategy: str = "ENQUEUE"

    @property
    def full_name(self) -> str:
        """The name by which ``prefect deployment run`` knows it."""
        return f"{self.flow_name}/{self.name}"


def plan_deployments(
    home: Path | str,
    *,
    cluster: str = "auto",
    ranks: tuple[int, ...] = (1, 2),
    nightly: Nightly | None = None,
    stale_after_days: float | None = None,
) -> list[PlannedDeployment]:
    """The deployments for a worker whose data, registry and working directory lie in ``home`` (absolute).

    The form of a campaign is prefilled with ``cluster`` and ``ranks``. ``stale_after_days`` belongs to the nightly
    retraining; with None its deployment keeps its value, or takes the form's default. Paths in the parameters are
    absolute: a run starts in its worker's temporary folder, where files at relative paths would be lost.
    """
    home = str(home)
    data, registry = f"{home}/precision-time-data", f"{home}/precision-time-registry"
    # When its worker dies, a run gets SIGTERM, which Prefect reports as a crash.
    command = shlex.join(tied_command([sys.executable, "-m", "prefect.engine"], stop=signal.SIGTERM))
    job_variables = {"working_dir": home, "env": {"PRECISION_TIME_REGISTRY": registry}, "command": command}
    campaign = {
        "name": "quick-run",
        "models": ["mlp", "gpt2_mini"],
        "precisions": ["fp32", "amp_bf16"],
        "gpus": list(ranks),
        "batch_sizes": [4],
        "measured_steps": 10,
        "seconds_per_cell": 5,
        "cluster": cluster,
        "data": data,
        "registry": registry,
        "retrain_after": False,
    }
    retraining = {"data": data, "registry": registry, "name": "default"}
    staleness = {} if stale_after_days is None else {"stale_after_days": stale_after_days}
    return [
        PlannedDeployment(
            flow_name="profiling-campaign",
            name="profiling-campaign",
            entrypoint="precision_time.flows.campaigns.campaign.profiling_campaign",
            description="Time real training runs over a grid of cells; run it again to measure what is missing. "
            "Quick run measures a small grid in a minute or two.",
            parameters={"spec": campaign},
            job_variables=job_variables,
        ),
        PlannedDeployment(
            flow_name="retrain-predictor",
            name="retrain-predictor",
            entrypoint="precision_time.flows.retraining.retrain.retrain_predictor",
            description="Fit a predictor on the recorded timings, validate it, and publish it if it passes the gate.",
            parameters={"spec": retraining},
            job_variables=job_variables,
        ),
        PlannedDeployment(
            flow_name="nightly-retrain",
            name="nightly-retrain",
            entrypoint="precision_time.flows.retraining.nightly.nightly_retrain",
            description="Watch for drift, retrain on new data, and publish a predictor that is not worse than the "
            "champion. One run makes up for several missed nights.",
            parameters={"spec": {**retraining, "catch_up": "latest", **staleness}},
            nightly=nightly or Nightly(),
            job_variables=job_variables,
        ),
        PlannedDeployment(
            flow_name="roll-back",
            name="roll-back",
            entrypoint="precision_time.flows.retraining.roll_back.roll_back_predictor",
            description="Point the alias of a predictor at its previous version, or at the version given.",
            parameters={"spec": {"registry": registry, "name": "default"}},
            job_variables=job_variables,
        ),
    ]


def load_forms(planned: list[PlannedDeployment]) -> dict[str, dict[str, Any]]:
    """By full name, the schema of each flow's parameters, from which Prefect makes its form; imports the flows."""
    from prefect.utilities.callables import parameter_schema

    forms = {}
    for deployment in planned:
        module, _, function = deployment.entrypoint.rpartition(".")
        flow = getattr(import_module(module), function)
        forms[deployment.full_name] = parameter_schema(flow).model_dump_for_openapi()
    return forms


def register_deployments(
    planned: list[PlannedDeployment], forms: Mapping[str, dict[str, Any]], *, version: str, keep_schedules: bool = False
) -> dict[str, UUID]:
    """Create the work pool, create or update the deployments on the configured server; returns ids by full name.

    ``forms`` are those of ``load_forms``. With ``keep_schedules`` an existing deployment keeps its schedules, also
    those that are switched off.
    """
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        _make_pool(client)
        return {
            deployment.full_name: _register(
                client, deployment, forms[deployment.full_name], version=version, keep_schedules=keep_schedules
            )
            for deployment in planned
        }


def _make_pool(client: "SyncPrefectClient") -> None:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(WorkPoolCreate(name=POOL, type=ProcessWorker.type, base_job_template=template))


def _register(
    client: "SyncPrefectClient", planned: PlannedDeployment, form: dict[str, Any], *, version: str, keep_schedules: bool
) -> UUID:
    from prefect.client.schemas.objects import ConcurrencyOptions

    return client.create_deployment(
        flow_id=client.create_flow_from_name(planned.flow_name),
        name=planned.name,
        version=version,
        entrypoint=planned.entrypoint,
        description=planned.description,
        tags=list(planned.tags),
        parameters=_merge_parameters(client, planned),
        parameter_openapi_schema=form,
        enforce_parameter_schema=True,
        schedules=_choose_schedules(client, planned, keep=keep_schedules),
        concurrency_limit=planned.concurrency_limit,
        concurrency_options=ConcurrencyOptions.model_validate({"collision_strategy": planned.collision_strategy}),
        work_pool_name=POOL,
        pull_steps=[],
        job_variables=planned.job_variables,
    )


def _merge_parameters(client: "SyncPrefectClient", planned: PlannedDeployment) -> dict[str, Any]:
    """The planned parameters, and those of ``KEPT_PARAMETERS`` that the server has and the plan leaves open."""
    from prefect.exceptions import ObjectNotFound

    try:
        existing = client.read_deployment_by_name(planned.full_name).parameters.get("spec", {})
    except ObjectNotFound:
        existing = {}
    kept = {name: existing[name] for name in KEPT_PARAMETERS if name in existing}
    return {"spec": kept | planned.parameters["spec"]}


def _choose_schedules(
    client: "SyncPrefectClient", planned: PlannedDeployment, *, keep: bool
) -> "list[DeploymentScheduleCreate]":
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.exceptions import ObjectNotFound

    if keep:
        names = ("schedule", "active", "max_scheduled_runs", "parameters", "slug")
        try:
            existing = client.read_deployment_by_name(planned.full_name).schedules
            return [DeploymentScheduleCreate(**{name: getattr(entry, name) for name in names}) for entry in existing]
        except ObjectNotFound:
            pass
    if planned.nightly is None:
        return []
    return [DeploymentScheduleCreate(schedule=planned.nightly.to_prefect(), active=planned.nightly.active)]
