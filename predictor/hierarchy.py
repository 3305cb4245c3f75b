"""HierarchicalPredictor: a compute model, a communication model, and an aggregator of the share that stays exposed."""

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.domain import TrainingDomain
from precision_time.predictor.features import SETUP_FEATURES, Query, feature_matrix
from precision_time.predictor.observations import Observation
from precision_time.predictor.splits import split_by_group
from precision_time.predictor.trees import FlatForest, flatten_xgboost, forests_from_bytes, forests_to_bytes
from precision_time.storage.errors import InputError, IntegrityError

__all__ = ["STAGE_FEATURES", "HierarchicalPredictor", "PredictedParts"]

_COMMUNICATION = (
    "log_closed_communication_s", "log_message_bytes", "bucket_count", "log_link_bytes_per_s", "log_world_size",
    "log_nodes", "is_cpu", "log_compute_s",
)  # fmt: skip
_EXPOSED = (
    "closed_exposed_share", "log_communication_over_compute", "log_compute_s", "bucket_count", "log_world_size",
    "log_nodes", "is_cpu", "compute_bytes", "loss_scaling", "optimizer_share",
)  # fmt: skip

#: The columns each stage reads. ``log_compute_s`` and ``log_communication_over_compute`` are stacked: predictions of
#: the stages before, out of fold during training.
STAGE_FEATURES: dict[str, tuple[str, ...]] = {
    "compute": SETUP_FEATURES,
    "communication": _COMMUNICATION,
    "exposed": _EXPOSED,
}

#: Shares below this are told apart by noise only, so logs of shares stop here.
_SMALLEST_SHARE = 0.02

#: Chosen for small campaigns: shallow trees and few rounds; retuned when a larger table is trained on.
PARAMETERS: dict[str, float | int | str] = {
    "objective": "reg:squarederror",
    "tree_method": "hist",
    "max_depth": 4,
    "eta": 0.1,
    "min_child_weight": 1.0,
    "lambda": 1.0,
    "subsample": 0.9,
    "rounds": 120,
    # one thread: results do not depend on the machine, and small fits are faster so
    "nthread": 1,
}
STACK_FOLDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedParts:
    """Seconds by part, each of shape (rows,); the iteration is compute plus exposed communication."""

    compute_time_s: npt.NDArray[np.float64]
    communication_time_s: npt.NDArray[np.float64]
    exposed_communication_s: npt.NDArray[np.float64]

    @property
    def iteration_time_s(self) -> npt.NDArray[np.float64]:
        """Seconds of one iteration."""
        return self.compute_time_s + self.exposed_communication_s


