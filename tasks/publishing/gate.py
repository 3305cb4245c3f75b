"""The gate: whether a challenger may take the champion's place, by which comparisons, and in which numbers."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.answering.artifact import PublishedPredictor
from precision_time.predictor.rows.observations import Observation
from precision_time.tasks.publishing.snapshot import Snapshot
from precision_time.tasks.publishing.validate import Validation, coverage_holds

__all__ = ["Comparison", "GateDecision", "chance_of_mean", "correct_for_many", "judge_challenger"]

Floats = npt.NDArray[np.float64]

#: A mean as bad as the one seen must be rarer than this, if both were equally good, before it counts as worse.
SIGNIFICANCE = 0.05
#: A difference below this share of the champion's own error is none: of 10,000 rows a test sees the smallest one.
MARGIN = 0.01
#: Fewer configurations cannot speak: all signs of 4 agree by chance in one of 16 cases, of 5 in one of 32.
FEWEST_CONFIGURATIONS = 5
#: One precision of several is judged at a stricter level, which 8 configurations (one of 256) still can reach.
FEWEST_OF_PRECISION = 8
#: Up to so many groups every combination of signs is tried (65,536); beyond, their sum is as good as normal.
_EXACT_GROUPS = 16

#: What the comparisons on rows of all precisions are called.
NEW_ROWS, ALL_ROWS = "new rows", "all rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Mean absolute log errors of both on the same ``rows``, and whether the challenger's is worse.

    ``chance`` is the probability of such a difference, or a larger one, if both were equally good; corrected for the
    number of precisions where ``what`` is one of them. None where too few configurations can tell.
    """

    what: str
    rows: int
    configurations: int
    challenger: float
    champion: float
    chance: float | None
    worse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GateDecision:
    """Whether the challenger may be published, why or why not, and the numbers behind it."""

    passed: bool
    reasons: tuple[str, ...]
    champion: str | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """What JSON keeps of it."""
        return asdict(self) | {"reasons": list(self.reasons), "figures": dict(self.figures)}

    def table(self) -> list[dict[str, str | int | float | None]]:
        """Champion and challenger side by side: one row a comparison."""
        return [
            {
                "rows of": one.what,
                "rows": one.rows,
                "configurations": one.configurations,
                "challenger": round(one.challenger, 4),
                "champion": round(one.champion, 4),
                "chance": None if one.chance is None else round(one.chance, 4),
                "challenger is worse": "yes" if one.worse else "no",
            }
            for one in self.comparisons
        ]


def chance_of_mean(differences: Floats, groups: Sequence[Hashable]) -> float:
    """The probability of a mean at least as large as that of ``differences``, if each group's sign were a coin's.

    The one-sided paired randomisation test (Fisher 1935; Good 2005, ch. 3): under the hypothesis that both methods
    are equally good the difference of a pair is as likely to have the other sign. Rows of one group (replicates of a
    configuration) keep one sign together, since they are no independent evidence. Up to 16 groups all combinations
    are counted; beyond, the sum under random signs is taken as normal with the variance it has, the sum of squares.
    """
    positions: dict[Hashable, list[int]] = {}
    for position, group in enumerate(groups):
        positions.setdefault(group, []).append(position)
    sums = np.array([differences[chosen].sum() for chosen in positions.values()])
    total = float(sums.sum())
    if len(sums) <= _EXACT_GROUPS:
        signs = 1 - 2 * ((np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums))) & 1)
        # Sums of the same numbers in another order differ in the last digits.
        tolerance = 1e-12 * float(np.abs(sums).sum())
        return float((signs @ sums >= total - tolerance).mean())
    spread = math.sqrt(float(np.square(sums).sum()))
    return 1.0 if spread == 0 else 0.5 * math.erfc(total / spread / math.sqrt(2))


def correct_for_many(chances: Sequence[float]) -> list[float]:
    """The probabilities of several tests, so raised that the smallest of them may be looked at (Holm 1979)."""
    corrected, highest = [0.0] * len(chances), 0.0
    for rank, index in enumerate(sorted(range(len(chances)), key=lambda index: chances[index])):
        highest = max(highest, min(1.0, (len(chances) - rank) * chances[index]))
        corrected[index] = highest
    return corrected


