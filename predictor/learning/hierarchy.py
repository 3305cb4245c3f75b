"""HierarchicalPredictor: models of compute, communication, exposed share and total, blended with the closed forms."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.blending import CLOSED_FORM_ONLY, Blend, apply_blend, learn_blend
from precision_time.predictor.learning.boosting import FEWEST_FOR_MANY, boost, boost_out_of_fold, choose_parameters
from precision_time.predictor.learning.domain import REGIMES, TrainingDomain
from precision_time.predictor.learning.error_covariance import Effect, effects_from_dict
from precision_time.predictor.learning.splits import FEWEST_TO_LEARN
from precision_time.predictor.learning.trees import FlatForest, flatten_xgboost, forests_from_bytes, forests_to_bytes
from precision_time.predictor.rows.features import (
    CLOSED_FORM_FEATURES,
    OPEN_FEATURES,
    SETUP_FEATURES,
    Query,
    feature_matrix,
)
from precision_time.predictor.rows.observations import Observation, weigh_rows
from precision_time.storage.errors import InputError, IntegrityError

__all__ = ["STAGE_FEATURES", "VARIANTS", "HierarchicalPredictor", "PredictedParts", "closed_parts"]

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
_WITHOUT_CLOSED_FORM = tuple(name for name in SETUP_FEATURES if name not in CLOSED_FORM_FEATURES)

#: What can be left out of a fit on many rows, to see what it gives: the lean on the closed forms, the closed form as
#: the base of the trees, the closed form altogether; and the total by the stages alone.
VARIANTS = ("full", "no_blend", "direct", "no_closed_form", "stages")

#: Shares below this are told apart by noise only, so logs of shares stop here.
_SMALLEST_SHARE = 0.02
#: Stages that share out a total need fewer rounds than the total; a campaign's own stages choose theirs below this.
_STAGE_ROUNDS = {"rounds": 120}

_SILENT_SHARE = 0.05

#: Where blends were not learned: what a campaign saw it may speak of, and its own hardware only; and without a lean.
_TRUSTED = {regime: Blend(1.0, 1.0) for regime in ("known", "new pair", "new model", "new family", "beyond scale")}
_ALL_TRUSTED = {regime: Blend(1.0, 1.0) for regime in REGIMES}


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
        """The same shares of another iteration time."""
        factor = iteration_time_s / self.iteration_time_s
        return PredictedParts(
            compute_time_s=self.compute_time_s * factor,
            communication_time_s=self.communication_time_s * factor,
            exposed_communication_s=self.exposed_communication_s * factor,
        )


def _share(exposed_s: float, communication_s: float) -> float:
    return max(exposed_s / communication_s, _SMALLEST_SHARE) if communication_s > 0 else _SMALLEST_SHARE


def closed_parts(queries: Sequence[Query]) -> PredictedParts:
    """What the closed forms say to each query."""
    return PredictedParts(
        compute_time_s=np.array([query.closed.compute_time_s for query in queries]),
        communication_time_s=np.array([query.closed.communication_time_s for query in queries]),
        exposed_communication_s=np.array([query.closed.exposed_communication_s for query in queries]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchicalPredictor:
    """Four stages, each a boosted correction of a closed form, and a blend with the closed forms themselves.

    Compute: log(measured compute / roofline); on one rank the iteration is compute. Communication: log(measured bucket
    time / all-reduce model). Exposed: log(measured exposed share / share of the bucket timeline), reading what the
    first two say. By these an iteration is compute + share x communication. Total: log(measured iteration / closed
    form), trained where many rows tell no more than totals; it then decides the iteration, and the stages its shares.
    A stage without training rows leaves its closed form as it is.

    ``blend`` says, by regime, how much the trees have to say and how far the closed forms are off where they do not.
    ``boosters`` holds XGBoost's own JSON of each stage (kept for inspection; serving reads ``forests`` alone) and
    ``radii`` the half width of the interval in log seconds for each calibrated regime at ``level``. ``effects`` say how
    errors hang together, by which measured rows correct others; an artifact may lack them.
    """

    forests: Mapping[str, FlatForest]
    domain: TrainingDomain
    blend: Mapping[str, Blend]
    variant: str = "full"
    boosters: Mapping[str, bytes] = field(default_factory=dict)
    radii: Mapping[str, float] = field(default_factory=dict)
    level: float = 0.9
    effects: Mapping[str, Effect] = field(default_factory=dict)

    @classmethod
    def fit(
        cls, observations: Sequence[Observation], *, seed: int = 0, variant: str = "full"
    ) -> "HierarchicalPredictor":
        """Train the stages; ``variant`` leaves out a part of them (see ``VARIANTS``).

        Raises ``InputError`` when fewer than 4 rows have a compute time, or for an unknown variant.
        """
        if variant not in VARIANTS:
            raise InputError("no such variant", got=variant, expected=f"one of {', '.join(VARIANTS)}")
        timed = [seen for seen in observations if seen.compute_time_s is not None]
        if len(timed) < FEWEST_TO_LEARN:
            raise InputError(
                "too few measurements to train on",
                got=f"{len(timed)} rows",
                expected=f"at least {FEWEST_TO_LEARN} rows",
                fix="run a campaign with more cells",
            )
        boosters: dict[str, bytes] = {}
        _fit_stages(timed, boosters, seed=seed)
        # Rows that tell their parts need no stage of their own for the whole.
        totals = len(observations) >= FEWEST_FOR_MANY
        blend = {}
        if totals and variant != "stages":
            _fit_total(observations, boosters, seed=seed, variant=variant)
        if totals and variant == "full":
            blend = learn_blend(observations, seed=seed)
        return cls(
            forests={stage: flatten_xgboost(model) for stage, model in boosters.items()},
            boosters=boosters,
            domain=TrainingDomain.of(observations),
            blend=blend or dict(_TRUSTED if not totals else _ALL_TRUSTED),
            variant=variant,
        )

    def lean_of(self, query: Query) -> Blend:
        """The blend that holds for ``query``; of weight 0 where the closed form answers as it is.

        That is in a regime without a blend, and for a CPU where only GPUs were measured, or the other way round: what
        was learned on the one says nothing of the other.
        """
        if not self.domain.covers_kind(query.setup):
            return CLOSED_FORM_ONLY
        return self.blend.get(self.domain.regime_of(query.setup), CLOSED_FORM_ONLY)

    def predict(self, queries: Sequence[Query]) -> PredictedParts:
        """Seconds by part for each query."""
        parts = self._predict_stages(queries)
        closed_s = np.array([query.closed.iteration_time_s for query in queries])
        trees_s = parts.iteration_time_s
        if "total" in self.forests:
            rows = [query.row for query in queries]
            trees_s = np.exp(self.forests["total"].predict(feature_matrix(rows, _total_features(self.variant))))
            if self.variant not in ("direct", "no_closed_form"):
                trees_s = trees_s * closed_s
        leans = [self.lean_of(query) for query in queries]
        return parts.rescale(apply_blend(leans, trees_s=trees_s, closed_s=closed_s))

    def _predict_stages(self, queries: Sequence[Query]) -> PredictedParts:
        rows, closed = [query.row for query in queries], closed_parts(queries)

        def correct(stage: str, base: npt.NDArray[np.float64], stacked: list[dict[str, float]]) -> npt.NDArray[Any]:
            if stage not in self.forests:
                return base
            correction = self.forests[stage].predict(feature_matrix(stacked, STAGE_FEATURES[stage]))
            return base * np.exp(correction.astype(np.float64))

        compute = correct("compute", closed.compute_time_s, list(rows))
        communication, exposed = closed.communication_time_s, closed.exposed_communication_s
        several = communication > 0
        if several.any() and "communication" in self.forests:
            stacked = [row | {"log_compute_s": math.log(compute[i])} for i, row in enumerate(rows)]
            communication = np.where(several, correct("communication", communication, stacked), 0.0)
            stacked = [
                row
                | {
                    "log_communication_over_compute": math.log(communication[i] / compute[i])
                    if several[i]
                    else math.nan
                }
                for i, row in enumerate(stacked)
            ]
            shares = np.array(
                [_share(query.closed.exposed_communication_s, query.closed.communication_time_s) for query in queries]
            )
            exposed = np.where(several, correct("exposed", shares, stacked) * communication, 0.0)
        return PredictedParts(
            compute_time_s=compute, communication_time_s=communication, exposed_communication_s=exposed
        )

    def with_intervals(self, radii: Mapping[str, float], *, level: float) -> "HierarchicalPredictor":
        """The same predictor with interval radii by regime."""
        return replace(self, radii=dict(radii), level=level)

    def with_effects(self, effects: Mapping[str, Effect]) -> "HierarchicalPredictor":
        """The same predictor with how its errors hang together (``pooling_fit.estimate_effects``)."""
        return replace(self, effects=dict(effects))

    def to_files(self) -> dict[str, bytes]:
        """The files of an artifact: ``trees.npz``, ``predictor.json`` and one XGBoost JSON per stage."""
        described = {
            "stages": {stage: list(STAGE_FEATURES[stage]) for stage in self.forests},
            "domain": self.domain.to_dict(),
            "blend": {regime: list(blend) for regime, blend in self.blend.items()},
            "radii": dict(self.radii),
            "level": self.level,
        }
        if self.effects:
            described["effects"] = {name: effect.to_dict() for name, effect in self.effects.items()}
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
            domain = TrainingDomain.from_dict(described["domain"])
            blend = {str(regime): Blend(*map(float, values)) for regime, values in described["blend"].items()}
            radii = {str(name): float(radius) for name, radius in described["radii"].items()}
            level = float(described["level"])
            effects = effects_from_dict(described.get("effects", {}))
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
                strange = [name for name in names if name not in known]
                raise IntegrityError(
                    f"the features of stage {stage!r} are not those of this version",
                    got=f"{len(names)} of them" + (f", {', '.join(strange[:3])} among them" if strange else ""),
                    expected=f"the {len(known)} that this version describes" if known else "a known stage",
                    fix="retrain with this version of precision_time, or install the version that wrote the artifact",
                )
        counts = {stage: len(names) for stage, names in stages.items()}
        forests = forests_from_bytes(files["trees.npz"], feature_counts=counts)
        return cls(forests=forests, domain=domain, blend=blend, radii=radii, level=level, effects=effects)


def _fit_stages(timed: Sequence[Observation], boosters: dict[str, bytes], *, seed: int) -> None:
    """Train compute, and where parts were measured communication and the exposed share, each on what came before."""

    def train(
        stage: str, seen: Sequence[Observation], rows: list[dict[str, float]], targets: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        boosters[stage], out_of_fold = boost_out_of_fold(
            feature_matrix(rows, STAGE_FEATURES[stage]),
            targets,
            groups=[one.measurement.configuration for one in seen],
            parameters=choose_parameters(len(seen)) | _STAGE_ROUNDS,
            seed=seed,
        )
        return out_of_fold

    rows = [seen.query.row for seen in timed]
    targets = np.array([math.log((seen.compute_time_s or 0.0) / seen.closed.compute_time_s) for seen in timed])
    parallel = [number for number, seen in enumerate(timed) if seen.measurement.communication_time_s]
    if len(parallel) < FEWEST_TO_LEARN and len(timed) >= FEWEST_FOR_MANY:
        # nothing is stacked on it, and many rows need no choice of rounds
        matrix = feature_matrix(rows, STAGE_FEATURES["compute"])
        boosters["compute"] = boost(
            matrix, targets, parameters=choose_parameters(len(timed)) | _STAGE_ROUNDS, seed=seed
        )
        return
    correction = train("compute", timed, rows, targets)
    if len(parallel) < FEWEST_TO_LEARN:
        return
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


def _total_features(variant: str) -> tuple[str, ...]:
    return _WITHOUT_CLOSED_FORM if variant == "no_closed_form" else STAGE_FEATURES["total"]


def _fit_total(observations: Sequence[Observation], boosters: dict[str, bytes], *, seed: int, variant: str) -> None:
    measured = np.log([seen.measurement.iteration_time_s for seen in observations])
    if variant not in ("direct", "no_closed_form"):
        measured = measured - np.log([seen.closed.iteration_time_s for seen in observations])
    names = _total_features(variant)
    matrix = feature_matrix([seen.query.row for seen in observations], names)
    # Some rows keep silent about their code, as questions do, so that the trees learn what holds then.
    silent = np.random.default_rng(seed).random(len(matrix)) < _SILENT_SHARE
    for name in OPEN_FEATURES:
        matrix[silent, names.index(name)] = np.nan
    boosters["total"] = boost(
        matrix,
        measured,
        parameters=choose_parameters(len(observations)),
        seed=seed,
        weights=weigh_rows(observations),
    )
