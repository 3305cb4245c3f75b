"""nightly_retrain: what a schedule runs every night, also after nights on which nothing could run."""

from datetime import UTC, datetime

from prefect import flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from pydantic import BaseModel, ConfigDict

from precision_time.flows.ground.plain_failures import fail_plainly
from precision_time.flows.retraining.catch_up import CatchUp, apply_catch_up
from precision_time.flows.retraining.predictor_events import announce
from precision_time.flows.retraining.result import RetrainResult
from precision_time.flows.retraining.retrain import retrain_predictor
from precision_time.flows.retraining.spec import NightlySpec
from precision_time.storage.errors import NotFoundError, PrecisionTimeError
from precision_time.storage.manifests import ArtifactManifest
from precision_time.storage.registry import Registry

__all__ = ["NightlyResult", "nightly_retrain"]

_DAY_S = 86_400


class NightlyResult(BaseModel):
    """What one night did: how missed runs were made up for, and the retraining; None where this run left it out.

    ``stale`` says in words how old the artifact in use is, where that is older than it may be.
    """

    model_config = ConfigDict(frozen=True)

    catch_up: CatchUp
    retraining: RetrainResult | None
    stale: str | None = None


@flow(
    name="nightly-retrain", flow_run_name="nightly retrain {spec.name}", result_serializer="json", persist_result=False
)
@fail_plainly
def nightly_retrain(spec: NightlySpec) -> NightlyResult:
    """Retrain the predictor on what was measured since, publish it if it is not worse, and watch for drift.

    A run that was missed is made up for as ``catch_up`` says. Runs beside each other are safe: the second to publish
    is judged against what the first has published. The run ends Completed whenever it could do its work, whether or
    not something was published, and Failed when storage stays away; the champion then stays in use. An artifact that
    is still in use after ``stale_after_days`` is told of by an event.
    """
    catch_up = apply_catch_up(spec.catch_up)
    get_run_logger().info(catch_up.reason)
    if not catch_up.proceed:
        return NightlyResult(catch_up=catch_up, retraining=None)
    retraining = retrain_predictor(spec.retraining())
    result = NightlyResult(catch_up=catch_up, retraining=retraining, stale=_watch_age(spec))
    # Not the retraining's own event: whoever retrains by hand once does not promise to do it every night.
    announce("night-ended", name=spec.name, payload={"status": retraining.status, "reasons": retraining.reasons})
    return result


def _watch_age(spec: NightlySpec) -> str | None:
    """How old what is in use is, and an event, where that is older than it may be."""
    try:
        in_use = Registry(spec.registry).manifest(f"{spec.name}@{spec.alias}")
    except NotFoundError:
        in_use = None
    except PrecisionTimeError as error:
        # The work of the night is done; whether it is stale can be said tomorrow.
        get_run_logger().warning("the age of what is in use is not known: %s", error)
        return None
    since = _deployed_at() if in_use is None else _published_at(in_use)
    if since is None:
        return None
    days = (datetime.now(UTC) - since).total_seconds() / _DAY_S
    if days <= spec.stale_after_days:
        return None
    named = f"{spec.name}@{spec.alias}" if in_use is None else in_use.artifact_id
    event = "was never published, and its retraining was set up" if in_use is None else "is in use and was published"
    told = f"stale: {named} {event} {days:.1f} days ago, more than {spec.stale_after_days:g}"
    get_run_logger().warning(told)
    announce("stale", name=spec.name, payload={"summary": told, "named": named, "age_days": round(days, 2)})
    return told


def _published_at(manifest: ArtifactManifest) -> datetime | None:
    try:
        written = datetime.fromisoformat(manifest.created_at)
    except ValueError:
        return None
    return written if written.tzinfo is not None else written.replace(tzinfo=UTC)


def _deployed_at() -> datetime | None:
    """When the deployment of this run was made; None where it has none or the server does not say."""
    context = FlowRunContext.get()
    run = context.flow_run if context is not None else None
    if run is None or run.deployment_id is None:
        return None
    try:
        with get_client(sync_client=True) as client:
            return client.read_deployment(run.deployment_id).created
    except Exception as error:
        get_run_logger().warning("the age of the deployment is not known: %s", error)
        return None
