"""roll_back_predictor: puts an earlier version of a predictor into use again, from a form or a schedule."""

from prefect import flow, get_run_logger
from pydantic import BaseModel, ConfigDict

from precision_time.flows.ground.plain_failures import fail_plainly
from precision_time.flows.ground.prefect_artifacts import LiveArtifact
from precision_time.flows.retraining.predictor_events import announce
from precision_time.flows.retraining.spec import RollBackSpec
from precision_time.storage.registry import Registry

__all__ = ["RollBackResult", "roll_back_predictor"]


class RollBackResult(BaseModel):
    """Which version the alias pointed to, and which one it points to now."""

    model_config = ConfigDict(frozen=True)

    name: str
    alias: str
    from_version: int
    to_version: int


@flow(
    name="roll-back", flow_run_name="roll back {spec.name}@{spec.alias}", result_serializer="json", persist_result=False
)
@fail_plainly
def roll_back_predictor(spec: RollBackSpec) -> RollBackResult:
    """Point an alias at the version it pointed to before, or at a named one, and say from which to which.

    The version left behind stays in the registry; nightly retraining does not put it, or its like from the same data,
    into use again. Fails for a version that is not there or not what was published.
    """
    shelf = Registry(spec.registry)
    _, before = shelf.resolve(f"{spec.name}@{spec.alias}")
    if spec.to_version is None:
        after = shelf.roll_back(spec.name, spec.alias)
    else:
        after = spec.to_version
        shelf.verify(f"{spec.name}@{after}")
        shelf.set_alias(spec.name, spec.alias, after)
    result = RollBackResult(name=spec.name, alias=spec.alias, from_version=before, to_version=after)
    manifest = shelf.manifest(f"{spec.name}@{after}")
    said = f"{spec.name}@{spec.alias} was version {before} and is version {after}"
    get_run_logger().info(said)
    page = (
        f"# Roll back of {spec.name}\n\n{said}, which was published {manifest.created_at} "
        f"and trained on {manifest.training_rows} rows.\n"
    )
    LiveArtifact("markdown", "roll-back", description=said).write(page)
    announce("rolled-back", name=spec.name, payload=result.model_dump())
    return result
