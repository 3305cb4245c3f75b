"""The flow retrain_predictor: read a snapshot, watch for drift, train, validate, judge, and publish what passes."""

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
from precision_time.tasks.publishing.champion import PublishedState, find_published_state
from precision_time.tasks.publishing.drift import DriftReport, watch_drift
from precision_time.tasks.publishing.gate import GateDecision, judge_challenger
from precision_time.tasks.publishing.plots import draw_retraining_plots, show_plots
from precision_time.tasks.publishing.publish import publish_predictor
from precision_time.tasks.publishing.publish_in_turn import publish_in_turn
from precision_time.tasks.publishing.report import accuracy_rows, write_report
from precision_time.tasks.publishing.retraining_memory import RetrainingMemory
from precision_time.tasks.publishing.snapshot import Snapshot, take_snapshot
from precision_time.tasks.publishing.validate import Accuracy, Validation, validate_predictor

__all__ = ["retrain_predictor", "run_retraining"]

Result = TypeVar("Result")

#: How often a run judges again because another one has published meanwhile; the next night does the rest.
MOST_ROUNDS = 3
_EVENTS: dict[RetrainStatus, PredictorEvent] = {
    "published": "published", "held back": "held-back", "nothing new": "nothing-new",
    "too little data": "too-little-data",
}  # fmt: skip


def _is_storage_failure(task: Any, task_run: Any, state: Any) -> bool:
    """Whether a step failed because a store did not answer: any other failure would only repeat itself."""
    return isinstance(state.result(raise_on_failure=False), StorageError)


@task(cache_policy=NO_CACHE, persist_result=False)
@fail_plainly
def run_step(step: Callable[[], object]) -> object:
    """Run one step; its objects stay in memory, neither hashed for a cache nor written as a result."""
    # A function without arguments: Prefect walks through every object of an argument, minutes for 10,000 rows.
    return step()


def _run_as_task(name: str, step: Callable[[], Result], *, retry: Mapping[str, Any] | None = None) -> Result:
    """The result of ``step``, run as Prefect's task ``name``; raises what ``step`` raises."""
    outcome: Any = run_step.with_options(name=name, **retry or {})(step)
    result: Result = outcome.result() if isinstance(outcome, State) else outcome
    return result


@flow(name="retrain-predictor", flow_run_name="retrain {spec.name}", result_serializer="json", persist_result=False)
@fail_plainly
def retrain_predictor(spec: RetrainSpec) -> RetrainResult:
    """Train on recorded timings, the public table or both, validate, and publish what passes the gate.

    The run ends Completed, with its reasons, also when the gate holds the predictor back, no data is new or there is
    too little of it. It ends Failed when storage answers in none of the attempts. In all of these the champion stays.
    """
    logger = get_run_logger()
    progress = ProgressArtifact("retrain-progress", description="Retraining: snapshot, train, validate, publish")

    snapshot = _run_as_task("snapshot", functools.partial(_take_snapshot, spec), retry=_retry_settings(spec))
    if isinstance(snapshot, TooLittleDataError):
        progress.update(1.0)
        return _end_without_data(spec, snapshot)
    for path, reason in snapshot.problems:
        logger.warning("left out %s: %s", path, reason)
    progress.update(0.2)

    current = _find_current(spec, snapshot)
    drift = _watch_drift(spec, snapshot, current)
    if current.skip_reason is not None:
        progress.update(1.0)
        accuracy = {} if current.champion is None else current.champion.manifest.accuracy
        return _finish(
            spec, snapshot, "nothing new", current, reasons=[current.skip_reason], accuracy=accuracy, drift=drift
        )

    fit = functools.partial(HierarchicalPredictor.fit, snapshot.training, seed=spec.seed)
    predictor = _run_as_task("train", fit)
    progress.update(0.4)
    validate = functools.partial(validate_predictor, snapshot, level=spec.level, seed=spec.seed)
    validation = _run_as_task("validate", validate)
    progress.update(0.8)
    result = _judge_and_publish(
        spec,
        snapshot,
        predictor.with_intervals(validation.radii, level=spec.level).with_covariances(validation.covariances),
        validation,
        current=current,
        drift=drift,
    )
    progress.update(1.0)
    return result


def _take_snapshot(spec: RetrainSpec) -> Snapshot | TooLittleDataError:
    """The snapshot; too little data is a result here, not a failure of the step."""
    try:
        return take_snapshot(
            spec.data, public=spec.public, measurements=spec.measurements, holdout_models=spec.holdout_models
        )
    except TooLittleDataError as error:
        return error


