"""The settings of a retraining, a nightly retraining and a roll back; their JSON schemas are Prefect's forms."""

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
    """The data that a retraining reads, how it validates, and where it publishes."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="Retraining")

    data: Annotated[
        str | None, Field(title="Data", description="URL or folder of the timings dataset.", min_length=1)
    ] = None
    public: Annotated[
        bool, Field(title="Public table", description="Also train on the public measurements in the package.")
    ] = False
    measurements: Annotated[
        str | None,
        Field(
            title="Measurements",
            description="CSV or Parquet file with the public table's columns, to train on as well.",
            min_length=1,
        ),
    ] = None
    registry: Registry
    name: Name = "default"
    alias: Annotated[
        str, Field(title="Alias", description="The alias that points to the new version once it is published.")
    ] = "champion"
    holdout_models: Annotated[
        tuple[str, ...],
        Field(title="Held-out models", description="Models that are never trained on; their accuracy is reported."),
    ] = ()
    level: Annotated[
        float,
        Field(title="Interval level", description="Share of measurements that intervals are to contain.", ge=0.5, lt=1),
    ] = 0.9
    seed: Annotated[int, Field(title="Seed", description="Seed of folds and trees.", ge=0, le=2**31 - 1)] = 0
    publish_attempts: Annotated[
        int,
        Field(
            title="Attempts to publish",
            description="Attempts while the registry does not answer; after the last one the run fails and the "
            "champion stays.",
            ge=1,
            le=20,
        ),
    ] = 5
    publish_wait_s: Annotated[
        float,
        Field(
            title="Wait before the next attempt",
            description="Seconds before the second attempt to publish; doubled before each further attempt.",
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
        """The digest of all settings except how to wait for storage."""
        settings = self.model_dump(mode="json", exclude={"publish_attempts", "publish_wait_s"})
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


class NightlySpec(RetrainSpec):
    """A retraining that runs on a schedule: what to do about missed nights, and when the predictor counts as stale."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="Nightly retraining")

    catch_up: Annotated[
        Literal["none", "latest", "all"],
        Field(
            title="Catch up",
            description="Runs that were missed: latest makes up for all of them with one run, all with one run each, "
            "none waits for the next scheduled run.",
        ),
    ] = "latest"
    stale_after_days: Annotated[
        float,
        Field(
            title="Stale after",
            description="Days. If the artifact in use is older at the end of a night, or there is still none so long "
            "after the deployment was created, the run sends an event, which the automation 'a predictor is stale' "
            "watches.",
            gt=0,
            le=36_500,
        ),
    ] = 30.0

    def retraining(self) -> RetrainSpec:
        """The retraining of one night."""
        return RetrainSpec.model_validate(self.model_dump(include=set(RetrainSpec.model_fields)))


class RollBackSpec(BaseModel):
    """The alias that is to point at an earlier version again."""

    model_config = ConfigDict(extra="forbid", frozen=True, title="Roll back")

    registry: Registry
    name: Name = "default"
    alias: Annotated[str, Field(title="Alias", description="The alias to move.")] = "champion"
    to_version: Annotated[
        int | None,
        Field(
            title="Version",
            description="The version to put into use; by default the one in use before.",
            ge=1,
            strict=True,
        ),
    ] = None
