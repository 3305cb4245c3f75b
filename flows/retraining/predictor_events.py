"""The events of a predictor that automations watch: their names, their resource, and how to send one."""

import logging
from collections.abc import Mapping
from typing import Any, Literal

from prefect.events import emit_event

__all__ = ["RESOURCES", "PredictorEvent", "announce", "event_name"]

#: A retraining ends with one of the first four; a nightly run that ends well adds ``night-ended``.
PredictorEvent = Literal[
    "published", "held-back", "nothing-new", "too-little-data", "night-ended", "drifting", "stale", "rolled-back"
]

_PREFIX = "precision-time.predictor"
#: The resources that an automation matches to see the events of every predictor.
RESOURCES = f"{_PREFIX}.*"

_log = logging.getLogger(__name__)


def event_name(event: PredictorEvent) -> str:
    """``precision-time.predictor.<event>``."""
    return f"{_PREFIX}.{event}"


def announce(event: PredictorEvent, *, name: str, payload: Mapping[str, Any]) -> None:
    """Send ``event`` of the predictor ``name``; if the server does not answer, the event is lost, not the run."""
    resource = {"prefect.resource.id": f"{_PREFIX}.{name}", "prefect.resource.name": name}
    try:
        emit_event(event_name(event), resource=resource, payload=dict(payload))
    except Exception as error:
        _log.warning("the event %s was not sent: %s", event_name(event), error)
