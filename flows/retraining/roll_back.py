"""The flow roll_back_predictor, which puts an earlier version of a predictor into use again."""

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
    """Point an alias at its previous version, or at the version given, and report both versions.

    The version taken out of use stays in the registry; nightly retraining neither puts it into use again nor trains the
    same data again. Fails for a version that does not exist or is damaged.
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
    summary = f"{spec.name}@{spec.alias} was version {before} and is version {after}"
    get_run_logger().info(summary)
    page = (
        f"# Roll back of {spec.name}\n\n{summary}, which was published {manifest.created_at} "
        f"and trained on {manifest.training_rows} rows.\n"
    )
    LiveArtifact("markdown", "roll-back", description=summary).write(page)
    announce("rolled-back", name=spec.name, payload=result.model_dump())
    return result
