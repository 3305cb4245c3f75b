"""How fast a prediction is, as ratios that hold on any machine; run: python tests/benchmarks/bench_predict.py

Prints one JSON object. Ratios are medians of paired runs, so a busy machine moves both sides.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

QUESTION = "predict_time(model='resnet50', precision='mixed_fp16_fp32', gpus=8, batch_size=256)"


def seconds_of(command: list[str]) -> float:
    """Wall seconds of a fresh process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def paired_ratio(first: Callable[[], float], second: Callable[[], float], *, pairs: int) -> dict[str, float]:
    """Median seconds of both and the median of their ratios, alternating."""
    times = [(first(), second()) for _ in range(pairs)]
    return {
        "seconds": statistics.median(a for a, _ in times),
        "reference_seconds": statistics.median(b for _, b in times),
        "ratio": statistics.median(a / b for a, b in times),
    }


def timed(call: Callable[[], object], *, repeat: int) -> float:
    """Mean seconds of one call."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def cold_prediction() -> dict[str, float]:
    """A process that imports the package and predicts once, over one that imports numpy."""
    ours = [sys.executable, "-c", f"from precision_time import predict_time; {QUESTION}"]
    return paired_ratio(lambda: seconds_of(ours), lambda: seconds_of([sys.executable, "-c", "import numpy"]), pairs=9)


def warm_prediction() -> dict[str, float]:
    """A second prediction in the same process, over 100 sums of 1,000 numbers in numpy."""
    from precision_time import predict_time

    numbers = np.arange(1000.0)
    predict_time("resnet50", "amp_fp16", gpus=8, batch_size=256)
    return paired_ratio(
        lambda: timed(lambda: predict_time("resnet50", "amp_fp16", gpus=8, batch_size=256), repeat=200),
        lambda: timed(lambda: [numbers.sum() for _ in range(100)], repeat=200),
        pairs=9,
    )


def flat_trees() -> dict[str, float]:
    """Rows through the numpy evaluator over the same rows through XGBoost (one thread); 200 trees of depth 4."""
    import xgboost

    from precision_time.predictor.trees import flatten_xgboost

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2000, 20)).astype(np.float32)
    data = xgboost.DMatrix(rows, rows @ rng.normal(size=20))
    booster = xgboost.train({"max_depth": 4, "nthread": 1}, data, num_boost_round=200)
    forest = flatten_xgboost(bytes(booster.save_raw("json")))
    return paired_ratio(
        lambda: timed(lambda: forest.predict(rows), repeat=3),
        lambda: timed(lambda: booster.predict(data), repeat=3),
        pairs=5,
    )


if __name__ == "__main__":
    results = {"cold_prediction": cold_prediction(), "warm_prediction": warm_prediction(), "flat_trees": flat_trees()}
    print(json.dumps(results, indent=1))
