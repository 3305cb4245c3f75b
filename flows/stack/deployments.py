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
#: Parameters that a person may set on the deployment's page, and that registering again leaves as they are.
KEPT = ("stale_after_days",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nightly:
    """When the nightly retraining runs: a cron line in a time zone, and whether the schedule is switched on."""

    cron: str = NIGHTLY_CRON
    timezone: str = "UTC"
    active: bool = False

    def schedule(self) -> "CronSchedule":
        """As Prefect wants it; raises ``InputError`` for what is no cron line and no time zone."""
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
    """One deployment as the server is told of it; ``parameters`` are those of a Quick run, and prefill the form."""

    flow_name: str
    name: str
    entrypoint: str
    description: str
    parameters: dict[str, Any]
    job_variables: dict[str, Any]
    nightly: Nightly | None = None
    tags: tuple[str, ...] = TAGS
    # Two campaigns at once would share the devices, two retrainings would race for the alias: the second one waits.
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

    Campaigns start with ``cluster`` and ``ranks`` in the form. ``stale_after_days`` is that of the nightly retraining;
    None leaves what its deployment has, or else the form's own. Paths in the parameters are absolute: a run starts in a
    folder of its worker, and a relative one would vanish with it.
    """
    home = str(home)
    data, registry = f"{home}/precision-time-data", f"{home}/precision-time-registry"
    # A run ends with its worker, and says so on its way out: SIGTERM is what Prefect reports as a crash.
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
            description="Time real training runs over a grid of cells; a second run measures what is missing. "
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
            description="Watch for drift, retrain on what is new, and publish only what is not worse than the "
            "champion. Of several missed nights one run does the work.",
            parameters={"spec": {**retraining, "catch_up": "latest", **staleness}},
            nightly=nightly or Nightly(),
            job_variables=job_variables,
        ),
        PlannedDeployment(
            flow_name="roll-back",
            name="roll-back",
            entrypoint="precision_time.flows.retraining.roll_back.roll_back_predictor",
            description="Point the alias of a predictor at the version before, or at one that is named.",
            parameters={"spec": {"registry": registry, "name": "default"}},
            job_variables=job_variables,
        ),
    ]


def load_forms(planned: list[PlannedDeployment]) -> dict[str, dict[str, Any]]:
    """The schema of each flow's parameters by full name, which is the form of its runs; imports the flows."""
    from prefect.utilities.callables import parameter_schema

    forms = {}
    for one in planned:
        module, _, function = one.entrypoint.rpartition(".")
        flow = getattr(import_module(module), function)
        forms[one.full_name] = parameter_schema(flow).model_dump_for_openapi()
    return forms


def register_deployments(
    planned: list[PlannedDeployment], forms: Mapping[str, dict[str, Any]], *, version: str, keep_schedules: bool = False
) -> dict[str, UUID]:
    """Create or renew the work pool and the deployments on the configured server; returns their ids by full name.

    ``forms`` are those of ``load_forms``. With ``keep_schedules`` a deployment that is there already keeps the
    schedules it has, switched off ones too.
    """
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        _make_pool(client)
        return {
            one.full_name: _register(client, one, forms[one.full_name], version=version, keep=keep_schedules)
            for one in planned
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
    client: "SyncPrefectClient", planned: PlannedDeployment, form: dict[str, Any], *, version: str, keep: bool
) -> UUID:
    from prefect.client.schemas.objects import ConcurrencyOptions

    return client.create_deployment(
        flow_id=client.create_flow_from_name(planned.flow_name),
        name=planned.name,
        version=version,
        entrypoint=planned.entrypoint,
        description=planned.description,
        tags=list(planned.tags),
        parameters=_parameters(client, planned),
        parameter_openapi_schema=form,
        enforce_parameter_schema=True,
        schedules=_schedules(client, planned, keep=keep),
        concurrency_limit=planned.concurrency_limit,
        concurrency_options=ConcurrencyOptions.model_validate({"collision_strategy": planned.collision_strategy}),
        work_pool_name=POOL,
        pull_steps=[],
        job_variables=planned.job_variables,
    )


def _parameters(client: "SyncPrefectClient", planned: PlannedDeployment) -> dict[str, Any]:
    """Those of the plan, and what a person has set on the deployment's page and the plan leaves open."""
    from prefect.exceptions import ObjectNotFound

    try:
        standing = client.read_deployment_by_name(planned.full_name).parameters.get("spec", {})
    except ObjectNotFound:
        standing = {}
    kept = {name: standing[name] for name in KEPT if name in standing}
    return {"spec": kept | planned.parameters["spec"]}


def _schedules(
    client: "SyncPrefectClient", planned: PlannedDeployment, *, keep: bool
) -> "list[DeploymentScheduleCreate]":
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.exceptions import ObjectNotFound

    if keep:
        try:
            found = client.read_deployment_by_name(planned.full_name).schedules
            return [DeploymentScheduleCreate(**_kept(schedule)) for schedule in found]
        except ObjectNotFound:
            pass
    if planned.nightly is None:
        return []
    return [DeploymentScheduleCreate(schedule=planned.nightly.schedule(), active=planned.nightly.active)]


def _kept(schedule: Any) -> Mapping[str, Any]:
    names = ("schedule", "active", "max_scheduled_runs", "parameters", "slug")
    return {name: getattr(schedule, name) for name in names}
