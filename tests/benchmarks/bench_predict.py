"""Speed of a prediction, as ratios that hold on any machine; run: python tests/benchmarks/bench_predict.py

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


def bulk_answers() -> dict[str, float]:
    """Rows of the public table answered by the bundled artifact, over the trees alone of XGBoost on ready features."""
    import xgboost

    from precision_time.predictor.answering.answers import answer_queries
    from precision_time.predictor.answering.artifact import load_bundled
    from precision_time.predictor.rows.features import SETUP_FEATURES, Query, feature_matrix
    from precision_time.predictor.rows.observations import observe_table
    from precision_time.predictor.rows.public_table import load_public_table

    observations, _ = observe_table(load_public_table().kept)
    rows = observations[::4]
    setups = [row.setup for row in rows]
    published = load_bundled()
    queries = [Query.of(setup) for setup in setups]
    matrix = feature_matrix([query.row for query in queries], SETUP_FEATURES)
    residual = np.log([row.measurement.iteration_time_s / row.closed.iteration_time_s for row in rows])
    booster = xgboost.train({"max_depth": 6, "nthread": 1}, xgboost.DMatrix(matrix, residual), num_boost_round=1100)
    whole = paired_ratio(
        lambda: timed(lambda: answer_queries([Query.of(setup) for setup in setups], published=published), repeat=1),
        lambda: timed(lambda: booster.predict(xgboost.DMatrix(matrix)), repeat=1),
        pairs=5,
    )
    described = statistics.median(
        timed(lambda: answer_queries(queries, published=published), repeat=1) for _ in range(5)
    )
    return whole | {
        "rows_per_s": len(setups) / whole["seconds"],
        "rows_per_s_of_described_queries": len(setups) / described,
        "xgboost_rows_per_s": len(setups) / whole["reference_seconds"],
    }


def one_fit() -> dict[str, float]:
    """Seconds and peak memory (bytes) of one fit on the whole public table, on one thread."""
    import resource

    from precision_time.predictor.learning.hierarchy import HierarchicalPredictor
    from precision_time.predictor.rows.observations import observe_table
    from precision_time.predictor.rows.public_table import load_public_table

    observations, _ = observe_table(load_public_table().kept)
    seconds = timed(lambda: HierarchicalPredictor.fit(observations), repeat=1)
    return {"seconds": seconds, "peak_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


if __name__ == "__main__":
    results = {
        "cold_prediction": cold_prediction(),
        "warm_prediction": warm_prediction(),
        "bulk_answers": bulk_answers(),
        "one_fit": one_fit(),
    }
    print(json.dumps(results, indent=1))