def _share(exposed_s: float, communication_s: float) -> float:
    return max(exposed_s / communication_s, _SMALLEST_SHARE) if communication_s > 0 else _SMALLEST_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalPredictor:
    """Three stages, each a boosted correction of a closed form.

    Compute: log(measured compute / roofline). Communication: log(measured bucket time / all-reduce model).
    Exposed: log(measured exposed share / share of the bucket timeline), reading what the first two say. An iteration
    is compute + share x communication. A stage without training rows leaves its closed form as it is.

    ``boosters`` holds XGBoost's own JSON of each stage (kept for inspection; serving reads ``forests`` alone) and
    ``radii`` the half width of the interval in log seconds for each calibrated regime at ``level``.
    """

    forests: Mapping[str, FlatForest]
    domain: TrainingDomain
    boosters: Mapping[str, bytes] = field(default_factory=dict)
    radii: Mapping[str, float] = field(default_factory=dict)
    level: float = 0.9

    @classmethod
    def fit(cls, observations: Sequence[Observation], *, seed: int = 0) -> "HierarchicalPredictor":
        """Train the three stages. Raises ``InputError`` when fewer than 4 rows have a compute time."""
        timed = [seen for seen in observations if seen.compute_time_s is not None]
        if len(timed) < 4:
            raise InputError(
                "too few measurements to train on",
                got=f"{len(timed)} rows",
                expected="at least 4 rows",
                fix="run a campaign with more cells",
            )
        forests: dict[str, FlatForest] = {}
        boosters: dict[str, bytes] = {}

        def train(
            stage: str, seen: list[Observation], rows: list[dict[str, float]], targets: npt.NDArray[np.float64]
        ) -> npt.NDArray[np.float64]:
            matrix = feature_matrix(rows, STAGE_FEATURES[stage])
            groups = [one.measurement.configuration for one in seen]
            boosters[stage], out_of_fold = _boost(matrix, targets, groups=groups, seed=seed)
            forests[stage] = flatten_xgboost(boosters[stage])
            return out_of_fold

        rows = [seen.query.row for seen in timed]
        targets = np.array([math.log((seen.compute_time_s or 0.0) / seen.closed.compute_time_s) for seen in timed])
        correction = train("compute", timed, rows, targets)

        parallel = [number for number, seen in enumerate(timed) if seen.measurement.communication_time_s]
        if len(parallel) >= 4:
            logs = [math.log(seen.closed.compute_time_s) for seen in timed]
            rows = [timed[i].query.row | {"log_compute_s": logs[i] + correction[i]} for i in parallel]
            timed = [timed[i] for i in parallel]
            measured = np.array([seen.measurement.communication_time_s for seen in timed], dtype=np.float64)
            closed = np.array([seen.closed.communication_time_s for seen in timed])
            correction = train("communication", timed, rows, np.log(measured / closed))

            rows = [
                row | {"log_communication_over_compute": math.log(closed[i]) + correction[i] - row["log_compute_s"]}
                for i, row in enumerate(rows)
            ]
            targets = np.array(
                [
                    math.log(
                        _share(seen.measurement.iteration_time_s - (seen.compute_time_s or 0.0), float(measured[i]))
                        / _share(seen.closed.exposed_communication_s, seen.closed.communication_time_s)
                    )
                    for i, seen in enumerate(timed)
                ]
            )
            train("exposed", timed, rows, targets)
        return cls(forests=forests, boosters=boosters, domain=TrainingDomain.of(observations))

    def predict(self, queries: Sequence[Query]) -> PredictedParts:
        """Seconds by part for each query."""
        rows, closed = [query.row for query in queries], [query.closed for query in queries]

        def correct(stage: str, base: npt.NDArray[np.float64], stacked: list[dict[str, float]]) -> npt.NDArray[Any]:
            if stage not in self.forests:
                return base
            correction = self.forests[stage].predict(feature_matrix(stacked, STAGE_FEATURES[stage]))
            return base * np.exp(correction.astype(np.float64))

        stacked = list(rows)
        compute = correct("compute", np.array([form.compute_time_s for form in closed]), stacked)
        communication = np.array([form.communication_time_s for form in closed])
        several = communication > 0
        if not several.any():
            return PredictedParts(
                compute_time_s=compute,
                communication_time_s=communication,
                exposed_communication_s=np.zeros_like(compute),
            )
        stacked = [row | {"log_compute_s": math.log(compute[i])} for i, row in enumerate(rows)]
        communication = np.where(several, correct("communication", communication, stacked), 0.0)
        if "exposed" not in self.forests:
            exposed = np.array([form.exposed_communication_s for form in closed])
            return PredictedParts(
                compute_time_s=compute, communication_time_s=communication, exposed_communication_s=exposed
            )
        stacked = [
            row
            | {"log_communication_over_compute": math.log(communication[i] / compute[i]) if several[i] else math.nan}
            for i, row in enumerate(stacked)
        ]
        shares = np.array([_share(form.exposed_communication_s, form.communication_time_s) for form in closed])
        exposed = np.where(several, correct("exposed", shares, stacked) * communication, 0.0)
        return PredictedParts(
            compute_time_s=compute, communication_time_s=communication, exposed_communication_s=exposed
        )

    def with_intervals(self, radii: Mapping[str, float], *, level: float) -> "HierarchicalPredictor":
        """The same predictor with interval radii by regime."""
        return replace(self, radii=dict(radii), level=level)

    def to_files(self) -> dict[str, bytes]:
        """The files of an artifact: ``trees.npz``, ``predictor.json`` and one XGBoost JSON per stage."""
        described = {
            "stages": {stage: list(STAGE_FEATURES[stage]) for stage in self.forests},
            "domain": asdict(self.domain),
            "radii": dict(self.radii),
            "level": self.level,
        }
        return {
            "predictor.json": (json.dumps(described, indent=1, sort_keys=True, allow_nan=False) + "\n").encode(),
            "trees.npz": forests_to_bytes(self.forests),
            **{f"xgboost-{stage}.json": model for stage, model in self.boosters.items()},
        }

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> "HierarchicalPredictor":
        """The inverse of ``to_files`` from files whose digests were verified; xgboost is not needed.

        Raises ``IntegrityError`` for stages or features this version does not know, and for broken trees.
        """
        try:
            described = json.loads(files["predictor.json"])
            stages = {str(stage): tuple(names) for stage, names in described["stages"].items()}
            domain = described["domain"]
            domain = TrainingDomain(
                **{name: tuple(domain[name]) for name in ("models", "gpus", "precisions")},
                max_world_size=int(domain["max_world_size"]),
                max_accumulation_steps=int(domain["max_accumulation_steps"]),
                batch_sizes={str(name): (int(low), int(high)) for name, (low, high) in domain["batch_sizes"].items()},
            )
            radii = {str(name): float(radius) for name, radius in described["radii"].items()}
            level = float(described["level"])
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise IntegrityError(
                "predictor.json does not describe a predictor",
                got=repr(error),
                expected="stages, domain, radii and level",
                fix="publish the artifact again",
            ) from error
        for stage, names in stages.items():
            if STAGE_FEATURES.get(stage) != names:
                raise IntegrityError(
                    f"the features of stage {stage!r} are not those of this version",
                    got=", ".join(names),
                    expected=", ".join(STAGE_FEATURES.get(stage, ("a known stage",))),
                    fix="retrain with this version of precision_time, or install the version that wrote the artifact",
                )
        counts = {stage: len(names) for stage, names in stages.items()}
        forests = forests_from_bytes(files["trees.npz"], feature_counts=counts)
        return cls(forests=forests, domain=domain, radii=radii, level=level)


