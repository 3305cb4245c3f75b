"""The calibration curve: the error left after some measured rows of a left-out network, or on a left-out chip."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from precision_time.predictor.learning.error_covariance import ErrorCovariance, SetupComparison, predict_errors_at
from precision_time.predictor.learning.intervals import radii_by_regime
from precision_time.predictor.learning.regimes import COVARIANCES
from precision_time.predictor.learning.splits import SPLITS, CurvePlan, configuration_of
from precision_time.predictor.rows.observations import Observation
from precision_time.predictor.scoring.cross_validation import CrossValidation
from precision_time.predictor.scoring.fit_error_covariance import fit_covariance
from precision_time.predictor.scoring.metrics import Metrics, score
from precision_time.predictor.scoring.plots import Form, lay_out, own_style, render_figure, require_matplotlib
from precision_time.predictor.scoring.scoreboard import title_split
from precision_time.storage.errors import InputError

__all__ = [
    "CURVES",
    "CalibrationCurve",
    "CalibrationPoint",
    "curve_table",
    "format_curves",
    "measure_calibration",
    "plot_calibration",
]

Positions = npt.NDArray[np.int64]


#: How corrections are scored after each split.
CURVES: dict[str, CurvePlan] = {name: split.curve for name, split in SPLITS.items() if split.curve is not None}

#: Figures that are drawn: metric, label, color and marker.
_FIGURES = (("mape", "MAPE", "C1", "D"), ("median_ape", "median", "C0", "o"))
_PANELS_IN_LINE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPoint:
    """Scores of the same rows before and after ``measured`` rows of their group correct them.

    ``rows`` counts the distinct scored rows, ``groups`` their networks or GPUs. Each draw scores the group's rows anew,
    so metrics are averages over draws.
    """

    measured: int
    rows: int
    groups: int
    before: Metrics
    after: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationCurve:
    """The points of one split, by the number of measured rows; ``what`` names those rows."""

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
    """Error against number of measured rows, from the out-of-fold predictions of ``result``; nothing is refitted.

    For each left-out network (in ``leave-gpu-out``: each part of a left-out chip) and each of ``draws``, so many of
    its configurations are drawn. One row of each corrects the rows of all other configurations, which are scored.
    Groups with too few configurations are left out of a point, so compare its ``before`` and ``after``. The covariance
    of errors is estimated on the other folds. ``by_source`` draws and scores within one source of the table, like a
    user who measures with the script that the question is about. Raises ``InputError`` for another split.
    """
    if result.split not in CURVES:
        raise InputError("calibration is not measured on this split", got=result.split, expected=", ".join(CURVES))
    if draws < 1 or any(count < 0 for count in rows):
        raise InputError("draws of measured rows", got=f"{draws} draws of {list(rows)}", expected="at least 1 of 0")
    plan, scored = CURVES[result.split], [observations[row] for row in result.rows]
    comparison, errors = SetupComparison([observation.query for observation in scored]), result.log_errors()
    groups = _divide(
        [(plan.group(observation), observation.measurement.source if by_source else "") for observation in scored]
    )
    configurations = np.array(_number([configuration_of(observation) for observation in scored]), dtype=np.int64)
    points = []
    covariances, radii = _learn_elsewhere(result, scored, errors, covariance=plan.covariance, seed=seed)
    for count in rows:
        corrected, shifts, covered, used = [], [], [], 0
        for number, group in enumerate(groups):
            kinds = np.unique(configurations[group])
            fold = int(result.folds[group[0]])
            covariance, radius = covariances.get(fold), radii.get(fold)
            if len(kinds) <= count or covariance is None:
                continue
            used += 1
            for draw in range(draws if count else 1):
                rng = np.random.default_rng([seed, number, draw])
                drawn = rng.permutation(kinds)[:count]
                measured = np.array([rng.choice(group[configurations[group] == kind]) for kind in drawn], np.int64)
                others = group[~np.isin(configurations[group], drawn)]
                prediction = predict_errors_at(
                    comparison, measured, others, errors=errors[measured], covariances=[covariance]
                )
                corrected.append(others)
                shifts.append(prediction.shift)
                if radius is not None:
                    half = np.array([radius[result.regimes[place]] for place in others]) * prediction.narrowing
                    covered.append(np.abs(errors[others] - prediction.shift) <= half)
        if not used:
            continue
        places = np.concatenate(corrected)
        points.append(
            CalibrationPoint(
                measured=count,
                rows=len(np.unique(places)),
                groups=used,
                before=_score(result, places),
                after=_score(result, places, np.concatenate(shifts), np.concatenate(covered) if covered else None),
            )
        )
    return CalibrationCurve(split=result.split, what=plan.what, points=tuple(points))


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
    scored: Sequence[Observation],
    errors: npt.NDArray[np.float64],
    *,
    covariance: str,
    seed: int,
) -> tuple[dict[int, ErrorCovariance], dict[int, Mapping[str, float]]]:
    """For each fold, the covariance of errors and the interval radii, from the rows of all other folds."""
    covariances: dict[int, ErrorCovariance] = {}
    radii: dict[int, Mapping[str, float]] = {}
    pairs = COVARIANCES[covariance].pairs
    for fold in np.unique(result.folds):
        others = np.flatnonzero(result.folds != fold).tolist()
        if pairs is not None:
            queries = [scored[place].query for place in others]
            fitted = fit_covariance(queries, errors[others], result.folds[others], plan=pairs, seed=seed)
            if fitted is not None:
                covariances[int(fold)] = fitted
        by_regime = radii_by_regime(errors[others], [result.regimes[place] for place in others], level=result.level)
        if by_regime:
            radii[int(fold)] = by_regime
    return covariances, radii


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


def plot_calibration(curves: Sequence[CalibrationCurve], *, form: Form = "png") -> bytes:
    """Error against number of measured rows, one panel a split: solid after, dashed before, on the same scored rows.

    Raises ``InputError`` without matplotlib, or when no curve has a point.
    """
    require_matplotlib()
    shown = [curve for curve in curves if curve.points]
    if not shown:
        raise InputError("nothing to draw", got=f"{len(curves)} curves without points", expected="at least one point")
    with own_style():
        figure, panels = lay_out(len(shown), most_in_line=_PANELS_IN_LINE)
        figure.suptitle("Error after measured rows")
        for axes, curve in zip(panels, shown, strict=True):
            places = np.arange(len(curve.points), dtype=np.float64)
            for name, label, color, marker in _FIGURES:
                before = [100 * (point.before[name] or 0.0) for point in curve.points]
                after = [100 * (point.after[name] or 0.0) for point in curve.points]
                axes.plot(places, before, "--", color=color, linewidth=0.8, label=f"{label}, nothing measured")
                axes.plot(places, after, marker, linestyle="-", color=color, markersize=4, label=label)
            axes.set_title(title_split(curve.split), fontsize=8)
            axes.set_xticks(places, [f"{point.measured}\n({point.rows:,})" for point in curve.points])
            axes.set_xlabel(f"measured rows {curve.what} (rows scored)")
            axes.set_ylim(bottom=0.0)
            axes.grid(axis="y", color="0.9")
            axes.set_axisbelow(True)
        panels[0].set_ylabel("absolute error (% of measured)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        return render_figure(figure, form)
