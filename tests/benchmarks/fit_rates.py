"""Fit the slow-downs of predictor/data/rates.toml on public rows, and print the file.

Run: python tests/benchmarks/fit_rates.py > rates.toml

The fit uses rows of at most eight GPUs whose network was walked and belongs to the tuning half (its name has an even
CRC-32, as in tune_parameters.py). The loss is a Huber-like mean of the log error of the whole iteration, with the row
weights of training. Parts that no walk describes (optimizer, communication) keep their closed form.
"""

import sys
import zlib

import numpy as np
from scipy.optimize import minimize

from precision_time.predictor.closed_form.roofline import describe_passes, divide_work
from precision_time.predictor.closed_form.walked_time import FUSIBLE, SLOWDOWNS, TRAFFIC, UNITS, NominalWork
from precision_time.predictor.rows.observations import Observation, observe_table, weigh_rows
from precision_time.predictor.rows.public_table import load_public_table
from precision_time.predictor.workloads.walk import PRODUCTS

MOST_RANKS = 8
#: Log error beyond which the loss grows linearly.
SOFT = 0.1
#: Strength of the pull of each slow-down to its start. Ten times weaker, the closed forms alone were 1 to 2 points
#: better on the other half, and the trees on top of them 2 points worse on families left out.
PRIOR = 2e-2
START = {
    **dict.fromkeys((*PRODUCTS, *TRAFFIC, "weight_traffic"), 2.0),
    "launch": 5.0,
    **dict.fromkeys(("tf32", "half", "eighth"), 1.2),
    "score_traffic": 8.0,
    "fused": 0.6,
}
GRADIENT_STEP = 1e-5


def in_tuning_half(observation: Observation) -> bool:
    """Whether the slow-downs may be fitted on the network of a row."""
    return zlib.crc32(observation.network.encode()) % 2 == 0


class Rows:
    """The nominal work of rows as arrays, and their times for given slow-downs."""

    def __init__(self, observations: list[Observation]) -> None:
        passes = [_weighted_passes(observation) for observation in observations]
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

        def index_unit(unit: str | None) -> int:
            return units.index(unit) if unit else len(units)

        # the unit of each family of products (columns) in each row
        self.unit = np.array(
            [
                [
                    index_unit(works[0][1].attention_unit if family == "attention" else works[0][1].unit)
                    for family in PRODUCTS
                ]
                for works in passes
            ]
        )
        self.units = units
        self.fused = np.array([works[0][1].fused for works in passes])
        self.rest_s = np.array([_rest_s(observation) for observation in observations])
        self.measured = np.log([observation.measurement.iteration_time_s for observation in observations])
        weights = weigh_rows(observations)
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
        """The loss at the logs of the slow-downs."""
        error = np.log(self.times_s(dict(zip(SLOWDOWNS, np.exp(logs), strict=True)))) - self.measured
        start = np.log([START[name] for name in SLOWDOWNS])
        return float(self.weights @ np.sqrt(error**2 + SOFT**2) + PRIOR * ((logs - start) ** 2).sum())


def _weighted_passes(observation: Observation) -> list[tuple[float, NominalWork]]:
    setup = observation.setup
    forward, backward, recomputed = describe_passes(
        setup.workload, setup.hardware, setup.precision, batch_size=setup.batch_size,
        share=divide_work(setup.workload, setup.layout), implementation=setup.implementation,
    )  # fmt: skip
    steps = setup.gradient_accumulation_steps
    return [(steps * (1.0 + recomputed), forward), (float(steps), backward)]


def _rest_s(observation: Observation) -> float:
    closed = observation.closed
    return closed.iteration_time_s - closed.forward_time_s - closed.backward_time_s - closed.recompute_time_s


def main() -> None:
    """Fit, and print the slow-downs as TOML."""
    observations, _ = observe_table(load_public_table().kept)
    walked = [
        observation
        for observation in observations
        if observation.setup.workload.walks is not None and observation.setup.world_size <= MOST_RANKS
    ]
    tuning, other = (
        Rows([observation for observation in walked if in_tuning_half(observation) is wanted])
        for wanted in (True, False)
    )
    logs = np.log([START[name] for name in SLOWDOWNS])

    def gradient(at: np.ndarray) -> np.ndarray:
        steps = np.eye(len(at)) * GRADIENT_STEP
        return np.array([(tuning.loss(at + step) - tuning.loss(at - step)) / (2 * GRADIENT_STEP) for step in steps])

    fitted = minimize(tuning.loss, logs, jac=gradient, method="L-BFGS-B", options={"maxiter": 200}).x
    slowdowns = dict(zip(SLOWDOWNS, np.exp(fitted), strict=True))
    print("# Seconds over nominal seconds: FLOPs at the dense peak, bytes at the memory's bandwidth, launches at one")
    print("# overhead each; see predictor/closed_form/walked_time.py. Made by: python tests/benchmarks/fit_rates.py")
    for name, rows in (("taught", tuning), ("other", other)):
        error = np.abs(np.exp(np.log(rows.times_s(slowdowns)) - rows.measured) - 1)
        print(f"# {name} half: {len(error)} rows, mean error {error.mean():.1%}, median {np.median(error):.1%}")
    print("[slowdowns]")
    for name, value in slowdowns.items():
        print(f"{name} = {value:.3g}")


if __name__ == "__main__":
    sys.exit(main())
