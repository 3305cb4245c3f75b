"""HierarchicalPredictor: a compute model, a communication model, and an aggregator of the share that stays exposed."""

import functools
import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.features import (
    ClosedForm,
    TrainingSetup,
    describe_setup,
    feature_matrix,
    solve_closed_form,
)
from precision_time.predictor.hardware import HardwareSpec, find_hardware
from precision_time.predictor.precision import parse_precision
from precision_time.predictor.splits import split_by_group
from precision_time.predictor.trees import FlatForest, flatten_xgboost, forests_from_bytes, forests_to_bytes
from precision_time.predictor.workload import WorkloadFeatures, find_workload
from precision_time.storage.errors import InputError, IntegrityError
from precision_time.storage.schema import Measurement

__all__ = [
    "REGIMES",
    "STAGE_FEATURES",
    "HierarchicalPredictor",
    "Observation",
    "PredictedParts",
    "TrainingDomain",
    "observe",
]

REGIMES = ("known", "new gpu", "new model", "new model and gpu", "beyond scale")

_COMPUTE = (
    "log_closed_compute_s", "log_flops", "log_forward_bytes", "log_intensity", "log_params", "log_parameter_tensors",
    "log_batch", "log_operations", "launch_bound", "convolution_share", "attention_share", "optimizer_share",
    "log_peak_flops_per_s", "log_peak_over_fp32", "log_memory_bytes_per_s", "is_cpu", "compute_bytes",
    "storage_bytes", "loss_scaling", "accumulation", "log_world_size",
)  # fmt: skip
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
    "compute": _COMPUTE,
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
class Observation:
    """A measurement joined with its setup, closed form and feature row: what fitting and scoring read."""

    measurement: Measurement
    setup: TrainingSetup
    closed: ClosedForm
    row: dict[str, float]

    @classmethod
    def of(cls, measurement: Measurement, setup: TrainingSetup) -> "Observation":
        """Solve and describe ``setup`` beside what was measured."""
        closed = solve_closed_form(setup)
        return cls(measurement=measurement, setup=setup, closed=closed, row=describe_setup(setup, closed))

    @property
    def compute_time_s(self) -> float | None:
        """Measured compute; on one rank the whole iteration is compute."""
        if self.setup.world_size == 1:
            return self.measurement.iteration_time_s
        return self.measurement.compute_time_s


def observe(
    measurements: Iterable[Measurement],
    *,
    workloads: Sequence[WorkloadFeatures] = (),
    hardware: Sequence[HardwareSpec] = (),
) -> list[Observation]:
    """Join measurements with the cards of their models and the specifications of their hardware.

    Raises ``UnknownNameError`` for a model or GPU that neither the given cards nor the shipped ones describe.
    """
    find_card = functools.cache(functools.partial(find_workload, measured=tuple(workloads)))
    find_device = functools.cache(functools.partial(find_hardware, measured=tuple(hardware)))
    return [
        Observation.of(
            measured,
            TrainingSetup(
                workload=find_card(measured.model),
                hardware=find_device(measured.gpu),
                precision=parse_precision(measured.precision),
                world_size=measured.world_size,
                nodes=measured.nodes,
                batch_size=measured.per_gpu_batch_size,
                gradient_accumulation_steps=measured.gradient_accumulation_steps,
                strategy=measured.strategy,
            ),
        )
        for measured in measurements
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDomain:
    """What the training data covered."""

    models: tuple[str, ...]
    gpus: tuple[str, ...]
    precisions: tuple[str, ...]
    max_world_size: int
    max_accumulation_steps: int
    batch_sizes: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, observations: Sequence[Observation]) -> "TrainingDomain":
        """The domain spanned by ``observations``."""
        batches: dict[str, tuple[int, int]] = {}
        for seen in observations:
            name, size = seen.measurement.model, seen.setup.batch_size
            low, high = batches.get(name, (size, size))
            batches[name] = (min(low, size), max(high, size))
        return cls(
            models=tuple(sorted({seen.measurement.model for seen in observations})),
            gpus=tuple(sorted({seen.setup.hardware.name for seen in observations})),
            precisions=tuple(sorted({seen.setup.precision.name for seen in observations})),
            max_world_size=max(seen.setup.world_size for seen in observations),
            max_accumulation_steps=max(seen.setup.gradient_accumulation_steps for seen in observations),
            batch_sizes=batches,
        )

    def list_gaps(self, setup: TrainingSetup) -> list[str]:
        """In words, what of ``setup`` the training data never held; empty inside the domain."""
        gaps = []
        if setup.workload.name not in self.models:
            gaps.append(f"{setup.workload.name} was never seen, only {', '.join(self.models)}")
        elif (
            not self.batch_sizes[setup.workload.name][0] <= setup.batch_size <= self.batch_sizes[setup.workload.name][1]
        ):
            low, high = self.batch_sizes[setup.workload.name]
            gaps.append(f"batch {setup.batch_size} is outside the measured {low} to {high}")
        if setup.world_size > self.max_world_size:
            gaps.append(f"at most {self.max_world_size} ranks were measured")
        if setup.precision.name not in self.precisions:
            gaps.append(f"{setup.precision.name} was never measured, only {', '.join(self.precisions)}")
        if setup.gradient_accumulation_steps > self.max_accumulation_steps:
            gaps.append(f"at most {self.max_accumulation_steps} micro-steps in an iteration were measured")
        return gaps

    def regime_of(self, setup: TrainingSetup) -> str:
        """How far ``setup`` is from the training data: one of ``REGIMES``."""
        known_model = setup.workload.name in self.models
        known_gpu = setup.hardware.name in self.gpus
        if known_model and known_gpu:
            return "beyond scale" if setup.world_size > self.max_world_size else "known"
        if known_model:
            return "new gpu"
        return "new model" if known_gpu else "new model and gpu"


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

        rows = [seen.row for seen in timed]
        targets = np.array([math.log((seen.compute_time_s or 0.0) / seen.closed.compute_time_s) for seen in timed])
        correction = train("compute", timed, rows, targets)

        parallel = [number for number, seen in enumerate(timed) if seen.measurement.communication_time_s]
        if len(parallel) >= 4:
            logs = [math.log(seen.closed.compute_time_s) for seen in timed]
            rows = [timed[i].row | {"log_compute_s": logs[i] + correction[i]} for i in parallel]
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

    def predict(self, rows: Sequence[dict[str, float]], closed: Sequence[ClosedForm]) -> PredictedParts:
        """Seconds by part for feature rows of ``describe_setup`` and their closed forms."""

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