def _boost(
    matrix: npt.NDArray[np.float32], targets: npt.NDArray[np.float64], *, groups: Sequence[Hashable], seed: int
) -> tuple[bytes, npt.NDArray[np.float64]]:
    """Fit boosted trees; returns XGBoost's JSON and each row's correction by trees that did not see its group.

    As many rounds are kept as serve the rows left out of inner folds best (mean absolute error), so that a handful of
    noisy rows ends near their median instead of being learned by heart.
    """
    import xgboost  # heavy, and needed for training only

    parameters = {name: value for name, value in PARAMETERS.items() if name != "rounds"}
    parameters |= {"seed": seed, "base_score": float(np.median(targets))}

    def boost(rows: npt.NDArray[np.bool_], rounds: int) -> bytes:
        data = xgboost.DMatrix(matrix[rows], targets[rows])
        return bytes(xgboost.train(parameters, data, num_boost_round=rounds).save_raw("json"))

    most = int(PARAMETERS["rounds"])
    after_round = np.empty((len(targets), most))
    folds = split_by_group(groups, folds=STACK_FOLDS, seed=seed)
    for fold in np.unique(folds):
        forest = flatten_xgboost(boost(folds != fold, most))
        after_round[folds == fold] = forest.base_score[0] + forest.leaf_values(matrix[folds == fold]).cumsum(axis=1)
    rounds = int(np.abs(after_round - targets[:, None]).mean(axis=0).argmin()) + 1
    return boost(np.ones(len(targets), dtype=np.bool_), rounds), after_round[:, rounds - 1]
