"""The result of a retraining, as its run returns it."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from precision_time.tasks.publishing.validate import Accuracy

__all__ = ["RetrainResult", "RetrainStatus"]

RetrainStatus = Literal["published", "held back", "nothing new", "too little data"]


class RetrainResult(BaseModel):
    """The result of a retraining; ``artifact_id`` is the new version, or the champion that stays in use.

    ``accuracy`` maps split -> method -> metric, as fractions and seconds; ``left_out`` names damaged data.
    ``decision`` holds the figures of the gate and ``drift`` those of the drift watch, None where there are none.
    """

    model_config = ConfigDict(frozen=True)

    status: RetrainStatus
    artifact_id: str | None
    reasons: list[str]
    left_out: list[str]
    rows: int
    holdout_models: list[str]
    training_data_sha256: str
    accuracy: Accuracy
    decision: dict[str, Any] | None = None
    drift: dict[str, Any] | None = None