def _end_without_data(spec: RetrainSpec, error: TooLittleDataError) -> RetrainResult:
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
    current: PublishedState,
    drift: DriftReport | None,
) -> RetrainResult:
    """Judge against the champion and publish; judge again when another run has published meanwhile."""
    token, pictures = uuid.uuid4().hex, _draw(validation, snapshot)
    for _ in range(MOST_ROUNDS):
        decision = judge_challenger(snapshot, validation, champion=current.champion, trained=current.trained)
        report = write_report(
            snapshot,
            validation,
            decision,
            holdout_models=spec.holdout_models,
            importances=feature_importances(predictor),
            drift=drift,
            pictures=show_plots(pictures),
        )
        _show_pages(spec, validation, decision, report=report, pictures=pictures)
        finish = functools.partial(
            _finish, spec, snapshot, accuracy=validation.accuracy, decision=decision, drift=drift
        )
        if not decision.passed:
            _write_note(
                functools.partial(
                    _memory(spec).remember_held_back,
                    snapshot.sha256,
                    champion=current.champion,
                    settings_sha256=spec.settings_sha256,
                    reasons=decision.reasons,
                )
            )
            return finish("held back", current, reasons=decision.reasons)
        manifest = _publish(
            spec, snapshot, predictor, validation, report=report, plots=pictures, current=current, token=token
        )
        if manifest is not None:
            return finish("published", current, reasons=decision.reasons, published=manifest)
        get_run_logger().info("another run has published meanwhile: judging against the new champion")
        current = _find_current(spec, snapshot)
        if current.skip_reason is not None:
            return finish("nothing new", current, reasons=[current.skip_reason])
    return finish(
        "held back",
        current,
        reasons=[f"other runs published {MOST_ROUNDS} times while this one judged: the next run tries again"],
    )


def _publish(
    spec: RetrainSpec,
    snapshot: Snapshot,
    predictor: HierarchicalPredictor,
    validation: Validation,
    *,
    report: str,
    plots: Mapping[str, bytes],
    current: PublishedState,
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
        holdout_models=spec.holdout_models,
        seed=spec.seed,
        plots=plots,
    )
    in_turn = functools.partial(
        publish_in_turn,
        publish,
        registry=spec.registry,
        name=spec.name,
        alias=spec.alias,
        champion=current.champion,
        sha256=snapshot.sha256,
        token=token,
    )
    try:
        return _run_as_task("publish", in_turn, retry=_retry_settings(spec))
    except StorageError as error:
        in_use = "nothing is" if current.champion is None else f"{current.champion.manifest.artifact_id} stays"
        raise StorageError(
            f"the predictor passed the gate and was not published, {in_use} in use",
            got=f"{spec.publish_attempts} attempts: {error}",
            expected="a registry that can be written",
            fix="repair the storage; the next retraining publishes",
        ) from error


def _retry_settings(spec: RetrainSpec) -> dict[str, Any]:
    """Prefect's options of a task that is tried again while storage does not answer."""
    waits_s = [spec.publish_wait_s * 2**attempt for attempt in range(spec.publish_attempts - 1)]
    return {"retries": len(waits_s), "retry_delay_seconds": waits_s or None, "retry_condition_fn": _is_storage_failure}


def _find_current(spec: RetrainSpec, snapshot: Snapshot) -> PublishedState:
    find = functools.partial(
        find_published_state,
        snapshot,
        registry=spec.registry,
        name=spec.name,
        alias=spec.alias,
        holdout_models=spec.holdout_models,
        settings_sha256=spec.settings_sha256,
    )
    return _run_as_task("champion", find, retry=_retry_settings(spec))


def _watch_drift(spec: RetrainSpec, snapshot: Snapshot, current: PublishedState) -> DriftReport | None:
    """The measurements made since the champion was trained, compared with its intervals.

    A drift sends an event, once for the same rows: they stay new every night until something is published.
    """
    champion = current.champion
    if champion is None:
        return None
    new = [row for row in snapshot.training if row.measurement.cell_id not in current.trained]
    drift = _run_as_task("drift watch", functools.partial(watch_drift, new, champion=champion))
    LiveTable("predictor-drift", description=f"{spec.name}: {drift.summary}").write_rows(drift.table())
    log, memory = get_run_logger(), _memory(spec)
    has_reported = functools.partial(memory.has_reported_drift, new, champion=champion)
    if drift.verdict != "drifting":
        log.info(drift.summary)
    elif _run_as_task("earlier drift", has_reported, retry=_retry_settings(spec)):
        log.info("%s; already reported for the same rows", drift.summary)
    else:
        log.warning(drift.summary)
        announce("drifting", name=spec.name, payload={"summary": drift.summary, "rows": drift.table()})
        _write_note(functools.partial(memory.remember_drift, new, champion=champion))
    return drift


def _memory(spec: RetrainSpec) -> RetrainingMemory:
    return RetrainingMemory(spec.registry, name=spec.name, alias=spec.alias)


def _write_note(write: Callable[[], None]) -> None:
    """Write a note for the next run; if that fails, the next run repeats some work, and this one still ends well."""
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


def _show_pages(
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


def _finish(
    spec: RetrainSpec,
    snapshot: Snapshot,
    status: RetrainStatus,
    current: PublishedState,
    *,
    reasons: Sequence[str],
    accuracy: Accuracy,
    decision: GateDecision | None = None,
    drift: DriftReport | None = None,
    published: ArtifactManifest | None = None,
) -> RetrainResult:
    """Log how the retraining ended, announce it, and return it as a result."""
    logger = get_run_logger()
    in_use = published or (current.champion.manifest if current.champion is not None else None)
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
    payload = result.model_dump(mode="json", include={"status", "artifact_id", "reasons", "rows", "decision"})
    announce(_EVENTS[result.status], name=spec.name, payload=payload)


def run_retraining(spec: RetrainSpec) -> RetrainResult:
    """Run the flow here; no data, or an unknown model to hold out, raises before it starts."""
    Registry(spec.registry).names()
    # The flow reads again, and there too little data is a result; here it is an error, and leaves no run behind.
    take_snapshot(spec.data, public=spec.public, measurements=spec.measurements, holdout_models=spec.holdout_models)
    return retrain_predictor(spec)
