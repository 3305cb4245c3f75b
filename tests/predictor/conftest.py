"""A made-up world large enough for a model of whole iterations, whose truth is known."""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from precision_time.predictor.answering.artifact import load_artifact
from precision_time.predictor.learning import blending
from precision_time.predictor.learning import boosting as learner
from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
from precision_time.predictor.rows.observations import Observation, observe
from precision_time.storage.schema import Measurement

Factor = Callable[[Measurement], float]
MakeWorld = Callable[..., list[Observation]]

#: One network of each of ten families, and one GPU of each of eight chips.
MODELS = (
    "resnet50", "vgg16", "densenet121", "efficientnet_b0", "convnext_tiny", "bert_base", "gpt2", "vit_b16",
    "llama2_7b", "regnety_016",
)  # fmt: skip
GPUS = (
    "A100-SXM4-80GB", "V100-SXM2-16GB", "T4-16GB", "H100-SXM5-80GB", "RTX3090-24GB", "A10-24GB", "RTXA6000-48GB",
    "L4-24GB",
)  # fmt: skip


@pytest.fixture(scope="session")
def make_world() -> MakeWorld:
    """Observations whose iteration takes ``factor`` times the closed form and some noise; parts are not measured."""

    def make(
        factor: Factor,
        *,
        models: Sequence[str] = MODELS,
        gpus: Sequence[str] = GPUS,
        precisions: Sequence[str] = ("fp32", "amp_fp16"),
        batches: Iterable[int] = (4, 16, 64),
        world_sizes: Iterable[int] = (1, 8, 32),
        noise: float = 0.02,
    ) -> list[Observation]:
        rng = random.Random(0)
        bare = [
            Measurement(
                source="made up",
                model=model,
                task_input="",
                gpu=gpu,
                nodes=max(1, world_size // 8),
                world_size=world_size,
                precision=precision,
                strategy="ddp",
                per_gpu_batch_size=batch,
                gradient_accumulation_steps=1,
                framework="pytorch",
                iteration_time_s=1.0,
            )
            for model, gpu, precision, batch, world_size in itertools.product(
                models, gpus, precisions, batches, world_sizes
            )
        ]
        made = []
        for seen in observe(bare):
            took_s = seen.closed.iteration_time_s * factor(seen.measurement) * math.exp(rng.gauss(0, noise))
            made.append(
                dataclasses.replace(seen, measurement=dataclasses.replace(seen.measurement, iteration_time_s=took_s))
            )
        return made

    return make


def _fit_fast(patch: pytest.MonkeyPatch) -> None:
    quick = {"rounds": 30, "max_depth": 5, "eta": 0.3, "min_child_weight": 1.0, "lambda": 1.0}
    patch.setattr(learner, "_tuned", lambda: {"few": quick, "many": quick})
    patch.setattr(blending, "_ROUNDS", 20)


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forests of a few trees, so that a fit on many rows takes a second."""
    _fit_fast(monkeypatch)


@pytest.fixture(scope="session")
def many_rows(make_world: MakeWorld) -> list[Observation]:
    """1,440 rows that tell whole iterations: 1.5 times the closed form in fp32, 2.5 times in amp_fp16."""
    return make_world(lambda measured: 1.5 if measured.precision == "fp32" else 2.5)


@pytest.fixture(scope="session")
def large_predictor(many_rows: list[Observation]) -> HierarchicalPredictor:
    """A predictor with a model of whole iterations and a learned blend, from forests of a few trees."""
    with pytest.MonkeyPatch.context() as patch:
        _fit_fast(patch)
        return HierarchicalPredictor.fit(many_rows)


@pytest.fixture(autouse=True)
def _no_bundle(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a registry the closed forms answer here; tests of what ships carry the mark ``bundle``."""
    if "bundle" not in request.keywords:
        monkeypatch.setattr("precision_time.predictor.answering.artifact.BUNDLE", tmp_path / "no-bundle")


@pytest.fixture
def nothing_published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither an environment variable nor a configuration file names an artifact or a registry."""
    for name in ("PRECISION_TIME_ARTIFACT", "PRECISION_TIME_REGISTRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    load_artifact.cache_clear()
