"""Fixtures that several folders share: a made-up world whose timings are known, and a dataset of it."""

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from precision_time.storage.schema import Measurement

Measure = Callable[..., list[Measurement]]

# Tests open many local clusters side by side, in this process and in others; those of the locks set a folder.
os.environ["PRECISION_TIME_LOCKS"] = "off"


def _measure(
    *,
    models: Sequence[str] = ("mlp", "vit_tiny", "bert_mini"),
    precisions: Sequence[str] = ("fp32", "amp_bf16"),
    world_sizes: Sequence[int] = (1, 2),
    batches: Sequence[int] = (8, 16, 32),
    gpu: str = "A100-SXM4-80GB",
    noise: float = 0.02,
    seed: int = 0,
) -> list[Measurement]:
    """Measurements of a world where compute and communication are fixed factors away from the closed forms."""
    from precision_time.predictor.rows.observations import observe

    rng = random.Random(seed)
    compute_factor = {"fp32": 1.6, "amp_bf16": 2.2, "tf32": 1.9, "amp_fp16": 2.3}
    model_factor = {"mlp": 1.0, "vit_tiny": 1.2, "bert_mini": 0.9, "gpt2_mini": 1.05}
    measured = []
    for model in models:
        for precision in precisions:
            for world_size in world_sizes:
                for batch in batches:
                    bare = Measurement(
                        source="made up",
                        model=model,
                        task_input="",
                        gpu=gpu,
                        nodes=1,
                        world_size=world_size,
                        precision=precision,
                        strategy="ddp",
                        per_gpu_batch_size=batch,
                        gradient_accumulation_steps=1,
                        framework="pytorch",
                        iteration_time_s=1.0,
                    )
                    closed = observe([bare])[0].closed
                    wobble = math.exp(rng.gauss(0, noise))
                    compute = closed.compute_time_s * compute_factor[precision] * model_factor.get(model, 1.0) * wobble
                    communication = closed.communication_time_s * 1.5
                    exposed = closed.exposed_communication_s * 1.5
                    measured.append(
                        replace(
                            bare,
                            iteration_time_s=compute + exposed,
                            compute_time_s=compute,
                            communication_time_s=communication,
                            exposed_communication_s=exposed,
                            iterations=20,
                            cell_id=hashlib.sha256(
                                repr((model, precision, world_size, batch, seed)).encode()
                            ).hexdigest()[:16],
                        )
                    )
    return measured


@pytest.fixture(scope="session")
def measure() -> Measure:
    """Make up measurements of a world where the truth is known; see ``_measure`` for what can be chosen."""
    return _measure


def _record(url: str, measurements: Sequence[Measurement]) -> None:
    from precision_time.storage.schema import IterationTiming
    from precision_time.storage.timings import TimingsDataset

    dataset = TimingsDataset(url)
    for measured in measurements:
        parts = {
            "iteration_time_s": measured.iteration_time_s,
            "forward_time_s": 0.3 * measured.iteration_time_s,
            "backward_time_s": 0.6 * measured.iteration_time_s,
            "optimizer_time_s": 0.1 * measured.iteration_time_s,
            "compute_time_s": measured.compute_time_s,
            "communication_time_s": measured.communication_time_s,
            "exposed_communication_s": measured.exposed_communication_s,
        }
        rows = [
            IterationTiming(
                cell_id=measured.cell_id,
                attempt=1,
                model=measured.model,
                task_input="",
                requested_precision=measured.precision,
                effective_precision=measured.precision,
                world_size=measured.world_size,
                nodes=1,
                per_gpu_batch_size=measured.per_gpu_batch_size,
                gradient_accumulation_steps=1,
                strategy="ddp",
                rank=rank,
                step=step,
                is_warmup=False,
                is_steady=True,
                bucket_count=1,
                bucket_bytes=4,
                loss_scale=None,
                step_skipped=False,
                peak_memory_bytes=1,
                model_params=1,
                device_type="cuda",
                gpu=measured.gpu,
                cpu_model="x",
                cpu_cores=8,
                threads_per_rank=1,
                driver_version="1",
                cuda_version="1",
                framework="pytorch",
                framework_version="2",
                backend="nccl",
                float32_matmul_precision="highest",
                host="here",
                load_average=0.0,
                recorded_at=1.0,
                **parts,
            )
            for rank in range(measured.world_size)
            for step in range(3)
        ]
        dataset.record(rows)


@pytest.fixture(scope="session")
def record() -> Callable[[str, Sequence[Measurement]], None]:
    """Write measurements into the dataset at a URL as three equal steps of each rank."""
    return _record


def _publish(url: str, measurements: Sequence[Measurement]) -> None:
    from precision_time.predictor.answering.artifact import pack_artifact
    from precision_time.predictor.learning.boosting import choose_parameters
    from precision_time.predictor.learning.hierarchy import STAGE_FEATURES, HierarchicalPredictor
    from precision_time.predictor.rows.observations import observe
    from precision_time.storage.manifests import ArtifactFile, ArtifactManifest
    from precision_time.storage.registry import Registry

    rows = observe(measurements)
    predictor = HierarchicalPredictor.fit(rows).with_intervals(
        {"known": 0.1, "new model": 0.5, "new family": 0.5}, level=0.9
    )
    cells = [seen.measurement.cell_id for seen in rows]
    files = pack_artifact(predictor, workloads=[rows[0].setup.workload], hardware=[])
    files["training.json"] = json.dumps({"cells": cells}).encode()

    def describe(version: int, listed: tuple[ArtifactFile, ...]) -> ArtifactManifest:
        return ArtifactManifest(
            name="default",
            version=version,
            created_at="2026-01-01T00:00:00+00:00",
            files=listed,
            feature_names={stage: list(STAGE_FEATURES[stage]) for stage in predictor.forests},
            hardware=list(predictor.domain.gpus),
            default_gpu=predictor.domain.gpus[0],
            precisions=list(predictor.domain.precisions),
            training_data_sha256="0" * 64,
            training_rows=len(rows),
            training_configurations=len(rows),
            holdout_models=[],
            seed=0,
            parameters=choose_parameters(len(measurements)),
            accuracy={},
            package_versions={},
        )

    Registry(url).publish("default", files, describe=describe)


@pytest.fixture(scope="session")
def publish_made_up() -> Callable[[str, Sequence[Measurement]], None]:
    """Publish a predictor of measurements as the next version of ``default``, without gate or validation."""
    return _publish
