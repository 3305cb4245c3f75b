"""What calibration gives: the error left after so many measured rows of a network, or on a chip, that was left out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.error_covariance import Effect, Traits, pool_positions
from precision_time.predictor.learning.intervals import radii_by_regime
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.cross_validation import CrossValidation
from precision_time.predictor.scoring.fit_error_covariance import CHIP, NETWORK, PairPlan, fit_effect
from precision_time.predictor.scoring.metrics import Metrics, score
from precision_time.storage.errors import InputError

__all__ = ["CURVES", "CalibrationCurve", "CalibrationPoint", "curve_table", "format_curves", "measure_calibration"]

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """What of a split is measured: rows of one ``group`` calibrate its others, by an effect fitted as ``plan``."""

    what: str
    plan: PairPlan
    group: Callable[[Observation], str]


#: The splits after which calibration can be measured.
CURVES: dict[str, _Task] = {
    "leave-model-out": _Task(what="of the model", plan=NETWORK, group=lambda seen: seen.network),
    "leave-family-out": _Task(what="of the model", plan=NETWORK, group=lambda seen: seen.network),
    "leave-gpu-out": _Task(what="on the GPU", plan=CHIP, group=lambda seen: seen.setup.hardware.name),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPoint:
    """Scores of the same rows before and after ``measured`` rows of their group calibrate them.

    ``rows`` counts distinct scored rows and ``groups`` the networks or GPUs they are of; each draw scores the group's
    rows anew, so metrics are averages over draws.
    """

    measured: int
    rows: int
    groups: int
    before: Metrics
    after: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationCurve:
    """The points of one split, by the number of measured rows; ``what`` says of what they are rows."""

    split: str
    what: str
    points: tuple[CalibrationPoint, ...]


def measure_calibration(
    result: CrossValidation,
    observations: Sequence[Observation],
    *,
    rows: Sequence[int] = (0, 1, 3, 10),
    draws: int = 5,
    by_source: bool = False,
    seed: int = 0,
) -> CalibrationCurve:
    """Error against number of calibrating rows, from the out-of-fold predictions of ``result``; nothing is refitted.

    For each left-out network (in ``leave-gpu-out``: each part of a left-out chip) and each of ``draws``, so many of
    its configurations are drawn, one row of each calibrates, and all rows of its other configurations are scored.
    Groups with too few configurations are left out of a point, so compare its ``before`` and ``after``. How alike
    errors are is estimated on the other folds. ``by_source`` draws and scores within one source of the table, as
    somebody does who measures with the script that is asked about. Raises ``InputError`` for another split.
    """
    if result.split not in CURVES:
        raise InputError("calibration is not measured on this split", got=result.split, expected=", ".join(CURVES))
    if draws < 1 or any(count < 0 for count in rows):
        raise InputError("draws of calibrating rows", got=f"{draws} draws of {list(rows)}", expected="at least 1 of 0")
    task, seen = CURVES[result.split], [observations[row] for row in result.rows]
    traits, errors = Traits([one.query for one in seen]), result.log_errors()
    groups = _divide([(task.group(one), one.measurement.source if by_source else "") for one in seen])
    configurations = np.array(
        _number([replace(one.measurement, model=one.network).configuration for one in seen]), dtype=np.int64
    )
    points = []
    effects, radii = _learn_elsewhere(result, seen, errors, plan=task.plan, seed=seed)
    for count in rows:
        asked, shifts, covered, used = [], [], [], 0
        for number, group in enumerate(groups):
            kinds = np.unique(configurations[group])
            effect, radius = effects.get(int(result.folds[group[0]])), radii.get(int(result.folds[group[0]]))
            if len(kinds) <= count or effect is None:
                continue
            used += 1
            for draw in range(draws if count else 1):
                rng = np.random.default_rng([seed, number, draw])
                chosen = rng.permutation(kinds)[:count]
                measured = np.array([rng.choice(group[configurations[group] == kind]) for kind in chosen], np.int64)
                others = group[~np.isin(configurations[group], chosen)]
                found = pool_positions(traits, measured, others, errors=errors[measured], effects=[effect])
                asked.append(others)
                shifts.append(found.shift)
                if radius is not None:
                    half = np.array([radius[result.regimes[place]] for place in others]) * found.narrowing
                    covered.append(np.abs(errors[others] - found.shift) <= half)
        if not used:
            continue
        places = np.concatenate(asked)
        points.append(
            CalibrationPoint(
                measured=count,
                rows=len(np.unique(places)),
                groups=used,
                before=_score(result, places),
                after=_score(result, places, np.concatenate(shifts), np.concatenate(covered) if covered else None),
            )
        )
    return CalibrationCurve(split=result.split, what=task.what, points=tuple(points))


def _score(
    result: CrossValidation,
    places: Positions,
    shifts: npt.NDArray[np.float64] | None = None,
    covered: npt.NDArray[np.bool_] | None = None,
) -> Metrics:
    predicted = result.predicted_s["predictor"][places]
    if shifts is None:
        held = None if result.covered is None else result.covered[places]
        return score(predicted, result.measured_s[places], covered=held)
    held = covered if covered is not None and len(covered) == len(places) else None
    return score(predicted * np.exp(shifts), result.measured_s[places], covered=held)


def _learn_elsewhere(
    result: CrossValidation,
    seen: Sequence[Observation],
    errors: npt.NDArray[np.float64],
    *,
    plan: PairPlan,
    seed: int,
) -> tuple[dict[int, Effect], dict[int, Mapping[str, float]]]:
    """For each fold, how alike errors are and the interval radii, by the rows of all other folds."""
    effects: dict[int, Effect] = {}
    radii: dict[int, Mapping[str, float]] = {}
    for fold in np.unique(result.folds):
        others = np.flatnonzero(result.folds != fold).tolist()
        effect = fit_effect(
            [seen[place].query for place in others], errors[others], result.folds[others], plan=plan, seed=seed
        )
        if effect is not None:
            effects[int(fold)] = effect
        found = radii_by_regime(errors[others], [result.regimes[place] for place in others], level=result.level)
        if found:
            radii[int(fold)] = found
    return effects, radii


def _number(values: Sequence[object]) -> list[int]:
    numbers: dict[object, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def _divide(keys: Sequence[object]) -> list[Positions]:
    """Positions of each key."""
    numbers = np.array(_number(keys), dtype=np.int64)
    return [np.flatnonzero(numbers == number) for number in range(int(numbers.max(initial=-1)) + 1)]


def curve_table(curves: Sequence[CalibrationCurve]) -> dict[str, list[dict[str, Any]]]:
    """The points of each split as plain values for JSON."""
    return {
        curve.split: [
            {
                "measured": point.measured,
                "rows": point.rows,
                "groups": point.groups,
                "before": dict(point.before),
                "after": dict(point.after),
            }
            for point in curve.points
        ]
        for curve in curves
    }


def format_curves(curves: Sequence[CalibrationCurve]) -> str:
    """Curves as one markdown table: MAPE / median error in per cent before and after, and coverage after."""
    lines = ["| split | measured rows | scored rows | before | after | covered |", "|---|---|---|---|---|---|"]
    for curve in curves:
        for point in curve.points:
            cells = (
                curve.split,
                f"{point.measured} {curve.what}",
                f"{point.rows:,} of {point.groups}",
                f"{_percent(point.before['mape'])} / {_percent(point.before['median_ape'])}",
                f"{_percent(point.after['mape'])} / {_percent(point.after['median_ape'])}",
                _percent(point.after["coverage"]),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _percent(figure: float | None) -> str:
    return "-" if figure is None else f"{100 * figure:.1f}"
