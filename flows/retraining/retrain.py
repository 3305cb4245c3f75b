"""retrain_predictor: snapshot, drift watch, train, validate, gate, publish; it ends well also without a new version."""

import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from prefect import State, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from precision_time.flows.ground.plain_failures import fail_plainly
from precision_time.flows.ground.prefect_artifacts import LiveTable, ProgressArtifact, publish_pages
from precision_time.flows.retraining.predictor_events import PredictorEvent, announce
from precision_time.flows.retraining.result import RetrainResult, RetrainStatus
from precision_time.flows.retraining.spec import RetrainSpec
from precision_time.predictor.answering.explain import feature_importances
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.storage.errors import InputError, PrecisionTimeError, StorageError, TooLittleDataError
from precision_time.storage.manifests import ArtifactManifest
from precision_time.storage.registry import Registry
from precision_time.tasks.publishing.drift import DriftReport, watch_drift
from precision_time.tasks.publishing.gate import GateDecision, judge_challenger
from precision_time.tasks.publishing.plots import draw_retraining_plots, show_plots
from precision_time.tasks.publishing.publish import publish_predictor
from precision_time.tasks.publishing.publish_in_turn import Standing, find_standing, publish_in_turn
from precision_time.tasks.publishing.report import accuracy_rows, write_report
from precision_time.tasks.publishing.retraining_memory import Notes
from precision_time.tasks.publishing.train import Snapshot, fit_predictor, take_snapshot
from precision_time.tasks.publishing.validate import Accuracy, Validation, validate_predictor

__all__ = ["retrain_predictor", "run_retraining"]

Result = TypeVar("Result")

#: Runs that published while this one judged, after which it leaves the rest to the next night.
MOST_ROUNDS = 3
_EVENTS: dict[RetrainStatus, PredictorEvent] = {
    "published": "published", "held back": "held-back", "nothing new": "nothing-new",
    "too little data": "too-little-data",
}  # fmt: skip


def _is_away(task: Any, task_run: Any, state: Any) -> bool:
    """Whether a step failed because a store did not answer: anything else fails again in the same way."""
    return isinstance(state.result(raise_on_failure=False), StorageError)


@task(cache_policy=NO_CACHE, persist_result=False)
@fail_plainly
def run_step(step: Callable[[], object]) -> object:
    """Run one step; its objects stay in memory, neither hashed for a cache nor written as a result."""
    # A function, not its arguments: Prefect goes through each object of an argument, of 10,000 rows for minutes.
    return step()


def _take(name: str, step: Callable[[], Result], *, patience: Mapping[str, Any] | None = None) -> Result:
    """What ``step`` gives, as a task run ``name`` of Prefect; raises what it raises."""
    taken: Any = run_step.with_options(name=name, **patience or {})(step)
    result: Result = taken.result() if isinstance(taken, State) else taken
    return result


@flow(name="retrain-predictor", flow_run_name="retrain {spec.name}", result_serializer="json", persist_result=False)
@fail_plainly
def retrain_predictor(spec: RetrainSpec) -> RetrainResult:
    """Train on recorded timings, the public table or both, validate, and publish what passes the gate.

    The run ends Completed with its reasons when the gate is not passed, no data is new or there is too little of it,
    and Failed when storage does not answer after as many attempts as asked for; in all of these the champion stays.
    """
    logger = get_run_logger()
    progress = ProgressArtifact("retrain-progress", description="Retraining: snapshot, train, validate, publish")

    snapshot = _take("snapshot", functools.partial(_read, spec), patience=_patience(spec))
    if isinstance(snapshot, TooLittleDataError):
        progress.update(1.0)
        return _wait_for_data(spec, snapshot)
    for path, reason in snapshot.problems:
        logger.warning("left out %s: %s", path, reason)
    progress.update(0.2)

    standing = _look_up(spec, snapshot)
    drift = _watch(spec, snapshot, standing)
    if standing.unneeded is not None:
        progress.update(1.0)
        accuracy = {} if standing.champion is None else standing.champion.manifest.accuracy
        return _conclude(
            spec, snapshot, "nothing new", standing, reasons=[standing.unneeded], accuracy=accuracy, drift=drift
        )

    predictor = _take("train", functools.partial(fit_predictor, snapshot, seed=spec.seed))
    progress.update(0.4)
    validation = _take("validate", functools.partial(validate_predictor, snapshot, level=spec.level, seed=spec.seed))
    progress.update(0.8)
    result = _judge_and_publish(
        spec,
        snapshot,
        predictor.with_intervals(validation.radii, level=spec.level).with_covariances(validation.covariances),
        validation,
        standing=standing,
        drift=drift,
    )
    progress.update(1.0)
    return result


