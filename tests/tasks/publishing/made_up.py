"""Made-up snapshots, champions and validations for the tests of publishing."""

from collections.abc import Iterable

from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.rows.observations import Observation
from precision_time.tasks.publishing.snapshot import Snapshot
from precision_time.tasks.publishing.validate import Validation

__all__ = ["NOT_VALIDATED", "as_champion", "make_snapshot"]

NOT_VALIDATED = Validation(accuracy={}, cross_validations={}, radii={}, level=0.9)


class _Manifest:
    artifact_id = "default@7"


def as_champion(predictor: HierarchicalPredictor) -> PublishedPredictor:
    """``predictor`` as if it were in use as default@7."""
    return PublishedPredictor(manifest=_Manifest(), predictor=predictor, workloads=(), hardware=())  # type: ignore[arg-type]


def make_snapshot(
    training: Iterable[Observation] = (), holdout: Iterable[Observation] = (), *, sha256: str = "0" * 64
) -> Snapshot:
    """A snapshot without cards of its own."""
    return Snapshot(
        training=tuple(training), holdout=tuple(holdout), workloads=(), hardware=(), sha256=sha256, problems=()
    )
