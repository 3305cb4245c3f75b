"""HierarchicalPredictor: models of compute, communication, exposed share and total, blended with the closed forms."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.blending import CLOSED_FORM_ONLY, Blend, apply_blend, learn_blend
from precision_time.predictor.learning.boosting import FEWEST_FOR_MANY, boost, boost_out_of_fold, choose_parameters
from precision_time.predictor.learning.domain import TrainingDomain
from precision_time.predictor.learning.error_covariance import ErrorCovariance, covariances_from_dict
from precision_time.predictor.learning.regimes import REGIMES, Regime
from precision_time.predictor.learning.splits import FEWEST_TO_LEARN
from precision_time.predictor.learning.trees import FlatForest, flatten_xgboost, forests_from_bytes, forests_to_bytes
from precision_time.predictor.rows.features import (
    OPEN_FEATURES,
    SETUP_FEATURES,
    Query,
    feature_matrix,
)
from precision_time.predictor.rows.observations import Observation, weigh_rows
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.storage.errors import InputError, IntegrityError

__all__ = ["STAGE_FEATURES", "HierarchicalPredictor", "PredictedParts", "closed_parts"]

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
    "total": SETUP_FEATURES,
}
#: Shares below this differ by noise only, so they are raised to it before their log is taken.
_SMALLEST_SHARE = 0.02
#: Stages that only divide a total need fewer rounds than the total. A campaign's own stages choose at most as many.
_STAGE_ROUNDS = {"rounds": 120}

#: This share of the rows is trained with the implementation features masked, so a question may leave them out.
_MASKED_SHARE = 0.05

#: The blends of a small campaign, which cannot learn any: its trees answer for the hardware that it measured.
_UNTESTED_BLENDS = {name: Blend(1.0, 1.0) for name, regime in REGIMES.items() if regime.is_trusted_untested}
#: Without a learned blend the trees answer every question alone.
_TREES_ALONE = {name: Blend(1.0, 1.0) for name in REGIMES}


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

    def rescale(self, iteration_time_s: npt.NDArray[np.float64]) -> "PredictedParts":
        """The same shares of a different iteration time."""
        factor = iteration_time_s / self.iteration_time_s
        return PredictedParts(
            compute_time_s=self.compute_time_s * factor,
            communication_time_s=self.communication_time_s * factor,
            exposed_communication_s=self.exposed_communication_s * factor,
        )


def _share(exposed_s: float, communication_s: float) -> float:
    return max(exposed_s / communication_s, _SMALLEST_SHARE) if communication_s > 0 else _SMALLEST_SHARE


def closed_parts(queries: Sequence[Query]) -> PredictedParts:
    """The parts of each query by the closed forms."""
    return PredictedParts(
        compute_time_s=np.array([query.closed.compute_time_s for query in queries]),
        communication_time_s=np.array([query.closed.communication_time_s for query in queries]),
        exposed_communication_s=np.array([query.closed.exposed_communication_s for query in queries]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalPredictor:
    """Four stages, each a boosted correction of a closed form, and a blend with the closed forms themselves.

    Compute: log(measured compute / roofline); on one rank the iteration is compute. Communication: log(measured bucket
    time / all-reduce model). Exposed: log(measured exposed share / share of the bucket timeline), given the first two.
    With these, an iteration is compute + share x communication. Total: log(measured iteration / closed form), trained
    on large tables, whose rows give only totals; it then decides the iteration, and the stages only divide it. A stage
    without training rows leaves its closed form as it is.

    ``blend`` gives, by regime, the weight of the trees and the factor on the closed forms, which get the rest.
    ``boosters`` holds XGBoost's JSON of each stage, for inspection; answers read ``forests`` alone. ``radii`` is the
    half width of the interval in log seconds at ``level``, by regime. ``covariances`` say how the errors of two
    questions correlate, so that measured rows correct other answers; an artifact may lack them.
    """

    #: what the total stage learns: the ratio to the closed form, from all columns, with a learned blend; studies in
    #: ``scoring.trials`` change these
    total_features: ClassVar[tuple[str, ...]] = STAGE_FEATURES["total"]
    total_is_ratio: ClassVar[bool] = True
    has_total: ClassVar[bool] = True
    has_blend: ClassVar[bool] = True

    forests: Mapping[str, FlatForest]
    domain: TrainingDomain
    blend: Mapping[str, Blend]
    boosters: Mapping[str, bytes] = field(default_factory=dict)
    radii: Mapping[str, float] = field(default_factory=dict)
    level: float = 0.9
    covariances: Mapping[str, ErrorCovariance] = field(default_factory=dict)

    @classmethod
    def fit(cls, observations: Sequence[Observation], *, seed: int = 0) -> Self:
        """Train the stages and the blend; raises ``InputError`` when fewer than 4 rows have a compute time."""
        timed = [observation for observation in observations if observation.compute_time_s is not None]
        if len(timed) < FEWEST_TO_LEARN:
            raise InputError(
                "too few measurements to train on",
                got=f"{len(timed)} rows",
                expected=f"at least {FEWEST_TO_LEARN} rows",
                fix="run a campaign with more cells",
            )
        boosters: dict[str, bytes] = {}
        _fit_stages(timed, boosters, seed=seed)
        # The rows of a small campaign give the parts, so it needs no stage for the whole iteration.
        has_totals = len(observations) >= FEWEST_FOR_MANY
        if has_totals and cls.has_total:
            boosters["total"] = cls._fit_total(observations, seed=seed)
        if not has_totals:
            blend = dict(_UNTESTED_BLENDS)
        else:
            blend = learn_blend(observations, seed=seed) if cls.has_blend else dict(_TREES_ALONE)
        return cls(
            forests={stage: flatten_xgboost(model) for stage, model in boosters.items()},
            boosters=boosters,
            domain=TrainingDomain.of(observations),
            blend=blend,
        )

    @classmethod
    def _fit_total(cls, observations: Sequence[Observation], *, seed: int) -> bytes:
        targets = np.log([observation.measurement.iteration_time_s for observation in observations])
        if cls.total_is_ratio:
            targets = targets - np.log([observation.closed.iteration_time_s for observation in observations])
        matrix = feature_matrix([observation.query.row for observation in observations], cls.total_features)
        masked = np.random.default_rng(seed).random(len(matrix)) < _MASKED_SHARE
        for name in OPEN_FEATURES:
            matrix[masked, cls.total_features.index(name)] = np.nan
        return boost(
            matrix,
            targets,
            parameters=choose_parameters(len(observations)),
            seed=seed,
            weights=weigh_rows(observations),
        )

    def blend_of(self, setup: TrainingSetup, regime: Regime) -> Blend:
        """The blend for ``setup``, which lies in ``regime``; the closed form alone where nothing was learned.

        Nothing was learned in a regime without a blend, and for CPUs or GPUs where none of the kind was measured.
        """
        if not self.domain.covers_kind(setup):
            return CLOSED_FORM_ONLY
        return self.blend.get(regime.name, CLOSED_FORM_ONLY)

    def predict(self, queries: Sequence[Query], blends: Sequence[Blend] | None = None) -> PredictedParts:
        """Seconds by part for each query; ``blends`` are those of ``blend_of``, looked up here by default."""
        if blends is None:
            blends = [self.blend_of(query.setup, self.domain.regime_of(query.setup)) for query in queries]
        parts = self._predict_stages(queries)
        closed_s = np.array([query.closed.iteration_time_s for query in queries])
        trees_s = parts.iteration_time_s
        if "total" in self.forests:
            rows = [query.row for query in queries]
            trees_s = np.exp(self.forests["total"].predict(feature_matrix(rows, self.total_features)))
            if self.total_is_ratio:
                trees_s = trees_s * closed_s
        return parts.rescale(apply_blend(blends, trees_s=trees_s, closed_s=closed_s))

    def _predict_stages(self, queries: Sequence[Query]) -> PredictedParts:
        rows, closed = [query.row for query in queries], closed_parts(queries)

        def correct(stage: str, base: npt.NDArray[np.float64], stacked: list[dict[str, float]]) -> npt.NDArray[Any]:
            if stage not in self.forests:
                return base
            correction = self.forests[stage].predict(feature_matrix(stacked, STAGE_FEATURES[stage]))
            return base * np.exp(correction.astype(np.float64))

        compute = correct("compute", closed.compute_time_s, list(rows))
        communication, exposed = closed.communication_time_s, closed.exposed_communication_s
        is_parallel = communication > 0
        if is_parallel.any() and "communication" in self.forests:
            stacked = [row | {"log_compute_s": math.log(compute[i])} for i, row in enumerate(rows)]
            communication = np.where(is_parallel, correct("communication", communication, stacked), 0.0)
            stacked = [
                row
                | {
                    "log_communication_over_compute": math.log(communication[i] / compute[i])
                    if is_parallel[i]
                    else math.nan
                }
                for i, row in enumerate(stacked)
            ]
            shares = np.array(
                [_share(query.closed.exposed_communication_s, query.closed.communication_time_s) for query in queries]
            )
            exposed = np.where(is_parallel, correct("exposed", shares, stacked) * communication, 0.0)
        return PredictedParts(
            compute_time_s=compute, communication_time_s=communication, exposed_communication_s=exposed
        )

    def with_intervals(self, radii: Mapping[str, float], *, level: float) -> Self:
        """The same predictor with interval radii by regime."""
        return replace(self, radii=dict(radii), level=level)

    def with_covariances(self, covariances: Mapping[str, ErrorCovariance]) -> Self:
        """The same predictor with the covariances of its errors."""
        return replace(self, covariances=dict(covariances))

    def to_files(self) -> dict[str, bytes]:
        """The files of an artifact: ``trees.npz``, ``predictor.json`` and one XGBoost JSON per stage."""
        description = {
            "stages": {stage: list(STAGE_FEATURES[stage]) for stage in self.forests},
            "domain": self.domain.to_dict(),
            "blend": {regime: list(blend) for regime, blend in self.blend.items()},
            "radii": dict(self.radii),
            "level": self.level,
        }
        if self.covariances:
            description["effects"] = {name: covariance.to_dict() for name, covariance in self.covariances.items()}
        return {
            "predictor.json": (json.dumps(description, indent=1, sort_keys=True, allow_nan=False) + "\n").encode(),
            "trees.npz": forests_to_bytes(self.forests),
            **{f"xgboost-{stage}.json": model for stage, model in self.boosters.items()},
        }

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """The inverse of ``to_files`` from files whose digests were verified; xgboost is not needed.

        Raises ``IntegrityError`` for stages or features that this version does not know, and for broken trees.
        """
        try:
            description = json.loads(files["predictor.json"])
            stages = {str(stage): tuple(names) for stage, names in description["stages"].items()}
            domain = TrainingDomain.from_dict(description["domain"])
            blend = {str(regime): Blend(*map(float, values)) for regime, values in description["blend"].items()}
            radii = {str(name): float(radius) for name, radius in description["radii"].items()}
            level = float(description["level"])
            covariances = covariances_from_dict(description.get("effects", {}))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise IntegrityError(
                "predictor.json does not describe a predictor",
                got=repr(error),
                expected="stages, domain, blend, radii and level",
                fix="publish the artifact again",
            ) from error
        for stage, names in stages.items():
            if STAGE_FEATURES.get(stage) != names:
                known = STAGE_FEATURES.get(stage, ())
                unknown = [name for name in names if name not in known]
                raise IntegrityError(
                    f"the features of stage {stage!r} are not those of this version",
                    got=f"{len(names)} features" + (f", among them {', '.join(unknown[:3])}" if unknown else ""),
                    expected=f"the {len(known)} features of this version" if known else "a known stage",
                    fix="retrain with this version of precision_time, or install the version that wrote the artifact",
                )
        counts = {stage: len(names) for stage, names in stages.items()}
        forests = forests_from_bytes(files["trees.npz"], feature_counts=counts)
        return cls(forests=forests, domain=domain, blend=blend, radii=radii, level=level, covariances=covariances)


def _fit_stages(timed: Sequence[Observation], boosters: dict[str, bytes], *, seed: int) -> None:
    """Train compute, and where parts were measured communication and exposed share, each on the stages before it."""

    def train(
        stage: str, observations: Sequence[Observation], rows: list[dict[str, float]], targets: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        boosters[stage], out_of_fold = boost_out_of_fold(
            feature_matrix(rows, STAGE_FEATURES[stage]),
            targets,
            groups=[observation.measurement.configuration for observation in observations],
            parameters=choose_parameters(len(observations)) | _STAGE_ROUNDS,
            seed=seed,
        )
        return out_of_fold

    rows = [observation.query.row for observation in timed]
    targets = np.array(
        [math.log((observation.compute_time_s or 0.0) / observation.closed.compute_time_s) for observation in timed]
    )
    parallel = [number for number, observation in enumerate(timed) if observation.measurement.communication_time_s]
    if len(parallel) < FEWEST_TO_LEARN and len(timed) >= FEWEST_FOR_MANY:
        # No stage is stacked on compute here, and many rows need no choice of rounds.
        matrix = feature_matrix(rows, STAGE_FEATURES["compute"])
        boosters["compute"] = boost(
            matrix, targets, parameters=choose_parameters(len(timed)) | _STAGE_ROUNDS, seed=seed
        )
        return
    correction = train("compute", timed, rows, targets)
    if len(parallel) < FEWEST_TO_LEARN:
        return
    logs = [math.log(observation.closed.compute_time_s) for observation in timed]
    rows = [timed[i].query.row | {"log_compute_s": logs[i] + correction[i]} for i in parallel]
    timed = [timed[i] for i in parallel]
    measured = np.array([observation.measurement.communication_time_s for observation in timed], dtype=np.float64)
    closed = np.array([observation.closed.communication_time_s for observation in timed])
    correction = train("communication", timed, rows, np.log(measured / closed))

    rows = [
        row | {"log_communication_over_compute": math.log(closed[i]) + correction[i] - row["log_compute_s"]}
        for i, row in enumerate(rows)
    ]
    targets = np.array(
        [
            math.log(
                _share(
                    observation.measurement.iteration_time_s - (observation.compute_time_s or 0.0), float(measured[i])
                )
                / _share(observation.closed.exposed_communication_s, observation.closed.communication_time_s)
            )
            for i, observation in enumerate(timed)
        ]
    )
    train("exposed", timed, rows, targets)
