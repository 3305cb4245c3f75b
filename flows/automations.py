"""Automations that watch over runs and predictors nobody looks at: failing, stale, drifting, and runs that are dead."""

from collections.abc import Iterator, Mapping
from datetime import timedelta
from uuid import UUID

from prefect.automations import AutomationCore, ChangeFlowRunState, DoNothing, EventTrigger, Posture
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.settings import get_current_settings

from precision_time.flows.predictor_events import FINISHED, RESOURCES, event_name

__all__ = ["AUTOMATIONS", "NIGHTLY", "register_automations"]

#: The deployment whose failures are watched.
NIGHTLY = "nightly-retrain"
#: What each automation is called; by these names they are found again.
AUTOMATIONS = {
    "failing": "precision-time: nightly retraining fails",
    "stale": "precision-time: no retraining finishes",
    "drifting": "precision-time: a predictor drifts",
    "dead": "precision-time: runs without a sign of life",
}
#: Heartbeats that a run may miss in a row before it counts as dead. Fewer kill runs whose machine is only busy.
MISSED_HEARTBEATS = 5
_HEARTBEAT_S = 180

_ATTACH = "It shows in the event feed only; add an action to send it somewhere, such as a notification, which stays."


def register_automations(
    *,
    deployment_ids: Mapping[str, UUID],
    stale_after: timedelta = timedelta(days=3),
    crash_dead_runs: bool = False,
) -> list[str]:
    """Create the automations, or bring those of the same name up to date, and return their names.

    ``deployment_ids`` are by deployment, ``flow/deployment`` or the latter alone; runs of ``nightly-retrain`` are
    watched for failures. ``stale_after`` is a whole period in which no retraining ended well; the next period begins
    after it. Each automation fires an event ``prefect.automation.triggered`` and does nothing else; what a person adds
    (a notification, pausing it) stays over later calls. ``crash_dead_runs`` turns on the one that sets runs without a
    heartbeat to Crashed, which is created paused: a run whose machine is only overloaded would be given up for dead.
    Raises ``ValueError`` for less than ten seconds of ``stale_after``, and what the Prefect client raises.
    """
    names = []
    with get_client(sync_client=True) as client:
        for wanted in _describe(deployment_ids, stale_after=stale_after, crash_dead_runs=crash_dead_runs):
            names.append(wanted.name)
            standing = client.read_automations_by_name(wanted.name)
            if not standing:
                client.create_automation(wanted)
                continue
            # Actions and the switch are a person's. To write an unchanged one again would begin its period anew.
            first = standing[0]
            turned_on = crash_dead_runs and wanted.name == AUTOMATIONS["dead"]
            kept = wanted.model_copy(update={"actions": first.actions, "enabled": first.enabled or turned_on})
            if (first.trigger, first.description, first.enabled) != (kept.trigger, kept.description, kept.enabled):
                client.update_automation(first.id, kept)
    return names


def _describe(
    deployment_ids: Mapping[str, UUID], *, stale_after: timedelta, crash_dead_runs: bool
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
        name=AUTOMATIONS["stale"],
        description=f"For {stale_after} no retraining has published, held back or found nothing new. {_ATTACH}",
        trigger=EventTrigger(
            expect={event_name(event) for event in FINISHED},
            match={"prefect.resource.id": RESOURCES},
            posture=Posture.Proactive,
            within=stale_after,
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
