"""retrain_predictor: snapshot, train, validate, gate, publish; it ends well also when nothing is published."""

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from precision_time.flows.artifacts import ProgressArtifact, publish_pages
from precision_time.flows.spec import RetrainSpec
from precision_time.flows.summary import RetrainResult, RetrainStatus
from precision_time.predictor.explain import feature_importances
from precision_time.storage.registry import Registry
from precision_time.tasks.publish import find_champion, is_trained_on, publish_predictor, trained_cells
from precision_time.tasks.report import accuracy_rows, write_report
from precision_time.tasks.train import Snapshot, fit_predictor, take_snapshot
from precision_time.tasks.validate import Accuracy, judge_challenger, validate_predictor

__all__ = ["retrain_predictor", "run_retraining"]


# Steps hand objects over in memory: nothing is cached by a hash of them or written as a result.
snapshot_task = task(name="snapshot", cache_policy=NO_CACHE, persist_result=False)(take_snapshot)
train_task = task(name="train", cache_policy=NO_CACHE, persist_result=False)(fit_predictor)
validate_task = task(name="validate", cache_policy=NO_CACHE, persist_result=False)(validate_predictor)
publish_task = task(name="publish", cache_policy=NO_CACHE, persist_result=False)(publish_predictor)


@flow(name="retrain-predictor", result_serializer="json", persist_result=False)
def retrain_predictor(spec: RetrainSpec) -> RetrainResult:
    """Train on recorded timings, the public table or both, validate, and publish what passes the gate.

    The run ends Completed with its reasons when the gate is not passed or no data is new: the champion then stays.
    """
    logger = get_run_logger()
    progress = ProgressArtifact("retrain-progress", description="Retraining: snapshot, train, validate, publish")

    snapshot = snapshot_task(
        spec.data, public=spec.public, measurements=spec.measurements, holdout_models=spec.holdout_models
    )
    for path, reason in snapshot.problems:
        logger.warning("left out %s: %s", path, reason)
    progress.update(0.2)

    champion = find_champion(spec.registry, f"{spec.name}@{spec.alias}")
    champion_id = champion.manifest.artifact_id if champion else None
    if champion is not None and is_trained_on(champion, snapshot, holdout_models=spec.holdout_models):
        progress.update(1.0)
        return _conclude(
            spec,
            snapshot,
            "nothing new",
            champion_id,
            [f"no data is new since {champion_id}"],
            champion.manifest.accuracy,
        )

    predictor = train_task(snapshot, seed=spec.seed)
    progress.update(0.4)
    validation = validate_task(snapshot, level=spec.level, seed=spec.seed)
    progress.update(0.8)
    decision = judge_challenger(
        snapshot,
        validation,
        champion=champion,
        champion_cells=trained_cells(spec.registry, champion) if champion else frozenset(),
    )
    report = write_report(
        snapshot,
        validation,
        decision,
        holdout_models=spec.holdout_models,
        importances=feature_importances(predictor),
    )
    publish_pages(
        table=accuracy_rows(validation.accuracy),
        report=report,
        key="retrain-accuracy",
        description=f"Accuracy of {spec.name} by split and method; fractions, rmse in seconds",
    )
    if not decision.passed:
        progress.update(1.0)
        return _conclude(spec, snapshot, "held back", champion_id, list(decision.reasons), validation.accuracy)
    manifest = publish_task(
        predictor.with_intervals(validation.radii, level=spec.level).with_effects(validation.effects),
        snapshot,
        validation,
        report=report,
        registry=spec.registry,
        name=spec.name,
        alias=spec.alias,
        holdout_models=spec.holdout_models,
        seed=spec.seed,
    )
    Registry(spec.registry).verify(manifest.artifact_id)
    progress.update(1.0)
    reasons = list(decision.reasons)
    return _conclude(spec, snapshot, "published", manifest.artifact_id, reasons, validation.accuracy)


def _conclude(
    spec: RetrainSpec,
    snapshot: Snapshot,
    status: RetrainStatus,
    artifact_id: str | None,
    reasons: list[str],
    accuracy: Accuracy,
) -> RetrainResult:
    logger = get_run_logger()
    for reason in reasons:
        logger.info(reason)
    return RetrainResult(
        status=status,
        artifact_id=artifact_id,
        reasons=reasons,
        left_out=[f"{path}: {reason}" for path, reason in snapshot.problems],
        rows=len(snapshot.training),
        holdout_models=list(spec.holdout_models),
        training_data_sha256=snapshot.sha256,
        accuracy=accuracy,
    )


def run_retraining(spec: RetrainSpec) -> RetrainResult:
    """Run the flow here. What makes it senseless (no data, an unknown model to hold out) is raised before it starts."""
    Registry(spec.registry).names()
    # Read once more inside the flow: an error there would reach the terminal as Prefect's traceback first.
    take_snapshot(spec.data, public=spec.public, measurements=spec.measurements, holdout_models=spec.holdout_models)
    return retrain_predictor(spec)
