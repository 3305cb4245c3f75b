"""The gate: whether a challenger may replace the champion, with the comparisons and figures behind the decision."""

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

#: The challenger counts as worse only if so bad a mean has a lower chance than this when both are equally good.
SIGNIFICANCE = 0.05
#: A smaller difference, as a share of the champion's error, is ignored: on 10,000 rows a test detects any difference.
MARGIN = 0.01
#: With fewer configurations no test can decide: 4 signs all agree by chance in one of 16 cases, 5 in one of 32.
FEWEST_CONFIGURATIONS = 5
#: A single precision is judged at a stricter level, which 8 configurations (one case in 256) can still reach.
FEWEST_OF_PRECISION = 8
#: Up to this many groups all combinations of signs (65,536) are counted; with more, their sum is taken as normal.
_EXACT_GROUPS = 16

#: The names of the comparisons on rows of all precisions.
NEW_ROWS, ALL_ROWS = "new rows", "all rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Mean absolute log errors of challenger and champion on the same ``rows``, and whether the challenger is worse.

    ``what`` is ``NEW_ROWS``, ``ALL_ROWS`` or a precision. ``chance`` is the probability of such a difference, or a
    larger one, if both are equally good; for a precision it is corrected for the number of precisions. It is None with
    too few configurations for a test.
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
    """Whether the challenger may be published, with the reasons and the figures."""

    passed: bool
    reasons: tuple[str, ...]
    champion: str | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"reasons": list(self.reasons), "figures": dict(self.figures)}

    def table(self) -> list[dict[str, str | int | float | None]]:
        """Challenger and champion side by side, one row per comparison."""
        return [
            {
                "rows of": comparison.what,
                "rows": comparison.rows,
                "configurations": comparison.configurations,
                "challenger": round(comparison.challenger, 4),
                "champion": round(comparison.champion, 4),
                "chance": None if comparison.chance is None else round(comparison.chance, 4),
                "challenger is worse": "yes" if comparison.worse else "no",
            }
            for comparison in self.comparisons
        ]


def chance_of_mean(differences: Floats, groups: Sequence[Hashable]) -> float:
    """The probability of a mean at least as large as that of ``differences``, if each group's sign were random.

    The one-sided paired randomisation test (Fisher 1935; Good 2005, ch. 3): if both methods are equally good, each
    difference is equally likely to have the other sign. Rows of one group (replicates of a configuration) share one
    sign, because they are not independent. Up to 16 groups all combinations are counted; with more, the sum under
    random signs is taken as normal, with the sum of squares as its variance.
    """
    positions: dict[Hashable, list[int]] = {}
    for position, group in enumerate(groups):
        positions.setdefault(group, []).append(position)
    sums = np.array([differences[rows].sum() for rows in positions.values()])
    total = float(sums.sum())
    if len(sums) <= _EXACT_GROUPS:
        signs = 1 - 2 * ((np.arange(2 ** len(sums))[:, None] >> np.arange(len(sums))) & 1)
        # Sums of the same numbers in another order differ in their last digits.
        tolerance = 1e-12 * float(np.abs(sums).sum())
        return float((signs @ sums >= total - tolerance).mean())
    spread = math.sqrt(float(np.square(sums).sum()))
    return 1.0 if spread == 0 else 0.5 * math.erfc(total / spread / math.sqrt(2))


