"""Prefect automations that watch unattended runs and predictors: failing, silent, stale, drifting, dead."""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.automations import AutomationCore, ChangeFlowRunState, DoNothing, EventTrigger, Posture
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events import TriggerTypes
from prefect.settings import get_current_settings

from precision_time.flows.retraining.predictor_events import RESOURCES, event_name

__all__ = ["AUTOMATIONS", "NIGHTLY", "register_automations"]

#: The deployment whose failures are watched.
NIGHTLY = "nightly-retrain"
#: The names by which later calls find the automations again.
AUTOMATIONS = {
    "failing": "precision-time: nightly retraining fails",
    "silent": "precision-time: no nightly retraining finishes",
    "stale": "precision-time: a predictor is stale",
    "drifting": "precision-time: a predictor drifts",
    "dead": "precision-time: runs without a sign of life",
}
#: Heartbeats that a run may miss in a row before it counts as dead. With fewer, runs on a busy machine are killed.
MISSED_HEARTBEATS = 5
_HEARTBEAT_S = 180
#: How long no night may end well before that raises an event.
SILENT_AFTER = timedelta(days=3)
#: A stale predictor is stale every night; its event triggers no more often than this.
_REMIND = timedelta(days=7)

_ADD_ACTION = "It only shows in the event feed: add an action, such as a notification, which later registrations keep."


def register_automations(
    *,
    deployment_ids: Mapping[str, UUID],
    silent_after: timedelta | None = None,
    crash_dead_runs: bool = False,
) -> list[str]:
    """Create the automations, or bring those of the same name up to date, and return their names.

    ``deployment_ids`` are by deployment, as ``flow/deployment`` or the latter alone; runs of ``nightly-retrain`` are
    watched for failures. ``silent_after`` is how long a predictor may go without a night that ends well, counted from
    the last one that did; each silence raises one event. Whether a predictor is stale is decided by the nightly run.
    Each automation raises the event ``prefect.automation.triggered`` and does nothing else. What a person adds (a
    notification, pausing it) or changes (the period of its trigger) is kept by later calls, unless ``silent_after`` is
    given. ``crash_dead_runs`` switches on the automation that sets runs without a heartbeat to Crashed; it is created
    paused, because it also ends runs whose machine is only overloaded. Raises ``ValueError`` for a ``silent_after``
    under ten seconds, and what the Prefect client raises.
    """
    names = []
    with get_client(sync_client=True) as client:
        for wanted in _describe(deployment_ids, silent_after=silent_after, crash_dead_runs=crash_dead_runs):
            names.append(wanted.name)
            existing = next(iter(client.read_automations_by_name(wanted.name)), None)
            if existing is None:
                client.create_automation(wanted)
                continue
            # Actions and the switch belong to a person. Writing an unchanged automation would restart its period.
            turned_on = crash_dead_runs and wanted.name == AUTOMATIONS["dead"]
            updated = wanted.model_copy(
                update={
                    "actions": existing.actions,
                    "enabled": existing.enabled or turned_on,
                    "trigger": _keep_period(wanted, existing, is_given=silent_after is not None),
                }
            )
            if any(getattr(existing, name) != getattr(updated, name) for name in ("trigger", "description", "enabled")):
                client.update_automation(existing.id, updated)
    return names


def _keep_period(wanted: AutomationCore, existing: AutomationCore, *, is_given: bool) -> TriggerTypes:
    """The wanted trigger with the existing period, which a person may have set.

    Not for dead runs, whose period follows the heartbeat, nor for silence where the caller gives its period.
    """
    ours, theirs = wanted.trigger, existing.trigger
    is_ours = wanted.name == AUTOMATIONS["dead"] or (wanted.name == AUTOMATIONS["silent"] and is_given)
    if is_ours or not isinstance(ours, EventTrigger) or not isinstance(theirs, EventTrigger):
        return ours
    return ours.model_copy(update={"within": theirs.within})


def _describe(
    deployment_ids: Mapping[str, UUID], *, silent_after: timedelta | None, crash_dead_runs: bool
) -> Iterator[AutomationCore]:
    ids = {name.rpartition("/")[2]: id_ for name, id_ in deployment_ids.items()}
    if NIGHTLY in ids:
        failures = _run_events("Failed", "Crashed", "TimedOut")
        description = f"A run of {NIGHTLY} failed, crashed or timed out."
        yield _alert("failing", description, EventTrigger(expect=failures, **_runs_of([ids[NIGHTLY]])))
    each_predictor: dict[str, Any] = {"match": {"prefect.resource.id": RESOURCES}, "for_each": {"prefect.resource.id"}}
    night_ended = {event_name("night-ended")}
    alerts: dict[str, tuple[str, dict[str, Any]]] = {
        "silent": (
            "The last night that ended well, with or without a new version, is longer ago than the trigger's period.",
            # With `after`, each night that ends well starts a new period.
            {"after": night_ended, "expect": night_ended, "posture": Posture.Proactive}
            | {"within": SILENT_AFTER if silent_after is None else silent_after},
        ),
        "stale": (
            f"The artifact in use is older than 'Stale after' of {NIGHTLY} allows.",
            {"expect": {event_name("stale")}, "within": _REMIND},
        ),
        "drifting": (
            "New measurements lie outside the intervals of the predictor in use.",
            {"expect": {event_name("drifting")}},
        ),
    }
    for key, (description, trigger) in alerts.items():
        yield _alert(key, description, EventTrigger(**each_predictor | trigger))
    if ids:
        silence = timedelta(seconds=MISSED_HEARTBEATS * _heartbeat_s())
        ends = _run_events("Completed", "Failed", "Crashed", "Cancelled", "TimedOut")
        heartbeat = _run_events("heartbeat")
        yield AutomationCore(
            name=AUTOMATIONS["dead"],
            description=f"A run has sent no heartbeat for {silence}: its process is gone without reporting its end.",
            enabled=crash_dead_runs,
            trigger=EventTrigger(
                after=heartbeat,
                expect=heartbeat | ends,
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                within=silence,
                **_runs_of(sorted(ids.values())),
            ),
            actions=[
                ChangeFlowRunState(
                    name="Crashed",
                    state=StateType.CRASHED,
                    message=f"No heartbeat for {silence}: the process of this run is gone.",
                    force=False,
                )
            ],
        )


def _alert(key: str, description: str, trigger: EventTrigger) -> AutomationCore:
    """An automation that only raises its event; actions are a person's to add."""
    return AutomationCore(
        name=AUTOMATIONS[key], description=f"{description} {_ADD_ACTION}", trigger=trigger, actions=[DoNothing()]
    )


def _run_events(*names: str) -> set[str]:
    return {f"prefect.flow-run.{name}" for name in names}


def _runs_of(deployments: list[UUID]) -> dict[str, Any]:
    """What a trigger matches to see the events of the runs of ``deployments``."""
    return {
        "match": {"prefect.resource.id": "prefect.flow-run.*"},
        "match_related": {
            "prefect.resource.role": "deployment",
            "prefect.resource.id": [f"prefect.deployment.{id_}" for id_ in deployments],
        },
    }


def _heartbeat_s() -> int:
    return get_current_settings().flows.heartbeat_frequency or _HEARTBEAT_S
