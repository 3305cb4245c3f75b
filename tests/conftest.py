"""Fixtures that several folders share: a made-up world whose timings are known, and a dataset of it."""

import hashlib
import math
import random
from collections.abc import Callable, Sequence

import pytest

from precision_time.storage.schema import Measurement

Measure = Callable[..., list[Measurement]]


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
    from precision_time.predictor.hierarchy import observe

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
                        Measurement(
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