def correct_for_many(chances: Sequence[float]) -> list[float]:
    """The probabilities of several tests, raised so that the smallest of them may be judged alone (Holm 1979)."""
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
    """The gate: coverage must hold, and the challenger must beat the closed forms and not be worse than the champion.

    The closed forms answer where there is no artifact, so an artifact that loses to them would make answers worse. The
    challenger must also not be worse, by more than chance, than the roofline with one fitted factor.

    Challenger and champion are compared on predictions of rows that the predictor was not trained on. The challenger
    is out of fold everywhere. The champion predicts the rows that are new since its training; for the older rows its
    out-of-fold predictions are used, so that a night with few new rows is judged on many. ``trained`` maps the
    champion's training cells to these predictions in seconds (None where the artifact keeps none). The challenger is
    held back if its mean absolute log error is larger by more than chance (one-sided 5 %) and by more than 1 % of the
    champion's: on the new rows, on all rows, or on those of one precision (Holm's correction over the precisions with 8
    configurations). With fewer than 5 configurations in all no test can decide, and the plain mean does.
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
    for comparison in comparisons:
        passed &= not comparison.worse
        # Of the precisions only those that decide are reasons; the table has all of them.
        if comparison.what in (NEW_ROWS, ALL_ROWS) or comparison.worse:
            reasons.append(_describe(comparison, champion=name))
    return GateDecision(
        passed=passed, reasons=tuple(reasons), champion=name, figures=figures, comparisons=tuple(comparisons)
    )


def _is_behind(errors: Floats, than: Floats, *, rows: Sequence[Observation]) -> bool:
    """Whether absolute log ``errors`` are larger on average than ``than`` on the same rows, by more than chance."""
    differences = np.abs(errors) - np.abs(than)
    chance = chance_of_mean(differences, [row.measurement.configuration for row in rows])
    return bool(differences.mean() > 0 and chance < SIGNIFICANCE)


def _compare(
    rows: Sequence[Observation],
    challenger: Floats,
    *,
    champion: PublishedPredictor,
    trained: Mapping[str, float | None],
) -> list[Comparison]:
    """Both on the new rows, on all rows with errors of both, and on those of each precision; empty without any."""
    is_new = np.array([row.measurement.cell_id not in trained for row in rows], dtype=np.bool_)
    predicted_s = np.array([trained.get(row.measurement.cell_id) or math.nan for row in rows])
    if is_new.any():
        new_queries = [row.query for row, new in zip(rows, is_new, strict=True) if new]
        predicted_s[is_new] = champion.predictor.predict(new_queries).iteration_time_s
    measured_s = np.array([row.measurement.iteration_time_s for row in rows])
    challenger_errors, champion_errors = np.abs(challenger), np.abs(np.log(measured_s / predicted_s))
    has_both = np.isfinite(champion_errors)
    configurations = [row.measurement.configuration for row in rows]
    precisions = np.array([row.setup.precision.name for row in rows], dtype=np.str_)

    def compare(what: str, members: npt.NDArray[np.bool_], *, fewest: int = FEWEST_CONFIGURATIONS) -> Comparison:
        groups = [configurations[position] for position in np.flatnonzero(members)]
        distinct = len(set(groups))
        differences = challenger_errors[members] - champion_errors[members]
        chance = chance_of_mean(differences, groups) if distinct >= fewest else None
        mean, champion_error = float(differences.mean()), float(champion_errors[members].mean())
        return Comparison(
            what=what,
            rows=int(members.sum()),
            configurations=distinct,
            challenger=float(challenger_errors[members].mean()),
            champion=champion_error,
            chance=chance,
            worse=mean > MARGIN * champion_error and chance is not None and chance < SIGNIFICANCE,
        )

    if not has_both.any():
        return []
    overall = [compare(NEW_ROWS, is_new)] if is_new.any() else []
    if (has_both & ~is_new).any():
        overall.append(compare(ALL_ROWS, has_both))
    if all(comparison.chance is None for comparison in overall):
        overall[-1] = replace(overall[-1], worse=overall[-1].challenger > overall[-1].champion)
    by_precision = [
        compare(str(name), has_both & (precisions == name), fewest=FEWEST_OF_PRECISION)
        for name in np.unique(precisions[has_both])
    ]
    return overall + _correct(by_precision)


def _correct(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparisons with chances corrected for their number."""
    corrected = iter(correct_for_many([entry.chance for entry in comparisons if entry.chance is not None]))
    chances = [None if comparison.chance is None else next(corrected) for comparison in comparisons]
    return [
        replace(comparison, chance=chance, worse=comparison.worse and chance is not None and chance < SIGNIFICANCE)
        for comparison, chance in zip(comparisons, chances, strict=True)
    ]


def _describe(comparison: Comparison, *, champion: str) -> str:
    rows = {
        NEW_ROWS: f"{comparison.rows} rows new since {champion}",
        ALL_ROWS: f"all {comparison.rows} comparable rows",
    }.get(comparison.what, f"{comparison.rows} rows of {comparison.what}")
    test = "too few to test" if comparison.chance is None else f"chance {comparison.chance:.3f}"
    return (
        f"on {rows} the mean absolute log error is {comparison.challenger:.3f}, the champion's "
        f"{comparison.champion:.3f}: {'worse' if comparison.worse else 'not worse'} ({test})"
    )
