"""The flow nightly_retrain, which a schedule starts every night: it makes up for missed nights, and retrains."""

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
    """The result of one night: how it dealt with missed runs, and its retraining; None where it did none.

    ``stale`` says in words how old the artifact in use is, if it is too old.
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
    """Retrain the predictor on new measurements, publish it if it is not worse, and watch for drift.

    ``catch_up`` says how missed runs are made up for. Runs may overlap: the second one to publish is judged against the
    version that the first one has published. The run ends Completed whenever it could do its work, whether or not it
    published a version. It ends Failed when storage does not answer, and the champion stays in use. An artifact still
    in use after ``stale_after_days`` raises an event.
    """
    catch_up = apply_catch_up(spec.catch_up)
    get_run_logger().info(catch_up.reason)
    if not catch_up.proceed:
        return NightlyResult(catch_up=catch_up, retraining=None)
    retraining = retrain_predictor(spec.retraining())
    result = NightlyResult(catch_up=catch_up, retraining=retraining, stale=_watch_age(spec))
    # Not an event of the retraining itself: a retraining by hand must not start the watch for silent nights.
    announce("night-ended", name=spec.name, payload={"status": retraining.status, "reasons": retraining.reasons})
    return result


def _watch_age(spec: NightlySpec) -> str | None:
    """In words, how old the artifact in use is, and an event, if it is too old; None otherwise."""
    try:
        in_use = Registry(spec.registry).manifest(f"{spec.name}@{spec.alias}")
    except NotFoundError:
        in_use = None
    except PrecisionTimeError as error:
        # The night's work is done; the age can be checked tomorrow.
        get_run_logger().warning("the age of the artifact in use is not known: %s", error)
        return None
    since = _deployed_at() if in_use is None else _published_at(in_use)
    if since is None:
        return None
    days = (datetime.now(UTC) - since).total_seconds() / _DAY_S
    if days <= spec.stale_after_days:
        return None
    named = f"{spec.name}@{spec.alias}" if in_use is None else in_use.artifact_id
    event = "was never published, and its retraining was set up" if in_use is None else "is in use and was published"
    summary = f"stale: {named} {event} {days:.1f} days ago, more than {spec.stale_after_days:g}"
    get_run_logger().warning(summary)
    announce("stale", name=spec.name, payload={"summary": summary, "named": named, "age_days": round(days, 2)})
    return summary


def _published_at(manifest: ArtifactManifest) -> datetime | None:
    try:
        written = datetime.fromisoformat(manifest.created_at)
    except ValueError:
        return None
    return written if written.tzinfo is not None else written.replace(tzinfo=UTC)


def _deployed_at() -> datetime | None:
    """When the deployment of this run was created; None where it has none or the server does not say."""
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