def judge_challenger(
    snapshot: Snapshot,
    validation: Validation,
    *,
    champion: PublishedPredictor | None,
    trained: Mapping[str, float | None] | None = None,
) -> GateDecision:
    """The gate: coverage must hold, the closed forms be beaten, and the champion not be better on the same rows.

    The closed forms are what answers without an artifact, so one that loses to them would make answers worse; and it
    must not be worse, by more than chance, than the roofline with one fitted factor.

    With a champion both are compared on rows that neither learned from. ``trained`` maps the cells that taught the
    champion to its own out-of-fold predictions of them in seconds (None where the artifact keeps none). The
    challenger is out of fold everywhere. On rows that are new since the champion was trained, the champion itself
    answers; on the older ones its out-of-fold predictions stand for it, so that a night with few new rows is judged
    on many. The challenger is held back when its mean absolute log error is larger by more than chance (one-sided
    5 %) and more than 1 % of the champion's: on the new rows, on all of them, or on those of one precision (Holm's
    correction over the precisions with 8 configurations). Where fewer than 5 configurations can be compared in all,
    no test can tell, and the plain mean decides.
    """
    metrics = validation.accuracy["configuration"]
    passed, reasons = True, []

    coverage, rows = metrics["predictor"]["coverage"], len(snapshot.training)
    holds = coverage_holds(metrics, level=validation.level)
    passed &= holds
    shown = "unknown: too few rows" if coverage is None else f"{coverage:.0%}"
    reasons.append(
        f"coverage {shown} of {rows} rows at level {validation.level:.0%} {'holds' if holds else 'does not hold'}"
    )

    ours, theirs = metrics["predictor"]["mape"], metrics["closed_form"]["mape"]
    wins = ours is not None and theirs is not None and ours < theirs
    passed &= wins
    reasons.append(f"MAPE {ours:.1%} {'beats' if wins else 'does not beat'} the closed forms' {theirs:.1%}")

    folds = validation.cross_validations["configuration"]
    behind = _is_behind(folds.log_errors(), folds.log_errors("roofline"), rows=snapshot.training)
    passed &= not behind
    if behind:
        reasons.append(f"it is worse than the roofline with one factor, {metrics['roofline']['mape']:.1%}")

    figures = {
        "rows": float(rows),
        "level": validation.level,
        "coverage": coverage,
        "mape": ours,
        "closed_form_mape": theirs,
        "roofline_mape": metrics["roofline"]["mape"],
    }
    if champion is None:
        return GateDecision(passed=passed, reasons=tuple(reasons), figures=figures)

    name = champion.manifest.artifact_id
    comparisons = _compare(snapshot.training, folds.log_errors(), champion=champion, trained=trained or {})
    if not comparisons:
        passed = False
        reasons.append(f"no row is new since {name}")
    for one in comparisons:
        passed &= not one.worse
        # What a precision adds is said where it decides; the table has them all.
        if one.what in (NEW_ROWS, ALL_ROWS) or one.worse:
            reasons.append(_say(one, champion=name))
    return GateDecision(
        passed=passed, reasons=tuple(reasons), champion=name, figures=figures, comparisons=tuple(comparisons)
    )


def _is_behind(errors: Floats, than: Floats, *, rows: Sequence[Observation]) -> bool:
    """Whether absolute log ``errors`` are larger on average than others of the same rows, by more than chance."""
    differences = np.abs(errors) - np.abs(than)
    chance = chance_of_mean(differences, [seen.measurement.configuration for seen in rows])
    return bool(differences.mean() > 0 and chance < SIGNIFICANCE)


def _compare(
    rows: Sequence[Observation],
    challenger: Floats,
    *,
    champion: PublishedPredictor,
    trained: Mapping[str, float | None],
) -> list[Comparison]:
    """Both on the new rows, on all that can be compared, and on those of each precision; empty without any."""
    new = np.array([seen.measurement.cell_id not in trained for seen in rows], dtype=np.bool_)
    predicted = np.array([trained.get(seen.measurement.cell_id) or math.nan for seen in rows])
    if new.any():
        fresh = [seen for seen, is_new in zip(rows, new, strict=True) if is_new]
        predicted[new] = champion.predictor.predict([seen.query for seen in fresh]).iteration_time_s
    measured = np.array([seen.measurement.iteration_time_s for seen in rows])
    ours, theirs = np.abs(challenger), np.abs(np.log(measured / predicted))
    both = np.isfinite(theirs)
    configurations = [seen.measurement.configuration for seen in rows]
    names = np.array([seen.setup.precision.name for seen in rows], dtype=np.str_)

    def compare(what: str, chosen: npt.NDArray[np.bool_], *, fewest: int = FEWEST_CONFIGURATIONS) -> Comparison:
        groups = [configurations[position] for position in np.flatnonzero(chosen)]
        distinct = len(set(groups))
        differences = ours[chosen] - theirs[chosen]
        chance = chance_of_mean(differences, groups) if distinct >= fewest else None
        mean, champion_error = float(differences.mean()), float(theirs[chosen].mean())
        return Comparison(
            what=what,
            rows=int(chosen.sum()),
            configurations=distinct,
            challenger=float(ours[chosen].mean()),
            champion=champion_error,
            chance=chance,
            worse=mean > MARGIN * champion_error and chance is not None and chance < SIGNIFICANCE,
        )

    if not both.any():
        return []
    overall = [compare(NEW_ROWS, new)] if new.any() else []
    if (both & ~new).any():
        overall.append(compare(ALL_ROWS, both))
    if all(one.chance is None for one in overall):
        overall[-1] = replace(overall[-1], worse=overall[-1].challenger > overall[-1].champion)
    present = [str(name) for name in np.unique(names[both])]
    return overall + _correct([compare(name, both & (names == name), fewest=FEWEST_OF_PRECISION) for name in present])


def _correct(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same, with chances that allow for there being several tests."""
    corrected = iter(correct_for_many([one.chance for one in comparisons if one.chance is not None]))
    chances = [None if one.chance is None else next(corrected) for one in comparisons]
    return [
        replace(one, chance=chance, worse=one.worse and chance is not None and chance < SIGNIFICANCE)
        for one, chance in zip(comparisons, chances, strict=True)
    ]


def _say(one: Comparison, *, champion: str) -> str:
    on = {NEW_ROWS: f"{one.rows} rows new since {champion}", ALL_ROWS: f"all {one.rows} rows that neither learned from"}
    told = "too few to test" if one.chance is None else f"chance {one.chance:.3f}"
    return (
        f"on {on.get(one.what, f'{one.rows} rows of {one.what}')} the mean absolute log error is "
        f"{one.challenger:.3f}, the champion's {one.champion:.3f}: {'worse' if one.worse else 'not worse'} ({told})"
    )
