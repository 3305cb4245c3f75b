"""The calibration curve: the error that remains after some measured rows of a left-out network or chip."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from precision_time.predictor.scoring.plots import lay_out, own_style, render_figure, require_matplotlib
from precision_time.predictor.scoring.scoreboard import format_percent, title_split
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

#: How often the measured rows of a group are drawn.
_DRAWS = 5
#: Figures that are drawn: metric, label, color and marker.
_FIGURES = (("mape", "MAPE", "C1", "D"), ("median_ape", "median", "C0", "o"))
_PANELS_IN_LINE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPoint:
    """Scores of the same rows before and after ``measured`` rows of their group correct them.

    ``rows`` counts the distinct scored rows, ``groups`` their networks or GPUs. Each draw scores the rows of its group
    again, so metrics are averages over draws.
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
    result: CrossValidation, observations: Sequence[Observation], *, rows: Sequence[int] = (0, 1, 3, 10), seed: int = 0
) -> CalibrationCurve:
    """Error against number of measured rows, from the out-of-fold predictions of ``result``; nothing is fitted again.

    Each point draws that many configurations of each left-out network (in ``leave-gpu-out``: of each part of a left-out
    chip), five times. One row of each drawn configuration corrects the rows of the group's other configurations, and
    these are scored. A group with too few configurations is left out of a point, so compare a point with its own
    ``before``. The covariance of errors is estimated on the other folds. Raises ``InputError`` for another split.
    """
    if result.split not in CURVES:
        raise InputError("calibration is not measured on this split", got=result.split, expected=", ".join(CURVES))
    if any(count < 0 for count in rows):
        raise InputError("numbers of measured rows", got=list(rows), expected="0 or more each")
    plan, scored = CURVES[result.split], [observations[row] for row in result.rows]
    comparison, errors = SetupComparison([observation.query for observation in scored]), result.log_errors()
    group_numbers = _number([plan.group(observation) for observation in scored])
    groups = [np.flatnonzero(group_numbers == number) for number in np.unique(group_numbers)]
    configurations = _number([configuration_of(observation) for observation in scored])
    covariances, radii = _learn_elsewhere(result, scored, errors, covariance=plan.covariance, seed=seed)
    points = []
    for count in rows:
        corrected, shifts, covered, used = [], [], [], 0
        for number, group in enumerate(groups):
            fold = int(result.folds[group[0]])
            covariance, radius = covariances.get(fold), radii.get(fold)
            if covariance is None:
                continue
            draws = list(_draw(group, configurations[group], count, seed=(seed, number)))
            used += bool(draws)
            for measured, others in draws:
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
        predicted_s, measured_s = result.predicted_s["predictor"][places], result.measured_s[places]
        points.append(
            CalibrationPoint(
                measured=count,
                rows=len(np.unique(places)),
                groups=used,
                before=score(
                    predicted_s, measured_s, covered=None if result.covered is None else result.covered[places]
                ),
                after=score(
                    predicted_s * np.exp(np.concatenate(shifts)),
                    measured_s,
                    covered=np.concatenate(covered) if len(covered) == len(shifts) else None,
                ),
            )
        )
    return CalibrationCurve(split=result.split, what=plan.what, points=tuple(points))


def _draw(
    group: Positions, configurations: Positions, count: int, *, seed: tuple[int, int]
) -> Iterator[tuple[Positions, Positions]]:
    """Positions of ``count`` measured rows and of the rows that they correct, for each draw.

    ``configurations`` are those of the rows of ``group``. Nothing is drawn where all of them would be measured.
    """
    distinct = np.unique(configurations)
    if len(distinct) <= count:
        return
    for draw in range(_DRAWS if count else 1):
        rng = np.random.default_rng([*seed, draw])
        drawn = rng.permutation(distinct)[:count]
        measured = np.array([rng.choice(group[configurations == configuration]) for configuration in drawn], np.int64)
        yield measured, group[~np.isin(configurations, drawn)]


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


def _number(values: Sequence[object]) -> Positions:
    """A number for each value, the same for equal values, in the order of their first appearance."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)


def curve_table(curves: Sequence[CalibrationCurve]) -> dict[str, list[dict[str, Any]]]:
    """The points of each split as plain values for JSON."""
    return {curve.split: [asdict(point) for point in curve.points] for curve in curves}


def format_curves(curves: Sequence[CalibrationCurve]) -> str:
    """Curves as one markdown table: MAPE / median error in per cent before and after, and coverage after."""
    lines = ["| split | measured rows | scored rows | before | after | covered |", "|---|---|---|---|---|---|"]
    for curve in curves:
        for point in curve.points:
            cells = (
                curve.split,
                f"{point.measured} {curve.what}",
                f"{point.rows:,} of {point.groups}",
                f"{format_percent(point.before['mape'])} / {format_percent(point.before['median_ape'])}",
                f"{format_percent(point.after['mape'])} / {format_percent(point.after['median_ape'])}",
                format_percent(point.after["coverage"]),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot_calibration(curves: Sequence[CalibrationCurve]) -> bytes:
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
        return render_figure(figure)