def _read(spec: RetrainSpec) -> Snapshot | TooLittleDataError:
    """The snapshot; too little data is an answer and no failure of the step."""
    try:
        return take_snapshot(
            spec.data, public=spec.public, measurements=spec.measurements, holdout_models=spec.holdout_models
        )
    except TooLittleDataError as error:
        return error


def _wait_for_data(spec: RetrainSpec, error: TooLittleDataError) -> RetrainResult:
    get_run_logger().info(error.message)
    result = RetrainResult(
        status="too little data",
        artifact_id=None,
        reasons=[error.message],
        left_out=[],
        rows=0,
        holdout_models=list(spec.holdout_models),
        training_data_sha256="",
        accuracy={},
    )
    _announce(spec, result)
    return result


def _judge_and_publish(
    spec: RetrainSpec,
    snapshot: Snapshot,
    predictor: HierarchicalPredictor,
    validation: Validation,
    *,
    standing: Standing,
    drift: DriftReport | None,
) -> RetrainResult:
    """The gate against the champion, and again against any other that a run beside this one publishes meanwhile."""
    token, pictures = uuid.uuid4().hex, _draw(validation, snapshot)
    for _ in range(MOST_ROUNDS):
        decision = judge_challenger(snapshot, validation, champion=standing.champion, trained=standing.trained)
        report = write_report(
            snapshot,
            validation,
            decision,
            holdout_models=spec.holdout_models,
            importances=feature_importances(predictor),
            drift=drift,
            pictures=show_plots(pictures),
        )
        _show(spec, validation, decision, report=report, pictures=pictures)
        conclude = functools.partial(
            _conclude, spec, snapshot, accuracy=validation.accuracy, decision=decision, drift=drift
        )
        if not decision.passed:
            _leave_note(
                functools.partial(
                    _notes(spec).hold_back,
                    snapshot.sha256,
                    champion=standing.champion,
                    settings_sha256=spec.settings_sha256,
                    reasons=decision.reasons,
                )
            )
            return conclude("held back", standing, reasons=decision.reasons)
        manifest = _publish(
            spec, snapshot, predictor, validation, report=report, plots=pictures, standing=standing, token=token
        )
        if manifest is not None:
            return conclude("published", standing, reasons=decision.reasons, published=manifest)
        get_run_logger().info("another run has published meanwhile: judging against the champion of now")
        standing = _look_up(spec, snapshot)
        if standing.unneeded is not None:
            return conclude("nothing new", standing, reasons=[standing.unneeded])
    return conclude(
        "held back",
        standing,
        reasons=[f"{MOST_ROUNDS} other runs published while this one judged: the next one goes on"],
    )


def _publish(
    spec: RetrainSpec,
    snapshot: Snapshot,
    predictor: HierarchicalPredictor,
    validation: Validation,
    *,
    report: str,
    plots: Mapping[str, bytes],
    standing: Standing,
    token: str,
) -> ArtifactManifest | None:
    """The new version, or None where another run has moved the alias meanwhile."""
    publish = functools.partial(
        publish_predictor,
        predictor,
        snapshot,
        validation,
        report=report,
        registry=spec.registry,
        name=spec.name,
        alias=None,
        holdout_models=spec.holdout_models,
        seed=spec.seed,
        plots=plots,
    )
    try:
        return _take(
            "publish",
            functools.partial(
                publish_in_turn,
                publish,
                registry=spec.registry,
                name=spec.name,
                alias=spec.alias,
                champion=standing.champion,
                sha256=snapshot.sha256,
                token=token,
            ),
            patience=_patience(spec),
        )
    except StorageError as error:
        in_use = "nothing is" if standing.champion is None else f"{standing.champion.manifest.artifact_id} stays"
        raise StorageError(
            f"the predictor passed the gate and was not published, {in_use} in use",
            got=f"{spec.publish_attempts} attempts: {error}",
            expected="a registry that can be written",
            fix="mend the storage; the next retraining publishes",
        ) from error


def _patience(spec: RetrainSpec) -> dict[str, Any]:
    """How a step that needs storage waits for it."""
    waits = [spec.publish_wait_s * 2**attempt for attempt in range(spec.publish_attempts - 1)]
    return {"retries": len(waits), "retry_delay_seconds": waits or None, "retry_condition_fn": _is_away}


