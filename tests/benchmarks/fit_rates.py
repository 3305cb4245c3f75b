"""Fit the slow-downs of predictor/data/rates.toml on public rows, and print the file.

Run: python tests/benchmarks/fit_rates.py > rates.toml

Only rows of at most eight GPUs whose network was walked and belongs to the tuning half (those whose name has an even
CRC-32, as in tune_parameters.py) teach. The loss is a Huber-like mean of the log error of the whole iteration, each
row weighted as in training; what no walk describes (optimizer, communication) stays at its closed form.
"""

import sys
import zlib

import numpy as np
from scipy.optimize import minimize

from precision_time.predictor.closed_form.roofline import WHOLE, describe_passes, divide_work
from precision_time.predictor.closed_form.walked_time import FUSIBLE, SLOWDOWNS, TRAFFIC, UNITS, NominalWork
from precision_time.predictor.rows.features import Query
from precision_time.predictor.rows.observations import Observation, observe_table, weigh_rows
from precision_time.predictor.rows.public_table import load_public_table
from precision_time.predictor.workloads.walk import PRODUCTS

MOST_RANKS = 8
#: Log error from which on the loss grows linearly.
SOFT = 0.1
#: How strongly each slow-down is held to its start. Ten times weaker, the closed forms alone came 1 to 2 points nearer
#: to the other half, and the trees on top of them 2 points further from families left out.
PRIOR = 2e-2
START = {
    **dict.fromkeys((*PRODUCTS, *TRAFFIC, "weight_traffic"), 2.0),
    "launch": 5.0,
    **dict.fromkeys(("tf32", "half", "eighth"), 1.2),
    "score_traffic": 8.0,
    "fused": 0.6,
}
GRADIENT_STEP = 1e-5


def in_tuning_half(seen: Observation) -> bool:
    """Whether the network of a row may be tuned on."""
    return zlib.crc32(seen.network.encode()) % 2 == 0


class Rows:
    """The nominal work of rows as arrays, and their times for given slow-downs."""

    def __init__(self, rows: list[Observation]) -> None:
        passes = [_weighted_passes(seen) for seen in rows]
        self.passes = []
        for number in range(len(passes[0])):
            works = [works[number] for works in passes]
            self.passes.append(
                (
                    np.array([work.products for _, work in works]),
                    np.array([work.fp32_products for _, work in works]),
                    np.array([(*work.traffic, work.weights, work.scores) for _, work in works]),
                    np.array([work.launches for _, work in works]),
                    np.array([times for times, _ in works]),
                )
            )
        units = list(dict.fromkeys(UNITS.values()))

        def number(unit: str | None) -> int:
            return units.index(unit) if unit else len(units)

        # of each row, the unit of each family of products
        self.unit = np.array(
            [
                [
                    number(works[0][1].attention_unit if family == "attention" else works[0][1].unit)
                    for family in PRODUCTS
                ]
                for works in passes
            ]
        )
        self.units = units
        self.fused = np.array([works[0][1].fused for works in passes])
        self.rest_s = np.array([_rest_s(seen) for seen in rows])
        self.measured = np.log([seen.measurement.iteration_time_s for seen in rows])
        weights = weigh_rows(rows)
        self.weights = weights / weights.sum()

    def times_s(self, slowdowns: dict[str, float]) -> np.ndarray:
        """Seconds of the iteration of each row."""
        product = np.array([slowdowns[name] for name in PRODUCTS])
        traffic = np.array([slowdowns[name] for name in (*TRAFFIC, "weight_traffic", "score_traffic")])
        fusible = np.array([*(name in FUSIBLE for name in TRAFFIC), False, False])
        scaled = np.where(fusible, np.where(self.fused[:, None], slowdowns["fused"], 1.0), 1.0) * traffic
        unit = np.array([*(slowdowns[name] for name in self.units), 1.0])[self.unit]
        total = self.rest_s.copy()
        for narrow, wide, moved, launches, times in self.passes:
            device = np.minimum(unit * narrow, wide) @ product + (moved * scaled).sum(axis=1)
            host = slowdowns["launch"] * launches
            total = total + times * (device**4 + host**4) ** 0.25
        return total

    def loss(self, logs: np.ndarray) -> float:
        """What is made small, for the logs of the slow-downs."""
        error = np.log(self.times_s(dict(zip(SLOWDOWNS, np.exp(logs), strict=True)))) - self.measured
        start = np.log([START[name] for name in SLOWDOWNS])
        return float(self.weights @ np.sqrt(error**2 + SOFT**2) + PRIOR * ((logs - start) ** 2).sum())


def _share(seen: Observation):
    setup = seen.setup
    return WHOLE if setup.parallelism is None else divide_work(setup.workload, setup.layout)


def _weighted_passes(seen: Observation) -> list[tuple[float, NominalWork]]:
    setup = seen.setup
    forward, backward, again = describe_passes(
        setup.workload, setup.hardware, setup.precision,
        batch_size=setup.batch_size, share=_share(seen), implementation=setup.implementation,
    )  # fmt: skip
    steps = setup.gradient_accumulation_steps
    return [(steps * (1.0 + again), forward), (float(steps), backward)]


def _rest_s(seen: Observation) -> float:
    closed = seen.closed
    return closed.iteration_time_s - closed.forward_time_s - closed.backward_time_s - closed.recompute_time_s


def main() -> None:
    """Fit, and print the slow-downs as TOML."""
    observations, _ = observe_table(load_public_table().kept)
    walked = [
        Observation(measurement=seen.measurement, query=Query.of(seen.setup), index=seen.index)
        for seen in observations
        if seen.setup.workload.walks is not None and seen.setup.world_size <= MOST_RANKS
    ]
    halves = [[seen for seen in walked if in_tuning_half(seen) is wanted] for wanted in (True, False)]
    taught, other = (Rows(rows) for rows in halves)
    logs = np.log([START[name] for name in SLOWDOWNS])

    def gradient(at: np.ndarray) -> np.ndarray:
        steps = np.eye(len(at)) * GRADIENT_STEP
        return np.array([(taught.loss(at + step) - taught.loss(at - step)) / (2 * GRADIENT_STEP) for step in steps])

    found = minimize(taught.loss, logs, jac=gradient, method="L-BFGS-B", options={"maxiter": 200}).x
    slowdowns = dict(zip(SLOWDOWNS, np.exp(found), strict=True))
    print("# Seconds over nominal seconds: FLOPs at the dense peak, bytes at the memory's bandwidth, launches at one")
    print("# overhead each; see predictor/closed_form/walked_time.py. Made by: python tests/benchmarks/fit_rates.py")
    for name, rows in (("taught", taught), ("other", other)):
        error = np.abs(np.exp(np.log(rows.times_s(slowdowns)) - rows.measured) - 1)
        print(f"# {name} half: {len(error)} rows, mean error {error.mean():.1%}, median {np.median(error):.1%}")
    print("[slowdowns]")
    for name, value in slowdowns.items():
        print(f"{name} = {value:.3g}")


if __name__ == "__main__":
    sys.exit(main())
