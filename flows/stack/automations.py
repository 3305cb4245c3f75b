"""Automations that watch over runs and predictors nobody looks at: failing, stale, drifting, and runs that are dead."""

from collections.abc import Iterator, Mapping
from datetime import timedelta
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
#: What each automation is called; by these names they are found again.
AUTOMATIONS = {
    "failing": "precision-time: nightly retraining fails",
    "silent": "precision-time: no nightly retraining finishes",
    "stale": "precision-time: a predictor is stale",
    "drifting": "precision-time: a predictor drifts",
    "dead": "precision-time: runs without a sign of life",
}
#: Heartbeats that a run may miss in a row before it counts as dead. Fewer kill runs whose machine is only busy.
MISSED_HEARTBEATS = 5
_HEARTBEAT_S = 180
#: Nights that may pass without a word before silence is told of.
SILENT_AFTER = timedelta(days=3)
#: A stale predictor is stale every night; this is how often it is said again.
_REMIND = timedelta(days=7)

_ATTACH = "It shows in the event feed only; add an action to send it somewhere, such as a notification, which stays."


def register_automations(
    *,
    deployment_ids: Mapping[str, UUID],
    silent_after: timedelta | None = None,
    crash_dead_runs: bool = False,
) -> list[str]:
    """Create the automations, or bring those of the same name up to date, and return their names.

    ``deployment_ids`` are by deployment, ``flow/deployment`` or the latter alone; runs of ``nightly-retrain`` are
    watched for failures. ``silent_after`` is a period in which no night of a predictor ended well, whatever came of it,
    after one that did; such a silence is told of once. Whether a predictor is stale is for each night to judge, by its
    own parameter. Each automation fires an event ``prefect.automation.triggered`` and does nothing else; what a person
    adds (a notification, pausing it) or changes (the period of its trigger) stays over later calls, unless
    ``silent_after`` is given. ``crash_dead_runs`` turns on the one that sets runs without a heartbeat to Crashed, which
    is created paused: a run whose machine is only overloaded would be given up for dead. Raises ``ValueError`` for less
    than ten seconds of ``silent_after``, and what the Prefect client raises.
    """
    names = []
    with get_client(sync_client=True) as client:
        for wanted in _describe(deployment_ids, silent_after=silent_after, crash_dead_runs=crash_dead_runs):
            names.append(wanted.name)
            standing = client.read_automations_by_name(wanted.name)
            if not standing:
                client.create_automation(wanted)
                continue
            # Actions and the switch are a person's. To write an unchanged one again would begin its period anew.
            first = standing[0]
            turned_on = crash_dead_runs and wanted.name == AUTOMATIONS["dead"]
            kept = wanted.model_copy(
                update={
                    "actions": first.actions,
                    "enabled": first.enabled or turned_on,
                    "trigger": _keep_period(wanted, first, is_given=silent_after is not None),
                }
            )
            if (first.trigger, first.description, first.enabled) != (kept.trigger, kept.description, kept.enabled):
                client.update_automation(first.id, kept)
    return names


def _keep_period(wanted: AutomationCore, standing: AutomationCore, *, is_given: bool) -> TriggerTypes:
    """The trigger of the code with the period that stands, which may be a person's.

    The period of dead runs follows the heartbeat, and that of silence what the caller says.
    """
    ours, theirs = wanted.trigger, standing.trigger
    is_ours = wanted.name == AUTOMATIONS["dead"] or (wanted.name == AUTOMATIONS["silent"] and is_given)
    if is_ours or not isinstance(ours, EventTrigger) or not isinstance(theirs, EventTrigger):
        return ours
    return ours.model_copy(update={"within": theirs.within})


def _describe(
    deployment_ids: Mapping[str, UUID], *, silent_after: timedelta | None, crash_dead_runs: bool
) -> Iterator[AutomationCore]:
    ids = {name.rpartition("/")[2]: id_ for name, id_ in deployment_ids.items()}
    if NIGHTLY in ids:
        yield AutomationCore(
            name=AUTOMATIONS["failing"],
            description=f"A run of {NIGHTLY} failed or crashed. {_ATTACH}",
            trigger=EventTrigger(
                expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed", "prefect.flow-run.TimedOut"},
                match={"prefect.resource.id": "prefect.flow-run.*"},
                match_related=_of_deployments([ids[NIGHTLY]]),
                posture=Posture.Reactive,
            ),
            actions=[DoNothing()],
        )
    yield AutomationCore(
        name=AUTOMATIONS["silent"],
        description="After a night of a predictor that ended well none has, with or without a new version, for the "
        f"whole period of the trigger. {_ATTACH}",
        trigger=EventTrigger(
            # Without it a period in which a night ended well would be the last one that is watched.
            after={event_name("night-ended")},
            expect={event_name("night-ended")},
            match={"prefect.resource.id": RESOURCES},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            within=SILENT_AFTER if silent_after is None else silent_after,
        ),
        actions=[DoNothing()],
    )
    yield AutomationCore(
        name=AUTOMATIONS["stale"],
        description=f"The artifact in use is older than 'Stale after' of {NIGHTLY} allows. {_ATTACH}",
        trigger=EventTrigger(
            expect={event_name("stale")},
            match={"prefect.resource.id": RESOURCES},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            within=_REMIND,
        ),
        actions=[DoNothing()],
    )
    yield AutomationCore(
        name=AUTOMATIONS["drifting"],
        description=f"New measurements lie outside the intervals of the predictor in use. {_ATTACH}",
        trigger=EventTrigger(
            expect={event_name("drifting")},
            match={"prefect.resource.id": RESOURCES},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
        ),
        actions=[DoNothing()],
    )
    if ids:
        ends = ("Completed", "Failed", "Crashed", "Cancelled", "TimedOut")
        silence = timedelta(seconds=MISSED_HEARTBEATS * _heartbeat_s())
        yield AutomationCore(
            name=AUTOMATIONS["dead"],
            description=f"A run has sent no heartbeat for {silence}: its process is gone and nobody said so.",
            enabled=crash_dead_runs,
            trigger=EventTrigger(
                after={"prefect.flow-run.heartbeat"},
                expect={"prefect.flow-run.heartbeat", *(f"prefect.flow-run.{end}" for end in ends)},
                match={"prefect.resource.id": "prefect.flow-run.*"},
                match_related=_of_deployments(sorted(ids.values())),
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                within=silence,
            ),
            actions=[
                ChangeFlowRunState(
                    name="Crashed",
                    state=StateType.CRASHED,
                    message=f"No sign of life for {silence}: the process of this run is gone.",
                    force=False,
                )
            ],
        )


def _of_deployments(ids: list[UUID]) -> dict[str, str | list[str]]:
    """Labels that one related resource of an event has when its run belongs to one of the deployments."""
    return {
        "prefect.resource.role": "deployment",
        "prefect.resource.id": [f"prefect.deployment.{id_}" for id_ in ids],
    }


def _heartbeat_s() -> int:
    return get_current_settings().flows.heartbeat_frequency or _HEARTBEAT_S