def _look_up(spec: RetrainSpec, snapshot: Snapshot) -> Standing:
    look_up = functools.partial(
        find_standing,
        snapshot,
        registry=spec.registry,
        name=spec.name,
        alias=spec.alias,
        holdout_models=spec.holdout_models,
        settings_sha256=spec.settings_sha256,
    )
    return _take("champion", look_up, patience=_patience(spec))


def _watch(spec: RetrainSpec, snapshot: Snapshot, standing: Standing) -> DriftReport | None:
    """What was measured since the champion was trained, against its intervals.

    When it drifts an event says so, once for the same rows: they stay new every night until something is published.
    """
    champion = standing.champion
    if champion is None:
        return None
    new = [seen for seen in snapshot.training if seen.measurement.cell_id not in standing.trained]
    drift = _take("drift watch", functools.partial(watch_drift, new, champion=champion))
    LiveTable("predictor-drift", description=f"{spec.name}: {drift.summary}").write_rows(drift.table())
    log, notes = get_run_logger(), _notes(spec)
    told = functools.partial(notes.is_drift_told, new, champion=champion)
    if drift.verdict != "drifting":
        log.info(drift.summary)
    elif _take("earlier drift", told, patience=_patience(spec)):
        log.info("%s; told before of the same rows", drift.summary)
    else:
        log.warning(drift.summary)
        announce("drifting", name=spec.name, payload={"summary": drift.summary, "rows": drift.table()})
        _leave_note(functools.partial(notes.tell_drift, new, champion=champion))
    return drift


def _notes(spec: RetrainSpec) -> Notes:
    return Notes(spec.registry, name=spec.name, alias=spec.alias)


def _leave_note(write: Callable[[], None]) -> None:
    """A note that cannot be written costs the next run some work, and not this one its end."""
    try:
        write()
    except PrecisionTimeError as error:
        get_run_logger().warning("no note was left for the next retraining: %s", error)


def _draw(validation: Validation, snapshot: Snapshot) -> dict[str, bytes]:
    try:
        return draw_retraining_plots(validation, snapshot.training)
    except InputError as error:
        get_run_logger().info("no plots: %s", error)
        return {}


def _show(
    spec: RetrainSpec,
    validation: Validation,
    decision: GateDecision,
    *,
    report: str,
    pictures: Mapping[str, bytes],
) -> None:
    publish_pages(
        table=accuracy_rows(validation.accuracy),
        report=report,
        key="retrain-accuracy",
        description=f"Accuracy of {spec.name} by split and method; fractions, rmse in seconds",
        pictures=pictures,
    )
    if decision.comparisons:
        verdict = "passed" if decision.passed else "not passed"
        LiveTable(
            "retrain-gate",
            description=f"Gate of {spec.name}, {verdict}: mean absolute log errors of challenger and "
            f"{decision.champion} on the same rows",
        ).write_rows(decision.table())


def _conclude(
    spec: RetrainSpec,
    snapshot: Snapshot,
    status: RetrainStatus,
    standing: Standing,
    *,
    reasons: Sequence[str],
    accuracy: Accuracy,
    decision: GateDecision | None = None,
    drift: DriftReport | None = None,
    published: ArtifactManifest | None = None,
) -> RetrainResult:
    logger = get_run_logger()
    in_use = published or (standing.champion.manifest if standing.champion is not None else None)
    result = RetrainResult(
        status=status,
        artifact_id=None if in_use is None else in_use.artifact_id,
        reasons=list(reasons),
        left_out=[f"{path}: {reason}" for path, reason in snapshot.problems],
        rows=len(snapshot.training),
        holdout_models=list(spec.holdout_models),
        training_data_sha256=snapshot.sha256,
        accuracy=accuracy,
        decision=None if decision is None else decision.to_dict(),
        drift=None if drift is None else drift.to_dict(),
    )
    logger.info("%s: %s", status, result.artifact_id or "no artifact is in use")
    for reason in reasons:
        logger.info(reason)
    _announce(spec, result)
    return result


def _announce(spec: RetrainSpec, result: RetrainResult) -> None:
    told = result.model_dump(mode="json", include={"status", "artifact_id", "reasons", "rows", "decision"})
    announce(_EVENTS[result.status], name=spec.name, payload=told)


def run_retraining(spec: RetrainSpec) -> RetrainResult:
    """Run the flow here. What makes it senseless (no data, an unknown model to hold out) is raised before it starts."""
    Registry(spec.registry).names()
    # Read once more inside the flow, where too little data is an answer: here it is an error, and leaves no run behind.
    take_snapshot(spec.data, public=spec.public, measurements=spec.measurements, holdout_models=spec.holdout_models)
    return retrain_predictor(spec)
