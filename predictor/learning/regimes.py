"""Regimes: how far a question lies from the training data; each is one record with everything that depends on it.

A new regime is a record in ``REGIMES``: every other file reads this table.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from math import log
from typing import NamedTuple

from precision_time.predictor.learning.error_covariance import ErrorCovariance, PairPlan
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.setup.training_setup import TrainingSetup
from precision_time.storage.errors import InputError

__all__ = [
    "CLOSED_FORMS",
    "CLOSED_FORMS_ON_CPU",
    "COVARIANCES",
    "REGIMES",
    "SHIPPED_COVARIANCES",
    "AlwaysTrees",
    "CovariancePlan",
    "Distance",
    "ErrorSource",
    "LeaveGroupsOut",
    "LeaveLargeWorldsOut",
    "Regime",
    "SmallestOf",
    "covariances_of",
    "find_error_source",
]


class Distance(NamedTuple):
    """Which parts of a question the training data covered."""

    has_network: bool
    has_family: bool
    has_gpu: bool
    #: whether this network was measured on this GPU
    has_pair: bool
    #: whether as many ranks were measured
    has_scale: bool


# How the weight of the trees is learned: T = trees ^ weight x (closed form x factor) ^ (1 - weight).


@dataclass(frozen=True, slots=True)
class AlwaysTrees:
    """The weight is 1: the trees answer alone."""


@dataclass(frozen=True, slots=True)
class LeaveGroupsOut:
    """The weight is the best for rows whose ``group`` is left out of the fit."""

    group: Callable[[Observation], Hashable]


@dataclass(frozen=True, slots=True)
class LeaveLargeWorldsOut:
    """The weight is the best for rows of large worlds, predicted from small ones; with too few, as in ``otherwise``."""

    otherwise: str


@dataclass(frozen=True, slots=True)
class SmallestOf:
    """The weight is the smallest of those of ``regimes``; none where one of them has none."""

    regimes: tuple[str, ...]


#: Pairs of rows of one network, or of one family.
_OF_NETWORK = PairPlan(groups={"network": 50, "family": 40}, apart="family")
#: Pairs of rows on one chip, or on one part with it.
_OF_CHIP = PairPlan(groups={"gpu": 120, "chip": 120}, apart="chip")
#: Pairs for the errors of the closed forms, which are not fitted to these rows.
_OF_CLOSED_FORMS = PairPlan(groups={"network": 50, "family": 40, "chip": 120}, apart=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CovariancePlan:
    """How one covariance of errors is fitted, and its shipped value for predictors that lack it.

    It is fitted on ``pairs`` of the out-of-fold errors of ``split``, or of the errors of the closed forms where
    ``split`` is None. Without ``pairs`` it is an assumption. Shipped values are fits of the shipped table (10,837 rows,
    seed 0), with the correlations below 0.995.
    """

    name: str
    shipped: ErrorCovariance
    split: str | None = None
    pairs: PairPlan | None = None


def _covariance(variance: float, repeat: float, **correlations: float) -> ErrorCovariance:
    return ErrorCovariance(variance=variance, repeat=repeat, correlations=correlations)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSource:
    """Why an answer is wrong: its log error is the sum of errors with these ``covariances``.

    The first covariance is that of the network, the second that of a chip without measurements. ``plan`` says how the
    covariance that this source defines is fitted; None where the source uses only those of others.
    """

    name: str
    covariances: tuple[str, ...]
    plan: CovariancePlan | None
    #: whether the closed forms answered
    by_closed_forms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime(ErrorSource):
    """How far a question is from the training data.

    ``holds`` says whether a question lies at this distance; exactly one regime holds. ``gaps`` counts the gaps in the
    training data that make a question one of this regime: its interval is fitted for these, and a question with more
    gaps gets the widest interval. ``subject`` names what was not measured. ``is_trusted_untested`` says whether the
    trees of a small campaign, which cannot learn a blend, answer here. ``blend`` says how the weight of the
    trees is learned. The errors of the first split in ``interval_splits`` that was scored set the interval.
    """

    holds: Callable[[Distance], bool]
    gaps: int
    subject: Callable[[TrainingSetup], str]
    is_trusted_untested: bool
    blend: AlwaysTrees | LeaveGroupsOut | LeaveLargeWorldsOut | SmallestOf
    interval_splits: tuple[str, ...]


def _network(setup: TrainingSetup) -> str:
    return setup.workload.name


def _gpu(setup: TrainingSetup) -> str:
    return setup.hardware.name


_RECORDS = (
    # this network on this GPU
    Regime(
        name="known",
        holds=lambda distance: distance.has_pair and distance.has_scale,
        gaps=0,
        subject=_network,
        is_trusted_untested=True,
        blend=AlwaysTrees(),
        interval_splits=("configuration",),
        covariances=("known",),
        plan=CovariancePlan(
            name="known",
            split="configuration",
            pairs=_OF_NETWORK,
            shipped=_covariance(
                0.0162, 0.791, network=0.423, family=0.0, gpu=0.098, framework=0.001, code=0.618, precision=0.240,
                batch=0.785, ranks=0.513,
            ),
        ),
    ),
    # the network and the GPU were measured, but not together
    Regime(
        name="new pair",
        holds=lambda distance: (
            distance.has_network and distance.has_gpu and distance.has_scale and not distance.has_pair
        ),
        gaps=1,
        subject=_network,
        is_trusted_untested=True,
        blend=AlwaysTrees(),
        interval_splits=("source-model-gpu",),
        covariances=("new pair",),
        plan=CovariancePlan(
            name="new pair",
            split="source-model-gpu",
            pairs=_OF_NETWORK,
            shipped=_covariance(
                0.0272, 0.879, any=0.752, network=0.640, family=0.0, chip=0.564, gpu=0.783, framework=0.714,
                code=0.929, precision=0.689, input=0.735, batch=0.950, ranks=0.905,
            ),
        ),
    ),
    # the network was measured, the GPU was not
    Regime(
        name="new gpu",
        holds=lambda distance: distance.has_network and not distance.has_gpu,
        gaps=1,
        subject=_gpu,
        is_trusted_untested=False,
        blend=LeaveGroupsOut(lambda observation: observation.chip),
        interval_splits=("leave-gpu-out",),
        covariances=("known", "new gpu"),
        plan=CovariancePlan(
            name="new gpu",
            split="leave-gpu-out",
            pairs=_OF_CHIP,
            shipped=_covariance(
                0.0649, 0.873, network=0.438, family=0.995, chip=0.0, gpu=0.686, framework=0.130, code=0.805,
                precision=0.749, input=0.622, batch=0.989, ranks=0.990,
            ),
        ),
    ),
    # other networks of its family were measured
    Regime(
        name="new model",
        holds=lambda distance: distance.has_gpu and distance.has_family and not distance.has_network,
        gaps=1,
        subject=_network,
        is_trusted_untested=True,
        blend=LeaveGroupsOut(lambda observation: observation.network),
        interval_splits=("leave-model-out",),
        covariances=("new model",),
        plan=CovariancePlan(
            name="new model",
            split="leave-model-out",
            pairs=_OF_NETWORK,
            shipped=_covariance(
                0.0421, 0.958, any=0.800, network=0.817, family=0.0, chip=0.965, gpu=0.724, framework=0.669,
                code=0.920, precision=0.787, input=0.792, batch=0.928, ranks=0.977,
            ),
        ),
    ),
    # no network of its family was measured
    Regime(
        name="new family",
        holds=lambda distance: distance.has_gpu and not distance.has_family and not distance.has_network,
        gaps=1,
        subject=_network,
        is_trusted_untested=True,
        blend=LeaveGroupsOut(lambda observation: observation.setup.workload.family),
        interval_splits=("leave-family-out", "leave-model-out"),
        covariances=("new family",),
        plan=CovariancePlan(
            name="new family",
            split="leave-family-out",
            pairs=_OF_NETWORK,
            shipped=_covariance(
                0.0855, 0.969, any=0.872, network=0.854, family=0.0, chip=0.827, gpu=0.828, framework=0.648,
                code=0.854, precision=0.784, input=0.984, batch=0.930, ranks=0.978,
            ),
        ),
    ),
    # neither the network nor the GPU was measured
    Regime(
        name="new model and gpu",
        holds=lambda distance: not distance.has_network and not distance.has_gpu,
        gaps=2,
        subject=_gpu,
        is_trusted_untested=False,
        blend=SmallestOf(("new family", "new gpu")),
        interval_splits=("leave-gpu-out",),
        covariances=("new model", "new gpu"),
        plan=None,
    ),
    # more ranks than were measured
    Regime(
        name="beyond scale",
        holds=lambda distance: distance.has_network and distance.has_gpu and not distance.has_scale,
        gaps=1,
        subject=lambda setup: f"{setup.world_size} ranks",
        is_trusted_untested=True,
        blend=LeaveLargeWorldsOut(otherwise="new gpu"),
        interval_splits=("scale",),
        covariances=("beyond scale",),
        plan=CovariancePlan(
            name="beyond scale",
            split="scale",
            pairs=_OF_NETWORK,
            shipped=_covariance(
                0.1478, 0.955, any=0.989, family=0.0, gpu=0.787, framework=0.797, code=0.861, input=0.840,
                batch=0.963, ranks=0.821,
            ),
        ),
    ),
)  # fmt: skip

#: Every regime by name, in the order of their usual errors: the smallest first.
REGIMES: dict[str, Regime] = {regime.name: regime for regime in _RECORDS}

#: The answers of the closed forms, which have no regime.
CLOSED_FORMS = ErrorSource(
    name="closed forms",
    by_closed_forms=True,
    covariances=("closed forms",),
    plan=CovariancePlan(
        name="closed forms",
        pairs=_OF_CLOSED_FORMS,
        shipped=_covariance(
            0.1364, 0.974, any=0.840, network=0.881, family=0.215, chip=0.857, gpu=0.916, framework=0.605,
            code=0.760, precision=0.631, batch=0.971, ranks=0.954,
        ),
    ),
)  # fmt: skip
CLOSED_FORMS_ON_CPU = ErrorSource(
    name="closed forms on a CPU",
    by_closed_forms=True,
    covariances=("closed forms", "cpu"),
    # An assumption, since no table of CPUs is shipped: 90 % of hosts lie within a factor of 3, with nearly the same
    # factor for all networks and precisions of one host.
    plan=CovariancePlan(
        name="cpu",
        shipped=_covariance(
            (log(3) / 1.645) ** 2, 0.99, network=0.95, chip=0.0, gpu=0.0, framework=0.95, precision=0.97
        ),
    ),
)

_SOURCES: dict[str, ErrorSource] = REGIMES | {source.name: source for source in (CLOSED_FORMS, CLOSED_FORMS_ON_CPU)}
#: How each covariance is fitted, by the name under which a predictor stores it.
COVARIANCES: dict[str, CovariancePlan] = {
    source.plan.name: source.plan for source in _SOURCES.values() if source.plan is not None
}
SHIPPED_COVARIANCES: dict[str, ErrorCovariance] = {name: plan.shipped for name, plan in COVARIANCES.items()}


def find_error_source(name: str) -> ErrorSource:
    """The regime, or the closed forms, of this name; raises ``InputError`` for any other."""
    if name not in _SOURCES:
        raise InputError("unknown regime", got=name, expected=", ".join(_SOURCES))
    return _SOURCES[name]


def covariances_of(
    source: ErrorSource, fitted: Mapping[str, ErrorCovariance]
) -> tuple[ErrorCovariance, ErrorCovariance | None]:
    """The covariance of the network's error and, for a chip without measurements, of the chip's.

    The shipped value replaces one that ``fitted`` lacks.
    """
    of_network, *of_chip = (fitted.get(name) or SHIPPED_COVARIANCES[name] for name in source.covariances)
    return of_network, of_chip[0] if of_chip else None
