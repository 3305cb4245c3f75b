"""CA-SGD on one process against a NumPy loop and scikit-learn; run: python tests/benchmarks/bench_casgd.py

Prints two tables, both of seconds (smallest of several repeats): an epoch at s = 1 beside the straightforward NumPy
loop (aim: at most 1.3 times), and whole fits beside scikit-learn's SGDClassifier and LogisticRegression(lbfgs) with
their loss and accuracy. Communication avoidance cannot help on one process: s > 1 only adds work there, and for these
convex problems lbfgs is the better choice. Set OMP_NUM_THREADS=1 to compare one core with one core.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression, SGDClassifier

from precision_time.casgd.ca_sgd import run_ca_sgd
from precision_time.casgd.objectives import LOGISTIC
from precision_time.casgd.problem import Options, Problem, Schedule, batch_order

L2 = 1e-4
SHAPES = ((100_000, 28), (10_000, 2000))


def run_plain_numpy(x: np.ndarray, y: np.ndarray, *, eta0: float, batch_size: int, epochs: int) -> np.ndarray:
    """The simplest loop: logistic loss, L2, intercept, constant step, the type of x."""
    number = x.dtype.type
    weights, intercept = np.zeros(x.shape[1], dtype=x.dtype), number(0)
    for epoch in range(epochs):
        rows = batch_order(len(y), batch_size, epoch, order="shuffled", seed=0)
        for start in range(0, len(y), batch_size):
            batch = rows[start : start + batch_size]
            xb, yb = x[batch], y[batch]
            z = xb @ weights + intercept
            r = -yb / (1 + np.exp(yb * z)) / number(len(batch))
            weights -= number(eta0) * (xb.T @ r + number(L2) * weights)
            intercept -= number(eta0) * r.sum()
    return weights


def time_best(job: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Smallest wall seconds of ``job``, and its last result."""
    best, result = np.inf, None
    for _ in range(repeats):
        began = time.perf_counter()
        result = job()
        best = min(best, time.perf_counter() - began)
    return best, result


def make_data(m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(m, n)).astype(np.float32)
    margins = x @ rng.normal(size=n).astype(np.float32) * np.float32(3 / np.sqrt(n))
    return x, np.where(rng.random(m) < 1 / (1 + np.exp(-margins)), 1, -1).astype(np.float32)


def compare_epochs(x: np.ndarray, y: np.ndarray, *, repeats: int) -> list[dict[str, Any]]:
    """Seconds of an epoch: the NumPy loop, CA-SGD at s = 1, and at s = 8 to show its cost without a network."""
    rows = []
    problem = Problem(features=x, targets=y, objective=LOGISTIC, l2=L2)
    for batch_size in (16, 32, 128):
        eta0, epochs = 0.01, 2

        def solve(s: int, size: int = batch_size, eta0: float = eta0, epochs: int = epochs) -> Any:
            shared = Options(s=s, batch_size=size, epochs=epochs, schedule=Schedule("constant", eta0))
            return run_ca_sgd(problem, shared)

        def plain(size: int = batch_size, eta0: float = eta0, epochs: int = epochs) -> Any:
            return run_plain_numpy(x, y, eta0=eta0, batch_size=size, epochs=epochs)

        plain_s, _ = time_best(plain, repeats)
        ours_s, _ = time_best(lambda solve=solve: solve(1), repeats)
        eight_s, _ = time_best(lambda solve=solve: solve(8), 1)
        rows.append(
            {
                "m": x.shape[0],
                "n": x.shape[1],
                "b": batch_size,
                "numpy_s": round(plain_s / epochs, 4),
                "casgd_s1_s": round(ours_s / epochs, 4),
                "ratio": round(ours_s / plain_s, 2),
                "casgd_s8_s": round(eight_s / epochs, 4),
            }
        )
    return rows


def compare_fits(x: np.ndarray, y: np.ndarray, *, repeats: int) -> list[dict[str, Any]]:
    """Seconds, loss (with the penalty) and training accuracy of whole fits with the same L2."""
    problem = Problem(features=x, targets=y, objective=LOGISTIC, l2=L2)
    steps = -(-x.shape[0] // 32)
    eta0 = 4 / float(np.square(x).sum(axis=1).max())
    schedule = Schedule("optimal", 4 * eta0, alpha=1 / (4 * eta0 * steps))

    def ours(policy: str) -> tuple[np.ndarray, float]:
        solution = run_ca_sgd(problem, Options(batch_size=32, epochs=5, schedule=schedule, policy=policy))
        return solution.weights, solution.intercept

    def theirs(model: Any) -> tuple[np.ndarray, float]:
        model.fit(x, y)
        return model.coef_[0], float(model.intercept_[0])

    jobs: dict[str, Callable[[], tuple[np.ndarray, float]]] = {
        "casgd s=1 b=32, 5 epochs, fp32": lambda: ours("fp32"),
        "casgd s=1 b=32, 5 epochs, recipe": lambda: ours("recipe"),
        "SGDClassifier, 5 epochs": lambda: theirs(SGDClassifier(loss="log_loss", alpha=L2, max_iter=5, tol=None)),
        "LogisticRegression(lbfgs)": lambda: theirs(LogisticRegression(C=1 / (L2 * len(y)))),
    }
    rows = []
    for name, job in jobs.items():
        seconds, (weights, intercept) = time_best(job, repeats)
        z = x.astype(np.float64) @ np.asarray(weights, dtype=np.float64) + intercept
        loss = float(LOGISTIC.loss(z, y).mean() + L2 / 2 * np.sum(np.square(weights, dtype=np.float64)))
        right = float(np.mean((z > 0) == (y > 0)))
        shape = {"m": x.shape[0], "n": x.shape[1], "solver": name}
        rows.append({**shape, "seconds": round(seconds, 3), "loss": round(loss, 5), "accuracy": round(right, 4)})
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) for name in rows[0]}
    for row in [dict(zip(rows[0], rows[0], strict=True)), *rows]:
        print("  ".join(str(row[name]).rjust(width) for name, width in widths.items()))
    print()


def main() -> None:
    repeats = 3
    data = [make_data(m, n) for m, n in SHAPES]
    epochs = [row for x, y in data for row in compare_epochs(x, y, repeats=repeats)]
    fits = [row for x, y in data for row in compare_fits(x, y, repeats=repeats)]
    if "--json" in sys.argv[1:]:
        print(json.dumps({"epochs": epochs, "fits": fits}, indent=1))
        return
    print_table(epochs)
    print_table(fits)


if __name__ == "__main__":
    main()
