"""A predictor in memory that looks like a loaded artifact."""

from collections.abc import Callable

import pytest

from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.storage.manifests import ArtifactManifest


@pytest.fixture(scope="session")
def as_published() -> Callable[[HierarchicalPredictor], PublishedPredictor]:
    """Make a predictor look like the artifact ``made-up@1``."""

    def publish(predictor: HierarchicalPredictor) -> PublishedPredictor:
        manifest = ArtifactManifest.model_construct(name="made-up", version=1, default_gpu="A100-SXM4-80GB")
        return PublishedPredictor(manifest=manifest, predictor=predictor, workloads=(), hardware=())

    return publish
