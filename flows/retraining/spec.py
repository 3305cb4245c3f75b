"""What a retraining, a nightly one and a roll back are told: checked values whose JSON schemas are Prefect's forms."""

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from precision_time.storage.errors import InputError

__all__ = ["NightlySpec", "RetrainSpec", "RollBackSpec"]

Registry = Annotated[
    str, Field(title="Registry", description="URL or folder of the artifact registry.", min_length=1, max_length=1024)
]
Name = Annotated[str, Field(title="Artifact", description="Name of the predictor in the registry.", min_length=1)]


class RetrainSpec(BaseModel):
    """What a retraining reads, how it validates, and where it publishes."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="Retraining")

    data: Annotated[
        str | None, Field(title="Data", description="URL or folder of the timings dataset.", min_length=1)
    ] = None
    public: Annotated[
        bool, Field(title="Public table", description="Train on the measurements that come with the package too.")
    ] = False
    measurements: Annotated[
        str | None,
        Field(title="Measurements", description="CSV or Parquet file with the public table's columns.", min_length=1),
    ] = None
    registry: Registry
    name: Name = "default"
    alias: Annotated[str, Field(title="Alias", description="Moved to the new version after it is published.")] = (
        "champion"
    )
    holdout_models: Annotated[
        tuple[str, ...], Field(title="Held-out models", description="Never trained on; reported as holdout.")
    ] = ()
    level: Annotated[
        float, Field(title="Interval level", description="Share of measurements inside.", ge=0.5, lt=1)
    ] = 0.9
    seed: Annotated[int, Field(title="Seed", description="Decides folds and trees.", ge=0, le=2**31 - 1)] = 0
    publish_attempts: Annotated[
        int,
        Field(
            title="Attempts to publish",
            description="Tries while the registry does not answer; then the run fails and the champion stays.",
            ge=1,
            le=20,
        ),
    ] = 5
    publish_wait_s: Annotated[
        float,
        Field(
            title="Wait before the next attempt",
            description="Seconds before the second attempt to publish; doubled before each further one.",
            ge=0,
            le=3600,
        ),
    ] = 10.0

    @model_validator(mode="after")
    def _check_sources(self) -> "RetrainSpec":
        if self.data is None and self.measurements is None and not self.public:
            raise InputError(
                "there is nothing to train on",
                got="neither data nor measurements nor public",
                expected="at least one of them",
            )
        return self

    @property
    def settings_sha256(self) -> str:
        """The digest of all of it but how it waits for storage."""
        told = self.model_dump(mode="json", exclude={"publish_attempts", "publish_wait_s"})
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


class NightlySpec(RetrainSpec):
    """A retraining that runs by itself: what it does with nights that were missed, and what it minds."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="Nightly retraining")

    catch_up: Annotated[
        Literal["none", "latest", "all"],
        Field(
            title="Catch up",
            description="Runs that were due while nothing ran them: none does the next one only, latest does one of "
            "them, all does each.",
        ),
    ] = "latest"
    stale_after_days: Annotated[
        float,
        Field(
            title="Stale after",
            description="Days. A night that ends with an older artifact in use, or with none so long after the "
            "deployment was made, sends an event, which the automation 'a predictor is stale' watches.",
            gt=0,
            le=36_500,
        ),
    ] = 30.0

    def retraining(self) -> RetrainSpec:
        """The retraining of one night."""
        return RetrainSpec.model_validate(self.model_dump(include=set(RetrainSpec.model_fields)))


class RollBackSpec(BaseModel):
    """Which alias is to point at an earlier version again."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="Roll back")

    registry: Registry
    name: Name = "default"
    alias: Annotated[str, Field(title="Alias", description="The alias to move.")] = "champion"
    to_version: Annotated[
        int | None,
        Field(
            title="Version",
            description="The version to point at; the one that was in use before by default.",
            ge=1,
            strict=True,
        ),
    ] = None
